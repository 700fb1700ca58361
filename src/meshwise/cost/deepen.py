"""From a model with few layers to one with many: the layers of a deep model are alike, so a few are counted."""

from __future__ import annotations

import re
from dataclasses import replace

from .profile import ParameterProfile, Profile, UnitProfile


def deepened(profile: Profile, path: str, layers: int) -> Profile:
    """Give the profile of a model with more layers at ``path``: first and last as counted, those between as the second.

    ``profile`` is of one with at least three layers.
    """
    owner = re.compile(rf"{re.escape(path)}\.(\d+)(?=\.|$|#)")
    counted = 1 + max(int(found[1]) for u in profile.units if (found := owner.match(u.name)))
    new: list[UnitProfile] = []
    for k in range(layers):
        source = 0 if k == 0 else counted - 1 if k == layers - 1 else 1
        new += [
            _renamed(u, owner, path, k)
            for u in profile.units
            if (found := owner.match(u.name)) and int(found[1]) == source
        ]
    inside = [i for i, u in enumerate(profile.units) if owner.match(u.name)]
    units = (*profile.units[: inside[0]], *new, *profile.units[inside[-1] + 1 :])
    return replace(profile, units=units, parameters=_parameters(profile, owner, path, layers))


def _parameters(profile: Profile, owner: re.Pattern[str], path: str, layers: int) -> dict[str, ParameterProfile]:
    found: dict[str, ParameterProfile] = {}
    for name, p in profile.parameters.items():
        layer = owner.match(name)
        if layer is None:
            found[name] = p
        elif int(layer[1]) == 1:
            for k in range(layers):
                new = owner.sub(f"{path}.{k}", name, count=1)
                found[new] = replace(p, name=new)
    return found


def _renamed(unit: UnitProfile, owner: re.Pattern[str], path: str, layer: int) -> UnitProfile:
    def rename(name: str) -> str:
        return owner.sub(f"{path}.{layer}", name, count=1) if owner.match(name) else name

    return replace(unit, name=rename(unit.name), params=tuple(map(rename, unit.params)))
