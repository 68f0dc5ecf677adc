"""Fuzzed values of every option of every command."""

import functools
import random

import pytest
from attacked import check, start, told_in, wait
from fuzzed_inputs import mutated
from hypothesis import HealthCheck, given, seed, settings
from runs import TINY

from tpukit import cli

NOWHERE = "/proc/none"
EXAMPLES = 10
WITHOUT_DATA: dict[str, list[str]] = {
    "doctor": ["--quick"],
    "train": ["--task", TINY, "--hw", "cpu", "--set", "samples=0"],
    "summarize-train": ["--hw", "cpu"],
    "test": ["--run", NOWHERE, "--hw", "cpu"],
    "predict": ["--run", NOWHERE, "--hw", "cpu"],
    "probe-batch": ["--task", f"{NOWHERE}.py:Missing", "--hw", "cpu"],
    "data eit": ["--n", "10", "--out", NOWHERE],
    "data dialogues": ["--n", "10", "--out", NOWHERE],
    "data images": ["--n", "10", "--out", NOWHERE],
}
"""Each command, so that a value that is accepted starts no long work."""
STARTS_RANKS = {"--devices": ["--hw", "tpu"]}


@functools.cache
def _options() -> list[tuple[list[str], str]]:
    """Each command with each option that takes a value."""
    found = []
    for words, base in WITHOUT_DATA.items():
        first, *rest = words.split()
        command = cli.load_command(first)
        for word in rest:
            command = command.commands[word]
        for parameter in command.params:
            if parameter.opts[0].startswith("--") and not getattr(parameter, "is_flag", False):
                found.append(([*words.split(), *base], parameter.opts[0]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", range(10))
def test_a_fuzzed_value_of_an_option(number, tmp_path_factory):
    @seed(number)
    @settings(max_examples=EXAMPLES, database=None, deadline=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(mutated("options"))
    def attack(content: bytes) -> None:
        command, option = random.Random(f"{number}{content!r}").choice(_options())
        text = content.replace(b"\0", b"").decode(errors="replace")
        folder = tmp_path_factory.mktemp("options")
        started = start([*command, *STARTS_RANKS.get(option, []), option, text], folder)
        code = wait(started)
        if code != 1 or command[0] != "doctor":  # which found something
            check(code, told_in(folder))

    attack()
