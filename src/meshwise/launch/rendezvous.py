"""The meeting point of local ranks: a small store that the parent owns, on a port that nobody chose."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Say where the ranks meet; ``libuv`` says which server this build of torch could start."""

    port: int
    libuv: bool
    server: Store | None = field(default=None, repr=False, compare=False)

    def __reduce__(self) -> tuple[object, ...]:
        """Send only the address to a rank: the server stays in the parent."""
        return _address, (self.port, self.libuv)


def _address(port: int, libuv: bool) -> Rendezvous:
    return Rendezvous(port=port, libuv=libuv)


def open_rendezvous() -> Rendezvous:
    """Start the store in this process, reachable from this host only where the build allows it."""
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    try:
        server = _store(port, is_master=True, use_libuv=True, master_listen_fd=listener.fileno())
        listener.detach()  # the server closes it
        return Rendezvous(port=port, libuv=True, server=server)
    except (RuntimeError, TypeError, ValueError):  # a build without libuv, as on Windows
        listener.close()
        server = _store(0, is_master=True, use_libuv=False)
        return Rendezvous(port=server.port, libuv=False, server=server)


def connect(rendezvous: Rendezvous) -> Store:
    """Join the parent's store from a rank."""
    return _store(rendezvous.port, use_libuv=rendezvous.libuv)


def _store(port: int, **options: Any) -> TCPStore:
    return TCPStore(LOOPBACK, port, wait_for_workers=False, **options)
