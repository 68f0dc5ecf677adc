"""Opens a backend and prints why that fails: python opened.py HARDWARE [DEVICES]."""

import sys

from tpukit.errors import TpukitError
from tpukit.hardware.options import HardwareOptions
from tpukit.hardware.select import open_backend

try:
    open_backend(HardwareOptions(hw=sys.argv[1], devices=int([*sys.argv, 0][2]) or None))
except TpukitError as error:
    print(error.message, error.hint)
