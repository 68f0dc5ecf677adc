"""Python files and notebooks as modules: one text each, with the origin of its lines.

The cells of a notebook make one module, because names flow from cell to cell; what is not Python
in them (magics, shell lines, cells in another language) becomes comments of as many lines.
"""

import ast
import io
import json
import re
import tokenize
import warnings
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tpukit.errors import DataError
from tpukit.probe.lint.syntax import calls_of, characters

LARGEST_BYTES = 20 << 20
_MAGIC = re.compile(r"\s*(?:[!%?]|[\w.,\[\] ]+=\s*[!%])|.*\w\?{1,2}\s*$")
_PYTHON_CELL_MAGICS = ("time", "timeit", "capture", "prun")
_WRITEFILE = re.compile(r"%%(?:writefile|file)\s+(?:-a\s+)?(\S+\.py)\b")
MASK = "#~tpukit~"


@dataclass(frozen=True)
class Chunk:
    """A run of a module's lines that comes from one cell (or is the whole file)."""

    first_line: int
    """In the module, from 1."""
    lines: int
    cell: int | None
    skipped: int = 0
    """Lines of the cell before it (the `%%writefile` line)."""
    indent: str = ""
    """What every line of the cell starts with."""


@dataclass
class Module:
    """One text to parse."""

    path: str
    text: str
    chunks: list[Chunk]
    tree: ast.Module | None = None
    embedded: bool = False
    """Whether it is a string in another module; nothing is rewritten there."""
    notes: list[str] = field(default_factory=list)

    @cached_property
    def lines(self) -> list[str]:
        return self.text.split("\n")

    def span(self, node: ast.expr | ast.alias | ast.stmt) -> tuple[int, int, int, int]:
        """(line, column, end line, end column) of a node, columns in characters from 0."""
        end_line, end = node.end_lineno or node.lineno, node.end_col_offset or 0
        start = characters(self._line(node.lineno), node.col_offset)
        return node.lineno, start, end_line, characters(self._line(end_line), end)

    def _line(self, number: int) -> str:
        return self.lines[number - 1] if number <= len(self.lines) else ""

    def place(self, line: int, column: int = 0) -> tuple[int | None, int, int]:
        """(cell, line in it, column) of a place in the module."""
        for chunk in reversed(self.chunks):
            if line >= chunk.first_line:
                at = line - chunk.first_line + 1 + chunk.skipped
                return chunk.cell, at, column + len(chunk.indent)
        return None, line, column


@dataclass(frozen=True)
class Notebook:
    """The content of a notebook's file."""

    document: dict[str, Any]
    cells: list[dict[str, Any]]


def read_bytes(path: Path) -> bytes:
    """The content of a source file. Raises DataError where it cannot be read."""
    try:
        if not path.is_file():
            raise DataError(f"{path}: not a file", "Name Python files, notebooks or folders.")
        if path.stat().st_size > LARGEST_BYTES:
            raise DataError(f"{path}: larger than {LARGEST_BYTES >> 20} MiB", "Split it.")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: cannot be read ({reason})", "Check its permissions.") from None


def decode_source(data: bytes) -> tuple[str, str]:
    """(text, encoding) by the file's own declaration, as Python reads it; newlines are kept."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return data.decode(encoding), encoding
    except (SyntaxError, LookupError, UnicodeDecodeError, ValueError):
        return data.decode("utf-8", errors="replace"), "utf-8"


def python_module(path: str, text: str) -> Module:
    """A Python file as a module; one exported from a notebook has its magics masked."""
    chunks = [Chunk(1, text.count("\n") + 1, None)]
    module = _parsed(Module(path, text, chunks), ": ")
    if module.tree is None:
        masked = _parsed(Module(path, mask_magics(text), chunks), ": ")
        return module if masked.tree is None else masked
    return module


def parse_python(text: str) -> tuple[ast.Module | None, str]:
    """The syntax tree, or None and the reason."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text), ""
    except SyntaxError as error:
        return None, f"line {error.lineno}: {error.msg}" if error.lineno else error.msg
    except (ValueError, RecursionError, MemoryError, OverflowError) as error:
        return None, f"{type(error).__name__}: {str(error)[:80]}"


def mask_magics(text: str) -> str:
    """IPython magics and shell lines, with those that continue them, as comments behind `pass`."""
    masked: list[str] = []
    goes_on = False
    for line in text.split("\n"):
        starts = bool(line.strip() and _MAGIC.match(line))
        if goes_on:
            masked.append(f"{MASK}{line}")
        elif starts:
            indent = line[: len(line) - len(line.lstrip())]
            masked.append(f"{indent}pass  {MASK}{line.lstrip()}")
        else:
            masked.append(line)
        goes_on = (goes_on or starts) and line.rstrip().endswith("\\")
    return "\n".join(masked)


def unmask(text: str) -> str:
    """Undoes `mask_magics` and `comment_out`."""
    mask = re.compile(rf"(?:pass  )?{re.escape(MASK)}")
    return "\n".join(mask.sub("", line, count=1) for line in text.split("\n"))


def comment_out(text: str) -> str:
    """A cell in another language, as comments."""
    return "\n".join(f"{MASK}{line}" for line in text.split("\n"))


def read_notebook(path: str, text: str) -> Notebook:
    """A notebook's cells. Raises DataError for an invalid file."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: invalid notebook ({error})", "A notebook is JSON.") from None
    cells = document.get("cells") if isinstance(document, dict) else None
    if not isinstance(cells, list):
        raise DataError(f"{path}: invalid notebook (no cells)", "Save it in Jupyter's format 4.")
    return Notebook(document, [cell if isinstance(cell, dict) else {} for cell in cells])


def cell_source(cell: dict[str, Any]) -> str:
    """A code cell's text; empty for another kind of cell."""
    if cell.get("cell_type") != "code":
        return ""
    source = cell.get("source", "")
    if isinstance(source, list):
        return "".join(part for part in source if isinstance(part, str))
    return source if isinstance(source, str) else ""


def notebook_modules(path: str, notebook: Notebook) -> list[Module]:
    """The cells as one module, and every `%%writefile x.py` cell as one of its own."""
    joined: list[str] = []
    chunks: list[Chunk] = []
    written: list[Module] = []
    main = Module(path, "", chunks)
    line = 1
    for number, cell in enumerate(notebook.cells, start=1):
        source = cell_source(cell)
        if _WRITEFILE.match(source):
            written.append(_written_file(path, source, number))
        indent = _common_indent(source)
        source = "\n".join(line.removeprefix(indent) for line in source.split("\n"))
        text = _as_python(source, number, main)
        count = text.count("\n") + 1
        chunks.append(Chunk(line, count, number, indent=indent))
        joined.append(text)
        line += count
    main.text = "\n".join(joined)
    return [_parsed(main, ": its cells together are "), *written]


def _common_indent(source: str) -> str:
    """The indent of a cell that is indented throughout; IPython takes it away too."""
    lines = [line for line in source.split("\n") if line.strip()]
    first = lines[0] if lines else ""
    indent = first[: len(first) - len(first.lstrip())]
    return indent if indent and all(line.startswith(indent) for line in lines) else ""


def with_indent(indent: str, text: str) -> str:
    """Undoes what was taken from a cell that is indented throughout."""
    return "\n".join(indent + line if line.strip() else line for line in text.split("\n"))


def embedded_modules(module: Module) -> list[Module]:
    """The files that `get_ipython().run_cell_magic('writefile', 'x.py', '...')` writes."""
    found: list[Module] = []
    if module.tree is None or "run_cell_magic" not in module.text:
        return found
    for node in calls_of("run_cell_magic", ast.walk(module.tree)):
        values = [a.value for a in node.args if isinstance(a, ast.Constant)]
        if len(values) != 3 or values[0] != "writefile":
            continue
        if str(values[1]).split(" ")[-1].endswith(".py"):
            text = str(values[2])
            # Every line of it stands on that one line.
            chunks = [Chunk(n, 1, None, node.lineno - 1) for n in range(1, text.count("\n") + 2)]
            found.append(Module(module.path, text, chunks, parse_python(text)[0], embedded=True))
    return found


def _written_file(path: str, source: str, number: int) -> Module:
    text = source.partition("\n")[2]
    return _parsed(Module(path, text, [Chunk(1, text.count("\n") + 1, number, skipped=1)]),
                   f", cell {number}: ")  # fmt: skip


def _parsed(module: Module, where: str) -> Module:
    """The module with its tree, or with a note that says why it has none."""
    module.tree, problem = parse_python(module.text)
    if module.tree is None:
        module.notes.append(f"{module.path}{where}invalid Python ({problem}): skipped")
    return module


def _as_python(source: str, number: int, main: Module) -> str:
    """One cell's text as Python of as many lines."""
    if source.startswith("%%"):
        magic = source[2:].split(maxsplit=1)
        if not magic or magic[0] not in _PYTHON_CELL_MAGICS:
            return comment_out(source)
    if parse_python(source)[0] is not None:
        return source
    masked = mask_magics(source)
    _, problem = parse_python(masked)
    if not problem:
        return masked
    main.notes.append(f"{main.path}, cell {number}: invalid Python ({problem}): skipped")
    return comment_out(source)
