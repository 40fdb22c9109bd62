"""Parked prefixes of ranges, of two copies and of MPI jobs give the tokens of ``generate``."""

from __future__ import annotations

import json
import random
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers import model_zoo, mpi_jobs, r_workers
from helpers.engine_checks import assert_nothing_held
from helpers.recorded_texts import greedy_texts

from fastdecode import LLM, SamplingParams
from fastdecode.core.parked import Chain
from fastdecode.scheduler.names import CacheIds, Names
from fastdecode.scheduler.places.workers import Workers
from fastdecode.scheduler.prefix.index import PrefixIndex, extend_hashes
from fastdecode.scheduler.prefix.parked import Parked
from fastdecode.scheduler.prefix.retained import Retained
from fastdecode.scheduler.sequence import Sizes, TokenSequence

NUM_TOKENS, BLOCK, RANGE = 8, 16, 512
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
POSITIONS = {"max_position_embeddings": 4096}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny Llama and return its folder."""
    return model_zoo.save_model("llama-gqa", tmp_path_factory.mktemp("llama"))


@cache
def turns() -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Return prompts of first turns, of second turns, and transformers' answers of the second ones."""
    rng = random.Random(0)
    first = [[rng.randrange(500) for _ in range(length)] for length in (1300, 700, 90)]
    second = [[*prompt, *answer, 5, 6, 7] for prompt, answer in zip(first, _generated(first), strict=True)]
    return first, second, _generated(second)


def _generated(prompts: list[list[int]]) -> list[list[int]]:
    return greedy_texts(model_zoo.build_model("llama-gqa", **POSITIONS), prompts, NUM_TOKENS)


def make_llm(folder: Path, **settings: Any) -> LLM:
    defaults = {
        "device": "cpu",
        "skip_tokenizer_init": True,
        "max_model_len": 2048,
        "s_threads": 1,
        "block_size": BLOCK,
    }
    return LLM(str(folder), **{**defaults, "kv_cache_memory": "32MiB", "hf_overrides": POSITIONS, **settings})


def run(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


PLACES = [
    {"r_workers": "inproc:3", "kv_shard_tokens": RANGE},
    {"r_workers": "inproc:2", "kv_replicas": 2},
    {"r_workers": "inproc:3", "kv_replicas": 2, "kv_shard_tokens": RANGE},
]


@pytest.mark.parametrize("places", PLACES, ids=["ranges", "copies", "both"])
def test_second_turns_go_on_from_disk(folder: Path, tmp_path: Path, places: dict[str, Any]) -> None:
    """Every full block of the first turns is read back, in as many pieces as were parked."""
    first, second, answers = turns()
    settings = {**places, "park_dir": str(tmp_path), "park_after": 0.0}
    with make_llm(folder, **settings) as llm:
        run(llm, first)
    with make_llm(folder, **settings) as llm:
        assert run(llm, second) == answers
        counts, blocks = llm.engine.scheduler.store.parked.counts, [(len(each) - 4) // BLOCK for each in second]
        assert counts.num_tokens == BLOCK * sum(blocks) and counts.num_failed == 0
        pieces = sum(-(-each * BLOCK // RANGE) for each in blocks) if "kv_shard_tokens" in places else len(second)
        assert counts.num_woken == pieces
        assert llm.engine.scheduler.statistics.prefix_hit_tokens == counts.num_tokens
        assert_nothing_held(llm.engine)


def test_chains_of_ranges_are_of_no_use_to_an_engine_that_cuts_elsewhere(folder: Path, tmp_path: Path) -> None:
    first, second, answers = turns()
    settings = {"r_workers": "inproc:1", "park_dir": str(tmp_path), "park_after": 0.0}
    with make_llm(folder, **settings, kv_shard_tokens=RANGE) as llm:
        run(llm, first)
    for elsewhere in ({}, {"kv_shard_tokens": 2 * RANGE}):
        with make_llm(folder, **settings, **elsewhere) as llm:
            assert run(llm, second) == answers
            assert llm.engine.scheduler.store.parked.counts.num_woken == 0


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[tuple[Any, str]]]:
    """Yield three R-workers that listen, with a disk each."""
    with ExitStack() as stack:
        flags = [("--park-dir", str(tmp_path / name), "--park-after", "0") for name in "abc"]
        yield [stack.enter_context(r_workers.listening(*each)) for each in flags]


@pytest.mark.slow
@pytest.mark.parametrize("places", [{"kv_shard_tokens": RANGE}, {"kv_replicas": 2}], ids=["ranges", "copies"])
def test_one_is_killed_while_its_ranges_or_copies_are_read(
    folder: Path, three: list[tuple[Any, str]], places: dict[str, Any]
) -> None:
    """Two copies are read from the other disk, and lost ranges are computed again."""
    first, second, answers = turns()
    settings = {"r_workers": ",".join(address for _, address in three), "kv_cache_memory": None, **places}
    with make_llm(folder, **settings) as llm:
        run(llm, first)
    with make_llm(folder, **settings) as llm:
        llm.engine.look_around()
        parks, asked = llm.engine.parking._parks, []
        wake = parks.wake

        def wake_of_one_that_dies(worker: int, *values: Any) -> Any:
            if not asked:
                three[worker][0].kill()
                three[worker][0].wait()
            asked.append(worker)
            return wake(worker, *values)

        parks.wake = wake_of_one_that_dies
        assert run(llm, second) == answers
        counts = llm.engine.scheduler.store.parked.counts
        assert counts.num_failed == 0 and {*asked} - {asked[0]}
        assert counts.num_woken == 3 if "kv_replicas" in places else counts.num_woken < 6
        assert_nothing_held(llm.engine)


@pytest.mark.thorough
def test_ranks_of_a_job_park_with_flags_of_their_own(folder: Path, tmp_path: Path) -> None:
    """Two jobs use one folder, and the second goes on from what the first job's ranks have parked."""
    first, second, answers = turns()
    program = textwrap.dedent(f"""
        import json, sys
        from pathlib import Path
        from fastdecode import LLM, SamplingParams
        params = SamplingParams(temperature=0, max_tokens={NUM_TOKENS}, ignore_eos=True, detokenize=False)
        prompts = json.loads(Path(sys.argv[1]).read_text())
        with LLM({str(folder)!r}, r_workers="mpi", device="cpu", skip_tokenizer_init=True, max_model_len=2048,
                 block_size={BLOCK}, s_threads=1, hf_overrides={POSITIONS}) as llm:
            outputs = llm.generate([dict(prompt_token_ids=each) for each in prompts], params, use_tqdm=False)
            answers = [list(each.outputs[0].token_ids) for each in outputs]
            print("FOUND", json.dumps([llm.engine.scheduler.store.parked.counts.num_woken, answers]), flush=True)
    """)
    (tmp_path / "job.py").write_text(program)
    found = []
    for turn, prompts in enumerate((first, second)):
        (asked := tmp_path / f"{turn}.json").write_text(json.dumps(prompts))
        ranks = [*mpi_jobs.R_WORKER, "--park-dir", str(tmp_path / "parked"), "--park-after", "0"]
        python = str(Path(r_workers.FASTDECODE).with_name("python"))
        job = mpi_jobs.run((1, [python, str(tmp_path / "job.py"), str(asked)]), (1, ranks))
        assert job.returncode == 0, job.stdout + job.stderr
        found.append(json.loads(job.stdout.split("FOUND", 1)[1].splitlines()[0]))
    assert found[1] == [3, answers]


def test_the_next_range_to_read_is_the_first_that_is_not_cached() -> None:
    """Three ranges of a text are parked on two R-workers, the last one only in part, and are read in order."""
    workers = Workers([400, 400], [1.0, 1.0], Sizes(BLOCK))
    index, ids = PrefixIndex(workers, RANGE), CacheIds()
    kept = Retained(workers, index, ids, Names(False), True)
    parked = Parked(workers, index, ids, kept, RANGE)
    sequence = TokenSequence(0, list(range(1300)), NUM_TOKENS, num_prefill=1300)
    extend_hashes(sequence.block_hashes, sequence.tokens(0, 1300), BLOCK)
    whole, hashes = RANGE // BLOCK, sequence.block_hashes
    parked.chains.add(0, Chain.of(hashes[:whole], BLOCK))
    assert parked.wanted(sequence) is None  # Less than half of the text is parked.
    parked.chains.add(1, Chain.of(hashes[whole : 2 * whole], BLOCK))
    parked.chains.add(0, Chain.of(hashes[2 * whole : 2 * whole + 8], BLOCK))
    read = []
    while beginning := parked.wanted(sequence):
        read.append((beginning.worker, beginning.start, beginning.num_blocks))
        waking = parked.begin(sequence, beginning)
        assert waking is not None and waking.block_hashes == hashes[beginning.start :][: beginning.num_blocks]
        parked.woken(waking, sequence)
    assert read == [(0, 0, whole), (1, whole, whole), (0, 2 * whole, 8)]
    hits = index.longest(sequence, hashes, kept)
    assert max(hit.num_tokens for hit in hits.values()) == 2 * RANGE + 8 * BLOCK
    origins = [prefix.origin for worker in workers for prefix in worker.prefixes.values()]
    assert len({0, *origins}) == 4  # No prefix counts as a copy of another.
