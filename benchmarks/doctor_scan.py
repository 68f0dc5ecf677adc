"""Processor time of `tpukit doctor PATH` on 1,000 files that import torch, beside Python's parser.

The files are those of the installed packages below that have a line `import torch` or `from torch`,
in the order of their paths, every n-th of them. Both sides run in this process, in turn: the scan
of each file as the command does it, and `ast.parse` of each file, which no scan that parses
everything can be faster than. The medians of the processor times count.

    python benchmarks/doctor_scan.py --out benchmarks/results/doctor_scan.json
"""

import argparse
import ast
import gc
import json
import platform
import re
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from deciding_code import write_result

from tpukit.probe.lint.prefilter import may_concern
from tpukit.probe.lint.scan import scan_file

PACKAGES = ("accelerate", "peft", "timm", "torch", "torchvision", "transformers")
_IMPORTS_TORCH = re.compile(rb"^\s*(?:import|from) torch\b", re.MULTILINE)


def folder(package: str) -> Path:
    found = find_spec(package)
    assert found is not None and found.origin is not None, package
    return Path(found.origin).parent


def chosen(count: int) -> list[Path]:
    files = sorted(file for package in PACKAGES for file in folder(package).rglob("*.py"))
    files = [file for file in files if _IMPORTS_TORCH.search(file.read_bytes())]
    count = min(count, len(files))
    return [files[index * len(files) // count] for index in range(count)]


def scan(files: Sequence[Path]) -> int:
    return sum(len(scan_file(str(file))[0]) for file in files)


def parse(files: Sequence[Path]) -> int:
    gc.disable()
    for file in files:
        ast.parse(file.read_bytes())
    gc.enable()
    return 0


def timed(side: Callable[[Sequence[Path]], int], files: Sequence[Path]) -> float:
    began = time.process_time()
    side(files)
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    files = chosen(options.files)
    findings = scan(files)
    seconds: dict[str, list[float]] = {"scan": [], "parse": []}
    for _ in range(options.repeats):
        seconds["scan"].append(timed(scan, files))
        seconds["parse"].append(timed(parse, files))
    texts = [file.read_bytes() for file in files]
    result = {
        "files": len(files),
        "lines": sum(text.count(b"\n") for text in texts),
        "of": {
            package: sum(file.is_relative_to(folder(package)) for file in files)
            for package in PACKAGES
        },
        "parsed_by_scan": sum(map(may_concern, texts)),
        "findings": findings,
        "processor_seconds": {k: round(statistics.median(v), 2) for k, v in seconds.items()},
        "fastest": {k: round(min(v), 2) for k, v in seconds.items()},
        "repeats": options.repeats,
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("tpukit", *PACKAGES)},
        },
    }
    print(json.dumps(result, indent=2))
    if options.out:
        write_result(options.out, result)


if __name__ == "__main__":
    main()
