"""`trains_on_tpu` on models of ten public repositories, as their own code builds them.

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


def judged(folder: Path, name: str) -> dict[str, Any]:
    imports, model, inputs = MODELS[name]
    program = (
        "import sys, torch\nsys.path.insert(0, '.')\n" + imports + "\n"
        "from tpukit.testing import trains_on_tpu\ntorch.manual_seed(0)\n"
        f"try:\n    trains_on_tpu({model}, {inputs})\n"
        "except AssertionError as error:\n    sys.exit(str(error))\n"
    )
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder / name, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    says = done.stderr.strip().splitlines()
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
    found = {}
    for name in MODELS:
        if options.only in name and (options.folder / name).is_dir():
            found[name] = judged(options.folder, name)
            print(name, json.dumps(found[name]), flush=True)
    packages = ("tpukit", "torch", "torch_xla", "libtpu", "jax")
    versions = {"python": platform.python_version(), **{p: version(p) for p in packages}}
    if options.out:
        write_result(options.out, {"models": found, "versions": versions})


if __name__ == "__main__":
    main()
