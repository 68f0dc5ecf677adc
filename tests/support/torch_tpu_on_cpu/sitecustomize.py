"""Runs torch_tpu on the CPU: the tests put this folder on PYTHONPATH, nothing else loads it.

Every process of a test then sees one chip of a TPU v5e. torch_tpu talks to its device through the
PJRT plugin that TPU_LIBRARY_PATH names; a plugin for CPUs (`lammps-jax-pjrt-cpu`) stands in for
libtpu. That plugin has one device and one rank, no kernels of TPUs and no memory statistics.
"""

import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

CHIP = "/sys/bus/pci/devices/0000:00:04.0"
CHIP_FILES = {f"{CHIP}/vendor": "0x1ae0\n", f"{CHIP}/device": "0x0063\n"}
CLIENT_CREATE = 15
"""Place of PJRT_Client_Create in the plugin's table: size, extension, version (24 bytes), then the
functions."""
TPU_TOPOLOGY, COUNTS = 16, range(10, 19)
"""The extension that libtpu alone has, and the places in it of what counts processes, chips, cores
and devices: torch_tpu asks before it calls a kernel of ours."""
KEPT = []
"""What the plugin's table points to."""


def plugin_path() -> str:
    """The plugin's file; the package is not imported."""
    package = importlib.util.find_spec("lammps_jax_pjrt_cpu")
    assert package is not None and package.origin is not None
    return str(Path(package.origin).with_name("pjrt_c_api_cpu_plugin.so"))


class CreateArguments(ctypes.Structure):
    """The start of PJRT_Client_Create_Args."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("options", ctypes.c_void_p),
        ("option_count", ctypes.c_size_t),
    ]


class NamedValue(ctypes.Structure):
    """PJRT_NamedValue, of an integer."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("name_length", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("value", ctypes.c_int64),
        ("value_size", ctypes.c_size_t),
    ]


def one_device(path: str) -> None:
    """Makes the plugin create one device, and ignore the options that libtpu alone knows."""
    library = ctypes.CDLL(path, os.RTLD_NOW | os.RTLD_LOCAL)
    library.GetPjrtApi.restype = ctypes.c_void_p
    table = ctypes.cast(library.GetPjrtApi(), ctypes.POINTER(ctypes.c_void_p))
    kind = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(CreateArguments))
    original = kind(table[CLIENT_CREATE])
    name = b"cpu_device_count"
    option = NamedValue(ctypes.sizeof(NamedValue), None, name, len(name), 1, 1, 1)

    def create(arguments):
        arguments.contents.options = ctypes.addressof(option)
        arguments.contents.option_count = 1
        return original(arguments)

    callback = kind(create)
    KEPT.extend([library, original, option, callback])
    table[CLIENT_CREATE] = ctypes.cast(callback, ctypes.c_void_p).value
    add_topology(table)


def add_topology(table) -> None:
    """One of everything."""

    @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(ctypes.c_int32))
    def one(arguments):
        arguments[4] = 1  # after the size and the topology

    words = (ctypes.c_uint64 * 34)(34 * 8, TPU_TOPOLOGY, table[1] or 0)
    for place in COUNTS:
        words[place] = ctypes.cast(one, ctypes.c_void_p).value
    KEPT.extend([one, words])
    table[1] = ctypes.addressof(words)


def show_a_chip(host) -> None:
    """tpukit's detection: the files of a chip instead of the machine's own."""

    class Host(host.Host):
        def read(self, path):
            return CHIP_FILES.get(path) or super().read(path)

        def names(self, path):
            if path == str(Path(CHIP).parent):
                return [Path(CHIP).name]
            return super().names(path)

    host.Host = Host


def count_a_chip(hardware) -> None:
    """torch_tpu's detection."""
    one_device(os.environ["TPU_LIBRARY_PATH"])
    hardware.get_tpu_device_count = lambda: 1
    hardware.get_tpu_device_name = lambda: "TPU v5e"


def leave_out_kernels(loader) -> None:
    """Attention without the kernels of TPUs, which the plugin cannot run."""
    import torch

    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)


def interpret_kernels(trials) -> None:
    """Kernels of ours run where a test asks for it, in JAX's interpreter."""
    asked = os.environ.get("TPUKIT_EMULATED_KERNELS") == "1"
    trials.kernel_device = lambda hardware: "the CPU plugin" if asked else None


CHANGED = {
    "tpukit.hardware.device_trials": interpret_kernels,
    "tpukit.hardware.host": show_a_chip,
    "torch_tpu._internal.utils.hardware": count_a_chip,
    "torch_tpu._loader": leave_out_kernels,
}


class Changing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Changes these modules as soon as they are imported."""

    def find_spec(self, name, path=None, target=None):
        if name not in CHANGED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None:
            self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        self.loader.exec_module(module)
        CHANGED[module.__name__](module)


os.environ["TPU_LIBRARY_PATH"] = plugin_path()
sys.meta_path.insert(0, Changing())
