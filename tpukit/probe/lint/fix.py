"""Applies rewrites to files atomically; backs up files that git does not have."""

import difflib
import io
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tpukit.errors import DataError
from tpukit.io.files import replacing, sync_file
from tpukit.knowledge.calls import LEFT
from tpukit.probe.lint.finding import Finding
from tpukit.probe.lint.prefilter import may_concern
from tpukit.probe.lint.rewriting.notebook_text import with_sources
from tpukit.probe.lint.scan import places_of, source_files
from tpukit.probe.lint.source import Module, decode_source, read_bytes, source_modules

GIT_SECONDS = 10.0


@dataclass(frozen=True)
class FileFix:
    """The rewrite of one file."""

    path: Path
    diff: str
    data: bytes
    """The file's new contents."""
    rewritten: int
    """Places."""
    remarks: tuple[str, ...] = ()
    """Effects that the rewrite removes (an option's)."""


def plan_fixes(paths: Iterable[str], *, moves: str = "") -> list[FileFix]:
    """The fixes of all files in these paths that have any; nothing is written yet.

    moves: as `scan_paths` takes it.
    """
    named = list(map(Path, paths))
    files = dict.fromkeys(file for path in named for file in source_files(path))
    planned = (plan_fix(file, moves=moves, whole=file in named) for file in files)
    return [fix for fix in planned if fix is not None]


def plan_fix(path: Path, *, moves: str = "", whole: bool = True) -> FileFix | None:
    """One file's fix; None where nothing in it can be rewritten. whole: as `scan_file` takes it."""
    try:
        data = read_bytes(path)
        if not whole and not may_concern(data, moves=moves):
            return None
        text, encoding = decode_source(data)
        if text.encode(encoding) != data:
            return None
        modules = source_modules(str(path), text)
    except DataError:
        return None
    fixed: list[Finding] = []
    sources: dict[int | None, str] = {}
    for module in (each for each in modules if not each.embedded):
        after, places = _rewritten(module, moves)
        before = module.parts(module.text)
        for (chunk, old), (_, part) in zip(before, module.parts(after), strict=True):
            sources |= {chunk.cell: chunk.source(part)} if part != old else {}
        fixed += places
    if not sources:
        return None
    new = sources[None] if None in sources else with_sources(text, sources)
    remarks = tuple(dict.fromkeys(place.remark for place in fixed if place.remark))
    diff = unified(str(path), text, new)
    return FileFix(path, diff, new.encode(encoding), len(fixed), remarks)


def unified(path: str, old: str, new: str) -> str:
    """The difference as `diff -u` shows it; `patch -p0` takes it."""
    # Of the characters that end a line in Python, files have the newline alone.
    before, after = (list(io.StringIO(text, newline="\n")) for text in (old, new))
    lines = difflib.unified_diff(before, after, path, path)
    return "\n".join(
        line[:-1] if line.endswith("\n") else f"{line}\n\\ No newline at end of file"
        for line in lines
    )


def _rewritten(module: Module, moves: str) -> tuple[str, list[Finding]]:
    from tpukit.probe.lint.rewriting.rewrite import rewrite

    if module.tree is None:
        return module.text, []
    exports = Path(module.path).name == "__init__.py"
    leaving = LEFT if moves == "torch_tpu" else ""
    places = places_of(module, moves=moves)
    return rewrite(module.text, module.tree, places, exports=exports, leaving=leaving)


# -- writing -------------------------------------------------------------------------------------
def apply_fix(fix: FileFix) -> Path | None:
    """Replaces the file; returns the backup, None where git has the old content.

    Raises DataError where it cannot be written; the file is then unchanged.
    """
    backup = None if is_committed(fix.path) else _back_up(fix.path)
    target = fix.path.resolve()
    try:
        with replacing(target) as partial:
            partial.write_bytes(fix.data)
            partial.chmod(target.stat().st_mode)
    except OSError as error:
        raise DataError(
            f"{fix.path}: cannot be written ({error.strerror})", "Use --diff to see the changes."
        ) from None
    return backup


def is_committed(path: Path) -> bool:
    """Whether git has this file as it is now."""
    folder, name = path.resolve().parent, path.resolve().name
    tracked = _git(folder, "ls-files", "--error-unmatch", "--", name)
    return tracked is not None and _git(folder, "status", "--porcelain", "--", name) == ""


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=GIT_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _back_up(path: Path) -> Path:
    """A copy of the file beside it, under a name that nothing has yet."""
    for number in range(1000):
        suffix = ".bak" if number == 0 else f".bak{number}"
        backup = path.with_name(path.name + suffix)
        try:
            with backup.open("xb") as file:
                file.write(path.read_bytes())
            sync_file(backup)
        except FileExistsError:
            continue
        except OSError as error:
            raise DataError(
                f"{backup}: the backup cannot be written ({error.strerror})",
                "Use --diff to see the changes.",
            ) from None
        return backup
    raise DataError(f"{path}: 1000 backups exist already", "Remove some of them.")
