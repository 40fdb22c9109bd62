"""A client that reads a stream over several connections if needed."""

from __future__ import annotations

import http.client
import json
import urllib.request
from typing import Any

from helpers.processes import PATIENCE_SECONDS


class Client:
    """Requests one stream and resumes it after a break. ``events``: the data of each event, in order."""

    def __init__(self, path: str, body: dict[str, Any], name: str) -> None:
        self._path, self._body = path, {"stream": True, **body}
        self._headers = {"content-type": "application/json", "x-request-id": name}
        self._next_id = ""
        self.events: list[Any] = []
        self.last_id = ""
        self.ended = False

    def read(self, url: str) -> None:
        """Read to the end, or until the connection breaks."""
        headers = {**self._headers, **({"last-event-id": self.last_id} if self.last_id else {})}
        data = json.dumps(self._body).encode()
        asked = urllib.request.Request(url + self._path, data, headers)
        try:
            with urllib.request.urlopen(asked, timeout=PATIENCE_SECONDS) as response:
                assert response.headers["x-request-id"] == self._headers["x-request-id"]
                for line in response:
                    self._take(line.decode().rstrip("\n"))
        except (OSError, http.client.HTTPException):
            return

    def _take(self, line: str) -> None:
        if line.startswith("id: "):
            self._next_id = line[4:]
        elif line == "data: [DONE]":
            self.ended = True
        elif line.startswith("data: "):
            event = json.loads(line[6:])
            assert "error" not in event, event
            self.events.append(event)
            self.last_id = self._next_id
            self.ended = self.ended or event.get("type") in ("response.completed", "response.incomplete")
