"""Tensor parallelism: each rank has a part of every layer's heads and columns, as transformers plans it.

The plan is transformers' (``tp_plan``); cutting is done here on plain tensors, since layers may be packed afterwards
(`prepack.py`), which replaces their ``forward``: what other ranks add comes in hooks around it. The embedding is kept
whole on every rank: looking rows up takes no time, and adding ranks' parts would.
"""

from __future__ import annotations

import datetime
import math
import re
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
"""Styles of linear layers of which a rank has a part of the outputs; the last two gather them."""

ROWS = ("rowwise", "rowwise_rep", "rowwise_split_input")
"""Styles of linear layers of which a rank has a part of the inputs: their outputs are summed. The last two take their
part of whole inputs."""

SUMS = ("moe_tp_experts", "all_reduce")
"""Styles of modules whose outputs are summed."""

IDENTITY = "moe_identity_expert"
"""The style of an expert that every rank has whole, among those whose outputs are summed."""

NOTHING = ("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params")
"""Styles that change nothing where no gradients are wanted."""

SILENCE = datetime.timedelta(minutes=5)
"""How long a rank waits in a layer for one that stands still."""

FOREVER = datetime.timedelta(days=365)
"""How long one waits for the next step."""

MEETING = datetime.timedelta(minutes=5)
"""How long the ranks wait for each other at the start."""


@dataclass(frozen=True)
class Rank:
    """One of ``size`` ranks. ``layers``: the group whose operations are those of the model's layers; ``near``: what
    does them instead where all ranks compute on one machine's cores."""

    index: int
    size: int
    layers: Any
    near: SharedExchange | None = None

    def cut(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part of ``tensor``, a copy; the last ranks' parts may be shorter."""
        parts = tensor.chunk(self.size, dim)
        return parts[self.index].clone() if self.index < len(parts) else tensor.narrow(dim, 0, 0).clone()

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' tensors, in ``tensor``'s place where it is contiguous."""
        tensor = tensor.contiguous()
        if self.near:
            return self.near.sum(tensor)
        dist.all_reduce(tensor, group=self.layers)
        return tensor

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return all ranks' tensors, in order."""
        if self.near:
            return self.near.gather(tensor.contiguous())
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor, group=self.layers)
        return parts

    def broadcast(self, message: bytes | None = None) -> bytes:
        """Return rank 0's ``message``, on every rank."""
        length = torch.tensor([len(message or b"")])
        dist.broadcast(length, 0)
        data = _as_tensor(message) if message is not None else torch.empty(int(length), dtype=torch.uint8)
        if len(data):
            dist.broadcast(data, 0)
        return message if message is not None else data.numpy().tobytes()

    def all_gather(self, answer: bytes, soon: bool = False) -> list[bytes]:
        """Return the answers of all ranks, in order, on every rank; ``soon``: all of them come as in a layer."""
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
    """The place where the ranks meet: a store at ``port`` of ``host``, of rank 0 or of what started the ranks."""

    def __init__(self, index: int, size: int, host: str, port: int, has_store: bool) -> None:
        self.index, self.size = index, size
        self._store = dist.TCPStore(host, port, is_master=has_store, timeout=MEETING, wait_for_workers=False)
        self.port = int(self._store.port)

    def tell(self, name: str, value: str) -> None:
        """Let the other ranks know ``value``."""
        self._store.set(f"fastdecode/{name}", value)

    def ask(self, name: str) -> str:
        """Return what another rank told; waits for it."""
        return bytes(self._store.get(f"fastdecode/{name}")).decode()

    def knows(self, names: Sequence[str]) -> bool:
        """Return whether all of ``names`` were told; never waits."""
        return bool(self._store.check([f"fastdecode/{name}" for name in names]))

    def join(self, device: str, local_index: int) -> Rank:
        """Enter the group; for layers over NCCL where ``device`` has a GPU (number ``local_index``), else gloo."""
        has_gpu = device != "cpu" and torch.cuda.is_available()
        dist.init_process_group("gloo", store=self._store, rank=self.index, world_size=self.size, timeout=FOREVER)
        if has_gpu:
            torch.cuda.set_device(local_index)
        layers = dist.new_group(backend="nccl" if has_gpu else "gloo", timeout=SILENCE)
        rank = Rank(self.index, self.size, layers)
        return rank if has_gpu else replace(rank, near=self._share_memory(rank))

    def _share_memory(self, rank: Rank) -> SharedExchange | None:
        """Return the ranks' shared memory where all are on this machine; None if one is not, or has no room."""
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
    """The end of ``Rendezvous.join``; may be called twice."""
    if rank and rank.near:
        rank.near.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def shard(model: Any, hf_config: Any, rank: Rank) -> None:
    """Leave ``model``, which is whole, this rank's part, and have it work with the others."""
    plan = check_plan(model, hf_config, rank.size) | plan_of_picked_heads(model) | plan_of_latent_heads(model)
    _untie(model, plan)
    modules, (_, num_kv_heads) = dict(model.named_modules()), _head_counts(hf_config)
    for name, style in plan.items():
        module = modules.get(name)
        owner = modules[name.rpartition(".")[0]] if module is None else module
        if isinstance(owner, torch.nn.Embedding) or style in NOTHING:
            continue
        if isinstance(owner, torch.nn.Linear):
            if module is not None:
                repeats = name.endswith((".k_proj", ".v_proj", ".indexer.q_proj")) and rank.size > num_kv_heads
                _cut_linear(name, owner, style, rank, num_kv_heads if repeats else 0)
        elif module is not None and style == IDENTITY:
            module.register_forward_hook(lambda module, args, output: output / rank.size)
        elif module is not None:
            _check_style(name, style, SUMS)
            if expert_codes_of(module, "down_proj"):
                continue  # their product adds the sums of all ranks
            module.register_forward_hook(lambda module, args, output: _summed(output, rank))
        else:
            _cut_parameter(name, owner, style, rank)


def check_plan(model: Any, hf_config: Any, size: int) -> dict[str, str]:
    """The model's plan, a style per module or parameter; UnsupportedModelError or ConfigError where ``size`` ranks
    cannot share it."""
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


def layers_with_cut_inputs(model: Any) -> set[str]:
    """Return the names of layers of which a rank has a part of the inputs, whatever the number of ranks."""
    plan = dict(getattr(model, "tp_plan", None) or {}) | plan_of_picked_heads(model) | plan_of_latent_heads(model)
    names = (name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))
    return {name for name in names if plan.get(name, plan.get(re.sub(r"\b\d+\b", "*", name))) in ROWS}


def _head_counts(hf_config: Any) -> tuple[int, int]:
    """Return query heads and KV heads; where layers have several numbers of them, the greatest common divisors."""
    text_config = hf_config.get_text_config()
    layers = text_config.per_layer_config if text_config.is_heterogeneous else [text_config]
    heads = [int(each.num_attention_heads) for each in layers]
    kv_heads = [int(getattr(each, "num_key_value_heads", None) or each.num_attention_heads) for each in layers]
    return math.gcd(*heads), math.gcd(*kv_heads)


def _check_style(name: str, style: str, known: Sequence[str]) -> None:
    if style not in known:
        raise UnsupportedModelError(f"tensor_parallel_size: {name} is planned as {style!r}, which is not known here")


def _untie(model: Any, plan: dict[str, str]) -> None:
    """A head that shares the embedding's weight and is cut has a weight of its own from now on."""
    head = model.get_output_embeddings()
    name = next((name for name, module in model.named_modules() if module is head), "")
    if isinstance(head, torch.nn.Linear) and plan.get(name) in COLUMNS:
        head.weight = torch.nn.Parameter(head.weight.data, requires_grad=False)


def _cut_linear(name: str, linear: torch.nn.Linear, style: str, rank: Rank, num_kv_heads: int) -> None:
    """``num_kv_heads``: of keys or values that are fewer than ranks, so that several ranks have the same; else 0."""
    _check_style(name, style, (*COLUMNS, *ROWS))
    if style in COLUMNS:
        width = linear.out_features
        _cut_outputs(linear, lambda whole: rank.cut(_repeated(whole, num_kv_heads, rank.size), 0))
        if style != "colwise":
            linear.register_forward_hook(lambda module, args, output: _gathered(output, width, rank))
        return
    if style != "rowwise":
        linear.register_forward_pre_hook(lambda module, args: (rank.cut(args[0], -1), *args[1:]))
    if codes := codes_of(linear):  # its product adds the sums of all ranks
        codes.cut_inputs(name, rank)
        linear.in_features = codes.codes.shape[1]
        return
    _set(linear, "weight", rank.cut(linear.weight.data, 1))
    if linear.bias is not None and rank.index:
        _set(linear, "bias", torch.zeros_like(linear.bias.data))  # added once, by the first rank
    linear.in_features = linear.weight.shape[1]
    linear.register_forward_hook(lambda module, args, output: _summed(output, rank))


def _cut_outputs(linear: torch.nn.Linear, cut: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Leave a layer the outputs that ``cut`` leaves of each of its tensors."""
    codes = codes_of(linear)
    if codes:
        codes.cut_outputs(cut)
        linear.out_features = len(codes.codes)
    for part, value in list(linear._parameters.items()):
        if value is not None and not (codes and part == "weight"):
            _set(linear, part, cut(value.data))
            linear.out_features = len(linear._parameters[part])  # type: ignore[arg-type]


def _cut_parameter(name: str, owner: torch.nn.Module, style: str, rank: Rank) -> None:
    """Weights [num_experts, outputs, inputs], of Llama 4 [num_experts, inputs, outputs]: part of every expert.

    Gates and values are packed one after the other. Or a number for each head.
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
    """[num_heads · dim, …] with each head as often as there are ranks for it; as they are where ``num_heads`` is 0."""
    if not num_heads:
        return rows
    return rows.unflatten(0, (num_heads, -1)).repeat_interleave(size // num_heads, 0).flatten(0, 1)


def _summed(output: torch.Tensor, rank: Rank) -> torch.Tensor:
    return rank.sum(output)


def _gathered(output: torch.Tensor, width: int, rank: Rank) -> torch.Tensor:
    """Return all columns, [..., width], of which each rank has as many as it got, the last ones fewer."""
    widest = -(-width // rank.size)
    own = torch.nn.functional.pad(output, (0, widest - output.shape[-1])).contiguous()
    return torch.cat(rank.gather(own), -1)[..., :width]


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
