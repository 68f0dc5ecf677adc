"""Models that others ship train on the XLA path as they are; see docs/models.md.

pytest tests/zoo -m '' -k timm-resnet: one model.
"""

import json

import pytest
from runs import script
from zoo_models import entries, exceptions
from zoo_page import PAGE, page, recorded
from zoo_stages import CHECKS, Outcome

ENTRIES, EXCEPTIONS = entries(), exceptions()
NAMES = [
    pytest.param(name, marks=() if entry.quick else pytest.mark.slow)
    for name, entry in ENTRIES.items()
    if not entry.recorded
]


def assert_as_listed(name: str, stage: str) -> None:
    """What is listed as an exception fails, with the message that is listed; all else passes."""
    listed = EXCEPTIONS.get(name, {"checks": []})
    done = script("zoo_stages.py", stage, name, env={"PJRT_DEVICE": "CPU"}, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    failed = Outcome(**json.loads(done.stdout.splitlines()[-1])).failed_checks()
    assert failed.keys() == set(listed["checks"]) & set(CHECKS[stage]), failed
    for message in failed.values():
        assert listed["message"] in message


@pytest.mark.xla
@pytest.mark.parametrize("name", NAMES)
def test_a_step_equals_the_cpu_s_and_later_ones_compile_nothing(name):
    assert_as_listed(name, "trains")


@pytest.mark.slow
@pytest.mark.plan
@pytest.mark.parametrize("name", [name for name, entry in ENTRIES.items() if not entry.recorded])
def test_the_step_compiles_for_a_tpu(name):
    assert_as_listed(name, "compiles")


def test_every_exception_is_of_a_model_and_says_why():
    assert EXCEPTIONS.keys() <= ENTRIES.keys()
    known = {check for checks in CHECKS.values() for check in checks}
    for listed in EXCEPTIONS.values():
        assert listed.keys() == {"checks", "message", "reason"}
        assert listed["checks"] and set(listed["checks"]) <= known
        assert listed["message"] and listed["reason"]


def test_the_record_holds_the_exceptions_and_no_other_failure():
    failed = {
        name: {check for check, message in checks.items() if message is not None}
        for name, checks in recorded().items()
    }
    listed = {name: set(entry["checks"]) for name, entry in EXCEPTIONS.items()}
    assert {name: checks for name, checks in failed.items() if checks} == listed


def test_nearly_every_model_passes():
    assert len(EXCEPTIONS) <= 0.05 * len(ENTRIES)


def test_every_family_of_timm_is_in_the_zoo():
    from timm.models import list_modules

    families = {entry.family for entry in ENTRIES.values() if entry.library == "timm"}
    assert families == set(list_modules())


def test_the_page_is_what_the_tables_say():
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python tests/support/zoo_page.py`"
