"""Headless Chromium, controlled over its DevTools protocol: opens a page, evaluates JavaScript, takes pictures."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from helpers.processes import PATIENCE_SECONDS

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update",
    "--disable-background-networking", "--disable-sync", "--disable-dev-shm-usage", "--remote-debugging-port=0",
)  # fmt: skip


class Tab:
    """One page of the browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._count = socket, 0

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Run one command of the protocol; return its result. Raise RuntimeError if it fails."""
        self._count += 1
        await self._socket.send_json({"id": self._count, "method": method, "params": params})
        async for message in self._socket:
            answer = json.loads(message.data)
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
        raise RuntimeError("Chromium is gone")

    async def open(self, url: str, width: int, height: int, dark: bool = False) -> None:
        """Load ``url`` in a window of this size in CSS pixels, as a phone does if it is narrow."""
        phone = width < 600
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call("Page.navigate", url=url)

    async def ask(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    async def wait_for(self, expression: str, seconds: float = PATIENCE_SECONDS) -> None:
        """Wait until a JavaScript expression is true; an exception counts as false. A TimeoutError names it."""
        guarded = f"(() => {{ try {{ return {expression} }} catch {{ return false }} }})()"
        for _ in range(int(seconds / 0.1)):
            if await self.ask(guarded):
                return
            await asyncio.sleep(0.1)
        raise TimeoutError(
            f"{expression} did not become true; the page says: {await self.ask('document.body.innerText')}"
        )

    async def picture(self, path: Path) -> None:
        """Save the whole page as PNG."""
        found = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))


@contextlib.asynccontextmanager
async def browser() -> AsyncIterator[Tab]:
    """Start a Chromium with an empty profile within the context."""
    with tempfile.TemporaryDirectory() as profile:
        process = subprocess.Popen(
            [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            port = await asyncio.get_running_loop().run_in_executor(None, _port, process)
            async with aiohttp.ClientSession() as client:
                async with client.get(f"http://127.0.0.1:{port}/json") as response:
                    pages = [page for page in await response.json() if page["type"] == "page"]
                async with client.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    yield Tab(socket)
        finally:
            process.kill()
            process.communicate()


def _port(process: subprocess.Popen[str]) -> int:
    said = []
    for line in process.stderr or ():
        said.append(line)
        if found := re.search(r"DevTools listening on ws://[^:]+:(\d+)/", line):
            return int(found[1])
    raise RuntimeError(f"Chromium does not start: {''.join(said)}")
