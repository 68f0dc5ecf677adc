"""Data that changed or is not there, through the command line."""

import json
import shutil
from pathlib import Path

import pytest

from tpukit import cli
from tpukit.commands.output import Output
from tpukit.tasks.eit.generate import SimulatedData, make_dataset


@pytest.fixture
def train(tmp_path, monkeypatch, capsys):
    """Trains in this process on a folder below `tmp_path`; (exit code, JSON fields or error)."""
    answers: list[dict] = []
    monkeypatch.setattr(Output, "result", lambda self, fields: answers.append(dict(fields)))
    monkeypatch.chdir(tmp_path)

    def run(folder: str, steps: int) -> tuple[int, dict, str]:
        code = cli.run(["train", "--size", "tiny", "--hw", "cpu", "--data-path", folder,
                        "--results-dir", "run", "--global-batch-size", "2", "--accumulate",
                        "1", "--set", "schedule=constant", "--max-steps", str(steps)])  # fmt: skip
        return code, answers[-1] if answers and code == 0 else {}, capsys.readouterr().err

    return run


def make(folder: Path, seed: int) -> None:
    make_dataset(SimulatedData(10, seed, workers=1), folder)


@pytest.mark.slow
def test_a_run_resumes_on_its_data_wherever_it_lies_and_on_no_other(train, tmp_path):
    make(tmp_path / "first", 0)
    make(tmp_path / "second", 1)
    assert train("first", 1)[0] == 0
    shutil.copytree("first", "copy", copy_function=shutil.copyfile)
    code, fields, _ = train("copy", 2)
    assert (code, fields["resumed_from"], fields["steps"]) == (0, 1, 2)
    shutil.rmtree("copy")
    Path("second").rename("copy")
    code, _, told = train("copy", 3)
    assert code == 2 and "data was" in told and "--no-resume" in told
    state = json.loads((tmp_path / "run/checkpoints/step-00000002/state.json").read_text())
    assert state["identity"]["data"] in told


def test_a_given_path_that_does_not_exist_is_an_error(train, tmp_path):
    (tmp_path / "data" / "train").mkdir(parents=True)
    code, _, told = train("elsewhere", 1)
    assert code == 2 and "There is no data at elsewhere" in told
    assert not Path("run").exists()
