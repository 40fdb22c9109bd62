"""The journal: a damaged one is read as a beginning of what was written, and engines go on from any step."""

from __future__ import annotations

import os
import random
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.engine_checks import assert_nothing_held
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdecode import LLM, SamplingParams
from fastdecode.api.outputs import RequestOutput
from fastdecode.api.structured_outputs import StructuredOutputsParams
from fastdecode.cli.doctor_journal import check_journal
from fastdecode.core.errors import ConfigError
from fastdecode.core.held import Named, Reached
from fastdecode.journal.past import pasts_of
from fastdecode.journal.pulse import Listening, Pulse
from fastdecode.journal.records import (
    MAGIC,
    Asked,
    Began,
    Chain,
    Dropped,
    Forgot,
    Kept,
    Placed,
    Record,
    Stepped,
    kept_in,
    read,
)

RECORDS: list[Record] = [
    Began("a fingerprint", "a run"),
    Asked(0, "a", "text", [1, 2, 3], {"n": 2, "logit_bias": {5: -1.5}}),
    Stepped([(0, [7]), (1, [8])], [(0, [{7: (-0.25, 1)}])]),
    Asked(2, "b", None, [70000] * 20, {}),
    Stepped([(0, [9, 10]), (1, [11]), (2, [12])], [], [(1, "stop", "é")]),
    Dropped(0),
    Kept("r", 1.5, b"\x00\xff"),
    Kept("s", 2.5, b""),
    Forgot("r"),
    Stepped([(2, [13])], [], [(2, "length", None)]),
]


def written() -> tuple[bytes, list[int]]:
    """Return the bytes of all records, and where each ends."""
    chain, data, ends = Chain(), b"", []
    for record in RECORDS:
        data += chain.encode([record])
        ends.append(len(data))
    return data, ends


def test_what_was_written_is_read() -> None:
    data, _ = written()
    records, chain = read(data)
    assert records == RECORDS and chain.num_bytes == len(data)
    assert data == Chain().encode(RECORDS)
    more = chain.encode([Dropped(2)])
    assert read(data + more)[0] == [*RECORDS, Dropped(2)]


def test_a_torn_tail_is_cut_at_the_last_whole_record() -> None:
    data, ends = written()
    for length in range(len(data)):
        records, chain = read(data[:length])
        assert records == RECORDS[: sum(end <= length for end in ends)]
        assert chain.num_bytes == max((end for end in [len(MAGIC), *ends] if end <= length), default=0)


def test_a_flipped_byte_ends_the_chain_where_it_is() -> None:
    data, ends = written()
    for place in range(len(data)):
        for flip in (0x01, 0x80, 0xFF):
            damaged = bytearray(data)
            damaged[place] ^= flip
            records, _ = read(bytes(damaged))
            assert records == ([] if place < len(MAGIC) else RECORDS[: sum(end <= place for end in ends)])


@given(st.binary(max_size=60), st.integers(0, len(RECORDS)))
@settings(max_examples=200, deadline=None)
def test_foreign_bytes_are_not_read(tail: bytes, count: int) -> None:
    """Records of another place are not read either, though each is whole."""
    data, ends = written()
    start = ends[count - 1] if count else len(MAGIC)
    assert read(data[:start] + tail)[0] in (RECORDS[:count], RECORDS[: count + 1])
    if 0 < count < len(RECORDS) - 1:
        assert read(data[:start] + data[ends[count] :])[0] == RECORDS[:count]


def test_requests_of_records() -> None:
    """Requests that are read from records are written again as they were."""
    pasts = pasts_of(RECORDS[:5])
    assert [past.asked.request_id for past in pasts.values()] == ["a", "b"]
    first, second = pasts.values()
    assert [sample.token_ids for sample in first.samples] == [[7, 9, 10], [8, 11]]
    assert first.samples[1].ended == ("stop", "é") and not first.ended and not second.ended
    again = pasts_of([record for past in pasts.values() for record in past.records()])
    assert again == pasts
    assert list(pasts_of(RECORDS)) == [2] and pasts_of(RECORDS)[2].ended
    assert kept_in(RECORDS) == {"s": Kept("s", 2.5, b"")}
    assert list(kept_in([Kept("a", 1, b""), Kept("b", 2, b""), Kept("a", 3, b"x")])) == ["b", "a"]


def test_what_r_workers_may_have() -> None:
    """R-workers may have a sequence's tokens but the last, under its name and others.

    Rows of a prompt that were not said to be right are excepted. Ended sequences are there under the other names only.
    """
    records = [*RECORDS[:5], Placed([Named(-4, 0, 2), Named(-5, 1, 0)], [Reached(0, 4), Reached(7, 1)])]
    first, second = pasts_of(records).values()
    assert pasts_of([record for past in (first, second) for record in past.records()]) == pasts_of(records)
    assert first.cached_tokens(True) == {
        0: (0, 0, [1, 2, 3, 7]), -4: (0, 2, [1, 2, 3, 7]), -5: (1, 0, [1, 2, 3, 8])
    }  # fmt: skip
    more = [*records, Stepped([(0, [14])], [], [])]
    assert pasts_of(more)[0].cached_tokens(False)[-4] == (0, 2, [1, 2, 3, 7, 9, 10])
    assert second.cached_tokens(False)[2][2] == [70000] * 20
    assert pasts_of(RECORDS[:4])[2].cached_tokens(False)[2][2] == []


PARAMS = [
    SamplingParams(temperature=0, max_tokens=12),
    SamplingParams(temperature=1.0, max_tokens=16),
    SamplingParams(temperature=1.0, n=3, logprobs=2, max_tokens=10),
    SamplingParams(seed=3, max_tokens=16, stop=["r"], presence_penalty=0.5),
    SamplingParams(max_tokens=14, structured_outputs=StructuredOutputsParams(regex="[a-z]{5,9} = [0-9]{3}")),
]
ENGINE: dict[str, Any] = {"s_threads": 1, "r_threads": 1, "kv_cache_memory": "16MiB", "max_model_len": 128}


def ask(llm: LLM) -> None:
    for number in range(2 * len(PARAMS)):
        llm.engine.add_request(str(number), f"def f{number}(x):", PARAMS[number % len(PARAMS)])


def test_the_doctor_looks_at_a_journal(tmp_path: Path) -> None:
    """The journal is missing, empty, whole or torn, with and without a session's sign of life."""

    def said(folder: Path) -> list[tuple[str, str]]:
        return [(each.level, each.what) for each in check_journal(str(folder))]

    assert said(tmp_path / "none") == [("broken", f"journal {tmp_path / 'none'}: no folder")]
    writes = ("ok", f"journal {tmp_path}: can be written, locked and renamed in")
    assert said(tmp_path) == [("note", f"journal {tmp_path}: empty"), writes]
    data, _ = written()
    (tmp_path / "journal").write_bytes(data[:-1])
    pulse = Pulse(str(tmp_path))
    listening = Listening(str(tmp_path))
    while not (tmp_path / "pulse").exists():
        time.sleep(0.01)
    pulse.close()
    assert not listening.is_silent()
    (_, counts), (level, torn), (_, beat), last = said(tmp_path)
    assert "1 requests, of which 0 have ended; 0.0 MiB" in counts and last == writes
    assert level == "note" and re.fullmatch(r"journal: [0-9]+ bytes at its end are no whole records", torn)
    assert "a session's server has it now" in beat
    os.utime(tmp_path / "pulse", (1, 1))
    assert "no session's server has it now" in said(tmp_path)[2][1]
    assert not listening.is_silent() and sorted(each.name for each in tmp_path.iterdir()) == ["journal", "pulse"]


def seen(output: RequestOutput) -> list[Any]:
    """Return all that a user sees of ``output`` except times."""
    return [
        (each.text, list(each.token_ids), each.finish_reason, each.stop_reason, list(each.logprobs or ()))
        for each in output.outputs
    ]


def finish(llm: LLM) -> dict[str, list[Any]]:
    found = {}
    while llm.engine.has_unfinished_requests():
        found |= {output.request_id: seen(output) for output in llm.engine.step() if output.finished}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [{}, {"method": "ngram", "num_speculative_tokens": 3}], ids=["plain", "drafts"])
def test_an_engine_goes_on_from_any_step(tmp_path: Path, drafts: dict[str, Any]) -> None:
    """Another engine goes on from the folder as a killed process leaves it after any step.

    The second engine is stopped as well. After the last one, which ends by itself, nothing is left.
    """
    rng = random.Random(5)
    folder, copy = tmp_path / "journal", tmp_path / "copy"
    with LLM(journal=str(folder), speculative_config=drafts, **ENGINE) as llm:
        ask(llm)
        early = {output.request_id: seen(output) for _ in range(rng.randrange(3, 6)) for output in llm.engine.step()}
        shutil.copytree(folder, copy)
        expected = early | finish(llm)
        size = (folder / "journal").stat().st_size
        assert len(expected) == 2 * len(PARAMS) and len(pasts_of(read((folder / "journal").read_bytes())[0])) == 10
    assert (folder / "journal").stat().st_size < size / 10
    torn = copy / "journal"
    # The file is torn as if the process had died within a write.
    torn.write_bytes(torn.read_bytes()[: -rng.randrange(1, 9)])
    found: dict[str, list[Any]] = {}
    for num_steps in (rng.randrange(2, 6), 1000):
        with LLM(journal=str(copy), speculative_config=drafts, **ENGINE) as llm:
            ask(llm)
            before = sum(len(tokens) for output in found.values() for _, tokens, *_ in output)
            for _ in range(num_steps):
                found |= {output.request_id: seen(output) for output in llm.engine.step()}
                if not llm.engine.has_unfinished_requests():
                    assert_nothing_held(llm.engine)
                    break
            assert sum(len(tokens) for output in found.values() for _, tokens, *_ in output) > before
            llm.engine._requests.journal.close() if num_steps < 1000 else None
    assert found == expected


@pytest.mark.slow
def test_what_is_asked_otherwise_begins_anew(tmp_path: Path) -> None:
    """Another prompt under a known id, another seed and a folder that another engine writes begin anew."""
    folder = str(tmp_path)
    with LLM(journal=folder, **ENGINE) as llm:
        with pytest.raises(ConfigError, match=r"is written by process [0-9]+: give each engine its own"):
            LLM(journal=folder, **ENGINE)
        ask(llm)
        llm.engine.step()
        llm.engine._requests.journal.close()
    with LLM(journal=folder, **ENGINE) as llm:
        llm.engine.add_request("0", "class A", PARAMS[0])
        llm.engine.add_request("1", "def f1(x):", PARAMS[1])
        first, second = (llm.engine.in_flight.family(each)[0] for each in (14, 1))
        assert first.request_id == "0" and len(first.completions[0].sequence.output_token_ids) == 0
        assert second.request_id == "1" and len(second.completions[0].sequence.output_token_ids) == 1
        llm.engine._requests.journal.close()
    with LLM(journal=folder, seed=1, **ENGINE) as llm:
        assert llm.engine._requests.journal.next_sequence_id == 0
    with pytest.raises(ConfigError, match=r"journal: .*File exists"):
        (tmp_path / "file").touch()
        LLM(journal=str(tmp_path / "file"), **ENGINE)
