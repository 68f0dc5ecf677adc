"""Models that others ship train on the XLA path as they are; see docs/models.md.

pytest tests/zoo -m '' -k timm-resnet: one model.
"""

import pytest
from runs import last_json, script
from zoo_models import entries
from zoo_page import PAGE, page
from zoo_stages import Outcome

ENTRIES = entries()
NAMES = [
    pytest.param(name, marks=() if entry.quick else pytest.mark.slow)
    for name, entry in ENTRIES.items()
    if not entry.recorded
]


def assert_passes(name: str, stage: str) -> None:
    done = script("zoo_stages.py", stage, name, env={"PJRT_DEVICE": "CPU"}, timeout=600)
    assert Outcome(**last_json(done)).failed_checks() == {}


@pytest.mark.xla
@pytest.mark.parametrize("name", NAMES)
def test_a_step_equals_the_cpu_s_and_later_ones_compile_nothing(name):
    assert_passes(name, "trains")


@pytest.mark.slow
@pytest.mark.plan
@pytest.mark.parametrize("name", [name for name, entry in ENTRIES.items() if not entry.recorded])
def test_the_step_compiles_for_a_tpu(name):
    assert_passes(name, "compiles")


def test_every_family_of_timm_is_in_the_zoo():
    from timm.models import list_modules

    families = {entry.family for entry in ENTRIES.values() if entry.library == "timm"}
    assert families == set(list_modules())


def test_the_page_is_what_the_tables_say():
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python tests/support/zoo_page.py`"
