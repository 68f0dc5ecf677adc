"""Ranges that numbers given by users must lie in."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from tpukit.errors import ConfigError

LARGEST_COUNT = 10**12
LARGEST_BATCH = 2**31 - 1
LARGEST_SEED = 2**64 - 1


@dataclass(frozen=True)
class Range:
    """An interval of numbers; NaN lies in none."""

    low: float
    high: float
    whole: bool = True
    """Whole numbers only."""
    includes_low: bool = True
    includes_high: bool = True

    def __contains__(self, value: object) -> bool:
        kinds = (int,) if self.whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds):
            return False
        above = self.low < value or (self.includes_low and value == self.low)
        below = value < self.high or (self.includes_high and value == self.high)
        return above and below

    def __str__(self) -> str:
        ends = "[" if self.includes_low else "(", "]" if self.includes_high else ")"
        return f"{ends[0]}{self.low}, {self.high}{ends[1]}"

    def problem(self, name: str, value: Any) -> str:
        """`--lr inf is not a number in [0, 1000].`"""
        kind = "whole number" if self.whole else "number"
        return f"{name} {shown(value)} is not a {kind} in {self}."


COUNT = Range(1, LARGEST_COUNT)
BATCH = Range(1, LARGEST_BATCH)
SEED = Range(0, LARGEST_SEED)
FROM_ZERO = Range(0, 1000, whole=False)
DECAY = Range(0, 1, whole=False, includes_high=False)


def setting(default: Any, allowed: Range | None = None, **facts: Any) -> Any:
    """A field of a dataclass of settings with the range of its number and further facts.

    Of a training setting: panel, where `--help` shows its option (None: `--set` alone reaches it),
    and decides and earlier (see `TaskSettings`); of any option: unit, one of `option_sets.UNITS`,
    and metavar, how `--help` shows its value.
    """
    return field(default=default, metadata={"range": allowed, **facts})


def ranges_of(settings: Any) -> dict[str, Range]:
    """The range of each number among the fields of a dataclass."""
    found = {entry.name: entry.metadata.get("range") for entry in fields(settings)}
    return {name: allowed for name, allowed in found.items() if allowed is not None}


def shown(value: Any) -> str:
    """A value as Python writes it, shortened."""
    try:
        text = repr(value)
    except ValueError:  # Python does not write more than 4300 digits
        return "of thousands of digits"
    return text if len(text) <= 80 else f"{text[:60]}..."


OTHER_FLAGS = {"step_mode": ("--steps",), "devices": ("--devices", "--nproc"),
               "settings": ("--set",), "inputs": ("--input",)}  # fmt: skip
"""Options that are not named as their field alone is."""


def flags(name: str) -> tuple[str, ...]:
    """The names of a setting's option, the first of which errors give."""
    return OTHER_FLAGS.get(name, (f"--{name.replace('_', '-')}",))


def flag(name: str) -> str:
    """How a user writes the setting: `--global-batch-size`."""
    return flags(name)[0]


def range_problems(settings: Any, name: Callable[[str], str] = flag) -> list[str]:
    """A sentence for each number in a dataclass outside its range; None was not given."""
    values = vars(settings)
    return [
        allowed.problem(name(key), values[key])
        for key, allowed in ranges_of(settings).items()
        if values[key] is not None and values[key] not in allowed
    ]


def require_in_range(settings: Any, hint: str) -> None:
    """Raises ConfigError for the numbers in a dataclass outside their ranges."""
    if problems := range_problems(settings):
        raise ConfigError(" ".join(problems), hint)
