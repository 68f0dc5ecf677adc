"""`tpukit doctor` as a user runs it: text, JSON, exit codes, options that do not go together."""

import json

import pytest
from known_logs import LOGS
from runs import here, python, tpukit

from tpukit.commands.reports.machine import check_lines
from tpukit.probe.machine.verdict import Result, Verdict

XM = "import torch_xla.core.xla_model as xm\n"
FIELDS = {"ok", "hardware", "versions", "checks", "findings", "explanations"}


def answer(*arguments: object, code: int = 0, **options):
    done = tpukit("doctor", *arguments, "--json", **options)
    assert done.returncode == code, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 1, "one object and nothing else"
    return json.loads(lines[0])


# -- the machine ------------------------------------------------------------
def test_quick_fields():
    found = answer("--quick")
    assert set(found) >= FIELDS
    assert found["hardware"]["kind"] in ("tpu", "gpu", "cpu")
    for device in found["hardware"]["devices"]:
        assert device["name"]
        assert device["memory_bytes"] > 0
        assert device["bf16"] in ("native", "emulated", "none")
    assert found["versions"]["torch"]
    for check in found["checks"]:
        assert check["status"] in ("pass", "warn", "fail", "skip")
        assert check["message"]
        assert (check["fix"] is not None) == (check["status"] in ("warn", "fail"))
    assert found["ok"] == all(check["status"] != "fail" for check in found["checks"])


def test_a_missing_tpu_fails_when_asked_for():
    found = answer("--quick", "--hw", "tpu", code=1)
    assert not found["ok"]
    device = next(check for check in found["checks"] if check["id"] == "device")
    assert (device["status"], "probe-batch" in device["fix"]) == ("fail", True)


def test_a_variable_that_bites_and_strict():
    env = {"XLA_USE_BF16": "1"}
    found = answer("--quick", env=env)
    variables = next(check for check in found["checks"] if check["id"] == "variables")
    assert (variables["status"], variables["fix"][:18]) == ("warn", "unset XLA_USE_BF16")
    assert not answer("--quick", "--strict", env=env, code=1)["ok"]


@pytest.mark.xla
def test_report_shows_no_secret(tmp_path):
    env = {
        "HF_TOKEN": "hf_secretsecretsecret", "WANDB_API_KEY": "k1234567890", "HOME": str(tmp_path),
        "XLA_FLAGS": "--token=abcd1234 --xla_dump_to=" + str(tmp_path / "dump"),
        "PJRT_DEVICE": "CPU",
    }  # fmt: skip
    done = tpukit("doctor", "--quick", "--report", env=env)
    assert done.returncode == 0, done.stderr
    assert "PJRT_DEVICE=CPU" in done.stdout
    assert "versions: python" in done.stdout
    for secret in ("hf_secret", "k1234567890", str(tmp_path), "abcd1234"):
        assert secret not in done.stdout


@pytest.mark.xla
def test_every_check_runs_though_one_fails():
    env = {"PJRT_DEVICE": "TPU"}
    found = answer("--quick", env=env, code=1)
    assert [c["id"] for c in found["checks"] if c["status"] == "fail"] == ["pjrt-device"]
    assert len(found["checks"]) >= 20


# -- code ------------------------------------------------------------
def test_findings_and_exit_codes(tmp_path):
    (tmp_path / "old.py").write_text(XM + "xm.mark_step()\n")
    (tmp_path / "gone.py").write_text(XM + "xm.xrt_world_size()\n")
    found = answer(tmp_path / "old.py")
    (finding,) = found["findings"]
    wanted = {
        "path": str(tmp_path / "old.py"), "cell": None, "line": 2, "column": 1,
        "old": "xm.mark_step()", "new": "torch_xla.sync()", "since": "torch_xla 2.8",
        "status": "deprecated",
    }  # fmt: skip
    assert wanted.items() <= finding.items()
    assert set(found) >= FIELDS
    assert not answer(tmp_path, code=1)["ok"]
    answer(tmp_path / "old.py", "--strict", code=1)
    (tmp_path / "new.py").write_text("import torch_xla\ntorch_xla.sync()\n")
    assert answer(tmp_path / "new.py", "--strict")["findings"] == []


def test_diff_changes_nothing_and_fix_does(tmp_path):
    path = tmp_path / "old.py"
    path.write_text(XM + "xm.mark_step()\n")
    shown = tpukit("doctor", path, "--diff")
    assert {"-xm.mark_step()", "+torch_xla.sync()"} <= set(shown.stdout.splitlines())
    assert path.read_text() == XM + "xm.mark_step()\n"
    planned = answer(path, "--diff")
    assert planned["changed"] == []
    assert planned["diffs"] == [
        {"path": str(path), "diff": shown.stdout.partition(f"\n{path}:")[0]}
    ]
    assert answer(path)["diffs"] == []
    found = answer(path, "--fix")
    assert found["changed"] == [str(path)]
    assert found["findings"] == []
    assert "torch_xla.sync()" in path.read_text()
    assert (tmp_path / "old.py.bak").exists()
    assert answer(path, "--fix")["changed"] == []


def test_text_names_the_effect_and_folds_a_reason(tmp_path):
    path = tmp_path / "old.py"
    path.write_text(XM + "xm.mark_step()\n" * 8 + "xm.xrt_world_size()\n")
    lines = tpukit("doctor", path).stdout.splitlines()
    assert lines[0].startswith(f"{path}:10:1: raises: xm.xrt_world_size()")
    assert lines[1].startswith(f"{path}:2:1: warns: xm.mark_step()")
    assert lines[1].endswith("torch_xla.sync() (torch_xla 2.8); 7 more: 3, 4, 5, 6, 7 and 2 more")
    assert lines[2] == "1 file: 1 removed, 8 deprecated, 0 to avoid."
    assert "successor torch_tpu" in lines[3]
    every = tpukit("doctor", path, "--verbose").stdout
    assert every.count("warns: xm.mark_step()") == 8
    assert len(answer(path, code=1)["findings"]) == 9


def test_no_successor_where_torch_xla_is_not_concerned(tmp_path):
    (tmp_path / "a.py").write_text("import numpy as np\nnp.float(3)\n")
    assert "torch_tpu" not in tpukit("doctor", tmp_path / "a.py").stdout


def test_a_file_after_a_flag_is_not_the_flags(tmp_path):
    (tmp_path / "broken.py").write_text("x = (")
    done = tpukit("doctor", "--json", tmp_path / "broken.py")
    assert json.loads(done.stdout)["error"]["message"].startswith(f"{tmp_path}/broken.py: invalid")


def test_an_option_that_dies_with_a_fix_is_named(tmp_path):
    path = tmp_path / "a.py"
    path.write_text(
        "import torch_xla.distributed.xla_multiprocessing as xmp\n"
        "xmp.spawn(f, nprocs=FLAGS.num_cores)\n"
    )
    shown = tpukit("doctor", path, "--diff").stdout
    assert f"note: {path}: --fix drops nprocs=FLAGS.num_cores" in shown
    (note,) = answer(path, "--diff", code=1)["notes"]
    assert "--num_cores" in note


def test_findings_as_sarif(tmp_path):
    (tmp_path / "old.py").write_text(XM + "xm.mark_step()\n")
    (found,) = answer(tmp_path, "--sarif", tmp_path / "found.sarif")["findings"]
    document = json.loads((tmp_path / "found.sarif").read_text())
    (run,) = document["runs"]
    (kept,) = run["results"]
    place = kept["locations"][0]["physicalLocation"]
    assert document["version"] == "2.1.0"
    assert {rule["id"] for rule in run["tool"]["driver"]["rules"]} == {kept["ruleId"]}
    assert kept["ruleId"] == found["id"]
    assert place["artifactLocation"]["uri"] == str(tmp_path / "old.py")
    assert place["region"]["startLine"] == found["line"] == 2
    refused = tpukit("doctor", tmp_path, "--sarif", tmp_path / "no" / "found.sarif")
    assert refused.returncode == 2
    assert "cannot be written" in refused.stderr


def test_json_keeps_standard_error_quiet(tmp_path):
    (tmp_path / "old.py").write_text(XM + "xm.mark_step()\n")
    for arguments in ([tmp_path], [tmp_path, "--diff"], ["--quick"]):
        assert tpukit("doctor", *arguments, "--json").stderr == ""


def result(status: str, label: str) -> Result:
    fix = "do it" if status in ("fail", "warn") else None
    return Result(label, label, Verdict(status, f"message of {label}", fix))


def test_what_needs_action_comes_first_and_the_rest_is_folded():
    statuses = {"a": "pass", "b": "skip", "c": "warn", "d": "fail", "e": "pass"}
    results = [result(status, label) for label, status in statuses.items()]
    lines = check_lines(results, verbose=False)
    assert lines == [
        "FAIL d: message of d", "       do it", "WARN c: message of c", "       do it",
        "ok   2 passed, 1 skipped (--verbose lists them)",
    ]  # fmt: skip
    assert [line[:6] for line in check_lines(results, verbose=True)] == [
        "FAIL d", "      ", "WARN c", "      ", "-    b", "ok   a", "ok   e",
    ]  # fmt: skip


# -- logs ------------------------------------------------------------
def test_explanation_of_a_file(tmp_path):
    path = tmp_path / "log"
    path.write_text("step 1\n" + LOGS["tpu-oom-compile"])
    (explanation,) = answer("--explain", path, code=1)["explanations"]
    assert explanation["id"] == "tpu-oom-compile"
    assert explanation["line"] == 5
    assert all(explanation[name] for name in ("cause", "fix", "source"))
    told = tpukit("doctor", "--explain", path).stdout
    assert "First cause (line 5" in told
    assert "why:" in told
    assert "do:" in told


def test_explanation_from_a_pipe():
    done = python("-m", "tpukit", "doctor", "--explain", "-", input=LOGS["address-in-use"])
    assert done.returncode == 1
    assert "--master-port" in done.stdout


def test_nothing_is_known_is_said(tmp_path):
    path = tmp_path / "log"
    path.write_text("the FrobEngine failed to start \x1b]0;title\x07\x00\n")
    found = answer("--explain", path)
    assert found["explanations"] == []
    assert found["unknown"][0]["line"] == 1
    told = tpukit("doctor", "--explain", path).stdout
    assert "No known error in these 1 lines." in told
    assert "FrobEngine" in told


def test_own_knowledge(tmp_path):
    (tmp_path / "own.toml").write_text(
        '[[error]]\nid = "frob"\nmatch = ["cannot frob <n> times"]\n'
        'cause = "Worn out."\nfix = "Oil it."\n'
    )
    (tmp_path / "log").write_text("FrobError: cannot frob 31 times\n")
    found = answer("--explain", tmp_path / "log", "--knowledge", tmp_path / "own.toml", code=1)
    assert [e["id"] for e in found["explanations"]] == ["frob"]


# -- usage ------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["none.py"], "no such file"),
        (["--explain", "none.log"], "cannot be read"),
        (["--explain", "."], "is a folder"),
        (["--fix"], "need paths"),
        (["a.py", "--explain", "b"], "cannot be combined"),
        (["a.py", "--report"], "--report"),
        (["--hw", "abacus"], "abacus"),
        (["--explain", "log", "--knowledge", "none.toml"], "none.toml"),
    ],
)
def test_wrong_usage(tmp_path, arguments, said):
    (tmp_path / "log").write_text("x\n")
    done = here("doctor", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    failed = tpukit("doctor", *arguments, "--json", cwd=tmp_path)
    error = json.loads(failed.stdout)["error"]
    assert said in error["message"] + error["hint"] if error["hint"] else said in error["message"]


def test_error_boundary_explains_what_is_known(tmp_path):
    script = (
        "import sys\nimport tpukit.cli as cli\n"
        "def broken(*a, **k):\n"
        "    raise RuntimeError('CUDA out of memory. Tried to allocate 2.00 GiB')\n"
        "cli.app = broken\nsys.exit(cli.run(['train', '--json']))\n"
    )
    done = python("-c", script, cwd=tmp_path)
    assert done.returncode == 1
    error = json.loads(done.stdout)["error"]
    assert error["id"] == "cuda-oom"
    assert "smaller batch" in error["hint"]
