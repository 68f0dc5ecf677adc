"""What a measured trial holds for the run that will follow it."""

from runs import printed, python

from tpukit.probe.trials.measure import RUN_BYTES

PACKING = """
if __name__ == "__main__":
    from tpukit.hardware.memory import data_bytes
    from tpukit.io.workers import map_ordered

    before = data_bytes()
    list(map_ordered(str, range(8), 2))
    print(data_bytes() - before)
"""


def test_packing_data_leaves_no_more_memory_than_a_trial_holds_for_it(tmp_path):
    """The first run packs its samples itself, after its memory was limited."""
    script = tmp_path / "packing.py"
    script.write_text(PACKING)
    assert 0 < int(printed(python(script))) <= RUN_BYTES * 0.6
