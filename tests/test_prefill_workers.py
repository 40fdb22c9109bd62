"""Prompts computed by prefill workers over real sockets have the same tokens, whatever fails."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers import model_zoo, prefill_workers, r_workers
from helpers.engine_checks import assert_nothing_held
from helpers.examples import SEES_ALL
from helpers.prefill_workers import AnyParts
from helpers.processes import PATIENCE_SECONDS

from fastdecode import LLM, SamplingParams
from fastdecode.api.config import EngineConfig
from fastdecode.cluster.wire.handshake import read_security
from fastdecode.core.errors import BackendError
from fastdecode.engine.compose.backends import pool_layout
from fastdecode.kinds.layout import KVLayout

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
SETTINGS = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 512, "kv_cache_memory": "128MiB"}
NAME = "llama-gqa"
GATHERING = ("llama-gqa", "gemma2", "gpt_oss", "bloom")
OVER_SOCKETS = ("gpt_oss", "falcon-40b")
"""Architectures in ``make test``; ``make test-all`` has all. test_prefill_parts.py has every architecture's parts."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that saves each architecture once and returns its folder."""
    root = tmp_path_factory.mktemp("zoo")

    @cache
    def saved(name: str = NAME) -> Path:
        return model_zoo.save_model(name, root / name)

    return saved


def make_llm(folder: Path, addresses: str, **settings: Any) -> LLM:
    return LLM(str(folder), **{**SETTINGS, "s_threads": 1, "r_threads": 1, "prefill_workers": addresses, **settings})


def generate(llm: LLM, prompts: list[list[int]], policy: AnyParts | None = None) -> list[list[int]]:
    """Return the token ids of every prompt, and check that nothing stays behind."""
    if policy:
        llm.engine.scheduler.remote_prompts.policy = policy
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY, use_tqdm=False)
    assert_nothing_held(llm.engine)
    return [list(output.outputs[0].token_ids) for output in outputs]


def expected(name: str = NAME) -> list[list[int]]:
    return [list(tokens[:24]) for tokens in model_zoo.reference(name).tokens]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.thorough] * (name not in OVER_SOCKETS)) for name in model_zoo.ARCHITECTURES],
)
def test_every_architecture_matches_generate(name: str, folder: Any) -> None:
    """All chains of one to three workers compute random parts, and for some architectures also gather all.

    ``make test-all`` has chains of four.
    """
    workers = list(range(4 if SEES_ALL else 3))
    with prefill_workers.threads(folder(name), len(workers)) as addresses:
        for method in ("kvr", "tsp")[: 1 + (name in GATHERING)]:
            with make_llm(folder(name), addresses, prefill_parallel=method) as llm:
                policy = AnyParts(workers)
                assert generate(llm, model_zoo.prompts(name), policy) == expected(name)
                assert len(policy.started_jobs) == len(model_zoo.prompts(name))


@pytest.mark.slow
def test_a_draft_policy_beside_prefill_workers(folder: Any) -> None:
    """The first steps have no row, but sample the first tokens of prompts that prefill workers computed."""
    ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    with (
        prefill_workers.threads(folder(), 2) as addresses,
        make_llm(folder(), addresses, speculative_config=ngram) as llm,
    ):
        policy = AnyParts([0, 1])
        for prompt, tokens in zip(model_zoo.prompts(NAME)[:2], expected(), strict=False):
            assert generate(llm, [prompt], policy) == [tokens]


@pytest.mark.parametrize(
    ("kind", "kv_cache_dtype"),
    [
        pytest.param("inproc:2", "auto", marks=pytest.mark.thorough),
        pytest.param("spawn:2", "int8", marks=pytest.mark.slow),
        pytest.param("tcp", "auto", marks=pytest.mark.thorough),
    ],
)
def test_every_kind_of_r_worker(kind: str, kv_cache_dtype: str, folder: Any) -> None:
    """Prefill workers fill the cache with what the S-worker would have stored."""
    prompts = model_zoo.prompts(NAME)
    with contextlib.ExitStack() as stack:
        addresses = stack.enter_context(prefill_workers.threads(folder(), 2))
        spec = stack.enter_context(r_workers.listening())[1] if kind == "tcp" else kind
        memory = {} if kind == "tcp" else {"kv_cache_memory": "64MiB", "r_threads": 1}
        settings = {**SETTINGS, "kv_cache_memory": None, "s_threads": 1, "kv_cache_dtype": kv_cache_dtype, **memory}
        with LLM(str(folder()), r_workers=spec, prefill_scratch="64MiB", **settings) as llm:
            wanted = generate(llm, prompts)
        with LLM(str(folder()), r_workers=spec, prefill_workers=addresses, **settings) as llm:
            assert generate(llm, prompts, AnyParts([0, 1], seed=3)) == wanted


@pytest.mark.slow
def test_ctrl_c_as_a_prompt_arrives(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that samples the first token is interrupted, and the next one samples it from the same logits."""
    with prefill_workers.threads(folder(), 2) as addresses, make_llm(folder(), addresses) as llm:
        engine = llm.engine
        engine.scheduler.remote_prompts.policy = AnyParts([0, 1])
        run, interrupted = engine.world.s_worker.run, []

        def run_or_interrupt(*arguments: Any) -> Any:
            if arguments[3] and len(interrupted) < 2:
                interrupted.append(list(arguments[3]))
                raise KeyboardInterrupt
            return run(*arguments)

        monkeypatch.setattr(engine.world.s_worker, "run", run_or_interrupt)
        engine.add_request("0", model_zoo.prompts(NAME)[0], GREEDY)
        while engine.has_unfinished_requests():
            with contextlib.suppress(KeyboardInterrupt):
                outputs = engine.step()
        assert len(interrupted) == 2 and interrupted[0] == interrupted[1]
        assert list(outputs[0].outputs[0].token_ids) == expected()[0]


@pytest.mark.thorough
@pytest.mark.slow
def test_spawned_workers_are_killed_again_and_again(folder: Any) -> None:
    """Two of three are killed at random moments while they compute prompts: no request is lost, no token differs."""
    with make_llm(folder(), "spawn:3", prefill_threads=1) as llm:
        policy = llm.engine.scheduler.remote_prompts.policy = AnyParts([0, 1, 2], sizes=(2, 3))
        pids = [client.process_id for client in llm.engine.prefills.backend.clients]
        prompts = model_zoo.prompts(NAME) * 2
        tokens: dict[str, list[int]] = {}
        for number, prompt in enumerate(prompts):
            llm.engine.add_request(str(number), prompt, GREEDY)
        kills = random.Random(1)
        victims = kills.sample(pids, 2)
        while llm.engine.has_unfinished_requests():
            for output in llm.engine.step():
                tokens[output.request_id] = list(output.outputs[0].token_ids)
            if victims and policy.started_jobs and kills.random() < 0.4:
                os.kill(victims.pop(), signal.SIGKILL)
        assert not victims
        assert len(policy.workers) == 1
        assert [tokens[str(number)] for number in range(len(prompts))] == expected() * 2
        assert_nothing_held(llm.engine)
        assert generate(llm, model_zoo.prompts(NAME)) == expected()


@pytest.mark.slow
def test_the_s_worker_computes_what_is_left_when_all_are_gone(folder: Any) -> None:
    with prefill_workers.process(folder()) as (process, address), make_llm(folder(), address) as llm:
        policy = llm.engine.scheduler.remote_prompts.policy = AnyParts([0])
        for number, prompt in enumerate(model_zoo.prompts(NAME)):
            llm.engine.add_request(str(number), prompt, GREEDY)
        tokens: dict[str, list[int]] = {}
        while llm.engine.has_unfinished_requests():
            if process.poll() is None and policy.started_jobs:
                process.kill()
            for output in llm.engine.step():
                tokens[output.request_id] = list(output.outputs[0].token_ids)
        assert [tokens[str(number)] for number in range(len(tokens))] == expected()
        assert policy.workers == []


@pytest.mark.slow
def test_an_aborted_prompt_stops_its_chain(folder: Any) -> None:
    with prefill_workers.threads(folder(), 2) as addresses, make_llm(folder(), addresses) as llm:
        llm.engine.scheduler.remote_prompts.policy = AnyParts([0, 1], sizes=(2,))
        for turn in range(10):
            for number, prompt in enumerate(model_zoo.prompts(NAME)):
                llm.engine.add_request(f"{turn}-{number}", prompt, GREEDY)
            for _ in range(turn % 3):
                llm.engine.step()
            llm.engine.abort_request([f"{turn}-{number}" for number in range(8)])
            assert llm.engine.prefills is not None
            assert not llm.engine.prefills.backend.jobs, "they are told at once, though no step may follow"
            assert_nothing_held(llm.engine)
            llm.engine.step()
            llm.engine.look_around()
        assert generate(llm, model_zoo.prompts(NAME)) == expected()


@pytest.mark.slow
@pytest.mark.parametrize("security", ["encrypt", pytest.param("authenticate", marks=pytest.mark.thorough)])
def test_with_a_key(security: str, folder: Any, tmp_path: Path) -> None:
    """The S-worker, prefill workers and the R-worker use the key on every connection."""
    key = tmp_path / "key"
    key.write_text("0123456789abcdef0123456789abcdef")
    key.chmod(0o600)
    guard = ("--key-file", str(key), "--security", security)
    with (
        prefill_workers.threads(folder(), 2, read_security(str(key), security)) as addresses,
        r_workers.listening(*guard) as (_, r_worker),
    ):
        settings = {"r_workers": r_worker, "kv_cache_memory": None, "r_threads": None}
        guarded = {"key_file": str(key), "security": security}
        with make_llm(folder(), addresses, **settings, **guarded) as llm:
            assert generate(llm, model_zoo.prompts(NAME), AnyParts([0, 1], sizes=(2,))) == expected()
        with pytest.raises(BackendError, match="key"):
            make_llm(folder(), addresses)


@pytest.mark.thorough
@pytest.mark.slow
def test_one_joins_a_running_job(folder: Any) -> None:
    """The new prefill worker gets prompts from then on, also once the first is gone."""
    with (
        prefill_workers.process(folder()) as (first, address),
        make_llm(folder(), address, pool_listen="127.0.0.1:0") as llm,
    ):
        policy = llm.engine.scheduler.remote_prompts.policy = AnyParts([0])
        pool = llm.engine.backend.join_listener.address
        with prefill_workers.process(folder(), "--join", pool, "--listen", "tcp://127.0.0.1:0"):
            deadline = time.monotonic() + PATIENCE_SECONDS
            while policy.workers != [0, 1] and time.monotonic() < deadline:
                assert generate(llm, model_zoo.prompts(NAME)[:2]) == expected()[:2]
            assert policy.workers == [0, 1]
            first.kill()
            policy.sizes = (2,)
            assert generate(llm, model_zoo.prompts(NAME)) == expected()
            assert policy.workers == [1]


@pytest.mark.parametrize(
    ("settings", "port"),
    [
        ({"prefill_workers": "spawn:1"}, "loopback"),
        ({"prefill_workers": "127.0.0.1:1", "r_workers": "127.0.0.1:2"}, "loopback"),
        ({"prefill_workers": "192.0.2.9:1"}, "any"),
        ({"prefill_workers": "spawn:1", "r_workers": "192.0.2.9:1"}, "any"),
        ({"prefill_workers": "spawn:1", "pool_listen": "192.0.2.9:1"}, "any"),
    ],
)
def test_kv_ports_are_open_as_far_as_it_takes(settings: dict[str, str], port: str, tmp_path: Path) -> None:
    layout = KVLayout((), "float32", "float32")
    config = EngineConfig(**settings, key_file=str(tmp_path / "key"))
    assert pool_layout(config, layout).kv_port == port
    assert pool_layout(config, layout, ranks_on_one_machine=False).kv_port == "any"
    assert pool_layout(EngineConfig(), layout).kv_port == ""


def test_another_model_is_refused(folder: Any) -> None:
    with (
        prefill_workers.threads(folder("qwen2"), 1) as address,
        pytest.raises(BackendError, match="another model"),
    ):
        make_llm(folder(), address)


@pytest.mark.slow
def test_a_second_s_worker_is_told_who_is_served(folder: Any) -> None:
    with prefill_workers.threads(folder(), 1) as address:
        with (
            make_llm(folder(), address),
            pytest.raises(BackendError, match="serves another S-worker"),
        ):
            make_llm(folder(), address)
        with make_llm(folder(), address) as llm:  # The first worker has left.
            assert generate(llm, model_zoo.prompts(NAME)[:1]) == expected()[:1]
