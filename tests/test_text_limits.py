"""A text that cannot fit a model is refused before it is tokenised."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from helpers.servers import RunningServer
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from fastdecode.api.text import encode_text
from fastdecode.api.text_limits import LONG_TEXT_BYTES
from fastdecode.core.errors import RequestError
from fastdecode.server.service import is_long_text
from fastdecode.sworker.token_bytes import NFC_SHRINKS, max_bytes_per_token


def byte_level() -> Tokenizer:
    """A tokenizer with a token for every byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


class Counted:
    """A tokenizer that counts the texts that were given to it."""

    eos_token_id = None

    def __init__(self, backend: Tokenizer) -> None:
        self.backend, self.max_bytes_per_token, self.num_texts = backend, max_bytes_per_token(backend), 0

    def encode(self, text: str) -> list[int]:
        self.num_texts += 1
        return self.backend.encode(text).ids

    def encode_chat(self, messages: object, max_model_len: int | None = None, /, **arguments: object) -> list[int]:
        raise NotImplementedError


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised() -> None:
    tokenizer = Counted(byte_level())
    assert tokenizer.max_bytes_per_token == 1
    with pytest.raises(RequestError, match=r"21 bytes of text.*cannot fit"):
        encode_text("a" * 21, tokenizer, 10)
    assert tokenizer.num_texts == 0
    assert len(encode_text("a" * 10, tokenizer, 10)) == 10


def test_added_tokens_and_normalizers_count() -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<|separator|>"])
    assert max_bytes_per_token(tokenizer) == 13
    tokenizer.normalizer = normalizers.NFC()
    assert max_bytes_per_token(tokenizer) == 13 * NFC_SHRINKS
    tokenizer.normalizer = normalizers.Strip()
    assert max_bytes_per_token(tokenizer) is None


def test_a_tokenizer_with_an_unknown_token_has_no_bound() -> None:
    tokenizer = Counted(Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>")))
    assert tokenizer.max_bytes_per_token is None
    assert encode_text("a" * 1000, tokenizer, 1) == [0]


def test_long_texts_hold_up_nobody(chat_server: RunningServer) -> None:
    """Three prompts of 30 MiB are refused in a moment, and a short one beside them is answered."""
    long = {"prompt": "a" * (30 << 20), "max_tokens": 2}
    start = time.monotonic()
    with ThreadPoolExecutor(4) as clients:
        refused = [clients.submit(chat_server.request, "/v1/completions", long) for _ in range(3)]
        status, _ = chat_server.request("/v1/completions", {"prompt": "a short", "max_tokens": 2})
        answers = [each.result() for each in refused]
    assert status == 200 and time.monotonic() - start < 30  # tokenising one of them takes longer
    assert [each[0] for each in answers] == [400] * 3 and "cannot fit" in str(answers[0][1])


@pytest.mark.parametrize(
    ("fields", "is_long"),
    [
        ({"prompt": "a" * (LONG_TEXT_BYTES + 1)}, True),
        ({"prompt": ["a" * LONG_TEXT_BYTES, "b"]}, True),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a" * (LONG_TEXT_BYTES + 1)}]}]}, True),
        ({"prompt": [1] * (LONG_TEXT_BYTES + 1)}, False),
        ({"prompt": "short"}, False),
    ],
)
def test_which_texts_wait_apart(fields: dict[str, object], is_long: bool) -> None:
    assert is_long_text(SimpleNamespace(**fields)) == is_long
