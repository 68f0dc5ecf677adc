"""What probe-batch prints for people."""

from dataclasses import replace
from pathlib import Path

from tpukit.commands.reports.batch import as_fields, as_text, table
from tpukit.commands.reports.inline import result_tables
from tpukit.io.units import GIB
from tpukit.probe.batch.recommend import Recommendation
from tpukit.probe.targets import find_target
from tpukit.probe.trial import Prediction, Trial, memory_by_kind


def recommendation() -> Recommendation:
    scores = {"size_bytes": GIB, "shape": "f32[8,8]", "operator": "softmax",
              "place": f"{Path.cwd()}/model.py:73"}  # fmt: skip
    kept = {"size_bytes": GIB // 2, "shape": "f32[4]", "operator": "copy", "place": None}
    memory = memory_by_kind(15 * GIB, 0, {"parameters": GIB, "optimizer": 2 * GIB})
    fits = Trial(
        20, True, 15 * GIB, 16 * GIB, memory=memory, flops=1e12, kernel_flops=0.0,
        bytes_accessed=1e11, largest=(scores, scores, scores, kept), effort="full", compiles=2,
        seconds=80.0, collectives={"all-reduce": 5}, collective_bytes=2**20, parameters=124_000_000,
    )  # fmt: skip
    over = Trial(21, False, 17 * GIB, 16 * GIB, effort="full", compiles=1, seconds=70.0)
    return Recommendation(
        find_target("v5e-8"), {"libtpu": "0.0.21"}, 8, 20, 21, True, 20, 1, (fits, over), 150.0
    )


def test_a_recommendation_for_people():
    lines = list(as_text(recommendation(), "mine", "tpukit train"))
    text = "\n".join(lines)
    assert "mine on v5e-8 (8 devices), by the TPU compiler libtpu 0.0.21" in lines
    assert "Largest: 20 a device (160 in all): it fits, and 21 does not; both were tried." in lines
    # One line of a model in three layers is one line here, its place as a person would give it.
    assert "    1.00 GiB  f32[8,8] x 3  softmax  model.py:73" in lines
    assert "    0.50 GiB  f32[4]  copy" in lines
    assert "Collectives a step: 5 all-reduce (1 MiB a device)" in lines
    assert "Estimate (roofline" in text
    assert lines[-1] == "Train with: tpukit train"


def test_each_form_of_a_task_has_a_line():
    found = recommendation()
    fast = replace(found.trials[0], devices=8)
    slow = replace(found.trials[0], flops=None)
    forms = {
        "slim = False": None,
        "slim = True, x = 1": replace(found, trials=(fast,)),
        "slim = None": replace(found, largest=40, trials=(slow,)),
    }
    found = replace(found, form="slim = True, x = 1", forms=forms)
    lines = list(as_text(found, "mine", None))
    assert "With slim = False: none fits" in lines
    # 0.1 TB at 819 GB/s take 0.122 s a step of 160 samples.
    about = "largest 20 a device, best 20, estimated at most 1,310 samples/s; recommended"
    assert f"With slim = True, x = 1: {about}" in lines
    assert "With slim = None: largest 40 a device, best 20" in lines
    fields = as_fields(found, "mine", None)
    assert fields["form"] == found.form and fields["forms"]["slim = False"] is None
    assert fields["forms"]["slim = None"]["largest_batch_per_device"] == 40
    alone = as_fields(recommendation(), "mine", None)
    assert (alone["form"], alone["forms"]) == (None, {})


def test_what_an_unread_program_does_is_null_and_not_none_at_all():
    found = recommendation()
    fields = as_fields(found, "mine", None)
    assert (fields["collectives"], fields["step"]["collective_bytes"]) == ({"all-reduce": 5}, 2**20)
    unread = replace(found.trials[0], unread=True, flops=None, collectives={}, collective_bytes=0)
    fields = as_fields(replace(found, trials=(unread, found.trials[1])), "mine", None)
    assert fields["collectives"] is None
    unknown = ("flops", "collective_bytes", "estimate_seconds")
    assert [fields["step"][name] for name in unknown] == [None] * 3
    assert sum(fields["memory"].values()) == 15 * GIB


def test_a_cell_that_shows_the_trials_has_no_text_of_them(monkeypatch):
    """`%tpukit` shows a table and a picture of them below the command's lines."""
    found = recommendation()
    shown = next(t for t in result_tables(as_fields(found, "mine", None)) if "verdict" in t[0])
    assert [row[:3] for row in shown[1:]] == [
        ["20", "15.00 GiB", "near"],
        ["21", "17.00 GiB", "over"],
    ]
    text = "\n".join(as_text(found, "mine", None))
    assert "batch a device" in text and "█" in text
    monkeypatch.setenv("TPUKIT_RESULT", "result.json")
    text = "\n".join(as_text(found, "mine", None))
    assert "batch a device" not in text and "█" not in text and "Recommended: 20" in text


def test_how_far_predictions_are_off_is_said():
    def measured(batch, gib):
        predicted = Prediction("t4", True, 10 * GIB, 14 * GIB, None, round(gib * GIB))
        return Trial(batch, True, round(gib * GIB), 14 * GIB, predicted=predicted)

    trials = (measured(1, 10.2), measured(2, 9.9), Trial(3, False, None, 14 * GIB))
    found = replace(recommendation(), target=None, trials=trials, recommended=2)
    assert "Predicted memory beside measured: -2.0% to +1.0%." in as_text(found, "mine", None)
    assert not any("beside measured" in line for line in as_text(recommendation(), "mine", None))


def test_what_was_not_tried_is_said():
    fits = Trial(
        4, True, GIB, 16 * GIB, samples_per_second=0.1, devices=1, seconds=90.0, samples=4000
    )
    slow = Trial(8, False, error="no result within 10m00s (--time-limit)", slow=True, seconds=600.0)
    shared = (None, {}, 1, 4, None, False, 4, 1)
    found = Recommendation(*shared, (fits, slow), 700.0, None, "time", 8, 90)
    lines = list(as_text(found, "eit", None))
    assert any(line.split()[:3] == ["8", "unknown", "slow"] for line in lines)
    assert "Largest tried that fits: 4 a device (4 in all), with 6% of the memory." in lines
    assert "Too slow to try: 8: no result within 10m00s (--time-limit)." in lines
    # 90 samples, ten seconds each.
    about = "about 90, not tried: a step of it takes about 15m00s here."
    assert f"Largest by the line through what was tried: {about}" in lines
    assert as_fields(found, "eit", None)["trials"][1]["fits"] is None
    faster = Recommendation(*shared, (fits,), 90.0, None, "speed", None, 90)
    assert "A larger batch is hardly faster on a CPU." in list(as_text(faster, "eit", None))
    # 24 samples take 240 s a step, and a trial two and a half of them beside its 0 s.
    longer = Recommendation(*shared, (fits,), 90.0, None, "time", 24, 90)
    said = "Too slow to try: 24: its trial would take about 10m00s (--trial-time, --max-time)."
    assert said in list(as_text(longer, "eit", None))


def test_of_a_batch_predicted_twice_the_last_prediction_is_shown():
    guessed, traced = (
        Trial(8, True, used * GIB, 16 * GIB, used_range=(used * GIB, 9 * GIB)) for used in (6, 7)
    )
    rows = list(table((guessed, traced)))
    assert len(rows) == 2 and "7.00" in rows[1]


def test_the_first_rows_of_what_was_written_are_shown(tmp_path):
    out = tmp_path / "submission.csv"
    out.write_text("id,summary\n" + "".join(f"{row},{'a' * 200_000}\n" for row in range(5)))
    (table,) = result_tables({"path": str(out)})
    assert table == [["id", "summary"], *([str(row), "a" * 80] for row in range(3))]
    out.write_text("1,2\n3\n")  # of a user's task, and no table
    assert [*result_tables({"path": str(out)})] == []
