"""Audits (``--audit``): an R-worker that computes wrong is named and dropped, and one that computes right never is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from helpers import latent_zoo, model_zoo, r_workers, sparse_zoo, tiny_hybrids
from helpers.engine_checks import assert_nothing_held
from helpers.examples import SEES_ALL

from fastdecode import LLM, SamplingParams
from fastdecode._rworker import supported_isas
from fastdecode.cluster.pool.auditing import RandomAudit
from fastdecode.cluster.pool.inproc import InprocWorker
from fastdecode.cluster.pool.worker import Joined
from fastdecode.cluster.r_worker.faults import Faults, FaultyRWorker
from fastdecode.cluster.r_worker.host import RWorkerSize
from fastdecode.core.errors import ConfigError, WorkerLostError
from fastdecode.core.metrics import PoolChanges
from fastdecode.kinds import Dense
from fastdecode.kinds.layout import KVLayout

NAME = "llama-gqa"
NUM_TOKENS = 64
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
COPIES: dict[str, Any] = {"r_workers": "inproc:2", "kv_replicas": 2}
LAYOUT = KVLayout((Dense(4, 2, 32, 32, 0.1),) * 2, "float32", "float32", isa="scalar")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny Llama that takes long texts, and return its folder."""
    model = model_zoo.build_model(NAME, max_position_embeddings=4096)
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    return folder


def make_llm(folder: Path, **settings: Any) -> LLM:
    defaults = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 256, "s_threads": 1, "r_threads": 1}
    defaults |= {"kv_cache_memory": "16MiB", "r_workers": "inproc:2", "audit": 1.0, "block_size": 16}
    # R-workers at an address have their own settings.
    if ":" in settings.get("r_workers", "").removeprefix("inproc:").removeprefix("spawn:"):
        settings |= {"kv_cache_memory": None, "r_threads": None}
    return LLM(str(folder), **{**defaults, **settings})


def prompts_of(count: int = 6, length: int = 20) -> list[list[int]]:
    return [[(7 * number + 3 * place) % 120 + 1 for place in range(length + number)] for number in range(count)]


def tokens_of(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(each.outputs[0].token_ids) for each in llm.generate(cast(Any, prompts), params, use_tqdm=False)]


def spoil(llm: LLM, index: int, faults: Faults) -> FaultyRWorker:
    """Give R-worker ``index`` of ``llm``, in this process, a host with ``faults``."""
    worker = r_workers.pool_of(llm.engine).workers[index]
    assert isinstance(worker, InprocWorker)
    faulty = FaultyRWorker(worker._open, faults, worker._layout.audited_layers)
    worker._worker = cast(Any, faulty)
    return faulty


def changes_of(llm: LLM) -> PoolChanges:
    return llm.engine.membership.changes


WAYS: dict[str, dict[str, Any]] = {
    "one R-worker": {"r_workers": "inproc:1"},
    "two R-workers": {"num_mini_batches": 2},
    "copies": COPIES,
    "processes": {"r_workers": "spawn:2", "kv_replicas": 2, "num_mini_batches": 2},
    "ranges": {"kv_shard_tokens": 512, "max_model_len": 1600, "r_workers": "inproc:3"},
    "ranges of copies": {"kv_shard_tokens": 512, "max_model_len": 1600, "r_workers": "spawn:2", "kv_replicas": 2},
    "drafts": {**COPIES, "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "preemption": {"kv_cache_memory": "300KiB", "r_workers": "inproc:1"},
    "int8": {"kv_cache_dtype": "int8", **COPIES},
    "int4 alone": {"kv_cache_dtype": "int4", "dtype": "bfloat16"},
    "ranks": {"tensor_parallel_size": 2, "r_workers": "inproc:2"},
    "scratch": {"prefill_scratch": "64MiB", "max_num_batched_tokens": 256, "max_model_len": 1600},
}


REPEATS = ("processes", "ranges of copies", "int8")
"""Ways that join two others; processes are audited in tests below, too."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.thorough) if way in REPEATS else way for way in WAYS]
)
def test_no_alarm_and_the_same_tokens_where_all_compute_right(way: str, folder: Path) -> None:
    settings = WAYS[way]
    longer_than_ranges = 1100 if SEES_ALL else 560
    length = longer_than_ranges if settings.get("max_model_len") else 20
    prompts = prompts_of(4, length)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    with make_llm(folder, **settings, audit=0.0) as llm:
        wanted = [tokens_of(llm, prompts, params), tokens_of(llm, prompts, params)]
        assert changes_of(llm).audited == 0
    with make_llm(folder, **settings) as llm:
        assert [tokens_of(llm, prompts, params), tokens_of(llm, prompts, params)] == wanted
        changes = changes_of(llm)
        assert changes.audited > 4 * 20 and (changes.faulty, changes.undecided, changes.lost) == ((), 0, 0)
        assert_nothing_held(llm.engine)


OVERFLOWING: dict[str, tuple[str, dict[str, Any]]] = {
    "one R-worker": (NAME, {"r_workers": "inproc:1"}),
    "copies": (NAME, COPIES),
    "float16": (NAME, {"dtype": "float16"}),
    "ranges": (NAME, {"kv_shard_tokens": 512, "max_model_len": 1024}),
    "window": ("mistral", {"r_workers": "inproc:1"}),
    "window in float16": ("mistral", {"dtype": "float16", **COPIES}),
    "window in ranges": ("mistral", {"kv_shard_tokens": 512, "max_model_len": 1024, **COPIES}),
    "chunked window": ("llama4_text", COPIES),
    "latents": ("deepseek_v3", COPIES),
}
"""Ways in which a sequence's overflow reaches other rows. Windows are shorter than a chunk of a prompt."""


@pytest.mark.slow
@pytest.mark.parametrize("way", OVERFLOWING)
def test_no_alarm_where_the_model_overflows(way: str, tmp_path: Path) -> None:
    """Rows that must not see the token that overflows may be NaN, too; a row that is attended alone is finite."""
    name, settings = OVERFLOWING[way]
    sizes: dict[str, int] = {"sliding_window": 8} if name == "mistral" else {}
    sizes |= {"max_position_embeddings": 4096} if "kv_shard_tokens" in settings else {}
    model = (latent_zoo if way == "latents" else model_zoo).build_model(name, **sizes)
    embeddings = model.model.embed_tokens.weight.data
    if settings.get("dtype") == "float16":  # a value of token 99 is infinite, and finite for other tokens
        model.model.layers[0].self_attn.v_proj.weight.data[0] = 15000 * embeddings[99] / embeddings[99].norm()
    else:
        embeddings[99] = float("nan")
    model.save_pretrained(tmp_path)
    first = [each % 90 for each in range(1, 560 if "kv_shard_tokens" in settings else 40)]
    prompts = [[*first, 99, *range(40, 60)], list(range(1, 30))]
    with make_llm(tmp_path, max_num_batched_tokens=64, max_num_seqs=16, **settings) as llm:
        failed, other = (each.outputs[0] for each in llm.generate(cast(Any, prompts), GREEDY, use_tqdm=False))
        assert (failed.stop_reason, other.finish_reason) == ("the model gave no finite logits", "length")
        changes = changes_of(llm)
        assert changes.audited > 60 and (changes.faulty, changes.undecided) == ((), 0)


ARCHITECTURES: dict[str, tuple[Any, dict[str, Any]]] = {
    "gemma2": (model_zoo, {}),
    "mistral": (model_zoo, {}),
    "gpt_oss": (model_zoo, {}),
    "deepseek_v3": (latent_zoo, {}),
    "deepseek_v3 in int8": (latent_zoo, {"kv_cache_dtype": "int8"}),
    "qwen3_next": (tiny_hybrids, {}),
    "qwen3_next, states here": (tiny_hybrids, {"state_on": "s"}),
}
"""Architectures with windows and sinks, latents, and recurrent layers, which have no rows to audit."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "copies"),
    [
        pytest.param(case, copies, marks=[pytest.mark.thorough] * ((number + copies) % 2))
        for number, case in enumerate(ARCHITECTURES)
        for copies in (1, 2)
    ],
)
def test_no_alarm_for_windows_sinks_latents_and_states(case: str, copies: int, tmp_path: Path) -> None:
    zoo, settings = ARCHITECTURES[case]
    name = case.split(",")[0].split(" ")[0]
    (zoo.built if zoo is tiny_hybrids else zoo.build_model)(name).save_pretrained(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    prompts = prompts_of(4, 70)
    with make_llm(tmp_path, **settings, audit=0.0) as llm:
        wanted = tokens_of(llm, prompts, params)
    with make_llm(tmp_path, kv_replicas=copies, **settings) as llm:
        assert tokens_of(llm, prompts, params) == wanted
        changes = changes_of(llm)
        assert changes.audited and (changes.faulty, changes.undecided) == ((), 0)


FAULTS = {"results": Faults(every_row=20, seed=1), "memory": Faults(every_block=2, seed=2)}


@pytest.mark.parametrize(
    ("copies", "kind"),
    [
        (1, "memory"),
        (2, "results"),
        pytest.param(1, "results", marks=pytest.mark.thorough),
        pytest.param(2, "memory", marks=pytest.mark.thorough),
    ],
)
def test_a_host_that_computes_wrong_is_named_and_no_wrong_token_follows(folder: Path, kind: str, copies: int) -> None:
    prompts = prompts_of()
    with make_llm(folder, audit=0.3, kv_replicas=copies) as llm:
        faulty = spoil(llm, 1, FAULTS[kind])
        before = told_before_naming(llm, prompts)
        found, changes = before.pop(), changes_of(llm)
        assert faulty.num_faults > 0
        assert (changes.faulty, changes.lost, changes.undecided) == (("inproc-1",), 1, 0)
        assert_nothing_held(llm.engine)
    with make_llm(folder, r_workers="inproc:1", audit=0.0) as llm:
        for prompt, told, tokens in zip(prompts, before[-1], found, strict=True):
            rest = SamplingParams(temperature=0, max_tokens=NUM_TOKENS - len(told), ignore_eos=True, detokenize=False)
            assert tokens[: len(told)] == told
            assert len(told) == NUM_TOKENS or tokens[len(told) :] == tokens_of(llm, [prompt + told], rest)[0]


def told_before_naming(llm: LLM, prompts: list[list[int]]) -> list[list[list[int]]]:
    """Return the tokens returned until an R-worker is named, and all tokens."""
    engine, told = llm.engine, [list[int]() for _ in prompts]
    before = [[list(each) for each in told]]
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, GREEDY)
    while engine.has_unfinished_requests():
        outputs = engine.step()
        if not engine.membership.changes.faulty:
            before[0] = [list(each) for each in told]
        for output in outputs:
            told[int(output.request_id)] = list(output.outputs[0].token_ids)
        if not engine.membership.changes.faulty:
            before[0] = [list(each) for each in told]
    return [*before, told]


def test_a_kept_prefix_whose_memory_changes_is_a_miss(folder: Path) -> None:
    prompts = prompts_of(2, 40)
    with make_llm(folder, r_workers="inproc:1", audit=0.0) as llm:
        wanted = tokens_of(llm, prompts)
    with make_llm(folder, audit=1e-9) as llm:
        assert tokens_of(llm, prompts) == wanted
        pool = r_workers.pool_of(llm.engine)
        held = {index: list(worker._open.sequence_ids()) for index, worker in enumerate(pool.workers)}
        victim = next(index for index, ids in held.items() if ids)
        for each in held[victim]:
            pool.workers[victim]._open.flip_bit(each, 1, 0, 5)
        assert tokens_of(llm, prompts) == wanted
        assert changes_of(llm).faulty == (f"inproc-{victim}",)
        assert tokens_of(llm, prompts) == wanted


@pytest.mark.slow
def test_a_process_at_fault_is_named_and_may_not_come_back(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The pool's listener refuses the R-worker and all others of its host as long as the engine lives."""
    prompts = prompts_of()
    with (
        r_workers.listening() as (_, sound),
        r_workers.listening("--inject-faults", "every_row=30,seed=4") as (_, faulty),
        make_llm(folder, r_workers=f"{sound},{faulty}", audit=0.5, kv_replicas=2, pool_listen="127.0.0.1:0") as llm,
    ):
        tokens_of(llm, prompts)
        assert changes_of(llm).faulty == (faulty,)
        listener = r_workers.pool_of(llm.engine).join_listener
        with r_workers.joining(listener.address):
            for _ in range(40):
                tokens_of(llm, prompts[:1])
                if "may not join" in caplog.text:
                    break
        assert f"R-worker {faulty} is at fault" in caplog.text
        assert "may not join: an audit found its host at fault" in caplog.text
        assert changes_of(llm).joined == 0


@pytest.mark.slow
def test_unlike_instruction_sets_are_refused_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with r_workers.listening() as (_, fast):
        monkeypatch.setenv("FASTDECODE_ISA", "scalar")
        with r_workers.listening() as (_, slow):
            monkeypatch.delenv("FASTDECODE_ISA")
            with pytest.raises(ConfigError, match=r"audit: R-workers attend in different arithmetic \(.*scalar on"):
                make_llm(folder, r_workers=f"{fast},{slow}")
            with make_llm(folder, r_workers=f"{fast},{slow}", uniform_arithmetic="scalar") as llm:
                tokens_of(llm, prompts_of(2))
                assert changes_of(llm).audited and not changes_of(llm).faulty


def joined(name: str, isa: str = "scalar") -> Joined:
    """Return an R-worker in this process that has joined and caches nothing yet."""
    worker = InprocWorker(name, RWorkerSize(1 << 20, 1), 16, own_cores=False)
    worker.open(replace(LAYOUT, isa=isa))
    return Joined(worker, worker.opened())


def test_the_first_r_workers_to_join_an_empty_pool_are_audited(caplog: pytest.LogCaptureFixture) -> None:
    """A pool may open without R-workers, as Ray's does; the first one that joins sets the arithmetic."""
    audit, first = RandomAudit(0.5, 0), joined("first")
    audit.open(LAYOUT, [], lambda *_: pytest.fail("there is no R-worker to ask"))
    assert audit.admits(first)
    assert audit.admits(joined("second"))
    if "avx2" in supported_isas():
        assert not audit.admits(joined("third", "avx2"))
        assert "R-worker third attends in avx2 and the others in scalar" in caplog.text
    audit.close()


def test_an_r_worker_in_foreign_arithmetic_may_not_join_an_empty_pool(caplog: pytest.LogCaptureFixture) -> None:
    audit, first = RandomAudit(0.5, 0), joined("first")
    audit.open(LAYOUT, [], lambda *_: pytest.fail("there is no R-worker to ask"))
    foreign = Joined(first.worker, replace(first.info, isa="sve9"))
    assert not audit.admits(foreign)
    assert "R-worker first may not join: audit: R-workers attend in sve9, which this host lacks" in caplog.text
    assert audit.admits(first)
    audit.close()


def test_an_r_worker_that_dies_as_it_joins_does_not_end_the_engine() -> None:
    """The pool admits the R-worker, and finds out that it is lost in the next step, as it does without an audit."""

    class Dying(InprocWorker):
        def audit(self, asked: Any) -> Any:
            raise WorkerLostError("its link broke")

    audit, sound = RandomAudit(0.5, 0), joined("sound")
    audit.open(LAYOUT, [], lambda *_: pytest.fail("there is no R-worker to ask"))
    dying = Dying("dying", RWorkerSize(1 << 20, 1), 16, own_cores=False)
    assert audit.admits(Joined(dying, sound.info))
    audit.close()


@pytest.mark.parametrize("audit", [-0.1, 1.5, float("nan")])
def test_a_share_that_is_none_is_refused(folder: Path, audit: float) -> None:
    with pytest.raises(ConfigError, match="audit must be 0 to 1"):
        make_llm(folder, audit=audit)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("zoo", "name", "settings"),
    [(sparse_zoo, "glm_moe_dsa", {}), (latent_zoo, "deepseek_v3", {"latent_absorption": "r"})],
)
def test_a_model_without_rows_to_audit_is_refused(
    zoo: Any, name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    zoo.build_model(name).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="audit: no layer of this model has rows that can be audited"):
        make_llm(tmp_path, **settings)
