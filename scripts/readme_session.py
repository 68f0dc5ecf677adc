"""Runs the session that README.md and README.zh.md show, and writes what it printed into both.

    python scripts/readme_session.py [--picture] [--keep-probe]

It takes minutes of two cores; the probe needs the extra [plan], and --keep-probe leaves what README
shows of it. --picture also takes docs/report.png of the run's report.html, with Chromium.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", ROOT / "README.zh.md")
PICTURE = ROOT / "docs" / "report.png"
BROWSERS = ("chromium", "chromium-headless-shell", "google-chrome")
BLOCK = re.compile(r"^```\n(\$ tpukit .*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Step:
    """A command, and which lines of its output are shown."""

    command: str
    first: int = 100
    last: int = 0
    begin: str = ""
    """What the first line begins with: progress before it is left out."""


SESSION = (
    Step("tpukit doctor", 1, 2),
    Step("tpukit probe-batch --task images --set model=vit_base_patch16_224 --target v5e-1"
         " --start 32", begin="images on"),
    Step("tpukit data images --out shapes", begin="3,200"),
    Step("tpukit train --preset quick --data-path shapes --max-time 60s", 4, 4),
    Step("tpukit test --run results/images"),
)  # fmt: skip


def run(step: Step, folder: Path) -> list[str]:
    """The lines that a command prints to both streams, in the order they come."""
    words = [sys.executable, "-m", *shlex.split(step.command)]
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    # No progress bars, no colour: what a pipe gets.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    env["TPUKIT_CACHE_DIR"] = str(folder / "cache")
    done = subprocess.run(words, cwd=folder, env=env, check=True, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    text = done.stdout.replace(f"{ROOT}/", "").replace(f"{sysconfig.get_path('purelib')}/", "")
    return text.splitlines()


def shown(step: Step, lines: list[str]) -> list[str]:
    begin = next(i for i, line in enumerate(lines) if line.startswith(step.begin))
    kept = [line for line in lines[begin:] if line.strip()]
    if len(kept) > step.first + step.last:
        kept = [*kept[: step.first], "...", *kept[len(kept) - step.last :]]
    return [f"$ {step.command}", *kept]


def shown_before(step: Step) -> list[str]:
    """What README shows of a step."""
    found = BLOCK.search(PAGES[0].read_text(encoding="utf-8"))
    lines = found.group(1).splitlines() if found else []
    start = lines.index(f"$ {step.command}")
    ends = (i for i in range(start + 1, len(lines)) if lines[i].startswith("$ "))
    return lines[start : next(ends, len(lines))]


def take_picture(report: Path) -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"--picture needs one of {', '.join(BROWSERS)}.")
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             "--window-size=1100,1180", f"--screenshot={PICTURE}", report.as_uri()]  # fmt: skip
    subprocess.run([browser, *words], check=True, capture_output=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--picture", action="store_true")
    parser.add_argument("--keep-probe", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        lines = []
        for step in SESSION:
            keep = options.keep_probe and "probe-batch" in step.command
            lines += shown_before(step) if keep else shown(step, run(step, folder))
        if options.picture:
            take_picture(folder / "results" / "images" / "report.html")
    text = "".join(f"{line}\n" for line in lines)
    for page in PAGES:
        written, found = BLOCK.subn(lambda _: f"```\n{text}```", page.read_text(encoding="utf-8"))
        assert found == 1, f"{page.name} has {found} blocks that begin with a command"
        page.write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main()
