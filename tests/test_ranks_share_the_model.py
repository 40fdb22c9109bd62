"""Tensor parallelism: real ranks over gloo give the tokens that one S-worker gives."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import model_zoo, r_workers, tiny_hybrids
from helpers.examples import SEES_ALL
from helpers.processes import children_of
from helpers.rank_jobs import run_ranks

from fastdecode import LLM, SamplingParams
from fastdecode.api.config import EngineConfig
from fastdecode.core.errors import ConfigError, RankLostError, WorkerLostError
from fastdecode.core.step import Chunk, MiniBatch, ScheduledStep
from fastdecode.core.types import StepReport
from fastdecode.tensor_parallel.rank_messages import Message, read_step, step_message
from fastdecode.tensor_parallel.rank_place import cores_of, find_place, settings_of

PLANNED = ("llama-mha", "llama-gqa", "mistral", "qwen2", "qwen3", "gpt_neox", "phi3", "gemma2", "mixtral", "qwen3_moe")
PLANNED += ("gpt_oss", "llama4_text")
"""Architectures of the zoo for which transformers has a plan."""

SETTINGS: dict[str, Any] = {"device": "cpu", "max_model_len": 512, "kv_cache_memory": "64MiB"}
SETTINGS |= {"s_threads": 1, "r_threads": 1}
SEEN, NUM_TOKENS = (slice(None), 10) if SEES_ALL else (slice(1, None, 2), 6)
"""The part of the zoo's prompts, and of what transformers generates for them, that is compared."""


def job_of(name: str, root: Path, **settings: Any) -> dict[str, Any]:
    folder = root / name
    if not folder.exists():
        model_zoo.save_model(name, folder)
    prompts = model_zoo.prompts(name)[SEEN]
    params = {"max_tokens": NUM_TOKENS}
    return {"folder": str(folder), "prompts": prompts, "params": params, "settings": SETTINGS | settings}


def expected(name: str, num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    """Return what transformers generates for the prompts of ``job_of``."""
    return [list(tokens[:num_tokens]) for tokens in model_zoo.reference(name).tokens[SEEN]]


def tokens_of(result: Any) -> list[list[int]]:
    """Return the tokens of the only completion of each prompt."""
    return [tokens for (tokens,) in result["tokens"]]


@pytest.mark.slow
def test_recurrent_layers_are_whole_on_each_rank(tmp_path: Path) -> None:
    """Each rank has all states; prompts come in chunks, and half of the drafts are wrong."""
    texts, length = tiny_hybrids.random_prompts((70, 1, 30, 29)), {"max_model_len": 256}
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    ways: dict[str, dict[str, Any]] = {
        "qwen3_next": drafts,
        "jamba": {"max_num_batched_tokens": 16, "max_num_seqs": 3},
        "lfm2": {"r_workers": "inproc:2", "num_mini_batches": 2, "kv_replicas": 2},
    }
    wanted = [tiny_hybrids.save_with_texts(tmp_path / name, name, texts, NUM_TOKENS) for name in ways]
    jobs = [
        {"folder": str(tmp_path / name), "prompts": texts, "settings": SETTINGS | length | way}
        for name, way in ways.items()
    ]
    results = run_ranks(2, [job | {"params": {"max_tokens": NUM_TOKENS}} for job in jobs], tmp_path)
    assert [tokens_of(result) for result in results] == wanted
    assert [result["held"] for result in results] == [0] * 3


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_two_ranks_match_generate(tmp_path: Path) -> None:
    """Every planned architecture matches, over 1 to 3 mini-batches and 1 or 2 R-workers; others are refused by name."""
    others = sorted(set(model_zoo.ARCHITECTURES) - set(PLANNED))
    jobs = [
        job_of(name, tmp_path, num_mini_batches=1 + number % 3, r_workers=f"inproc:{1 + number % 2}")
        for number, name in enumerate(PLANNED)
    ]
    heads = {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 16}
    odd = job_of("llama-gqa", tmp_path, load_format="dummy", hf_overrides=heads)
    small = job_of("llama-gqa", tmp_path, kv_cache_memory="64KiB")
    *results, no_plan, uneven, no_room = run_ranks(2, [*jobs, job_of("opt", tmp_path), odd, small], tmp_path)
    for name, result in zip(PLANNED, results, strict=True):
        assert tokens_of(result) == expected(name), name
        assert result["held"] == 0, name
    assert "no plan for opt models" in no_plan["error"]
    assert "2 ranks cannot share the model's 5 heads" in uneven["error"]
    assert "CapacityError: one sequence of max_model_len" in no_room["error"]
    assert all(not getattr(model_zoo.build_model(name), "_tp_plan", None) for name in others)


@pytest.mark.thorough  # Tests above run two ranks.
@pytest.mark.slow
@pytest.mark.timeout(500)
def test_four_ranks(tmp_path: Path) -> None:
    """Two KV heads are shared by four ranks, and prompts attend on the S-worker."""
    job = job_of("llama-gqa", tmp_path, prefill_scratch="16MiB", num_mini_batches=2)
    (result,) = run_ranks(4, [job], tmp_path)
    assert tokens_of(result) == expected("llama-gqa")


@pytest.mark.thorough  # A test above shows that two ranks equal generate.
@pytest.mark.slow
@pytest.mark.timeout(500)
def test_same_as_one_rank(tmp_path: Path) -> None:
    """Samples, logprobs, scores, preemption, prefixes and ranges are those of one S-worker."""
    shared = model_zoo.prompts("llama-gqa")[0]
    prompts = [shared, [*shared[:160], 7, 8], shared[:100]]
    base = job_of("llama-gqa", tmp_path) | {"prompts": prompts}
    sampled = {"temperature": 0.8, "seed": 5, "n": 2, "logprobs": 2, "max_tokens": 10}
    longer = {"max_model_len": 1024, "hf_overrides": {"max_position_embeddings": 1024}}
    jobs = [
        base | {"params": sampled},
        base | {"settings": SETTINGS | {"kv_cache_memory": "640KiB", "max_model_len": 300}},
        base
        | {"settings": SETTINGS | {"r_workers": "inproc:2", "kv_shard_tokens": 512} | longer, "prompts": [shared * 3]},
    ]
    results = run_ranks(2, jobs, tmp_path)
    for job, result in zip(jobs, results, strict=True):
        assert "error" not in result, result
        with LLM(job["folder"], skip_tokenizer_init=True, **job["settings"]) as llm:
            params = SamplingParams(**{"temperature": 0, "ignore_eos": True, "detokenize": False} | job["params"])
            outputs = llm.generate([{"prompt_token_ids": each} for each in job["prompts"]], params, use_tqdm=False)
            assert result["tokens"] == [[list(c.token_ids) for c in output.outputs] for output in outputs]
            np.testing.assert_allclose(result["score"], llm.engine.score(job["prompts"][0]), atol=1e-3)
        assert result["held"] == 0


@pytest.mark.slow
def test_lost_r_workers_and_a_lost_rank(tmp_path: Path) -> None:
    """An R-worker of either rank is killed, and no token changes; a rank is killed, and the job's error names it."""
    job = job_of("llama-gqa", tmp_path)
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    settings = SETTINGS | {"r_workers": "spawn:3", "num_mini_batches": 2, "tensor_parallel_size": 2}
    with LLM(job["folder"], skip_tokenizer_init=True, **settings) as llm:
        (rank,) = children_of(os.getpid(), "tensor_parallel.process")
        victims = {10: children_of(os.getpid(), "r-worker")[0], 25: children_of(rank, "r-worker")[1]}
        steps = [0]

        def kill(record: Any) -> None:
            steps[0] += 1
            if steps[0] in victims:
                os.kill(victims[steps[0]], signal.SIGKILL)

        llm.engine.on_step = kill
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected("llama-gqa", 32)
        assert len(llm.engine.scheduler.snapshot().present) == 1
        llm.engine.on_step = None
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(RankLostError, match=rf"rank 1 \(process {rank} "):
            llm.generate(prompts, params, use_tqdm=False)


@pytest.mark.slow
def test_a_session_outlives_a_lost_rank(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The job ends without a message to rank 0's R-workers, so the next job goes on with what all have kept."""
    job = job_of("llama-gqa", tmp_path)
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False)
    kept = {"session": "s", "keep_session": 60.0, "journal": str(tmp_path / "journal"), "tensor_parallel_size": 2}
    settings = {name: value for name, value in SETTINGS.items() if name not in ("kv_cache_memory", "r_threads")} | kept
    found: dict[str, list[int]] = {}
    with ExitStack() as stack:
        addresses = ",".join(stack.enter_context(r_workers.listening())[1] for _ in range(2))
        for is_first in (True, False):
            with LLM(job["folder"], skip_tokenizer_init=True, r_workers=addresses, **settings) as llm:
                for number, prompt in enumerate(job["prompts"]):
                    llm.engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
                while llm.engine.has_unfinished_requests():
                    found |= {each.request_id: list(each.outputs[0].token_ids) for each in llm.engine.step()}
                    if is_first and min(map(len, found.values())) > 9:
                        (rank,) = children_of(os.getpid(), "tensor_parallel.process")
                        os.kill(rank, signal.SIGKILL)
                        with pytest.raises(RankLostError, match=rf"rank 1 \(process {rank} "):
                            [llm.engine.step() for _ in range(9)]
                        break
    assert [found[str(number)] for number in range(len(job["prompts"]))] == expected("llama-gqa", 32)
    num_known = sum(map(len, job["prompts"])) + 9 * len(job["prompts"])
    (num_kept,) = re.findall("has kept ([0-9]+) tokens of the session", caplog.text)
    assert int(num_kept) >= num_known


@pytest.mark.thorough  # Tests above lose others.
@pytest.mark.slow
def test_the_last_r_worker_of_one_rank_is_lost_at_the_end_of_a_step(tmp_path: Path) -> None:
    """The other rank learns of the loss where it waits for the step's end, so the job ends and no rank waits."""
    job = job_of("llama-gqa", tmp_path)
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False)
    settings = SETTINGS | {"r_workers": "spawn:1", "tensor_parallel_size": 2}
    with LLM(job["folder"], skip_tokenizer_init=True, **settings) as llm:
        (victim,) = children_of(os.getpid(), "r-worker")
        pool = llm.engine.backend.pool  # type: ignore[attr-defined]
        end_step = pool.end_step

        def end_after_its_death() -> StepReport:
            os.kill(victim, signal.SIGKILL)
            return end_step()

        pool.end_step = end_after_its_death
        with pytest.raises(WorkerLostError, match="no other R-worker is left"):
            llm.generate([{"prompt_token_ids": job["prompts"][0]}], params, use_tqdm=False)
    assert not children_of(os.getpid(), "tensor_parallel.process")


def test_steps_survive_the_way() -> None:
    """A step that is sent to other ranks arrives as it was scheduled."""
    chunks = [Chunk(3, 0, 5, [1, 2]), Chunk(4, 1, 700, [9], base=512, reads=((0, 8, 0),), cache_id=11)]
    step = ScheduledStep((MiniBatch.of(chunks), MiniBatch.of([])), (((0, 1, 2, 3), (2, 5, 0, 0)), ()))
    message = Message.decode(step_message(step, True, False, "random").encode())
    found = read_step(message)
    assert message.told["overlap"] is False and message.told["by"] == "random" and found.controls == step.controls
    for mine, theirs in zip(found.mini_batches, step.mini_batches, strict=True):
        assert list(mine) == list(theirs)


BATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
"""Variables of the process that sbatch starts."""


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, None),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}, (1, 1, False)),
        ({"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}, (0, 0, False)),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, (0, 0, True)),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}, (1, 0, False)),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, None),
        ({"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}, None),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0"}, None),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, None),
        (BATCH | {"SLURM_NTASKS": "1"}, None),
        (BATCH | {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}, None),
        (BATCH | {"SLURM_NTASKS": "4"}, None),
        (BATCH | {"SLURM_NTASKS": "4", "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}, None),
        (BATCH | {"SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}, (0, 0, True)),
        (BATCH | {"RANK": "1", "WORLD_SIZE": "2", "SLURM_NTASKS": "4"}, (1, 0, False)),
        ({"RANK": "0", "WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, (1, 0, False)),
    ],
)
def test_who_is_who(environment: dict[str, str], expected: Any) -> None:
    place = find_place(2, environment | {"MASTER_ADDR": "here", "MASTER_PORT": "29500"})
    assert (place and (place.index, place.local_index, place.has_store)) == expected


def test_places_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="torchrun started 3 processes"):
        find_place(2, {"RANK": "0", "WORLD_SIZE": "3"})
    with pytest.raises(ConfigError, match="MASTER_ADDR and MASTER_PORT"):
        find_place(2, {"PMI_RANK": "0", "PMI_SIZE": "2"})


@pytest.mark.thorough
def test_a_launcher_of_one_process_leaves_the_ranks_to_the_engine() -> None:
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    place |= {"MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_RANK": "0"}
    command = [sys.executable, "-m", "fastdecode.cli.main", "generate", "def f(", "--tensor-parallel-size", "2"]
    command += ["--max-tokens", "4", "--temperature", "0", "--kv-cache-memory", "16MiB", "--device", "cpu"]
    done = subprocess.run(command, env=os.environ | place, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and done.stdout.startswith("def f("), done


def test_settings_of_ranks() -> None:
    config = EngineConfig(r_workers="localhost:1,localhost:2", pool_listen="localhost:7000", tensor_parallel_size=2)
    second = settings_of(config, 1, 2, 2)
    assert (second.r_workers, second.pool_listen) == ("localhost:2", "localhost:7001")
    assert cores_of(EngineConfig(tensor_parallel_size=2, s_threads=3), 1, 2).s_threads == 3
    with pytest.raises(ConfigError, match="1 R-workers cannot be dealt to 2 ranks"):
        settings_of(EngineConfig(r_workers="localhost:1", tensor_parallel_size=2), 0, 2, 2)


@pytest.mark.parametrize("settings", [{"r_workers": "mpi"}, {"prefill_workers": "mpi:1"}])
def test_what_is_refused(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(ConfigError, match=f"{name}: an MPI job's ranks serve one S-worker.* give {name} as host:port"):
        EngineConfig(tensor_parallel_size=2, **settings)
