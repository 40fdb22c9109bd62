"""The sampler's input for a row, and edits of logits that depend on a row's tokens.

Bias, bans and penalties are sparse updates of the whole batch. Each changes its (row, token) cells through one index,
so its cost grows with these cells, not the vocabulary. The order is vLLM's: allowed tokens, logit bias, ``min_tokens``,
bad words, repetition, frequency and presence penalties. Grammars come last.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fastdecode.api.sampling_params import SamplingParams
from fastdecode.sworker.sampling.grammar import Matcher


@dataclass(frozen=True)
class SamplingRow:
    """The sampler's input for one sequence's next token. The token lists are read during the call and not kept.

    ``stop_token_ids``: tokens that may not be chosen before ``params.min_tokens``; they include end-of-sequence unless
    it is ignored. ``bad_words_token_ids``: token sequences of ``params.bad_words``, in every spelling.
    ``generator_seed``: seeds this row's random draws; ``sample_seed`` derives it from the request's seed. ``grammar``:
    tells which tokens may come next; the sampler's caller advances it by the sampled token.
    """

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    stop_token_ids: frozenset[int] = frozenset()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    generator_seed: int = 0
    grammar: Matcher | None = None

    def after(self, draft_token_ids: Sequence[int], grammar: Matcher | None = None) -> SamplingRow:
        """Return the row for the token after ``draft_token_ids``; ``grammar``: its state after these tokens."""
        if self.plain_from <= len(self.output_token_ids):
            return self
        return replace(self, output_token_ids=[*self.output_token_ids, *draft_token_ids], grammar=grammar)

    @property
    def changes_logits(self) -> bool:
        """True if bias, bans or penalties apply to this row in this step."""
        params = self.params
        held_back = bool(self.stop_token_ids) and len(self.output_token_ids) < params.min_tokens
        edited = params.changes_logits or held_back or bool(self.bad_words_token_ids)
        return edited or self.grammar is not None

    @cached_property
    def plain_from(self) -> float:
        """Number of output tokens after which the row takes the likeliest token of unedited logits; inf if never."""
        if not self.params.greedy or self.params.changes_logits or self.bad_words_token_ids or self.grammar is not None:
            return math.inf
        return self.params.min_tokens if self.stop_token_ids else 0


def edited_logits(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Return a float32 copy of ``logits`` [num_rows, vocab] with every row's bias, bans and penalties applied.

    Token ids outside the vocabulary are ignored: they can never be chosen.
    """
    scores = logits.to(torch.float32, copy=True).contiguous()
    if any(row.changes_logits for row in rows):
        _keep_to_allowed(scores, rows)
        _add_bias(scores, rows)
        _ban(scores, rows)
        _penalise_repetition(scores, rows)
        _penalise_output(scores, rows)
        _keep_to_grammars(scores, rows)
    return scores


def _keep_to_allowed(scores: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Set all logits to -inf except those of tokens that a row's ``SamplingParams`` allow."""
    for index, row in enumerate(rows):
        if row.params.allowed_token_ids:
            allowed = _on(scores, _cells({0: _ids([*row.params.allowed_token_ids])}, scores))
            kept = scores[index, allowed]
            scores[index] = -math.inf
            scores[index, allowed] = kept


def _add_bias(scores: Tensor, rows: Sequence[SamplingRow]) -> None:
    vocab = scores.shape[1]
    biased = [
        (index * vocab + token_id, bias)
        for index, row in enumerate(rows)
        for token_id, bias in (row.params.logit_bias or {}).items()
        if token_id < vocab
    ]
    if biased:
        cells = torch.tensor([cell for cell, _ in biased], device=scores.device)
        scores.view(-1)[cells] += torch.tensor([bias for _, bias in biased], device=scores.device)


def _ban(scores: Tensor, rows: Sequence[SamplingRow]) -> None:
    banned: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        held_back = row.stop_token_ids if len(row.output_token_ids) < row.params.min_tokens else ()
        token_ids = [*held_back, *_bad_word_ends(row)]
        if token_ids:
            banned[index] = token_ids
    cells = _cells(banned, scores)
    scores.view(-1)[_on(scores, cells)] = -math.inf


def _bad_word_ends(row: SamplingRow) -> list[int]:
    """Return the tokens that would complete a bad word, given the end of the prompt and output."""
    longest = max((len(word) for word in row.bad_words_token_ids), default=0) - 1
    recent = tuple(row.output_token_ids[-longest:]) if longest > 0 else ()
    if 0 <= len(recent) < longest:
        recent = tuple(row.prompt_token_ids[len(recent) - longest :]) + recent
    words = (word for word in row.bad_words_token_ids if word)
    return [word[-1] for word in words if len(word) == 1 or recent[1 - len(word) :] == tuple(word[:-1])]


def _penalise_repetition(scores: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Penalize tokens in prompt or output: divide positive logits by the penalty, multiply negative ones (CTRL)."""
    penalties = {i: row.params.repetition_penalty for i, row in enumerate(rows) if row.params.repetition_penalty != 1.0}
    seen = {i: np.concatenate([_ids(rows[i].prompt_token_ids), _ids(rows[i].output_token_ids)]) for i in penalties}
    cells = _cells(seen, scores)  # a repeated token is written twice, with the same value
    penalty = _on(scores, _per_cell(penalties, cells, scores))
    at = _on(scores, cells)
    values = scores.view(-1)[at]
    scores.view(-1)[at] = torch.where(values < 0, values * penalty, values / penalty)


def _penalise_output(scores: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Penalize tokens in the output as OpenAI does: subtract frequency_penalty x occurrences and presence_penalty."""
    frequency = {i: row.params.frequency_penalty for i, row in enumerate(rows)}
    presence = {i: row.params.presence_penalty for i, row in enumerate(rows)}
    asking = {i: rows[i].output_token_ids for i in frequency if frequency[i] != 0.0 or presence[i] != 0.0}
    cells, counts = np.unique(_cells(asking, scores), return_counts=True)
    per_count = _on(scores, _per_cell(frequency, cells, scores) * counts.astype(np.float32))
    at = _on(scores, cells)
    scores.view(-1)[at] = scores.view(-1)[at] - per_count - _on(scores, _per_cell(presence, cells, scores))


def _keep_to_grammars(scores: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Set all logits to -inf except those of tokens that a row's grammar allows. Rows without a grammar stay."""
    for index, row in enumerate(rows):
        if row.grammar is not None:
            scores[index] += _on(scores, row.grammar.logit_bias(scores.shape[1]))


def _cells(token_ids: Mapping[int, Sequence[int] | np.ndarray], scores: Tensor) -> np.ndarray:
    """Return the cells of ``token_ids``, by row, as flat indices into ``scores``: int64 [num_cells].

    Ids outside the vocabulary are left out.
    """
    vocab = scores.shape[1]
    parts = [np.empty(0, dtype=np.int64)]
    for index, listed in token_ids.items():
        ids = _ids(listed)
        parts.append(index * vocab + ids[(ids >= 0) & (ids < vocab)])
    return np.concatenate(parts)


def _per_cell(values: Mapping[int, float], cells: np.ndarray, scores: Tensor) -> np.ndarray:
    by_row = np.zeros(scores.shape[0], dtype=np.float32)
    by_row[list(values.keys())] = list(values.values())
    of_cells: np.ndarray = by_row[cells // scores.shape[1]]
    return of_cells


def _ids(token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.asarray(token_ids, dtype=np.int64)


def _on(scores: Tensor, values: np.ndarray) -> Tensor:
    return torch.from_numpy(values).to(scores.device)
