# ruff: noqa: E501 - a case is one line
"""Forms and families of errors that no entry was written for: what the answer may and must say."""

import pytest
from cases import read_cases
from explained_logs import causes, explained

from tpukit.knowledge.error_table import known_errors
from tpukit.probe.logs import explain_log, open_log

CASES = read_cases(__file__)
TB = CASES["texts"]["TB"]
LIBRARY = f'  File "{CASES["texts"]["SITE"]}{{}}", line 7, in {{}}\n    f(x)\n'
KEYS = 'RuntimeError: Error(s) in loading state_dict for Net:\n\tMissing key(s) in state_dict: "{}layer.0.norm.weight", "{}layer.0.norm.bias"{}.\n\tUnexpected key(s) in state_dict: "{}layer.0.norm.bias", "{}layer.0.norm.weight". '


def test_the_first_answer_is_the_cause_and_says_what_is_to_do():
    wrong = {}
    for name, (id, word, log) in CASES["first-answer"].items():
        first = explained(log)[0]
        if (first.id, first.role) != (id, "cause") or word not in f"{first.cause} {first.fix}":
            wrong[name] = [(each.id, each.role) for each in explained(log)]
    assert wrong == {}


def test_every_text_of_a_family_is_explained_first():
    texts = [(id, text) for id, family in CASES["families"].items() for text in family]
    assert [(id, text) for id, text in texts if [e.id for e in explained(text)][:1] != [id]] == []


def test_a_text_that_only_looks_like_a_family():
    near = CASES["near-misses"].items()
    assert [(id, text) for text, id in near if explained(text)[0].id != id] == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("AttributeError: 'DataFrame' object has no attribute 'append'", "Instead: pd.concat"),
        ("ImportError: cannot import name 'simps' from 'scipy.integrate'", "Instead: simpson"),
        ("TypeError: XGBModel.fit() got an unexpected keyword argument 'early_stopping_rounds'", "xgboost 2.1 has it no more"),
        ("AttributeError: module 'torch.library' has no attribute 'register_fake'", "since torch 2.4"),
        ("TypeError: OneHotEncoder.__init__() got an unexpected keyword argument 'sparse'", "sklearn 1.4 has it no more"),
        ("ModuleNotFoundError: No module named 'torchvision.transforms.functional_tensor'", "torchvision 0.17 has it no more"),
        ("AttributeError: 'LitModel' object has no attribute 'speed'", "install the release"),
        ("AttributeError: type object 'frob._enums.Mode' has no attribute 'FAST'", "install the `frob` that it was written for"),
        ("ModuleNotFoundError: No module named 'faiss'", "`python -m pip install faiss-cpu`"),
        ("ValueError: --frob requires a newer GPU", "With `--frob` the program needs a newer GPU"),
        (KEYS.format("model.", "model.", "", "", ""), "differ by the prefix `model.`, which those of the file lack"),
        (KEYS.format("", "", ', "a.b.c"' * 60, "_orig_mod.", "_orig_mod."), "Strip `_orig_mod.`"),
        (KEYS.format("enc.layers.1.", "enc.layers.2.", "", "", ""), "these are another model's weights".capitalize()),
        ("ImportError: cannot import name 'is_offline_mode' from 'huggingface_hub'", "'huggingface_hub>=1.2'` (then `pip check`)"),
        ("ptxas-blackwell fatal   : Value 'sm_110a' is not defined for option 'gpu-name'", "`TRITON_PTXAS_BLACKWELL_PATH`"),
        ("Unsupported global: GLOBAL a.B was not an allowed global by default. weights_only", "add_safe_globals([a.B])`"),
        ("_pickle.UnpicklingError: Weights only load failed. This file can", "add_safe_globals([...])`"),
        ("Ran out of memory in memory space vmem. Used 65.05M of 64.00M vmem.", "a higher limit than 64.00M"),
        ("E1 cuda_dnn.cc:456] Loaded runtime CuDNN library: 9.1.1 but source was compiled with: 9.8.0.", "at least 9.8.0"),
        ("WARNING: Torch 2.9 is not supported. Supported: 2.8", "Install Torch 2.8"),
    ],
)  # fmt: skip
def test_names_of_general_libraries(text, said):
    first = explained(text)[0]
    assert said in f"{first.cause} {first.fix}"


@pytest.mark.parametrize(
    ("message", "id"),
    [("ImportError: flash-attn is not installed. Please install it, e.g., `pip install flash-attn`.", "flash-attention-rejected"),
     ("ValueError: Triton needs to be installed to use frob's kernels", "triton-failed"),
     ("AssertionError: Triton sparse frob requires d_v divisible by 128, got 8", "triton-failed"),
     ("RuntimeError: Cannot find CUTLASS headers required for JIT compilation. Please install flashinfer", "kernel-refuses"),
     ("RuntimeError: use_te_rng_tracker requires TransformerEngine version >= 1.5", "kernel-refuses"),
     ("ValueError: --enable-frob requires tp_size > 1: there is no sequence to shard across a single TP rank.", "spmd-failed")],
)  # fmt: skip
def test_what_is_needed_for_a_kernel_is_not_a_kernel_that_failed(message, id):
    first = explained(TB + LIBRARY.format("frob/core.py", "f") + message)[0]
    assert first.id != id and first.role == "cause"


@pytest.mark.parametrize(
    "log",
    ["A matching Triton is not available, some optimizations will not be enabled.\n"
     "Error caught was: No module named 'triton'",
     "WARNING: Could not import frobs: No module named 'frobs'",
     "Found GPU0 NVIDIA GB10 which is of cuda capability 12.1.\nMinimum and Maximum cuda capability "
     "supported by this version of PyTorch is (8.0) - (12.0)\nstep 1 loss 2.0",
     "Failed to import frob: ValueError: odd thing here, falling back to eager\nstep 1 loss 2.0",
     "* [bugfix] Fix failing test: RuntimeError: frob is odd", "fix: error on load: ValueError: frob",
     "You may see an error: RuntimeError: frob is odd", "errors: ValueError: 3 of 40 files",
     "[W1102 03:11:22.1 socket.cpp:755] [c10d] The client socket has failed to connect to [node11]:29500"
     " (errno: 111 - Connection refused).\n[rank0]: NCCL version 2.27.5\nepoch 1 loss 0.2",
     "frob 4.5 requires hub<1.0, but you have hub 1.0.0 which is incompatible.\nstep 1 loss 2.0",
     "To use it, place the model files in /models/frob.\nstep 1 loss 2.0",
     "An NVIDIA GPU may be present on this machine, but a CUDA-enabled jaxlib is not installed. "
     "Falling back to cpu.\nstep 1 loss 2.0"],
)  # fmt: skip
def test_what_a_program_lives_without_is_no_cause(log):
    assert causes(log) == []


def test_an_exception_of_a_library_is_explained_by_where_it_comes_from():
    imported = TB + LIBRARY.format("frob/__init__.py", "<module>") + "FrobError: too old"
    first = explained(imported)[0]
    assert (
        "`frob` raised it while it was imported" in first.cause
        and "one small batch" not in first.fix
    )
    called = explained(TB + LIBRARY.format("frob/core.py", "check") + "FrobError: too odd")[0]
    assert (
        "`frob` (core.py:7) refuses what train.py:3 gives" in called.cause
        and "train.py:3" in called.fix
    )
    assert "print the values" in explained(TB + "FrobError: too odd")[0].fix


def test_only_a_text_with_one_cause_is_certain():
    sure = {entry.id for entry in known_errors() if entry.is_certain}
    assert {"unscale-fp16-gradients", "fp16-on-xla"} <= sure
    assert not {"nccl-remote-error", "cuda-no-driver", "package-build-failed"} & sure


def test_a_symptom_alone_is_the_cause_and_a_launchers_report_is_not():
    assert causes("Segmentation fault (core dumped)") == ["segmentation-fault"]
    assert causes("Sending process 12 closing signal SIGTERM") == []
    assert causes("Segmentation fault (core dumped)\n" + TB + "KeyError: 'a'") == ["key-missing"]


@pytest.mark.parametrize(
    ("log", "has_error"),
    [("step 1 loss 2.0\nstep 2 loss 1.9\n0 errors, 2 steps", False), ("step 1\nerror: frob it", True),
     (TB + "FrobError: odd", True), ("Exception ignored in: <generator f at 0x1>\n" + TB + "FrobError: odd", False), ("UserWarning: frob is deprecated", False)],
)  # fmt: skip
def test_an_error_is_seen_or_not(tmp_path, log, has_error):
    path = tmp_path / "log"
    path.write_text(log)
    assert explain_log(open_log(str(path), 20.0), known_errors()).has_error == has_error


def test_your_line_is_named_where_only_the_outer_exception_shows_it():
    inner = TB.replace("/code/train.py", "/usr/lib/python3.12/site-packages/frob/core.py")
    link = "\nThe above exception was the direct cause of the following exception:\n\n"
    first = explained(f"{inner}KeyError: 'speed'\n{link}{TB}KeyError: 'speed'")[0]
    assert "Raised at /code/train.py, line 3" in first.cause
