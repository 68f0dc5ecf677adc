"""Compiles traced programs for a TPU without a TPU: JAX's compile-only client over libtpu.

The client is part of `jax._src`, which has no promise of stability: only this module uses it, with
the releases that `tpukit.probe.compiler.client` lets through.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpukit.errors import HardwareError
from tpukit.probe.trial import Effort

SHARDING, REPLICATED = "mhlo.sharding", "{replicated}"
FAST_EFFORT = -1.0
"""Compiler option of the fast setting: 3 to 5 times faster, but reports 0.04 to 0.7 GiB too little
memory (GPT-2 and EIT for v5e; docs/probe_batch.md)."""


@dataclass(frozen=True)
class Program:
    """A traced step, ready to be compiled."""

    bytecode: bytes
    """StableHLO as a portable artifact."""
    aliases: Mapping[int, int]
    """Argument -> the output that shares its buffer (donated)."""
    argument_shardings: tuple[str | None, ...]
    """Each argument's mhlo.sharding; None: replicated."""
    outputs: int
    kernel_share: float
    """The part of their score tiles that fused attention kernels compute (fewer where causal)."""
    resident: Mapping[str, int]
    """Bytes of a device that outlive the step, by kind: parameters, optimizer, ema, ..."""
    resident_elsewhere: int
    """The part of them that is not an argument of this program."""


@dataclass(frozen=True)
class TracedStep:
    """The programs of one optimizer step, in their order, and of an evaluation batch."""

    training: tuple[Program, ...]
    evaluation: Program
    parameters: int
    """Number of weights of the model."""

    @property
    def resident(self) -> Mapping[str, int]:
        """Bytes of a device that outlive the step, by kind."""
        return self.training[-1].resident


class CompilerRefusedError(Exception):
    """The compiler's error message for a program that it does not compile."""


class TpuCompiler:
    """Compiles programs for one topology."""

    def __init__(self, topology: str, devices: int) -> None:
        from jax.experimental import topologies

        described = topologies.get_topology_desc(platform="tpu", topology_name=topology)
        self.devices: list[Any] = list(described.devices)[:devices]
        if len(self.devices) != devices:
            raise HardwareError(f"libtpu gives {topology} {len(self.devices)} devices.")

    def compile(self, program: Program, effort: Effort) -> Any:
        """The executable; `costs_of` measures it.

        Raises:
            CompilerRefusedError: it does not compile (out of memory, say).
        """
        from jax._src.lib import xla_client

        module = _with_arguments(program, len(self.devices))
        devices = xla_client.DeviceList(tuple(self.devices))
        try:
            return self.devices[0].client.compile(module, devices, self._options(effort))
        except Exception as error:  # XlaRuntimeError or ValueError: the class varies
            raise CompilerRefusedError(str(error)) from error

    def _options(self, effort: Effort) -> Any:
        import numpy as np
        from jax._src import compiler

        options = compiler.get_compile_options(
            num_replicas=1,
            num_partitions=len(self.devices),
            device_assignment=np.array([[device.id for device in self.devices]]),
        )
        build = options.executable_build_options
        build.use_shardy_partitioner = False
        if effort == "fast":
            build.exec_time_optimization_effort = FAST_EFFORT
        return options


def program_text(program: Program, *, places: bool = False) -> str:
    """A program's StableHLO; places: with the line that each operation comes from."""
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir.dialects import hlo

    with mlir.make_ir_context() as context:
        module = hlo.deserialize_portable_artifact(context, program.bytecode)
        asm = module.operation.get_asm(enable_debug_info=places, large_elements_limit=None)
        return str(asm)


def program_key(program: Program) -> str:
    """A program's fingerprint: the same wherever it was traced."""
    text = program_text(program)
    layout = repr((sorted(program.aliases.items()), program.argument_shardings))
    return hashlib.sha256((text + layout).encode()).hexdigest()


def _with_arguments(program: Program, devices: int) -> Any:
    """The module with aliased and sharded arguments marked, and each operation's place resolved, as
    bytes."""
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir

    from tpukit.probe.compiler.source_map import resolve_places

    with mlir.make_ir_context():
        module = ir.Module.parse(resolve_places(program_text(program, places=True)))
        main = next(
            op for op in module.body.operations if op.attributes["sym_name"].value == "main"
        )
        arguments, outputs = _attributes(program, devices)
        _set_attributes(main, "arg_attrs", arguments)
        _set_attributes(main, "res_attrs", outputs)
        return mlir.module_to_bytecode(module)


def _attributes(
    program: Program, devices: int
) -> tuple[list[dict[str, int | str]], list[dict[str, int | str]]]:
    """The new attributes of each argument and each output."""
    arguments: list[dict[str, int | str]] = [{} for _ in program.argument_shardings]
    outputs: list[dict[str, int | str]] = [{} for _ in range(program.outputs)]
    if devices > 1:
        arguments = [{SHARDING: sharding or REPLICATED} for sharding in program.argument_shardings]
        outputs = [{SHARDING: REPLICATED} for _ in outputs]
    for argument, output in program.aliases.items():
        # What shares a buffer has the same layout.
        outputs[output] = dict(arguments[argument])
        arguments[argument]["tf.aliasing_output"] = output
    return arguments, outputs


def _set_attributes(main: Any, name: str, given: Sequence[Mapping[str, int | str]]) -> None:
    """Adds attributes to the arguments (or outputs) of a function."""
    from jax._src.lib.mlir import ir

    i32 = ir.IntegerType.get_signless(32)
    present = list(main.attributes[name]) if name in main.attributes else [()] * len(given)
    main.attributes[name] = ir.ArrayAttr.get([
        ir.DictAttr.get({
            **{item.name: item.attr for item in before},
            **{
                key: ir.StringAttr.get(value)
                if isinstance(value, str)
                else ir.IntegerAttr.get(i32, value)
                for key, value in new.items()
            },
        })
        for before, new in zip(present, given, strict=True)
    ])  # fmt: skip
