"""``fastdecode plan --table``: speed by context length and number of sessions, for three ways to serve them.

The ways are the GPU alone, FastDecode, and a GPU that streams the whole cache from the host in each step."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from fastdecode.core.errors import ConfigError
from fastdecode.perfmodel.lab.cli.machine_inputs import read_inputs
from fastdecode.perfmodel.lab.cli.planner_inputs import PlanInputs
from fastdecode.perfmodel.lab.cli.shape_inputs import named_shape
from fastdecode.perfmodel.lab.cli.variants.variant import with_enough_gpus
from fastdecode.perfmodel.lab.gpu_only import GpuServer, usable_bytes

SESSIONS = (1, 4, 8, 32)
CONTEXTS = (8192, 32768, 131072, 262144)


@dataclass(frozen=True)
class Cell:
    """One way to serve sessions: its time per token, and its throughput if the sessions take turns.

    ``milliseconds``: per token of each session; None if memory does not hold all sessions at once. ``in_turns``:
    tokens/s of as many sessions as memory holds, while the other sessions wait; 0 if memory holds none.
    """

    milliseconds: float | None = None
    in_turns: float = 0.0


@dataclass(frozen=True)
class Row:
    """The speeds for ``sessions`` sessions of ``context`` tokens. ``beyond``: the model allows no such contexts."""

    context: int
    sessions: int
    gpu_alone: Cell = Cell()
    fastdecode: Cell = Cell()
    streamed: Cell = Cell()
    beyond: bool = False


@dataclass(frozen=True)
class SessionTable:
    """The rows of the table, and two text lines on the memory of the GPU and of a host (``memory``)."""

    rows: tuple[Row, ...]
    memory: str


def session_table(args: argparse.Namespace) -> SessionTable:
    """Return the table. Raise ConfigError without a GPU.

    Raise PlanError if the memory of the GPU or of an R-worker is too small, whatever the context.
    """
    args = with_enough_gpus(args)
    longest = named_shape(args.model).max_context if args.model else 0
    rows: list[Row] = []
    memory = ""
    for context in CONTEXTS:
        if longest and context > longest:
            rows += [Row(context, sessions, beyond=True) for sessions in SESSIONS]
            continue
        inputs = _inputs(args, context)
        server = inputs.server
        if server is None:
            raise ConfigError("table: the table compares with the GPU alone; name a GPU with --gpu")
        memory = memory or _memory_line(args, inputs, server)
        rows += [_row(inputs, server, context, sessions) for sessions in SESSIONS]
    return SessionTable(tuple(rows), memory)


def _row(inputs: PlanInputs, server: GpuServer, context: int, sessions: int) -> Row:
    alone = _cell(sessions, server.most_sequences, lambda count: server.step_seconds(count) * 1e3)
    return Row(context, sessions, alone, _fastdecode(inputs, sessions), _streamed(inputs, server, sessions))


def _cell(sessions: int, most: int, step_milliseconds: Callable[[int], float]) -> Cell:
    """Return the speed of ``sessions`` sessions if memory holds at most ``most`` of them at once."""
    if sessions <= most:
        return Cell(step_milliseconds(sessions))
    return Cell(in_turns=most * 1e3 / step_milliseconds(most)) if most else Cell()


def _memory_line(args: argparse.Namespace, inputs: PlanInputs, server: GpuServer) -> str:
    """Return a line of text: the memory assumed for weights and cache on the GPU, and for the cache on a host."""
    planner = inputs.planner
    host = planner.capacity_tokens * (planner.kv_bytes_per_token or 0) * planner.r_workers_per_host
    gpu = f"GPU memory: {usable_bytes(server.gpu) / 1e9:.4g} GB for weights and cache."
    if not math.isfinite(host):
        return f"{gpu}\nHost memory: taken as enough (--kv-cache-memory)."
    name = inputs.host_name or "host"
    source = "as given" if args.kv_cache_memory else f"assumed for {name}; --kv-cache-memory gives an R-worker's"
    return f"{gpu}\nHost memory: {host / 1e9:.4g} GB for the cache on each host ({source})."


def table_lines(table: SessionTable) -> Iterator[str]:
    """Yield the printed lines of the table."""
    yield "ms per token for each session (tokens/s of all sessions), cached tokens per session as said"
    yield f"  {'context':>9s} {'sessions':>8s} {'GPU alone':>18s} {'FastDecode':>18s} {'KV over PCIe':>18s}  best"
    for row in table.rows:
        ways = ((row.gpu_alone, "GPU memory"), (row.fastdecode, "host memory"), (row.streamed, "host memory"))
        texts = " ".join(f"{_text(row, cell, memory):>18s}" for cell, memory in ways)
        yield f"  {row.context:9,} {row.sessions:8d} {texts}  {best_way(row)}"
    yield "In turns: memory holds too few sessions, so as many at once as fit are served; the others wait."
    yield "Best: most tokens/s. GPU memory, host memory: it holds no session. Context: it is beyond the model's."
    yield "KV over PCIe: the cache is in the host's memory and crosses the link in each step."
    if table.memory:
        yield table.memory


def table_figures(table: SessionTable) -> list[dict[str, float | None]]:
    """Return the table's rows as JSON objects. Each has the fields of three ``Cell``: see there."""
    ways = ("gpu_alone", "fastdecode", "streamed")
    return [
        {"context": row.context, "sessions": row.sessions}
        | {name: getattr(row, name).milliseconds for name in ways}
        | {f"{name}_in_turns": getattr(row, name).in_turns for name in ways}
        for row in table.rows
    ]


def best_way(row: Row) -> str:
    """Return the way with the most tokens per second, in words; "-" if none can run."""
    ways = {"GPU alone": row.gpu_alone, "FastDecode": row.fastdecode, "KV over PCIe": row.streamed}
    rates: dict[str, float] = {}
    for name, cell in ways.items():
        if cell.milliseconds is not None:
            rates[name] = row.sessions * 1e3 / cell.milliseconds
        elif cell.in_turns:
            rates[f"{name}, in turns"] = cell.in_turns
    return max(rates, key=rates.__getitem__) if rates else "-"


def _text(row: Row, cell: Cell, memory: str) -> str:
    if cell.milliseconds is not None:
        return f"{cell.milliseconds:,.4g} ({row.sessions * 1e3 / cell.milliseconds:,.3g}/s)"
    if cell.in_turns:
        return f"in turns {cell.in_turns:,.3g}/s"
    return "context" if row.beyond else memory


def _inputs(args: argparse.Namespace, context: int) -> PlanInputs:
    words: dict[str, Any] = {
        "seq_len": context + 1.0,
        "prompt_len": float(context),
        "shared_prefix_len": 0.0,
        "output_len_cv": 0.0,
    }
    words |= {"mini_batch_size": None, "interval_steps": None, "num_mini_batches": 1}
    words |= {"latent_absorption": "s" if args.latent_absorption == "auto" else args.latent_absorption}
    words |= {"state_on": "r" if args.state_on == "auto" else args.state_on}
    longest = named_shape(args.model).max_context if args.model else 0
    if longest and context + 1 > longest:
        words |= {"seq_len": float(longest), "prompt_len": longest - 1.0}
    inputs = read_inputs(argparse.Namespace(**vars(args) | words))
    decodes = replace(inputs.planner.workload, remote_prompts=True)
    server = replace(inputs.server, workload=decodes) if inputs.server else None
    return replace(inputs, planner=replace(inputs.planner, workload=decodes), server=server)


def _fastdecode(inputs: PlanInputs, sessions: int) -> Cell:
    """Return FastDecode's speed, with the given R-workers or as many as keep up with the S-worker."""
    planner = inputs.planner
    given = planner.num_r_workers
    most = sessions
    if given is not None:
        held = (count for count in range(sessions, 0, -1) if planner.memory_r_workers(count) <= given)
        most = next(held, 0)
    return _cell(sessions, most, lambda count: _fastdecode_milliseconds(inputs, count))


def _fastdecode_milliseconds(inputs: PlanInputs, sessions: int) -> float:
    """Return the milliseconds of a step with one or two mini-batches, whichever is faster."""
    found = []
    for count in (1, 2) if sessions > 1 else (1,):
        planner = replace(inputs.planner, num_mini_batches=count)
        size = math.ceil(sessions / count)
        workers = planner.num_r_workers or max(
            math.ceil(planner.enough_r_workers(size)), planner.memory_r_workers(sessions)
        )
        found.append(planner.candidate(size, workers).step_seconds * 1e3)
    return min(found)


def _streamed(inputs: PlanInputs, server: GpuServer, sessions: int) -> Cell:
    """Return the speed of a GPU that receives the whole cache over its link in each step, while it reads weights."""
    planner = inputs.planner
    host = planner.capacity_tokens * (planner.kv_bytes_per_token or 0) * planner.r_workers_per_host
    most = sessions if sessions * server.own_kv_bytes <= host else int(host / server.own_kv_bytes)

    def step_milliseconds(count: int) -> float:
        over_link = server.read_share * count * server.own_kv_bytes / server.gpu.host_bytes_per_second
        return max(over_link, server.step_seconds(count)) * 1e3

    return _cell(sessions, most, step_milliseconds)
