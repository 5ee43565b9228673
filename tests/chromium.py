"""A headless Chromium that tests drive over its DevTools protocol."""

import asyncio
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp  # PyTorch Geometric needs it, so it is there

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
WITHOUT = ("gpu", "quic", "background-networking", "component-update", "sync", "dev-shm-usage")
FLAGS = (
    *("--headless", "--no-sandbox", "--no-first-run", "--hide-scrollbars"),
    *(f"--disable-{what}" for what in WITHOUT),
    "--remote-debugging-port=0",
)


def executable() -> str | None:
    """Where Chromium is, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One page: what it printed to the console, what was requested, and its keys and mouse."""

    def __init__(self, socket: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._socket, self._loop, self._number = socket, loop, 0
        self.errors: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """The result of one command of the protocol; events that come before are kept."""
        return self._loop.run_until_complete(asyncio.wait_for(self._call(method, params), 200))

    async def _call(self, method: str, params: dict[str, Any]) -> Any:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json()
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]
            self._event(message["method"], message["params"])

    def _event(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:2000])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.errors.append(json.dumps(params["args"])[:2000])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; promises are waited for."""
        asked = {"expression": script, "returnByValue": True, "awaitPromise": True}
        answer = self.call("Runtime.evaluate", **asked)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, script: str) -> Any:
        """Wait until an expression is true; its value."""
        for _ in range(600):  # not a deadline: on a busy machine this process may be what waits
            if value := self.run(script):
                return value
            time.sleep(0.05)
        raise AssertionError(f"never true: {script}; {self.errors}")

    def open(self, path: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Show a file, of a window of this size, and wait until it has drawn itself."""
        self.resize(width, height)
        self.theme(dark)
        self.errors, self.requests = [], []
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.until("document.documentElement?.dataset.ready")

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def theme(self, dark: bool) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def place(self, selector: str) -> tuple[float, float, float, float]:
        """Left, top, width and height of an element that is moved into sight."""
        script = f"""(() => {{
            const node = document.querySelector({json.dumps(selector)});
            node.scrollIntoView({{block: "center", behavior: "instant"}});
            const box = node.getBoundingClientRect();
            return [box.left, box.top, box.width, box.height];
        }})()"""
        left, top, width, height = self.run(script)
        return left, top, width, height

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, selector: str, dx: float | None = None, dy: float | None = None) -> None:
        """Press and release in the middle of an element, or so far from its corner."""
        left, top, width, height = self.place(selector)
        x, y = left + (width / 2 if dx is None else dx), top + (height / 2 if dy is None else dy)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)

    def key(self, key: str) -> None:
        """One key, by the name that JavaScript has for it."""
        text = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)


@contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    """A page of a new Chromium whose profile is the new folder ``profile``."""
    command = [executable() or NAMES[0], *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    loop = asyncio.new_event_loop()
    session = None
    try:
        port_file, end = profile / "DevToolsActivePort", time.monotonic() + 60
        while not (port_file.is_file() and "\n" in port_file.read_text()):
            assert process.poll() is None and time.monotonic() < end, "Chromium does not start"
            time.sleep(0.05)
        port = int(port_file.read_text().split("\n")[0])
        session = loop.run_until_complete(_session())
        yield Page(loop.run_until_complete(_socket(session, port)), loop)
    finally:
        if session is not None:
            loop.run_until_complete(session.close())
        loop.close()
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession()


async def _socket(session: aiohttp.ClientSession, port: int) -> Any:
    async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
        pages = [p for p in await answer.json() if p["type"] == "page"]
    return await session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0)
