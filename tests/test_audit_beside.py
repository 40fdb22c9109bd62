"""Audits beside prefixes that are parked, sessions that continue, and prompts that prefill workers compute."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from helpers import model_zoo, r_workers
from helpers.engine_checks import assert_nothing_held
from helpers.processes import PATIENCE_SECONDS

from fastdecode import SamplingParams
from fastdecode.api.config import EngineConfig
from fastdecode.engine.engine import LLMEngine

PROMPTS = [[(7 * number + 3 * place) % 120 + 1 for place in range(80 + number)] for number in range(4)]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
COPIES = [pytest.param(1, marks=pytest.mark.thorough), 2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny Llama and return its folder."""
    return model_zoo.save_model("llama-gqa", tmp_path_factory.mktemp("llama"))


def make_engine(folder: Path, **settings: Any) -> LLMEngine:
    defaults = {"model": str(folder), "device": "cpu", "skip_tokenizer_init": True, "max_model_len": 256}
    defaults |= {"s_threads": 1, "block_size": 16}
    if ":" not in settings.get("r_workers", "").removeprefix("inproc:"):
        defaults |= {"r_workers": "inproc:2", "r_threads": 1, "kv_cache_memory": "16MiB"}
    return LLMEngine(EngineConfig(**{**defaults, **settings}))


def add(engine: LLMEngine, prompts: list[list[int]] = PROMPTS) -> None:
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, GREEDY)


def run(engine: LLMEngine, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    """Return the tokens of each request of ``engine``."""
    add(engine, prompts)
    found: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        found |= {output.request_id: list(output.outputs[0].token_ids) for output in engine.step()}
    return [found[str(number)] for number in range(len(prompts))]


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[list[int]]:
    """Return the tokens without an audit."""
    engine = make_engine(folder)
    try:
        return run(engine)
    finally:
        engine.close()


def assert_no_alarm(engine: LLMEngine, least: int) -> None:
    changes = engine.membership.changes
    assert changes.audited > least and (changes.faulty, changes.undecided, changes.lost) == ((), 0, 0)


def wait_until_parked(engine: LLMEngine) -> None:
    """Wait until all retained prefixes are on the disk."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while any(not each.is_parked for worker in engine.scheduler.store.workers for each in worker.prefixes.values()):
        engine.look_around()
        if time.monotonic() > deadline:
            raise TimeoutError("a prefix is never parked")


@pytest.mark.parametrize("copies", COPIES)
def test_prefixes_from_a_disk_are_audited(folder: Path, wanted: list[list[int]], tmp_path: Path, copies: int) -> None:
    """A bit of such a prefix that flips in memory is found when the prefix is used again."""
    settings: dict[str, Any] = {"audit": 1.0, "park_dir": str(tmp_path), "park_after": 0.0, "kv_replicas": copies}
    following = [[*prompt, *answer, 5, 6, 7] for prompt, answer in zip(PROMPTS, wanted, strict=True)]
    engine = make_engine(folder, **settings)
    assert run(engine) == wanted
    wait_until_parked(engine)
    engine.close()
    engine = make_engine(folder, **settings)
    try:
        second = run(engine, following)
        assert engine.scheduler.store.parked.counts.num_woken == len(PROMPTS)
        assert_no_alarm(engine, 4 * 20)
        workers = r_workers.pool_of(engine).workers
        victim = next(index for index, each in enumerate(workers) if each._open.sequence_ids())
        # sequences share blocks, where two flips would cancel each other
        workers[victim]._open.flip_bit(workers[victim]._open.sequence_ids()[0], 1, 0, 5)
        assert run(engine, following) == second
        assert engine.membership.changes.faulty == (f"inproc-{victim}",)
        assert_nothing_held(engine)
    finally:
        engine.close()
    engine = make_engine(folder, enable_prefix_caching=False)
    try:
        assert run(engine, following) == second
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("copies", COPIES)
def test_an_engine_that_continues_a_session_audits_kept_sequences(
    folder: Path, wanted: list[list[int]], tmp_path: Path, copies: int
) -> None:
    """The first engine ends without a farewell. Either engine, or both, have an audit."""
    for audits in ((1.0, 1.0), (0.0, 1.0), (1.0, 0.0)):
        with r_workers.listening() as (_, first), r_workers.listening() as (_, second):
            settings: dict[str, Any] = {"r_workers": f"{first},{second}", "kv_replicas": copies, "keep_session": 60.0}
            settings |= {"session": "audited", "journal": str(tmp_path / f"journal {audits}")}
            engine = make_engine(folder, **settings, audit=audits[0])
            add(engine)
            for _ in range(10):
                engine.step()
            assert engine.membership.changes.audited > 40 * audits[0] - 1
            r_workers.pool_of(engine).break_off()
            engine.journal.close()
            engine = make_engine(folder, **settings, audit=audits[1])
            assert engine.journal.was_found
            assert run(engine) == wanted
            changes = engine.membership.changes
            assert changes.audited > 40 * audits[1] - 1
            assert (changes.faulty, changes.undecided, changes.lost) == ((), 0, 0)
            engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("copies", COPIES)
def test_rows_after_prompts_of_prefill_workers_are_audited(folder: Path, wanted: list[list[int]], copies: int) -> None:
    engine = make_engine(folder, audit=1.0, kv_replicas=copies, prefill_workers="spawn:1", prefill_threads=1)
    try:
        assert run(engine) == wanted
        assert_no_alarm(engine, 4 * 20)
    finally:
        engine.close()
