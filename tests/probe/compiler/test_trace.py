"""The step's program as the TPU compiler is given it."""

import pytest
from runs import VIRTUAL_TPU, last_json, script


@pytest.mark.xla
def test_a_result_shares_the_buffer_of_an_argument_of_its_own_form_alone():
    env = {**VIRTUAL_TPU, "CPU_NUM_DEVICES": "1"}
    assert last_json(script("on_tpu_compiler.py", "addresses", env=env)) == {
        "addresses": [[202, 1]]
    }
