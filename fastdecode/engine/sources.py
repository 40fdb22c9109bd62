"""Attention sources: the blocks of context to which each generated token attended, for requests that ask for them.
Before a step, ``tapped`` chooses the rows whose tokens need sources, so that the S-worker keeps their queries in each
layer. Once the step's tokens are sampled, R-workers compute each row's share of attention for each block of its
context.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple, cast

import numpy as np

from fastdecode.api.request import InFlight
from fastdecode.api.sampling_params import SamplingParams
from fastdecode.core.errors import RequestError
from fastdecode.core.protocols import AttentionBackend
from fastdecode.core.step import MiniBatch, ScheduledStep
from fastdecode.core.weighing import Queries, WeighedPart, WeighedRow, strongest
from fastdecode.kinds.attending import Attending
from fastdecode.kinds.layout import KVLayout
from fastdecode.sworker.sampling import SampledToken
from fastdecode.sworker.sampling.sampler import num_accepted

Sampled = dict[int, list[SampledToken]]
"""The tokens that a step sampled, by sequence: one per completion, or one per draft token and one more."""


class _Row(NamedTuple):
    """A row from which a token was sampled. ``place``: the token's index among the sequence's tokens of this step."""

    sequence_id: int
    place: int
    row: WeighedRow


class AttentionSources:
    """Finds the attention sources of tokens, for requests in flight that ask for them."""

    def __init__(
        self, layout: KVLayout, in_flight: InFlight, backend: AttentionBackend, in_ranges: bool, has_prefills: bool
    ) -> None:
        """``in_ranges``: sequences may have several segments. ``has_prefills``: prefill workers compute prompts."""
        self._layout, self._in_flight, self._backend = layout, in_flight, backend
        self._attending = [place for place, each in enumerate(layout.layers) if isinstance(each, Attending)]
        self._in_ranges, self._has_prefills = in_ranges, has_prefills

    def check(self, params: SamplingParams) -> None:
        """Raise RequestError if the attention sources that ``params`` ask for cannot be reported."""
        if params.attention_sources and (reason := self._cannot(params)):
            raise RequestError(f"attention_sources: {reason}")

    def tapped(self, step: ScheduledStep) -> ScheduledStep:
        """Return ``step``, marked to keep the queries of the rows whose tokens need attention sources."""
        return replace(step, taps=tuple(self._taps(each) for each in step.mini_batches))

    def found(self, step: ScheduledStep, computed: Sampled, queries: Queries) -> Sampled:
        """Return the tokens of the tapped ``step`` with their attention sources; the step must still be open."""
        rows = list(self._rows(step, computed))
        answers = self._backend.weigh([each.row for each in rows], queries) if rows else []
        computed = dict(computed)
        for each, weights in zip(rows, answers, strict=True):
            if weights is None:
                continue
            params, last = self._params(each.sequence_id), each.row.parts[-1]
            num_tokens = last.offset + last.num_tokens
            blocks = strongest(weights, params.attention_sources or 0, each.row.block, num_tokens)
            tokens = computed[each.sequence_id] = list(computed[each.sequence_id])
            drafted = each.sequence_id in step.drafts
            for place in [each.place] if drafted else range(len(tokens)):
                tokens[place] = tokens[place]._replace(sources=blocks)
        return computed

    def _cannot(self, params: SamplingParams) -> str | None:
        """Return why the attention sources that ``params`` ask for cannot be reported; None if they can."""
        if not self._attending:
            return "no layer of this model attends: leave it out"
        if self._has_prefills:
            return "prefill workers keep no queries of the prompts they compute: start without --prefill-workers"
        numbers = params.attention_source_layers or ()
        if outside := [each for each in numbers if each >= len(self._attending)]:
            return f"attention_source_layers must be from 0 to {len(self._attending) - 1}, got {outside[0]}"
        layers = self._layers(params)
        if not layers:
            return "every layer of this model attends within a window: name layers by attention_source_layers"
        if self._in_ranges and len(layers) > sum(place in self._attending for place in layers):
            return "with ranges, R-workers do not report which tokens an index picked: start without --kv-shard-tokens"
        return None

    def _layers(self, params: SamplingParams) -> tuple[int, ...]:
        """Return the indices of the layers that ``params`` choose, and of index layers that pick tokens for these."""
        numbers = params.attention_source_layers
        if numbers is None:
            chosen = [each for each in self._attending if self._spec(each).window == 0]
        else:
            chosen = [self._attending[number] for number in numbers]
        indexes = {self._spec(each).picked_by for each in chosen} - {-1}
        return tuple(sorted({*chosen, *indexes}))

    def _spec(self, place: int) -> Attending:
        return cast(Attending, self._layout.layers[place])

    def _params(self, sequence_id: int) -> SamplingParams:
        return self._in_flight.family(sequence_id)[0].params

    def _asked(self, mini_batch: MiniBatch) -> np.ndarray:
        """Return the indices of the chunks whose tokens need attention sources."""
        chunks = mini_batch.chunks
        return np.flatnonzero(chunks["samples"] & np.isin(chunks["sequence_id"], list(self._in_flight.asking)))

    def _taps(self, mini_batch: MiniBatch) -> np.ndarray:
        """Return the rows from which tokens with sources may be sampled: all of a chunk with drafts, else its last."""
        chunks, ends = mini_batch.chunks, np.cumsum(mini_batch.chunks["num_rows"])
        rows = [np.arange(ends[each] - _num_sampled(chunks[each]), ends[each]) for each in self._asked(mini_batch)]
        return np.concatenate(rows) if rows else np.zeros(0, np.int64)

    def _rows(self, step: ScheduledStep, computed: Sampled) -> Iterator[_Row]:
        for number, mini_batch in enumerate(step.mini_batches):
            chunks, ends = mini_batch.chunks, np.cumsum(mini_batch.chunks["num_rows"])
            for index in self._asked(mini_batch).tolist():
                chunk, sequence_id = chunks[index], int(chunks[index]["sequence_id"])
                params, count = self._params(sequence_id), _num_sampled(chunk)
                drafts = step.drafts.get(sequence_id, [])
                given = 1 + num_accepted(computed[sequence_id], drafts) if drafts else 1
                first = int(ends[index]) - count
                for place in range(given):
                    position = int(chunk["context_len"] + chunk["num_rows"]) - count + place
                    parts = _parts(mini_batch, index, position)
                    layers, block = self._layers(params), params.attention_source_block
                    yield _Row(sequence_id, place, WeighedRow(number, first + place, block, layers, parts))


def _num_sampled(chunk: np.void) -> int:
    """Return from how many last rows of ``chunk`` tokens may be sampled: all if it verifies drafts, else one."""
    return int(chunk["num_rows"]) if chunk["scored"] and chunk["is_decode"] else 1


def _parts(mini_batch: MiniBatch, index: int, position: int) -> tuple[WeighedPart, ...]:
    """Return the segments that the row at ``position`` attends to: closed ones, then the tail or the whole sequence."""
    chunk, reads = mini_batch.chunks[index], mini_batch.reads
    parts = []
    if len(reads):
        own = np.flatnonzero(reads["chunk"] == index)
        for (_, worker, range_id, start), end in zip(reads[own].tolist(), mini_batch.read_ends[own], strict=True):
            parts.append(WeighedPart(worker, range_id, position - start, start, int(end) - start))
    worker, cache_id, base = (int(chunk[name]) for name in ("worker", "cache_id", "base"))
    return (*parts, WeighedPart(worker, cache_id, position - base, base, position - base + 1))
