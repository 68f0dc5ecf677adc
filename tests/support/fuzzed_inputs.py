"""Inputs of the readers: valid and hostile ones, with a few bytes changed."""

import base64
import io
import json
import os
import pickle
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as some
from PIL import Image

TRACE = Path(tempfile.gettempdir()) / f"campaign-trap-{os.getpid()}"


class Trap:
    """Leaves a trace when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(TRACE),))


def _saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _archive(**arrays: Any) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def _picture(kind: str, mode: str = "RGB") -> bytes:
    stream = io.BytesIO()
    Image.new(mode, (40, 30)).save(stream, kind)
    return stream.getvalue()


VALUES = [b"inf", b"nan", b"-1", b"1e400", b"9" * 25, b"''", b"[[[[", b"{a=1}", b"true",
          b"1" * 5000,
          b"2099-01-01", b"0x7fffffffffffffff", b"8h30m", b"4GB", b"\xf0\x9f\x98\x80"]  # fmt: skip
SEEDS: dict[str, list[bytes]] = {
    "csv": [b"id,dialogue,summary\n1,a,b\n", b'id,dialogue,summary\r\n1,"a\r\nb",c\r\n',
            b"\xef\xbb\xbfid;dialogue;summary\n"],
    "config": [b"lr = 0.1\n[train]\nmax_steps = 3\n[task]\nsize = 'tiny'\n", *VALUES],
    "run-config": [b"# SHA-256 of the lines below: 0\n[train]\n[task]\n",
                   b"[train]\n[task]\na=1\n"],
    "state": [b'{"format": 1, "step": 1, "sha256": {}}', b"[]", b"{}"],
    "published": [_saved({"model": {"a": torch.zeros(2)}, "epoch": 1}), _saved({"model": Trap()}),
                  pickle.dumps(Trap()), _saved([1]), _saved({"model": {1: torch.zeros(1)}})],
    "transformers": [json.dumps({"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 2,
                                 "vocab_size": 2, "n_positions": 2}).encode(), b"[]", b"{}"],
    "normalisation": [_saved(torch.ones(1, 16, 13)), _saved(Trap()), pickle.dumps(Trap()),
                      _archive(mean=np.ones(208), std=np.ones(208))],
    "sample": [_archive(ys=np.zeros((208, 1)), xs=np.zeros((128, 128))), _archive(ys=np.zeros(3)),
               _archive(ys=np.array([Trap()], object)), pickle.dumps(Trap())],
    "tokenizer": [b"IQ== 0\nIg== 1\n", b'{"model": {"type": "BPE", "vocab": {}, "merges": []}}'],
    "units": VALUES,
    "options": VALUES,
    "table": [b"id,label\na.png,1\n", b"id;label\r\n\"a\",b\r\n", b"\xff\xfei\x00d\x00"],
    "image": [_picture("PNG"), _picture("JPEG"), _picture("GIF", "P"), _picture("BMP", "1"),
              _picture("TIFF", "I;16"), b"P5 9999999 9999999 255\n"],
    "metrics": [b'{"step": 1, "kind": "train", "loss": 1.0}\n{"step": 2, "kind": "train", '
                b'"loss": NaN}\n', b'{"simulated": {"metrics": {"rmse": 1}, "intervals": {}}}'],
    "knowledge": [b'[[error]]\nid = "a"\nmatch = ["x <n>"]\ncause = "c"\nfix = "f"\nsource = "s"\n',
                  b'[[error]]\nid = "a"\nregex = ["(a+)+$"]\ncause = "c"\nfix = "f"\n'],
    "test-set": [b'{"settings": {"electrode_degrees": 10}}', b"{}", b'{"settings": []}'],
    "token-cache": [bytes(4), b"{}", b"\xff" * 16],
    "settings": VALUES,
}  # fmt: skip


@some.composite
def mutated(draw: Any, kind: str) -> bytes:
    """A valid or a hostile input of a reader, with a few bytes cut, changed, added or repeated."""
    content = bytearray(draw(some.sampled_from(SEEDS[kind])))
    for _ in range(draw(some.integers(0, 4))):
        at = draw(some.integers(0, len(content)))
        match draw(some.sampled_from(["flip", "cut", "add", "repeat", "text"])):
            case "flip" if at < len(content):
                content[at] ^= 1 << draw(some.integers(0, 7))
            case "cut":
                del content[at : at + draw(some.integers(1, 64))]
            case "add":
                content[at:at] = draw(some.binary(max_size=16))
            case "repeat":
                content[at:at] = content[:at][-64:]
            case "text":
                content[at:at] = draw(some.text(max_size=16)).encode(errors="surrogatepass")
    return bytes(content)


ALL_BYTES = b"".join(base64.b64encode(bytes([byte])) + f" {byte}\n".encode() for byte in range(256))
"""A tokenizer file of 256 tokens."""
SAMPLE = _archive(ys=np.zeros((208, 1)), xs=np.zeros((128, 128)))
