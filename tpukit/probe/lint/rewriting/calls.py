"""Edits of a call that is rewritten: its arguments, or the expression in its place."""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tpukit.knowledge.calls import Fix
from tpukit.probe.lint.rewriting.text import Edit, SourceText, without
from tpukit.probe.lint.syntax import argument

_FIELD = re.compile(r"\{([\w.]+)\}")
_PLAIN = (ast.Name, ast.Attribute, ast.Call, ast.Subscript)
_FP16 = ("fp16", "use_fp16")
_LOADER = ("dispatch_batches", "even_batches", "use_seedable_sampler")


def is_about_arguments(fix: Fix) -> bool:
    special = fix.special in ("mixed-precision", "dataloader-configuration")
    drops = fix.arguments == "drop"
    return bool(special or drops or fix.parameters or fix.drop or fix.prepend or fix.rename)


@dataclass
class Arguments:
    """The arguments of one call, and what its fixes make of them: the new call takes them all
    (`fixability.left_alone`)."""

    source: SourceText
    call: ast.Call
    changed: list[Edit] = field(default_factory=list)
    dropped: set[int] = field(default_factory=set)
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.start, self.spans = self.source.arguments(self.call)
        self.given: list[ast.expr | ast.keyword] = [*self.call.args, *self.call.keywords]
        self.given.sort(key=lambda each: (each.lineno, each.col_offset))

    def take(self, fix: Fix, configuration: str = "") -> None:
        """Notes a fix. configuration: the class of a loader's settings, as it is written here."""
        by_name = fix.as_keywords
        for number, each in enumerate(self.given):
            keyword = each.arg if isinstance(each, ast.keyword) else None
            name = keyword or "".join(fix.parameters[number : number + 1])
            is_value = not isinstance(each, ast.Starred | ast.keyword)
            if fix.arguments == "drop" or (name in fix.drop and (is_value or keyword)):
                by_name |= is_value
                self.dropped.add(number)
            elif name and by_name and is_value:
                self._write(number, 0, f"{fix.rename.get(name, name)}=")
            elif keyword and keyword in fix.rename:
                self._write(number, len(keyword), fix.rename[keyword])
        names = {k.arg for n, k in enumerate(self.given)
                 if isinstance(k, ast.keyword) and n not in self.dropped}  # fmt: skip
        self.before += fix.prepend
        self.after += [f"{name}={text}" for name, text in fix.append.items() if name not in names]
        if fix.special == "mixed-precision":
            for number, value in self._named(_FP16):
                text = self.source.of(value)
                wanted = '"fp16"' if text == "True" else f'"fp16" if {text} else "no"'
                self.dropped |= {number} if text in ("False", "None") else set()
                start, end = self.spans[number]
                self._write(number, end - start, f"mixed_precision={wanted}")
        elif fix.special == "dataloader-configuration":
            moved = [number for number, _ in self._named(_LOADER)]
            inner = ", ".join(self.source.text[slice(*self.spans[number])] for number in moved)
            self.dropped |= set(moved)
            self.after.append(f"dataloader_config={configuration}({inner})")

    def _named(self, names: Sequence[str]) -> list[tuple[int, ast.expr]]:
        return [(n, k.value) for n, k in enumerate(self.given)
                if isinstance(k, ast.keyword) and k.arg in names]  # fmt: skip

    def _write(self, number: int, length: int, new: str) -> None:
        start = self.spans[number][0]
        self.changed.append(Edit(start, start + length, new))

    def edits(self) -> Iterator[Edit]:
        kept = {*range(len(self.spans))} - self.dropped
        if not kept:
            # With the line breaks and the last comma, unless there are new arguments.
            new = ", ".join([*self.before, *self.after])
            end = self.source.span(self.call)[1] - 1
            inside = (self.spans[0][0], self.spans[-1][1]) if new and self.spans else None
            yield Edit(*(inside or (self.start, end if self.spans else self.start)), new)
            return
        between = self.source.text[self.spans[0][1] : self.spans[1][0]] if self.spans[1:] else " "
        separator = "," + re.sub(r"#.*|\S", "", between)
        first, last = self.spans[min(kept)][0], self.spans[max(kept)][1]
        yield from without(self.spans, kept)
        yield Edit(first, first, "".join(f"{text}{separator}" for text in self.before))
        yield Edit(last, last, "".join(f"{separator}{text}" for text in self.after))
        yield from self.changed


def filled(source: SourceText, node: ast.expr, fix: Fix, template: str) -> list[Edit]:
    """Puts a template (see `Fix.call`) into the place of a call or a name: what stands in its
    fields stays, with the edits in it; nothing where an argument is missing."""
    edits: list[Edit] = []
    at, end = source.span(node)
    literal, *parts = _FIELD.split(template)
    for name, behind in zip(parts[::2], parts[1::2], strict=True):
        start, stop, opened, closed = at, at, "", ""
        if name == "call":
            stop = end
        elif name.startswith("held"):
            function = node.func if isinstance(node, ast.Call) else node
            if not isinstance(function, ast.Attribute):
                return []
            held = source.of(function).removesuffix(function.attr)
            stop += len(held if name.endswith(".") else re.sub(r"\s*\.\s*$", "", held))
        elif isinstance(node, ast.Call) and name == "rest":
            opened = _rest(source, argument(node, "args", 1))
        elif isinstance(node, ast.Call):
            value = argument(node, name, fix.parameters.index(name))
            if value is None:
                return []
            start, stop = source.span(value)
            opened, closed = ("", "") if isinstance(value, _PLAIN) else ("(", ")")
        edits.append(Edit(at, start, literal + opened))
        at, literal = stop, closed + behind
    return [*edits, Edit(at, end, literal)]


def _rest(source: SourceText, arguments: ast.expr | None) -> str:
    """`args=(a, b)` as further arguments."""
    if isinstance(arguments, ast.Tuple):
        return "".join(f", {source.of(each)}" for each in arguments.elts)
    if arguments is None:
        return ""
    text = source.of(arguments)
    return f", *{text}" if isinstance(arguments, _PLAIN) else f", *({text})"


def moved_text(literal: str, to: str) -> str:
    """A device's name in the quotes that it had; torchrun's variables say where ranks meet."""
    if "://" in literal:
        return literal.replace("xla://", "env://")
    if literal.isdigit() or to == "adamw_torch":
        return f'"{to}"'
    forms = r"xla|gpu|(?:cuda|mps)(?::\d+)?|flash_attention_\d|(?:ddp|deepspeed)\w*|16"
    return re.sub(forms, to, literal)
