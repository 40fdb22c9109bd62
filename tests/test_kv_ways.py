"""Keys and values on their way to R-workers of several ranks: each stores its heads, and a prefix is read whole."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import pytest
from helpers import contract
from helpers.processes import PATIENCE_SECONDS
from msgspec import structs

from fastdecode.cluster.pool.inproc import InprocBackend
from fastdecode.cluster.prefill.kv_ways import PortHeads, read_way, store_way
from fastdecode.cluster.prefill.messages import Place, PlacedRows
from fastdecode.cluster.prefill.senders import PrefixReader, StoreSender
from fastdecode.cluster.r_worker.host import RWorkerSize
from fastdecode.cluster.wire.handshake import Security
from fastdecode.core.dtypes import WIRE_DTYPE, to_wire
from fastdecode.core.errors import FrameError
from fastdecode.core.types import CONTROL, SPAN, StepPlan, Verb, WorkerPlan
from fastdecode.kinds.layout import KVLayout

LENGTH, START, TICKET = 70, 512, 7
DTYPES = [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "int8"), ("float16", "int4")]


def layout_of(num_ranks: int, model_dtype: str, kv_dtype: str) -> KVLayout:
    """Return what each of ``num_ranks`` ranks holds of ``contract.LAYERS``; some layers' heads are repeated."""
    layers = tuple(
        structs.replace(
            each, num_heads=4, num_kv_heads=max(1, each.num_kv_heads // num_ranks), sinks=(), alibi_slopes=()
        )
        for each in contract.LAYERS
    )
    return KVLayout(layers, model_dtype, kv_dtype, kv_port="loopback")


class Cache:
    """An R-worker that waits for a sequence of LENGTH tokens."""

    def __init__(self, layout: KVLayout, opened: ExitStack) -> None:
        self.backend = InprocBackend([RWorkerSize(1 << 24, 1)], contract.BLOCK_SIZE)
        opened.callback(self.backend.close)
        (self.port,) = self.backend.open(layout)[0].kv_ports
        self.tell((Verb.RESERVE, 1, TICKET, LENGTH))

    def tell(self, *controls: tuple[int, int, int, int]) -> None:
        """Run a step without rows."""
        plan = WorkerPlan(np.array(list(controls), CONTROL), (np.array([], SPAN),))
        self.backend.begin_step(StepPlan((plan,)))
        self.backend.end_step()

    def commit(self) -> bytes:
        """Commit the sequence under a ticket of its own, and return its stored bytes."""
        self.tell((Verb.COMMIT, 1, TICKET, LENGTH))
        stored = self.backend.export(0, 1).tobytes()
        self.tell((Verb.RESERVE, 1, TICKET + 1, LENGTH + 1))
        return stored


class Ranks:
    """The R-workers of ``num_ranks`` ranks that make one logical R-worker."""

    def __init__(self, num_ranks: int, model_dtype: str, kv_dtype: str, opened: ExitStack) -> None:
        self.whole, own = (layout_of(count, model_dtype, kv_dtype) for count in (1, num_ranks))
        self.caches = [Cache(own, opened) for _ in range(num_ranks)]
        self.heads = PortHeads(self.whole, [layer.num_kv_heads for layer in own.layers])
        self.heads.check(num_ranks)
        self.places = tuple(Place(each.port.address, each.port.epoch) for each in self.caches)
        self.failures: list[str] = []
        self._opened = opened

    def sender(self, kind: Callable[..., StoreSender | PrefixReader], place: Place) -> StoreSender | PrefixReader:
        made = kind(place, Security(), lambda numbers, place, why, is_lost: self.failures.append(why))
        self._opened.callback(made.close)
        return made

    def store(self) -> int:
        """Store all rows, layer by layer, and return the bytes that were sent."""
        senders = [self.sender(StoreSender, place) for place in self.places]
        send = store_way(PlacedRows(self.places, START, START + LENGTH, TICKET), self.heads, senders)
        num_bytes = sum(
            send(layer, START + start, tuple(each[start : start + 40] for each in self.rows(layer)))
            for layer in range(len(self.whole.layers))
            for start in range(0, LENGTH, 40)
        )
        for sender in senders:
            stored = threading.Event()
            sender.when_stored(TICKET, stored.set)
            assert stored.wait(PATIENCE_SECONDS), self.failures
        return num_bytes

    def rows(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Return all heads' keys and values, drawn by the layer's number."""
        shape, rng = self.whole.layers[layer], np.random.default_rng(layer)
        k, v = (
            to_wire(rng.standard_normal((LENGTH, shape.num_kv_heads, dim), np.float32), self.whole.model_dtype)
            for dim in (shape.key_head_dim, shape.value_head_dim)
        )
        return k, v

    def read(self) -> bytes:
        """Return the prefix of all layers, one after the other."""
        readers = [self.sender(PrefixReader, place) for place in self.places]
        read = read_way(PlacedRows(self.places, 0, LENGTH, TICKET + 1), self.heads, readers)
        found = []
        for layer, shape in enumerate(self.whole.layers):
            stored, is_read = np.zeros((LENGTH, shape.token_bytes(self.whole.kv_dtype)), np.uint8), []
            done = threading.Event()
            read(layer, stored, lambda is_read=is_read, done=done: (is_read.append(1), done.set()))
            assert done.wait(PATIENCE_SECONDS), self.failures
            assert len(is_read) == 1
            found.append(stored.tobytes())
        return b"".join(found)


@pytest.mark.parametrize(("model_dtype", "kv_dtype"), DTYPES)
def test_heads_of_ranks_are_those_of_one_cache(model_dtype: str, kv_dtype: str) -> None:
    """One cache of all heads, two ranks and four (some heads are there twice) have the same bits."""
    with ExitStack() as opened:
        one = Ranks(1, model_dtype, kv_dtype, opened)
        num_bytes = one.store()
        assert num_bytes == WIRE_DTYPE[model_dtype].itemsize * LENGTH * sum(
            layer.kv_elements for layer in one.whole.layers
        )
        (wanted,) = (cache.commit() for cache in one.caches)
        assert one.read() == wanted
        for num_ranks in (2, 4):
            several = Ranks(num_ranks, model_dtype, kv_dtype, opened)
            assert several.store() == (num_bytes if num_ranks == 2 else num_bytes * 3 // 2)
            stored = [cache.commit() for cache in several.caches]
            assert len(set(stored)) == num_ranks  # No two ranks have the same heads of all layers.
            assert several.read() == wanted


def test_ports_that_do_not_have_all_heads() -> None:
    whole = layout_of(1, "float32", "float32")
    with pytest.raises(FrameError, match="of 2 layers, and the model has 3"):
        PortHeads(whole, (2, 4))
    with pytest.raises(FrameError, match="3 KV heads at a port, and the model has 4"):
        PortHeads(whole, (2, 3, 2))
    heads = PortHeads(whole, (1, 1, 1))
    heads.check(4)
    with pytest.raises(FrameError, match="2 ports of 1 KV heads each"):
        heads.check(2)
    assert [heads.of(0, port, 4).start for port in range(4)] == [0, 0, 1, 1]
    assert [heads.of(1, port, 4).start for port in range(4)] == [0, 1, 2, 3]
