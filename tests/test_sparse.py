"""Trained sparsity gives the tokens of transformers' ``generate``, over contexts of eight times the picked tokens."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import model_zoo, prefill_workers, r_workers
from helpers.engine_checks import assert_nothing_held
from helpers.examples import SEES_ALL
from helpers.prefill_workers import Watched
from helpers.sparse_zoo import CONFIGS, SETTINGS, build_model, prompts

from fastdecode import LLM, SamplingParams
from fastdecode.cluster.r_worker.host import make_layer_cache
from fastdecode.core.errors import ConfigError
from fastdecode.core.remote_prefill import PromptKV
from fastdecode.kinds import Index, Latent
from fastdecode.kinds.layout import KVLayout
from fastdecode.sworker.adapters.index import BlockIndexer, TokenIndexer, picked, use_index
from fastdecode.sworker.adapters.latents import use_latent_rows
from fastdecode.sworker.part.attention import StoredAttention, TorchAttention
from fastdecode.sworker.run.prompt_scratch import PromptScratch
from fastdecode.sworker.run.prompts import reference_attention
from fastdecode.sworker.run.staging import PromptRows

NUM_TOKENS = 64 if SEES_ALL else 24
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
RUN: dict[str, dict[str, Any]] = {
    "deepseek_v32": {"r_workers": "inproc:3", "num_mini_batches": 3, "max_num_batched_tokens": 100, "max_num_seqs": 16},
    "glm_moe_dsa": {"r_workers": "spawn:2", "num_mini_batches": 2, "kv_replicas": 2},
    "minimax_m3": {"r_workers": "inproc:2", "num_mini_batches": 1, "r_threads": 2},
    "hy_v4": {"r_workers": "inproc:2", "num_mini_batches": 2, "kv_shard_tokens": 512},
    "dots3_note": {"r_workers": "inproc:2", "num_mini_batches": 2, "kv_cache_memory": "64MiB"},
}
KINDS = {
    "deepseek_v32": [(48, -1), (0, 0), (48, -1), (0, 2), (48, -1), (0, 4)],
    "glm_moe_dsa": [(48, -1), (0, 0), (0, 0), (48, -1), (0, 3)],
    "minimax_m3": [(0, -1), (3, -1), (0, 1), (3, -1), (0, 3)],
    "hy_v4": [(48, -1), (0, 0), (0, 0), (48, -1), (0, 3)],
    "dots3_note": [(48, -1), (0, 0), (0, -1), (48, -1), (0, 3)],
}
"""For each layer, how many tokens it picks, and the layer whose picks it attends."""


NAMES = [
    "deepseek_v32",
    *(
        pytest.param(name, marks=[pytest.mark.slow, *[pytest.mark.thorough] * (name == "glm_moe_dsa")])
        for name in CONFIGS
        if name != "deepseek_v32"
    ),
]
"""Models to compare; ``make test`` leaves glm_moe_dsa to the harder tests below."""
MORE = [
    pytest.param(name, marks=pytest.mark.slow if name == "glm_moe_dsa" else pytest.mark.thorough) for name in CONFIGS
]


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path]:
    """Return name, model and folder of each architecture."""
    place, built = tmp_path_factory.mktemp(request.param), build_model(request.param)
    built.save_pretrained(place)
    return request.param, built, place


def generated(llm: LLM, texts: list[list[int]]) -> list[list[int]]:
    """Return the token ids of every text, and check that nothing stays behind."""
    outputs = llm.generate([{"prompt_token_ids": text} for text in texts], GREEDY, use_tqdm=False)
    assert_nothing_held(llm.engine)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("model", NAMES, indirect=True)
def test_every_architecture_matches_generate(model: tuple[str, Any, Path]) -> None:
    name, own, folder = model
    with LLM(str(folder), **SETTINGS | RUN[name]) as llm:
        assert [(getattr(each, "picks", 0), each.reads) for each in llm.engine.s_model.layout.layers] == KINDS[name]
        tokens = generated(llm, prompts())
    assert [model_zoo.disagreements(own, *pair) for pair in zip(prompts(), tokens, strict=True)] == [0] * 8


@pytest.mark.parametrize("model", MORE, indirect=True)
@pytest.mark.parametrize("kv_cache_memory", [pytest.param("16MiB", marks=pytest.mark.thorough), "1MiB"])
def test_prompts_here_drafts_prefixes_and_preemption(model: tuple[str, Any, Path], kv_cache_memory: str) -> None:
    """Chunks attend on the S-worker; several drafts, texts that begin alike and too few blocks are covered."""
    _, own, folder = model
    texts = prompts((300, 40, 200))
    texts += [texts[0][:280] + text[:30] for text in texts]
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    settings = {
        "speculative_config": drafts,
        "prefill_scratch": "1MiB",
        "max_num_batched_tokens": 90,
        "max_num_seqs": 8,
    }
    settings |= {"kv_cache_memory": kv_cache_memory, "max_model_len": 400}
    with LLM(str(folder), **SETTINGS | settings) as llm:
        tokens = generated(llm, texts[:3]) + generated(llm, texts[3:])
    assert [model_zoo.disagreements(own, *pair) for pair in zip(texts, tokens, strict=True)] == [0] * 6


DTYPES = {"glm_moe_dsa": ("bfloat16", "int8"), "deepseek_v32": ("bfloat16", "int4"), "minimax_m3": ("float32", "int8")}


@pytest.mark.thorough  # test_latents.py tests rows that are all read.
@pytest.mark.parametrize(
    ("model", "dtypes"),
    [
        *DTYPES.items(),
        *((name, ("bfloat16", "auto")) for name in CONFIGS),
        ("minimax_m3", ("bfloat16", "int4")),
    ],
    indirect=["model"],
)
def test_rounded_rows_keep_their_tokens_at_prefill_workers_in_two_places_and_after_kill_9(
    model: tuple[str, Any, Path], dtypes: tuple[str, str]
) -> None:
    texts, settings = prompts((430, 30, 205)), SETTINGS | {"dtype": dtypes[0], "kv_cache_dtype": dtypes[1]}
    with LLM(str(model[2]), **settings) as llm:
        wanted = [generated(llm, [text])[0] for text in texts]
        assert generated(llm, texts) == wanted
    with (
        prefill_workers.threads(model[2], 2, dtype=dtypes[0], max_model_len=1024) as addresses,
        LLM(str(model[2]), **settings, kv_replicas=2, r_workers="spawn:3", prefill_workers=addresses) as llm,
    ):
        there = Watched(llm, range(2))
        kill = partial(os.kill, r_workers.spawned_pids(llm)[1], signal.SIGKILL)
        assert [each[0] for each in there.run(texts, lambda _: GREEDY, {4: kill})] == wanted
        assert there.computed
        assert_nothing_held(llm.engine)


@pytest.mark.parametrize("model", MORE, indirect=True)
@pytest.mark.parametrize(("kv_dtype", "least"), [("int8", 0.8), pytest.param("int4", 0.45, marks=pytest.mark.thorough)])
def test_codes_are_near_the_models_own_rows(model: tuple[str, Any, Path], kv_dtype: str, least: float) -> None:
    """Most tokens are those that the model prefers after the same text (0.92 to 0.97 of bfloat16's)."""
    texts = prompts((500, 40, 390))
    with LLM(str(model[2]), **SETTINGS, kv_cache_dtype=kv_dtype) as llm:
        tokens = generated(llm, texts)
    wrong = sum(model_zoo.disagreements(model[1], *pair) for pair in zip(texts, tokens, strict=True))
    print(model[0], kv_dtype, wrong)
    assert wrong < (1 - least) * 3 * NUM_TOKENS


RANGES: dict[str, dict[str, Any]] = {
    "deepseek_v32": {"r_workers": "spawn:3", "num_mini_batches": 2, "kv_replicas": 2},
    "glm_moe_dsa": {"r_workers": "inproc:3", "num_mini_batches": 1, "prefill_scratch": "1MiB"},
    "minimax_m3": {"r_workers": "spawn:2", "num_mini_batches": 3, "r_threads": 2},
}


@pytest.mark.parametrize("model", MORE, indirect=True)
def test_ranges_on_several_r_workers_match_generate(model: tuple[str, Any, Path]) -> None:
    """Prompts exceed their first range, on R-workers and the S-worker; outputs begin one, with drafts and a loss."""
    name, own, folder = model
    texts = prompts((1100, 40, 500, 620))
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    settings = {"kv_shard_tokens": 512, "speculative_config": drafts, "max_model_len": 1200} | RANGES[name]
    with LLM(str(folder), **SETTINGS | settings) as llm:
        if settings["r_workers"] == "spawn:3":
            there = Watched(llm, range(0))
            kill = partial(os.kill, r_workers.spawned_pids(llm)[1], signal.SIGKILL)
            tokens = [each[0] for each in there.run(texts, lambda _: GREEDY, {4: kill})]
            assert_nothing_held(llm.engine)
        else:
            tokens = generated(llm, texts)
    assert [model_zoo.disagreements(own, *pair) for pair in zip(texts, tokens, strict=True)] == [0] * 4


@pytest.mark.parametrize("model", MORE, indirect=True)
def test_prefill_workers_pick_as_r_workers_do(model: tuple[str, Any, Path]) -> None:
    """Parts of prompts follow others' rows and prefixes, and go to ranges, one of which is lost."""
    _, own, folder = model
    texts = prompts((1100, 40, 500))
    texts += [texts[0][:600] + texts[2][:90], texts[2][:480] + texts[1]]
    settings: dict[str, Any] = {"kv_shard_tokens": 512, "kv_replicas": 2, "max_model_len": 1200, "r_workers": "spawn:2"}
    with (
        prefill_workers.threads(folder, 2, max_model_len=1200) as addresses,
        LLM(str(folder), **SETTINGS | settings, prefill_workers=addresses) as llm,
    ):
        there = Watched(llm, range(2))
        kill = partial(os.kill, r_workers.spawned_pids(llm)[1], signal.SIGKILL)
        tokens = there.run(texts[:3], lambda _: GREEDY, {9: kill}) + there.run(texts[3:], lambda _: GREEDY)
        assert len(there.computed) >= 4 and any(prefill.prefix for prefill in there.handed)
        assert_nothing_held(llm.engine)
    pairs = zip(texts, tokens, strict=True)
    assert [model_zoo.disagreements(own, text, each) for text, (each,) in pairs] == [0] * 5


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "heads"),
    [("glm_moe_dsa", [12, 2, 2, 12, 2]), ("deepseek_v32", [12, 2, 12, 2, 12, 2]), ("minimax_m3", [2, 1, 2, 1, 2])],
    indirect=["model"],
)
def test_ranks_have_their_heads_and_the_whole_index(model: tuple[str, Any, Path], heads: list[int]) -> None:
    """Each rank's R-workers pick by all heads of the index, or by those of the rank's KV heads."""
    texts = prompts((430, 40))
    with LLM(str(model[2]), **SETTINGS, tensor_parallel_size=2, num_mini_batches=2) as llm:
        layers = llm.engine.s_model.layout.layers
        assert [each.num_heads for each in layers] == heads
        tokens = generated(llm, texts)
    assert [model_zoo.disagreements(model[1], *pair) for pair in zip(texts, tokens, strict=True)] == [0] * 2


def test_what_does_not_go_with_an_index_is_refused_by_name(tmp_path: Path) -> None:
    build_model("minimax_m3").save_pretrained(tmp_path)
    message = "block_size: an index of this model picks .*, in blocks of 16: 32 must divide that"
    with pytest.raises(ConfigError, match=message):
        LLM(str(tmp_path), **SETTINGS | {"block_size": 32})


def test_an_indexer_that_picks_otherwise_stays_as_it_is() -> None:
    for name in CONFIGS:
        built = build_model(name)
        use_latent_rows(built)
        indexers = [module for module in built.modules() if type(module).__name__.endswith("Indexer")]
        own = type(indexers[0])

        class Other(own):  # type: ignore[misc, valid-type]
            def forward(self, hidden_states: torch.Tensor, *others: Any) -> Any:
                return super().forward(hidden_states.roll(1, 1), *others)

        Other.__module__ = own.__module__
        indexers[0].__class__ = Other
        use_index(built)
        assert [isinstance(each, (TokenIndexer, BlockIndexer)) for each in indexers] == [False, True, True][
            : len(indexers)
        ]


def test_prompts_on_a_gpu_attend_in_chunks_as_at_once() -> None:
    """torch's own attention runs there over rows as R-workers get them."""
    (rows, wanted), parts = rows_of_an_index(), (slice(0, 17), slice(17, 40))
    scratch, found = PromptScratch(INDEXED), []
    for part in parts:
        scratch.begin_step([])
        for number, (q, k) in enumerate(rows):
            here = PromptRows(7, slice(0, part.stop - part.start), part.start, part.stop == 40)
            found.append(scratch.attend(number, 0, q[part], k[part], k[part, :, :0], [here])[0])
    assert torch.allclose(torch.cat(found[1::2]), wanted, atol=1e-6) and not found[0].any()


@pytest.mark.parametrize("kind", [StoredAttention, TorchAttention])
@pytest.mark.parametrize(("prefix", "start", "end", "num_keys"), [(0, 0, 40, 40), (0, 17, 30, 40), (8, 17, 40, 40)])
def test_parts_of_prompts_attend_as_at_once(kind: Any, prefix: int, start: int, end: int, num_keys: int) -> None:
    """The part attends a stored prefix and, where all parts gather all rows, keys beyond its own."""
    rows, wanted = rows_of_an_index()
    attention = kind(INDEXED, partial(make_layer_cache, num_tokens=40, num_threads=1, cores=()))
    for number, (q, k) in enumerate(rows):
        keys = k.numpy()
        stored = keys[:prefix].reshape(prefix, k.shape[2]).view(np.uint8)
        kv = PromptKV(stored, keys[prefix:num_keys], keys[prefix:num_keys, :, :0])
        found = attention.attend(number, q[start:end], kv, start)
    attention.close()
    assert torch.allclose(found, wanted[start:end], atol=1e-6)


INDEXED = KVLayout(
    (
        Index(20, 16, 0.3, picks=6),
        Latent(3, 1, 24, 16, 0.2, picked_by=0),
    ),
    "float32",
    "float32",
)


def rows_of_an_index() -> tuple[list[list[torch.Tensor]], torch.Tensor]:
    """Return random q and k of 40 rows in both layers of ``INDEXED``, and o of the second."""
    torch.manual_seed(2)
    rows = [
        [torch.randn(40, *shape) for shape in ((each.num_heads, each.query_dim), (1, each.key_head_dim))]
        for each in INDEXED.layers
    ]
    seen = picked(*rows[0], INDEXED.layers[0])
    assert seen.sum(-1).tolist() == [[min(row + 1, 6) for row in range(40)]]
    return rows, reference_attention(*rows[1], rows[1][1][..., :0], INDEXED.layers[1], seen)
