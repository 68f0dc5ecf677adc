"""`doctor --to tpu`: what a CUDA script needs for torch_xla, and that the rewritten one trains."""

import ast
from pathlib import Path

import pytest
from runs import script

from tpukit.knowledge.calls import move_table
from tpukit.probe.lint.fix import apply_fix, plan_fix
from tpukit.probe.lint.scan import scan_file

SCRIPT = """
import torch
import torch.nn as nn
from torch.cuda.amp import autocast, GradScaler
from torch.utils.data import DataLoader, TensorDataset

device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
torch.cuda.manual_seed_all(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
if torch.cuda.is_available():
    model.cuda()
    torch.cuda.empty_cache()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = GradScaler(enabled=True)
data = TensorDataset(torch.randn(64, 8), torch.randint(2, (64,)))
loader = DataLoader(data, batch_size=16, shuffle=True, pin_memory=True)
for epoch in range(2):
    for x, y in loader:
        x, y = x.cuda(non_blocking=True), y.to(device)
        optimizer.zero_grad()
        with autocast():
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
Tensor = torch.cuda.FloatTensor if torch.cuda.is_available() else torch.FloatTensor
assert (Tensor(2, 8).fill_(1.0) + torch.ones(2, 8).type(Tensor)).device == x.device
assert torch.accelerator.current_accelerator().type == x.device.type
torch.cuda.synchronize()
torch.save(model.state_dict(), "model.pt")
model.load_state_dict(torch.load("model.pt", map_location="cuda:0"))
print(next(model.parameters()).device.type, loss.item() < 1)
"""


def moved(tmp_path: Path, source: str) -> str:
    path = tmp_path / "train.py"
    path.write_text(source)
    fix = plan_fix(path, moves="tpu")
    if fix is not None:
        apply_fix(fix)
    ast.parse(path.read_text())
    return path.read_text()


def found(tmp_path: Path, source: str) -> set[str]:
    path = tmp_path / "scanned.py"
    path.write_text(source)
    return {finding.id for finding in scan_file(str(path), moves="tpu")[0]}


@pytest.mark.xla
def test_a_rewritten_script_trains_on_a_virtual_device(tmp_path):
    text = moved(tmp_path, SCRIPT)
    assert "cuda" not in text
    run = script(tmp_path / "train.py", env={"PJRT_DEVICE": "CPU"}, cwd=tmp_path)
    assert run.stdout.split() == ["xla", "True"], run.stderr


def test_a_second_fix_changes_nothing(tmp_path):
    once = moved(tmp_path, SCRIPT)
    assert moved(tmp_path, once) == once


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('x = x.to("cuda:1")', 'x = x.to("xla")'),
        ('if device.type == "cuda": pass', 'if device.type == "xla": pass'),
        ('with torch.autocast("cuda", dtype=torch.float16): pass',
         'with torch.autocast("xla", dtype=torch.bfloat16): pass'),
        ("model.half()", "model.bfloat16()"),
        ("n = torch.cuda.device_count()", "n = 1"),
        ("loss.backward(); optimizer_g.step()", "loss.backward(); optimizer_g.step()"),
        ("self.opt_d.step()", "self.opt_d.step()\ntorch_xla.sync()"),
        ("scheduler.step()", "scheduler.step()"),
        ('settings = {"cuda": 1}["cuda"]', 'settings = {"cuda": 1}["cuda"]'),
        ('torch.load(f, map_location="cuda")', 'torch.load(f, map_location="cpu")'),
        ('d = getattr(args, "cuda")', 'd = getattr(args, "cuda")'),
        ('t = Trainer(accelerator="gpu")', 't = Trainer(accelerator="tpu")'),
        ('d = dict(device="gpu")', 'd = dict(device="gpu")'),
        ('t = Trainer(accelerator="cuda")', 't = Trainer(accelerator="tpu")'),
        ('t = Trainer(strategy="ddp_spawn")', 't = Trainer(strategy="auto")'),
        ('m = f(attn_implementation="flash_attention_2")', 'm = f(attn_implementation="sdpa")'),
        ('t = Trainer(precision=16)', 't = Trainer(precision="bf16")'),
        ('t = Trainer(precision="16-mixed")', 't = Trainer(precision="bf16-mixed")'),
        ('a = f(optim="paged_adamw_8bit")', 'a = f(optim="adamw_torch")'),
        ('DEVICE = "cuda"\nt = Trainer(accelerator=DEVICE)',
         'DEVICE = "tpu"\nt = Trainer(accelerator=DEVICE)'),
        ('DEVICE = "cuda"\nx.to(DEVICE)\nt = Trainer(accelerator=DEVICE)',
         'DEVICE = "xla"\nx.to(DEVICE)\nt = Trainer(accelerator=DEVICE)'),
        ('d = torch.device("mps" if mps else "cpu")', 'd = torch.device("xla" if mps else "cpu")'),
        ('d = "cuda" if cuda else "mps"', 'd = "xla" if cuda else "mps"'),
        ('set_printoptions(precision=16)', 'set_printoptions(precision=16)'),
        ('f = "cuda" in d\no = AdamW(p, fused=f)', 'f = "cuda" in d\no = AdamW(p, fused=f)'),
    ],
)  # fmt: skip
def test_one_right_form_is_written(tmp_path, line, expected):
    text = moved(tmp_path, f"import torch\n\n{line}\n")
    assert text.replace("import torch_xla\n", "") == f"import torch\n\n{expected}\n"


@pytest.mark.parametrize(
    ("source", "id"),
    [
        ("from flash_attn import flash_attn_func", "cuda-kernels"),
        ("import triton.language as tl", "cuda-kernels"),
        ("s = torch.cuda.Stream()", "cuda-streams"),
        ("m = torch.nn.parallel.DistributedDataParallel(m, device_ids=[0])", "cuda-ddp"),
        ('torch.distributed.init_process_group("nccl")', "cuda-process-group"),
        ('d = f"cuda:{rank}"', "cuda-device-text"),
        ('d = "cuda:" + str(rank)', "cuda-device-text"),
        ('d = "cuda:{}".format(rank)', "cuda-device-text"),
        ("m = m.to(args.local_rank)", "cuda-device-text"),
        ("m = m.to(gpu)", "cuda-device-text"),
        ('d = torch.device("cuda", rank)', "cuda-device-text"),
        ("for b in loader:\n    ok = y != 0\n    f(x[ok]).backward()", "cuda-values-shape"),
        ("class A:\n    def cuda(self):\n        self.m.cuda()", "cuda-method"),
        ("for x in loader:\n    t = torch.tensor(0.0)\n    t += f(x)\n    t.backward()\n"
         "    n = t.item()", "read-in-step"),
        ("def step(x):\n    f(x).backward()\n    optimizer.step()\nfor x in loader:\n    step(x)",
         "cuda-sync"),
        ('t = Trainer(accelerator="gpu" if n else "cpu")', "cuda-accelerator"),
        ("torch.set_default_tensor_type(torch.cuda.FloatTensor)", "cuda-default-type"),
        ("import torch.utils.data as d\nd.DistributedSampler(x, num_replicas=n)", "cuda-sampler"),
        ("def f(d, mask):\n    for x in d:\n        g(x[mask]).backward()", "cuda-values-shape"),
        ("m = torch.nn.SyncBatchNorm.convert_sync_batchnorm(m)", "cuda-sync-bn"),
        ("import torch.multiprocessing as mp\nmp.spawn(main, nprocs=2)", "cuda-spawn"),
        ('s = torch.amp.GradScaler("cpu", enabled=half)', "cuda-amp-scaler"),
        ('if torch.__version__ >= "2":\n    m = torch.compile(m)', "cuda-compile"),
        ("def forward(self, x):\n    return x[x > 0]", "cuda-values-shape"),
        ("def forward(self, x):\n    return x.nonzero()", "cuda-values-shape"),
        ("def pos_loss(x, pad_mask):\n    return x[..., :3][pad_mask].mean()", "cuda-values-shape"),
        ("def train(x, mask):\n    f(x[~mask]).backward()", "cuda-values-shape"),
        ("def optimize_loss(x, end_mask):\n    x[end_mask] = net(x)\n    x.backward()",
         "cuda-values-shape"),
        ("m = torch.nn.DataParallel(m)", "cuda-data-parallel"),
        ("m = Net()\no = Adam(m.parameters())\nm.to(d)", "optimizer-before-move"),
        ("def f(m):\n    m = m.to(d)\nm = Net()\no = Adam(m.parameters())\nf(m)",
         "optimizer-before-move"),
        ("m = Net()\no = Adam(m.parameters())\ndef step(b):\n    global m\n"
         "    m = m.to(d)\n    f(b).backward()", "optimizer-before-move"),
        ("class T:\n    def __init__(self, m):\n        self.m = m.to(d)\n"
         "m = Net()\no = Adam(m.parameters())\nT(m)", "optimizer-before-move"),
        ("m = Net()\no = SGD(m.parameters())\nfor b in x:\n    f(b).backward()\n    optim.step()",
         "no-device"),
        ("from transformers import TrainingArguments\nTrainingArguments('o', fp16=True)",
         "cuda-fp16-argument"),
        ("import torch.distributed as dist\nfor b in loader:\n    f(b).backward()\n"
         "    dist.barrier()", "wait-in-step"),
        ("class A:\n    def training_step(self, b, i):\n        print(f(b).item())",
         "read-in-step"),
        ("for step in steps:\n    for b in parts:\n        f(b).backward()\n"
         "    optimizer.step()\n    losses.append(loss.item())", "read-in-step"),
        ("for b in loader:\n    loss = f(b)\n    loss.backward()\n    print(loss.item())",
         "read-in-step"),
        ("for b in loader:\n    f(b).backward()\n    if step % 1 == 0 and gpu_id == 0:\n"
         "        log(loss.item())", "read-in-step"),
        ("D = 'cuda'\nx.to(D)\nt = Trainer(accelerator=D)", "cuda-accelerator"),
        ("import lightning.pytorch as pl\nfor b in x:\n    f(b).backward()\n    optim.step()",
         "cuda-sync"),
        ("from torch_geometric.loader import DataLoader\nl = DataLoader(d)", "cuda-graph-batches"),
        ("c = torch.nn.CTCLoss()", "leaves-the-device-class"),
        ("def forward(self, x):\n    return torch.median(x)", "leaves-the-device"),
        ("def select_action(s):\n    return net(s).argmax().item()", "read-in-step"),
        ("for i in range(9):\n    x = torch.cat([x, net(x)], dim=1)", "growing-shape"),
        ("def collate(b):\n    n = max(len(x) for x in b)", "padding-to-longest"),
        ("def collate(b):\n    n = max([len(x) for x in b])", "padding-to-longest"),
        ("def collate(b):\n    n = max(x['ids'].shape[0] for x in b)", "padding-to-longest"),
        ("torch.cuda.set_rng_state(s)", "cuda-rng-state"),
        ("t = {'fp16': torch.float16, 'bf16': torch.bfloat16}[args.dtype]", "cuda-fp16"),
        ("while True:\n    loss.backward()\n    print('%f' % loss.detach())", "read-in-step"),
        ("for x, n in loader:\n    f(x).backward()\n    n = n.to(d)\n    k = n.tolist()",
         "read-in-step"),
        ("import torch.multiprocessing as mp\nimport torch.distributed as dist\n"
         "def f(r):\n    dist.init_process_group('gloo')\nmp.Process(target=f)", "cuda-spawn"),
        ("d = torchvision.datasets.MNIST('.')\n"
         "t = torch.utils.data.DataLoader(d, batch_size=64, shuffle=True)", "no-drop-last"),
        ("for b in loader:\n    loss = f(b, n.item())\n    loss.backward()\n    t += loss.item()",
         "read-in-step"),
        ('y = f(x, mode="bicubic")', "leaves-the-device"),
        ("ok = torch.cuda.is_available()\nm = Net()\no = SGD(m.part.parameters())\noptim.step()",
         "no-device"),
        ("s = True\nif mode:\n    s = False\n"
         "d = torch.utils.data.DataLoader(d, batch_size=n, shuffle=s)", "no-drop-last"),
    ],
)  # fmt: skip
def test_the_rest_is_reported(tmp_path, source, id):
    assert id in found(tmp_path, f"import torch\n{source}\n")


def test_code_without_cuda_is_left_alone(tmp_path):
    source = "import torch\n\n\ndef f(x):\n    return torch.relu(x)\n"
    assert moved(tmp_path, source) == source
    assert found(tmp_path, source) == set()


def test_what_ends_the_step_itself_needs_no_sync(tmp_path):
    for package in ("torch_xla.core.xla_model", "accelerate", "lightning.pytorch"):
        source = f"import torch\nimport {package} as p\noptimizer.step()\n"
        assert "cuda-sync" not in found(tmp_path, source)
    inside = (
        "import torch\ndef f():\n    from accelerate import Accelerator\n    optimizer.step()\n"
    )
    assert "cuda-sync" not in found(tmp_path, inside)
    assert "cuda-sync" in found(tmp_path, "import torch, numpy\noptimizer.step()\n")


@pytest.mark.parametrize(
    "line",
    [
        "torch.set_default_tensor_type('torch.FloatTensor')",
        "import torch.utils.data as d\nd.DistributedSampler(x, num_replicas=xr.world_size())",
        "from torch.nn.parallel import DistributedDataParallel as DDP",
        "def main(x, y):\n    x = x[y == 0]\n    for b in x:\n        f(b).backward()",
        "from transformers import TrainingArguments\nTrainingArguments('o', fp16=False, bf16=True)",
        "m = Net().to(d)\no = Adam(m.parameters())\nm.to(d)",
        "def f(m):\n    o = Adam(m.parameters())\n    m.to(d)",
        "def make():\n    global m\n    m = m.to(d)\nmake()\no = Adam(m.parameters())",
        "gpu = torch.device('cpu')\nx.to(gpu)",
        "model_to_save.half().save_pretrained(f)",
        "state = {'ema': deepcopy(ema).half()}",
        "if x.dtype == torch.float16:\n    pass",
        "p = torch.multiprocessing.Process(target=play, args=(queue,))",
        "c = torch.nn.AdaptiveMaxPool2d(1)",
        "while True:\n    loss.backward()\n    print('scale', loss_scaler.scale, losses.avg)",
        "while True:\n    loss.backward()\n    m = torch.tensor(values).mean().item()\n"
        "    if (i + 1) == len(loader):\n        print(loss.item())",
        "for x, n in tqdm(loader):\n    x = x.to(d)\n    k = n.tolist()\n    f(x, k).backward()",
        "for step, b in enumerate(loader):\n    x, n = b\n    k = n[0].item()\n    f(x).backward()",
        "for t in steps:\n    y = net.backward(x, t)\n    frames.append(y.cpu())",
        "class A:\n    def cuda(self):\n        self.m = self.m.to(d)\n    def f(self):\n"
        "        self.cuda()\na = A()\na.cuda()",
        "def main():\n    net(x).backward()\n    optimizer.step()\n    for b in loader:\n"
        "        engine(b)\n    print(loss.item())\nmain()",
        "for x in loader:\n    x /= 255\n    x = x.data.numpy()\n    x = torch.Tensor(x).to(d)\n"
        "    f(x).backward()",
        "for e in r:\n    for x in l:\n        f(x).backward()\n    p.append(f(x).cpu())\n"
        "    q = torch.cat(p)\n    g(q[q > 0])",
        "while True:\n    f(x).backward()\n    s = torch.tensor(env.step())\n    a = s[0].item()",
        "def forward(self, x, kind):\n    flag = kind == 'text'\n    return x[flag]",
        "for b in loader:\n    loss = f(b)\n    loss.backward()\n    if bad:\n"
        "        print(loss)\n        sys.exit(1)",
        "for file in files:\n    x = torch.cat([x, torch.load(file, weights_only=True)])",
        "from torchvision.datasets import MNIST\ntrain = MNIST('.')\n"
        "t = torch.utils.data.DataLoader(train, batch_size=100, shuffle=True)",
        "p.add_argument('--batch-size', type=int, default=50)\nd = CIFAR10('.')\n"
        "t = torch.utils.data.DataLoader(d, batch_size=p.batch_size, shuffle=True)",
        "t = AutoTokenizer.from_pretrained(f, padding=True)",
        "def encode(texts):\n    return [tokenizer(text, padding='longest') for text in texts]",
        "import torch_xla.distributed.xla_backend\nimport torch.distributed as dist\n"
        "dist.init_process_group('xla', init_method='xla://')\n"
        "m = torch.nn.parallel.DistributedDataParallel(m)",
        "SIZE = 1\nt = torch.utils.data.DataLoader(train, batch_size=SIZE, shuffle=True)",
        "class A:\n    def __init__(self, t):\n        self.e = tokenizer(t, padding=True)",
        "for i in x:\n    y = torch.cat([y, i.cpu()])",
        "def forward(self, x):\n    y = np.zeros(3)\n    y[y > 0] = 1",
        "def collate(b):\n    return torch.stack(b)",
        "a.size = 1\nt = torch.utils.data.DataLoader(train, batch_size=a.size, shuffle=True)",
        "p.add_argument('--batch-size', type=int, default=1)\n"
        "t = torch.utils.data.DataLoader(train, batch_size=p.batch_size, shuffle=True)",
        "s = torch.utils.data.RandomSampler(d)\nm = torch.utils.data.DataLoader(d, 8, sampler=s)\n"
        "with torch.no_grad():\n    for x in m:\n        f(x)",
        "d = load(streaming=True)\nt = torch.utils.data.DataLoader(train, 8, shuffle=True)",
        "m = Net()\no = Adam(m.parameters())\nm.to(dtype=t)\nm.to(torch.bfloat16)\nm.to('cpu')",
        "o = Adam(m.parameters())\nm = Other()\nm.to(d)",
        "summary(m.to(d))\no = Adam(m.parameters())\nm = m.to(d)",
        "import accelerate\no = Adam(m.parameters())\nm.to(d)",
        "m = Net()\nm = self.to_gpu(m)\no = SGD(m.parameters())\nf(x).backward()",
        "def loss(df):\n    a = df[df['id'] == 3]\n    return df[df.id == 3]",
        "import lightning\nclass A(lightning.LightningModule):\n    def training_step(self, b):\n"
        "        self.part(b)\n    def part(self, b):\n        f(b).backward()\n        opt.step()",
        "def make(m):\n    return m.module if isinstance(m, torch.nn.DataParallel) else m",
        "try:\n    import flash_attn\nexcept ImportError:\n    flash_attn = None",
        "for i, b in enumerate(loader):\n    loss = f(b)\n    loss.backward()\n"
        "    if i == 0:\n        print(loss)\n    if loss_kind == 'l1':\n        pass",
    ],
)
def test_what_needs_no_change(tmp_path, line):
    assert found(tmp_path, f"import torch\n{line}\n") <= {"set-default-tensor-type"}


def test_names_of_the_table_are_pytorch_s():
    import torch

    for name in move_table("tpu").by_name:
        if name.startswith("torch.cuda.") and "profiler" not in name:
            part = torch
            for attribute in name.split(".")[1:]:
                assert hasattr(part, attribute) or attribute in ("memory_cached",), name
                part = getattr(part, attribute, None)


@pytest.mark.parametrize(
    ("comment", "ids"),
    [
        ("", {"cuda-method", "cuda-half"}),
        ("  # tpukit: ignore", set()),
        ("  # tpukit: ignore[cuda-half]", {"cuda-method"}),
        ("  # tpukit: ignore[cuda-half, cuda-method]", set()),
    ],
)
def test_a_comment_suppresses_all_findings_of_a_line_or_those_that_it_names(tmp_path, comment, ids):
    assert found(tmp_path, f"import torch\nx = y.cuda().half(){comment}\n") == ids
