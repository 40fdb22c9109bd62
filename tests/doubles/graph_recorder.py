"""A CUDA graph on the CPU: repeats the operations of a capture on the same addresses.

Like a real graph it knows no Python: numbers, shapes and branches stay as in the capture. It is stricter in one way.
Once a graph of another forward has run in the same memory pool, it overwrites what earlier forwards kept there, as a
real pool may.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS_BACK = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Pool:
    """Graphs that share memory; ``forwards`` groups the graphs of each forward."""

    def __init__(self) -> None:
        self.forwards: list[list[RecordedGraph]] = []


class RecordedGraph(TorchDispatchMode):
    """Records the operations within its context; ``replay`` runs them again."""

    def __init__(self, pool: Pool, forward: list[RecordedGraph]) -> None:
        super().__init__()
        self.pool, self.forward = pool, forward
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.made: dict[int, torch.Tensor] = {}
        self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record it."""
        if READS_BACK & set(func.tags):
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        known = {each.untyped_storage().data_ptr() for each in tensors((args, kwargs))}
        for each in tensors(out):
            if each.untyped_storage().data_ptr() not in known:
                self.made[each.untyped_storage().data_ptr()] = each
        return out

    def replay(self) -> None:
        """Run every operation again, and write its results where the first ones were."""
        self.replays += 1
        for forward in self.pool.forwards:
            for graph in forward if forward is not self.forward else ():
                graph.lose()
        for func, args, kwargs, kept in self.calls:
            for old, new in zip(tensors(kept), tensors(func(*args, **kwargs)), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    def lose(self) -> None:
        """Overwrite all results of this graph, since another graph uses the memory."""
        for each in self.made.values():
            if each.is_floating_point():
                each.fill_(torch.nan)


class FakeRecorder:
    """Replaces ``cuda_graphs.GraphRecorder``. ``num_layers`` tells where a forward's graphs end."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.pools: list[Pool] = []
        self.is_aside = False

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        self.is_aside = True
        yield
        self.is_aside = False

    def pool(self) -> Pool:
        self.pools.append(Pool())
        return self.pools[-1]

    def begin(self, pool: Pool) -> RecordedGraph:
        assert self.is_aside
        if not pool.forwards or len(pool.forwards[-1]) > self.num_layers:
            pool.forwards.append([])
        graph = RecordedGraph(pool, pool.forwards[-1])
        pool.forwards[-1].append(graph)
        graph.__enter__()
        return graph

    def end(self, graph: RecordedGraph) -> None:
        graph.__exit__(None, None, None)

    def replays(self) -> list[list[int]]:
        """Return how often each graph ran, by forward."""
        return [[graph.replays for graph in forward] for pool in self.pools for forward in pool.forwards]


def tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors among the leaves of ``tree``."""
    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]
