"""A headless Chromium driven over the WebDriver protocol, in the standard library alone."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
INSTALLED = CHROMIUM is not None and DRIVER is not None

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # Its memory files in /dev/shm would look like leaks of the tests that run beside it.
    "--disable-dev-shm-usage",
    "--window-size=1280,1000",
)


class Browser:
    """One browser with one page. Use as a context manager; nothing is left running afterwards."""

    def __init__(self, *flags: str) -> None:
        assert CHROMIUM is not None and DRIVER is not None
        self._profile = tempfile.mkdtemp(prefix="phalanx-browser-")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._base = f"http://127.0.0.1:{port}"
        self._driver = subprocess.Popen(
            [DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            self._session = self._start([*_FLAGS, f"--user-data-dir={self._profile}", *flags])
        except BaseException:
            self._end()
            raise

    def _start(self, flags: list[str]) -> str:
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": {"binary": CHROMIUM, "args": flags},
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        deadline = time.monotonic() + 20
        while True:
            try:
                return str(self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"])
            except urllib.error.URLError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{method} {path}: {error.read().decode()}") from None

    def _on_page(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return self._call(method, f"/session/{self._session}{path}", body)

    def open(self, page: Path) -> None:
        self._on_page("POST", "/url", {"url": page.resolve().as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value of a JavaScript function body on the page."""
        return self._on_page("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def press(self, *keys: str) -> None:
        """Press keys on whatever has the focus."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._on_page("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def click(self, x: float, y: float) -> None:
        """Press the mouse at a place of the window."""
        move = {"type": "pointerMove", "x": round(x), "y": round(y), "duration": 0}
        actions = [move, {"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}]
        pointer = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": actions}
        self._on_page("POST", "/actions", {"actions": [pointer]})

    def resize(self, width: int, height: int) -> None:
        self._on_page("POST", "/window/rect", {"width": width, "height": height})

    def console(self) -> list[dict[str, Any]]:
        """What the page wrote to its console, errors of the browser itself included."""
        return list(self._on_page("POST", "/se/log", {"type": "browser"}))

    def screenshot(self, path: Path) -> Path:
        path.write_bytes(base64.b64decode(self._on_page("GET", "/screenshot")))
        return path

    def _end(self) -> None:
        self._driver.terminate()
        self._driver.wait(10)
        shutil.rmtree(self._profile, ignore_errors=True)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self._on_page("DELETE", "")
        finally:
            self._end()
