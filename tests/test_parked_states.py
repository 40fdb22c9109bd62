"""Parked prefixes of models with recurrent layers return from the disk with the states at their ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from helpers import r_workers, two_turns
from helpers.engine_checks import assert_nothing_held
from helpers.tiny_hybrids import random_prompts
from helpers.two_turns import counts

from fastdecode import LLM, SamplingParams
from fastdecode.cluster.r_worker.parking.chain_file import ChainReader
from fastdecode.core.errors import ConfigError

NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
LENGTHS = (600, 70, 33)
"""More tokens than a piece has, and fewer; the first turns end within a block, and the last with one."""


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> two_turns.Chats:
    return two_turns.saved_chats(tmp_path_factory.mktemp("parked"), LENGTHS, NUM_TOKENS)


def make_llm(folder: Path, **settings: Any) -> LLM:
    return two_turns.make_llm(folder, **{"park_after": 0.0, **settings})


def run(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return two_turns.run(llm, prompts, NUM_TOKENS)


@pytest.mark.parametrize(
    "model_type",
    [
        "lfm2",
        pytest.param("qwen3_next", marks=pytest.mark.slow),
        pytest.param("falcon_h1", marks=pytest.mark.slow),
        pytest.param("mamba2", marks=[pytest.mark.slow, pytest.mark.thorough]),
    ],
)
def test_second_turns_go_on_from_the_last_token_of_the_first(model_type: str, chats: Any, tmp_path: Path) -> None:
    """Each chat has one chain with the tokens after its last full block; blocks are empty where no layer attends."""
    folder, first, second, answers = chats(model_type)
    with make_llm(folder, park_dir=str(tmp_path)) as llm:
        run(llm, first)
    paths = list(tmp_path.rglob("*.chain"))
    lengths = sorted(len(prompt) + NUM_TOKENS - 1 for prompt in first)
    assert sorted(_head(path).num_tokens for path in paths) == lengths
    assert all(bool(_head(path).block_bytes) == (model_type != "mamba2") for path in paths)
    with make_llm(folder, park_dir=str(tmp_path)) as llm:
        assert run(llm, second) == answers
        assert (counts(llm).num_woken, counts(llm).num_tokens, counts(llm).num_failed) == (3, sum(lengths), 0)
        assert llm.engine.scheduler.statistics.prefix_hit_tokens == sum(lengths)
    heads = [_head(path) for path in tmp_path.rglob("*.chain")]
    assert sorted(head.num_tokens for head in heads) == [len(each) + NUM_TOKENS - 1 for each in sorted(second, key=len)]


def _head(path: Path) -> Any:
    with ChainReader(path) as reader:
        assert len(list(reader.pieces())) == reader.head.num_pieces
        return reader.head


def test_a_state_where_prompts_part_is_parked_by_itself(chats: Any, tmp_path: Path) -> None:
    """Two chats begin alike, and a third one of the next engine goes on from where they differ."""
    folder, first, _, _ = chats("lfm2")
    alike = first[0][:96]
    three = [[*alike, *each] for each in random_prompts((40, 41, 42))]
    with make_llm(folder, enable_prefix_caching=False, park_after=None) as llm:
        expected = run(llm, three)
    with make_llm(folder, park_dir=str(tmp_path)) as llm:
        assert [run(llm, [each])[0] for each in three[:2]] == expected[:2]
    assert 96 in {_head(path).num_tokens for path in tmp_path.rglob("*.chain")}
    with make_llm(folder, park_dir=str(tmp_path)) as llm:
        assert run(llm, three[2:]) == expected[2:]
        assert counts(llm).num_tokens == llm.engine.scheduler.statistics.prefix_hit_tokens == 96
        assert_nothing_held(llm.engine)


@pytest.mark.slow
def test_a_changed_state_is_refused_and_computed_again(chats: Any, tmp_path: Path) -> None:
    folder, first, second, answers = chats("lfm2")
    with make_llm(folder, park_dir=str(tmp_path)) as llm:
        run(llm, first)
    for path in tmp_path.rglob("*.chain"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    with make_llm(folder, park_dir=str(tmp_path)) as llm:
        assert run(llm, second) == answers
        assert (counts(llm).num_woken, counts(llm).num_failed) == (0, 3)
        assert_nothing_held(llm.engine)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[tuple[Any, str]]]:
    """Yield two R-workers that listen, with a disk each."""
    with ExitStack() as stack:
        flags = [("--park-dir", str(tmp_path / name), "--park-after", "0") for name in "ab"]
        yield [stack.enter_context(r_workers.listening(*each)) for each in flags]


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_an_r_worker_is_killed_while_states_come_from_its_disk(
    replicas: int, chats: Any, pair: list[tuple[Any, str]]
) -> None:
    """A second copy is read from the other disk; without one the tokens are computed again."""
    folder, first, second, answers = chats("lfm2")
    settings = {"r_workers": ",".join(address for _, address in pair), "kv_cache_memory": None}
    settings |= {"park_after": None, "r_threads": None}
    with make_llm(folder, **settings, kv_replicas=replicas) as llm:
        run(llm, first)
    with make_llm(folder, **settings, kv_replicas=replicas) as llm:
        llm.engine.look_around()
        parks, killed = llm.engine.parking._parks, list[int]()
        wake = parks.wake

        def wake_of_one_that_dies(worker: int, *values: Any) -> Any:
            if not killed:
                pair[worker][0].kill()
                pair[worker][0].wait()
                killed.append(worker)
            return wake(worker, *values)

        parks.wake = wake_of_one_that_dies
        assert run(llm, second) == answers
        assert killed and counts(llm).num_failed == 0
        assert counts(llm).num_woken == 3 if replicas == 2 else 0 < counts(llm).num_woken < 3
        assert_nothing_held(llm.engine)


def test_states_at_the_s_worker_are_not_parked(chats: Any, tmp_path: Path) -> None:
    folder = chats("lfm2")[0]
    with pytest.raises(ConfigError, match=r"park_dir: states that the S-worker keeps .* give state_on r"):
        make_llm(folder, park_dir=str(tmp_path), state_on="s")
