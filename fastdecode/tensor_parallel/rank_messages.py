"""The messages that ranks exchange between layers, as bytes: a header in JSON, then arrays."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from fastdecode.core.step import CHUNK, READ, MiniBatch, ScheduledStep
from fastdecode.core.types import StepReport, WorkerReport
from fastdecode.core.weighing import WeighedPart, WeighedRow

DTYPES = {
    "chunk": CHUNK,
    "read": READ,
    "i8": np.dtype("<i8"),
    "f8": np.dtype("<f8"),
    "f4": np.dtype("<f4"),
    "u1": np.dtype("u1"),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

HEADER_LENGTH_BYTES = 8


@dataclass(frozen=True)
class Message:
    """A message between ranks. ``kind``: what to do. ``told``: arguments, sent as JSON. ``arrays``: see ``DTYPES``."""

    kind: str
    told: dict[str, Any] = field(default_factory=dict)
    arrays: Sequence[np.ndarray] = ()

    def encode(self) -> bytes:
        arrays = [(NAMES[array.dtype], array.shape) for array in self.arrays]
        header = json.dumps({"kind": self.kind, "told": self.told, "arrays": arrays}).encode()
        parts = [len(header).to_bytes(HEADER_LENGTH_BYTES, "little"), header]
        return b"".join([*parts, *(np.ascontiguousarray(array).tobytes() for array in self.arrays)])

    @staticmethod
    def decode(data: bytes) -> Message:
        """Return the message that ``encode`` turned into ``data``."""
        start = HEADER_LENGTH_BYTES + int.from_bytes(data[:HEADER_LENGTH_BYTES], "little")
        header = json.loads(data[HEADER_LENGTH_BYTES:start])
        arrays = []
        for name, shape in header["arrays"]:
            count = int(np.prod(shape, dtype=int))
            arrays.append(np.frombuffer(data, DTYPES[name], count, start).reshape(shape).copy())
            start += count * DTYPES[name].itemsize
        return Message(header["kind"], header["told"], arrays)


def step_message(
    step: ScheduledStep, computes: bool, overlap: bool = True, by: str = "model", kind: str = "step"
) -> Message:
    """Return the message that sends ``step`` to every rank.

    ``computes``: the ranks compute the step's layers; False: they only send the R-workers' controls. ``by``: the source
    of q, k, v: the "model", its "first layers" (``EarlyExitDrafter``), or "random" numbers.
    """
    arrays = [np.array(list(controls), np.int64).reshape(-1, 4) for controls in step.controls]
    for mini_batch in step.mini_batches:
        arrays += [mini_batch.chunks, mini_batch.token_ids, mini_batch.reads]
    arrays += step.taps
    told = {"num_workers": len(step.controls), "computes": computes, "overlap": overlap, "by": by}
    told["num_taps"] = len(step.taps)
    return Message(kind, told, arrays)


def read_step(message: Message) -> ScheduledStep:
    num_workers = message.told["num_workers"]
    controls = tuple(tuple(map(tuple, array.tolist())) for array in message.arrays[:num_workers])
    num_mini_batches = (len(message.arrays) - num_workers - message.told["num_taps"]) // 3
    rest = iter(message.arrays[num_workers:])
    mini_batches = tuple(MiniBatch(next(rest), next(rest), next(rest)) for _ in range(num_mini_batches))
    return ScheduledStep(mini_batches, controls, taps=tuple(rest))


def weigh_message(rows: Sequence[WeighedRow]) -> Message:
    """Return the message that asks each rank for the attention weights of ``rows`` in the rank's own heads."""
    return Message("weigh", {"rows": [asdict(row) for row in rows]})


def read_rows(message: Message) -> list[WeighedRow]:
    rows = message.told["rows"]
    return [
        WeighedRow(
            **{**row, "layers": tuple(row["layers"]), "parts": tuple(WeighedPart(**each) for each in row["parts"])}
        )
        for row in rows
    ]


def mean_weights(ranks: Sequence[Message]) -> list[np.ndarray | None]:
    """Return each row's block weights, averaged over all ranks; None for a row that one rank could not weigh."""
    several = zip(*(message.arrays for message in ranks), strict=True)
    return [np.mean(parts, axis=0).astype(np.float32) if all(map(len, parts)) else None for parts in several]


def report_message(report: StepReport, now: float) -> Message:
    """Return the message for ``report``, a rank's R-workers' report on a step. ``now``: the rank's clock, seconds."""
    told = {
        "now": now,
        "lost": report.lost,
        "leaving": report.leaving,
        "audit": (report.faulty, report.is_doubtful, report.num_audited),
        "workers": [
            (each.transfer_seconds, each.bytes_read, each.blocks_free, each.leaving) for each in report.workers
        ],
    }
    return Message("report", told, [part for each in report.workers for part in (each.busy_start, each.busy_end)])


def read_report(message: Message, seconds_ahead: float) -> StepReport:
    """Return the report in ``message``. ``seconds_ahead``: this rank's clock minus the sender's, in seconds."""
    times = iter(message.arrays)
    workers = []
    for (transfer, num_bytes, free, leaving), start, end in zip(message.told["workers"], times, times, strict=True):
        start, end = (np.where(each > 0, each + seconds_ahead, 0) for each in (start, end))
        workers.append(WorkerReport(start, end, transfer, num_bytes, free, leaving))
    faulty, is_doubtful, num_audited = message.told["audit"]
    lost, leaving = tuple(message.told["lost"]), tuple(message.told["leaving"])
    return StepReport(tuple(workers), lost, leaving, tuple(faulty), is_doubtful, num_audited)


def combined(reports: Sequence[StepReport]) -> StepReport:
    """Return the ranks' reports as one: the slowest rank's times, the sum of bytes, the fewest free blocks."""
    workers = []
    for parts in zip(*(report.workers for report in reports), strict=True):
        slowest = max(parts, key=lambda part: float((part.busy_end - part.busy_start).sum()))
        workers.append(
            WorkerReport(
                slowest.busy_start,
                slowest.busy_end,
                max(part.transfer_seconds for part in parts),
                sum(part.bytes_read for part in parts),
                min(part.blocks_free for part in parts),
                any(part.leaving for part in parts),
            )
        )
    lost = sorted({worker for report in reports for worker in report.lost})
    leaving = sorted({worker for report in reports for worker in report.leaving} - set(lost))
    faulty = sorted({worker for report in reports for worker in report.faulty})
    is_doubtful, num_audited = any(each.is_doubtful for each in reports), sum(each.num_audited for each in reports)
    return StepReport(tuple(workers), tuple(lost), tuple(leaving), tuple(faulty), is_doubtful, num_audited)
