"""Two ranks of rank_script.py, launched as a command does: python launched.py SCENARIO RESTARTS."""

import sys

from tpukit.errors import TpukitError
from tpukit.hardware.launch.launcher import launch
from tpukit.hardware.options import HardwareOptions

try:
    options = HardwareOptions(hw="cpu", devices=2, max_restarts=int(sys.argv[2]))
    sys.exit(launch(sys.argv[1:2], 2, options, module="rank_script"))
except TpukitError as error:
    print("Error:", error.message, file=sys.stderr)
    sys.exit(error.exit_code)
