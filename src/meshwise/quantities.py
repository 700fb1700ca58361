"""Bytes, seconds, FLOPs and counts as people write them: parse and print."""

from __future__ import annotations

import math
import re

from .errors import JobError

_BYTE_UNITS = {
    "": 1,
    "b": 1,
    **{f"{p}ib": 1 << (10 * (i + 1)) for i, p in enumerate("kmgt")},
    **{f"{p}b": 1000 ** (i + 1) for i, p in enumerate("kmgt")},
    **{p: 1 << (10 * (i + 1)) for i, p in enumerate("kmgt")},  # "2G" as `ulimit` and containers mean it
}


def parse_bytes(text: str | int | float) -> int:
    """Read ``"2GiB"``, ``"500 MB"`` or a plain number of bytes. Raises JobError for anything else."""
    if isinstance(text, (int, float)):
        return int(text)
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zA-Z]*)\s*", text)
    unit = found.group(2).lower() if found else ""
    if not found or unit not in _BYTE_UNITS:
        raise JobError(f"{text!r} is no amount of memory; write it like 2GiB, 500MB or 1073741824.")
    return int(float(found.group(1)) * _BYTE_UNITS[unit])


def format_bytes(num_bytes: float) -> str:
    """Print a number of bytes with three figures in binary units: ``9.13 GiB``."""
    size, unit = float(num_bytes), "B"
    for bigger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(size) < 1024:
            break
        size, unit = size / 1024, bigger
    return f"{size:.0f} B" if unit == "B" else f"{_figures(size)} {unit}"


def format_seconds(seconds: float) -> str:
    """Print a time with three figures: ``12.3 ms``."""
    if not math.isfinite(seconds):
        return str(seconds)
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if abs(seconds) * scale >= 1 or unit == "us":
            return f"{_figures(seconds * scale)} {unit}"
    raise AssertionError


def format_count(number: float, unit: str = "") -> str:
    """Print a large number with three figures and a decimal prefix: ``138 M``, ``989 TFLOP/s``."""
    scaled, prefix = float(number), ""
    for bigger in ("k", "M", "G", "T", "P", "E"):
        if abs(scaled) < 1000:
            break
        scaled, prefix = scaled / 1000, bigger
    return f"{_figures(scaled)} {prefix}{unit}".rstrip()


def _figures(value: float) -> str:
    """Print three significant figures without an exponent."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text and digits > 2 else text
