"""Grammars over tokens, by llguidance: they tell which tokens may come next so that a text has the requested form."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from fastdecode.api.structured_outputs import UNFOLLOWED, StructuredOutputsParams
from fastdecode.core.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from tokenizers import Tokenizer

_BIAS_OF_BITS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0, -np.inf
).astype(np.float32)
"""For each byte of a token mask, the logit biases of its eight tokens. A look-up is ten times as fast as masking."""


class Matcher:
    """The state of one completion within its grammar."""

    def __init__(self, matcher: LLMatcher, no_token: int | None = None) -> None:
        """``no_token``: the id that llguidance takes for end of text, if the model has no such token."""
        self._matcher, self._no_token = matcher, no_token

    def logit_bias(self, vocab_size: int) -> np.ndarray:
        """Return the grammar's bias, float32 [vocab_size]: 0 for tokens that may come next, -inf for all others.

        The end of text may come next if the text is complete. The state does not change.
        """
        allowed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        bias = np.full((-(-vocab_size // 8), 8), -np.inf, dtype=np.float32)
        known = allowed[: len(bias)]
        np.take(_BIAS_OF_BITS, known, axis=0, out=bias[: len(known)], mode="clip")
        if self._no_token is not None:
            bias.reshape(-1)[self._no_token : self._no_token + 1] = -np.inf
        return bias.reshape(-1)[:vocab_size]

    def advance(self, token_id: int) -> None:
        """Append a token to the text; ``logit_bias`` must allow this token."""
        self._matcher.consume_token(token_id)

    def after(self, token_ids: Sequence[int]) -> list[Matcher]:
        """Return one matcher per draft token: the state after the first of ``token_ids``, after two, and so on.

        The list ends before a token that is not allowed, and before one that completes the text.
        """
        matchers: list[Matcher] = []
        ahead = self._matcher.deep_copy()
        for token_id in token_ids:
            if not ahead.validate_tokens([token_id]):
                break
            ahead.consume_token(token_id)
            if ahead.is_stopped():
                break
            matchers.append(Matcher(ahead.deep_copy(), self._no_token))
        return matchers

    @property
    def finished(self) -> bool:
        """True if the text is complete and no further token can extend it."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def error(self) -> str:
        """The reason why llguidance gave up on the grammar, such as an exceeded limit, in one line; "" if none."""
        return _first_line(self._matcher.get_error()) if self._matcher.is_error() else ""

    @property
    def dead_end(self) -> str:
        """The reason why no token may come next although the text is incomplete; "" if some token may.

        In such a state, llguidance allows the end of the text, as if it were complete.
        """
        return _obstacle(self._matcher)


class Grammars:
    """Compiles the grammars of requests over one tokenizer. llguidance is imported for the first grammar.

    ``vocab_size``: size of the model's logits, at least the tokenizer's. Any thread may call ``prepare`` and
    ``read_vocabulary``, which take time; afterwards ``matcher`` returns at once.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._special: dict[str, int] = {}
        self._no_token = None if eos_token_ids else tokenizer.get_vocab_size(with_added_tokens=True)
        self._known: LLTokenizer | None = None
        self._reading = threading.Lock()
        # Number of compiled grammars that are kept for later requests of the same form
        kept_grammars = 64
        self.compiled = lru_cache(kept_grammars)(self._compile)

    def matcher(self, params: StructuredOutputsParams) -> Matcher:
        """Return a matcher at the start of a text of the form that ``params`` ask for.

        Raises:
            RequestError: the schema, expression or grammar is not supported, or the tokenizer is not.
            ConfigError: llguidance is not installed.
        """
        return Matcher(self.compiled(params).deep_copy(), self._no_token)

    def prepare(self, params: StructuredOutputsParams) -> None:
        """Compile the form that ``params`` ask for, unless it is already compiled. Other threads can run meanwhile.

        Raises:
            RequestError, ConfigError: as ``matcher``.
        """
        self.compiled(params)

    def read_vocabulary(self) -> LLTokenizer:
        """Return the tokenizer in llguidance's form, read once.

        Reading blocks every thread for some tenths of a second.

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
            compiled = LLMatcher(tokens, grammar_text(params, self._special), log_level=0)
            problem = compiled.get_error() if compiled.is_error() else _obstacle(compiled)
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
        ends = self._eos_token_ids if self._no_token is None else [self._no_token]
        try:
            told, self._special = without_spellings(self._tokenizer.to_str(), self._no_token)
            return LLTokenizer(told, n_vocab=max(size, *(each + 1 for each in ends)), eos_token=ends)
        except ValueError as error:
            raise RequestError(f"structured_outputs: llguidance cannot use the model's tokenizer: {error}") from None


def grammar_text(params: StructuredOutputsParams, special: Mapping[str, int]) -> str:
    """Return the grammar that ``params`` ask for, as text for llguidance. Raise ValueError if it is unsupported.

    ``special``: tokens that a grammar may name, with their ids.
    """
    from llguidance import LLMatcher, grammar_from

    if params.schema is not None:
        spaces = not params.disable_any_whitespace
        return LLMatcher.grammar_from_json_schema(params.schema, overrides={"whitespace_flexible": spaces})
    if params.choice is not None:
        # In its own grammar format, llguidance would take at most 2,000 texts
        return grammar_from("regex", "|".join(map(_literal, params.choice)))
    if params.regex is not None:
        return grammar_from("regex", params.regex)
    return grammar_from("grammar", _LARK.sub(lambda found: _by_id(found[0], special), str(params.grammar)))


_LARK = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/|<[^<>\s"/]+>')
"""Matches, in a Lark grammar, a string, a regular expression, or the name of a token."""


def _by_id(part: str, special: Mapping[str, int]) -> str:
    return f"<[{special[part]}]>" if part in special else part


def without_spellings(tokenizer: str, no_token: int | None) -> tuple[str, dict[str, int]]:
    """Return (the tokenizer's JSON with some tokens renamed so that no text spells them, these tokens' ids).

    Special tokens and added tokens in angle brackets are renamed, since outputs omit them. Otherwise llguidance would
    allow such a token where a grammar asks for its text. ``no_token``: id of a special token to add, None for none.
    """
    told = msgspec.json.decode(tokenizer)
    names: dict[str, str] = {}
    ids: dict[str, int] = {}
    # Begins the names of tokens that no text may spell: a character that Unicode leaves to private use
    unspelt = "\U0010fffd"
    for each in told["added_tokens"]:
        if each["special"] or _IN_BRACKETS.fullmatch(each["content"]):
            ids[each["content"]] = each["id"]
            names[each["content"]] = each["content"] = f"{unspelt}{each['id']}"
            each["special"] = True
    if no_token is not None:
        plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        told["added_tokens"].append({"id": no_token, "content": f"{unspelt}{no_token}", "special": True, **plain})
    model = told["model"]
    if isinstance(model.get("vocab"), dict):
        model["vocab"] = {names.get(token, token): number for token, number in model["vocab"].items()}
    elif isinstance(model.get("vocab"), list):
        model["vocab"] = [[names.get(token, token), score] for token, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return msgspec.json.encode(told).decode(), ids


_IN_BRACKETS = re.compile(r"<[^<>\s]+>")


def _literal(text: str) -> str:
    return "".join(each if each.isalnum() else f"\\x{{{ord(each):x}}}" for each in text)


def _obstacle(matcher: LLMatcher) -> str:
    """Return why ``matcher`` allows no next token; "" if it allows some."""
    ahead = matcher.deep_copy()
    ahead.compute_bitmask()
    problem = _first_line(ahead.get_error()) if ahead.is_error() else ""
    if problem != "NoExtensionBias":
        return problem
    return "no text can complete this form, such as where a rule or $ref leads only to itself"


def _first_line(problem: str) -> str:
    return problem.partition("\n")[0].strip()
