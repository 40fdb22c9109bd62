"""Turns the integers and scales of packed checkpoints back into weights.

The functions take a layer's stored tensors, or some of their rows. They return the layer's weight, [out, in] for a
linear layer, in float32. `in_parts` rounds this to the model's dtype, a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

PART_ELEMENTS = 1 << 18
"""Elements of a weight that are unpacked at a time; each takes some 16 bytes of temporary memory."""


def part_elements(device: torch.device | None) -> int:
    """Return how many elements to unpack at a time on ``device``: more on a GPU, where each launch takes time."""
    return PART_ELEMENTS << 6 if device and device.type == "cuda" else PART_ELEMENTS


def in_parts(
    shape: tuple[int, int],
    unit: int,
    dtype: torch.dtype,
    part: Callable[[int, int], torch.Tensor],
    device: torch.device | None = None,
) -> torch.Tensor:
    """Return a weight of ``shape`` in ``dtype``, in pieces: ``part(begin, end)`` makes rows ``begin`` to ``end``.

    Each ``begin`` is a multiple of ``unit``.
    """
    whole = torch.empty(shape, dtype=dtype, device=device)
    step = max(1, part_elements(device) // (unit * shape[1])) * unit
    for begin in range(0, shape[0], step):
        end = min(begin + step, shape[0])
        whole[begin:end] = part(begin, end)
    return whole


def integers(words: torch.Tensor, bits: int, interleaved: bool = False) -> torch.Tensor:
    """Return the unsigned integers in int32 ``words`` [rows, columns], lowest bits first: [rows, columns · 32 / bits].

    ``interleaved``: the eight numbers of a word are at positions 0, 4, 1, 5, 2, 6, 3, 7, as in AWQ's "gemm" layout.
    """
    places = torch.arange(32 // bits, dtype=torch.int32, device=words.device)
    if interleaved:
        places = places % 2 * 4 + places // 2
    return ((words[..., None] >> places * bits) & (2**bits - 1)).flatten(1)


def grouped(
    numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | float, groups: torch.Tensor | None = None
) -> torch.Tensor:
    """Return (number - zero) · scale for ``numbers`` [out, in]; scales and zeros are [out, groups].

    ``groups``: the group number of each column; by default, neighbouring columns form groups of equal size.
    """
    columns = numbers.shape[1]
    if groups is None:
        groups = torch.arange(columns, device=numbers.device) // -(-columns // scales.shape[1])
    zeros = zeros.float()[:, groups] if isinstance(zeros, torch.Tensor) else zeros
    return (numbers.float() - zeros) * scales.float()[:, groups]


def awq(words: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the weight of 4-bit AWQ in "gemm" layout, [out, in].

    ``words`` [in, out / 8], ``zeros`` [groups, out / 8], ``scales`` [groups, out].
    """
    numbers, offsets = (integers(each, 4, interleaved=True).T for each in (words, zeros))
    return grouped(numbers, scales.T, offsets)


def gptq(
    words: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, groups: torch.Tensor | None, bits: int, plus: int
) -> torch.Tensor:
    """Return the weight of a GPTQ layer, [out, in].

    ``words`` [in · bits / 32, out], ``zeros`` [groups, out · bits / 32], ``scales`` [groups, out]. ``plus``: the number
    to add to stored zero points, 1 if the checkpoint subtracted it.
    """
    offsets = (integers(zeros, bits) + plus) & (2**bits - 1)
    return grouped(integers(words.T.contiguous(), bits), scales.T, offsets.T, groups)


def packed_rows(
    words: torch.Tensor,
    scales: torch.Tensor,
    columns: int,
    zeros: torch.Tensor | None,
    groups: torch.Tensor | None,
    bits: int,
) -> torch.Tensor:
    """Return the weight of a layer in compressed-tensors' "pack-quantized" layout, [out, columns].

    ``words`` [out, in · bits / 32], whose last columns may be padding; ``scales`` [out, groups]; ``zeros`` None or
    words [out · bits / 32, groups].
    """
    middle = float(2 ** (bits - 1))
    offsets = middle if zeros is None else integers(zeros.T.contiguous(), bits).T[: len(words)]
    return grouped(integers(words, bits)[:, :columns], scales, offsets, groups)


def scaled(
    numbers: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    block: tuple[int, ...],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return FP8 or int8 ``numbers`` [rows, columns], less ``zeros``, times ``scales``, in ``dtype``.

    Scales are one for all, or per row, group or ``block``. Experts, [experts, rows, columns], have separate scales.
    """
    if numbers.ndim == 3:
        whole = torch.empty(numbers.shape, dtype=dtype, device=numbers.device)
        for index, each in enumerate(numbers):
            own = scales[index] if scales.ndim else scales
            whole[index] = scaled(each, own, None if zeros is None else zeros[index], block, dtype)
        return whole
    rows, columns = numbers.shape
    table = scales.float().reshape(-1, 1) if scales.ndim < 2 else scales.float()
    high, wide = block if block and len(table) < rows else (-(-rows // len(table)), -(-columns // table.shape[1]))
    across = torch.arange(columns, device=numbers.device) // (wide if table.shape[1] > 1 else columns)

    def part(begin: int, end: int) -> torch.Tensor:
        down = torch.arange(begin, end, device=numbers.device) // high
        offsets = 0.0 if zeros is None else zeros.float().reshape(table.shape)[down][:, across]
        return (numbers[begin:end].float() - offsets) * table[down][:, across]

    return in_parts((rows, columns), 32, dtype, part, numbers.device)
