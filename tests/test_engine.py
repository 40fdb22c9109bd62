"""The engine under good and bad use: refusals, failures of single requests, and nothing left behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from helpers import model_zoo
from helpers.engine_checks import assert_nothing_held

from fastdecode import LLM, SamplingParams
from fastdecode.api.config import EngineConfig
from fastdecode.core.errors import CapacityError, ConfigError, RequestError
from fastdecode.core.metrics import StepRecord
from fastdecode.engine.engine import LLMEngine

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny Llama and return its folder."""
    return model_zoo.save_model("llama-gqa", tmp_path_factory.mktemp("llama"))


def make_engine(folder: Path, **settings: Any) -> LLMEngine:
    """Return a small engine over one R-worker."""
    defaults = {
        "device": "cpu",
        "skip_tokenizer_init": True,
        "max_model_len": 300,
        "kv_cache_memory": "64MiB",
        "s_threads": 1,
    }
    return LLMEngine(EngineConfig(model=str(folder), **{**defaults, **settings}))


@pytest.fixture(scope="module")
def shared_engine(folder: Path) -> Any:
    """Yield an engine for tests that leave it as it was."""
    engine = make_engine(folder)
    yield engine
    engine.close()


@pytest.fixture
def engine(folder: Path) -> Any:
    """Yield an engine that must hold no block when the test ends."""
    engine = make_engine(folder)
    yield engine
    assert_nothing_held(engine)
    engine.close()


def drain(engine: LLMEngine) -> dict[str, list[int]]:
    """Run to the end, and return token ids by request."""
    tokens = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
    return tokens


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt is empty"),
        ({"prompt_token_ids": []}, "prompt is empty"),
        ([1, 2, 512], "prompt token id 512 is outside the vocabulary: it must be in 0…511"),
        ([-1], "prompt token id -1 is outside"),
        ([1.5], "whole numbers"),
        (list(range(300)), "prompt has 300 tokens, and max_model_len is 300: it must be at most 299"),
        ("text", "the tokenizer was not loaded"),
        ({"text": "a"}, 'a key "prompt" or "prompt_token_ids"'),
        (7, "must be a list of whole numbers"),
        (b"abc", "must be text or token ids, not bytes: decode it to text"),
    ],
)
def test_bad_prompt_is_refused_and_others_go_on(shared_engine: LLMEngine, prompt: Any, message: str) -> None:
    """A bad prompt gives one clear line, and earlier and later requests run."""
    engine = shared_engine
    engine.add_request("good", [1, 2, 3], GREEDY)
    with pytest.raises(RequestError, match=message) as refusal:
        engine.add_request("bad", prompt, GREEDY)
    assert "\n" not in str(refusal.value)
    assert list(drain(engine)) == ["good"]
    assert_nothing_held(engine)


def test_ids_of_running_requests_are_taken(engine: LLMEngine) -> None:
    """An id is refused while its first request runs, and free afterwards."""
    engine.add_request("a", [1, 2], GREEDY)
    with pytest.raises(RequestError, match="already in use"):
        engine.add_request("a", [1, 2], GREEDY)
    drain(engine)
    engine.add_request("a", [1, 2], GREEDY)
    drain(engine)


def test_cache_too_small_for_one_sequence_says_how_much_it_takes(folder: Path) -> None:
    """The error names the memory and the length that would work."""
    with pytest.raises(CapacityError, match=r"300 tokens takes .* GiB.*--kv-cache-memory \d+MiB.*--max-model-len \d+"):
        make_engine(folder, kv_cache_memory=100_000)


def test_more_memory_than_the_machine_has_is_refused(folder: Path) -> None:
    """The error comes before anything is loaded."""
    with pytest.raises(ConfigError, match="kv_cache_memory: 900TiB is more than this machine's"):
        make_engine(folder, kv_cache_memory="900TiB")


def test_abort_in_prompt_and_in_decode(folder: Path) -> None:
    """Aborted requests leave nothing, and the others' tokens are unchanged."""
    engine = make_engine(folder, max_num_batched_tokens=16, max_num_seqs=8)
    prompts = model_zoo.prompts("llama-gqa")
    for i in range(4):
        engine.add_request(str(i), prompts[i], GREEDY)
    for _ in range(3):
        engine.step()
    engine.abort_request(["0", "2", "unknown"])
    expected = model_zoo.reference("llama-gqa").tokens
    assert drain(engine) == {str(i): list(expected[i][:16]) for i in (1, 3)}
    assert_nothing_held(engine)
    engine.close()


def test_failed_step_leaves_the_engine_usable(folder: Path) -> None:
    """After an exception within the model the requests can be aborted, and new ones run."""
    engine = make_engine(folder, num_mini_batches=2)
    prompts, expected = model_zoo.prompts("llama-gqa"), model_zoo.reference("llama-gqa").tokens
    engine.add_request("a", prompts[2], GREEDY)
    engine.add_request("b", prompts[3], GREEDY)
    engine.step()
    broken = engine.s_model.model.model.layers[1].mlp
    handle = broken.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("out of luck")))
    with pytest.raises(RuntimeError, match="out of luck"):
        engine.step()
    handle.remove()
    assert drain(engine) == {"a": list(expected[2][:16]), "b": list(expected[3][:16])}
    assert_nothing_held(engine)
    engine.close()


def test_a_step_that_fails_after_its_prompts_were_kept_is_tried_again(folder: Path) -> None:
    """The S-worker's cache of prompts is then a step ahead of the scheduler."""
    engine = make_engine(folder, prefill_scratch="1MiB", max_num_batched_tokens=16, max_num_seqs=8)
    prompt = model_zoo.prompts("llama-gqa")[3]
    engine.add_request("b", prompt, GREEDY)
    engine.step()
    sample = engine.world.s_worker._sample
    engine.world.s_worker._sample = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.step()
    engine.world.s_worker._sample = sample
    assert len(prompt) > 16
    assert drain(engine) == {"b": list(model_zoo.reference("llama-gqa").tokens[3][:16])}
    assert_nothing_held(engine)
    engine.close()


def test_nan_logits_fail_one_request_only(engine: LLMEngine) -> None:
    """A poisoned embedding ends its request with "error"; the other request gets its tokens."""
    prompts, expected = model_zoo.prompts("llama-gqa"), model_zoo.reference("llama-gqa").tokens
    weights = engine.s_model.model.get_input_embeddings().weight
    poison = next(t for t in range(512) if t not in prompts[2] and t not in expected[2])
    weights.data[poison] = float("nan")
    engine.add_request("bad", [poison, 1, 2], GREEDY)
    engine.add_request("good", prompts[2], GREEDY)
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output.outputs[0] for output in engine.step()}
    assert outputs["bad"].finish_reason == "error"
    assert list(outputs["good"].token_ids) == list(expected[2][:16])
    assert outputs["good"].finish_reason == "length"


def test_stop_token_and_end_of_text(engine: LLMEngine) -> None:
    """A stop token is the text's last token, and min_tokens holds it back."""
    prompt, tokens = model_zoo.prompts("llama-gqa")[2], model_zoo.reference("llama-gqa").tokens[2]
    stop = tokens[5]
    first = list(tokens).index(stop)
    engine.add_request("a", prompt, SamplingParams(temperature=0, stop_token_ids=[stop], detokenize=False))
    while engine.has_unfinished_requests():
        output = engine.step()[0].outputs[0]
    assert list(output.token_ids) == list(tokens[: first + 1])
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)


def test_n_samples_share_the_prompts_blocks(folder: Path) -> None:
    """Four samples share the prompt's whole blocks, differ, and each equals itself alone by its seed."""
    engine = make_engine(folder, block_size=16)
    prompt = model_zoo.prompts("llama-gqa")[0]
    params = SamplingParams(temperature=1.0, n=4, seed=7, max_tokens=20, ignore_eos=True, detokenize=False)
    engine.add_request("a", prompt, params)
    most_used, texts = 0, []
    while engine.has_unfinished_requests():
        outputs = engine.step()
        most_used = max(most_used, engine.backend.blocks_used)
        texts = [completion.token_ids for completion in outputs[0].outputs] if outputs else texts
    shared = len(prompt) // 16
    assert most_used <= shared + 4 * (-(-(len(prompt) + 19) // 16) - shared)
    assert len(set(texts)) == 4
    assert_nothing_held(engine)
    engine.add_request("b", prompt, params)
    engine.add_request("c", prompt[:50], params)
    again: dict[str, list] = {}
    while engine.has_unfinished_requests():
        again |= {out.request_id: [completion.token_ids for completion in out.outputs] for out in engine.step()}
    assert again["b"] == texts
    engine.close()


def test_breakdown_adds_up(folder: Path) -> None:
    """s + wait + host equals the wall time in every step, and the R-worker was seen at work."""
    engine = make_engine(folder, num_mini_batches=2)
    records: list[StepRecord] = []
    engine.on_step = records.append
    for i, prompt in enumerate(model_zoo.prompts("llama-gqa")):
        engine.add_request(str(i), prompt, GREEDY)
    drain(engine)
    assert sum(record.num_output_tokens for record in records) == 8 * 16
    for record in records:
        assert record.wall_seconds == pytest.approx(record.s_seconds + record.wait_seconds + record.host_seconds)
        assert 0 < record.r_seconds[0] < record.wall_seconds
    engine.close()


@pytest.mark.slow
def test_memory_does_not_grow_with_requests(folder: Path) -> None:
    """After 2,000 short requests the resident memory is at most 2 % above that after 500."""
    engine = make_engine(folder, max_num_seqs=64)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)
    resident = {}
    for count in range(1, 2001):
        engine.add_request(str(count), [count % 512, 1, 2, 3], params)
        if count % 50 == 0:
            drain(engine)
            resident[count] = psutil.Process().memory_info().rss
    assert resident[2000] <= resident[500] * 1.02
    assert_nothing_held(engine)
    engine.close()


def test_interrupted_generate_leaves_nothing(folder: Path) -> None:
    """Ctrl-C in the middle of a forward leaves the LLM empty, and it works again."""
    with LLM(str(folder), skip_tokenizer_init=True, max_model_len=300, s_threads=1) as llm:
        calls = iter(range(100))

        def interrupt(*_: Any) -> None:
            if next(calls) == 7:
                raise KeyboardInterrupt

        handle = llm.engine.s_model.model.model.layers[1].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1, 2, 3], [4, 5]], GREEDY, use_tqdm=False)
        handle.remove()
        assert not llm.engine.has_unfinished_requests()
        assert_nothing_held(llm.engine)
        tokens = llm.generate(model_zoo.prompts("llama-gqa")[2], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        assert list(tokens) == list(model_zoo.reference("llama-gqa").tokens[2][:16])
        assert torch.is_inference_mode_enabled() is False


@pytest.mark.parametrize("moment", ["begin_step", "end_step"])
def test_interrupt_at_a_steps_edge_leaves_nothing(folder: Path, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGINT while a step opens or ends on the R-workers is delivered when nothing is half done."""
    with LLM(str(folder), device="cpu", skip_tokenizer_init=True, max_model_len=300, s_threads=1) as llm:
        backend, original = llm.engine.backend, getattr(llm.engine.backend, moment)

        def interrupted(*arguments: Any) -> Any:
            result = original(*arguments)
            monkeypatch.setattr(backend, moment, original)
            signal.raise_signal(signal.SIGINT)
            return result

        monkeypatch.setattr(backend, moment, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([list(range(40))], GREEDY, use_tqdm=False)
        assert_nothing_held(llm.engine)
        assert len(llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 16


def test_a_failed_start_gives_the_cores_back(folder: Path) -> None:
    """The thread was pinned for the S-worker; after the error about memory it has its cores again."""
    before = os.sched_getaffinity(0)
    with pytest.raises(CapacityError):
        make_engine(folder, s_cores=str(min(before)), kv_cache_memory="64KiB")
    assert os.sched_getaffinity(0) == before


def test_idle_and_closed_engines_say_so(engine: LLMEngine) -> None:
    """A step of an idle engine does nothing, and a closed engine refuses requests."""
    assert engine.step() == []
    other = LLMEngine(engine.config)
    other.close()
    with pytest.raises(RequestError, match="the engine is closed"):
        other.add_request("a", [1], GREEDY)


def test_a_scheduler_that_replaces_another_is_told_of_everything(folder: Path) -> None:
    """The new scheduler also knows which R-workers are to go, and begins no sequence there."""
    engine = make_engine(folder, r_workers="inproc:2", max_num_seqs=4)
    try:
        scheduler = engine.scheduler.with_limits(engine.scheduler.limits)
        engine.replace_scheduler(scheduler)
        engine.drain_r_worker(0)
        for number in range(4):
            engine.add_request(str(number), [1, 2, 3], GREEDY)
        engine.step()
        assert scheduler.snapshot().present == [1] and scheduler.snapshot().r_workers[1].num_sequences == 4
        assert {len(tokens) for tokens in drain(engine).values()} == {16}
        assert_nothing_held(engine)
    finally:
        engine.close()
