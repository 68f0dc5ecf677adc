"""`tpukit doctor --hosts`: several hosts compared from this one."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tpukit.commands.output import Output
from tpukit.commands.reports.machine import check_lines, is_failing
from tpukit.errors import ConfigError
from tpukit.io.ranges import shown
from tpukit.probe.hosts.agreement import compare_hosts

HOST = re.compile(r"([\w.-]+@)?[A-Za-z0-9_\[:][\w.:\[\]-]*")


def host_names(text: str) -> list[str]:
    """The hosts of `a,user@b`.

    Raises ConfigError for what is not a host name, and for one alone.
    """
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if not HOST.fullmatch(name):
            raise ConfigError(
                f"--hosts: {shown(name)} is not a host name.", "Write --hosts node1,user@node2."
            )
    if len(set(names)) != len(names) or len(names) < 2:
        raise ConfigError(
            f"--hosts {shown(text)}: hosts are compared, so it takes two or more that differ.",
            "Write --hosts node1,node2.",
        )
    return names


def check_hosts(
    hosts: Sequence[str], data_path: str | None, port: int, output: Output, *, strict: bool,
    verbose: bool,
) -> int:  # fmt: skip
    """Compares the hosts and prints what differs; the exit code."""
    output.text(f"Asking {len(hosts)} hosts over ssh ...")
    results = list(compare_hosts(hosts, data_path, port))
    failing = any(is_failing(result, strict=strict) for result in results)
    for line in check_lines(results, verbose=verbose):
        output.text(line)
    output.text("Not ready." if failing else "Ready to train on all of them.")
    output.result({
        "ok": not failing, "hosts": list(hosts), "checks": [result.as_json() for result in results]
    })  # fmt: skip
    return 1 if failing else 0
