"""Which of the loaded modules a fresh process could not import, so that their classes must travel whole."""

from __future__ import annotations

import contextlib
import importlib.machinery
import os
import sys
import sysconfig
import threading
from collections.abc import Iterator
from types import ModuleType

import cloudpickle  # type: ignore[import-untyped]

_registering = threading.RLock()


@contextlib.contextmanager
def local_modules_by_value() -> Iterator[None]:
    """Make cloudpickle send the classes and functions of such modules whole while this is open."""
    with _registering:
        known = cloudpickle.list_registry_pickle_by_value()
        modules = [m for m in _loaded() if m.__name__ not in known and not can_import(m)]
        for module in modules:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            for module in modules:
                cloudpickle.unregister_pickle_by_value(module)


def _loaded() -> list[ModuleType]:
    """List the modules that came from a file of the user's own, ``__main__`` aside (it always travels)."""
    return [
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType)
        and name not in ("__main__", "__mp_main__")
        and getattr(module, "__name__", "") == name
        and _is_users(module)
    ]


def _is_users(module: ModuleType) -> bool:
    """Tell a user's module from the installed and built-in ones."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str):
        return getattr(module, "__spec__", None) is None and "." not in module.__name__
    if f"{os.sep}site-packages{os.sep}" in file or f"{os.sep}dist-packages{os.sep}" in file:
        return False
    return not file.startswith(_STANDARD_LIBRARY)


_STANDARD_LIBRARY = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})


def can_import(module: ModuleType) -> bool:
    """Say whether a process with the same ``sys.path`` would find this very file under the module's name."""
    path: list[str] | None = None
    origin: str | None = None
    parts = module.__name__.split(".")
    for end in range(1, len(parts) + 1):
        spec = _find(".".join(parts[:end]), path)
        if spec is None:
            return False
        path = list(spec.submodule_search_locations or [])
        origin = spec.origin
    file = getattr(module, "__file__", None)
    return origin is not None and file is not None and os.path.realpath(origin) == os.path.realpath(file)


def _find(name: str, path: list[str] | None) -> importlib.machinery.ModuleSpec | None:
    """Ask the finders, not ``importlib.util.find_spec``, which answers from the modules already loaded."""
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = find(name, path) if find is not None else None
        if spec is not None:
            return spec  # type: ignore[no-any-return]
    return None
