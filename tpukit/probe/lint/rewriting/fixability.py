"""Reasons why --fix leaves a place as it is, and effects that a rewrite removes."""

import ast
import re

from tpukit.knowledge.calls import Fix, OldCall
from tpukit.probe.lint.names import Names
from tpukit.probe.lint.syntax import source_text


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
    option = _option(values[0])
    limits = f"--{option} then limits nothing" if option else "that value then limits nothing"
    return f"--fix drops nprocs={source_text(values[0])[:40]}: {limits}, every device is used"


def _option(value: ast.expr) -> str:
    """The name of a command line's option: `args.num_cores`, `FLAGS["num_cores"]`."""
    holder = value.value if isinstance(value, ast.Attribute | ast.Subscript) else None
    if holder is not None and re.search("arg|flag|opt", source_text(holder), re.IGNORECASE):
        if isinstance(value, ast.Attribute):
            return value.attr
        key = value.slice if isinstance(value, ast.Subscript) else None
        return str(key.value) if isinstance(key, ast.Constant) else ""
    return value.id if isinstance(value, ast.Name) and value.id == "num_cores" else ""
