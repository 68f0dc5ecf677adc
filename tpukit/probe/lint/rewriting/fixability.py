"""Reasons why --fix leaves a place as it is, and effects that a rewrite removes."""

import ast
import re

from tpukit.knowledge.calls import Fix, OldCall
from tpukit.probe.lint.names import Names
from tpukit.probe.lint.syntax import source_text

_OPTION = re.compile(r"\S*(?i:arg|flag|opt)\S*?(?:\.(\w+)|\['([^']+)'\])|(num_cores)")
"""What a command line gives: `args.num_cores`, `FLAGS["num_cores"]`."""


def left_alone(fix: Fix, call: ast.Call | None) -> str:
    """The reason why this use is not rewritten; empty where it is."""
    about_arguments = bool(fix.parameters or fix.drop or fix.prepend or fix.arguments == "drop")
    if call is None:
        return "it is not called here" if about_arguments else ""
    given = {keyword.arg for keyword in call.keywords}
    starred = None in given or any(isinstance(a, ast.Starred) for a in call.args)
    if starred and (fix.parameters or fix.drop or (fix.rename and not set(fix.rename) & given)):
        return "its arguments come from * or **"
    names = [*fix.parameters, *("" for _ in call.args)][: len(call.args)]
    names += [keyword.arg or "" for keyword in call.keywords]
    unknown = [name for name in names if fix.only and name not in fix.only]
    if unknown:
        return f"{unknown[0] or 'an argument'} has no counterpart"
    taken = {"mixed-precision": "mixed_precision", "dataloader-configuration": "dataloader_config"}
    if taken.get(fix.special, "") in given:
        return f"{taken[fix.special]} is given too"
    return ""


def other_meaning(names: Names, module: str) -> str:
    """The reason why the new name cannot be written: the file uses it for something else."""
    root = module.partition(".")[0]
    scopes = (names.module, *names.scopes.values())
    bound = [(n, b.name) for scope in scopes for n, found in scope.bindings.items() for b in found]
    if not root or any(name == module for _, name in bound):
        return ""
    taken = any(local == root and name != root for local, name in bound)
    return f"{root} means something else in this file" if taken else ""


def taken_away(row: OldCall, call: ast.Call | None) -> str:
    """The work that a rewrite leaves, or the effect of an argument that it drops."""
    if row.remark:
        return row.remark
    if call is None or row.fix is None or row.id != "xmp-spawn-nprocs":
        return ""
    values = [k.value for k in call.keywords if k.arg == "nprocs"] or call.args[2:3]
    if not values or isinstance(values[0], ast.Constant):
        return ""
    text = source_text(values[0])
    option = _OPTION.fullmatch(text)
    limited = f"--{option[option.lastindex or 0]}" if option else "that value"
    return f"--fix drops nprocs={text[:40]}: {limited} then limits nothing, every device is used"
