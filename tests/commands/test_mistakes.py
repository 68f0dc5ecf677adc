"""Mistakes in a task: two lines with its method, the user's own file and line, and the way on."""

import re
from pathlib import Path

import mistaken_tasks
import pytest
import torch
from runs import VIRTUAL_TPU, failure, result, tpukit

from tpukit import cli
from tpukit.errors import UsageError
from tpukit.train.checks import check_examples
from tpukit.train.loader import example_batches
from tpukit.train.task import PlanSettings
from tpukit.train.user_code import code_warnings

FILE = mistaken_tasks.__file__
SOURCE = Path(FILE).read_text().splitlines()
RETURNED = {
    "BareTensor": ("BareTensor.loss", "a tensor of shape ()", 'Return {"loss": loss}'),
    "Number": ("Number.loss", "a float", 'Return {"loss": loss}'),
    "WithoutKey": ("WithoutKey.loss", "without 'loss' (it has 'error')", 'Return {"loss": loss}'),
    "MatrixLoss": ("MatrixLoss.loss", "shape (8, 2) for a batch of 8 rows", "shape (8,)"),
    "FewRows": ("FewRows.loss", "shape (1,) for a batch of 8 rows", "shape (8,)"),
    "Detached": ("Detached.loss", "without a gradient", "without `.item()`"),
    "NumberBesideIt": ("NumberBesideIt.loss", "'worst' as a float", "without `.item()`"),
    "OtherWeight": ("OtherWeight.loss", "'weight' of shape () for", "same shape"),
    "ShortBatch": ("ShortBatch.collate", "'mask' of shape (3,) for a batch of 8 rows", "one row a"),
    "Pair": ("Pair.datasets", "a tuple", "Return Datasets(train, valid)"),
    "Empty": ("Empty.datasets", "training data without samples", "--data-path"),
    "EmptyValidation": ("EmptyValidation.datasets", "validation data without", "(train, None)"),
    "WithoutReturn": ("WithoutReturn.build_model", "returned None", "Return the model"),
    "SparseGradients": ("SparseGradients.build_model", "'1' is an Embedding with", "Leave sparse"),
    "InAList": ("InAList.build_model", "Kept.kept holds parameters in a list", "ParameterList"),
    "InADict": ("InADict.build_model", "Kept.kept holds parameters in a dict", "nn.ModuleDict"),
    "Lazy": ("Lazy.build_model", "'0.weight' has no shape yet", "Call the model once"),
    "DrawsNothing": ("DrawsNothing.draw", "returned None", "Return the sample"),
    "WithoutIdentity": ("WithoutIdentity.identity", "returned None", "plain values"),
    "TorchGroups": ("TorchGroups.parameter_groups", "returned a dict", "ParameterGroup("),
    "ListPlan": ("ListPlan.plan", "a list", "`steps_per_epoch()`"),
    "WithoutMethods": ("WithoutMethods", "`build_model`, `datasets`", "def datasets(self)"),
    "OwnScore": ("OwnScore.score", "takes (self, prediction); tpukit calls", "Rename it"),
    "LossOfABatch": ("LossOfABatch.loss", "with (model, batch)", "`def loss(self, model, batch)`"),
    "Tuples": ("Rows.__getitem__", "as a tuple, not a dict", "`named(data, "),
    "LibraryTuples": ("LibraryTuples.datasets", "as a tuple, not a dict", "`named(data, "),
    "Strings": ("Rows.__getitem__", "'name' as a str", "tokenize"),
    "Ragged": ("Rows.__getitem__", "differ in 'x': shapes", "Pad them"),
}  # fmt: skip
"""Task -> the code that is named with its place, what it did, what to do."""
RAISED = {
    "MissingLabel": ("Rows.__getitem__", "KeyError: 'label'", "MissingLabel.make", "traceback"),
    "RaggedOwn": ("RaggedOwn.collate", "ValueError: samples", None, "traceback"),
    "Doubles": ("Sound.loss", "Double and Float", None, "`array.astype(np.float32)`"),
    "WithoutGradients": ("WithoutGradients.loss", "does not require grad", None, "enable_grad"),
    "TupleForTensor": ("TupleForTensor.loss", "'tuple' object", None, "traceback"),
    "OtherWidth": ("Sound.loss", "cannot be multiplied", "Wide.forward", "traceback"),
    "FailingConstructor": ("FailingConstructor.__init__", "KeyError: 'width'", None, "--debug"),
    "OtherKey": ("OtherKey.loss", "KeyError: 'input'", None, "`batch` has 'x', 'y', 'mask'."),
    "ForwardWithoutReturn": ("Sound.loss", "'NoneType'", None, "`forward` end with `return`"),
    "NumpyInForward": ("Sound.loss", "call numpy()", "Numpy.forward", "Compute with torch in"),
}  # fmt: skip
"""Task -> the method that raised, the cause, the function of the innermost line, what to do."""


def told_by(capsys, code, *arguments):
    """The two lines of a command that fails in this process."""
    assert cli.run([str(argument) for argument in arguments]) == code
    told = capsys.readouterr().err
    assert "Traceback" not in told
    message, hint = told[told.index("Error: ") :].strip().splitlines()
    return message, hint


def train(name, folder):
    return ["train", "--task", f"{FILE}:{name}", "--hw", "cpu", "--results-dir", folder / "run"]


def defining_line(name):
    """The line of a class' or a function's definition, as `Rows.__getitem__`."""
    words = name.split(".")
    line = 0
    for word in words:
        pattern = re.compile(rf"\s*(class|def) {word}\b")
        line = next(n for n in range(line, len(SOURCE)) if pattern.match(SOURCE[n]))
    return line + 1


@pytest.mark.parametrize("name", RETURNED)
def test_a_wrong_value_names_the_method_that_gave_it(name, tmp_path, capsys):
    code, what, way = RETURNED[name]
    message, hint = told_by(capsys, 2, *train(name, tmp_path))
    assert f"{code} ({FILE}:{defining_line(code)})" in message
    assert what in message and way in hint


def test_an_attribute_with_the_name_of_a_method_is_refused(tmp_path, capsys):
    message, hint = told_by(capsys, 2, *train("NamedExport", tmp_path))
    assert "NamedExport.export is a str; tpukit calls a task's `export` itself" in message
    assert "define `def export(self, weights, artifacts, folder)`" in hint


@pytest.mark.parametrize("name", RAISED)
def test_an_exception_names_the_method_and_the_users_innermost_line(name, tmp_path, capsys):
    method, cause, inner, way = RAISED[name]
    message, hint = told_by(capsys, 1, *train(name, tmp_path))
    assert f"{method} raised " in message and cause in message and way in hint
    [(line, shown)] = re.findall(rf"at {re.escape(FILE)}:(\d+)(?: in [\w.]+)?: `(.*)`", message)
    assert SOURCE[int(line) - 1].strip() == shown
    assert (f" in {inner}: `" in message) == (inner is not None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to move to")
def test_cuda_is_left_out_of_a_task(tmp_path, capsys):
    message, hint = told_by(capsys, 1, *train("OnCuda", tmp_path))
    assert "OnCuda.loss raised" in message and ".cuda()" in message
    assert "`device=x.device`" in hint and "notebook" not in hint


def test_backward_is_the_engines(tmp_path, capsys):
    message, hint = told_by(capsys, 1, *train("Backward", tmp_path))
    assert "backward through the graph a second time" in message
    assert "leave `.backward()` out of `loss`: the engine calls it" in hint
    place = f"{FILE}:{defining_line('Backward.loss') + 2}"
    assert f"calls .backward() at {place}" in (tmp_path / "run" / "log.txt").read_text()


def test_clearing_gradients_is_the_engines():
    """It would take away those of the micro-batches before."""
    task = mistaken_tasks.Clearing()
    [warning] = code_warnings(task.loss, task.build_model(None))
    place = f"{FILE}:{defining_line('Clearing.loss') + 1}"
    assert (
        warning == f"Warning: the loss calls .zero_grad() at {place}: leave it out, the engine"
        " does it."
    )


@pytest.mark.parametrize(
    ("name", "forward", "lines", "call"),
    [("OutputOnCpu", "ToCpu.forward", 1, ".cpu()"),
     ("PrintsInForward", "Printing.forward", 2, "print"),
     ("NumpyInForward", "Numpy.forward", 1, ".numpy()")],
)  # fmt: skip
def test_what_forward_reads_is_warned_of(name, forward, lines, call, capsys):
    """Only what is read: a shape is printed a line above."""
    task = getattr(mistaken_tasks, name)()
    [warning] = code_warnings(task.loss, task.build_model(None))
    place = f"{FILE}:{defining_line(forward) + lines} ({call})"
    assert warning.startswith(f"Warning: {forward} reads a value at {place}: on a TPU")


@pytest.mark.slow
@pytest.mark.xla
@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("OutputOnCpu", "leave `.cpu()` and `.to(...)` out"),
        ("NumpyInForward", "Compute with torch"),
    ],
)
def test_what_leaves_xla_says_what_to_leave_out(name, way, tmp_path):
    arguments = [*train(name, tmp_path), "--hw", "tpu"]
    told = failure(tpukit(*arguments, env={**VIRTUAL_TPU, "CPU_NUM_DEVICES": "2"}), code=1)
    assert way in told and "model.to(device)" not in told


def test_the_run_keeps_the_traceback(tmp_path, capsys):
    _, hint = told_by(capsys, 1, *train("OtherWidth", tmp_path))
    log = tmp_path / "run" / "log.txt"
    assert str(log) in hint
    kept = log.read_text()
    assert "Traceback (most recent call last)" in kept and "in forward" in kept


def test_a_worker_names_the_users_line(tmp_path):
    done = tpukit(*train("MissingLabel", tmp_path), "--num-workers", "1")
    told = failure(done, code=1)
    line = defining_line("MissingLabel.make") + 1
    assert f"KeyError: 'label', at {FILE}:{line} in MissingLabel.make" in told
    assert 'sample(index)["label"]' in (tmp_path / "run" / "log.txt").read_text()
    told = failure(tpukit(*train("Strings", tmp_path), "--num-workers", "1"))
    assert "Rows.__getitem__" in told and "'name' as a str" in told


def test_an_estimate_that_fails_prints_nothing(tmp_path):
    done = tpukit(*train("FloatLabels", tmp_path))
    assert done.stdout.count("building") == 1
    assert done.stderr.startswith("Error: FloatLabels.loss raised"), done.stderr


def test_test_and_predict_name_the_method(tmp_path, capsys):
    assert cli.run([str(a) for a in train("ResultOfNothing", tmp_path)]) == 0
    capsys.readouterr()
    run = ["--run", tmp_path / "run", "--hw", "cpu"]
    message, _ = told_by(capsys, 2, "test", *run)
    assert "ResultOfNothing.evaluate" in message and "returned None" in message
    message, _ = told_by(capsys, 1, "predict", *run)
    assert "ResultOfNothing.predict raised AttributeError" in message and FILE in message


def test_a_value_that_the_loss_reads_is_warned_of(tmp_path):
    done = tpukit(*train("Reads", tmp_path))
    place = f"{FILE}:{defining_line('Reads.loss') + 2} (.item())"
    assert done.returncode == 0 and f"reads a value at {place}" in done.stdout


def test_a_file_that_cannot_be_imported_names_its_line(tmp_path, capsys):
    file = tmp_path / "broken.py"
    file.write_text("import math\n\nwidth = math.sqr(4)\n")
    message, _ = told_by(capsys, 2, "train", "--task", f"{file}:Any", "--hw", "cpu")
    assert "has no attribute 'sqr'" in message and f"{file}:3" in message


def probe(name):
    limits = ["--start", "4", "--max", "4", "--hw", "cpu", "--json"]
    return tpukit("probe-batch", "--task", f"{FILE}:{name}", *limits)


def test_a_probe_takes_its_batch_from_the_data():
    assert result(probe("Sound"))["largest_batch_per_device"] == 4


def test_example_batches_are_of_each_shape_and_checked():
    task, planned = mistaken_tasks.Sound(), PlanSettings(6, 6, 1, 0)
    [batch] = example_batches(task, planned)
    assert {name: tuple(t.shape) for name, t in batch.items()} == {
        "x": (6, 4),
        "y": (6, 2),
        "mask": (6,),
    }
    assert batch["mask"].sum() == 6
    lengths = [tuple(b["x"].shape) for b in example_batches(mistaken_tasks.TwoLengths(), planned)]
    assert lengths == [(6, 8), (6, 4)]
    rare = mistaken_tasks.OneLong()
    longest, shortest = example_batches(rare, planned)
    assert (longest["x"].shape, shortest["x"].shape, rare.seen_samples) == ((6, 70), (6, 2), 900)
    [batch] = example_batches(mistaken_tasks.WithoutMask(), planned)
    assert batch["mask"].tolist() == [1.0] * 6
    with pytest.raises(UsageError, match=r"probe_batches .*without 'mask'"):
        check_examples([{"x": batch["x"]}], mistaken_tasks.WithoutMask.probe_batches)
