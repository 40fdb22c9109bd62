"""The S-worker takes threads from torch while another process keeps a core busy, and gives them back."""

from __future__ import annotations

import multiprocessing
import os
import threading
from pathlib import Path

import pytest
import torch
from helpers import model_zoo

from fastdecode import LLM, SamplingParams
from fastdecode.sworker.run.threads import LOSSES, LOST_SECONDS, REST_SECONDS, SharedCores, openmp_thread_ids

pytestmark = pytest.mark.slow


class Machine:
    """A clock set by hand; a stretch of model code takes ``seconds``, ``lost`` of them off the core."""

    def __init__(self, num_threads: int) -> None:
        self.seconds = self.cpu_seconds = 100.0
        self.used = [num_threads]
        self.cores = SharedCores(
            lambda: self.used[-1], self.used.append, lambda: self.seconds, lambda: self.cpu_seconds
        )

    def run(self, seconds: float, lost: float = 0.0) -> int:
        with self.cores.pinned():
            self.cores.start()
            threads = self.cores.num_threads
            self.seconds += seconds
            self.cpu_seconds += seconds - lost
            self.cores.stop()
        return threads

    def lose(self) -> None:
        """Lose the core as often as a busy process causes it, and no more."""
        for _ in range(LOSSES[0]):
            self.run(0.02, lost=0.01)

    def runs(self, num_threads: int) -> None:
        """Assert that so many threads are in use, and that torch was told so last."""
        assert self.cores.num_threads == self.used[-1] == num_threads


def test_quiet_cores_keep_all_threads() -> None:
    machine = Machine(4)
    for _ in range(100):
        machine.run(0.01, lost=0.9 * LOST_SECONDS)
        machine.run(1.0, lost=0.2)
    assert machine.used == [4]


def test_a_hiccup_costs_nothing() -> None:
    machine = Machine(4)
    for _ in range(20):
        for _ in range(LOSSES[0] - 1):
            machine.run(0.02, lost=0.01)
        for _ in range(LOSSES[1]):
            machine.run(0.01)
    assert machine.used == [4]


def test_a_lost_core_costs_a_thread_for_a_while() -> None:
    machine = Machine(2)
    machine.lose()
    machine.runs(1)
    machine.run(0.5 * REST_SECONDS[0], lost=0.4 * REST_SECONDS[0])  # One thread has no other to wait for.
    machine.runs(1)
    machine.run(0.6 * REST_SECONDS[0])
    assert machine.run(0.01) == 2
    machine.runs(2)


def test_many_threads_lose_few() -> None:
    """One busy core of many must not cost all threads."""
    machine = Machine(64)
    machine.lose()
    machine.runs(56)
    for _ in range(100):
        machine.run(0.001, lost=0.0009)
    machine.runs(56)
    for _ in range(26):
        machine.lose()
    machine.runs(1)


def test_threads_that_were_set_anew_count() -> None:
    machine = Machine(2)
    machine.lose()
    machine.used.append(6)
    machine.lose()
    machine.runs(5)
    machine.run(2.1 * REST_SECONDS[0])
    assert machine.run(0.001) == 6


def test_trials_that_fail_become_rare_and_a_quiet_time_forgives() -> None:
    machine = Machine(2)
    rests = []
    for _ in range(8):
        machine.lose()
        begin = machine.seconds
        while machine.run(0.001) == 1:
            pass
        rests.append(machine.seconds - begin)
    assert rests == pytest.approx([0.25, 0.5, 1, 2, 4, 8, 16, 16], rel=0.05)
    machine.run(2.0)
    machine.lose()
    machine.run(1.1 * REST_SECONDS[0])
    assert machine.run(0.001) == 2


def keep_busy(core: int) -> None:
    os.sched_setaffinity(0, {core})
    while True:
        pass


@pytest.fixture
def busy_neighbour() -> object:
    """Start a process that never leaves the last core of ours."""
    process = multiprocessing.get_context("spawn").Process(target=keep_busy, args=(max(os.sched_getaffinity(0)),))
    process.start()
    yield process
    process.kill()
    process.join()


def test_an_engine_beside_a_busy_process(busy_neighbour: object, tmp_path: Path) -> None:
    """The tokens are the same, in a time that only a hang exceeds."""
    prompts = [{"prompt_token_ids": prompt} for prompt in model_zoo.prompts("llama-gqa")]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    threads = torch.get_num_threads()
    try:
        with LLM(
            str(model_zoo.save_model("llama-gqa", tmp_path)),
            device="cpu", skip_tokenizer_init=True, max_model_len=512, kv_cache_memory="64MiB", s_threads=2,
        ) as llm:  # fmt: skip
            outputs = llm.generate(prompts, params, use_tqdm=False)
    finally:
        torch.set_num_threads(threads)
    expected = [list(tokens[:24]) for tokens in model_zoo.reference("llama-gqa").tokens]
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_each_thread_has_a_core_of_its_own_within_a_step_and_all_cores_after_it() -> None:
    cores = sorted(os.sched_getaffinity(0))
    before = torch.get_num_threads()
    torch.set_num_threads(len(cores))
    try:
        threads = openmp_thread_ids(len(cores))
        assert threads[0] == threading.get_native_id()
        assert set(threads) <= {int(task.name) for task in Path("/proc/self/task").iterdir()}

        def masks() -> list[list[int]]:
            return [sorted(os.sched_getaffinity(thread)) for thread in threads]

        with pytest.raises(RuntimeError), SharedCores().pinned():
            assert masks() == [[core] for core in cores]
            raise RuntimeError
        assert masks() == [cores] * len(cores)
        with SharedCores(lambda: len(cores) - 1).pinned():
            assert masks() == [cores] * len(cores)
    finally:
        torch.set_num_threads(before)
