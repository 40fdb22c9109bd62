"""Events that reach an engine between two decisions of a step; tests/chaos draws such events at random."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from helpers import model_zoo, r_workers
from helpers.processes import TESTS, alive

from fastdecode import LLM, SamplingParams
from fastdecode.engine.engine import LLMEngine

NAME = "llama-gqa"
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)


def make_llm(folder: Path, **settings: Any) -> LLM:
    defaults = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 300, "s_threads": 1, "r_threads": 1}
    return LLM(str(folder), **{**defaults, "kv_cache_memory": "64MiB", "r_workers": "spawn:3", **settings})


def kill(llm: LLM, index: int) -> None:
    """Kill R-worker ``index``, and return once it is dead."""
    pid = r_workers.spawned_pids(llm)[index]
    os.kill(pid, signal.SIGKILL)
    while alive(pid):
        pass


def finish(engine: LLMEngine) -> dict[int, list[int]]:
    """Run to the end, and return the tokens of all requests."""
    found = {}
    while engine.has_unfinished_requests():
        found |= {int(each.request_id): list(each.outputs[0].token_ids) for each in engine.step()}
    return found


@pytest.mark.slow
def test_a_loss_that_is_found_between_two_steps_is_counted(tmp_path: Path) -> None:
    """A drain's moves send releases to R-workers, and so are first to find that one of them is dead."""
    folder = model_zoo.save_model(NAME, tmp_path)
    with make_llm(folder) as llm:
        engine, records = llm.engine, []
        engine.on_step = records.append
        for number, prompt in enumerate(model_zoo.prompts(NAME)):
            engine.add_request(str(number), prompt, GREEDY)
        for _ in range(5):
            engine.step()
        kill(llm, 2)
        assert engine.cycle.tell() == (2,)
        found = finish(engine)
        assert [found[number] for number in range(len(found))] == [
            tokens[:24] for tokens in model_zoo.reference(NAME).tokens
        ]
        assert sum(record.lost_workers for record in records) == 1


@pytest.mark.slow
def test_the_holder_of_a_sequence_whose_second_copy_is_being_made_drains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a loss, an R-worker drains while a second copy of its sequences is made, as in a rolling update.

    Three long sequences have two copies. Copies are made block by block, so that one is under way after a step however
    long the step took.
    """
    monkeypatch.setattr("fastdecode.scheduler.policy.second_copies.MOST_BLOCKS", 1)
    model_zoo.build_model(NAME, max_position_embeddings=2048).save_pretrained(tmp_path)
    settings = {"kv_replicas": 2, "max_model_len": 2048, "enable_prefix_caching": False}
    with make_llm(tmp_path, **settings) as llm:
        engine = llm.engine
        for number in range(3):
            engine.add_request(str(number), {"prompt_token_ids": [number + 1, 7, 9] * 600}, LONG)
        while engine.scheduler.snapshot().prompts or not engine.scheduler.snapshot().decoding:
            engine.step()
        kill(llm, 2)
        for _ in range(20):
            engine.step()
            if transfers := engine.scheduler.snapshot().transfers:
                break
        assert transfers
        engine.drain_r_worker(transfers[0].source)
        assert set(finish(engine)) == {0, 1, 2}


@pytest.mark.slow
def test_every_golden_run_comes_to_its_end() -> None:
    """A seed whose run ends in an error would have no digest."""
    traces = json.loads((TESTS / "golden_traces.json").read_text())
    digests = list(traces["digests"] if isinstance(traces, dict) and "digests" in traces else traces)
    assert None not in digests
