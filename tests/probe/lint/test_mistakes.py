# ruff: noqa: E501 - a case is one line
"""Mistakes of plain PyTorch code: each found where it is, not where it is right, and on its page."""

import re
from pathlib import Path

import pytest

from tpukit.knowledge.calls import rules
from tpukit.probe.lint.prefilter import may_concern
from tpukit.probe.lint.scan import module_findings
from tpukit.probe.lint.source import python_module

RULES = rules("mistake")
PAGE = Path(__file__).parents[3] / "docs" / "doctor_rules.md"
HEAD = (
    "import torch\nfrom torch import nn\nimport torch.nn.functional as F\n"
    "from torch.utils.data import DataLoader\nfrom torch.utils.data.distributed import DistributedSampler\n"
    "opt = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    "scheduler = torch.optim.lr_scheduler.StepLR(opt, 3)\nkeep(scheduler)\nafter = lambda: opt.step()\n"
)
STEP = "    loss = f(x)\n    loss.backward()\n"
LOOP = HEAD + "for x in loader:\n" + STEP
NET = HEAD + "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
GRADSCALER = "scaler = torch.amp.GradScaler()\n"
SCALED = LOOP.replace("for x", GRADSCALER + "for x", 1).replace("loss.b", "scaler.scale(loss).b")
FORWARD = NET + "    def forward(self, x):\n"
SOFT = (
    FORWARD
    + "        return F.softmax(x, dim=1)\nf(x).backward()\nnet = Net().to(device)\ncriterion = nn.CrossEntropyLoss()\n"
)
EVALUATE = (
    HEAD
    + "def validate(model, loader):\n    model.eval()\n    for x in loader:\n        model(x)\n"
)
TESTED = (
    HEAD
    + "def test(model, loader):\n    with torch.no_grad():\n        for x in loader:\n            n += model(x)\nfor x in loader:\n    opt.zero_grad()\n    model(x).backward()\n    opt.step()\n"
)
FP16 = (
    HEAD
    + "for x in loader:\n    with torch.cuda.amp.autocast():\n        loss = f(x)\n    loss.backward()\n"
)
DDP = HEAD + "net = nn.parallel.DistributedDataParallel(net)\n"
ARGUMENT = HEAD + "p.add_argument('--local_rank', type=int)\n"
CASES = {
    "no-zero-grad": (
        [LOOP + "    opt.step()\n", SCALED + "    scaler.step(opt)\n", HEAD + "class A:\n    def f(self):\n        for x in l:\n            g(x).backward()\n            self.optimizer.step()\nclass B:\n    def f(self):\n        self.optimizer.zero_grad()\n", HEAD + "def f(optimizer):\n    for x in loader:\n        g(x).backward()\n        optimizer.step()\n"],
        [LOOP + "    opt.step()\n    opt.zero_grad()\n", LOOP + "    opt.step()\n    for p in ps: p.grad = None\n", LOOP + "    other.step()\n"],
    ),
    "gradients-cleared": (
        [LOOP + "    opt.zero_grad()\n    opt.step()\n", SCALED + "    opt.zero_grad()\n    scaler.step(opt)\n"],
        [SCALED + "    scaler.step(opt)\n    opt.zero_grad()\n", LOOP + "    opt.step()\n    opt.zero_grad()\n", LOOP + "    opt.zero_grad()\n    g(x).backward()\n    opt.step()\n"],
    ),
    "clip-after-step": (
        [LOOP + "    opt.step()\n    nn.utils.clip_grad_norm_(ps, 1)\n    opt.zero_grad()\n"],
        [LOOP + "    nn.utils.clip_grad_norm_(ps, 1)\n    opt.step()\n    opt.zero_grad()\n"],
    ),
    "modules-in-list": (
        [NET + "        self.h = {k: nn.Linear(2, 2) for k in t}\n", NET + "        self.b = []\n        self.b.append(nn.Linear(2, 2))\n", NET + "        self.layers = [nn.Linear(3, 3) for _ in range(3)]\n", NET + "        self.layers = [nn.Linear(3, 3), nn.ReLU()]\n"],
        [NET + "        self.h = {k: len(k) for k in t}\n", NET + "        self.layers = [nn.Linear(3, 3)]\n        self.all = nn.ModuleList(self.layers)\n", NET + "        layers = [nn.Linear(3, 3)]\n", NET + "        self.sizes = [3, 4]\n", HEAD + "class Plain:\n    def __init__(self):\n        self.layers = [nn.Linear(3, 3)]\n"],
    ),
    "dropout-always-on": (
        [FORWARD + "        return F.dropout(x, 0.5)\n"],
        [FORWARD + "        return F.dropout(x, 0.5, self.training)\n", FORWARD + "        return F.dropout(x, p=0.5, training=True)\n", FORWARD + "        if self.training:\n            x = F.dropout(x, 0.5)\n        return x\n"],
    ),
    "scheduler-first": (
        [HEAD + "for e in r:\n    scheduler.step()\n    for x in l:\n        f(x).backward()\n        opt.step()\n", HEAD + GRADSCALER + "for e in r:\n    scheduler.step()\n    for x in l:\n        scaler.scale(f(x)).backward()\n        scaler.step(opt)\n", HEAD.replace("scheduler", "bn_scheduler") + "lr_scheduler = make(opt)\nfor e in r:\n    lr_scheduler.step()\n    for x in l:\n        f(x).backward()\n        opt.step()\n"],
        [HEAD + "bn_scheduler = make(opt)\nfor e in r:\n    bn_scheduler.step()\n    for x in l:\n        f(x).backward()\n        opt.step()\n", HEAD + "for e in r:\n    for x in l:\n        opt.step()\n    scheduler.step()\n", HEAD + "for x in l:\n    opt.step()\n    scheduler.step()\n    opt.step()\n"],
    ),
    "eval-not-left": (
        [HEAD + "def check(m):\n    m.eval()\nfor e in r:\n    for x in l:\n        f(x).backward()\n    check(m)\n", HEAD + "for e in r:\n    for x in l:\n        f(x).backward()\n    model.eval()\n"],
        [HEAD + "for e in r:\n    for x in l:\n        f(x).backward()\n        self.eval(step=e)\n", HEAD + "def check(m):\n    m.eval()\n    m.train()\nfor e in r:\n    for x in l:\n        f(x).backward()\n    check(m)\n", HEAD + "for e in r:\n    model.train()\n    for x in l:\n        f(x).backward()\n    model.eval()\n"],
    ),
    "eval-with-gradients": (
        [EVALUATE, HEAD + "def show(model):\n    model.eval()\n    batches = iter(loader)\n    for i in range(9):\n        model(next(batches))\n", EVALUATE.replace("loader", "test_iterator"), EVALUATE.replace("    for", "    for x in loader:\n        model(x).backward()\n    model.eval()\n    for").replace("    model.eval()\n    for x in loader:\n        model(x).b", "    for x in loader:\n        model(x).b"), HEAD + "for x in train:\n    model(x).backward()\n    model.eval()\n    for y in loader:\n        model(y)\n    model.train()\n"],
        [EVALUATE.replace("def ", "@torch.no_grad()\ndef "), EVALUATE + "with torch.no_grad():\n    validate(m, l)\n", EVALUATE + "        f(x).backward()\n", HEAD + "for x in loader:\n    trainer.step(x)\nmodel.eval()\nvalidate(model)\n"],
    ),
    "never-in-eval": (
        [TESTED, TESTED.replace("model", "classifier"), TESTED.replace("for x in loader:\n    opt", "def step(x):\n    opt"), TESTED.replace("n += model(x)", "n.append(model(x))"), TESTED + "trainer.train(epochs=3)\n", TESTED + "self.eval(is_training=True)\n", TESTED.replace("with torch.no_grad():", "if True:").replace("loader:\n            n", "val_loader:\n            n"), TESTED.replace("    with torch.no_grad():\n        for x in loader:\n            n", "    for x in loader:\n        with torch.no_grad():\n            n"), TESTED.replace("for x in loader:\n            n", "bar = tqdm(loader)\n        for x in bar:\n            n"), TESTED.replace("    with torch.no_grad():\n        for", "    for").replace("def test", "@torch.inference_mode()\ndef test")],
        [TESTED.replace("    with", "    model.eval()\n    with"), TESTED.replace("no_grad", "enable_grad"), TESTED.replace("n += model(x)", "n += other(x)"), TESTED.replace("n += model(x)", "model(x)"), TESTED.replace("n += model(x)", "model(x)\n            n.append(x)"), TESTED + "model.train(mode)\n"],
    ),
    "loss-keeps-graph": (
        [LOOP + "    losses += [loss]\n", LOOP + "    losses.append((loss, n))\n", LOOP + "    total += loss\n", LOOP + "    total += loss * len(x)\n", LOOP + "    losses.append(loss)\n", LOOP.replace("loss.b", "scaler.scale(loss).b") + "    total += loss\n", LOOP.replace("loss.backward()", "accelerator.backward(loss)") + "    total += loss\n", LOOP + "    with torch.no_grad():\n        losses.append(loss)\n"],
        [LOOP + "    losses += [loss.item()]\n", LOOP + "    total += loss.item()\n", LOOP + "    losses.append(loss.detach())\n", HEAD + "for x in l:\n    total += f(x)\n    total.backward()\n", LOOP + "    loss = loss.item()\n    total += loss\n", LOOP + "    with torch.no_grad():\n        total += loss * len(x)\n"],
    ),
    "softmax-before-loss": (
        [SOFT.replace("F.softmax(x, dim=1)", "torch.sigmoid(x)").replace("CrossEntropyLoss", "BCEWithLogitsLoss") + "criterion(net(x), y)\n", HEAD + "F.nll_loss(F.softmax(x, 1), y).backward()\n", HEAD + "F.binary_cross_entropy_with_logits(x.sigmoid(), y).backward()\n", HEAD + "net = nn.Sequential(nn.Linear(2, 2), nn.Softmax(dim=1)).to(d)\nc = nn.CrossEntropyLoss()\nloss = c(net(x), y)\nloss.backward()\n", SOFT + "criterion(net(x), y)\n", SOFT + "out = net(x)\nloss = criterion(out, y)\n", SOFT.replace("net =", "self.net =") + "p = self.net(x)\np = F.softmax(p, 1)\n", HEAD + "F.cross_entropy(F.softmax(x, 1), y).backward()\n", HEAD + "F.cross_entropy(net(x).softmax(dim=1), y).backward()\n", FORWARD + "        return F.softmax(x, dim=1)\n    def step(self, x, y):\n        F.cross_entropy(self(x), y).backward()\n"],
        [HEAD + "net = nn.Sequential(nn.Linear(2, 2))\nc = nn.CrossEntropyLoss()\nloss = c(net(x), y)\nloss.backward()\n", SOFT + "criterion(other(x), y)\n", SOFT + "p = other(x)\np = F.softmax(p, 1)\n", SOFT.replace("F.softmax", "F.log_softmax") + "criterion(net(x), y)\n", SOFT.replace("CrossEntropyLoss", "BCEWithLogitsLoss") + "criterion(net(x), y)\n", HEAD + "F.binary_cross_entropy(x.sigmoid(), y).backward()\n", HEAD + "F.nll_loss(F.log_softmax(x, 1), y).backward()\n", SOFT.replace("CrossEntropyLoss", "MSELoss") + "criterion(net(x), y)\n"],
    ),
    "sampler-with-shuffle": (
        [HEAD + "s = DistributedSampler(d)\nDataLoader(d, sampler=s, shuffle=True)\n", HEAD + "DataLoader(d, shuffle=True, sampler=DistributedSampler(d))\n"],
        [HEAD + "s = None\nif r:\n    s = DistributedSampler(d)\nDataLoader(d, sampler=s, shuffle=True)\n", HEAD + "DataLoader(d, shuffle=False, sampler=DistributedSampler(d))\n", HEAD + "DataLoader(d, shuffle=True, sampler=None)\n"],
    ),
    "sampler-without-epoch": (
        [LOOP + "s = DistributedSampler(d)\nfor epoch in r:\n    # s.set_epoch(epoch)\n    ...\n", LOOP + "s = DistributedSampler(d)\nfor epoch in r: ...\n", HEAD + "s = DistributedSampler(d)\nfor epoch in r: train(opt)\n", LOOP + "s = DistributedSampler(d)\nfor e in range(args.epochs): ...\n"],
        [LOOP + "s = DistributedSampler(d)\nfor epoch in range(1): ...\n", LOOP + "s = DistributedSampler(d)\nfor epoch in r: s.set_epoch(epoch)\n", LOOP + "s = DistributedSampler(d, shuffle=False)\nfor epoch in r: ...\n", LOOP + "s = DistributedSampler(val_set)\nfor epoch in r: ...\n"],
    ),
    "clip-scaled": (
        [HEAD + "for x in l:\n    scaler.scale(loss).backward()\n    if n % 4 == 0:\n        nn.utils.clip_grad_norm_(ps, 1)\n        scaler.step(opt)\n", HEAD + "for x in l:\n    scaler.scale(loss).backward()\n    nn.utils.clip_grad_norm_(ps, 1)\n    scaler.step(opt)\n"],
        [HEAD + "for x in l:\n    scaler.scale(loss).backward()\n    scaler.unscale_(opt)\n    nn.utils.clip_grad_norm_(ps, 1)\n    scaler.step(opt)\n", HEAD + "for x in l:\n    if amp:\n        scaler.scale(loss).backward()\n        scaler.step(opt)\n    else:\n        loss.backward()\n        nn.utils.clip_grad_norm_(ps, 1)\n        opt.step()\n"],
    ),
    "epoch-end-outputs": (
        [HEAD + "import lightning as L\nclass A(L.LightningModule):\n    def validation_epoch_end(self, outputs):\n        pass\n"],
        [HEAD + "import lightning as L\nclass A(L.LightningModule):\n    def on_validation_epoch_end(self):\n        pass\n", HEAD + "class A(Base):\n    def validation_epoch_end(self, outputs):\n        pass\n"],
    ),
    "scheduler-unused": (
        [HEAD.replace("keep(scheduler)\n", ""), HEAD + "from torch.optim.lr_scheduler import StepLR\nlater = StepLR(opt, 3)\n"],
        [HEAD, HEAD.replace("keep(scheduler)", "# scheduler.step()")],
    ),
    "scheduler-given-loss": (
        [HEAD + "for e in r:\n    f(x).backward()\n    opt.step()\n    scheduler.step(val_loss)\n"],
        [HEAD + "plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt)\nfor e in r:\n    f(x).backward()\n    opt.step()\n    plateau.step(val_loss)\n", HEAD + "for e in r:\n    f(x).backward()\n    opt.step()\n    scheduler.step(e)\n"],
    ),
    "loader-cycled": (
        [HEAD + "from itertools import cycle\nfor x, y in zip(loader, cycle(other_loader)): ...\n", HEAD + "import itertools\nb = itertools.cycle(DataLoader(d))\n"],
        [HEAD + "from itertools import cycle\nc = cycle(colors)\n", HEAD + "from own import cycle\nc = cycle(loader)\n"],
    ),
    "best-state-shared": (
        [LOOP + "    if better: best = model.state_dict()\nmodel.load_state_dict(best)\n", LOOP + "    self.best_w = m.state_dict().copy()\nm.load_state_dict(self.best_w)\n"],
        [LOOP + "    best = copy.deepcopy(model.state_dict())\nmodel.load_state_dict(best)\n", LOOP + "    best = model.state_dict()\n    torch.save(best, f)\nmodel.load_state_dict(torch.load(f))\n", LOOP + "    best = deepcopy(m.state_dict())\nbest = model.state_dict()\nmodel.load_state_dict(best)\n"],
    ),
    "autocast-unscaled": (
        [FP16, FP16.replace("cuda.amp.autocast()", "autocast(device_type='cuda')"), FP16.replace("cuda.amp.autocast()", "autocast('cuda', torch.float16)"), FP16.replace("autocast()", "autocast(enabled=args.amp)")],
        [FP16 + GRADSCALER, FP16.replace("cuda.amp.autocast()", "autocast('cuda', torch.bfloat16)"), FP16.replace("cuda.amp.autocast()", "autocast('cpu')"), FP16.replace("autocast()", "autocast(False)"), FP16.replace("cuda.amp.autocast()", "autocast('cuda', args.dtype)"), FP16.replace("    loss.backward()\n", "")],
    ),
    "wrapper-attribute": (
        [DDP + "y = net.generate(x)\n", DDP.replace("DistributedDataParallel", "DataParallel") + "for e in r:\n    if e == 3:\n        net.encode(x)\n", DDP + "net = net.to(d)\nnet.fc\n"],
        [DDP + "net.module.generate(x)\nnet.train()\nnet.own = 3\nnet.own\n", HEAD + "net.generate(x)\n" + DDP[len(HEAD):], DDP + "net = net.module\nnet.generate(x)\n", DDP + "if hasattr(net, 'generate'):\n    net.generate(x)\n", DDP + "y = net.module.fc if distributed else net.fc\n", DDP + "try:\n    net.fc\nexcept AttributeError:\n    pass\n", DDP + "def f(net):\n    net.generate(x)\n"],
    ),
    "local-rank-argument": (
        [ARGUMENT + "torch.cuda.set_device(args.local_rank)\n", ARGUMENT + "local_rank = args.local_rank\n# local_rank = dist.get_rank()\n"],
        [ARGUMENT, ARGUMENT + "f(args.local_rank, os.environ['LOCAL_RANK'])\n", ARGUMENT + "args.local_rank = int(os.environ['LOCAL_RANK'])\nf(args.local_rank)\n", ARGUMENT.replace("k',", "k', '--local-rank',") + "f(args.local_rank)\n", ARGUMENT + "import deepspeed\nf(args.local_rank)\n"],
    ),
    "prepare-order": (
        [HEAD + "from accelerate import Accelerator\na = Accelerator()\nm, opt, dl = a.prepare(m, dl, opt)\n"],
        [HEAD + "from accelerate import Accelerator\na = Accelerator()\nm, opt, dl = a.prepare(m, opt, dl)\n", HEAD + "from accelerate import Accelerator\na = Accelerator()\nm, o = a.prepare(net, opt)\n"],
    ),
    "optimizer-index": (
        [HEAD + "import lightning as L\nclass A(L.LightningModule):\n    def training_step(self, batch, i, optimizer_idx):\n        pass\n"],
        [HEAD + "import lightning as L\nclass A(L.LightningModule):\n    def training_step(self, batch, i):\n        pass\n", HEAD + "class A(Base):\n    def training_step(self, batch, i, optimizer_idx):\n        pass\n"],
    ),
}  # fmt: skip


def found(text: str) -> set[str]:
    ids = {f.id for f in module_findings(python_module("a.py", text))} & set(RULES)
    assert not ids or may_concern(text.encode())
    return ids


def test_every_rule_has_cases_and_a_section():
    assert set(CASES) == set(RULES) == set(re.findall(r"^## `([\w-]+)`", PAGE.read_text(), re.M))


@pytest.mark.parametrize("id", RULES)
def test_a_mistake_is_found_and_what_is_right_is_not(id):
    wrong, right = CASES[id]
    assert [text for text in wrong if id not in found(text)] == []
    assert [text for text in right if id in found(text)] == []


@pytest.mark.parametrize(
    ("id", "code"),
    [
        ("eval-not-left", "for e in r:\n    for x in l:\n        f(x).backward()\n    ema.model.eval()\n"),
        ("loss-keeps-graph", "for e in r:\n    loss.backward()\n    with torch.no_grad():\n        for x in val_loader:\n            loss = f(x)\n            kept.append(loss)\n"),
        ("eval-with-gradients", "model.eval()\npipe = pipeline(model)\nfor x in loader:\n    pipe(x)\n"),
        ("eval-with-gradients", "def update(g, x):\n    g(x).backward()\ndef fit(g, loader):\n    for x in loader:\n        update(g, x)\n        g.eval()\n"),
        ("eval-with-gradients", "def one(m, x):\n    with torch.no_grad():\n        return m(x)\nmodel.eval()\nfor x in loader:\n    one(model, x)\n"),
        ("sampler-without-epoch", "from engine import train\ns = DistributedSampler(d)\nfor epoch in r:\n    train(net, epoch, sampler=s)\n"),
        ("wrapper-attribute", "if not args.alone:\n    net = nn.parallel.DistributedDataParallel(net)\nif args.alone:\n    net.table.clear()\n"),
    ],
)  # fmt: skip
def test_what_other_statements_excuse(id, code):
    assert id not in found(HEAD + code)


def test_of_two_evaluations_of_a_script_one_has_gradients():
    bare = "with torch.no_grad():\n    for x in loader:\n        model(x)\n"
    assert found(HEAD + "model.eval()\n" + bare) == set()
    text = HEAD + "model.eval()\nfor x in loader:\n    model(x)\n" + bare
    assert found(text) == {"eval-with-gradients"}
    # The last eval() of a script is not the one that counts.
    assert found(text.replace("with", "model.eval()\nwith")) == {"eval-with-gradients"}


def test_a_comment_names_what_it_suppresses():
    text = LOOP + "    total += loss  # tpukit: ignore[loss-keeps-graph]\n"
    assert "loss-keeps-graph" not in found(text)
    assert found(text.replace("graph]", "zzz]")) == {"loss-keeps-graph"}


def test_a_script_is_no_function():
    text = HEAD + "model.eval()\nfor x in loader:\n    model(x)\n"
    assert [f.old for f in module_findings(python_module("a.py", text))] == ["the script evaluates"]
