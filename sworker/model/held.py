"""The tensors that hold a model's weights in memory, packed or not: their bytes, bits per weight and digest."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fastdecode.sworker.model.checkpoints import packed_files
from fastdecode.sworker.model.packed_weight import FileMaps, PackedWeight, Sample


def tensors_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for all weights in memory; for a packed weight, yield the tensors that encode it."""
    for name, tensor in model.named_parameters():
        parts = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else ()
        yield from ((f"{name}.{part}", getattr(tensor, part)) for part in parts if getattr(tensor, part) is not None)
        if not parts:
            yield name, tensor
    for name, module in model.named_modules():
        if _holds_packed(module):
            yield from ((f"{name}.{own}", each) for own, each in module._buffers.items() if each is not None)


def weights_digest(model: torch.nn.Module) -> str:
    """Return a SHA-256 that identifies the checkpoint: of the name, shape and some numbers of every parameter."""
    digest = hashlib.sha256()
    # The fewest bytes of weights for which read pages are given back, since listing the pages that this process has
    # written takes 40 ms
    large = 64 << 20
    maps = FileMaps(unwritten=True) if weight_bytes(model) >= large else None
    for name, parameter in tensors_of(model):
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        given = parameter.sample if isinstance(parameter, PackedWeight) else None
        some = Sample(parameter.numel()).of(parameter) if given is None else given
        digest.update(some.float().cpu().numpy().tobytes())
        if maps and parameter.device.type == "cpu" and given is None:
            maps.let_go(parameter)
    return digest.hexdigest()


def files_digest(model: str, revision: str | None) -> str:
    """Return a SHA-256 of some bytes of each checkpoint file, for weights that only a format's package can read."""
    digest = hashlib.sha256()
    # Number of offsets at which a file is read, and number of bytes read at each offset
    num_places, num_bytes = 256, 64
    for name in packed_files(model, revision):
        with Path(name).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            digest.update(str(size).encode())
            for place in range(0, size, max(1, size // num_places)):
                file.seek(place)
                digest.update(file.read(num_bytes))
    return digest.hexdigest()


def weight_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of the model's weights in memory. Packed weights count as packed, shared ones once."""
    return sum(tensor.numel() * tensor.element_size() for _, tensor in tensors_of(model))


def bits_of(model: torch.nn.Module) -> float:
    """Return the average bits per weight of the packed layers, scales included; 0.0 if none is packed."""
    kept = [(name, each) for name, each in model.named_modules() if _holds_packed(each)]
    sizes = [num_weights(each) for _, each in kept]
    bytes_of = [sum(part.numel() * part.element_size() for _, part in _own_tensors(each)) for _, each in kept]
    return 8.0 * sum(bytes_of) / sum(sizes) if kept else 0.0


def num_weights(module: Any) -> int:
    """Return the number of weights of a layer that keeps them packed."""
    if experts := vars(module).get("kept_experts"):
        return int(experts.num_weights)
    return int(module.in_features * module.out_features)


def _holds_packed(module: Any) -> bool:
    if "kept_experts" in vars(module):
        return True
    weight = getattr(module, "_parameters", {}).get("weight")
    has_sizes = hasattr(module, "in_features") and hasattr(module, "out_features")
    return has_sizes and (weight is None or hasattr(weight, "__tensor_flatten__") or weight.element_size() < 2)


def _own_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from ((name, each) for name, each in tensors_of(module) if "bias" not in name)
