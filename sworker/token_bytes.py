"""The most bytes of a text that one token can stand for: a longer text cannot fit a model, whatever it says."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer as BackendTokenizer
from tokenizers.pre_tokenizers import ByteLevel

NFC_SHRINKS = 4
"""NFC makes no text shorter than a quarter in UTF-8; the worst known is a third (the Kelvin sign becomes K)."""


def max_bytes_per_token(backend: BackendTokenizer) -> int | None:
    """The most UTF-8 bytes of a text per token; None where a token can stand for a text of any length.

    A bound needs a BPE that has a token for every byte, and steps before it that drop nothing. Tokenizers that map
    words to one unknown token, strip or fold text, or have added tokens that take spaces along have none.
    """
    told = json.loads(backend.to_str())
    shrinks = _shrinks(told["normalizer"])
    added = told["added_tokens"]
    if (
        shrinks is None
        or not _keeps_all(told["pre_tokenizer"])
        or any(each["lstrip"] or each["rstrip"] for each in added)
    ):
        return None
    if not _has_every_byte(told):
        return None
    spells_bytes = not told["model"].get("byte_fallback")  # then each character of a token stands for one byte
    tokens = (len(token) if spells_bytes else len(token.encode()) for token in told["model"]["vocab"])
    return shrinks * max(*tokens, *(len(each["content"].encode()) for each in added), 1)


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


def _has_every_byte(told: dict[str, Any]) -> bool:
    """True if no part of a text is unknown to the model, which would drop it or join it to others."""
    model, before = told["model"], told["pre_tokenizer"]
    if model["type"] != "BPE":
        return False
    if model.get("byte_fallback"):
        return all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256))
    steps = before["pretokenizers"] if before and before["type"] == "Sequence" else [before]
    return any(each and each["type"] == "ByteLevel" for each in steps) and set(ByteLevel.alphabet()) <= set(
        model["vocab"]
    )
