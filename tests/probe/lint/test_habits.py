"""Habits beyond the examples in their classes: each found where it is slow or wrong on TPU, and not
beside it."""

from cases import read_cases
from scanned import findings, ids

CASES = read_cases(__file__)
XLA, LOOP, LOADER = (CASES["texts"][name] for name in ("XLA", "LOOP", "LOADER"))


def test_a_habit_is_found_where_it_is():
    cases = [(habit, *case) for habit, found in CASES["found"].items() for case in found.items()]
    assert [(habit, name) for habit, name, code in cases if habit not in ids(code)] == []


def test_a_habit_is_not_found_beside_it():
    cases = [(habit, *case) for habit, absent in CASES["absent"].items() for case in absent.items()]
    assert [(habit, name) for habit, name, code in cases if habit in ids(code)] == []


def test_a_good_script_has_none():
    code = (
        XLA
        + """
import torch_xla.runtime as xr
import torch_xla.distributed.parallel_loader as pl
from torch.utils.data import DataLoader

def train(index):
    device = torch_xla.device()
    model = Model().to(device)
    loader = pl.MpDeviceLoader(DataLoader(data, batch_size=8, drop_last=True), device)
    for step, x in enumerate(loader):
        with torch.autocast("xla", dtype=torch.bfloat16):
            loss = model(x)
        loss.backward()
        xm.optimizer_step(optimizer)
        if step % 50 == 0:
            xm.add_step_closure(lambda loss: print(loss.item()), args=(loss,))
    xm.save(model.state_dict(), "model.pt")

if __name__ == "__main__":
    torch_xla.launch(train)
"""
    )
    assert ids(code) == []


def test_columns_count_characters():
    code = LOOP + "    é = 'ü'; total += loss.item()\n"
    (finding,) = findings(code)
    assert finding.column == code.splitlines()[-1].index("loss.item") + 1


def test_one_read_is_one_finding():
    assert ids(LOOP + "    print(f'{step}', loss.detach().cpu().item())\n") == ["read-in-step"]
    assert ids(LOOP + "    value = loss.item()\n    print('loss', value)\n") == ["read-in-step"]
    assert ids(LOOP + "    shown_loss = loss.item()\n    print(shown_loss)\n") == ["read-in-step"]


def test_a_drop_last_that_is_written_is_quoted():
    code = LOADER + "train = DataLoader(d, batch_size=8, drop_last=False)\n"
    (finding,) = findings(code)
    assert "drop_last=False" in finding.old
    assert finding.effect == "recompiles for the last batch"
