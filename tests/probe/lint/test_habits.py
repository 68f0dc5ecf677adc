# ruff: noqa: E501 - a case is one line
"""Habits: each found where it is slow or wrong on TPU, and not beside it."""

import pytest

from tpukit.probe.lint.scan import module_findings
from tpukit.probe.lint.source import python_module

XLA = "import torch\nimport torch_xla\nimport torch_xla.core.xla_model as xm\n"
LOOP = (
    XLA + "for x in loader:\n    loss = model(x)\n    loss.backward()\n    xm.optimizer_step(opt)\n"
)
LOADER = XLA + "from torch.utils.data import DataLoader\n"
ACCELERATE = (
    "from accelerate import Accelerator\na = accelerator = Accelerator()\n"
    "for x in loader:\n    loss = model(x)\n    accelerator.backward(loss)\n    opt.step()\n"
)
RANKS = "import torch\nimport torch.distributed as dist\nfor x in loader:\n"
DDP = RANKS.replace(
    "for x in loader:", "DDP = torch.nn.parallel.DistributedDataParallel\nmodel = DDP(net)"
)
TRAIN = (
    XLA
    + """
def train(index):
    for x in loader:
        loss = model(x)
        loss.backward()
        optimizer.step()
        torch_xla.sync()
torch_xla.launch(train)
"""
)
ENCODE = XLA + "def encode(t):\n    x = tokenizer(t, padding=True)\n    return x\n"
CASES = {
    "read-in-step": (
        {
            "item in the loop": LOOP + "    total += loss.item()\n",
            "float of the loss": LOOP + "    losses.append(float(loss))\n",
            "a print of the loss": LOOP + "    print('loss', loss)\n",
            "a print of the loss in a text": LOOP + "    print(f'loss {loss:.3f}')\n",
            "a copy to the host": LOOP + "    losses.append(loss.detach().cpu())\n",
            "a compiled step": XLA + "def f(x):\n    loss = m(x)\n    loss.backward()\n    return loss\ng = torch.compile(f)\nfor x in l:\n    print(g(x).item())\n",
            "a comparison": LOOP + "    if loss > 10:\n        break\n",
            "a function of the loss that a library calls": XLA + "t = trainer(m, output_transform=lambda x, y, loss: loss.item())\n",
            "in a loop over the weights": LOOP + "    for p in model.parameters():\n        n += p.grad.norm().item()\n",
            "on one rank": LOOP + "    if rank == 0:\n        total += loss.item()\n",
            "where gradients are accumulated": LOOP + "    if (i + 1) % 4 == 0:\n        opt.step()\n        total += loss.item()\n",
            "a method of one step": XLA + "class T:\n    def one(self, x):\n        m(x).backward()\n    def run(self):\n        for x in l:\n            t += self.one(x).item()\n",
            "a step under another name": XLA + "def one(x):\n    m(x).backward()\nstep = one\nfor x in l:\n    t += step(x).item()\n",
            "a test of a part": LOOP + "    parts['loss'] = loss\n    if not torch.isfinite(parts['loss']):\n        break\n",
            "a test of a number": LOOP + "    if torch.isnan(loss):\n        break\n",
            "accelerate alone": ACCELERATE + "    total += loss.item()\n",
            "on a TPU": LOOP + "    if use_tpu:\n        total += loss.item()\n",
            "in a text": LOOP + "    bar.set_description(f'{loss:.3f}')\n",
            "in an old format": LOOP + "    bar.desc = '%d: %.3f' % (step, loss)\n",
            "a function of one step": XLA + "def step(x):\n    loss = m(x)\n    loss.backward()\n    return loss.item()\n",
        },
        {
            "now and then": LOOP + "    if step % 50 == 0:\n        print(loss.item())\n",
            "before the loop ends": LOOP + "    if broken:\n        print(loss.item())\n        break\n",
            "a key": XLA + "sorted(x, key=lambda each: each.item())\n",
            "after the loop": LOOP + "print(loss.item())\n",
            "a closure": LOOP + "    def closure():\n        print(loss.item())\n    xm.add_step_closure(closure)\n",
            "without XLA": "import torch\n" + LOOP[len(XLA):].replace("xm.optimizer_step(opt)", "opt.step()") + "    loss.item()\n",
            "off a TPU": LOOP + "    if not use_tpu:\n        total += loss.item()\n",
            "on a GPU": LOOP + "    if device.type == 'cuda':\n        total += loss.item()\n",
            "the other branch of a TPU": LOOP + "    if xla:\n        pass\n    else:\n        total += loss.item()\n",
            "a comparison with nothing": LOOP + "    if loss is None or loss == None:\n        break\n",
            "a comparison of another number": LOOP + "    if best_loss > 10:\n        break\n",
            "accelerate, now and then": ACCELERATE + "    if step % 50 == 0:\n        print(loss.item())\n",
            "accelerate, no step": ACCELERATE.replace("accelerator.backward(loss)", "pass") + "    total += loss.item()\n",
            "a function that trains for long": XLA + "def f():\n    for x in l:\n        m(x).backward()\nfor e in range(3):\n    print(f().item())\n",
            "no step": XLA + "for x in loader:\n    total += model(x).item()\n",
            "a print of words": LOOP + "    print('loss goes down')\n",
            "numbers in texts": LOOP + "    loss = loss.detach()\n    bar.desc = f'{mean_loss:.3f}' + 'loss %d' % step\n",
            "items of a dict": LOOP + "    for k, v in d.items(): pass\n",
        },
    ),
    "rank-leaves-loop": (
        {
            "a break on rank 0": RANKS + "    dist.barrier()\n    if rank == 0:\n        if bad: break\n",
            "each rank's own metric": DDP + "s = DistributedSampler(val_set)\nfor e in r:\n    y = model(x)\n    if patience > 3:\n        break\n",
            "a collective in a function": RANKS.replace("for", "def f(x):\n    dist.all_reduce(x)\nfor") + "    f(x)\n    if rank == 0 and bad:\n        break\n",
        },
        {
            "every rank": RANKS + "    dist.barrier()\n    if bad:\n        break\n",
            "one metric of all ranks": DDP + "s = DistributedSampler(val_set)\nfor e in r:\n    dist.all_reduce(model(x))\n    if patience > 3:\n        break\n",
            "the same data on each rank": DDP + "for e in r:\n    y = model(x)\n    if patience > 3:\n        break\n",
            "both branches": RANKS + "    dist.barrier()\n    if rank == 0:\n        break\n    else:\n        break\n",
            "a loop of its own": RANKS + "    dist.barrier()\n    if rank == 0:\n        for i in y:\n            break\n",
            "no collective": RANKS + "    if rank == 0:\n        break\nx.barrier()\n",
        },
    ),
    "saves-on-every-rank": (
        {
            "a script": DDP + "torch.save(model.state_dict(), 'a.pt')\n",
            "accelerate": "import torch\n" + ACCELERATE + "m = accelerator.prepare(m)\ntorch.save(m.state_dict(), f)\n",
            "a function that is spawned": DDP + "def main(rank):\n    if best:\n        save(x)\ndef save(x):\n    torch.save(x, f)\nspawn(main, nprocs=2)\n",
        },
        {
            "on rank 0": DDP + "if rank == 0:\n    torch.save(x, f)\n",
            "a function on rank 0": DDP + "def save(x):\n    torch.save(x, f)\nif is_main_process():\n    save(x)\n",
            "the others return": DDP + "def save(x):\n    if rank != 0:\n        return\n    torch.save(x, f)\nsave(x)\n",
            "accelerate's main process": "import torch\n" + ACCELERATE + "m = accelerator.prepare(m)\nif accelerator.is_main_process:\n    torch.save(x, f)\n",
            "a file for each": DDP + "torch.save(x, f'{rank}.pt')\n",
            "one rank": RANKS + "    torch.save(x, f)\n",
            "what others call": DDP + "def save(x):\n    torch.save(x, f)\n",
        },
    ),
    "growing-shape": (
        {"tokens": XLA + "while True:\n    x = torch.cat((x, f(x)), 1)\n"},
        {
            "on the host": XLA + "while True:\n    x = torch.cat((x, f(x).cpu()), 1)\n",
            "made anew": XLA + "for b in loader:\n    x = f(b)\n    if b:\n        x = torch.cat((x, x))\n",
            "unpacked anew": XLA + "for b in loader:\n    x, y = f(b)\n    x = torch.cat((x, y))\n",
            "of a network's layers": XLA + "for up in self.ups:\n    x = torch.cat((x, skips.pop()), 1)\n",
            "frames of pandas": XLA + "for e in r:\n    log = pd.concat([log, row])\n",
        },
    ),
    "unsynchronised-gradients": (
        {"mark_step for the sync": TRAIN, "in old words": TRAIN.replace("torch_xla.sync", "xm.mark_step")},
        {
            "optimizer_step": TRAIN.replace("optimizer.step()", "xm.optimizer_step(optimizer)"),
            "reduced by hand": TRAIN.replace("optimizer.step()", "xm.reduce_gradients(optimizer); optimizer.step()"),
            "one process": TRAIN.replace("torch_xla.launch(train)", "train(0)"),
            "SPMD": TRAIN + "torch_xla.runtime.use_spmd()\n",
            "DDP": TRAIN + "model = DistributedDataParallel(model)\n",
        },
    ),
    "scaler-on-xla": (
        {"torch.amp": XLA + "s = torch.amp.GradScaler()\n", "torch.cuda": XLA + "s = torch.cuda.amp.GradScaler()\n"},
        {
            "only on a GPU": XLA + "if device.type == 'cuda':\n    s = torch.amp.GradScaler()\n",
            "switched off": XLA + "s = torch.amp.GradScaler(enabled=False)\n",
            "without XLA": "import torch\ns = torch.amp.GradScaler()\n",
        },
    ),
    "fp16-accelerator": (
        {"fp16": "from accelerate import Accelerator\nAccelerator(mixed_precision='fp16')\n"},
        {
            "bf16": "from accelerate import Accelerator\nAccelerator(mixed_precision='bf16')\n",
            "chosen": "from accelerate import Accelerator\nAccelerator(mixed_precision=args.precision)\n",
            "another class": "from mine import Accelerator\nAccelerator(mixed_precision='fp16')\n",
        },
    ),
    "collective-under-master": (
        {
            "a forward pass": DDP + "if rank == 0:\n    model(x)\n",
            "a function's forward pass": DDP + "def test(net):\n    net(x)\nif gpu_id == 0:\n    test(model)\n",
            "another module's evaluation": DDP + "from mine import calculate_bleu\nif rank == 0:\n    calculate_bleu(model, data)\n",
            "a class's": DDP + "class T:\n    def __init__(self):\n        self.m = DDP(net)\n    def test(self):\n        self.m(x)\n    def run(self):\n        if self.rank == 0:\n            self.test()\n",
            "barrier": XLA + "if xm.is_master_ordinal():\n    xm.rendezvous('x')\n",
            "a function's": RANKS.replace("for", "def check(x):\n    dist.all_reduce(x)\nif rank == 0:\n    check(y)\nfor") + "    pass\n",
            "by rank": XLA + "if xr.global_ordinal() == 0:\n    xm.rendezvous('x')\n",
            "nested": XLA + "if xm.is_master_ordinal():\n    if better:\n        xm.mesh_reduce('a', x, sum)\n",
            "accelerate": "from accelerate import Accelerator\na = Accelerator()\nif a.is_main_process:\n    a.gather(x)\n",
            "a second one on every rank": RANKS + "    pass\nif rank == 0:\n    dist.barrier()\ndist.barrier()\n",
            "two on rank 0": XLA + "def f():\n    if xm.is_master_ordinal():\n        xm.rendezvous('a')\n        xm.rendezvous('b')\n",
        },
        {
            "the model in a wrapper": DDP + "def test(net):\n    net(x)\nif rank == 0:\n    model.module(x)\n    test(model.module)\n",
            "another module's count": DDP + "from mine import count_parameters\nif rank == 0:\n    count_parameters(model)\n",
            "before the wrap": DDP.replace("model =", "model = net\nif rank == 0:\n    model(x)\nmodel ="),
            "a forward pass in both branches": DDP + "if rank == 0:\n    y = model(x)\nelse:\n    model(x)\n",
            "another model": DDP + "def test(model):\n    if rank == 0:\n        model(x)\n",
            "saving, which waits for no rank": XLA + "if xm.is_master_ordinal():\n    xm.save(s, 'x')\n",
            "a pair of them in a module": XLA + "if not xm.is_master_ordinal():\n    xm.rendezvous('a')\nload()\nif xm.is_master_ordinal():\n    xm.rendezvous('a')\n",
            "accelerate's state": "from accelerate import Accelerator\na = Accelerator()\nif a.is_main_process:\n    a.save_state('x')\n",
            "all of them": XLA + "xm.save(m.state_dict(), 'x')\n",
            "plain saving": XLA + "if xm.is_master_ordinal():\n    torch.save(x, 'x')\n    print('saved')\n",
            "the other branch": XLA + "if xm.is_master_ordinal():\n    pass\nelse:\n    pass\nxm.save(s, 'x')\n",
            "the others by number": RANKS + "    pass\nif rank not in (-1, 0):\n    dist.barrier()\nload()\nif rank == 0:\n    dist.barrier()\n",
            "the others' branch": RANKS + "    pass\nif rank == 0:\n    load()\n    dist.barrier()\nelse:\n    dist.barrier()\n",
            "behind a return": RANKS + "    pass\ndef f():\n    if rank == 0:\n        load()\n        dist.barrier()\n        return\n    dist.barrier()\n",
            "the master first": XLA + "def f():\n    if not xm.is_master_ordinal():\n        xm.rendezvous('a')\n    load()\n    if xm.is_master_ordinal():\n        xm.rendezvous('a')\n",
            "a stand-in": XLA + "class Xm:\n    def rendezvous(self, t):\n        if self.rank == 0:\n            xm.rendezvous(t)\n",
            "accelerate's own saving": "from accelerate import Accelerator\na = Accelerator()\nif a.is_main_process:\n    a.save(x, 'x')\n",
        },
    ),
    "wait-in-step": (
        {
            "a barrier": LOOP + "    xm.rendezvous('step')\n",
            "a reduction": LOOP + "    l = xm.mesh_reduce('l', loss, sum)\n",
            "a sync that waits": LOOP + "    torch_xla.sync(wait=True)\n",
            "in a loop over a loader": XLA + "for x in loader:\n    xm.rendezvous('x')\n    train(x)\n",
            "CUDA's wait": "import torch\n" + ACCELERATE + "    torch.cuda.synchronize()\n",
            "accelerate alone": ACCELERATE + "    a.wait_for_everyone()\n",
            "accelerate, a function of one step": ACCELERATE.replace("for x in loader:", "def one(x):") + "while True:\n    one(x)\n    a.wait_for_everyone()\n",
        },
        {
            "once an epoch": LOOP + "xm.rendezvous('epoch')\n",
            "now and then": LOOP + "    if step % 50 == 0:\n        xm.rendezvous('x')\n",
            "a sync": LOOP + "    torch_xla.sync()\n",
            "twice": LOOP + "    if done < 2:\n        xm.rendezvous('x')\n",
            "accelerate once an epoch": ACCELERATE + "a.wait_for_everyone()\n",
        },
    ),
    "sync-in-step": (
        {
            "between forward and backward": LOOP.replace("    loss.b", "    xm.mark_step()\n    loss.b"),
            "before the loss": XLA + "for x in loader:\n    y = net(x)\n    torch_xla.sync()\n    loss = f(y)\n    loss.backward()\n    opt.step()\n",
        },
        {"after it": LOOP + "    xm.mark_step()\n", "before it": LOOP.replace("    loss = m", "    xm.mark_step()\n    loss = m")},
    ),
    "no-drop-last": (
        {
            "in a dict": LOADER + "given = dict(batch_size=8)\ntrain = DataLoader(d, shuffle=True, **given)\n",
            "by name": LOADER + "train_loader = DataLoader(d, batch_size=8)\n",
            "by its data": LOADER + "DataLoader(ds['train'], batch_size=8)\n",
            "by its function": LOADER + "def train_dataloader(self):\n    return DataLoader(self.d, batch_size=8)\n",
            "by position": XLA + "import torch.utils.data\ntorch.utils.data.DataLoader(d, 32, True)\n",
            "by its sampler": LOADER + "def make(d):\n    return DataLoader(d, 8, sampler=DistributedSampler(d, shuffle=True))\n",
            "by its loop": LOADER + "dl = DataLoader(d, 32)\nfor x in dl:\n    model(x).backward()\n",
            "in a function that evaluates too": LOADER + "def train_and_eval(d):\n    train_loader = DataLoader(d, 8, True)\n",
            "said no": LOADER + "trainLoader = DataLoader(d, batch_size=8, drop_last=False)\n",
        },
        {
            "in order": LOADER + "def make(d):\n    return DataLoader(d, 8, sampler=DistributedSampler(d, shuffle=False))\n",
            "counted alone": LOADER + "n = len(DataLoader(train_set, batch_size=8))\n",
            "dropped": LOADER + "train_loader = DataLoader(d, batch_size=8, drop_last=True)\n",
            "dropped in a dict": LOADER + "given = {'batch_size': 8, 'drop_last': True}\ntrain = DataLoader(d, **given)\n",
            "one by one": LOADER + "train = DataLoader(d)\ntrain2 = DataLoader(d, batch_size=1)\n",
            "a batch sampler": LOADER + "train = DataLoader(d, batch_sampler=s)\n",
            "without XLA": "from torch.utils.data import DataLoader\ntrain = DataLoader(d, batch_size=8)\n",
            "validation": LOADER + "valid_loader = DataLoader(d, batch_size=8)\n",
            "validation in camel case": LOADER + "myValLoader = DataLoader(d, batch_size=8, shuffle=True)\n",
            "test data": LOADER + "loader = DataLoader(x_test, batch_size=8)\n",
            "a submission": LOADER + "def predict(d):\n    return DataLoader(d, batch_size=8)\n",
            "a split of a dict": LOADER + "l = {'train': DataLoader(d['train'], 8, drop_last=True), 'test': DataLoader(d['test'], 8)}\n",
            "both in one": LOADER + "l = {k: DataLoader(d[k], 8) for k in ['train', 'val']}\n",
            "nobody knows": LOADER + "dl = DataLoader(d, batch_size=8)\nfor x in dl:\n    model(x)\n",
            "one batch": LOADER + "x = next(iter(DataLoader(d, batch_size=8, shuffle=True)))\n",
            "one batch of a name": LOADER + "train = DataLoader(d, batch_size=8)\nx, y = next(iter(train))\n",
        },
    ),
    "padding-to-longest": (
        {
            "a collator": XLA + "DataCollatorForSeq2Seq(t, padding=True)\n",
            "by default": XLA + "def f(b):\n    return self.tokenizer.pad(b)\n",
            "longest": XLA + "tokenizer(t, padding=True)\n",
            "in words": XLA + "self.tokenizer(t, padding='longest')\n",
            "a collator that does": XLA + "self.c = DataCollatorSpeechSeq2SeqWithPadding(p)\n",
            "of a language model": XLA + "DataCollatorForLanguageModeling(t, mlm=False)\n",
            "sequences cut to the model's length": XLA + "from torch.nn.utils.rnn import pad_sequence\npad_sequence(x)[:, : tokenizer.model_max_length]\n",
            "sequences": XLA + "from torch.nn.utils.rnn import pad_sequence\npad_sequence(x)\n",
            "a class's default": XLA + "class C:\n    padding: bool = True\n    def __call__(self, b):\n        b = self.processor.pad(b, padding=self.padding)\n",
            "a function in a loop": ENCODE + "for t in texts:\n    encode(t)\n",
            "a function of another": ENCODE + "def get(i):\n    return encode(texts[i])\n",
            "a function that is given": ENCODE + "encode(texts)\ndata.map(encode)\n",
        },
        {
            "all at once in a function": ENCODE + "ids = encode(texts)\n",
            "fixed by a class": XLA + "class C:\n    padding: str = 'max_length'\n    def __call__(self, b):\n        b = self.processor.pad(b, padding=self.padding)\n",
            "features of one length": XLA + "x = self.processor.feature_extractor.pad(b)\n",
            "fixed": XLA + "tokenizer(t, padding='max_length', max_length=128)\n",
            "a collator of whole samples": XLA + "tokenizer(t, padding='max_length')\nDataCollatorForLanguageModeling(t)\n",
            "a collator of one's own": XLA + "class DataCollatorWithPadding: ...\nDataCollatorWithPadding(t)\n",
            "a convolution": XLA + "torch.nn.Conv2d(1, 1, 3, padding=True)\n",
            "then to the model's length": XLA + "from torch.nn.utils.rnn import pad_sequence\nx = pad_sequence(x)\nx = pad(x, tokenizer.model_max_length)\n",
        },
    ),
}  # fmt: skip


def ids(code: str) -> list[str]:
    module = python_module("x.py", code)
    assert module.tree is not None, module.notes
    return [finding.id for finding in module_findings(module)]


@pytest.mark.parametrize(("habit", "name"), [(h, n) for h in CASES for n in CASES[h][0]])
def test_habit_is_found(habit, name):
    assert habit in ids(CASES[habit][0][name])


@pytest.mark.parametrize(("habit", "name"), [(h, n) for h in CASES for n in CASES[h][1]])
def test_what_is_no_habit(habit, name):
    assert habit not in ids(CASES[habit][1][name])


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
    (finding,) = module_findings(python_module("x.py", code))
    assert finding.column == code.splitlines()[-1].index("loss.item") + 1


def test_one_read_is_one_finding():
    assert ids(LOOP + "    print(f'{step}', loss.detach().cpu().item())\n") == ["read-in-step"]
    assert ids(LOOP + "    value = loss.item()\n    print('loss', value)\n") == ["read-in-step"]
    assert ids(LOOP + "    shown_loss = loss.item()\n    print(shown_loss)\n") == ["read-in-step"]


def test_a_drop_last_that_is_written_is_quoted():
    code = LOADER + "train = DataLoader(d, batch_size=8, drop_last=False)\n"
    (finding,) = module_findings(python_module("x.py", code))
    assert "drop_last=False" in finding.old
    assert finding.effect == "recompiles for the last batch"
