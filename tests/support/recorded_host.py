"""A host that replays a recorded machine: the fake of `Host`.

A recording is TOML: tables of files, links, commands and so on. Every value names its source, so
that nobody takes an invented machine for a real one.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tpukit.errors import DataError
from tpukit.hardware.host import Disk, Host

_TABLES = {
    "files",
    "links",
    "folders",
    "environment",
    "packages",
    "package_files",
    "commands",
    "disks",
    "machine",
    "reachable",
    "read_only",
    "missing_programs",
}


class RecordedHost(Host):
    """A recorded machine. Reads nothing from this one."""

    def __init__(self, tables: Mapping[str, Mapping[str, Any]]) -> None:
        """`tables`: name of a table -> key -> value, without the sources."""
        machine = tables.get("machine", {})
        self.environment: Mapping[str, str] = tables.get("environment", {})
        self.python = str(machine.get("python", "3.12.11"))
        self.system = str(machine.get("system", "Linux-x86_64"))
        self.cores = int(machine.get("cores", 4))
        self.process = int(machine.get("process", 4242))
        self._tables = tables

    @classmethod
    def recorded(cls, path: Path) -> RecordedHost:
        """Reads a recording; every value in it must name its source."""
        try:
            raw = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: invalid recording ({error}).", "Write it in TOML.") from None
        tables: dict[str, dict[str, Any]] = {}
        for name, table in raw.items():
            if name not in _TABLES:
                raise DataError(f"{path}: unknown table [{name}].", f"Use {sorted(_TABLES)}.")
            tables[name] = {
                key: _value(field, f"{path}, {name}.{key}") for key, field in table.items()
            }
        return cls(tables)

    def read(self, path: str) -> str | None:
        text = self._table("files").get(path)
        return None if text is None else str(text)

    def names(self, path: str) -> list[str]:
        below = f"{path.rstrip('/')}/"
        paths = [*self._table("files"), *self._table("links"), *self._table("folders")]
        return sorted({p[len(below) :].split("/")[0] for p in paths if p.startswith(below)} - {""})

    def link(self, path: str) -> str | None:
        return self._table("links").get(path)

    def exists(self, path: str) -> bool:
        known = (*self._table("files"), *self._table("links"), *self._table("folders"))
        known += tuple(self._table("disks"))
        return any(p == path or p.startswith(f"{path}/") for p in known)

    def run(self, command: Sequence[str], seconds: float) -> str | None:
        return self._table("commands").get(command[0])

    def disk(self, path: str) -> Disk | None:
        sizes = self._table("disks").get(path)
        return Disk(int(sizes[0] * 2**30), int(sizes[1] * 2**30)) if sizes else None

    def is_writable(self, folder: str) -> bool:
        return not any(folder.startswith(path) for path in self._table("read_only"))

    def finds(self, program: str) -> bool:
        return program not in self._table("missing_programs")

    def packages(self) -> Mapping[str, str]:
        return self._table("packages")

    def package_text(self, path: str) -> str | None:
        return self._table("package_files").get(path)

    def reaches(self, name: str, port: int, seconds: float) -> bool:
        return bool(self._table("reachable").get(name, False))

    def _table(self, name: str) -> Mapping[str, Any]:
        return self._tables.get(name, {})


def _value(field: Any, where: str) -> Any:
    """`{is = value, from = "where it is known from"}` -> value."""
    if not isinstance(field, dict) or set(field) != {"is", "from"} or not field["from"]:
        raise DataError(f"{where}: value without a source.", 'Write {is = ..., from = "..."}.')
    return field["is"]
