"""Every row of the table of old calls: found where it is used, and not where it only looks so."""

import importlib
import inspect
import json

import pytest
from cases import read_cases
from runs import last_json, printed, python
from scanned import findings, ids

from tpukit.knowledge.calls import old_calls
from tpukit.probe.lint.prefilter import may_concern

CASES = read_cases(__file__)
XM = CASES["texts"]["XM"]


USES = {
    "whole": "import {top}\n{parent}.{last}({given})",
    "in brackets": "import {top}\n({parent}\n  # why\n  ).{last}({given})",
    "package renamed": "import {parent} as q\nq.{last}({given})",
    "from": "from {parent} import (zeros,\n    {last} as q)\nq({given})",
    "star": "from {parent} import *\n{last}({given})",
    "assigned last": "import {top}\na = q = {parent}\nq.{last}({given})",
    "annotated": "import {top}\nq: object = {parent}\nq.{last}({given})",
    "named in an expression": "import {top}\nprint(q := {parent})\nq.{last}({given})",
    "attribute": "import {top}\nclass A:\n    def __init__(self):\n        self.q = {parent}\n"
    "    def f(self):\n        self.q.{last}({given})",
    "getattr": "import {top}\ngetattr({parent}, '{last}')({given})",
    "function assigned": "import {top}\nq = {parent}.{last}\nq({given})",
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_no_use_of_any_old_name_is_ruled_out_by_its_words(use):
    found = 0
    for row in old_calls():
        for name in row.names:
            parent, _, last = name.rpartition(".")
            if row.kind == "shell" or not parent or "(" in name:
                continue
            given = ", ".join(f"{keyword}=1" for keyword in row.keywords[:1])
            code = use.format(top=name.split(".")[0], parent=parent, last=last, given=given)
            found += bool(ids(code))
    assert found > 90


def test_only_calls_that_a_row_is_about_are_worth_parsing():
    load, loss = "import torch\nx = torch.load({})", "from torch.nn import MSELoss\nf = MSELoss({})"
    for call, right, wrong in (
        (load, "f(a),\n  weights_only=True", "f(')', a)"),
        (load, "f, # )\n weights_only=w", "f)\ny = g(weights_only=w"),
        (loss, "'mean'", "a,  # b)\n    reduce=False"),
        (loss, "f(a(b()))", "**more)\nmore = dict(reduce=False"),
        ("import torch\nx = torch.fft{}(a)", ".fft", ""),
    ):
        assert not may_concern(call.format(right).encode())
        assert ids(call.format(wrong))


def test_calls_that_never_close_are_read_once():
    assert may_concern(b"import torch\nx = torch.load(" + b"f(a, #b)\n'c', " * 20000)


def test_a_tokenizer_needs_no_torch():
    assert ids("from transformers import AutoTokenizer\nwith t.as_target_tokenizer(): ...")
    assert ids("from transformers import AutoProcessor\nwith p.as_target_processor(): ...")


def test_comments_behind_an_import_that_stays_open_are_read_once():
    code = "import torch\n# eig\nimport (\n" + "# a comment of some words\n" * 40
    look = f"from tpukit.probe.lint.prefilter import may_concern\nmay_concern({code.encode()!r})"
    # Reading each comment in every way it can be split would take years.
    printed(python("-c", look, timeout=120))


def test_a_short_name_inside_words_is_not_worth_parsing():
    assert not may_concern(b"import torch\nimport timm\nlayer = x.weight.eig_values(layer)")


def test_every_row_is_found_where_it_is_used_and_not_where_it_only_looks_so():
    rows = CASES["rows"]
    assert set(rows) == {row.id for row in old_calls()}
    assert [id for id, (code, _) in rows.items() if id not in ids(code)] == []
    assert [id for id, (_, code) in rows.items() if id in ids(code)] == []


def test_what_only_looks_like_an_old_call_is_not_found():
    assert [name for name, code in CASES["looks-like"].items() if ids(code)] == []


def test_every_spelling_is_found():
    spellings = CASES["spellings"].items()
    assert [name for name, code in spellings if "xm-xla-device" not in ids(code)] == []
    assert [code for code, id in CASES["forms"].items() if id not in ids(code)] == []


def test_a_short_name_is_found_in_every_spelling():
    for code in CASES["short-names"]["codes"]:
        assert ids(code)
        cell = {"cell_type": "code", "source": code}
        assert may_concern(json.dumps({"cells": [cell]}).encode())


def test_place_and_words():
    code = "é = 'ü'; import torch_xla.core.xla_model as xm; d = xm.xla_device()\n"
    (finding,) = findings(code)
    assert (finding.line, finding.column) == (1, code.index("xm.xla_device") + 1)
    assert finding.status == "deprecated"
    assert finding.as_json() == {
        "path": "a.py", "cell": None, "line": 1, "column": 53, "old": "xm.xla_device()",
        "new": "torch_xla.device()", "since": "torch_xla 2.8", "status": "deprecated",
        "id": "xm-xla-device", "fixable": True, "effect": "warns",
    }  # fmt: skip


def test_advice_is_about_what_stands_there():
    for code, advice in CASES["advice"].items():
        (finding,) = findings(code)
        assert finding.new == advice


# -- the table against the packages that are installed ------------------------------------------
WRONG_STATUSES = """
import importlib, json, os, sys
os.environ["PJRT_DEVICE"] = "CPU"
from tpukit.knowledge.calls import old_calls

def there(name):
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False

wrong = []
for row in old_calls():
    if row.kind in ("name", "module"):
        for name in row.names:
            package = name.partition(".")[0]
            if package == sys.argv[1] and there(name) == (row.status == "removed"):
                wrong.append((row.status, name))
print(json.dumps(wrong))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "package", ["timm", "numpy", pytest.param("torch_xla", marks=pytest.mark.xla)]
)
def test_rows_are_true_of_the_installed_release(package):
    assert last_json(python("-W", "ignore", "-c", WRONG_STATUSES, package)) == []


def test_torch_rows_are_true_of_the_installed_release():
    torch = importlib.import_module("torch")
    schedulers = importlib.import_module("torch.optim.lr_scheduler")
    for row in old_calls():
        for name in row.names if row.id == "scheduler-verbose" else ():
            scheduler = getattr(schedulers, name.rpartition(".")[2])
            assert "verbose" not in inspect.signature(scheduler).parameters
    with pytest.warns(FutureWarning):
        torch.cuda.amp.GradScaler(enabled=False)
    with pytest.warns(FutureWarning), torch.cuda.amp.autocast(enabled=False):
        pass


def test_a_variable_that_is_only_set_raises_nothing():
    head = "import os\n"
    (read,) = findings(head + "os.environ['COLAB_TPU_ADDR']")
    (written,) = findings(head + "os.environ['XRT_TPU_CONFIG'] = 'x'")
    assert (read.status, read.effect) == ("removed", "raises")
    assert (written.status, written.effect) == ("habit", "no effect")
    both = head + "os.environ['XRT_TPU_CONFIG'] = 'x'\nprint(os.environ['XRT_TPU_CONFIG'])\n"
    assert [f.effect for f in findings(both)] == ["no effect"]
    tested = head + "if 'COLAB_TPU_ADDR' in os.environ:\n    os.environ['COLAB_TPU_ADDR']\n"
    assert ids(tested) == []
    assert ids(tested.replace("'COLAB_TPU_ADDR' in os.environ", "'KAGGLE_URL' in os.environ")) != []


def test_every_row_says_what_happens():
    assert all(row.effect for row in old_calls())


@pytest.mark.parametrize(
    ("code", "remark"),
    [
        ("xmp.spawn(f, nprocs=FLAGS.num_cores)", "--num_cores then limits nothing"),
        ("xmp.spawn(f, nprocs=args['cores'])", "--cores then limits nothing"),
        ("xmp.spawn(f, nprocs=config['devices'])", "that value then limits nothing"),
        ("xmp.spawn(f, nprocs=count())", "that value then limits nothing"),
        ("xmp.spawn(f, nprocs=8)", ""),
        ("xmp.spawn(f, nprocs=8, join=False)", "join has no counterpart"),
        ("xmp.spawn(*f, nprocs=8)", "come from * or **"),
    ],
)
def test_what_a_fix_takes_away_or_leaves(code, remark):
    head = "import torch_xla.distributed.xla_multiprocessing as xmp\n"
    (finding,) = findings(head + code)
    assert remark in finding.remark
    assert bool(finding.remark) == bool(remark)
    assert finding.fixable == ("join" not in code and "*" not in code)


def test_a_new_name_that_means_something_else_is_a_reason():
    (finding,) = findings(XM + "torch_xla = 3\nd = xm.xla_device()")
    assert not finding.fixable
    assert "torch_xla means something else" in finding.remark


def test_a_use_that_is_not_called_is_not_called_fixable():
    (finding,) = findings(XM + "dev = xm.xla_device")
    assert (finding.fixable, finding.remark) == (False, "not fixed: it is not called here")
