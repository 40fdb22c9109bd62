"""Policies decide operations and write nothing, and questions about the store leave it unchanged."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from helpers.golden import MODES, GoldenRun

from fastdecode.scheduler import Scheduler
from fastdecode.scheduler.policy.decodes import Decodes
from fastdecode.scheduler.prefix.adopted import Adopted
from fastdecode.scheduler.prefix.cache import PrefixCache
from fastdecode.scheduler.prefix.parked import Parked
from fastdecode.scheduler.prefix.retained import Retained
from fastdecode.scheduler.prefix.source import Source
from fastdecode.scheduler.prefix.states import States
from fastdecode.scheduler.store.operations import Operation
from fastdecode.scheduler.waiting import Lifecycle

SCHEDULER = Path(__file__).resolve().parents[1] / "fastdecode" / "scheduler"
PARTS = re.compile(r"\b_?(store|table|workers|residents|queue|transfers|prefixes|adopted|parked)\b")
"""Names of the store and of its parts, as policies call them."""

QUESTIONS = {
    "attending", "blocks_for", "blocks_of_tokens", "copy", "count_held", "hits", "is_broken", "is_on", "items",
    "kv_loads", "latest", "loads_on", "min", "next_rows", "num_outputs", "on", "prompt_loads", "reads",
    "rows_to_stop", "sequence", "several", "sum", "tail_lens", "tail_room", "tolist", "values", "ways",
}  # fmt: skip
"""Methods of the store's parts that policies may call."""


def written(node: ast.AST) -> Iterator[ast.expr]:
    """Yield what a statement assigns to or deletes, beyond plain names."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.Delete):
        targets = list(node.targets)
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        targets = [node.target]
    for target in targets:
        parts = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
        yield from (each for each in parts if isinstance(each, ast.Attribute | ast.Subscript))


def writes(source: str) -> list[str]:
    """Return the places where ``source`` writes to the store, or calls what may write to it."""
    found = []
    for node in ast.walk(ast.parse(source)):
        for target in written(node):
            owner = target.value
            if not (isinstance(target, ast.Attribute) and ast.unparse(owner) == "self") and PARTS.search(
                ast.unparse(owner)
            ):
                found.append(ast.unparse(target))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            is_part = PARTS.search(ast.unparse(node.func.value))
            if is_part and not ast.unparse(node.func.value).startswith("np.") and node.func.attr not in QUESTIONS:
                found.append(ast.unparse(node.func))
    return found


def test_policies_call_nothing_that_writes() -> None:
    modules = sorted((SCHEDULER / "policy").glob("*.py"))
    assert {"admission", "decodes", "moves", "second_copies"} <= {each.stem for each in modules}
    assert {each.name: found for each in modules if (found := writes(each.read_text()))} == {}


@pytest.mark.parametrize(
    "breach",
    ["self._store.grow(rows)", "self._table.on_second[rows] = True", "transfers.drop(one)", "self._table.x.y += 1"],
)
def test_a_write_is_found(breach: str) -> None:
    assert writes(breach)


def test_operations_are_frozen() -> None:
    for each in get_args(Operation):
        assert is_dataclass(each) and each.__dataclass_params__.frozen, each  # type: ignore[attr-defined]
        assert (each.__doc__ or "").strip(), each


def state_of(scheduler: Scheduler) -> dict[str, Any]:
    """Return all that the store and the queue know, by name; the order of the table's rows does not count."""
    store, table = scheduler.store, scheduler.store.table
    found: dict[str, Any] = {"snapshot": scheduler.snapshot(), "scratch": store.residents.scratch_free}
    columns = {name: each for name, each in vars(table).items() if isinstance(each, np.ndarray) and name != "rows"}
    columns |= {f"drafts.{name}": each for name, each in vars(table.drafts).items()}
    found |= {name: each.tobytes() for name, each in columns.items()}
    found["rows"] = sorted(table.rows.tolist())
    for worker in store.workers:
        plain = {each.name: getattr(worker, each.name) for each in fields(worker)}
        plain["controls"] = list(worker.controls)
        plain["prefixes"] = [
            (name, each.used_seconds, each.is_parked, len(each.blocks), len(each.own))
            for name, each in worker.prefixes.items()
        ]
        plain["blocks"] = [
            (block.num_sequences, block.num_prefixes) for each in worker.prefixes.values() for block in each.blocks
        ]
        found[f"R-worker {worker.index}"] = plain
    found["ids"] = repr(vars(store.prefixes.ids))
    found["queue"] = [(each.sequence_id, each.num_prefill, each.woken_on) for each in scheduler.queue.all]
    return found


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Compare the store before each operation with the store after the last one."""
    watch: dict[str, Any] = {"scheduler": None, "last": None, "kinds": set()}
    carry_out, do = Lifecycle.carry_out, Lifecycle._do

    def same() -> None:
        now = state_of(watch["scheduler"])
        changed = [name for name in now if now[name] != watch["last"][name]]
        assert not changed, f"a policy wrote to {changed}"

    def watched_carry_out(self: Lifecycle, decision: Any) -> Any:
        watch["last"] = state_of(watch["scheduler"])
        answer = carry_out(self, decision)
        same()
        return answer

    def watched_do(self: Lifecycle, operation: Operation) -> Any:
        same()
        answer = do(self, operation)
        watch["last"] = state_of(watch["scheduler"])
        watch["kinds"].add(type(operation))
        return answer

    monkeypatch.setattr(Lifecycle, "carry_out", watched_carry_out)
    monkeypatch.setattr(Lifecycle, "_do", watched_do)
    return watch


def test_the_store_changes_by_operations_alone(watched: dict[str, Any]) -> None:
    for seed, mode in enumerate(dict.fromkeys(MODES)):
        for more in (0, 10):
            run = GoldenRun(seed + more, mode)
            watched["scheduler"] = run.scheduler
            run.digest()
    names = {each.__name__ for each in watched["kinds"]}
    assert names >= {"Refresh", "SetFollowersAside", "Begin", "Attend", "Grow", "Preempt", "Move"}, names


def test_a_policy_that_writes_is_found(watched: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    within = Decodes._within_load_limit

    def writing(self: Decodes) -> np.ndarray:
        self._workers[0].num_sequences += 1
        return within(self)

    monkeypatch.setattr(Decodes, "_within_load_limit", writing)
    run = GoldenRun(3)
    watched["scheduler"] = run.scheduler
    with pytest.raises(AssertionError, match="a policy wrote to"):
        run.digest()


def test_each_source_is_a_class_of_its_own() -> None:
    """No method of the cache is for one source only, so its methods are few; the cache asks a list of sources."""
    for each in (Retained, States, Adopted, Parked):
        assert Source in each.__mro__, each
    assert not PrefixCache.__subclasses__()
    methods = [name for name, each in vars(PrefixCache).items() if callable(each) or isinstance(each, property)]
    assert len(methods) <= 18, methods
