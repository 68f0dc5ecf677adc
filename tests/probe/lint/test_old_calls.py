# ruff: noqa: E501 - a case is one line
"""Every row of the table of old calls: found where it is used, and not where it only looks so."""

import importlib
import inspect
import json
import subprocess
import sys

import pytest

from tpukit.knowledge.calls import old_calls
from tpukit.probe.lint.prefilter import may_concern
from tpukit.probe.lint.scan import module_findings
from tpukit.probe.lint.source import python_module

XM = "import torch_xla.core.xla_model as xm\n"
CASES = {
    # id: (code that has it, code that looks like it and has it not)
    "xm-xla-device": (XM + "d = xm.xla_device()", "import torch_xla\nd = torch_xla.device()"),
    "xm-mark-step": (XM + "xm.mark_step()", "class Xm:\n  def mark_step(self): ...\nxm = Xm()\nxm.mark_step()"),
    "xm-xrt-world-size": (XM + "n = xm.xrt_world_size()", "import torch_xla.runtime as xr\nn = xr.world_size()"),
    "xm-get-ordinal": (XM + "r = xm.get_ordinal()", XM + "r = xm.get_local_ordinal()"),
    "xm-get-metrics": (XM + "xm.get_metrics()", XM + "xm.get_memory_info()"),
    "xm-parse-xla-device": (XM + "xm.parse_xla_device('xla:0')", "def parse_xla_device(d): ...\nparse_xla_device('xla:0')"),
    "xla-device-of-device": ("import torch_xla\nd = torch_xla.device.xla_device()", "import torch_xla\nd = torch_xla.device().index"),
    "xm-get-xla-supported-devices": (XM + "xm.get_xla_supported_devices('TPU')", XM + "xm.get_xla_supported_devices()\nxm.get_xla_supported_devices(max_devices=4)\nxm.get_xla_supported_devices(4)"),
    "xmp-spawn-nprocs": (
        "import torch_xla.distributed.xla_multiprocessing as xmp\nxmp.spawn(f, nprocs=8)",
        "import torch_xla.distributed.xla_multiprocessing as xmp\nxmp.spawn(f, nprocs=None)\nxmp.spawn(f, nprocs=1)\n"
        "import torch.multiprocessing as mp\nmp.spawn(f, nprocs=8)",
    ),
    "xmp-serial-executor": (
        "import torch_xla.distributed.xla_multiprocessing as xmp\nxmp.MpSerialExecutor()",
        "import torch_xla.distributed.xla_multiprocessing as xmp\ns = xmp.MpSerialExecutor()\nxmp.spawn(f, nprocs=None, start_method='fork')",
    ),
    "xla-amp-autocast": ("from torch_xla.amp import autocast\nwith autocast(d): pass", "from torch import autocast\nwith autocast('xla'): pass"),
    "xla-amp-gradscaler": ("from torch_xla.amp import GradScaler", "from torch.amp import GradScaler"),
    "experimental-pjrt": ("from torch_xla.experimental import pjrt", "from torch_xla.experimental import eager"),
    "experimental-xla-sharding": ("import torch_xla.experimental.xla_sharding as xs", "import torch_xla.distributed.spmd as xs"),
    "distributed-xla-dist": ("from torch_xla.distributed.xla_dist import main", "import torch_xla.distributed.xla_backend"),
    "xr-using-pjrt": ("import torch_xla.runtime as xr\nxr.using_pjrt()", "import torch_xla.runtime as xr\nxr.is_spmd()"),
    "xla-environment": ("import os\nos.environ['XLA_USE_BF16'] = '1'", "import os\nif os.environ.get('XLA_USE_BF16'): pass\nXLA_USE_BF16 = 1"),
    "xrt-environment": ("import os\nassert os.environ['COLAB_TPU_ADDR']", "import os\nos.environ.get('COLAB_TPU_ADDR')"),
    "timm-models-layers": ("from timm.models.layers import DropPath", "from timm.layers import DropPath\nfrom mypkg.models.layers import X"),
    "timm-models-registry": ("from timm.models.registry import register_model", "from timm.models import register_model"),
    "timm-models-helpers": ("from timm.models.helpers import build_model_with_cfg", "from timm.models._helpers import load_checkpoint"),
    "timm-optim-factory": ("from timm.optim.optim_factory import create_optimizer", "from timm.optim import create_optimizer"),
    "cuda-amp-autocast": ("import torch\nwith torch.cuda.amp.autocast(): pass", "import torch\nwith torch.amp.autocast('cuda'): pass"),
    "cuda-amp-gradscaler": ("from torch.cuda.amp import GradScaler as S\ns = S()", "from torch.amp import GradScaler as S\ns = S('cuda')"),
    "cpu-amp-autocast": ("import torch\nwith torch.cpu.amp.autocast(): pass", "import torch\nwith torch.autocast('cpu'): pass"),
    "cpu-amp-gradscaler": ("import torch\ntorch.cpu.amp.GradScaler()", "import torch\ntorch.amp.GradScaler('cpu')"),
    "cuda-amp-custom": ("from torch.cuda.amp import custom_fwd\n@custom_fwd\ndef f(): ...", "from torch.amp import custom_fwd\n@custom_fwd(device_type='cuda')\ndef f(): ..."),
    "torch-load": ("import torch\ntorch.load('x.pt')", "import torch, json\ntorch.load('x.pt', weights_only=True)\ntorch.load('y', **kw)\njson.load(f)"),
    "checkpoint-use-reentrant": (
        "from torch.utils.checkpoint import checkpoint\ncheckpoint(f, x)",
        "from torch.utils.checkpoint import checkpoint\ncheckpoint(f, x, use_reentrant=False)\nmodel.checkpoint(x)",
    ),
    "scheduler-verbose": (
        "from torch.optim.lr_scheduler import LinearLR\nLinearLR(o, verbose=True)",
        "from torch.optim.lr_scheduler import LinearLR\nLinearLR(o)\nfrom mine import StepLR\nStepLR(o, verbose=True)",
    ),
    "torch-six": ("from torch._six import inf", "from six import moves"),
    "torch-linalg": ("import torch\ntorch.symeig(x)", "import torch\ntorch.linalg.eigh(x)\nx.solve(y)"),
    "env-setup-script": ("!python pytorch-xla-env-setup.py --version 1.7", "# python env-setup.py\nx = 'env-setup.py'"),
    "old-wheel-address": (
        "!pip install cloud-tpu-client==0.10 \\\n  https://storage.googleapis.com/tpu-pytorch/wheels/torch_xla-1.9-cp37-cp37m-linux_x86_64.whl",
        "!pip install torch_xla -f https://storage.googleapis.com/libtpu-releases/index.html # no tpu-pytorch/wheels2",
    ),
    "torch-xla-after-the-last": ("!pip install 'torch_xla[tpu]==2.10.0'", "!pip install 'torch_xla[tpu]==2.9.0' torch~=2.9.0 # no torch_tpu"),
    "torch-tpu-beside-torch-xla": ("!pip install torch_tpu 'torch_xla[tpu]'", "!pip install torch_tpu\n!pip uninstall -y torch_xla"),
    "xla-dist-command": ("!python -m torch_xla.distributed.xla_dist --tpu=x -- python t.py", "!grep -r torch_xla.distributed.xla_dist ."),
    "torch-launch-command": ("import os\nos.system('python -m torch.distributed.launch t.py')", "import os\nos.system('torchrun t.py # not torch.distributed.launch')"),
    "tf-record-reader": ("import torch_xla.utils.tf_record_reader as tfrr", "import torch_xla.utils.utils as xu"),
    "fsdp-recursive-wrap": ("from torch.distributed.fsdp.wrap import recursive_wrap", "from torch_xla.distributed.fsdp.wrap import recursive_wrap"),
    "weight-norm": ("from torch.nn.utils import weight_norm\nweight_norm(m)", "from torch.nn.utils.parametrizations import weight_norm\nweight_norm(m)"),
    "scalar-first": ("import torch\nx.add_(2, y)\n", "import torch\nx.add_(y, alpha=2)\nx.addcmul_(y, z, value=2)\nx.add_(y)"),
    "iterator-next": (
        "from torch.utils.data import DataLoader\nloader = DataLoader(d)\ni = iter(loader)\nx = i.next()",
        "import torch\nimport torch_xla.distributed.parallel_loader as pl\nl = pl.MpDeviceLoader(d, dev)\ni = iter(l)\ni.next()\nnode.next()\niter(rows).next()",
    ),
    "tokenizer-encode": ("import torch\ntokenizer.encode_plus(t)\n", "import torch\ntokenizer(t)\nself.encode_plus = 1\n"),
    "tokenizer-targets": ("import torch\nt.prepare_seq2seq_batch(a, b)\n", "import torch\nt(a, text_target=b)\nt.pad(labels=b)\n"),
    "python-removed-module": ("from symbol import parameters", "from mine.symbol import parameters\nimport importlib"),
    "scipy-gone": ("from scipy import signal\nsignal.gaussian(3, std=1)", "from scipy import signal\nsignal.windows.gaussian(3, std=1)"),
    "datasets-load-metric": ("from datasets import load_metric\nload_metric('glue')", "import evaluate\nevaluate.load('glue')"),
    "datasets-trust-remote-code": ("from datasets import load_dataset\nload_dataset('x', trust_remote_code=True)", "from datasets import load_dataset\nload_dataset('x', trust_remote_code=False)\nload_dataset('x')"),
    "trl-trainer-arguments": ("from trl import SFTTrainer\nSFTTrainer(model, tokenizer=t)", "from trl import SFTTrainer\nSFTTrainer(model, processing_class=t)"),
    "trl-config-arguments": ("from trl import SFTConfig\nSFTConfig(max_seq_length=8)", "from trl import SFTConfig\nSFTConfig(max_length=8)"),
    "sklearn-gone": ("from sklearn.metrics import plot_confusion_matrix\nplot_confusion_matrix(m, x, y)", "from sklearn.metrics import confusion_matrix\nconfusion_matrix(x, y)"),
    "skimage-compare": ("from skimage.measure import compare_ssim\ncompare_ssim(a, b)", "from skimage.metrics import structural_similarity\nstructural_similarity(a, b)"),
    "skimage-multichannel": ("from skimage.metrics import structural_similarity as ssim\nssim(a, b, multichannel=True)", "from skimage.metrics import structural_similarity as ssim\nssim(a, b, channel_axis=-1)"),
    "pillow-filters": ("from PIL import Image\nx.resize(s, Image.ANTIALIAS)", "from PIL import Image\nx.resize(s, Image.LANCZOS)"),
    "torchtext-ended": ("from torchtext.data import Field", "import torchvision"),
    "albumentations-gone": ("import albumentations as A\nA.Cutout()", "import albumentations as A\nA.CoarseDropout()"),
    "volatile-variable": ("from torch.autograd import Variable\nVariable(x, volatile=True)", "from torch.autograd import Variable\nVariable(x)"),
    "yaml-load": ("import yaml\nyaml.load(f)", "import yaml\nyaml.load(f, yaml.FullLoader)\nyaml.load(f, Loader=yaml.SafeLoader)\nyaml.safe_load(f)"),
    "clip-grad-norm": ("from torch.nn.utils import clip_grad_norm\nclip_grad_norm(p, 1)", "from torch.nn.utils import clip_grad_norm_\nclip_grad_norm_(p, 1)"),
    "nn-init-without-underscore": ("import torch.nn as nn\nnn.init.xavier_uniform(w)", "import torch.nn as nn\nnn.init.xavier_uniform_(w)"),
    "cuda-memory-cached": ("from utils import *\nimport torch.distributed as dist\ntorch.cuda.memory_cached()", "import torch\ntorch.cuda.memory_reserved()"),
    "cuda-max-memory-cached": ("import torch\ntorch.cuda.max_memory_cached()", "import torch\ntorch.cuda.max_memory_reserved()"),
    "cuda-reset-max-memory": ("import torch\ntorch.cuda.reset_max_memory_allocated()", "import torch\ntorch.cuda.reset_peak_memory_stats()"),
    "set-default-tensor-type": ("import torch\ntorch.set_default_tensor_type('x')", "import torch\ntorch.set_default_dtype(torch.float32)"),
    "sdp-kernel": ("import torch\nwith torch.backends.cuda.sdp_kernel(): pass", "from torch.nn.attention import sdpa_kernel\nwith sdpa_kernel([]): pass"),
    "assert-allclose": ("import torch\ntorch.testing.assert_allclose(a, b)", "import numpy as np\nnp.testing.assert_allclose(a, b)"),
    "stateless-functional-call": ("from torch.nn.utils.stateless import functional_call\nfunctional_call(m, p, x)", "from torch.func import functional_call\nfunctional_call(m, p, x)"),
    "functorch": ("from functorch import vmap\nvmap(f)(x)", "from torch.func import vmap\nvmap(f)(x)"),
    "distributed-launch": ("from torch.distributed.launch import main", "from torch.distributed.run import main"),
    "accelerator-fp16": ("from accelerate import Accelerator\nAccelerator(fp16=True)", "from accelerate import Accelerator\nAccelerator(mixed_precision='bf16')"),
    "accelerator-dataloader": (
        "from accelerate import Accelerator\nAccelerator(dispatch_batches=True)",
        "from accelerate import Accelerator, DataLoaderConfiguration\nAccelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))",
    ),
    "accelerator-logging-dir": ("from accelerate import Accelerator\nAccelerator(logging_dir='x')", "from accelerate import Accelerator\nAccelerator(project_dir='x')"),
    "accelerator-use-fp16": ("from accelerate import Accelerator\na = Accelerator()\na.use_fp16", "class A: use_fp16 = 1\na = A()\na.use_fp16"),
    "accelerator-device-type": ("import accelerate\na = accelerate.Accelerator()\na.device_type", "import accelerate\na = accelerate.Accelerator()\na.device.type"),
    "distributed-type-tpu": ("from accelerate import DistributedType\nDistributedType.TPU", "from accelerate import DistributedType\nDistributedType.XLA\nclass D: TPU = 1\nD.TPU"),
    "is-tpu-available": ("from accelerate.utils import is_tpu_available", "from accelerate.utils import is_torch_xla_available\ndef is_tpu_available(): ...\nis_tpu_available()"),
    "transformers-adamw": ("from transformers import AdamW\nAdamW(p)", "from torch.optim import AdamW\nAdamW(p)"),
    "transformers-old-schedules": ("import transformers\ntransformers.WarmupLinearSchedule(o)", "from mine import WarmupLinearSchedule\nWarmupLinearSchedule(o)"),
    "pytorch-transformers": ("from pytorch_transformers import BertModel", "import transformers as pytorch_transformers"),
    "torch-xla-py": ("import torch_xla_py.xla_model as xm", "import torch_xla as torch_xla_py"),
    "lightning-xla-stats": ("from pytorch_lightning.callbacks import XLAStatsMonitor", "from pytorch_lightning.callbacks import DeviceStatsMonitor"),
    "torchvision-pretrained": ("from torchvision import models\nmodels.resnet18(True)", "from torchvision import models\nmodels.resnet18(weights='DEFAULT')"),
    "loss-size-average": ("import torch.nn.functional as F\nF.mse_loss(x, y, size_average=False)", "import torch.nn.functional as F\nF.mse_loss(x, y, reduction='sum')"),
    "functional-upsample": ("import torch.nn.functional as F\nF.upsample(x, size=8)", "import torch.nn.functional as F\nF.interpolate(x, size=8)"),
    "torch-qr": ("import torch\ntorch.qr(a)", "import torch\ntorch.linalg.qr(a)"),
    "peft-int8-training": ("from peft import prepare_model_for_int8_training", "from peft import prepare_model_for_kbit_training"),
    "from-pretrained-load-in": (
        "from transformers import AutoModelForCausalLM\nAutoModelForCausalLM.from_pretrained('x', load_in_8bit=True)",
        "from transformers import AutoModelForCausalLM\nAutoModelForCausalLM.from_pretrained('x', quantization_config=q)",
    ),
    "timm-init-vit-weights": ("from timm.models.vision_transformer import _init_vit_weights", "from timm.models.vision_transformer import init_weights_vit_timm"),
    "training-arguments-evaluation-strategy": (
        "from transformers import TrainingArguments\nTrainingArguments(evaluation_strategy='no')",
        "from transformers import TrainingArguments\nTrainingArguments(eval_strategy='no')",
    ),
    "torch-dtype": (
        "from transformers import AutoModel\nAutoModel.from_pretrained('x', torch_dtype='auto')",
        "from transformers import AutoModel\nAutoModel.from_pretrained('x', dtype='auto')",
    ),
    "training-arguments-gone": (
        "from transformers import TrainingArguments\nTrainingArguments(tpu_num_cores=8)",
        "from transformers import TrainingArguments\nTrainingArguments(use_cpu=True)",
    ),
    "trainer-tokenizer": ("from transformers import Trainer\nTrainer(tokenizer=t)", "from transformers import Trainer\nTrainer(processing_class=t)"),
    "tokenizer-vocabulary": ("from transformers import BertTokenizerFast\nBertTokenizerFast(vocab_file='v.txt')", "from transformers import BertTokenizerFast\nBertTokenizerFast(vocab='v.txt')"),
    "softmax-dimension": ("import torch.nn.functional as F\nF.log_softmax(x)", "import torch.nn.functional as F\nF.softmax(x, 1)\nF.log_softmax(x, dim=-1)"),
    "reduce-op": ("import torch.distributed as dist\ndist.all_reduce(x, op=dist.reduce_op.SUM)", "import torch.distributed as dist\ndist.all_reduce(x, op=dist.ReduceOp.SUM)"),
    "transformers-old-names": ("from transformers import AutoModelWithLMHead", "from transformers import AutoModelForCausalLM"),
    "lightning-trainer": ("import pytorch_lightning as pl\npl.Trainer(tpu_cores=8)", "import pytorch_lightning as pl\npl.Trainer(accelerator='tpu', devices=8)"),
    "lightning-trainer-gone": ("import pytorch_lightning as pl\npl.Trainer(auto_lr_find=True)", "import pytorch_lightning as pl\npl.Trainer(max_epochs=3)"),
    "loss-data-item": ("import torch\ntotal += loss.data[0]\n", "import torch\ntotal += loss.item()\nx = batch.data[0]\n"),
    "torch-fft": ("import torch\ntorch.rfft(x, 1)\ntorch.fft(x, 2)", "import torch\ntorch.fft.rfft(x)\nimport torch.fft"),
    "torch-stft": ("import torch\ntorch.stft(x, 400)", "import torch\ntorch.stft(x, 400, return_complex=True)"),
    "torchmetrics-task": ("from torchmetrics import F1Score\nF1Score(num_classes=3)", "from torchmetrics import F1Score\nF1Score('multiclass', num_classes=3)\nF1Score(task='binary')"),
    "numpy-aliases": ("import numpy as np\nnp.float(3)", "import numpy as np\nnp.float32(3)\nnp.int64(3)"),
    "numpy-2": ("import numpy as np\nnp.float_(3)", "import numpy as np\nnp.float64(3)\nnp.nan"),
}  # fmt: skip

LOOKS_LIKE = {
    "parameter shadows the module": XM + "def f(xm):\n    return xm.xla_device()",
    "another package of that name": "from mytools import xla_model as xm\nxm.xla_device()",
    "a relative import": "from .core import xla_model as xm\nxm.xla_device()",
    "text and comments": XM + "# xm.xla_device()\ns = 'xm.xla_device()'",
    "silenced": XM + "d = xm.xla_device()  # tpukit: ignore",
    "a fallback for old releases": (
        "try:\n    from torch_xla.runtime import world_size\nexcept ImportError:\n"
        "    from torch_xla.core.xla_model import xrt_world_size as world_size\nworld_size()"
    ),
    "a check by hasattr": XM + "if hasattr(xm, 'xrt_world_size'):\n    n = xm.xrt_world_size()",
    "a check by version": (
        "import torch\nfrom packaging import version\n"
        "if version.parse(torch.__version__) < version.parse('2.4'):\n"
        "    scaler = torch.cuda.amp.GradScaler()"
    ),
    "a new name under an old one's alias": (
        "try:\n    from torch.amp import autocast\nexcept ImportError:\n"
        "    from torch.cuda.amp import autocast\nwith autocast('cuda'): pass"
    ),
    "a built-in beside a star": "from numpy import *\nzeros(3, dtype=float)",
    "a class of one's own": "class Accelerator:\n    def __init__(self, fp16): ...\nAccelerator(fp16=True)",
}

SPELLINGS = {
    "import package": "import torch_xla\nimport torch_xla.core.xla_model\ntorch_xla.core.xla_model.xla_device()",
    "from package": "from torch_xla.core import xla_model\nxla_model.xla_device()",
    "from module": "from torch_xla.core.xla_model import xla_device\nxla_device()",
    "renamed": "from torch_xla.core.xla_model import xla_device as dev\ndev()",
    "star": "from torch_xla.core.xla_model import *\nxla_device()",
    "assigned module": "import torch_xla.core.xla_model\nxm = torch_xla.core.xla_model\nxm.xla_device()",
    "assigned function": XM + "dev = xm.xla_device\ndev()",
    "getattr": XM + "getattr(xm, 'xla_device')()",
    "inside a function": "def f():\n    import torch_xla.core.xla_model as xm\n    return xm.xla_device()",
    "imported below its use": "def f():\n    return xm.xla_device()\n" + XM,
    "in a class": XM + "class A:\n    device = xm.xla_device()",
    "in a lambda": XM + "f = lambda: xm.xla_device()",
    "in a default": XM + "def f(d=xm.xla_device()): ...",
    "in a comprehension": XM + "[xm.xla_device() for _ in range(8)]",
    "in an f-string": XM + "f'{xm.xla_device()}'",
    "in a decorator": XM + "@register(xm.xla_device())\ndef f(): ...",
    "under try": "try:\n    import torch_xla.core.xla_model as xm\nexcept ImportError:\n    xm = None\nxm.xla_device()",
    "in match": XM + "match x:\n    case 1:\n        xm.xla_device()",
}


SHORT_NAMES = [
    "import torch\ntorch.eig(a)",
    "import torch as t\nt.eig(a)",
    "from torch import eig\neig(a)",
    "from torch import (\n    zeros,\n    eig,\n)\neig(a)",
    "import torch\ngetattr(\n    torch, 'eig'\n)(a)",
    "import torch\neigenvalues, _ = torch.eig(weight)",
    "import timm.models\ntimm.models.layers.DropPath()",
    "import timm.models as m\nm.layers.DropPath()",
    "from timm.models import layers\nlayers.DropPath()",
]
"""Uses of names that are short, or parts of frequent words."""


def ids(code: str) -> list[str]:
    module = python_module("x.py", code + "\n")
    assert module.tree is not None, module.notes
    found = [finding.id for finding in module_findings(module)]
    # What is found must also get past the look that saves parsing most files.
    assert not found or may_concern(code.encode())
    return found


@pytest.mark.parametrize("code", SHORT_NAMES)
def test_a_short_name_is_found_in_every_spelling(code):
    assert ids(code)
    cell = {"cell_type": "code", "source": code}
    assert may_concern(json.dumps({"cells": [cell]}).encode())


USES = {
    "whole": "import {top}\n{parent}.{last}({given})",
    "in brackets": "import {top}\n({parent}\n  # why\n  ).{last}({given})",
    "package renamed": "import {parent} as q\nq.{last}({given})",
    "from": "from {parent} import (zeros,\n    {last} as q)\nq({given})",
    "star": "from {parent} import *\n{last}({given})",
    "assigned last": "import {top}\na = q = {parent}\nq.{last}({given})",
    "annotated": "import {top}\nq: object = {parent}\nq.{last}({given})",
    "named in an expression": "import {top}\nprint(q := {parent})\nq.{last}({given})",
    "attribute": "import {top}\nclass A:\n    def __init__(self):\n        self.q = {parent}\n"
    "    def f(self):\n        self.q.{last}({given})",
    "getattr": "import {top}\ngetattr({parent}, '{last}')({given})",
    "function assigned": "import {top}\nq = {parent}.{last}\nq({given})",
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_no_use_of_any_old_name_is_ruled_out_by_its_words(use):
    found = 0
    for row in old_calls():
        for name in row.names:
            parent, _, last = name.rpartition(".")
            if row.kind == "shell" or not parent or "(" in name:
                continue
            given = ", ".join(f"{keyword}=1" for keyword in row.keywords[:1])
            code = use.format(top=name.split(".")[0], parent=parent, last=last, given=given)
            found += bool(ids(code))
    assert found > 90


def test_only_calls_that_a_row_is_about_are_worth_parsing():
    load, loss = "import torch\nx = torch.load({})", "from torch.nn import MSELoss\nf = MSELoss({})"
    for call, right, wrong in (
        (load, "f(a),\n  weights_only=True", "f(')', a)"),
        (load, "f, # )\n weights_only=w", "f)\ny = g(weights_only=w"),
        (loss, "'mean'", "a,  # b)\n    reduce=False"),
        (loss, "f(a(b()))", "**more)\nmore = dict(reduce=False"),
        ("import torch\nx = torch.fft{}(a)", ".fft", ""),
    ):
        assert not may_concern(call.format(right).encode())
        assert ids(call.format(wrong))


def test_calls_that_never_close_are_read_once():
    assert may_concern(b"import torch\nx = torch.load(" + b"f(a, #b)\n'c', " * 20000)


def test_a_file_that_tests_for_the_new_name_is_not_worth_parsing():
    old = "import torch\nf = torch.nn.utils.weight_norm\nf(x)\n"
    new = 'if hasattr(torch.nn.utils.parametrizations, "weight_norm"): ...'
    assert may_concern(old.encode())
    assert not may_concern((old + new).encode())
    # A cell may print it.
    assert may_concern(json.dumps({"source": old, "text": new.replace('"', "'")}).encode())


def test_a_tokenizer_needs_no_torch():
    assert ids("from transformers import AutoTokenizer\nwith t.as_target_tokenizer(): ...")
    assert ids("from transformers import AutoProcessor\nwith p.as_target_processor(): ...")


def test_comments_behind_an_import_that_stays_open_are_read_once():
    code = "import torch\n# eig\nimport (\n" + "# a comment of some words\n" * 40
    look = f"from tpukit.probe.lint.prefilter import may_concern\nmay_concern({code.encode()!r})"
    # Reading each comment in every way it can be split would take years.
    subprocess.run([sys.executable, "-c", look], check=True, timeout=120)


def test_a_short_name_inside_words_is_not_worth_parsing():
    assert not may_concern(b"import torch\nimport timm\nlayer = x.weight.eig_values(layer)")


def test_every_row_has_its_case():
    assert set(CASES) == {row.id for row in old_calls()}


@pytest.mark.parametrize("id", CASES)
def test_row_is_found(id):
    assert id in ids(CASES[id][0])


@pytest.mark.parametrize("id", CASES)
def test_near_miss_is_not_found(id):
    assert id not in ids(CASES[id][1])


@pytest.mark.parametrize("name", LOOKS_LIKE)
def test_what_only_looks_like_it(name):
    assert ids(LOOKS_LIKE[name]) == []


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_is_found(name):
    assert "xm-xla-device" in ids(SPELLINGS[name])


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("from accelerate import Accelerator\ndef f(a: Accelerator):\n    a.use_fp16", "accelerator-use-fp16"),
        ("from accelerate import Accelerator\ndef f(a: 'Accelerator | None'):\n    a.use_fp16", "accelerator-use-fp16"),
        ("from accelerate import Accelerator\nclass T:\n    def __init__(self):\n        self.acc = Accelerator()\n"
         "    def g(self):\n        return self.acc.device_type", "accelerator-device-type"),
        ("import torch_xla.distributed.xla_multiprocessing as xmp\nxmp.spawn(f, (), 8)", "xmp-spawn-nprocs"),
        ("import torch_xla.distributed.xla_multiprocessing as xmp\nxmp.spawn(f, nprocs=FLAGS['cores'])", "xmp-spawn-nprocs"),
        ("import timm\ntimm.models.layers.DropPath(0.1)", "timm-models-layers"),
        ("from timm.models.layers.drop import DropPath", "timm-models-layers"),
        ("import os\nos.environ.update({'XLA_USE_BF16': '1'})", "xla-environment"),
        ("from transformers import AutoModel\nAutoModel.from_config(c, torch_dtype=d)", "torch-dtype"),
        ("import torch as T\nT.load('x.pt')", "torch-load"),
        ("from torch import serialization as s\ns.load('x.pt')", "torch-load"),
        ("import numpy\ngetattr(numpy, 'float')(3)", "numpy-aliases"),
        ("from numpy import (\n    array,\n    float_,\n)\nfloat_(3)", "numpy-2"),
        ("import torch\nx.addcdiv_(-lr, m, v)", "scalar-first"),
        ("import torch\nx = iter(train_loader).next()", "iterator-next"),
        ("get_ipython().run_cell_magic('bash', '', 'python -m torch_xla.distributed.xla_dist')", "xla-dist-command"),
        ("import os, \\\n    torch\ntorch.load('x.pt')", "torch-load"),
        ("from torch.utils.checkpoint import checkpoint as ckpt\nckpt(f, x)", "checkpoint-use-reentrant"),
        ("from torch.utils import checkpoint as cp\nrun = cp.checkpoint\nrun(f, x)", "checkpoint-use-reentrant"),
        ("from os import environ\nenviron.setdefault('XLA_USE_SPMD', '1')", "xla-environment"),
    ],
)  # fmt: skip
def test_further_forms(code, expected):
    assert expected in ids(code)


def test_place_and_words():
    code = "é = 'ü'; import torch_xla.core.xla_model as xm; d = xm.xla_device()\n"
    (finding,) = module_findings(python_module("a.py", code))
    assert (finding.line, finding.column) == (1, code.index("xm.xla_device") + 1)
    assert finding.status == "deprecated"
    assert finding.as_json() == {
        "path": "a.py", "cell": None, "line": 1, "column": 53, "old": "xm.xla_device()",
        "new": "torch_xla.device()", "since": "torch_xla 2.8", "status": "deprecated",
        "id": "xm-xla-device", "fixable": True, "effect": "warns",
    }  # fmt: skip


# -- the table against the packages that are installed ------------------------------------------
TORCH_XLA_GONE = """
import os, sys
os.environ["PJRT_DEVICE"] = "CPU"
import importlib
from tpukit.knowledge.calls import old_calls
@pytest.mark.parametrize(
    ("code", "advice"),
    [
        ("import numpy as np\nx = np.Inf", "np.inf"),
        ("from transformers import TrainingArguments\nTrainingArguments(no_cuda=True, adafactor=True)",
         'use_cpu=; optim="adafactor"'),
        ("from transformers import TrainingArguments\nTrainingArguments(ray_scope='all')",
         "omit it: it has no successor"),
        ("import torch\ntorch.symeig(x)", "torch.linalg.eigh"),
        ("from torch.optim.lr_scheduler import ReduceLROnPlateau\nReduceLROnPlateau(o, verbose=True)",
         "the same without verbose, and print(scheduler.get_last_lr())"),
    ],
)  # fmt: skip
def test_advice_is_about_what_stands_there(code, advice):
    (finding,) = module_findings(python_module("x.py", code))
    assert finding.new == advice


def there(name):
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False
wrong = []
for row in old_calls():
    if row.kind in ("name", "module"):
        for name in row.names:
            package = name.partition(".")[0]
            if package in sys.argv[1:] and there(name) == (row.status == "removed"):
                wrong.append((row.status, name))
print(wrong)
"""


def statuses_that_are_wrong(*packages: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TORCH_XLA_GONE, *packages],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.xla
def test_torch_xla_rows_are_true_of_the_installed_release():
    pytest.importorskip("torch_xla")
    assert statuses_that_are_wrong("torch_xla") == "[]"


@pytest.mark.slow
def test_timm_and_numpy_rows_are_true_of_the_installed_releases():
    assert statuses_that_are_wrong("timm", "numpy") == "[]"


def test_torch_rows_are_true_of_the_installed_release():
    torch = importlib.import_module("torch")
    schedulers = importlib.import_module("torch.optim.lr_scheduler")
    for row in old_calls():
        for name in row.names if row.id == "scheduler-verbose" else ():
            scheduler = getattr(schedulers, name.rpartition(".")[2])
            assert "verbose" not in inspect.signature(scheduler).parameters
    with pytest.warns(FutureWarning):
        torch.cuda.amp.GradScaler(enabled=False)
    with pytest.warns(FutureWarning), torch.cuda.amp.autocast(enabled=False):
        pass


def test_a_variable_that_is_only_set_raises_nothing():
    head = "import os\n"
    (read,) = module_findings(python_module("a.py", head + "os.environ['COLAB_TPU_ADDR']\n"))
    (written,) = module_findings(
        python_module("a.py", head + "os.environ['XRT_TPU_CONFIG'] = 'x'\n")
    )
    assert (read.status, read.effect) == ("removed", "raises")
    assert (written.status, written.effect) == ("habit", "no effect")
    both = head + "os.environ['XRT_TPU_CONFIG'] = 'x'\nprint(os.environ['XRT_TPU_CONFIG'])\n"
    assert [f.effect for f in module_findings(python_module("a.py", both))] == ["no effect"]
    tested = head + "if 'COLAB_TPU_ADDR' in os.environ:\n    os.environ['COLAB_TPU_ADDR']\n"
    assert ids(tested) == []
    assert ids(tested.replace("'COLAB_TPU_ADDR' in os.environ", "'KAGGLE_URL' in os.environ")) != []


def test_every_row_says_what_happens():
    assert all(row.effect for row in old_calls())


@pytest.mark.parametrize(
    ("code", "remark"),
    [
        ("xmp.spawn(f, nprocs=FLAGS.num_cores)", "--num_cores then limits nothing"),
        ("xmp.spawn(f, nprocs=args['cores'])", "--cores then limits nothing"),
        ("xmp.spawn(f, nprocs=config['devices'])", "that value then limits nothing"),
        ("xmp.spawn(f, nprocs=count())", "that value then limits nothing"),
        ("xmp.spawn(f, nprocs=8)", ""),
        ("xmp.spawn(f, nprocs=8, join=False)", "join has no counterpart"),
        ("xmp.spawn(*f, nprocs=8)", "come from * or **"),
    ],
)
def test_what_a_fix_takes_away_or_leaves(code, remark):
    head = "import torch_xla.distributed.xla_multiprocessing as xmp\n"
    (finding,) = module_findings(python_module("a.py", head + code + "\n"))
    assert remark in finding.remark
    assert bool(finding.remark) == bool(remark)
    assert finding.fixable == ("join" not in code and "*" not in code)


def test_a_new_name_that_means_something_else_is_a_reason():
    (finding,) = module_findings(python_module("a.py", XM + "torch_xla = 3\nd = xm.xla_device()\n"))
    assert not finding.fixable
    assert "torch_xla means something else" in finding.remark


def test_a_use_that_is_not_called_is_not_called_fixable():
    (finding,) = module_findings(python_module("a.py", XM + "dev = xm.xla_device\n"))
    assert (finding.fixable, finding.remark) == (False, "not fixed: it is not called here")
