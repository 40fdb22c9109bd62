"""SamplingParams: the sampling options of one request, with vLLM's names, meanings and defaults."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral, Real
from typing import Any

from fastdecode.api.structured_outputs import StructuredOutputsParams
from fastdecode.api.vllm.python import takes_vllms_fields
from fastdecode.core.errors import ConfigError, RequestError

MAX_SAMPLES = 16384
"""Most samples of one prompt, as in vLLM."""

NO_TOKEN = "no token is left to choose"
"""The beginning of ``stop_reason`` if a request's limits together forbid every token."""


MAX_MAGNITUDE = 1e6
"""Largest magnitude of a bias or penalty. Beyond this, float32 logits lose precision or overflow."""


@takes_vllms_fields
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """One request's sampling options, checked when built; build a variant with ``dataclasses.replace``.

    After construction ``stop``, ``stop_token_ids``, ``allowed_token_ids`` and ``bad_words`` are tuples without
    duplicates (empty when absent), ``logit_bias`` is a private dict or None, and numbers are plain ``int`` and
    ``float``.

    Raises:
        ConfigError: one line that names the field, the value given and what would be right.
    """

    n: int = 1
    """Samples of the same prompt; more than one needs a temperature above 0."""
    temperature: float = 1.0
    """Divisor of the logits; 0 chooses the likeliest token (greedy)."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens with at least this probability; 1 keeps all."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this fraction of the likeliest one; 0 keeps all."""
    repetition_penalty: float = 1.0
    """Shrinks (above 1) the logits of tokens in prompt or output: positive ones divided, negative ones multiplied."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once per occurrence in the output."""
    seed: int | None = None
    """Makes the request's text repeatable whatever else runs; None (or -1) lets the engine choose."""
    max_tokens: int | None = 16
    """Most new tokens; None allows as many as the model's length."""
    min_tokens: int = 0
    """Fewest new tokens before an end-of-sequence or stop token may be chosen."""
    stop: str | Sequence[str] | None = None
    """Strings that end the text. The text excludes them unless ``include_stop_str_in_output``."""
    stop_token_ids: Collection[int] | None = None
    """Tokens that end the text, like end-of-sequence."""
    ignore_eos: bool = False
    """Continue past end-of-sequence."""
    logprobs: int | None = None
    """Likeliest tokens to report per position besides the chosen one; -1 is the whole vocabulary."""
    prompt_logprobs: int | None = None
    """Likeliest tokens to report per prompt position; all of the prompt is then recomputed. None reports none."""
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    """Biases by token id, added to the logits of these tokens."""
    allowed_token_ids: Collection[int] | None = None
    """The only tokens that may be chosen; None allows all."""
    bad_words: Sequence[str] | None = None
    """Words that must not appear in the output."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    shown_special_token_ids: Collection[int] | None = None
    """Special tokens that the text shows in spite of ``skip_special_tokens``, such as delimiters of tool calls."""
    include_stop_str_in_output: bool = False
    """Keep the stop string at the end of the text."""
    detokenize: bool = True
    """Produce text, not only token ids."""
    attention_sources: int | None = None
    """Blocks of context with the most attention to report per token; None reports none."""
    attention_source_block: int = 16
    """Tokens of one block of context in ``attention_sources``."""
    attention_source_layers: Sequence[int] | None = None
    """Layers whose attention counts: numbers from 0 among attending layers; None is all that see the whole context."""
    structured_outputs: StructuredOutputsParams | None = None
    """The form that the text must have, such as a JSON schema. The text ends when the form is complete."""

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_counts()
        self._check_lists()
        self._check_flags()
        self._check_together()

    @classmethod
    def from_optional(cls, **fields: Any) -> SamplingParams:
        """Return parameters in which None stands for a field's default, as vLLM's ``from_optional`` does."""
        return cls(**{name: value for name, value in fields.items() if value is not None or name == "max_tokens"})

    def clone(self) -> SamplingParams:
        """Return an equal copy. To change a field, call ``dataclasses.replace`` instead."""
        return replace(self)

    @cached_property
    def greedy(self) -> bool:
        """True if each token is the likeliest one instead of a random draw."""
        # Temperatures below this are greedy, as in vLLM. Dividing logits by them would give infinities.
        greedy_below = 1e-5
        return self.temperature < greedy_below

    @cached_property
    def changes_logits(self) -> bool:
        """True if a bias or penalty changes logits at every step.

        ``min_tokens`` and ``bad_words`` change logits only at some steps, so they do not count.
        """
        neutral = self.repetition_penalty == 1.0 and self.presence_penalty == 0.0 and self.frequency_penalty == 0.0
        return bool(self.logit_bias or self.allowed_token_ids) or not neutral

    def check_token_ids(self, vocab_size: int) -> None:
        """Raise RequestError for token ids that a model with ``vocab_size`` tokens does not have.

        Raises:
            RequestError: a list of token ids, or ``logit_bias``, names a token that the model does not have.
        """
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids", "shown_special_token_ids"):
            outside = [token_id for token_id in getattr(self, name) or () if token_id >= vocab_size]
            if outside:
                wanted = f"token ids from 0 to {vocab_size - 1}"
                raise RequestError(f"{name} must hold {wanted}, got {reprlib.repr(outside)}")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # a plain assignment fails, since the dataclass is frozen

    def _check_numbers(self) -> None:
        self._number("temperature", 0.0, MAX_MAGNITUDE, f"a number from 0 (greedy) to {MAX_MAGNITUDE:g}")
        self._number("top_p", 0.0, 1.0, "a number above 0 and at most 1", above=True)
        self._number("min_p", 0.0, 1.0, "a number from 0 to 1")
        wanted = f"a number from {1 / MAX_MAGNITUDE:g} to {MAX_MAGNITUDE:g} (1 is no penalty)"
        self._number("repetition_penalty", 1 / MAX_MAGNITUDE, MAX_MAGNITUDE, wanted)
        for name in ("presence_penalty", "frequency_penalty"):
            self._number(name, -2.0, 2.0, "a number from -2 to 2")

    def _check_counts(self) -> None:
        self._integer("n", 1, MAX_SAMPLES, f"an integer from 1 to {MAX_SAMPLES}")
        self._integer("top_k", -1, None, "an integer of at least 1, or 0 (or -1) to keep all tokens")
        self._integer("min_tokens", 0, None, "an integer of at least 0")
        if self.seed is not None:
            self._integer("seed", -(2**63), 2**64 - 1, "an integer of at most 64 bits, or None")
            self._set("seed", None if self.seed == -1 else self.seed)
        if self.max_tokens is not None:
            self._integer("max_tokens", 1, None, "an integer of at least 1, or None for up to the model's length")
        # Most blocks of context that are reported per token
        max_sources = 1024
        wanted = f"an integer from 1 to {max_sources}"
        self._integer("attention_source_block", 1, None, "an integer of at least 1")
        if self.attention_sources is not None:
            self._integer("attention_sources", 1, max_sources, f"{wanted}, or None")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._integer(name, -1, None, "an integer of at least 0, -1 for the whole vocabulary, or None")

    def _check_lists(self) -> None:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        self._set("stop", _words("stop", stop, "a non-empty string or a list of them"))
        self._set("bad_words", _words("bad_words", self.bad_words, "a list of non-empty words"))
        wanted = "a list of token ids (integers of at least 0)"
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids, wanted))
        shown = _token_ids("shown_special_token_ids", self.shown_special_token_ids, wanted)
        self._set("shown_special_token_ids", shown)
        if self.allowed_token_ids in ([], set()):  # () is accepted, since None is stored as ()
            raise _refusal("allowed_token_ids", self.allowed_token_ids, f"{wanted}, not an empty one, or None")
        self._set("allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids, wanted))
        self._set("logit_bias", _bias(self.logit_bias))
        if self.attention_source_layers is not None:
            wanted = "a list of layers' numbers from 0, not an empty one, or None for all that see the whole context"
            layers = _token_ids("attention_source_layers", self.attention_source_layers, wanted)
            if not layers:
                raise _refusal("attention_source_layers", self.attention_source_layers, wanted)
            self._set("attention_source_layers", tuple(sorted(layers)))

    def _check_flags(self) -> None:
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "detokenize"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise _refusal(name, value, "True or False")

        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise _refusal("structured_outputs", self.structured_outputs, "a StructuredOutputsParams, or None")

    def _check_together(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _refusal("min_tokens", self.min_tokens, f"at most max_tokens={self.max_tokens}")
        if self.stop and not self.detokenize:
            raise _refusal("stop", self.stop, "empty when detokenize is False: stop strings are looked for in the text")
        if self.n > 1 and self.greedy:
            raise _refusal("n", self.n, "1 when temperature is 0: all samples would be the same")

    def _number(self, name: str, low: float, high: float, wanted: str, *, above: bool = False) -> None:
        value = getattr(self, name)
        # Compare before calling float(): comparisons are false for NaN, and exact for integers too large for a float.
        if not _is_a(value, Real) or not low <= value <= high or (above and value == low):
            raise _refusal(name, value, wanted)
        self._set(name, float(value))

    def _integer(self, name: str, low: int, high: int | None, wanted: str) -> None:
        value = getattr(self, name)
        if not _is_a(value, Integral) or value < low or (high is not None and value > high):
            raise _refusal(name, value, wanted)
        self._set(name, int(value))


def _is_a(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)  # bool is an Integral, but never a valid number here


def _refusal(name: str, value: object, wanted: str) -> ConfigError:
    return ConfigError(f"{name} must be {wanted}, got {reprlib.repr(value)}")


def _words(name: str, value: Any, wanted: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(isinstance(word, str) and word for word in value):
        raise _refusal(name, value, wanted)
    return tuple(dict.fromkeys(value))


def _token_ids(name: str, value: Any, wanted: str) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple | set | frozenset) or not all(_is_a(i, Integral) and i >= 0 for i in value):
        raise _refusal(name, value, wanted)
    return tuple(dict.fromkeys(int(token_id) for token_id in value))


def _bias(value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    wanted = f"a dict of token ids (integers of at least 0) to numbers from {-MAX_MAGNITUDE:g} to {MAX_MAGNITUDE:g}"
    if not isinstance(value, Mapping):
        raise _refusal("logit_bias", value, wanted)
    for token_id, bias in value.items():
        fits = _is_a(bias, Real) and -MAX_MAGNITUDE <= bias <= MAX_MAGNITUDE
        if not fits or not _is_a(token_id, Integral) or token_id < 0:
            raise _refusal("logit_bias", {token_id: bias}, wanted)
    return {int(token_id): float(bias) for token_id, bias in value.items()} or None
