"""Grammars over tokens, by llguidance: which tokens may come next so that a text keeps the form that was asked for."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from fastdecode.api.structured_outputs import UNFOLLOWED, StructuredOutputsParams
from fastdecode.core.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from tokenizers import Tokenizer

KEPT_GRAMMARS = 64
"""Compiled ones that are kept for the next request of the same form."""

_BIAS_OF_BITS = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0, -np.inf)
_BIAS_OF_BITS = _BIAS_OF_BITS.astype(np.float32)
"""Eight tokens' biases for each byte of a mask: looked up ten times as fast as a mask is applied."""


class Matcher:
    """The position of one completion in its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def logit_bias(self, vocab_size: int) -> np.ndarray:
        """0 for tokens that may come next, with ends of text where it may end, else -inf: float32 [vocab_size].

        Changes nothing.
        """
        allowed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        bias = np.full((-(-vocab_size // 8), 8), -np.inf, dtype=np.float32)
        known = allowed[: len(bias)]
        np.take(_BIAS_OF_BITS, known, axis=0, out=bias[: len(known)], mode="clip")
        return bias.reshape(-1)[:vocab_size]

    def advance(self, token_id: int) -> None:
        """Take the next token, one of those that ``logit_bias`` left."""
        self._matcher.consume_token(token_id)

    def after(self, token_ids: Sequence[int]) -> list[Matcher]:
        """Return the positions of the text after the first of ``token_ids``, after the first two, and so on.

        It ends before a token that may not come, and before one that completes the text.
        """
        matchers: list[Matcher] = []
        ahead = self._matcher.deep_copy()
        for token_id in token_ids:
            if not ahead.validate_tokens([token_id]):
                break
            ahead.consume_token(token_id)
            if ahead.is_stopped():
                break
            matchers.append(Matcher(ahead.deep_copy()))
        return matchers

    @property
    def finished(self) -> bool:
        """True when the text is complete: nothing but its end can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def error(self) -> str:
        """Why the grammar cannot go on, such as a limit of llguidance, on one line; "" while it can."""
        return _first_line(self._matcher.get_error()) if self._matcher.is_error() else ""


class Grammars:
    """Compiles what requests ask for, over one tokenizer; llguidance is imported at the first one.

    ``vocab_size``: of the model's logits, at least the tokenizer's. ``prepare`` and ``read_vocabulary`` may be called
    by any thread; then ``matcher`` takes no time.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._known: LLTokenizer | None = None
        self._reading = threading.Lock()
        self.compiled = lru_cache(KEPT_GRAMMARS)(self._compile)

    def matcher(self, params: StructuredOutputsParams) -> Matcher:
        """Return the position at the beginning of a text of this form.

        Raises:
            RequestError: the schema, expression or grammar is not understood, or the tokenizer is not.
            ConfigError: llguidance is not installed.
        """
        return Matcher(self.compiled(params).deep_copy())

    def prepare(self, params: StructuredOutputsParams) -> None:
        """Compile what ``params`` ask for, unless it is known; while it is compiled other threads go on.

        Raises:
            RequestError, ConfigError: as ``matcher``.
        """
        self.compiled(params)

    def read_vocabulary(self) -> LLTokenizer:
        """Return the tokenizer as llguidance reads it, once. Reading holds up every thread for some tenths of a second.

        Raises:
            RequestError, ConfigError: as ``matcher``.
        """
        with self._reading:
            self._known = self._known or self._read_vocabulary()
        return self._known

    def _compile(self, params: StructuredOutputsParams) -> LLMatcher:
        tokens = self._known or self.read_vocabulary()
        from llguidance import LLMatcher

        try:
            compiled = LLMatcher(tokens, grammar_text(params), log_level=0)
            problem = compiled.get_error() if compiled.is_error() else ""
        except ValueError as error:
            problem = str(error)
        if problem:
            raise RequestError(f"{UNFOLLOWED}: {' '.join(problem.split()):.500}")
        return compiled

    def _read_vocabulary(self) -> LLTokenizer:
        try:
            from llguidance import LLTokenizer
        except ImportError:
            raise ConfigError("structured_outputs needs llguidance: pip install 'fastdecode[structured]'") from None
        size = max(self._vocab_size, self._tokenizer.get_vocab_size(with_added_tokens=True))
        try:
            return LLTokenizer(self._tokenizer.to_str(), n_vocab=size, eos_token=self._eos_token_ids)
        except ValueError as error:
            raise RequestError(f"structured_outputs: llguidance cannot use the model's tokenizer: {error}") from None


def grammar_text(params: StructuredOutputsParams) -> str:
    """Return the text that llguidance compiles; ValueError for a grammar that is not understood."""
    from llguidance import LLMatcher, grammar_from

    if params.schema is not None:
        spaces = not params.disable_any_whitespace
        return LLMatcher.grammar_from_json_schema(params.schema, overrides={"whitespace_flexible": spaces})
    if params.choice is not None:
        return grammar_from("regex", "|".join(map(_literal, params.choice)))  # "choice" has a limit of 2,000
    if params.regex is not None:
        return grammar_from("regex", params.regex)
    return grammar_from("grammar", str(params.grammar))


def _literal(text: str) -> str:
    """The regular expression that only ``text`` matches."""
    return "".join(each if each.isalnum() else f"\\x{{{ord(each):x}}}" for each in text)


def _first_line(problem: str) -> str:
    """Of what llguidance says; the whole grammar may follow."""
    return problem.partition("\n")[0].strip()
