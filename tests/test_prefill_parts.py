"""Prompts cut into parts: keys and values passed from worker to worker, and the logits at the end.

The workers are threads of this process, and what they send is put straight into the next one's buffers.
test_prefill_workers.py has the same over processes and sockets.
"""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import model_zoo

from fastdecode._rworker import RWorker
from fastdecode.api.config import EngineConfig
from fastdecode.cluster.links.link import Link
from fastdecode.cluster.links.shared_memory import StreamChannel
from fastdecode.cluster.prefill.client import PrefillClient
from fastdecode.cluster.prefill.jobs import (
    LAYERS_AHEAD,
    JobCancelledError,
    PromptJob,
    ReadWay,
    Send,
)
from fastdecode.cluster.prefill.messages import Place, PlacedRows, Prompt, decode_prompt, encode
from fastdecode.cluster.prefill.rows import Arrays, EarlyRows
from fastdecode.cluster.prefill.stores import StoreWay
from fastdecode.cluster.r_worker.host import RWorkerSize, block_bytes, make_rworker
from fastdecode.core.errors import BackendError, FrameError
from fastdecode.core.remote_prefill import PromptKV
from fastdecode.kinds import Dense, Latent
from fastdecode.kinds.layout import KVLayout
from fastdecode.perfmodel.prefill_times import chain_traffic_tokens
from fastdecode.sworker import SModel
from fastdecode.sworker.part.attention import (
    LayerCaches,
    PartAttention,
    Rows,
    StoredAttention,
    TorchAttention,
    part_attention,
)
from fastdecode.sworker.part.prefill_part import compute_part
from fastdecode.sworker.run.prompts import reference_attention

PLACE = Place("127.0.0.1:1", 1)
EVEN = (0, 50, 100, 150, 200)
SIXTEEN_BITS = [
    ("bfloat16", "bfloat16"),
    ("bfloat16", "float32"),
    ("bfloat16", "int8"),
    ("bfloat16", "int4"),
    ("float16", "float16"),
    ("float16", "bfloat16"),
    ("float16", "int8"),
    ("float16", "int4"),
]
"""Pairs of model and cache dtypes."""


def prompt_of(method: str, part: int, bounds: tuple[int, ...], next_place: Place | None = None) -> Prompt:
    """Return a prompt that one R-worker stores whole; it also has the prefix, if there is one."""
    prefix = (PlacedRows((PLACE,), 0, bounds[0], 1),) if bounds[0] else ()
    return Prompt(1, method, part, bounds, next_place, (PlacedRows((PLACE,), 0, bounds[-1], 1),), prefix)


class Chain:
    """All parts of one prompt; ``rows_stored`` has the R-worker's k and v by layer and first position.

    ``before``: a chain that has stored the tokens before ``bounds[0]``.
    """

    def __init__(
        self,
        layout: KVLayout,
        tokens: Sequence[int],
        bounds: Sequence[int],
        method: str = "kvr",
        before: Chain | None = None,
    ) -> None:
        self._before, self.asked, self.layout = before, [], layout
        self.rows_stored: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        self.jobs: list[PromptJob] = []
        count = len(bounds) - 1
        for part in range(count):
            last = part == count - 1
            has_next = count > 1 and (method == "tsp" or not last)
            prompt = prompt_of(method, part, tuple(bounds), PLACE if has_next else None)
            own = np.array(tokens[prompt.start : prompt.end], np.int64)
            send_on = self._sender((part + 1) % count) if has_next else None
            stores = [StoreWay(0, bounds[-1], self._store, 1)]
            prefix = [ReadWay(0, bounds[0], self._read)] if before else []
            self.jobs.append(PromptJob(prompt, own, layout, send_on, stores, prefix))

    def _sender(self, receiver: int) -> Send:
        def send(layer: int, start: int, arrays: Arrays) -> int:
            self.jobs[receiver].take_in(layer, start, arrays)
            return sum(each.nbytes for each in arrays)

        return send

    def _read(self, layer: int, stored: np.ndarray, when_read: Callable[[], None]) -> None:
        """Answer a read of the prefix a moment later, in another thread."""
        assert self._before is not None
        stored[...] = self._before.as_stored(layer, len(stored))
        self.asked.append(layer)
        threading.Timer(0.001, when_read).start()

    def _store(self, layer: int, start: int, arrays: Arrays) -> int:
        k, v = arrays
        self.rows_stored[layer, start] = k.copy(), v.copy()
        return k.nbytes + v.nbytes

    def as_stored(self, layer: int, num_tokens: int) -> np.ndarray:
        """Return the first tokens as the R-worker's cache stores them, uint8 [num_tokens, bytes]."""
        caches = LayerCaches(self.layout, make_cache)
        stored_bytes = self.layout.layers[layer].token_bytes(self.layout.kv_dtype)
        prefix = np.zeros((0, stored_bytes), np.uint8)
        kv = PromptKV(prefix, *self.rows(layer))
        queries = np.empty((0, *self.layout.layers[layer].row_shapes[0]), kv.k.dtype)
        cache = caches.filled([Rows(layer, queries, kv)], num_tokens)
        try:
            return cache.export(0).reshape(num_tokens, stored_bytes)
        finally:
            caches.close()

    def rows(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Return k and v of the whole prompt as the R-worker gets them."""
        starts = sorted(start for at, start in self.rows_stored if at == layer)
        k, v = zip(*(self.rows_stored[layer, start] for start in starts), strict=True)
        return np.concatenate(k), np.concatenate(v)


def make_cache(of_layer: KVLayout) -> RWorker:
    return make_rworker(of_layer, 32, RWorkerSize(block_bytes(of_layer, 32) * 512 // 32, 1))


def attention_of(layout: KVLayout, by_torch: bool) -> PartAttention:
    return (TorchAttention if by_torch else StoredAttention)(layout, make_cache)


def run(model: SModel, chain: Chain, by_torch: bool = False) -> np.ndarray:
    """Return the logits of the prompt's last token.

    Every part has a thread, of which one at a time is in the model; they take turns only at attention calls.
    """
    turn = threading.Lock()

    def compute(job: PromptJob) -> np.ndarray | None:
        def exchange(layer: int, k: np.ndarray, v: np.ndarray) -> PromptKV:
            turn.release()
            try:
                return job.exchange(layer, k, v)
            finally:
                turn.acquire()

        attention = attention_of(chain.layout, by_torch or job.prompt.method == "tsp")
        try:
            with turn:
                tokens, prompt = job.token_ids.tolist(), job.prompt
                return compute_part(model.code, attention, tokens, prompt.start, prompt.is_last, exchange)
        except BaseException:
            for each in chain.jobs:
                each.cancel()
            raise
        finally:
            attention.close()

    with ThreadPoolExecutor(len(chain.jobs)) as threads:
        futures = [threads.submit(compute, job) for job in chain.jobs]
    failures = [error for each in futures if (error := each.exception())]
    if failures:  # The first failure cancels the other parts.
        raise next((error for error in failures if not isinstance(error, JobCancelledError)), failures[0])
    *others, logits = [each.result() for each in futures]
    assert others == [None] * len(others)
    assert logits is not None
    return logits


def load(name: str, folder: Path, dtype: str = "float32") -> SModel:
    path = model_zoo.save_model(name, folder)
    return SModel(EngineConfig(model=str(path), dtype=dtype, skip_tokenizer_init=True, max_model_len=512))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> SModel:
    return load("llama-gqa", tmp_path_factory.mktemp("llama"))


FEW = "llama-gqa", "gemma2", "bloom"
MORE = [
    pytest.param(name, marks=[pytest.mark.slow, *[pytest.mark.thorough] * (i % 2)])
    for i, name in enumerate(model_zoo.ARCHITECTURES)
    if name not in FEW
]
"""Prefill workers compute each architecture's tokens in other tests, too."""


@pytest.mark.parametrize("name", [*FEW, *MORE])
def test_every_architecture_gives_its_own_logits(name: str, tmp_path: Path) -> None:
    model = load(name, tmp_path)
    prompt = model_zoo.prompts(name)[0]
    expected = model_zoo.reference_logits(model_zoo.build_model(name), prompt, [0])[0]
    whole = Chain(model.layout, prompt, (0, len(prompt)))
    assert_close(run(model, whole), expected)
    n = len(prompt)
    for method, bounds in (("kvr", (0, n // 2, n * 4 // 5, n * 9 // 10, n)), ("tsp", (0, n // 3, n * 2 // 3, n))):
        chain = Chain(model.layout, prompt, bounds, method)
        assert_close(run(model, chain), expected)
        for layer in range(len(model.layout.layers)):
            for ours, theirs in zip(chain.rows(layer), whole.rows(layer), strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-4)


def assert_close(logits: np.ndarray, expected: torch.Tensor) -> None:
    np.testing.assert_allclose(logits, expected.numpy(), rtol=1e-3, atol=1e-3)
    assert int(logits.argmax()) == int(expected.argmax())


@pytest.mark.parametrize("bounds", [(0, 1, 2, 3), (0, 1, 200), (0, 199, 200), (0, 16, 17, 200)], ids=str)
@pytest.mark.parametrize("method", ["kvr", "tsp"])
def test_any_partition(llama: SModel, method: str, bounds: tuple[int, ...]) -> None:
    prompt = model_zoo.prompts("llama-gqa")[0][: bounds[-1]]
    expected = run(llama, Chain(llama.layout, prompt, (0, len(prompt))))
    logits = run(llama, Chain(llama.layout, prompt, bounds, method))
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


def begun(chain: Chain) -> Chain:
    for job in chain.jobs:
        job.begin()
    return chain


@pytest.mark.parametrize(
    ("name", "dtype", "kv_dtype"),
    [
        pytest.param(name, *dtypes, marks=[pytest.mark.thorough] * ((i + j) % 3 > 0))
        for i, name in enumerate(["llama-gqa", "qwen3", "gemma2"])
        for j, dtypes in enumerate(SIXTEEN_BITS)
    ],
)
def test_sixteen_bits_do_not_depend_on_the_cuts(name: str, dtype: str, kv_dtype: str, tmp_path: Path) -> None:
    """Neither the last token's logits nor the stored rows depend on the cuts, with a prefix or without."""
    model = load(name, tmp_path, dtype)
    layout = replace(model.layout, kv_dtype=kv_dtype)
    prompt = model_zoo.prompts(name)[0]
    whole = Chain(layout, prompt, (0, 200))
    logits = run(model, whole)
    for bounds in ((0, 120, 200), (0, 1, 130, 200), (32, 200), (17, 90, 199, 200)):
        chain = begun(Chain(layout, prompt, bounds, before=whole if bounds[0] else None))
        np.testing.assert_array_equal(run(model, chain), logits)
        for layer in range(len(layout.layers)):
            for ours, theirs in zip(chain.rows(layer), whole.rows(layer), strict=True):
                np.testing.assert_array_equal(ours, theirs[bounds[0] :])


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_torch_attends_as_the_kernels_do(llama: SModel, kv_dtype: str) -> None:
    """torch attends keys and values before they are stored, as on a GPU, except those of a prefix."""
    layout = replace(llama.layout, kv_dtype=kv_dtype)
    prompt = model_zoo.prompts("llama-gqa")[0]
    whole = Chain(layout, prompt, (0, 200))
    logits = run(llama, whole)
    near = 1e-4 if kv_dtype == "float32" else 0.05 * float(np.abs(logits).max())
    for bounds in ((0, 200), (0, 120, 200), (32, 90, 200)):
        chain = begun(Chain(layout, prompt, bounds, before=whole if bounds[0] else None))
        np.testing.assert_allclose(run(llama, chain, by_torch=True), logits, rtol=1e-4, atol=near)


def test_keys_and_values_of_the_first_part_do_not_depend_on_the_others(llama: SModel) -> None:
    """Rows computed in forwards of the same size have the same bits."""
    prompt = model_zoo.prompts("llama-gqa")[0]
    short = Chain(llama.layout, prompt[:100], (0, 100))
    chain = Chain(llama.layout, prompt, (0, 100, 200))
    run(llama, short)
    run(llama, chain)
    for layer in range(len(llama.layout.layers)):
        for ours, theirs in zip(chain.rows(layer), short.rows(layer), strict=True):
            np.testing.assert_array_equal(ours[:100], theirs)


def test_traffic_is_that_of_the_formulas(llama: SModel) -> None:
    """A chain sends C(p-1)/2 rows of k and of v per layer, an all-gather C(p-1): KV-Runahead, section 4.2."""
    prompt = model_zoo.prompts("llama-gqa")[0]
    row_bytes = sum(layer.token_bytes("float32") for layer in llama.layout.layers)
    for method, rows in (("kvr", 50 + 100 + 150), ("tsp", 200 * 3)):
        chain = Chain(llama.layout, prompt, EVEN, method)
        run(llama, chain)
        assert sum(job.sent_bytes for job in chain.jobs) == rows * row_bytes
        assert sum(job.stores.num_bytes for job in chain.jobs) == 200 * row_bytes


@pytest.mark.parametrize("bounds", [(16, 200), (199, 200), (96, 97, 98, 200), (128, 150, 170, 190, 200)], ids=str)
def test_parts_after_a_prefix(llama: SModel, bounds: tuple[int, ...]) -> None:
    """Logits, rows and traffic are right; only the first worker asks for the prefix, each layer once and ahead."""
    prompt = model_zoo.prompts("llama-gqa")[0]
    whole = Chain(llama.layout, prompt, (0, 200))
    expected = run(llama, whole)
    chain = begun(Chain(llama.layout, prompt, bounds, before=whole))
    assert chain.asked == list(range(min(LAYERS_AHEAD, len(llama.layout.layers))))
    np.testing.assert_allclose(run(llama, chain), expected, rtol=1e-4, atol=1e-4)
    assert chain.asked == list(range(len(llama.layout.layers)))
    for layer in range(len(llama.layout.layers)):
        for ours, theirs in zip(chain.rows(layer), whole.rows(layer), strict=True):
            np.testing.assert_allclose(ours, theirs[bounds[0] :], rtol=2e-4, atol=2e-4)
    row_bytes = sum(layer.token_bytes("float32") for layer in llama.layout.layers)
    rows = np.diff(bounds).tolist()
    assert sum(job.sent_bytes for job in chain.jobs) == chain_traffic_tokens(rows, bounds[0]) * row_bytes
    assert [job.read_bytes for job in chain.jobs] == [bounds[0] * row_bytes, *[0] * (len(rows) - 1)]
    assert sum(job.stores.num_bytes for job in chain.jobs) == (200 - bounds[0]) * row_bytes


def test_a_prefix_comes_from_the_r_worker_alone(llama: SModel) -> None:
    prompt = model_zoo.prompts("llama-gqa")[0]
    first, second = Chain(llama.layout, prompt, (32, 100, 200), before=Chain(llama.layout, prompt, (0, 200))).jobs
    with pytest.raises(FrameError, match="its prefix comes from R-workers"):
        first.place_for(0, 0, 10)
    second.place_for(0, 0, 32)
    for layer, start, num_rows in ((0, 0, 33), (0, 31, 1), (0, 33, 1), (0, 100, 1)):
        with pytest.raises(FrameError):
            second.place_for(layer, start, num_rows)


def test_a_prompt_that_gathers_all_has_no_prefix() -> None:
    def decoded(method: str, bounds: tuple[int, ...]) -> Prompt:
        body = encode(prompt_of(method, 0, bounds))
        return decode_prompt(body, np.zeros(abs(bounds[1] - bounds[0]), np.int64), 100, 10)

    assert decoded("kvr", (8, 20)).context_len == 8
    assert decoded("tsp", (0, 20)).context_len == 0
    for method, bounds in (("tsp", (8, 20)), ("kvr", (20, 8)), ("kvr", (90, 101)), ("kvr", (-1, 20)), ("kvr", (8, 8))):
        with pytest.raises(FrameError, match="PROMPT"):
            decoded(method, bounds)


def test_a_cancelled_job_ends_at_its_next_layer_or_wait(llama: SModel) -> None:
    prompt = model_zoo.prompts("llama-gqa")[0]
    job = Chain(llama.layout, prompt, (0, 100, 200)).jobs[1]
    threading.Timer(0.2, job.cancel).start()
    with pytest.raises(JobCancelledError):
        compute_part(llama.code, attention_of(llama.layout, False), prompt[100:], 100, True, job.exchange)


def test_a_part_goes_on_while_each_row_is_stored_somewhere(llama: SModel) -> None:
    """Two ranges have two copies each; one R-worker is lost beforehand and one when rows are sent to it."""
    chain = Chain(llama.layout, model_zoo.prompts("llama-gqa")[0], (0, 200))
    prompt, tokens, sent, told = chain.jobs[0].prompt, chain.jobs[0].token_ids, Counter[int](), []

    def store(ticket: int, start: int, end: int, is_gone: bool) -> StoreWay:
        def send(layer: int, start: int, arrays: Arrays) -> int:
            if is_gone:
                raise ConnectionError("gone")
            sent[ticket] += len(arrays[0])
            return 1

        return StoreWay(start, end, send, ticket)

    copies = [store(1, 0, 120, False), store(2, 0, 120, True), store(3, 120, 200, False), store(4, 120, 200, False)]
    job = PromptJob(prompt, tokens, llama.layout, None, copies)
    assert job.stores.miss(4)
    compute_part(llama.code, attention_of(llama.layout, False), tokens.tolist(), 0, True, job.exchange)
    num_layers = len(llama.layout.layers)
    assert (sent, job.stores.missed) == ({1: 120 * num_layers, 3: 80 * num_layers}, {2, 4})
    job.stores.when_stored([1, 1, 2, 3, 4], lambda: told.append(1))  # R-worker 1 has two ports.
    for ticket in (1, 3):
        job.stores.stored(ticket)
    assert not told
    job.stores.stored(1)
    job.stores.stored(1)
    assert told == [1]
    assert not job.stores.miss(3)
    job = PromptJob(prompt, tokens, llama.layout, None, [store(1, 0, 200, True)])
    with pytest.raises(ConnectionError, match="gone"):
        compute_part(llama.code, attention_of(llama.layout, False), tokens.tolist(), 0, True, job.exchange)


def test_early_rows_are_counted_and_limited() -> None:
    """Rows that are taken or forgotten make room again."""
    rows = np.zeros((2, 1, 4), np.float32)
    early = EarlyRows(most_bytes=3 * 2 * rows.nbytes)
    for job_id, start in ((1, 0), (2, 0), (1, 2)):
        early.keep(job_id, 0, start, (rows, rows))
    assert early.num_bytes == 6 * rows.nbytes
    with pytest.raises(FrameError, match="KV of unannounced job 3"):
        early.keep(3, 0, 0, (rows, rows))
    assert [start for _, start, _ in early.take(1)] == [0, 2]
    assert early.num_bytes == 2 * rows.nbytes and early.take(3) == []
    early.keep(3, 0, 0, (rows, rows))
    early.clear()
    assert early.num_bytes == 0 and early.take(2) == []


def test_rows_without_a_place_are_refused(llama: SModel) -> None:
    job = Chain(llama.layout, model_zoo.prompts("llama-gqa")[0], (0, 50, 100, 200)).jobs[1]
    for layer, start, num_rows in [(0, 50, 1), (0, 100, 1), (0, 10, 1), (0, 0, 51), (0, 0, 0), (99, 0, 1), (0, -1, 1)]:
        with pytest.raises(FrameError):
            job.place_for(layer, start, num_rows)
    job.place_for(0, 0, 20)
    job.filled(0, 0, 20)
    with pytest.raises(FrameError):
        job.place_for(0, 0, 20)
    job.place_for(0, 20, 30)


def test_rows_that_came_early_are_taken_in_by_their_bytes() -> None:
    """Keys that contain the values have one part, as a prefix's rows have, so they may arrive as such."""
    layout = KVLayout((Latent(2, 1, 6, 4, 1.0),), "float32", "float32")
    job = Chain(layout, [0] * 30, (0, 20, 30)).jobs[1]
    keys = np.arange(120, dtype=np.float32).reshape(20, 1, 6)
    job.take_in(0, 0, (keys.reshape(20, 6).view(np.uint8),))
    own = np.ones((10, 1, 6), np.float32)
    np.testing.assert_array_equal(job.exchange(0, own, own[..., :0]).k, np.concatenate([keys, own]))
    with pytest.raises(FrameError, match="have another form"):
        Chain(layout, [0] * 30, (0, 20, 30)).jobs[1].take_in(0, 0, (keys[..., :5],))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("start", "num_rows", "num_keys"), [(0, 33, 33), (1, 32, 33), (70, 9, 79), (40, 20, 90)])
def test_parts_attend_as_the_formula_says(start: int, num_rows: int, num_keys: int, dtype: torch.dtype) -> None:
    """torch attends, also where there are later keys."""
    layer = Dense(num_heads=4, num_kv_heads=2, key_head_dim=16, value_head_dim=16, scale=0.3)
    generator = torch.Generator().manual_seed(start)
    shapes = ((num_rows, 4, 16), (num_keys, 2, 16), (num_keys, 2, 16))
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    with torch.inference_mode():
        found = part_attention(q, k, v, layer, start)
    end = start + num_rows
    wanted = reference_attention(q.float(), k[:end].float(), v[:end].float(), layer)
    torch.testing.assert_close(found.float(), wanted, rtol=0, atol=1e-5 if dtype is torch.float32 else 2e-2)


def test_a_worker_that_is_gone_before_hello_is_named() -> None:
    """The error names the worker; one with another key is named if the handshake has failed by then."""
    mine, theirs = socket.socketpair()
    theirs.close()
    client = PrefillClient("p", lambda: Link(StreamChannel(mine)))
    with pytest.raises(BackendError, match="prefill worker p: "):
        client.open(b"")
    client.close()
