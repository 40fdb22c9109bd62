"""Tokens and their texts: bytes of tokens, and grammars whose texts look like special tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from fastdecode.api.engine_fields import DEMO_MODEL
from fastdecode.api.structured_outputs import StructuredOutputsParams
from fastdecode.core.errors import RequestError
from fastdecode.sworker.model.token_bytes import Spellings
from fastdecode.sworker.sampling.grammar import Grammars

TEXT = "😀 hällo  wörld\n\ttab 漢字 ﬁ"
EOS = 0


def bytes_tokenizer(*added: AddedToken) -> Tokenizer:
    """Return the demo model's tokenizer, which has a token per byte, with more tokens."""
    found = Tokenizer.from_file(str(Path(DEMO_MODEL) / "tokenizer.json"))
    found.add_tokens(list(added))
    return found


def fallback_tokenizer() -> Tokenizer:
    """Return a tokenizer like SentencePiece's: words begin with a mark, and unknown text is spelled in bytes."""
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    vocab |= {letter: number for number, letter in enumerate("▁abcdefghijklmnopqrstuvwxyz", len(vocab))}
    found = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    found.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    found.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return found


@pytest.mark.parametrize("tokenizer", [bytes_tokenizer(), fallback_tokenizer()], ids=["bytes", "fallback"])
def test_the_bytes_of_tokens_join_to_the_text(tokenizer: Tokenizer) -> None:
    spellings, ids = Spellings(tokenizer), tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert b"".join(map(spellings.of, ids)).decode() == TEXT
    assert [len(spellings.of(token_id)) for token_id in ids[:4]] == [1, 1, 1, 1]


def test_added_tokens_stand_for_their_names() -> None:
    tokenizer = bytes_tokenizer(AddedToken("<think>", special=False), AddedToken("<|end|>", special=True))
    spellings, think, end = Spellings(tokenizer), tokenizer.token_to_id("<think>"), tokenizer.token_to_id("<|end|>")
    assert (spellings.of(think), spellings.of(end)) == (b"<think>", b"<|end|>")
    assert end in spellings.special and think not in spellings.special


def follow(tokenizer: Tokenizer, form: StructuredOutputsParams, eos: frozenset[int], seed: int) -> str:
    """Return the text of tokens chosen at random among those that ``form`` allows."""
    size = tokenizer.get_vocab_size() + 3
    matcher, draw, ids = Grammars(tokenizer, size, eos).matcher(form), np.random.default_rng(seed), list[int]()
    while not matcher.finished and len(ids) < 60:
        allowed = np.flatnonzero(matcher.logit_bias(size) == 0)
        assert len(allowed) and allowed.max() < tokenizer.get_vocab_size(), "a token that there is not"
        token_id = int(draw.choice(allowed))
        if token_id in eos:
            break
        ids.append(token_id)
        matcher.advance(token_id)
        assert not matcher.error, matcher.error
    return str(tokenizer.decode(ids, skip_special_tokens=True))


FORMS = [
    (StructuredOutputsParams(choice=["<|end|>"]), "<|end|>"),
    (StructuredOutputsParams(choice=["a<|end|>b", "a<|end|>c"]), "a<|end|>"),
    (StructuredOutputsParams(regex="<think>[a-c]</think>yes"), "<think>"),
    (StructuredOutputsParams(json={"const": "<|end|> <think>"}), '"<|end|> <think>"'),
    (StructuredOutputsParams(json={"enum": ["<think>", "[END]"]}), '"'),
    (StructuredOutputsParams(grammar='start: "<|end|>" /[a-c]/'), "<|end|>"),
    (StructuredOutputsParams(grammar='start: <|end|> "<|end|>"'), "<|end|>"),
]


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(("form", "beginning"), FORMS)
def test_no_special_token_stands_for_text(form: StructuredOutputsParams, beginning: str, special: bool) -> None:
    """No special token is allowed as text, with and without an end of text, though a grammar may name a token."""
    names = ("<think>", "</think>", "[END]")
    tokenizer = bytes_tokenizer(
        AddedToken("<|end|>", special=True), *(AddedToken(name, special=special) for name in names)
    )
    for eos in (frozenset({EOS}), frozenset[int]()):
        texts = {follow(tokenizer, form, eos, seed) for seed in range(4)}
        assert all(text.startswith(beginning) for text in texts), texts


def test_a_text_without_an_end_of_its_own_runs_on() -> None:
    """Neither the model nor the form has an end of text."""
    assert len(follow(bytes_tokenizer(), StructuredOutputsParams(regex="[a-c]*"), frozenset(), 0)) == 60
    assert follow(bytes_tokenizer(), StructuredOutputsParams(choice=["yes"]), frozenset(), 0) == "yes"


def test_a_tokenizer_that_grammars_cannot_use_is_told() -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    with pytest.raises(RequestError, match="cannot"):
        Grammars(words, 2, frozenset({0})).matcher(StructuredOutputsParams(choice=["a"]))
