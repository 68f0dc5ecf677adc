"""report.html of a run folder: when it is written, and that it never ends what it reports on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tpukit.io.files import write_file
from tpukit.train.report.embedded_pictures import EmbeddedPictures
from tpukit.train.report.history import History
from tpukit.train.report.kept_tests import keep_test
from tpukit.train.report.page import render_page
from tpukit.train.report.series import MetricSeries
from tpukit.train.storage.run_folder import RunFolder, TrainedRun


class RunReport:
    """Writes report.html; each renewal reads only what the logs gained since the last one."""

    def __init__(self, folder: RunFolder, warn: Callable[[str], None]) -> None:
        self.folder = folder
        self._warn = warn
        self._metrics = MetricSeries(folder.metrics)
        self._history = History(folder.log)
        self._pictures = EmbeddedPictures()
        self._failed = False

    def renew(self) -> bool:
        """Writes the page anew; whether it could. A page must not end a run: an error is one
        warning."""
        try:
            self._metrics.read()
            self._history.read()
            page = render_page(self.folder, self._metrics, self._history, self._pictures)
            write_file(self.folder.report, page.encode(errors="replace"))
        except Exception as error:
            if not self._failed:
                self._warn(f"Warning: {self.folder.report} could not be written: {error}")
            self._failed = True
            return False
        return True


def report_test(run: TrainedRun, fields: Mapping[str, Any], log: Callable[[str], None]) -> None:
    """Keeps the JSON fields of a test in the run's folder and renews its page."""
    folder = RunFolder(run.path)
    try:
        keep_test(folder, fields, run.checkpoint.state.step)
    except Exception as error:  # a read-only run, or values that JSON cannot hold
        log(f"{folder.report} does not show this test: {error}.")
        return
    if RunReport(folder, log).renew():
        log(f"Report: {folder.report}")
