"""Fuzzed values of every option of every command."""

import functools
import random
import tempfile
from pathlib import Path

from runs import TINY

from campaign.commands import check, start, told_in, wait
from tpukit import cli

NOWHERE = "/proc/none"
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


def try_option(path: Path, content: bytes) -> None:
    """An option of a command, chosen by the attack (`path`) and the value, with this value."""
    command, option = random.Random(f"{path.name}{content!r}").choice(_options())
    text = content.replace(b"\0", b"").decode(errors="replace")
    argv = [*command, *STARTS_RANKS.get(option, []), option, text]
    with tempfile.TemporaryDirectory() as place:
        started = start(argv, Path(place))
        code = wait(started)
        assert (code == 1 and argv[0] == "doctor") or check(code, told_in(Path(place))) is not None
