"""Plan a job: measure (or look up) the hardware, price every layout, run the best few, pick one and say why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .cost.estimate import (
    CPU_RULES,
    GPU_RULES,
    NOTHING,
    Pricing,
    Workload,
    cut_stages,
    fitted_rules,
    measured_prices,
    memory_of,
)
from .cost.profile import Profile
from .cost.stage import StageTable, UnitPrice
from .errors import LayoutError
from .events import Tell, silent
from .grid import microbatch_sizes, slot_ranges
from .hardware.cluster import Cluster
from .hardware.limits import MemoryLimit
from .job import Job
from .layout import Layout
from .planner.advice import advise
from .planner.search import Found, Task, search
from .planner.space import Space
from .plans import Candidate, Plan
from .quantities import parse_bytes

if TYPE_CHECKING:
    from .runtime.timed import Ranks

NUM_MEASURED = 3  # layouts that are run when measuring
SLOW_STEP = 0.3  # seconds; of longer steps fewer are run
CLOSE = 1.25  # a layout predicted to take this much longer than the best is not run
HEADROOM = 1.1  # a rank must have so much more room than is predicted; see benchmarks/predictions for its error
HERE = Space(runnable=True)
THERE = Space(runnable=False, virtual=(2, 4))


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Hold what a plan rests on: the job, what was found out about model and hardware, and why memory is limited.

    ``counts``: the numbers of devices that may be used.
    """

    job: Job
    task: Task
    limit: MemoryLimit | None
    space: Space
    threads: int = 1
    counts: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def profile(self) -> Profile:
        """Give the profile at the job's own microbatch size, or the first one."""
        return self.task.profiles[0]


def plan(
    job: Job,
    *,
    devices: int | None = None,
    cluster: str | Cluster | None = None,
    memory: str | int | None = None,
    measure: bool = True,
    threads: int = 1,
    tell: Tell = silent,
) -> Plan:
    """Choose the layout of a job for ``devices`` of this machine (default: up to all), or for a ``cluster`` elsewhere.

    ``cluster``: a name like ``"2x8xH100"``, a JSON file, or a Cluster. ``memory``: what one device may use (default:
    what this machine has free for it). ``measure`` runs the best few layouts for a few steps each and takes the
    fastest. ``tell`` hears what is being done. Starts ranks of its own; one process calls it, and not under torchrun.
    The job's model is not changed. Raises LayoutError, with the numbers, where no layout fits.
    """
    if cluster is None:
        surveyed = survey(job, devices=devices, memory=memory, threads=threads, tell=tell)
    else:
        surveyed = survey_elsewhere(job, cluster, devices=devices, memory=memory, tell=tell)
    return choose(surveyed, measure=measure and cluster is None, tell=tell)


def choose(surveyed: Survey, *, measure: bool, tell: Tell = silent, space: Space | None = None) -> Plan:
    """Search what was surveyed, run the best few where wanted, and make the plan."""
    tell("pricing layouts")
    found = search_counts(surveyed, space or surveyed.space)
    if not found.candidates:
        raise LayoutError(nothing_fits(surveyed, found))
    if measure and surveyed.task.num_devices > 1:
        found = replace(found, candidates=tuple(_measured(surveyed, found.candidates, tell)))
    return make_plan(surveyed, found)


def search_counts(surveyed: Survey, space: Space) -> Found:
    """Search all numbers of devices that may be used; of layouts that take the same time, fewer devices come first."""
    counts = surveyed.counts or (surveyed.task.num_devices,)
    parts = [search(replace(surveyed.task, num_devices=count), space) for count in sorted(counts)]
    candidates = sorted((c for part in parts for c in part.candidates), key=lambda c: c.seconds)
    return Found(candidates=tuple(candidates), rejected=tuple(r for part in parts for r in part.rejected))


def make_plan(surveyed: Survey, found: Found) -> Plan:
    """Make the plan of what a search found: its first candidate is chosen."""
    task = surveyed.task
    chosen = found.candidates[0]
    return Plan(
        job=surveyed.job.name,
        cluster=task.cluster.name,
        num_devices=task.num_devices,
        batch_size=surveyed.job.batch_size,
        chosen=chosen,
        others=found.candidates[1:],
        rejected=found.rejected,
        limit_bytes=task.limit_bytes,
        advice=advise(task, found, chosen),
        notes=surveyed.notes,
    )


def nothing_fits(surveyed: Survey, found: Found) -> str:
    """Say for every layout why it cannot be taken, and what would help."""
    lines = "\n".join(f"  {r}" for r in found.rejected)
    why = "" if surveyed.limit is None else f" (a device may use {surveyed.limit})"
    return (
        f"no layout of {surveyed.task.num_devices} devices fits this job{why}:\n{lines}\n"
        "Use more devices, a smaller microbatch_size, or an optimizer that keeps less."
    )


# ---- this machine ----------------------------------------------------------------------------------------------


def survey(
    job: Job,
    *,
    devices: int | None = None,
    memory: str | int | None = None,
    threads: int = 1,
    seconds: float = 1.0,
    tell: Tell = silent,
) -> Survey:
    """Time the job's units and probe the machine, in ranks of their own."""
    from .launch.environment import detect, num_devices
    from .launch.local import run_ranks
    from .probing import probed

    if detect().world_size > 1:
        raise LayoutError(
            "planning starts ranks of its own, so one process calls it, not each rank of torchrun; there, "
            'layout="auto" plans among the ranks that are running.'
        )
    count = devices if devices is not None else num_devices()
    _check_devices(count)
    limit = memory_limit(count, memory)
    cluster = probed(count, threads=threads, tell=tell)
    tell(f"timing the model's units on {count} device{'s' if count > 1 else ''}")
    sizes = microbatch_choices(job)
    ranks = run_ranks(
        lambda context: _profile_rank(context, job, sizes, limit.bytes, seconds),
        count,
        threads=threads,
        name=job.name,
    )
    counts = (count,) if devices is not None else tuple(sorted({count, *(1 << k for k in range(12) if 1 << k < count)}))
    return replace(survey_of(job, cluster, count, ranks[0], limit, threads), counts=counts)


def _check_devices(count: int) -> None:
    if count < 1:
        raise LayoutError(f"devices={count}; it must be at least 1.")


def memory_limit(count: int, memory: str | int | None) -> MemoryLimit:
    """Find what one device may use: as asked for, else what this machine has for it."""
    from .probing import machine_memory

    if memory is not None:
        return MemoryLimit(bytes=float(parse_bytes(memory)), reason="as asked for", per_process=True)
    return machine_memory(count)


def microbatch_choices(job: Job) -> tuple[Any, ...]:
    """Give the microbatch sizes that may be taken: the job's own, or with "auto" powers of two up to the batch."""
    if job.microbatch_size != "auto":
        return (job.microbatch,)
    least = max(1, -(-job.batch_size // 32))
    sizes = [s for k in range(20) if least <= (s := 1 << k) < job.batch_size]
    return tuple(dict.fromkeys([*sizes, job.batch_size]))


def _profile_rank(context: Any, job: Job, sizes: Sequence[Any], limit: float, seconds: float) -> list[Profile] | None:
    from .launch.group import OpenGroup

    found = profile_here(job, context.device, OpenGroup(), sizes, limit, seconds / len(sizes))
    return found if context.rank == 0 else None


def profile_here(
    job: Job, device: Any, ranks: Ranks, sizes: Sequence[Any], limit: float, seconds: float
) -> list[Profile]:
    """Time the job at each microbatch size. Every rank calls it, all get the same."""
    from .runtime.timed import Budget, time_job
    from .trials import with_own_model

    return [
        time_job(
            with_own_model(job).with_fields(microbatch_size=size, on_nonfinite="skip"),
            device,
            ranks=ranks,
            fits=lambda profile: fits_alone(job, profile, limit),
            budget=Budget(seconds=seconds),
        )
        for size in sizes
    ]


def fits_alone(job: Job, profile: Profile, limit: float) -> bool:
    """Tell whether whole steps fit on one device, as counted and with much room: nothing is lost where they could."""
    workload = replace(workload_of(job, profile), num_microbatches=2)
    table = StageTable(profile, [UnitPrice(seconds=NOTHING)] * len(profile.units))
    rank = memory_of(profile, workload, Layout(), cut_stages(table, ()), CPU_RULES)[0]
    return 1.3 * rank.reserved <= limit


def survey_of(
    job: Job, cluster: Cluster, count: int, profiles: list[Profile], limit: MemoryLimit, threads: int
) -> Survey:
    """Put profiles that were timed here, the machine and its limit together."""
    rules = CPU_RULES if cluster.device.kind == "cpu" else GPU_RULES
    workloads = [workload_of(job, p) for p in profiles]
    pricings = [
        Pricing(table=StageTable(p, measured_prices(p)), rules=fitted_rules(p, w, rules))
        for p, w in zip(profiles, workloads, strict=True)
    ]
    known = {id(p): pricing for p, pricing in zip(profiles, pricings, strict=True)}
    task = Task(
        profiles=profiles,
        workloads=workloads,
        cluster=cluster,
        num_devices=count,
        price=lambda p, layout: known[id(p)],
        limit_bytes=limit.bytes,
        blocked=profiles[0].blocked,
        fixed_cuts=fixed_cuts(job, profiles[0]),
        named_stages=len(job.cuts) + 1 if job.cuts else 0,
        headroom=HEADROOM,
    )
    return Survey(job=job, task=task, limit=limit, space=HERE, threads=threads, notes=profiles[0].notes)


def workload_of(job: Job, profile: Profile) -> Workload:
    """Give what a step of the job holds at the microbatch size of a profile."""
    own = job.microbatch if job.microbatch_size != "auto" else profile.microbatch_size
    sizes = microbatch_sizes(job.batch_size, own)
    count = len(sizes) if max(sizes) == profile.microbatch_size else -(-job.batch_size // profile.microbatch_size)
    return Workload(
        batch_size=job.batch_size,
        num_microbatches=count,
        slots=len(slot_ranges(count, job.slots)),
        clips=job.clip_grad_norm is not None,
        coupled=count > 1 and any(u.is_row for u in profile.units),
        couples_loss=count > 1 and job.loss_kind == "batch",
    )


def fixed_cuts(job: Job, profile: Profile) -> Callable[[int], tuple[int, ...] | None]:
    """Give where the job itself says that stages begin."""
    names = [u.name for u in profile.units]

    def cuts(num_stages: int) -> tuple[int, ...] | None:
        if len(job.cuts) != num_stages - 1 or not job.cuts:
            return None
        found = [
            next((k for k, n in enumerate(names) if n.split("#")[0] == cut or n.startswith(f"{cut}.")), 0)
            for cut in job.cuts
        ]
        return tuple(found) if all(found) and sorted(set(found)) == found else None

    return cuts


# ---- running the best few ----------------------------------------------------------------------------------


def sensible(candidates: Sequence[Candidate], most: int) -> list[Candidate]:
    """Give the best few that are worth running: near the best, and of each kind (dp, pp, both) the best one."""
    best = candidates[0].estimate.seconds
    near = [c for c in candidates if c.estimate.seconds <= CLOSE * best]
    kinds: dict[Any, Candidate] = {}
    for c in candidates:
        kinds.setdefault((c.layout.dp, c.layout.pp, c.microbatch_size), c)
    firsts = [c for c in kinds.values() if c.estimate.seconds <= 2 * CLOSE * best]
    chosen: list[Candidate] = []
    for c in (candidates[0], *firsts, *near):
        if c not in chosen:
            chosen.append(c)
    return chosen[:most]


def _measured(surveyed: Survey, candidates: Sequence[Candidate], tell: Tell) -> list[Candidate]:
    """Run the best few; give all candidates, the measured ones first, fastest first."""
    from .trials import Trial, Turn, run_trials

    few = sensible(candidates, NUM_MEASURED)
    trials = [Trial(layout=c.layout, cuts=c.cuts or None) for c in few]
    jobs = [surveyed.job.with_fields(microbatch_size=size_for(surveyed.job, c)) for c in few]
    slow = few[0].estimate.seconds > SLOW_STEP
    turn, turns = Turn(seconds=0.5, min_steps=2 if slow else 3, look=False), 2 if slow else 3
    if len({c.microbatch_size for c in few}) == 1:
        run_trials(jobs[0], trials, turn=turn, turns=turns, threads=surveyed.threads, tell=tell)
    else:
        for job, trial in zip(jobs, trials, strict=True):
            run_trials(job, [trial], turn=turn, turns=2, threads=surveyed.threads, tell=tell)
    ran = [
        replace(c, measured_seconds=t.median, measured_bytes=max(t.peaks) if t.peaks else None)
        for c, t in zip(few, trials, strict=True)
        if not t.error
    ]
    if not ran:
        raise LayoutError(f"none of the best layouts could be run: {trials[0].layout}: {trials[0].error}")
    rest = [c for c in candidates if c not in few]
    return [*sorted(ran, key=lambda c: c.seconds), *rest]


def size_for(job: Job, candidate: Candidate) -> Any:
    """Give the microbatch size to run a candidate with: the job's own (maybe a list) where it is not open."""
    return candidate.microbatch_size if job.microbatch_size == "auto" else job.microbatch_size


# ---- a cluster elsewhere -------------------------------------------------------------------------------------


def survey_elsewhere(
    job: Job,
    cluster: str | Cluster,
    *,
    devices: int | None = None,
    memory: str | int | None = None,
    tell: Tell = silent,
) -> Survey:
    """Count the model on fake tensors and price it by the facts of a cluster that is not here."""
    from .cost.roofline import named_pricing
    from .hardware.named import named_cluster
    from .runtime.elsewhere import profiles_elsewhere

    where = named_cluster(cluster) if isinstance(cluster, str) else cluster
    count = where.num_devices if devices is None else devices
    if not 1 <= count <= where.num_devices:
        raise LayoutError(f"devices={devices}, but {where.name} has {where.num_devices}.")
    tell(f"counting the model for {where.name}")
    profiles = profiles_elsewhere(job, microbatch_choices_elsewhere(job))
    limit = MemoryLimit(bytes=where.device.memory_bytes, reason=f"{where.device.name}'s memory", per_process=True)
    if memory is not None:
        limit = MemoryLimit(bytes=float(parse_bytes(memory)), reason="as asked for", per_process=True)
    task = Task(
        profiles=profiles,
        workloads=[workload_of(job, p) for p in profiles],
        cluster=where,
        num_devices=count,
        price=named_pricing(where),
        limit_bytes=limit.bytes,
        blocked=profiles[0].blocked,
        fixed_cuts=fixed_cuts(job, profiles[0]),
        named_stages=len(job.cuts) + 1 if job.cuts else 0,
    )
    return Survey(job=job, task=task, limit=limit, space=THERE, notes=profiles[0].notes)


def microbatch_choices_elsewhere(job: Job) -> tuple[int, ...]:
    """Give the microbatch sizes to price: the job's own, or a few small ones where it states none."""
    if job.microbatch_size not in (None, "auto"):
        own = job.microbatch
        return (own,) if isinstance(own, int) else (max(own),)
    return tuple(s for s in (1, 2, 4, 8) if s <= job.batch_size)
