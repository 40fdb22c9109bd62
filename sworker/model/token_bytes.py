"""The bytes that each token stands for, and the most bytes that any token can stand for.

The maximum bounds the length of a text whose tokens fit a model's context.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import Tokenizer as BackendTokenizer

from fastdecode.api.text_limits import TextBound

NFC_SHRINKS = 4
"""Largest factor by which NFC can shorten a UTF-8 text. The worst known case is 3 (the Kelvin sign becomes K)."""


def text_bound(backend: BackendTokenizer) -> TextBound | None:
    """Return the most text that one token can stand for; None if there is no limit.

    Only BPE over bytes has a limit, and only if its earlier steps drop no text. Bytes without a token are dropped or
    joined to one unknown token, so they do not count. There is no limit if the tokenizer maps words to one unknown
    token, strips or folds text, or has added tokens that absorb spaces.
    """
    told = json.loads(backend.to_str())
    shrinks, dropped = _shrinks(told["normalizer"]), _dropped_bytes(told)
    added = told["added_tokens"]
    takes_spaces = any(each["lstrip"] or each["rstrip"] for each in added)
    if shrinks is None or dropped is None or takes_spaces or not _keeps_all(told["pre_tokenizer"]):
        return None
    if dropped and told["normalizer"] is not None:  # the normalizer may turn text into bytes that have no token
        return None
    spells_bytes = not told["model"].get("byte_fallback")  # without byte fallback, a token's characters stand for bytes
    tokens = (len(token) if spells_bytes else len(token.encode()) for token in told["model"]["vocab"])
    return TextBound(shrinks * max(*tokens, *(len(each["content"].encode()) for each in added), 1), dropped)


def _shrinks(step: dict[str, Any] | None) -> int | None:
    """Return the largest factor by which a normalizer shortens a text; None if unknown."""
    if step is None or step["type"] == "Prepend":
        return 1
    if step["type"] == "NFC":
        return NFC_SHRINKS
    if step["type"] == "Replace":
        old = step["pattern"].get("String")
        return 1 if old is not None and len(step["content"].encode()) >= len(old.encode()) else None
    if step["type"] == "Sequence":
        product = 1
        for each in map(_shrinks, step["normalizers"]):
            if each is None:
                return None
            product *= each
        return product
    return None


def _keeps_all(step: dict[str, Any] | None) -> bool:
    """Return whether a pre-tokenizer only splits a text, and drops nothing."""
    if step is None or step["type"] in ("ByteLevel", "Metaspace", "Digits"):
        return True
    if step["type"] == "Sequence":
        return all(map(_keeps_all, step["pretokenizers"]))
    return step["type"] in ("Split", "Punctuation") and step["behavior"] != "Removed"


def _dropped_bytes(told: dict[str, Any]) -> bytes | None:
    """Return all bytes for which the vocabulary has no token; None if its tokens do not spell bytes."""
    model, before = told["model"], told["pre_tokenizer"]
    if model["type"] != "BPE":
        return None
    if model.get("byte_fallback"):
        return b"" if all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256)) else None
    steps = before["pretokenizers"] if before and before["type"] == "Sequence" else [before]
    if not any(each and each["type"] == "ByteLevel" for each in steps):
        return None
    return bytes(byte for byte, spelling in _spellings().items() if spelling not in model["vocab"])


def _spellings() -> dict[int, str]:
    """Return the character by which byte-level vocabularies write each byte: itself if printable, else one ≥ U+0100."""
    printed = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return {byte: chr(byte if byte in printed else next(others)) for byte in range(256)}


class Spellings:
    """The bytes that each token adds to a text. ``special``: ids of tokens that texts omit."""

    def __init__(self, backend: BackendTokenizer) -> None:
        self._backend = backend
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder else None
        self._steps = _decoder_steps(decoder)
        self._by_letter = {letter: byte for byte, letter in _spellings().items()}
        added = backend.get_added_tokens_decoder()
        self._added = {number: each.content for number, each in added.items()}
        self.special = frozenset(number for number, each in added.items() if each.special)

    def of(self, token_id: int) -> bytes:
        """Return the token's bytes, which may be only a part of a character."""
        text = self._added.get(token_id)
        if text is not None:
            return text.encode()
        token = self._backend.id_to_token(token_id) or ""
        kinds = {step["type"] for step in self._steps}
        if "ByteLevel" in kinds:
            return b"".join(
                bytes([self._by_letter[letter]]) if letter in self._by_letter else letter.encode() for letter in token
            )
        byte = re.compile(r"<0x([0-9A-Fa-f]{2})>")
        if "ByteFallback" in kinds and (found := byte.fullmatch(token)):
            return bytes([int(found[1], 16)])
        for step in self._steps:
            token = _decoded(step, token)
        return token.encode()


def _decoder_steps(step: dict[str, Any] | None) -> list[dict[str, Any]]:
    if step is None:
        return []
    return [each for inner in step["decoders"] for each in _decoder_steps(inner)] if "decoders" in step else [step]


def _decoded(step: dict[str, Any], token: str) -> str:
    """Return ``token`` after the decoder's step ``step``, as in the middle of a text.

    At the start of a text, some steps also drop a space.
    """
    if step["type"] == "Replace" and "String" in step["pattern"]:
        return token.replace(step["pattern"]["String"], step["content"])
    if step["type"] == "Metaspace":
        return token.replace(step["replacement"], " ")
    if step["type"] == "BPEDecoder":
        return token.replace(step["suffix"], " ")
    if step["type"] == "WordPiece":
        return token.removeprefix(step["prefix"]) if token.startswith(step["prefix"]) else f" {token}"
    return token
