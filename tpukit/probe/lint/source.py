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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tpukit.errors import DataError
from tpukit.probe.lint.syntax import LINE_END, calls_of, characters

LARGEST_BYTES = 20 << 20
_MAGIC = re.compile(r"\s*(?:[!%?]|[\w.,\[\] ]+=\s*[!%])|.*\w\?{1,2}\s*$")
_PYTHON_CELL_MAGICS = ("time", "timeit", "capture", "prun")
_WRITEFILE = re.compile(r"%%(?:writefile|file)\s+(?:-a\s+)?(\S+\.py)\b")
MASK = "#~tpukit~"
_MASKED = re.compile(rf"(?:pass  )?{re.escape(MASK)}")
CELL_END = "#~tpukit cell~"
"""A line behind each cell in the text of a notebook."""


@dataclass(frozen=True)
class Chunk:
    """A run of a module's lines that comes from one cell (or is the whole file)."""

    first_line: int
    """In the module, from 1."""
    cell: int | None = None
    indent: str = ""
    """What every line of the cell starts with."""

    def source(self, text: str) -> str:
        """Its text as it was before magics were masked and the indent was taken away."""
        lines = (_MASKED.sub("", line, count=1) for line in text.split("\n"))
        return "\n".join(self.indent + line if line.strip() else line for line in lines)


@dataclass
class Module:
    """One text to parse."""

    path: str
    text: str
    chunks: list[Chunk]
    tree: ast.Module | None = None
    embedded: int = 0
    """The line of another module on which it is a string; nothing is rewritten there."""
    notes: list[str] = field(default_factory=list)

    @cached_property
    def lines(self) -> list[str]:
        return LINE_END.split(self.text)

    def span(self, node: ast.expr | ast.alias | ast.stmt) -> tuple[int, int, int, int]:
        """(line, column, end line, end column) of a node, columns in characters from 1."""
        end_line, end = node.end_lineno or node.lineno, node.end_col_offset or 0
        start = characters(self._line(node.lineno), node.col_offset)
        return node.lineno, start + 1, end_line, characters(self._line(end_line), end) + 1

    def _line(self, number: int) -> str:
        return self.lines[number - 1] if number <= len(self.lines) else ""

    def place(self, line: int, column: int) -> tuple[int | None, int, int]:
        """(cell, line in it, column) of a place in the module."""
        chunk = next(each for each in reversed(self.chunks) if line >= each.first_line)
        at = self.embedded or line - chunk.first_line + 1
        return chunk.cell, at, column + len(chunk.indent)

    def parts(self, text: str) -> Iterator[tuple[Chunk, str]]:
        """What a new text makes of each chunk."""
        cells = text.split(f"{CELL_END}\n")
        parts = cells if len(cells) == 1 else (cell.removesuffix("\n") for cell in cells)
        return zip(self.chunks, parts, strict=False)


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
    module = _parsed(Module(path, text, [Chunk(1)]), ": ")
    if module.tree is None:
        masked = _parsed(Module(path, mask_magics(text), [Chunk(1)]), ": ")
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


def comment_out(text: str) -> str:
    """A cell in another language, as comments."""
    return "\n".join(f"{MASK}{line}" for line in text.split("\n"))


def notebook_cells(path: str, text: str) -> list[dict[str, Any]]:
    """A notebook's cells. Raises DataError for an invalid file."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: invalid notebook ({error})", "A notebook is JSON.") from None
    cells = document.get("cells") if isinstance(document, dict) else None
    if not isinstance(cells, list):
        raise DataError(f"{path}: invalid notebook (no cells)", "Save it in Jupyter's format 4.")
    return [cell if isinstance(cell, dict) else {} for cell in cells]


def cell_source(cell: dict[str, Any]) -> str:
    """A code cell's text; empty for another kind of cell."""
    if cell.get("cell_type") != "code":
        return ""
    source = cell.get("source", "")
    if isinstance(source, list):
        return "".join(part for part in source if isinstance(part, str))
    return source if isinstance(source, str) else ""


def source_modules(path: str, text: str) -> list[Module]:
    """The modules of a file: what it holds itself, and the files that it writes.

    Raises DataError for an invalid notebook.
    """
    if path.endswith(".ipynb"):
        return _notebook_modules(path, notebook_cells(path, text))
    main = python_module(path, text)
    return [main, *_embedded_modules(main)]


def _notebook_modules(path: str, cells: Sequence[dict[str, Any]]) -> list[Module]:
    """The cells as one module, and every `%%writefile x.py` cell as one of its own."""
    joined: list[str] = []
    main = Module(path, "", [])
    modules = [main]
    line = 1
    for number, cell in enumerate(cells, start=1):
        source = cell_source(cell)
        if _WRITEFILE.match(source):
            written = Module(path, f"{MASK}{source}", [Chunk(1, number)])
            modules.append(_parsed(written, f", cell {number}: "))
        indent = _common_indent(source)
        source = "\n".join(line.removeprefix(indent) for line in source.split("\n"))
        text = _as_python(source, number, main)
        main.chunks.append(Chunk(line, number, indent))
        joined += [text, CELL_END]
        line += len(LINE_END.split(text)) + 1
    main.text = "\n".join([*joined, ""])
    _parsed(main, ": its cells together are ")
    return modules


def _common_indent(source: str) -> str:
    """The indent of a cell that is indented throughout; IPython takes it away too."""
    lines = [line for line in source.split("\n") if line.strip()]
    first = lines[0] if lines else ""
    indent = first[: len(first) - len(first.lstrip())]
    return indent if indent and all(line.startswith(indent) for line in lines) else ""


def _embedded_modules(module: Module) -> Iterator[Module]:
    """The files that `get_ipython().run_cell_magic('writefile', 'x.py', '...')` writes."""
    is_notebook = module.tree is not None and "run_cell_magic" in module.text
    for node in calls_of("run_cell_magic", ast.walk(module.tree)) if is_notebook else ():  # type: ignore[arg-type]
        values = [a.value for a in node.args if isinstance(a, ast.Constant)]
        is_file = len(values) == 3 and values[0] == "writefile"
        if is_file and str(values[1]).split(" ")[-1].endswith(".py"):
            text = str(values[2])
            yield Module(module.path, text, [Chunk(1)], parse_python(text)[0], node.lineno)


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
