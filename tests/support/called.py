"""Calls a function of a test file, whose processes are forks: python called.py FILE FUNCTION."""

import runpy
import sys

file, function = sys.argv[1:]
runpy.run_path(file)[function]()
