"""A real Chromium, driven over its DevTools protocol: what tests of pages share."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from rig import until

#: of Debian's package, and of others.
_NAMES = ("chromium", "chromium-browser", "google-chrome")
_ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
    "--remote-allow-origins=*",
)
_START_S = 60.0
_ANSWER_S = 30.0
_KEYS = {
    "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40,
    "Enter": 13, "Escape": 27, "Tab": 9, "Home": 36, "End": 35,
}  # fmt: skip


class Page:
    """One tab, with storage of its own."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        #: URLs of all requests, and what the page or its policy has complained of.
        self.requests: list[str] = []
        self.complaints: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call one method of the protocol."""
        return await self._browser.call(method, params, session=self._session)

    async def open(self, url: str) -> None:
        """Go to a URL."""
        await self.call("Page.navigate", url=url)

    async def js(self, expression: str) -> Any:
        """Evaluate in the page; a promise is waited for."""
        answer = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            raise AssertionError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    async def until(self, expression: str, timeout_s: float = 20.0) -> Any:
        """Poll until an expression is true in the page; its value."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if value := await self.js(expression):
                return value
            await asyncio.sleep(0.05)
        text = await self.js("document.body.innerText")
        raise AssertionError(
            f"not within {timeout_s:g} s: {expression}\n{self.complaints}\n{text[:3000]}"
        )

    async def until_text(self, text: str, selector: str = "body", timeout_s: float = 20.0) -> None:
        """Poll until an element shows a text."""
        element = f"document.querySelector({json.dumps(selector)})"
        await self.until(f"{element}?.innerText.includes({json.dumps(text)})", timeout_s)

    async def press(self, key: str) -> None:
        """Press one key, as a person does."""
        code = _KEYS[key]
        fields = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        if key == "Enter":
            fields["text"] = "\r"
        await self.call("Input.dispatchKeyEvent", type="keyDown", **fields)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **fields)

    async def type(self, text: str) -> None:
        """Put text into what has the focus."""
        await self.call("Input.insertText", text=text)

    async def colours(self, scheme: str) -> None:
        """Make the system light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def size(self, width: int, height: int) -> None:
        """Set the size of the window."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip

    async def screenshot(self, path: Path) -> None:
        """Take a picture of the window."""
        answer = await self.call("Page.captureScreenshot", format="png")
        await asyncio.to_thread(path.write_bytes, base64.b64decode(answer["data"]))

    def take(self, method: str, params: dict[str, Any]) -> None:
        """Hear of one event."""
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in {"error", "warning"}:
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")


class Browser:
    """The browser's process, through its websocket."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}

    async def listen(self) -> None:
        """Hand out answers and events, until cancelled."""
        async for message in self._socket:
            told = json.loads(message.data)
            if (waiting := self._answers.pop(told.get("id", 0), None)) is not None:
                if not waiting.done():
                    waiting.set_result(told)
            elif (page := self._pages.get(told.get("sessionId", ""))) is not None:
                page.take(told["method"], told["params"])

    async def call(
        self, method: str, params: dict[str, Any], *, session: str | None = None
    ) -> dict[str, Any]:
        """Call one method; raises AssertionError with what the browser says against it."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params}
        await self._socket.send_json(message | ({"sessionId": session} if session else {}))
        async with asyncio.timeout(_ANSWER_S):
            told = await answer
        if "error" in told:
            raise AssertionError(f"{method}: {told['error']}")
        result: dict[str, Any] = told["result"]
        return result

    @asynccontextmanager
    async def page(self) -> AsyncIterator[Page]:
        """Open a tab whose storage nobody shares."""
        context = (await self.call("Target.createBrowserContext", {}))["browserContextId"]
        target = await self.call(
            "Target.createTarget", {"url": "about:blank", "browserContextId": context}
        )
        attached = await self.call(
            "Target.attachToTarget", {"targetId": target["targetId"], "flatten": True}
        )
        page = self._pages[attached["sessionId"]] = Page(self, attached["sessionId"])
        for domain in ("Page", "Runtime", "Network", "Log"):
            await page.call(f"{domain}.enable")
        await page.size(1280, 800)
        try:
            yield page
        finally:
            await self.call("Target.disposeBrowserContext", {"browserContextId": context})


@contextmanager
def chromium() -> Iterator[str]:
    """Run a browser that nobody sees; its websocket's URL."""
    program = next(filter(None, map(shutil.which, _NAMES)), None)
    if program is None:
        raise AssertionError("no Chromium on this machine: install what configs/debian.txt names")
    home = Path(tempfile.mkdtemp(prefix="evald-browser-"))
    process = subprocess.Popen(
        [program, *_ARGUMENTS, f"--user-data-dir={home}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        port, path = until(
            lambda: _lines(home / "DevToolsActivePort"), "the browser listens", _START_S
        )
        yield f"ws://127.0.0.1:{port}{path}"
    finally:
        process.terminate()
        process.wait(30)
        # (its children write into it until they, too, have ended)
        until(lambda: _removed(home), "its directory is gone")


@asynccontextmanager
async def connect(url: str) -> AsyncIterator[Browser]:
    """Take part in a browser that runs."""
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(url, max_msg_size=0) as socket,
    ):
        found = Browser(socket)
        listening = asyncio.create_task(found.listen(), name="browser")
        try:
            yield found
        finally:
            listening.cancel()


def _lines(file: Path) -> list[str]:
    lines = file.read_text().splitlines() if file.exists() else []
    return lines if len(lines) == 2 else []


def _removed(directory: Path) -> bool:
    shutil.rmtree(directory, ignore_errors=True)
    return not directory.exists()
