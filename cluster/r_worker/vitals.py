"""The state of an R-worker's process, for its health port."""

from __future__ import annotations

import time

from fastdecode.core.types import WorkerReport

PREFIX = "fastdecode_r_worker:"

STUCK_SECONDS = 90.0
"""A main loop that takes longer than this hangs.

An iteration takes at most a second, or 30 s if it waits for a peer that reads nothing.
"""


class Vitals:
    """The state of an R-worker's process. Only its main loop writes it, and any thread may read it.

    Each write is one plain value, so that it costs the main loop less than a microsecond and takes no lock.
    """

    def __init__(self) -> None:
        self.is_ready = False
        self.is_leaving = False
        self.is_serving = False
        self.trouble = ""
        self.turned = time.monotonic()
        self.num_blocks, self.blocks_free, self.num_sequences = 0, 0, 0
        self.parked_chains = self.parked_bytes = 0
        self.num_sessions, self.num_steps, self.kv_bytes_read, self.busy_seconds = 0, 0, 0, 0.0

    def turn(self) -> None:
        """Record that the main loop has begun another iteration."""
        self.turned = time.monotonic()

    def opened(self, num_blocks: int) -> None:
        """Record the start of a session with a cache of ``num_blocks``."""
        self.num_blocks = self.blocks_free = num_blocks
        self.num_sessions += 1
        self.is_serving = True

    def stepped(self, report: WorkerReport) -> None:
        self.num_steps += 1
        self.blocks_free = report.blocks_free
        self.kv_bytes_read += report.bytes_read
        self.busy_seconds += float((report.busy_end - report.busy_start).sum())

    def closed(self) -> None:
        """Record the end of the session, whose memory is free."""
        self.is_serving = False
        self.num_blocks = self.blocks_free = self.num_sequences = 0

    def complaint(self) -> str:
        """Return why this R-worker should not or does not get work; "" if all is well."""
        if self.is_ready and self.is_leaving:
            return "the R-worker is leaving"
        return self.illness() or ("" if self.is_serving else self.trouble)

    def illness(self) -> str:
        """Return why the process should be restarted, or is not ready yet; "" if all is well."""
        if not self.is_ready:
            return "the R-worker is starting"
        silent = time.monotonic() - self.turned
        return f"the R-worker's main loop has been stuck for {silent:.0f} s" if silent > STUCK_SECONDS else ""

    def metrics(self) -> str:
        """Return all metrics in Prometheus' format."""
        used = self.num_blocks - self.blocks_free
        rows: tuple[tuple[str, str, str, float], ...] = (
            ("serving", "gauge", "1 while an S-worker is served", int(self.is_serving)),
            ("healthy", "gauge", "1 where /health says 200", int(not self.complaint())),
            ("kv_blocks", "gauge", "KV blocks of the session, 0 without one", self.num_blocks),
            ("kv_blocks_used", "gauge", "KV blocks that sequences and prefixes hold after the last step", used),
            ("kv_blocks_free", "gauge", "KV blocks that are free after the last step", self.blocks_free),
            ("sequences", "gauge", "Sequences with rows in the last step", self.num_sequences),
            ("parked_chains", "gauge", "Parked prefixes on its disk", self.parked_chains),
            ("parked_bytes", "gauge", "Bytes of these", self.parked_bytes),
            ("sessions_total", "counter", "S-workers that were served", self.num_sessions),
            ("steps_total", "counter", "Steps", self.num_steps),
            ("busy_seconds_total", "counter", "Seconds in which it attended", self.busy_seconds),
            ("kv_bytes_read_total", "counter", "Bytes of KV cache that it read", self.kv_bytes_read),
        )
        return "".join(
            f"# HELP {PREFIX}{name} {text}\n# TYPE {PREFIX}{name} {kind}\n{PREFIX}{name} {value}\n"
            for name, kind, text, value in rows
        )
