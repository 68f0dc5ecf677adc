"""Help in a narrow terminal, and under older typers."""

from __future__ import annotations

import pytest

from tpukit.cli import COMMANDS, load_command, run


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS), ["data", "eit"]])
def test_help_fits_forty_columns(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    assert run([*command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert max(len(line) for line in shown.splitlines()) <= 40
    assert "…" not in shown


@pytest.mark.parametrize("name", ["doctor", "train", "test"])
def test_no_default_is_shown_where_there_is_none(name):
    """Typer 0.12 writes `[default: None]` otherwise."""
    without = [p for p in load_command(name).params if p.default is None]
    assert without
    assert not any(p.show_default for p in without)
