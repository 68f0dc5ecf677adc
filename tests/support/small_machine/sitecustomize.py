"""On the path of a process: a machine of SMALL_MACHINE bytes, of which what this process and its
children hold is taken."""

import os

if size := int(os.environ.get("SMALL_MACHINE", "0")):
    import psutil

    real = psutil.virtual_memory

    def virtual_memory():
        from tpukit.hardware.memory import tree_bytes

        return real()._replace(total=size, available=max(0, size - tree_bytes()))

    psutil.virtual_memory = virtual_memory
