"""A page in headless Chromium, driven through its debugging pipe."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), "")
ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
             "--no-first-run", "--remote-debugging-pipe", "about:blank"]  # fmt: skip


class Page:
    """One tab; `said` holds what its console and its log said."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._left = b""
        self._number = 0
        self._session: str | None = None
        self.said: list[str] = []
        self._loaded = False
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        attached = self._send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._send(f"{domain}.enable")

    def open(self, path: Path, width: int, *, dark: bool = False, height: int = 900) -> None:
        """Loads a file in a window of `width` pixels."""
        self._send("Emulation.setDeviceMetricsOverride", width=width, height=height,
                   deviceScaleFactor=1, mobile=False)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._send("Emulation.setEmulatedMedia", features=[scheme])
        self._send("Emulation.setScrollbarsHidden", hidden=True)
        self._loaded = False
        self._send("Page.navigate", url=path.resolve().as_uri())
        while not self._loaded:
            self._receive()
        # Charts are drawn again when their place is known.
        self.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression, or what its promise gives."""
        found = self._send("Runtime.evaluate", expression=expression, returnByValue=True,
                           awaitPromise=True)  # fmt: skip
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, key: str) -> None:
        """A key, in the element that has the focus."""
        text = {"text": key} if len(key) == 1 else {}
        self._send("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self._send("Input.dispatchKeyEvent", type="keyUp", key=key)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """The mouse, pressed at one place and released at another."""
        button = {"button": "left", "clickCount": 1}
        for kind, (x, y), more in (
            ("mouseMoved", start, {}), ("mousePressed", start, button),
            ("mouseMoved", end, {"button": "left"}), ("mouseReleased", end, button),
        ):  # fmt: skip
            self._send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def picture(self, path: Path) -> None:
        """Writes the whole page as a PNG picture."""
        found = self._send("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def _send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            pass
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            part = os.read(self._from, 2**20)
            assert part, "the browser has ended"
            self._left += part
        text, _, self._left = self._left.partition(b"\0")
        message = json.loads(text)
        method = message.get("method")
        self._loaded |= method == "Page.loadEventFired"
        if method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.said.append(json.dumps(message["params"]))
        return message


def _pipe() -> list[int]:
    """Descriptors to read from and to write to; none is 3 or 4, where Chromium expects its own."""
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return high


@contextmanager
def browser() -> Iterator[Page]:
    """A Chromium of its own; it ends with the block."""
    to_browser, from_browser = _pipe(), _pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        shell = f'exec 3<&{to_browser[0]} 4>&{from_browser[1]}; exec "$@"'
        process = subprocess.Popen(
            ["bash", "-c", shell, "bash", CHROMIUM, f"--user-data-dir={profile}", *ARGUMENTS],
            pass_fds=(to_browser[0], from_browser[1]), stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for descriptor in (to_browser[0], from_browser[1]):
            os.close(descriptor)
        try:
            yield Page(to_browser[1], from_browser[0])
        finally:
            process.terminate()
            process.wait()
            os.close(to_browser[1])
            os.close(from_browser[0])
