"""`trains_on_tpu` on models of ten public repositories, as their own code builds them, and on known
faults of some: an operator that leaves the device, a recompilation, a model that does not fit.

FOLDER holds a checkout of each as <owner>+<name>; what is missing there is left out. Their imports
(einops, einx, librosa, loguru, torch_einops_utils) have to be installed. One process a model; the
wall seconds are of a machine that may be busy.

    python benchmarks/public_models.py FOLDER --out benchmarks/results/public_models.json
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from deciding_code import write_result

CODE = "torch.randint(0, 256, (8, 64))"
IMAGES = "torch.randn(8, 3, {0}, {0})"
MODELS = {
    "karpathy+nanoGPT": (
        "from model import GPT, GPTConfig",
        "GPT(GPTConfig(block_size=64, vocab_size=256, n_layer=4, n_head=4, n_embd=128))",
        f"dict(idx={CODE}, targets={CODE})",
    ),
    "karpathy+minGPT": (
        "from mingpt.model import GPT\nconfig = GPT.get_default_config()\n"
        "config.model_type, config.vocab_size, config.block_size = 'gpt-nano', 256, 64",
        "GPT(config)",
        f"dict(idx={CODE}, targets={CODE})",
    ),
    "johnma2006+mamba-minimal": (
        "from model import Mamba, ModelArgs",
        "Mamba(ModelArgs(d_model=64, n_layer=2, vocab_size=256))",
        "torch.randint(0, 256, (8, 16))",
    ),
    "lucidrains+x-transformers": (
        "from x_transformers import Decoder, TransformerWrapper",
        "TransformerWrapper(num_tokens=256, max_seq_len=64, "
        "attn_layers=Decoder(dim=128, depth=2, heads=4))",
        CODE,
    ),
    "lucidrains+vit-pytorch": (
        "from vit_pytorch import ViT",
        "ViT(image_size=64, patch_size=16, num_classes=10, dim=128, depth=2, heads=4, mlp_dim=256)",
        IMAGES.format(64),
    ),
    "lucidrains+denoising-diffusion-pytorch": (
        "from denoising_diffusion_pytorch.denoising_diffusion_pytorch import Unet",
        "Unet(dim=16, dim_mults=(1, 2))",
        f"dict(x={IMAGES.format(32)}, time=torch.randint(0, 1000, (8,)))",
    ),
    "kuangliu+pytorch-cifar": (
        "from models.resnet import ResNet18", "ResNet18()", IMAGES.format(32),
    ),
    "milesial+Pytorch-UNet": ("from unet import UNet", "UNet(3, 2)", IMAGES.format(64)),
    "lukemelas+EfficientNet-PyTorch": (
        "from efficientnet_pytorch import EfficientNet",
        "EfficientNet.from_name('efficientnet-b0')",
        IMAGES.format(64),
    ),
    "Blealtan+efficient-kan": (
        "sys.path.insert(0, 'src')\nfrom efficient_kan import KAN",
        "KAN([64, 32, 10])",
        "torch.randn(8, 64)",
    ),
    "vincentherrmann+pytorch-wavenet": (
        "from wavenet_model import WaveNetModel",
        "WaveNetModel(layers=3, blocks=2, output_length=8)",
        "torch.randn(8, 256, 64)",
    ),
}  # fmt: skip
"""Repository -> imports, the model, its inputs."""


FAULTS = {
    "leaves the device: unique": (
        "lucidrains+vit-pytorch",
        "from vit_pytorch.ats_vit import ViT",
        "ViT(image_size=64, patch_size=16, num_classes=10, dim=64, depth=1, heads=2, mlp_dim=64,"
        " max_tokens_per_depth=(8,))",
        IMAGES.format(64),
        "ats_vit.py:",
    ),
    "leaves the device: a boolean mask": (
        "lucidrains+vit-pytorch",
        "from vit_pytorch import ViT\nfrom vit_pytorch.mpp import MPP\n"
        "vit = ViT(image_size=64, patch_size=16, num_classes=10, dim=64, depth=1, heads=2,"
        " mlp_dim=64)",
        "MPP(transformer=vit, patch_size=16, dim=64, mask_prob=0.5)",
        IMAGES.format(64) + ".sigmoid()",
        "mpp.py:",
    ),
    "recompiles: layers dropped by random()": (
        "lucidrains+x-transformers",
        "from x_transformers import Decoder, TransformerWrapper",
        "TransformerWrapper(num_tokens=256, max_seq_len=64, "
        "attn_layers=Decoder(dim=64, depth=6, heads=2, layer_dropout=0.5))",
        CODE,
        "programs were compiled after the second step. The third step's program differs in",
    ),
    "recompiles: layers dropped by a tensor on the CPU": (
        "lucidrains+vit-pytorch",
        "from vit_pytorch.cait import CaiT",
        "CaiT(image_size=64, patch_size=16, num_classes=10, dim=64, depth=6, cls_depth=1,"
        " heads=2, mlp_dim=64, layer_dropout=0.5)",
        IMAGES.format(64),
        "programs were compiled after the second step. The third step's program differs in",
    ),
    "does not fit: attention of every pair of patches": (
        "lucidrains+vit-pytorch",
        "from vit_pytorch import ViT",
        "ViT(image_size=256, patch_size=8, num_classes=10, dim=64, depth=2, heads=4, mlp_dim=64)",
        IMAGES.format(256) + ", batch=2048",
        "batch 2048 does not fit a v5e-1",
    ),
    "does not fit: attention scores of 2,048 tokens": (
        "lucidrains+x-transformers",
        "from x_transformers import Decoder, TransformerWrapper",
        "TransformerWrapper(num_tokens=256, max_seq_len=2048, "
        "attn_layers=Decoder(dim=64, depth=2, heads=4))",
        "torch.randint(0, 256, (8, 2048)), batch=512",
        "batch 512 does not fit a v5e-1",
    ),
}
"""Known faults of public models -> repository, imports, model, inputs, what must be said."""


def judged(folder: Path, imports: str, model: str, inputs: str) -> dict[str, Any]:
    program = (
        "import sys, torch\nsys.path.insert(0, '.')\n" + imports + "\n"
        "from tpukit.testing import trains_on_tpu\ntorch.manual_seed(0)\n"
        f"try:\n    trains_on_tpu({model}, {inputs})\n"
        "except AssertionError as error:\n    sys.exit(str(error))\n"
    )
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    says = done.stderr.replace(f"{folder.resolve()}/", "").strip().splitlines()
    return {
        "verdict": "trains" if done.returncode == 0 else "fails",
        "says": [line for line in says if line.startswith("- ")] or says[-2:],
        "seconds": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    packages = ("tpukit", "torch", "torch_xla", "libtpu", "jax")
    versions = {"python": platform.python_version(), **{p: version(p) for p in packages}}
    asked = {name: (name, *model, "") for name, model in MODELS.items()} | FAULTS
    found: dict[str, dict[str, Any]] = {}
    for name, (repository, *given, expected) in asked.items():
        if options.only not in name or not (options.folder / repository).is_dir():
            continue
        found[name] = judged(options.folder / repository, *given)
        if expected:
            found[name]["found"] = any(expected in line for line in found[name]["says"])
        print(name, json.dumps(found[name]), flush=True)
        if options.out:
            # After each: a run that is stopped leaves what it has.
            write_result(options.out, {"models": found, "versions": versions})


if __name__ == "__main__":
    main()
