"""What replicas and stages tell one another, in seconds: gradients (and, with ZeRO 3, parameters), activations."""

from __future__ import annotations

from collections.abc import Sequence

from ..hardware.cluster import Cluster
from ..layout import Layout
from .links import collective_seconds, is_near, message_seconds
from .stage import StageCost
from .time import Transfer

LEAST_MESSAGE_SECONDS = 2.5e-5  # one message between two processes of a host, where nothing was measured
HOST_BYTES_PER_SECOND = 5e9  # copying between them, where nothing was measured
# What Python does around one message, and around the meetings of a step (losses, shares, norms), in smallest operations
# of the device: measured with a network of 784-256-10 on two cores, where little else takes time.
SEND_LAUNCHES, RECEIVE_LAUNCHES = 24, 20
REPLICA_LAUNCHES, PIPELINE_LAUNCHES = 150, 100
FIRST_BUCKET = 25e6  # bytes; what the last bucket of an overlapped exchange holds back (arXiv:2006.15704)


def exchange_seconds(cluster: Cluster, layout: Layout, stages: Sequence[StageCost], num_microbatches: int) -> float:
    """Give what the exchange of a rank that holds ``stages`` adds to a step: what no computing hides."""
    if layout.dp == 1:
        return 0.0
    num_bytes = sum(s.gradient_bytes for s in stages)
    if cluster.is_here:
        return _here(cluster, layout.dp, num_bytes)
    stride = layout.tp * layout.pp
    kind = "all-reduce" if layout.zero == 0 else "reduce-scatter"
    reduce = collective_seconds(cluster, kind, num_bytes, size=layout.dp, stride=stride)
    backward = sum(s.seconds.backward + s.tensor_backward for s in stages)
    if layout.zero == 3:
        return _gathered(cluster, layout, stages, num_microbatches, reduce)
    gather = 0.0
    if layout.zero:
        parameters = sum(s.parameter_bytes for s in stages)
        gather = collective_seconds(cluster, "all-gather", parameters, size=layout.dp, stride=stride)
    last = reduce * min(1.0, FIRST_BUCKET / num_bytes) if num_bytes else 0.0
    forward = sum(s.seconds.forward + s.tensor_forward for s in stages)
    return beside(cluster, reduce, backward, least=last) + beside(cluster, gather, forward)


def beside(cluster: Cluster, told: float, computing: float, least: float = 0.0) -> float:
    """Give what communication beside computing adds: what is not hidden, and by how much it slows computing down.

    Of the time for which both run, ``overlap_slowdown`` says how much longer computing takes.
    """
    slow = cluster.overlap_slowdown
    both = min(told - least, computing * slow)
    return least + max(0.0, told - least - computing * slow) + both * (1 - 1 / slow)


def _here(cluster: Cluster, dp: int, num_bytes: float) -> float:
    """Read the measured exchange of replicas on this host."""
    table = cluster.table("exchange", dp)
    if table is not None:
        return table.seconds(num_bytes)
    moved = num_bytes * (dp + 1) / dp  # each adds up its share of all rows
    return 4 * LEAST_MESSAGE_SECONDS + moved / cluster.device.bytes_per_second


def _gathered(
    cluster: Cluster, layout: Layout, stages: Sequence[StageCost], num_microbatches: int, reduce: float
) -> float:
    """Price ZeRO 3: parameters are gathered for each forward and backward, gradients scattered, beside computing."""
    stride = layout.tp * layout.pp
    parameters = sum(s.parameter_bytes for s in stages)
    units = max(1, sum(s.num_units for s in stages))
    gather = collective_seconds(cluster, "all-gather", parameters, size=layout.dp, stride=stride)
    forward = sum(s.seconds.forward + s.tensor_forward for s in stages)
    backward = sum(s.seconds.backward + s.tensor_backward for s in stages) + (forward if layout.recompute else 0.0)
    exposed = beside(cluster, gather, forward, least=gather / units)
    exposed += beside(cluster, gather + reduce, backward, least=reduce / units)
    return num_microbatches * exposed


def meeting_seconds(cluster: Cluster, layout: Layout) -> float:
    """Give what ranks of this host spend once a step on telling one another losses, norms and that they are done."""
    if not cluster.is_here:
        return 0.0
    launches = REPLICA_LAUNCHES * (layout.dp > 1) + PIPELINE_LAUNCHES * (layout.pp > 1)
    return launches * cluster.device.launch_seconds


def transfer_of(cluster: Cluster, layout: Layout, stages: Sequence[StageCost]) -> Transfer:
    """Price handing values over at each boundary between stages."""
    if layout.pp == 1:
        return Transfer()
    link, send = [], []
    for s, stage in enumerate(stages[:-1]):
        num_bytes = stage.given_bytes
        ends = (s % layout.pp) * layout.tp, ((s + 1) % layout.pp) * layout.tp  # of the first replica
        if cluster.is_here and is_near(cluster, *ends):
            table, own = cluster.table("message", 2), cluster.table("send", 2)
            whole = table.seconds(num_bytes) if table else LEAST_MESSAGE_SECONDS + num_bytes / HOST_BYTES_PER_SECOND
            least = table.seconds(1.0) if table else LEAST_MESSAGE_SECONDS
            copied = own.seconds(num_bytes) if own else whole - least  # to where both ranks can read it
            link.append(max(0.0, whole - copied))
            send.append(copied + SEND_LAUNCHES * cluster.device.launch_seconds)
        else:
            link.append(message_seconds(cluster, num_bytes, *ends))
            send.append(0.0)
    receive = RECEIVE_LAUNCHES * cluster.device.launch_seconds if cluster.is_here else 0.0
    return Transfer(link=tuple(link), send=tuple(send), receive=receive)
