"""A stream that survives a server's restart: python examples/reconnect.py http://127.0.0.1:8000/v1/completions

The server runs with ``--journal FOLDER``. Each event has an id. A client that reconnects with the last id that it has
seen gets the rest.
"""

from __future__ import annotations

import http.client
import json
import signal
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from typing import Any


# %% The client. It sends the same request id each time, so that the server knows that the request is not new.
def stream(url: str, body: bytes) -> Iterator[dict[str, Any]]:
    """Yield each event of the answer once. Reconnect as often as the connection breaks."""
    headers, event_id = {"content-type": "application/json", "x-request-id": uuid.uuid4().hex}, ""
    while True:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as lines:
                for name, _, value in (line.decode().partition(": ") for line in lines if line.endswith(b"\n")):
                    event_id = value.strip() if name == "id" else event_id
                    if value == "[DONE]\n":
                        return
                    if name == "data":
                        headers["last-event-id"] = event_id
                        yield json.loads(value)
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError) and error.code < 500:
                raise
        time.sleep(0.5)


# %% Kill the server while this runs, and start it again: the stream continues.
if __name__ == "__main__":
    signal.alarm(600)
    asked = {"prompt": "def read_lines(self, path):\n", "max_tokens": 200, "temperature": 0, "stream": True}
    for event in stream(sys.argv[1], json.dumps(asked).encode()):
        print(event["choices"][0]["text"] if event["choices"] else "", end="", flush=True)
    print()
