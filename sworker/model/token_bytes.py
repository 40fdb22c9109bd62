"""The most bytes of a text that one token can stand for: a longer text cannot fit a model, whatever it says."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer as BackendTokenizer

from fastdecode.api.text_limits import TextBound

NFC_SHRINKS = 4
"""NFC makes no text shorter than a quarter in UTF-8; the worst known is a third (the Kelvin sign becomes K)."""


def text_bound(backend: BackendTokenizer) -> TextBound | None:
    """The most text per token; None where a token can stand for a text of any length.

    A bound needs a BPE over bytes, and steps before it that drop nothing. Bytes without a token of their own vanish, or
    are joined to one unknown token: they do not count. Tokenizers that map words to one unknown token, strip or fold
    text, or have added tokens that take spaces along have no bound.
    """
    told = json.loads(backend.to_str())
    shrinks, dropped = _shrinks(told["normalizer"]), _dropped_bytes(told)
    added = told["added_tokens"]
    takes_spaces = any(each["lstrip"] or each["rstrip"] for each in added)
    if shrinks is None or dropped is None or takes_spaces or not _keeps_all(told["pre_tokenizer"]):
        return None
    if dropped and told["normalizer"] is not None:  # which may make such bytes of others
        return None
    spells_bytes = not told["model"].get("byte_fallback")  # then each character of a token stands for one byte
    tokens = (len(token) if spells_bytes else len(token.encode()) for token in told["model"]["vocab"])
    return TextBound(shrinks * max(*tokens, *(len(each["content"].encode()) for each in added), 1), dropped)


def _shrinks(step: dict[str, Any] | None) -> int | None:
    """How many times shorter a normalizer makes a text at most; None if that is not known."""
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
    """True if a pre-tokenizer only divides a text, and drops nothing of it."""
    if step is None or step["type"] in ("ByteLevel", "Metaspace", "Digits"):
        return True
    if step["type"] == "Sequence":
        return all(map(_keeps_all, step["pretokenizers"]))
    return step["type"] in ("Split", "Punctuation") and step["behavior"] != "Removed"


def _dropped_bytes(told: dict[str, Any]) -> bytes | None:
    """Bytes that the model has no token for; None where a model is not one over bytes."""
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
    """The character that stands for each byte in byte-level vocabularies: itself where it is printed, else one from
    256 on."""
    printed = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return {byte: chr(byte if byte in printed else next(others)) for byte in range(256)}
