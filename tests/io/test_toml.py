"""What `toml_text` writes, TOML reads as the same value."""

import datetime
import math
import tomllib
from pathlib import Path

import pytest

from tpukit.io.toml import has_form, toml_text


def read(text):
    return tomllib.loads(f"value = {text}")["value"]


@pytest.mark.parametrize(
    "value",
    [
        True, 3, -0.5, 1e-9, math.inf, "", 'a "b"\n\tc', "ä 中", "12", datetime.date(2026, 1, 2),
        datetime.time(8, 30), [], [1, [2.5, "x"]], {}, {"a b": {"c.d": [True, {"e": "f"}]}, "": 1},
    ],
)  # fmt: skip
def test_a_value_comes_back(value):
    assert has_form(value)
    found = read(toml_text(value))
    assert (found, type(found)) == (value, type(value))


def test_a_tuple_becomes_a_list():
    assert has_form((1, ("a",)))
    assert read(toml_text((1, ("a",)))) == [1, ["a"]]


@pytest.mark.parametrize(
    "value", [None, object(), Path("a"), [1, None], {"a": {1: 2}}, {"a": [len]}]
)
def test_what_has_no_form(value):
    assert not has_form(value)
