"""Compiles the attention kernels at the edges of what `fits` takes, for the topologies named.

python kernels_on_tpus.py N v4:2x2x1 v6e:2x2: every Nth case. Answers with the refused, in JSON.
"""

import functools
import json
import os
import sys

os.environ.update(
    PJRT_DEVICE="CPU", JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1"
)  # fmt: skip

import jax
import jax.numpy as jnp
import torch
from jax._src.interpreters.mlir import LoweringParameters
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from tpukit.hardware.kernels.flash_attention import fits, tiles_of
from tpukit.hardware.kernels.pallas_attention import backward, forward

BF16, FP32 = (torch.bfloat16, jnp.bfloat16), (torch.float32, jnp.float32)
CASES = [  # rows, width, tokens, types, causal, what comes beside
    (2, 16, 32768, BF16, False, ""), (2, 32, 16384, BF16, True, ""),
    (2, 64, 8192, BF16, True, ""), (2, 128, 4096, BF16, True, ""),
    (2, 32, 8192, FP32, False, ""), (2, 64, 4096, FP32, True, ""),
    (16, 32, 256, BF16, False, "bias"), (4, 128, 512, BF16, False, "bias"),
    (4, 64, 512, FP32, True, "bias"), (3, 64, 384, BF16, True, ""),
    (2, 64, 8192, BF16, True, "starts"), (4, 64, 1280, FP32, True, "starts"),
    (16, 32, 128, BF16, True, "starts"), (2, 256, 2048, BF16, True, "starts"),
    (4, 256, 256, BF16, True, ""), (2, 256, 512, BF16, False, "bias"),
    (6, 128, 384, BF16, True, "starts"), (2, 128, 640, BF16, True, ""),
    (2, 128, 384, BF16, True, "bias"), (4, 256, 1920, BF16, True, "starts"),
    (2, 256, 384, BF16, False, "bias"), (8, 256, 128, BF16, True, ""),
]  # fmt: skip


def main() -> None:
    refused = []
    every, *names = sys.argv[1:]
    for name in names:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=name)
        here = SingleDeviceSharding(topology.devices[0])
        for rows, width, tokens, (torch_type, jax_type), causal, beside in CASES[:: int(every)]:
            query = torch.empty(rows, 2, tokens, width, dtype=torch_type, device="meta")
            bias = torch.empty(1, 2, tokens, tokens, device="meta") if beside == "bias" else None
            assert fits(query, query, bias, causal=causal), (width, tokens, torch_type)
            shape = functools.partial(jax.ShapeDtypeStruct, sharding=here)
            one = shape((rows, 2, width, tokens), jax_type)
            sums = shape((rows, 2, 1, tokens), jnp.float32)
            further = {
                "bias": [shape((2, tokens, tokens), jnp.float32)],
                "starts": [shape((rows, 1, 1, tokens), jnp.int32)],
            }.get(beside, [])
            given = {forward: [one, one, one], backward: [one, one, one, one, sums, one]}
            for kernel, inputs in given.items():
                tiles = tiles_of(width * query.element_size())
                call = functools.partial(
                    kernel, tiles=tiles, causal=causal, packed=beside == "starts"
                )
                lowered = jax.jit(call).trace(*inputs, *further).lower(
                    lowering_platforms=("tpu",),
                    _private_parameters=LoweringParameters(for_export=True),
                )  # fmt: skip
                try:
                    lowered.compile()
                except Exception as error:
                    case = (name, kernel.__name__, rows, width, tokens, str(torch_type), causal)
                    refused.append([*case, beside, str(error)[:300]])
    print(json.dumps(refused))


if __name__ == "__main__":
    main()
