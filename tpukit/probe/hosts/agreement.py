"""The checks of `doctor --hosts`: the first host's answers beside the others'."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from tpukit.probe.hosts.remote_agent import RemoteAgent, RemoteError
from tpukit.probe.machine.checks.verdict import Result, Verdict, failed, passed, skipped, warned

CLOCK_SECONDS = 5.0
"""Clocks that differ by more are worth a word: logs, locks and time limits go by them."""


@dataclass(frozen=True)
class Answers:
    """What each host answered, and why some could not."""

    good: Mapping[str, Any]
    bad: Mapping[str, str]


def compare_hosts(hosts: Sequence[str], data_path: str | None, port: int) -> Iterator[Result]:
    """Results of all checks; hosts that are not reached are left out of those after the first, and
    fewer than two are not compared."""
    with ExitStack() as stack, ThreadPoolExecutor(len(hosts)) as pool:
        agents, bad = [], {}
        for host in hosts:
            try:
                agents.append(stack.enter_context(RemoteAgent(host)))
            except RemoteError as error:
                bad[host] = str(error)

        def ask_all(
            ask: Callable[[RemoteAgent], Any], asked: Sequence[RemoteAgent] | None = None
        ) -> Answers:
            return _answers(pool, ask, agents if asked is None else asked)

        versions = ask_all(lambda agent: agent.ask("versions"))
        yield Result("hosts", "Hosts that answer", _reached(versions, bad))
        agents = [agent for agent in agents if agent.host in versions.good]
        if len(agents) < 2:
            return
        yield Result("host-versions", "The same versions", _same_versions(versions.good))
        yield Result("host-data", "The same data", _same_data(ask_all, data_path))
        yield Result("host-clocks", "Clocks", compare_clocks(ask_all(_offset).good))
        yield Result("host-ports", "Each reaches the others", _ports(ask_all, agents, port))


AskAll = Callable[..., Answers]


def _answers(
    pool: ThreadPoolExecutor, ask: Callable[[RemoteAgent], Any], agents: Sequence[RemoteAgent]
) -> Answers:
    good: dict[str, Any] = {}
    bad: dict[str, str] = {}

    def one(agent: RemoteAgent) -> None:
        try:
            good[agent.host] = ask(agent)
        except RemoteError as error:
            bad[agent.host] = str(error)

    list(pool.map(one, agents))
    order = [agent.host for agent in agents]
    return Answers({h: good[h] for h in order if h in good}, {h: bad[h] for h in order if h in bad})


def _reached(versions: Answers, bad: Mapping[str, str]) -> Verdict:
    problems = [f"{host}: {why}" for host, why in {**bad, **versions.bad}.items()]
    if problems:
        return failed(
            "; ".join(problems),
            "ssh must reach each host without a password, and tpukit must be installed there at"
            " the same place.",
        )
    return passed(", ".join(versions.good))


def _same_versions(versions: Mapping[str, Mapping[str, str]]) -> Verdict:
    problems = []
    first = next(iter(versions), "")
    expected = versions.get(first, {})
    for host, found in versions.items():
        differing = [
            f"{name} {found.get(name, 'missing')} ({first}: {expected.get(name, 'missing')})"
            for name in {**expected, **found}
            if found.get(name) != expected.get(name)
        ]
        problems += [f"{host} has {', '.join(differing)}"] if differing else []
    if problems:
        return failed("; ".join(problems), "Give all hosts the same installation.")
    return passed(f"tpukit {expected.get('tpukit')}, torch {expected.get('torch', 'missing')}")


def _same_data(ask_all: AskAll, path: str | None) -> Verdict:
    if path is None:
        return skipped("no --data-path was given")
    found = ask_all(lambda agent: agent.ask("data", path=path))
    problems = [f"{host}: {why}" for host, why in found.bad.items()]
    first = next(iter(found.good), "")
    expected = found.good.get(first, {})
    problems += [
        f"{host} has {data['files']} files of {data['bytes']} bytes, unlike {first}"
        f" ({expected['files']} of {expected['bytes']})"
        for host, data in found.good.items()
        if data["digest"] != expected["digest"]
    ]
    if problems:
        return failed("; ".join(problems), "Copy the data once more, or mount one folder on all.")
    return passed(f"{expected.get('files')} files under {path}")


def _offset(agent: RemoteAgent) -> float:
    """How far the host's clock is ahead of this one's, to within half the answer's time."""
    before = time.time()
    there = float(agent.ask("clock"))
    return there - (before + time.time()) / 2


def compare_clocks(offsets: Mapping[str, float]) -> Verdict:
    first, expected = next(iter(offsets.items()), ("", 0.0))
    problems = [
        f"{host} is {abs(offset - expected):.0f} s {'ahead of' if offset > expected else 'behind'}"
        f" {first}"
        for host, offset in offsets.items()
        if abs(offset - expected) > CLOCK_SECONDS
    ]
    if problems:
        return warned("; ".join(problems), "Let all hosts ask a time server (timedatectl).")
    spread = max(offsets.values(), default=0.0) - min(offsets.values(), default=0.0)
    return passed(f"within {spread:.1f} s")


def _ports(ask_all: AskAll, agents: Sequence[RemoteAgent], port: int) -> Verdict:
    problems = []
    for listener in agents:
        others = [agent for agent in agents if agent is not listener]
        try:
            listener.ask("listen", port=port)
        except RemoteError as error:
            problems.append(f"{listener.host} cannot listen on port {port}: {error}")
            continue

        def call(agent: RemoteAgent, address: str = listener.address) -> Any:
            return agent.ask("connect", host=address, port=port)

        found = ask_all(call, others)
        problems += [f"{h} to {listener.address}:{port}: {why}" for h, why in found.bad.items()]
        ask_all(lambda agent: agent.ask("close"), [listener])
    if problems:
        return failed(
            "; ".join(problems),
            "Open the ports between the hosts (ranks use further ones, chosen at random), or name"
            " another with --master-port.",
        )
    return passed(f"port {port}, {len(agents)} hosts")
