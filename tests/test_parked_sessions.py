"""Sessions go on from disk after a restart with the same tokens; what cannot be read is computed again."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import latent_zoo, model_zoo, r_workers
from helpers.engine_checks import assert_nothing_held
from helpers.processes import PATIENCE_SECONDS
from helpers.scheduler_harness import AMPLE

from fastdecode import LLM, SamplingParams
from fastdecode.api.config import EngineConfig
from fastdecode.core.errors import ConfigError
from fastdecode.core.parked import Chain, Parked, Progress
from fastdecode.scheduler import SCHEDULES, Scheduler, Sequence
from fastdecode.scheduler.prefix.index import extend_hashes
from fastdecode.scheduler.prefix.parked import ParkedChains
from fastdecode.scheduler.sequence import TokenSequence
from fastdecode.server.observer import EngineWatch

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
BLOCK = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny Llama and return its folder."""
    return model_zoo.save_model("llama-gqa", tmp_path_factory.mktemp("llama"))


def make_llm(folder: Path, **settings: Any) -> LLM:
    defaults = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 300, "s_threads": 1, "block_size": BLOCK}
    return LLM(str(folder), **{**defaults, "kv_cache_memory": "64MiB", **settings})


def chats(count: int) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(90) for _ in range(draw.randrange(70, 180))] for _ in range(count)]


def run(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def next_turns(prompts: list[list[int]], answers: list[list[int]]) -> list[list[int]]:
    return [[*prompt, *answer, 5, 6, 7] for prompt, answer in zip(prompts, answers, strict=True)]


def wait_until_parked(llm: LLM) -> None:
    """Wait until all retained prefixes are on the disk."""
    workers = llm.engine.scheduler.store.workers
    _look_around_while(
        llm, lambda: any(not prefix.is_parked for worker in workers for prefix in worker.prefixes.values())
    )


def wait_until_room(llm: LLM) -> None:
    """Wait until the only R-worker has parked what it may soon evict."""
    _look_around_while(llm, lambda: llm.engine.scheduler.store.parked.next_to_park(0, -math.inf) is not None)


def _look_around_while(llm: LLM, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while holds():
        llm.engine.look_around()
        if time.monotonic() > deadline:
            raise TimeoutError("something is never parked")


def crash(llm: LLM) -> None:
    """End the LLM without a chance to park anything."""
    llm.engine.parking = None
    llm.close()


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Return two turns of each chat on one engine: first answers, second prompts, and second answers."""
    with make_llm(folder, enable_prefix_caching=False) as llm:
        first = run(llm, chats(6))
        following = next_turns(chats(6), first)
        return first, following, run(llm, following)


Turns = tuple[list[list[int]], list[list[int]], list[list[int]]]


@pytest.mark.parametrize("kind", ["inproc:2", pytest.param("spawn:2", marks=pytest.mark.slow)])
def test_sessions_go_on_after_all_was_started_anew(folder: Path, tmp_path: Path, undisturbed: Turns, kind: str) -> None:
    settings = {"r_workers": kind, "park_dir": str(tmp_path), "park_after": 0.0}
    llm = make_llm(folder, **settings)
    assert run(llm, chats(6)) == undisturbed[0]
    wait_until_parked(llm)
    crash(llm)
    with make_llm(folder, **settings) as llm:
        assert run(llm, undisturbed[1]) == undisturbed[2]
        counts = llm.engine.scheduler.store.parked.counts
        assert (counts.num_woken, counts.num_failed) == (6, 0)
        assert counts.num_tokens == sum((len(each) - 4) // BLOCK * BLOCK for each in undisturbed[1])
        # Sequences run where their prefixes were woken.
        assert llm.engine.scheduler.statistics.prefix_hit_tokens == counts.num_tokens
        (watch := EngineWatch("m")).attach(llm.engine)
        text = watch.metrics.text().decode()
        assert f'prefix_cache_level_hits_total{{level="disk",model_name="m"}} {counts.num_tokens:.1f}' in text
        assert 'prefix_cache_level_hits_total{level="ram",model_name="m"} 0.0' in text
        assert text.count("fastdecode:r_worker_parked_bytes{") == llm.engine.config.num_r_workers
        assert run(llm, undisturbed[1]) == undisturbed[2] and counts.num_woken == 6  # The prefixes come from memory.
        assert_nothing_held(llm.engine)
        assert run(llm, undisturbed[1]) == undisturbed[2] and counts.num_woken == 6  # The weights may differ.


@pytest.mark.slow
def test_latents_that_r_workers_absorb(tmp_path: Path) -> None:
    """The weights that R-workers absorb belong neither to what is parked nor to a block."""
    latent_zoo.build_model("deepseek_v3").save_pretrained(folder := tmp_path / "model")
    settings = {"latent_absorption": "r", "park_dir": str(tmp_path / "parked"), "park_after": 0.0}
    with make_llm(folder, latent_absorption="r", enable_prefix_caching=False) as llm:
        first = run(llm, chats(2))
        wanted = run(llm, following := next_turns(chats(2), first))
    llm = make_llm(folder, **settings)
    assert run(llm, chats(2)) == first
    wait_until_parked(llm)
    crash(llm)
    with make_llm(folder, **settings) as llm:
        assert run(llm, following) == wanted
        assert llm.engine.scheduler.store.parked.counts.num_woken == 2


@pytest.mark.parametrize("num_running", [0, 3, 40])
def test_a_sequence_starts_on_the_r_worker_that_woke_its_prefix(num_running: int) -> None:
    """The sequence starts where its prefix lies, beside ``num_running`` others, though the other R-worker is idle."""
    limits = replace(
        AMPLE, num_blocks=(1 << 20,) * 2, bandwidths=(1.0,) * 2, prefix_caching=True, max_num_batched_tokens=1 << 14,
        max_num_seqs=100,
    )  # fmt: skip
    scheduler = Scheduler(SCHEDULES["stall-free"], limits)
    store = scheduler.store
    for number in range(2 * num_running):
        scheduler.add(Sequence(number, [number] * 200, 2000))
    scheduler.commit(scheduler.schedule())
    for sequence in store.residents.on(1):
        scheduler.finish(sequence)
    assert [each.num_sequences for each in store.workers] == [num_running, 0]
    late = Sequence(999, [999] * 200, 1000)
    scheduler.add(late)
    hashes: list[bytes] = []
    extend_hashes(hashes, late.prompt_token_ids, BLOCK)
    store.parked.chains.add(0, Chain.of(hashes[:12], BLOCK))
    scheduler.queue.set_aside(late)
    beginning = store.parked.wanted(late)
    assert beginning
    waking = store.parked.begin(late, beginning)
    assert waking
    store.parked.woken(waking, late)
    scheduler.queue.come_back(late)
    scheduler.schedule()
    assert late.worker == 0 and scheduler.statistics.prefix_hit_tokens == 12 * BLOCK


def test_an_end_in_order_parks_what_is_left(folder: Path, tmp_path: Path, undisturbed: Turns) -> None:
    with make_llm(folder, park_dir=str(tmp_path)) as llm:
        assert run(llm, chats(6)) == undisturbed[0] and not list(tmp_path.rglob("*.chain"))
    other_rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    with make_llm(folder, park_dir=str(tmp_path), hf_overrides=other_rope) as llm:
        assert run(llm, undisturbed[1]) != undisturbed[2] and not llm.engine.scheduler.store.parked.counts.num_woken
    with make_llm(folder, park_dir=str(tmp_path)) as llm:
        assert run(llm, undisturbed[1]) == undisturbed[2] and llm.engine.scheduler.store.parked.counts.num_woken == 6


def test_a_wrong_file_is_computed_again(folder: Path, tmp_path: Path, undisturbed: Turns) -> None:
    settings = {"park_dir": str(tmp_path), "park_after": 0.0}
    with make_llm(folder, **settings) as llm:
        run(llm, chats(6))
    for number, path in enumerate(sorted(tmp_path.rglob("*.chain"))):
        data = bytearray(path.read_bytes())
        data[(-1 - number) * 10] ^= 1 << number
        path.write_bytes(data[:-1] if number == 5 else data)
    with make_llm(folder, **settings) as llm:
        assert run(llm, undisturbed[1]) == undisturbed[2]
        counts = llm.engine.scheduler.store.parked.counts
        assert (counts.num_woken, counts.num_failed) == (0, 5)  # The sixth file was not even listed.
        assert_nothing_held(llm.engine)


@pytest.mark.slow
def test_where_room_is_short_prefixes_are_parked_before_they_are_evicted(folder: Path, tmp_path: Path) -> None:
    """Chats take four times the cache of 30 blocks, and those that reached the disk come back."""
    prompts = chats(10)
    with make_llm(folder) as llm:
        first = run(llm, prompts)
        second = run(llm, following := next_turns(prompts, first))
        num_bytes = 30 * BLOCK * llm.engine.s_model.layout.kv_bytes_per_token
    with make_llm(folder, kv_cache_memory=num_bytes, max_num_seqs=2, park_dir=str(tmp_path), park_after=1000.0) as llm:
        for prompt, answer in zip(prompts, first, strict=True):
            assert run(llm, [prompt]) == [answer]
            wait_until_room(llm)
        assert run(llm, following) == second
        counts = llm.engine.scheduler.store.parked.counts
        assert counts.num_woken >= 1 and counts.num_failed == 0
        assert_nothing_held(llm.engine)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[list[tuple[Any, str]]]:
    """Yield two R-workers that listen, with a disk each."""
    flags = [("--park-dir", str(tmp_path / name), "--park-after", "0") for name in "ab"]
    with r_workers.listening(*flags[0]) as first, r_workers.listening(*flags[1]) as second:
        yield [first, second]


@pytest.mark.slow
def test_an_r_worker_that_is_lost_with_what_it_parked(
    folder: Path, tmp_path: Path, two: list[tuple[Any, str]], undisturbed: Turns
) -> None:
    """An R-worker is killed while sequences wait for its disk.

    They are computed on the other R-worker, and the disk is found again when the first comes back.
    """
    spec = ",".join(address for _, address in two)
    llm = make_llm(folder, r_workers=spec, kv_cache_memory=None)
    assert run(llm, chats(6)) == undisturbed[0]
    wait_until_parked(llm)
    crash(llm)
    with make_llm(folder, r_workers=spec, kv_cache_memory=None) as llm:
        llm.engine.look_around()
        on_disks = len(llm.engine.scheduler.store.parked.chains)
        assert on_disks == 6
        two[0][0].kill()
        two[0][0].wait()
        assert run(llm, undisturbed[1]) == undisturbed[2]
        assert 0 < llm.engine.scheduler.store.parked.counts.num_woken < 6
        assert_nothing_held(llm.engine)


def test_a_request_that_leaves_while_its_prefix_is_read(folder: Path, tmp_path: Path, undisturbed: Turns) -> None:
    with make_llm(folder, park_dir=str(tmp_path)) as llm:
        run(llm, chats(6))
    with make_llm(folder, park_dir=str(tmp_path)) as llm:
        engine = llm.engine
        disk = engine.backend.workers[0].disk
        wake, asked = disk.wake, []
        disk.wake = lambda *args: (asked.append(args), Parked(Progress.UNDER_WAY))[1]
        for name, prompt in enumerate(undisturbed[1][:2]):
            engine.add_request(str(name), {"prompt_token_ids": prompt}, GREEDY)
        assert engine.step() == [] and engine.scheduler.queue.num_aside == 2 and asked
        engine.abort_request("0")
        disk.wake = wake
        while engine.has_unfinished_requests():
            [output] = engine.step() or [None]
        assert output is not None and list(output.outputs[0].token_ids) == undisturbed[2][1]
        assert engine.scheduler.store.parked.counts.num_woken == 2  # The first sequence was woken all the same.
        assert_nothing_held(engine)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"park_dir": "x", "enable_prefix_caching": False}, "enable_prefix_caching=False"),
        ({"park_dir": "x", "r_workers": "127.0.0.1:1"}, "park_dir: this process does not start these R-workers"),
        ({"park_after": 5.0}, "park_after: there is no folder to park in"),
        ({"park_bytes": "1GiB"}, "park_bytes: there is no folder to park in"),
        ({"park_dir": "x", "park_after": -1.0}, "park_after must be 0 to"),
        ({"park_dir": "x", "park_bytes": "much"}, "park_bytes must be a positive number of bytes"),
    ],
)
def test_what_is_not_parked_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings)


def test_the_longest_beginning_is_found() -> None:
    """The search agrees with a look at every chain, for texts of three words that begin alike in all ways."""
    draw, kept = random.Random(1), ParkedChains(BLOCK, whole=False)
    naive: dict[tuple[int, bytes], list[bytes]] = {}
    for _ in range(300):
        hashes: list[bytes] = []
        tokens = [token for _ in range(draw.randrange(1, 5)) for token in [draw.randrange(3)] * draw.choice([16, 256])]
        extend_hashes(hashes, tokens, BLOCK)
        worker, chain = draw.randrange(3), Chain.of(hashes, BLOCK)
        asked = [0, 1, 2][draw.randrange(2) :]
        deepest = max(
            (sum(1 for each, other in zip(hashes, held, strict=False) if each == other)
             for (holder, _), held in naive.items() if holder in asked
             if (shared := sum(each == other for each, other in zip(hashes, held, strict=False)))
             and (shared % 32 == 0 or shared == len(held))),
            default=0,
        )  # fmt: skip
        found = kept.longest(TokenSequence(0, [*tokens, 0], 1, num_prefill=len(tokens) + 1), hashes, 0, asked)
        assert (found.num_blocks if found else 0) >= deepest - 31 and (found is None or found.worker in asked)
        if found:
            held = naive[found.worker, found.chain.name]
            assert held[: found.num_blocks] == hashes[: found.num_blocks]
            assert found.num_blocks % 32 == 0 or found.num_blocks == len(held)
        if draw.random() < 0.3 and naive:
            gone = draw.choice(sorted(naive))
            kept.remove(*gone)
            del naive[gone]
        kept.add(worker, chain)
        naive[worker, chain.name] = hashes
    for worker in range(3):
        kept.forget(worker)
    assert not len(kept) and not kept._by_mark
