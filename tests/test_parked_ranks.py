"""Parked prefixes of ranks that share a model: each rank has a file of each chain, and reads its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from helpers import r_workers, two_turns
from helpers.engine_checks import assert_nothing_held
from helpers.two_turns import counts

from fastdecode import LLM, SamplingParams
from fastdecode.core.errors import BackendError, WorkerLostError
from fastdecode.core.parked import Chain, Parked, Progress
from fastdecode.tensor_parallel.rank_parking import MemberParks

NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
LENGTHS = (600, 70)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> two_turns.Chats:
    return two_turns.saved_chats(tmp_path_factory.mktemp("parked"), LENGTHS, NUM_TOKENS)


def make_llm(folder: Path, **settings: Any) -> LLM:
    return two_turns.make_llm(folder, **{"tensor_parallel_size": 2, **settings})


def run(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return two_turns.run(llm, prompts, NUM_TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3_next", pytest.param("lfm2", marks=pytest.mark.thorough)])
def test_second_turns_go_on_from_the_disks_of_two_ranks(model_type: str, chats: Any, tmp_path: Path) -> None:
    """A turn goes on from the last token, since the model has states; one that lost a rank's file is computed again."""
    folder, first, second, answers = chats(model_type)
    settings = {"park_dir": str(tmp_path), "park_after": 0.0}
    with make_llm(folder, **settings) as llm:
        run(llm, first)
    files = [sorted(path.stat().st_size for path in (tmp_path / f"rank-{index}").rglob("*.chain")) for index in (0, 1)]
    assert len(files[0]) == len(files[1]) == 2
    [*_, longest] = sorted((tmp_path / "rank-1").rglob("*.chain"), key=lambda path: path.stat().st_size)
    longest.unlink()
    with make_llm(folder, **settings) as llm:
        assert run(llm, second) == answers
        assert (counts(llm).num_woken, counts(llm).num_failed) == (1, 0)
        assert counts(llm).num_tokens == LENGTHS[1] + NUM_TOKENS - 1
        assert_nothing_held(llm.engine)


@pytest.fixture
def four(tmp_path: Path) -> Iterator[list[tuple[Any, str]]]:
    """Yield four R-workers that listen, with a disk each: two of each rank."""
    with ExitStack() as stack:
        flags = [("--park-dir", str(tmp_path / name), "--park-after", "0") for name in "abcd"]
        yield [stack.enter_context(r_workers.listening(*each)) for each in flags]


@pytest.mark.thorough
def test_an_r_worker_of_the_other_rank_is_killed_while_disks_are_read(chats: Any, four: list[tuple[Any, str]]) -> None:
    folder, first, second, answers = chats("qwen3_next")
    settings = {"r_workers": ",".join(address for _, address in four), "kv_cache_memory": None, "r_threads": None}
    with make_llm(folder, **settings) as llm:
        run(llm, first)
    with make_llm(folder, **settings) as llm:
        llm.engine.look_around()
        parks, killed = llm.engine.parking._parks, list[int]()
        wake = parks.wake

        def wake_of_one_that_dies(worker: int, *values: Any) -> Any:
            if not killed:
                four[2 + worker][0].kill()
                four[2 + worker][0].wait()
                killed.append(worker)
            return wake(worker, *values)

        parks.wake = wake_of_one_that_dies
        assert run(llm, second) == answers
        assert killed and counts(llm).num_failed == 0 and counts(llm).num_woken < 2
        assert_nothing_held(llm.engine)


CHAIN = Chain(2, (b"x" * 16,), 0)


class FakeMember:
    """Rank 0 of two, which notes released sequences; ``others`` are the answers of rank 1, in order."""

    def __init__(self, others: list[Any]) -> None:
        self.others, self.released = others, list[int]()
        self.rank = type("Rank", (), {"index": 0, "size": 2})
        self.pool = self
        self.workers = [None]

    def compare(self, do: Any) -> list[Any]:
        answers = [do(), self.others.pop(0)]
        return answers

    def begin_step(self, plan: Any) -> None:
        self.released += plan.workers[0].controls["sequence_id"].tolist()

    def abandon_step(self) -> None:
        pass


class FakeDisk:
    """A disk that gives ``answers`` in order, and raises those that are errors."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    def wake(self, *values: Any) -> Parked:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    park = wake


def _told(progress: Progress, num_tokens: int) -> dict[str, Any]:
    return {"progress": int(progress), "num_tokens": num_tokens, "num_bytes": 10, "dropped": []}


UNDER_WAY, DONE, FAILED = Progress.UNDER_WAY, Progress.DONE, Progress.FAILED


@pytest.mark.parametrize(
    ("own", "others", "found", "released"),
    [
        ([Parked(DONE, 64, 5)], [(UNDER_WAY, 32), (DONE, 64)], [(UNDER_WAY, 32, 15), (DONE, 64, 15)], []),
        ([Parked(UNDER_WAY), Parked(UNDER_WAY, 32)], [(FAILED, 0)], [(FAILED, 0, 10)], [9]),
        ([Parked(FAILED)], [(UNDER_WAY, 32)], [(FAILED, 0, 10)], []),
        (
            [Parked(UNDER_WAY, 32), BackendError("no")],
            [(UNDER_WAY, 32), (DONE, 64)],
            [(UNDER_WAY, 32, 10), (FAILED, 0, 10)],
            [9],
        ),
    ],
    ids=["the other is slower", "the other fails", "this one fails", "this one is refused"],
)  # fmt: skip
def test_all_ranks_have_loaded_a_prefix_or_none_has(own: Any, others: Any, found: Any, released: list[int]) -> None:
    member = FakeMember([_told(*each) for each in others])
    parks = MemberParks(member, FakeDisk(*own))  # type: ignore[arg-type]
    assert [parks.wake(0, 9, 2, CHAIN.name, 2)[:3] for _ in others] == found
    assert member.released == released


def test_a_lost_r_worker_is_told_to_all_ranks() -> None:
    parks = MemberParks(FakeMember([{}]), FakeDisk(WorkerLostError("gone")))  # type: ignore[arg-type]
    with pytest.raises(WorkerLostError):
        parks.wake(0, 9, 2, CHAIN.name, 2)


def test_what_one_rank_drops_is_dropped() -> None:
    names = [bytes([number]) * 16 for number in range(3)]
    told = _told(DONE, 64) | {"dropped": [names[1].hex(), names[2].hex()]}
    parks = MemberParks(FakeMember([told]), FakeDisk(Parked(DONE, 64, 5, (names[0], names[1]))))  # type: ignore[arg-type]
    assert parks.park(0, 9, CHAIN, (), 2) == Parked(DONE, 64, 15, tuple(names))
