"""Amounts of memory and time, read from options and formatted for people."""

import re
from decimal import Decimal

from tpukit.errors import ConfigError

GIB = 2**30
LARGEST_SECONDS = 10 * 365 * 86400
LARGEST = 2**60
"""Largest size in bytes."""
_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
          "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}  # fmt: skip


def parse_bytes(text: str) -> int:
    """Bytes in `4GB` (10^9), `4GiB` (2^30), `500MB` or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", text.strip().lower())
    if not match:
        raise ConfigError(f"invalid amount of memory {text!r}.", "Write 4GB, 500MB or 3.5GiB.")
    count = Decimal(match[1]) * _BYTES[match[2] or ""]
    if count > LARGEST:
        raise ConfigError(f"{count:.3g} bytes are more than {LARGEST}.", "Write 4GB or 500MB.")
    return int(count)


def format_bytes(count: float) -> str:
    """`1.80 GiB`, `512 MiB`, `12 KiB`."""
    if count >= GIB:
        return f"{count / GIB:.2f} GiB"
    if count >= 2**20:
        return f"{count / 2**20:.0f} MiB"
    return f"{count / 2**10:.0f} KiB"


def parse_duration(text: str) -> float:
    """Seconds in `8h30m`, `45m`, `90s`, `1d2h` or a plain number of seconds."""
    match = re.fullmatch(
        r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m(?:in)?)?(?:(\d+(?:\.\d+)?)s?)?", text.strip().lower()
    )
    if not match or not any(match.groups()):
        raise ConfigError(f"invalid duration {text!r}.", "Write 8h30m, 45m or 90s.")
    days, hours, minutes, seconds = (float(part or 0) for part in match.groups())
    total = days * 86400 + hours * 3600 + minutes * 60 + seconds
    if total > LARGEST_SECONDS:
        raise ConfigError(f"{total:.3g} seconds are more than ten years.", "Write 8h30m or 45m.")
    return total


def format_duration(seconds: float) -> str:
    """`21d04h`, `8h05m`, `3m20s`, `12s`, `1.5s`."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole >= 3 * 86400:
        return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"


def three_digits(value: float) -> str:
    """`0.0312`, `810`, `19,600`."""
    return f"{float(f'{value:.3g}'):,g}"


def counted(number: int, noun: str) -> str:
    """`1 file`, `2 files`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
