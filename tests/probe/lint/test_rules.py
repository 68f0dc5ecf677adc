"""The examples of every rule's class: the wrong one is found, the right one is not."""

import pytest
from scanned import ids

from tpukit.probe.lint.rules import RULES

HEAD = """\
import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
keep(scheduler)
done = lambda: optimizer.step()
"""


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_the_wrong_example_is_found_and_the_right_one_is_not(rule):
    assert rule.id in ids(HEAD + rule.wrong)
    assert rule.id not in ids(HEAD + rule.right)
    assert rule.__doc__ and rule.effect and rule.new
