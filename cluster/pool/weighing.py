"""Asks a pool's R-workers for a query's attention weights per block of tokens ("weighing"), and joins the answers.

A sequence on one R-worker takes one question. A sequence split into ranges on several R-workers takes two. The first
asks for max and sum of the scores in each range; together they give the softmax's denominator over the sequence. The
second sends it, and asks for the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fastdecode.cluster.pool.calls import Calls
from fastdecode.cluster.wire.frames import Kind
from fastdecode.cluster.wire.weighing import answer_shape, checked_answer, encode_weighing
from fastdecode.core.errors import interrupts_deferred
from fastdecode.core.weighing import Queries, WeighedRow, Weighing
from fastdecode.kinds.attending import Attending
from fastdecode.kinds.layout import KVLayout


@dataclass
class _Open:
    """A row that is being weighed: the questions about its ranges."""

    row: WeighedRow
    asked: list[Weighing]

    def join(self, answers: Sequence[np.ndarray | None]) -> np.ndarray | None:
        """Return the weights of the row's blocks, float32 [num_blocks]; None if an answer is missing."""
        weights = np.zeros(self.row.num_blocks, np.float32)
        for each, found in zip(self.asked, answers, strict=True):
            if found is None:
                return None
            weights[each.first_block : each.first_block + each.num_blocks] += found
        return weights


def weigh_rows(
    layout: KVLayout,
    rows: Sequence[WeighedRow],
    queries: Queries,
    ask: Callable[[Sequence[Weighing]], list[np.ndarray | None]],
) -> list[np.ndarray | None]:
    """Return the weights of each row's blocks, float32 [num_blocks]; None if an R-worker that holds some is lost.

    ``ask``: sends questions to the R-workers and returns the answers in order, None for a lost R-worker.
    """
    opened = [_opened(row, queries) for row in rows]
    ranged = [each for each in opened if len(each.asked) > 1]
    answers = ask([replace(part, finds_norms=True) for each in ranged for part in each.asked])
    for each, found in zip(ranged, _dealt(answers, ranged), strict=True):
        if all(norms is not None for norms in found):
            norms = joined_norms([norms for norms in found if norms is not None], sinks_of(layout, each.row.layers))
            each.asked = [replace(part, norms=norms) for part in each.asked]
    answers = ask([part for each in opened for part in each.asked])
    return [each.join(found) for each, found in zip(opened, _dealt(answers, opened), strict=True)]


def weigh_by(calls: Calls, layout: KVLayout, asked: Weighing) -> Callable[[], np.ndarray]:
    """Send the question ``asked`` to an R-worker in another process; return a function that waits for the answer."""

    @interrupts_deferred()
    def answer() -> np.ndarray:
        calls.answer(Kind.WEIGHED)
        found = np.empty(answer_shape(layout, asked), np.float32)
        with calls.losses as link:
            link.read_into(found)
            return checked_answer(found, asked)

    calls.send(Kind.WEIGH, *encode_weighing(asked))
    return answer


def sinks_of(layout: KVLayout, layers: Sequence[int]) -> np.ndarray:
    """Return the attention sink of each head of ``layers`` that attend, float32 [heads]; -inf for heads without one."""
    chosen = (layout.layers[layer] for layer in layers)
    sinks = [each.sinks or (-np.inf,) * each.num_heads for each in chosen if isinstance(each, Attending)]
    return np.array([sink for each in sinks for sink in each], np.float32)


def joined_norms(parts: Sequence[np.ndarray], sinks: np.ndarray) -> np.ndarray:
    """Return each head's (max, sum) of scores over all ``parts`` and ``sinks`` [heads]: float32 [1, heads, 2]."""
    several = np.concatenate([*parts, np.stack([sinks, np.isfinite(sinks)], -1)[None]]).astype(np.float64)
    most = several[..., 0].max(0)
    with np.errstate(invalid="ignore"):  # if the model overflows, a max is infinite or NaN
        scale = np.exp(several[..., 0] - np.where(np.isfinite(most), most, 0))
        return np.stack([most, (several[..., 1] * scale).sum(0)], -1)[None].astype(np.float32)


def in_turns(asked: Sequence[Weighing]) -> Iterator[list[int]]:
    """Yield lists of indices into ``asked``: questions to send at the same time, at most one to each R-worker."""
    queues: dict[int, list[int]] = {}
    for place, each in enumerate(asked):
        queues.setdefault(each.part.worker, []).append(place)
    for turn in range(max(map(len, queues.values()), default=0)):
        yield [queue[turn] for queue in queues.values() if turn < len(queue)]


def _opened(row: WeighedRow, queries: Queries) -> _Open:
    found = tuple(queries.of(row.mini_batch, row.row, layer) for layer in row.layers)
    return _Open(row, [Weighing(part, row.block, row.layers, found) for part in row.parts])


def _dealt(answers: Sequence[np.ndarray | None], opened: Sequence[_Open]) -> Iterator[list[np.ndarray | None]]:
    """Yield, for each row in ``opened``, its answers out of ``answers``."""
    rest = iter(answers)
    for each in opened:
        yield [next(rest) for _ in each.asked]
