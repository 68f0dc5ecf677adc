"""Amounts of memory and time: read from options, formatted for people."""

import pytest

from tpukit.errors import ConfigError
from tpukit.io.units import (
    format_bytes,
    format_duration,
    parse_bytes,
    parse_duration,
    three_digits,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("8h30m", 30600), ("45m", 2700), ("90s", 90), ("1d2h", 93600), ("120", 120), ("1.5s", 1.5)],
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "count"),
    [("4GB", 4 * 10**9), ("500MB", 5 * 10**8), ("3.5GiB", 3758096384), ("1k", 1000), ("42", 42)],
)
def test_amounts_of_memory(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "soon", "3 weeks", "-4m"])
def test_invalid_durations(text):
    with pytest.raises(ConfigError, match="invalid duration"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["", "4XB", "-1GB", "GB"])
def test_invalid_amounts_of_memory(text):
    with pytest.raises(ConfigError, match="invalid amount of memory"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [(2**30, "1.00 GiB"), (1.5 * 2**30, "1.50 GiB"), (2**29, "512 MiB"), (3000, "3 KiB")],
)
def test_memory_is_shown_in_powers_of_two(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.54, "1.5s"), (12, "12s"), (200, "3m20s"), (29100, "8h05m"), (3599.7, "1h00m")],
)
def test_durations_are_shown_with_two_units(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.03124, "0.0312"), (810.2, "810"), (1234.5, "1,230"), (19601.0, "19,600")]
)
def test_rates_have_three_digits_and_no_exponent(value, text):
    assert three_digits(value) == text
