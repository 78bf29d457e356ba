"""A real headless Chromium, driven through its DevTools protocol over a pair of pipes: needs no package."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PATIENCE = 120
"""Timeout in seconds for an answer; after that the browser counts as dead."""


class Page:
    """One tab. ``events``: everything the browser reported about it."""

    def __init__(self, process: subprocess.Popen[bytes], commands: int, answers: int) -> None:
        self.process = process
        self.commands = commands
        self.answers = answers
        self.buffer = b""
        self.count = 0
        self.session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            if not select.select([self.answers], [], [], PATIENCE)[0]:
                raise RuntimeError(f"the browser has not answered for {PATIENCE} seconds")
            piece = os.read(self.answers, 1 << 16)
            if not piece:
                raise RuntimeError(f"the browser has ended with code {self.process.wait()}")
            self.buffer += piece
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def open(
        self, path: Path, *, width: int = 1280, height: int = 900, scheme: str = "light", script: bool = True
    ) -> None:
        """Load a file in a window of this size and wait until it is loaded."""
        self.call("Emulation.setScriptExecutionDisabled", value=not script)
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def texts(self, selector: str) -> list[str]:
        """The text of all matching elements, without surrounding whitespace."""
        return self.evaluate(
            f"[...document.querySelectorAll({json.dumps(selector)})]"
            ".map(e => e.textContent.replace(/\\s+/g, ' ').trim())"
        )

    def key(self, key: str) -> None:
        code = {"Enter": 13, "Tab": 9, "ArrowLeft": 37, "ArrowRight": 39}[key]
        typed = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **typed)
            typed = {}

    def frame(self) -> None:
        """Wait until the browser has rendered, and reported events of, everything done so far."""
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def middle(self, selector: str) -> dict[str, float]:
        """Scroll an element into view and return its centre."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"{element}.scrollIntoView({{block: 'center'}})")
        self.frame()
        return self.evaluate(
            f"(b => ({{x: b.x + b.width / 2, y: b.y + b.height / 2}}))({element}.getBoundingClientRect())"
        )

    def hover(self, selector: str) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **self.middle(selector))

    def tap(self, selector: str) -> None:
        self.call("Emulation.setTouchEmulationEnabled", enabled=True)
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[self.middle(selector)])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        self.frame()
        self.call("Emulation.setTouchEmulationEnabled", enabled=False)

    def screenshot(self, path: Path, selector: str = "html", scale: float = 1, margin: float = 0) -> None:
        """A screenshot of an element with a margin in pixels, even if it extends beyond the window."""
        x, y, width, height = self.evaluate(
            f"(b => [b.x + scrollX, b.y + scrollY, b.width, b.height])"
            f"(document.querySelector({json.dumps(selector)}).getBoundingClientRect())"
        )
        clip = {"x": x - margin, "y": y - margin, "width": width + 2 * margin, "height": height + 2 * margin}
        clip["scale"] = scale
        shot = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def complaints(self) -> list[str]:
        """Errors, warnings and other console messages."""
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [json.dumps(event["params"]) for event in self.events if event.get("method") in kinds]

    def requests(self) -> list[str]:
        """URLs of all requests, including the page itself."""
        return [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]


@contextmanager
def browser() -> Iterator[Page]:
    """A browser with one page, closed at the end of the block. A missing browser is an error and no reason to skip."""
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    if program is None:
        raise RuntimeError(f"There is no browser on PATH ({', '.join(NAMES)}): install Chromium.")
    commands, answers = os.pipe(), os.pipe()

    def connect() -> None:
        # Chromium reads commands from fd 3 and writes answers to fd 4; copy first, since 3 or 4 may be in use.
        source, sink = os.dup(commands[0]), os.dup(answers[1])
        os.dup2(source, 3)
        os.dup2(sink, 4)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [
                program,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--hide-scrollbars",
                "--no-first-run",
                f"--user-data-dir={profile}",
                "--remote-debugging-pipe",
            ],
            preexec_fn=connect,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands[0])
        os.close(answers[1])
        try:
            yield Page(process, commands[1], answers[0])
        finally:
            os.close(commands[1])
            process.terminate()
            process.wait()
            os.close(answers[0])
