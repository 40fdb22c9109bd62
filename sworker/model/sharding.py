"""Tensor parallelism: each rank has its part of every layer's heads and columns, by transformers' plan (``tp_plan``).

This module cuts plain tensors, since `prepack.py` may pack layers later and replace their ``forward``. Hooks around
``forward`` exchange data with the other ranks. Every rank has the whole embedding: looking a row up takes no time,
while adding up partial rows of all ranks would.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from transformers.distributed import DistributedConfig

from fastdecode.core.errors import ConfigError, UnsupportedModelError
from fastdecode.sworker.adapters.index import plan_of_picked_heads
from fastdecode.sworker.adapters.latents import plan_of_latent_heads
from fastdecode.sworker.model.shared_exchange import SharedExchange, SharedMemory, whereabouts
from fastdecode.sworker.products.codes import codes_of, cut_experts, expert_codes_of

COLUMNS = ("colwise", "colwise_gather_output", "colwise_rep")
"""Plan styles of linear layers whose outputs are split among ranks; the last two then gather all outputs."""


@dataclass(frozen=True)
class Rank:
    """This process's rank among ``size`` ranks, with its collective operations.

    ``layers``: torch's process group for the tensors of layers. ``near``: shared memory, used instead of the group if
    all ranks compute on the CPU of one machine.
    """

    index: int
    size: int
    layers: Any
    near: SharedExchange | None = None

    def cut(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return a copy of this rank's part of ``tensor``; the last ranks' parts may be shorter or empty."""
        parts = tensor.chunk(self.size, dim)
        return parts[self.index].clone() if self.index < len(parts) else tensor.narrow(dim, 0, 0).clone()

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' tensors, in place if ``tensor`` is contiguous."""
        tensor = tensor.contiguous()
        if self.near:
            return self.near.sum(tensor)
        dist.all_reduce(tensor, group=self.layers)
        return tensor

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return all ranks' tensors in order."""
        if self.near:
            return self.near.gather(tensor.contiguous())
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor, group=self.layers)
        return parts

    def broadcast(self, message: bytes | None = None) -> bytes:
        """Return rank 0's ``message`` on every rank."""
        length = torch.tensor([len(message or b"")])
        dist.broadcast(length, 0)
        data = _as_tensor(message) if message is not None else torch.empty(int(length), dtype=torch.uint8)
        if len(data):
            dist.broadcast(data, 0)
        return message if message is not None else data.numpy().tobytes()

    def all_gather(self, answer: bytes, soon: bool = False) -> list[bytes]:
        """Send ``answer`` to all ranks; return all ranks' answers in order. ``soon``: use the shorter time limit."""
        if soon and self.near:
            return self.near.gather_bytes(answer)
        own = torch.tensor([len(answer)])
        lengths = [torch.zeros_like(own) for _ in range(self.size)]
        dist.all_gather(lengths, own)
        longest = max(map(int, lengths))
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(parts, _as_tensor(answer.ljust(longest, b"\0")))
        return [part[: int(length)].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]


class Rendezvous:
    """The ranks' meeting point: a store at ``port`` of ``host``, run by rank 0 or by the launcher."""

    def __init__(self, index: int, size: int, host: str, port: int, has_store: bool) -> None:
        self.index, self.size = index, size
        # Most time that the ranks wait for each other at the start
        meeting = datetime.timedelta(minutes=5)
        self._store = dist.TCPStore(host, port, is_master=has_store, timeout=meeting, wait_for_workers=False)
        self.port = int(self._store.port)

    def tell(self, name: str, value: str) -> None:
        """Publish ``value`` under ``name`` for the other ranks."""
        self._store.set(f"fastdecode/{name}", value)

    def ask(self, name: str) -> str:
        """Wait for the value that another rank publishes under ``name``; return it."""
        return bytes(self._store.get(f"fastdecode/{name}")).decode()

    def knows(self, names: Sequence[str]) -> bool:
        """Return whether all of ``names`` are published; never waits."""
        return bool(self._store.check([f"fastdecode/{name}" for name in names]))

    def join(self, device: str, local_index: int) -> Rank:
        """Join the group. Its layers use NCCL if ``device`` has a GPU (number ``local_index``), else gloo."""
        if dist.is_initialized():
            raise ConfigError("tensor_parallel_size: this process has a torch process group; start ranks in another")
        has_gpu = device != "cpu" and torch.cuda.is_available()
        # Most time that a rank waits for the next step
        forever = datetime.timedelta(days=365)
        dist.init_process_group("gloo", store=self._store, rank=self.index, world_size=self.size, timeout=forever)
        if has_gpu:
            torch.cuda.set_device(local_index)
        # Most time that a rank waits within a layer for another rank
        silence = datetime.timedelta(minutes=5)
        layers = dist.new_group(backend="nccl" if has_gpu else "gloo", timeout=silence)
        rank = Rank(self.index, self.size, layers)
        return rank if has_gpu else replace(rank, near=self._share_memory(rank))

    def _share_memory(self, rank: Rank) -> SharedExchange | None:
        """Return the memory that all ranks share; None if they run on several machines, or if memory is short."""
        memory = SharedMemory.make(self.size) if self.index == 0 else None
        try:
            path = rank.broadcast((memory.path if memory else "").encode() if self.index == 0 else None).decode()
            memory = memory or (SharedMemory.find(path) if path else None)
            answers = rank.all_gather(whereabouts().encode() if memory else b"-")
            if not memory or len({answer.rpartition(b" ")[0] for answer in answers}) > 1:
                return None
            return SharedExchange(memory.file, self.index, [int(answer.rpartition(b" ")[2]) for answer in answers])
        finally:
            if memory:
                memory.close()


def leave(rank: Rank | None = None) -> None:
    """Leave the groups that ``Rendezvous.join`` has joined; may be called twice."""
    if rank and rank.near:
        rank.near.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def shard(model: Any, hf_config: Any, rank: Rank) -> None:
    """Cut the whole ``model`` to this rank's part, and let its forwards exchange data with the other ranks."""
    plan = check_plan(model, hf_config, rank.size) | plan_of_picked_heads(model) | plan_of_latent_heads(model)
    _untie(model, plan)
    modules, (_, num_kv_heads) = dict(model.named_modules()), _head_counts(hf_config)
    # Plan styles of modules whose outputs must be summed over ranks
    sums = ("moe_tp_experts", "all_reduce")
    # Plan style of an expert that every rank computes whole. Each rank divides the output by ``size``, so that the sum
    # is right.
    identity = "moe_identity_expert"
    # Plan styles that concern only gradients, or weights that every rank keeps whole
    nothing = ("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params")
    for name, style in plan.items():
        module = modules.get(name)
        owner = modules[name.rpartition(".")[0]] if module is None else module
        if isinstance(owner, torch.nn.Embedding) or style in nothing:
            continue
        if isinstance(owner, torch.nn.Linear):
            if module is not None:
                repeats = name.endswith((".k_proj", ".v_proj", ".indexer.q_proj")) and rank.size > num_kv_heads
                _cut_linear(name, owner, style, rank, num_kv_heads if repeats else 0)
        elif module is not None and style == identity:
            module.register_forward_hook(lambda module, args, output: output / rank.size)
        elif module is not None:
            _check_style(name, style, sums)
            if expert_codes_of(module, "down_proj"):
                continue  # int8 layers sum over ranks themselves
            module.register_forward_hook(lambda module, args, output: _summed(output, rank))
        else:
            _cut_parameter(name, owner, style, rank)


def check_plan(model: Any, hf_config: Any, size: int) -> dict[str, str]:
    """Return the model's plan, a style per module or parameter. Raise an error if ``size`` ranks cannot share it."""
    kind, text_config = hf_config.model_type, hf_config.get_text_config()
    if not getattr(model, "tp_plan", None):
        raise UnsupportedModelError(f"tensor_parallel_size: transformers has no plan for {kind} models: leave it out")
    num_heads, num_kv_heads = _head_counts(hf_config)
    if num_heads % size:
        raise ConfigError(f"tensor_parallel_size: {size} ranks cannot share the model's {num_heads} heads evenly")
    if num_kv_heads % size and (size % num_kv_heads or text_config.is_heterogeneous):
        raise ConfigError(
            f"tensor_parallel_size: the model's {num_kv_heads} KV heads can neither be dealt to {size} ranks nor be "
            f"repeated on them"
        )
    return dict(model._resolve_parallel_plans(DistributedConfig(tp_size=size))[0])


def _head_counts(hf_config: Any) -> tuple[int, int]:
    """Return the numbers of query heads and KV heads. If layers differ, return the greatest common divisors."""
    text_config = hf_config.get_text_config()
    layers = text_config.per_layer_config if text_config.is_heterogeneous else [text_config]
    heads = [int(each.num_attention_heads) for each in layers]
    kv_heads = [int(getattr(each, "num_key_value_heads", None) or each.num_attention_heads) for each in layers]
    return math.gcd(*heads), math.gcd(*kv_heads)


def _check_style(name: str, style: str, known: Sequence[str]) -> None:
    if style not in known:
        raise UnsupportedModelError(f"tensor_parallel_size: {name} is planned as {style!r}, which is not known here")


def _untie(model: Any, plan: dict[str, str]) -> None:
    """Give the LM head its own copy of the embedding's weight if ``plan`` cuts the head."""
    head = model.get_output_embeddings()
    name = next((name for name, module in model.named_modules() if module is head), "")
    if isinstance(head, torch.nn.Linear) and plan.get(name) in COLUMNS:
        head.weight = torch.nn.Parameter(head.weight.data, requires_grad=False)


def _cut_linear(name: str, linear: torch.nn.Linear, style: str, rank: Rank, num_kv_heads: int) -> None:
    """Cut a linear layer to this rank's part. ``num_kv_heads``: 0, or their number if several ranks share a KV head."""
    # Plan styles of linear layers whose inputs are split. With the last two, the layer gets whole inputs and cuts them.
    rows = ("rowwise", "rowwise_rep", "rowwise_split_input")
    _check_style(name, style, (*COLUMNS, *rows))
    if style in COLUMNS:
        width = linear.out_features
        _cut_outputs(linear, lambda whole: rank.cut(_repeated(whole, num_kv_heads, rank.size), 0))
        if style != "colwise":
            linear.register_forward_hook(lambda module, args, output: _gathered(output, width, rank))
        return
    if style != "rowwise":
        linear.register_forward_pre_hook(lambda module, args: (rank.cut(args[0], -1), *args[1:]))
    if codes := codes_of(linear):  # int8 layers sum over ranks themselves
        codes.cut_inputs(name, rank)
        linear.in_features = codes.codes.shape[1]
        return
    _set(linear, "weight", rank.cut(linear.weight.data, 1))
    if linear.bias is not None and rank.index:
        # ranks' outputs are summed, so only rank 0 adds a bias
        _set(linear, "bias", torch.zeros_like(linear.bias.data))
    linear.in_features = linear.weight.shape[1]
    linear.register_forward_hook(lambda module, args, output: _summed(output, rank))


def _cut_outputs(linear: torch.nn.Linear, cut: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Apply ``cut`` to the output dimension of weight and bias, or of the int8 weight and its scales."""
    codes = codes_of(linear)
    if codes:
        codes.cut_outputs(cut)
        linear.out_features = len(codes.codes)
    for part, value in list(linear._parameters.items()):
        if value is not None and not (codes and part == "weight"):
            _set(linear, part, cut(value.data))
            linear.out_features = len(linear._parameters[part])  # type: ignore[arg-type]


def _cut_parameter(name: str, owner: torch.nn.Module, style: str, rank: Rank) -> None:
    """Cut parameter ``name`` to this rank's part: experts' weights, or a vector with one number per head.

    Weights are [num_experts, outputs, inputs], or [num_experts, inputs, outputs] in Llama 4. If a weight packs gate and
    up projections, the gate's outputs come first, and the two halves are cut separately.
    """
    _check_style(name, style, ("packed_colwise", "rowwise", "packed_rowwise", "colwise"))
    part = name.rpartition(".")[2]
    if codes := expert_codes_of(owner, part):
        cut_experts(name, codes, style, rank)
        return
    weight = getattr(owner, part).data
    dim = -2 if style.endswith("colwise") and weight.dim() > 1 else -1
    halves = weight.chunk(2, dim) if style.startswith("packed") else (weight,)
    _set(owner, part, torch.cat([rank.cut(half, dim) for half in halves], dim))


def _set(module: torch.nn.Module, name: str, value: torch.Tensor) -> None:
    setattr(module, name, torch.nn.Parameter(value.contiguous(), requires_grad=False))


def _repeated(rows: torch.Tensor, num_heads: int, size: int) -> torch.Tensor:
    """Return ``rows`` [num_heads · dim, …] with each head repeated once per rank that needs it; as is for 0 heads."""
    if not num_heads:
        return rows
    return rows.unflatten(0, (num_heads, -1)).repeat_interleave(size // num_heads, 0).flatten(0, 1)


def _summed(output: torch.Tensor, rank: Rank) -> torch.Tensor:
    return rank.sum(output)


def _gathered(output: torch.Tensor, width: int, rank: Rank) -> torch.Tensor:
    """Return all columns, [..., width], joined from the ranks' parts, of which the last may be narrower."""
    widest = -(-width // rank.size)
    own = torch.nn.functional.pad(output, (0, widest - output.shape[-1])).contiguous()
    return torch.cat(rank.gather(own), -1)[..., :width]


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
