"""A user's module that a step reads, for `test_python_state.py`: globals, functions, classes."""

from contextvars import ContextVar
from typing import ClassVar

FACTOR = 1
TABLE = {"loss": 1.0}
VAR = ContextVar("VAR", default=1.0)


def shifted(x, by=1.0, *, times=(1.0,)):
    return x * times[0] + by


def scaled(factor):
    def scale(x):
        return x * factor

    return scale


def counting():
    count = 0

    def counted():
        nonlocal count
        count += 1
        return count

    return counted


class Meter:
    """With attributes that no dict holds."""

    __slots__ = ("later", "value")

    def __init__(self):
        self.value = 1.0


class Scale:
    power = 1.0
    powers: ClassVar = [1.0]

    def __init__(self):
        self.factor = 1.0

    @property
    def both(self):
        return self.factor * self.power

    @staticmethod
    def static(x):
        return x

    def __call__(self, x):
        return x * self.both


class Half(Scale):
    pass
