"""Text from tokens: stop strings wherever they fall, and characters that come in pieces."""

from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from fastdecode.api.request import Completion
from fastdecode.api.sampling_params import SamplingParams
from fastdecode.api.text import TextStream
from fastdecode.scheduler import Sequence
from fastdecode.sworker.sampling import SampledToken

MERGES = [("a", "b"), ("ab", "c"), ("b", "a"), ("Ġ", "a"), ("Ã", "©"), ("e", "n"), ("en", "d"), ("ðŁ", "ĺ"), ("ð", "Ł")]
SPECIAL = "<|sep|>"


def make_tokenizer() -> Tokenizer:
    """Return byte-level BPE as in GPT-2: every byte is a token, and a few longer ones cross what tests look for."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in MERGES)]
    merges = [pair for pair in MERGES if pair != ("ðŁ", "ĺ")]
    model = models.BPE({piece: i for i, piece in enumerate(pieces)}, [*merges, ("ðŁ", "ĺ")])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([SPECIAL])
    return tokenizer


TOKENIZER = make_tokenizer()


def ids(*pieces: str) -> list[int]:
    """Return token ids by their spelling in the vocabulary, where a space is Ġ."""
    return [TOKENIZER.get_vocab()[piece] for piece in pieces]


def push_all(stream: TextStream, token_ids: SequenceOf[int]) -> tuple[str | None, list[str]]:
    """Return the stop string that ended the text, if any, and what was visible after each token."""
    seen = []
    for token_id in token_ids:
        stopped = stream.push(token_id)
        seen.append(stream.visible(stopped is not None))
        if stopped is not None:
            return stopped, seen
    return None, seen


def test_a_stop_string_across_token_borders() -> None:
    stopped, seen = push_all(TextStream(TOKENIZER, ["bcd"]), ids("a", "ab", "c", "d", "e"))
    assert (stopped, seen) == ("bcd", ["a", "aa", "aa", "aa"])


def test_a_stop_string_inside_one_token() -> None:
    assert push_all(TextStream(TOKENIZER, ["b"]), ids("d", "abc", "d")) == ("b", ["d", "da"])


@pytest.mark.parametrize("stop", [["c", "ab"], ["ab", "c"], ["bc", "c", "ab"]])
def test_of_several_stop_strings_the_earliest_wins(stop: list[str]) -> None:
    assert push_all(TextStream(TOKENIZER, stop), ids("d", "abc")) == ("ab", ["d", "d"])


@pytest.mark.parametrize(("include", "text"), [(False, "x"), (True, "xend")])
def test_the_stop_string_is_left_out_unless_asked_for(include: bool, text: str) -> None:
    stream = TextStream(TOKENIZER, ["end"], include_stop=include)
    assert push_all(stream, ids("x", "en", "d"))[0] == "end"
    assert stream.text == stream.visible(finished=True) == text


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    stream = TextStream(TOKENIZER, ["aab", "xyz"])
    assert push_all(stream, ids("d", "a", "a", "a", "c", "x", "y"))[1] == [
        "d",
        "d",
        "d",
        "da",
        "daaac",
        "daaac",
        "daaac",
    ]
    assert stream.visible(finished=True) == "daaacxy"


def test_a_character_in_pieces_appears_whole() -> None:
    smile = ids("ðŁ", "ĺ", "Ģ")
    stopped, seen = push_all(TextStream(TOKENIZER), [*ids("a"), *smile, *ids("Ã", "©"), *ids("Ã©")])
    assert (stopped, seen) == (None, ["a", "a", "a", "a😀", "a😀", "a😀é", "a😀éé"])


def test_a_stop_string_may_end_in_a_character_in_pieces() -> None:
    assert push_all(TextStream(TOKENIZER, ["b😀"]), ids("a", "b", "ðŁ", "ĺ", "Ģ"))[0] == "b😀"


@pytest.mark.parametrize(("skip", "text"), [(True, "ab"), (False, f"a{SPECIAL}b")])
def test_special_tokens(skip: bool, text: str) -> None:
    stream = TextStream(TOKENIZER, skip_special=skip)
    push_all(stream, ids("a", SPECIAL, "b"))
    assert stream.text == text


def test_stop_strings_before_min_tokens_stay_in_the_text() -> None:
    """An ignored stop string does not stop later either, but one that is completed later does."""
    params = SamplingParams(temperature=0, min_tokens=4, max_tokens=9, stop=["a", "cd", "xyz"])
    completion = Completion(0, Sequence(0, [1], 9), TextStream(TOKENIZER, params.stop or ()), generator_seed=0)
    for token_id in ids("b", "a", "c", "d", "e", "a", "b"):
        completion.append(SampledToken(token_id), params, frozenset())
        if completion.finish_reason:
            break
    output = completion.output()
    assert (output.text, output.stop_reason, len(output.token_ids)) == ("ba", "cd", 4)
    stream = TextStream(TOKENIZER, params.stop or ())
    assert [stream.push(token_id, may_stop=i > 1) for i, token_id in enumerate(ids("b", "a", "c", "a"))] == [
        None
    ] * 3 + ["a"]
    assert stream.text == "bac"


def test_no_tokens_no_text() -> None:
    assert TextStream(TOKENIZER, ["x"]).visible(finished=True) == ""


def tokens_of(text: str, cuts: SequenceOf[bool]) -> list[int]:
    """Encode ``text`` piecewise where ``cuts`` say so: the same text in other tokens, bytes alone at worst."""
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    spelling = "".join(piece for piece, _ in letters)
    parts, start = [], 0
    for end in range(1, len(spelling) + 1):
        if end == len(spelling) or cuts[end % len(cuts)]:
            parts.append(spelling[start:end])
            start = end
    return [token.id for part in parts for token in TOKENIZER.model.tokenize(part)]


def first_stop(token_ids: list[int], stop: list[str]) -> tuple[int, int] | None:
    """Return naively after which token a stop string is in the decoded text, and where the earliest begins."""
    for count in range(1, len(token_ids) + 1):
        text = TOKENIZER.decode(token_ids[:count])
        whole = text.rstrip("\ufffd")  # The end of an unfinished character is no text yet.
        positions = [whole.find(string) for string in stop if string in whole]
        if positions:
            return count, min(positions)
    return None


ALPHABET = "abcd é😀 "


@given(
    st.text(ALPHABET, max_size=40),
    st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3),
    st.lists(st.booleans(), min_size=1, max_size=11),
)
def test_visible_text_is_the_decoded_text_up_to_the_first_stop(text: str, stop: list[str], cuts: list[bool]) -> None:
    token_ids = tokens_of(text, cuts)
    assert TOKENIZER.decode(token_ids) == text
    stream = TextStream(TOKENIZER, stop)
    stopped, seen = push_all(stream, token_ids)
    found = first_stop(token_ids, stop)
    if found is None:
        assert stopped is None and stream.visible(finished=True) == text
    else:
        count, position = found
        assert len(seen) == count and stopped is not None and text.startswith(stopped, position)
        assert stream.visible(finished=True) == text[:position]
    final = stream.visible(finished=True)
    for earlier, later in zip(["", *seen], [*seen, final], strict=True):
        assert later.startswith(earlier), "text was shown and taken back"


def byte_fallback_tokenizer() -> Tokenizer:
    """Return a tokenizer like SentencePiece's: words begin with ▁, and rare bytes have tokens of their own."""
    vocabulary = {"<unk>": 0, "▁world": 1, "▁Hello": 2, "!": 3} | {f"<0x{byte:02X}>": 4 + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def test_the_space_before_the_first_word_is_kept_after_a_prompt() -> None:
    """Such tokenizers drop a text's own first space, but not that of a continuation."""
    tokenizer = byte_fallback_tokenizer()
    stream = TextStream(tokenizer, prompt_token_ids=[2])
    stream.push(1)
    assert stream.text == " world"


def test_bytes_that_make_no_character_do_not_end_the_stream() -> None:
    """After any tokens at all the stream goes on, and ordinary words after them come out."""
    tokenizer, rng = byte_fallback_tokenizer(), random.Random(0)
    for _ in range(300):
        stream = TextStream(tokenizer)
        for token in [rng.randrange(4, 260) for _ in range(60)] + [1, 3]:
            stream.push(token)
        assert stream.text.endswith("world!")
