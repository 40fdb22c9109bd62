"""The trial forward at loading, which finds out whether a model can be split into S-part and R-part.

It runs one forward, checks that every layer calls our attention, and reads the model's KV layout from the calls. Checks
of the configuration alone, before loading, are in `refusals.py`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch

from fastdecode.core.errors import ModelLoadError, UnsupportedModelError
from fastdecode.kinds import Layer
from fastdecode.kinds.layout import KVLayout
from fastdecode.sworker.adapters.masks import MaskProbe, ProbedGreenlet, asking_for_masks, cached_windows
from fastdecode.sworker.model.code import ModelCode
from fastdecode.sworker.model.recorder import Recorder
from fastdecode.sworker.model.refusals import ADAPTER, STATE, refuse
from fastdecode.sworker.run.pipeline import ModelGreenlet
from fastdecode.sworker.run.prompts import Sight
from fastdecode.sworker.run.staging import DTYPE_NAME, rows_of

MORE_ROWS = 21
"""Number of rows after the first 16 in the forward that tests whether a row always gets the same bits."""

TOKENS = (5, 6, 6, 5, 6, 5) + (5,) * 10
POSITIONS = (3, 4, 0, 3, 1, 9, *range(10))
"""Rows 0 and 3 have the same token at the same position among other rows, so their logits must be equal."""


def probe_layout(code: ModelCode, hf_config: Any, kv_dtype: str) -> KVLayout:
    """Run a few packed rows through a model's code; return the layout that its attention calls show.

    With ``kv_dtype`` "auto", the cache has the model's dtype. Raise UnsupportedModelError if the model does not call
    attention exactly once per layer, asks for something that R-workers do not support, or mixes rows outside attention.
    Raise ModelLoadError if its weights give no finite logits.
    """
    recorder, logits = _probe(code, hf_config)
    _check_calls(hf_config, recorder, hf_config.get_text_config().num_hidden_layers)
    if not bool(logits.isfinite().all()):
        raise ModelLoadError(
            f"cannot load {getattr(hf_config, '_name_or_path', '') or hf_config.model_type!r}: its logits are NaN or "
            f"infinite in {DTYPE_NAME[recorder.dtype]}; the weights are damaged, or need another --dtype"
        )
    same, other = logits[0].float(), logits[3].float()
    if not torch.allclose(same, other, rtol=0, atol=1e-2 * float(same.abs().max())):
        what = "mixes the tokens of a packed row elsewhere than in attention (a state or a convolution, or it heeds no "
        refuse(hf_config, what + "position_ids)", f"positions that it is given, or {STATE}")
    model_dtype = DTYPE_NAME[recorder.dtype]
    kv_dtype = model_dtype if kv_dtype == "auto" else kv_dtype
    return KVLayout(recorder.in_order(), model_dtype, kv_dtype, weights=recorder.weights())


def _check_calls(hf_config: Any, recorder: Recorder, num_layers: int) -> None:
    """Refuse a model that does not call attention once per layer, or whose cache drops tokens that its masks show."""
    num_calls = recorder.num_calls
    if recorder.has_states:  # a hybrid's layer may call attention twice, or never
        return
    if sorted(recorder.layers) != list(range(num_layers)) or num_calls != num_layers:
        most = f", and counts {len(recorder.layers)} layers there" if num_calls == num_layers else ""
        needs = "several entries per layer in the cache" if num_calls else ADAPTER
        what = f"calls the attention interface {num_calls} times for its {num_layers} layers{most}"
        refuse(hf_config, what, needs)
    for index, kept in enumerate(cached_windows(hf_config)[:num_layers]):
        if kept and not 0 < getattr(recorder.layers[index], "window", 0) <= kept:
            what = f"shows layer {index} more tokens than the {kept} that generate's cache keeps of it"
            refuse(hf_config, what, "a model whose forward and generate agree")


def repeats_rows(code: ModelCode, hf_config: Any, counts: Sequence[int] = (len(TOKENS),)) -> bool:
    """Return whether a row has the same bits in forwards of ``counts`` rows as in a larger forward, attention excluded.

    These bits are the row's logits and all that attention calls send. Products may add in another order if the number
    of rows differs. Then a recomputed sequence rounds differently, which shows in 16-bit dtypes and states of 16 bits.
    """
    num_rows = len(TOKENS) + MORE_ROWS
    tokens = torch.arange(7, 7 + num_rows) * 31 % int(hf_config.get_text_config().vocab_size)
    more, *several = (_rows_of_forward(code, hf_config, tokens[:count].tolist()) for count in (num_rows, *counts))
    return all(torch.equal(few, many[: len(few)]) for each in several for few, many in zip(each, more, strict=True))


def _rows_of_forward(code: ModelCode, hf_config: Any, tokens: list[int]) -> list[torch.Tensor]:
    """Return logits [rows, vocab] of a forward of ``tokens``, then all that it sends to R-workers, bytes [rows, …]."""
    sent: list[torch.Tensor] = []

    def answer(module: Any, query: Any, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        given = [each for each in (query, key, value) if each is not None and each.numel()]
        sent.extend(rows_of(each).flatten(1).contiguous().view(torch.uint8) for each in given)
        return Recorder.answer(module, query, key, value, *args, **kwargs)

    return [_forward(code, hf_config, ModelGreenlet, answer, tokens, range(len(tokens))), *sent]


@torch.inference_mode()
def varying_layers(model: torch.nn.Module) -> list[str]:
    """Return the layers that round a row differently among 16 rows than among more; ``*`` stands for layer numbers."""
    tried: dict[tuple[object, ...], bool] = {}
    found: dict[str, None] = {}
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is None or weight.ndim != 2 or isinstance(module, torch.nn.Embedding):
            continue
        key = type(module), weight.shape, "forward" in vars(module)
        if key not in tried:
            tried[key] = _varies(module, weight.shape[isinstance(module, torch.nn.Linear)], weight)
        if tried[key]:
            found[re.sub(r"\b[0-9]+\b", "*", name)] = None
    return list(found)


def _varies(module: torch.nn.Module, width: int, weight: torch.Tensor) -> bool:
    rows = torch.randn(1, len(TOKENS) + MORE_ROWS, width, generator=torch.Generator()).to(weight.device, weight.dtype)
    try:
        few, more = module(rows[:, : len(TOKENS)].contiguous()), module(rows)
    except Exception:  # this layer takes other arguments than rows
        return False
    return isinstance(few, torch.Tensor) and not torch.equal(few, more[:, : len(TOKENS)])


def probe_layers(code: ModelCode, hf_config: Any) -> tuple[Layer, ...]:
    """Run a forward; return the layers of its attention calls, in order. Raise UnsupportedModelError if it fails."""
    recorder, _ = _probe(code, hf_config)
    return recorder.in_order()


def _probe(code: ModelCode, hf_config: Any) -> tuple[Recorder, torch.Tensor]:
    rows = MaskProbe()
    with asking_for_masks(code.module):
        recorder = Recorder(hf_config, rows, _sights(code, hf_config))
        return recorder, _forward(code, hf_config, partial(ProbedGreenlet, masks=rows), recorder.record)


def _sights(code: ModelCode, hf_config: Any) -> list[Sight | None]:
    """Return the rule of each mask that a forward requests; None if no known rule fits. Attention is not computed."""
    length = len(TOKENS)
    # Most tokens of a text that is made to examine masks
    longest_text = 1 << 14
    while True:
        texts = MaskProbe()
        with contextlib.suppress(_FirstCallError):
            tokens = (TOKENS * length)[:length]
            _forward(code, hf_config, partial(ProbedGreenlet, masks=texts), _stop, tokens, range(length))
        sights = [asked.sight() for asked in texts.asked]
        needed = max((asked.reach for asked in texts.asked), default=0)
        if None not in sights or not length < needed <= longest_text:
            return sights
        length = needed  # some mask functions read a token at each position, so repeat with a text of that many tokens


class _FirstCallError(Exception):
    """Ends a forward at its first attention call, when it has requested all its masks."""


def _stop(*_: Any, **__: Any) -> NoReturn:
    raise _FirstCallError


def _forward(
    code: ModelCode,
    hf_config: Any,
    kind: Callable[..., ModelGreenlet],
    attend: Callable[..., torch.Tensor],
    token_ids: Sequence[int] = TOKENS,
    places: Sequence[int] = POSITIONS,
) -> torch.Tensor:
    """Return logits [rows, vocab] of ``token_ids`` at positions ``places``.

    The forward runs in a greenlet of class ``kind``, which answers its attention calls by ``attend``.
    """
    tokens, positions = (torch.tensor([ids], device=code.device) for ids in (token_ids, places))
    rows = torch.tensor([0, *range(len(token_ids))], device=code.device)
    running = kind(lambda: code.logits(tokens, positions, rows), attend)
    try:
        with torch.inference_mode():
            logits: torch.Tensor = running.switch()
    except (UnsupportedModelError, _FirstCallError):
        raise
    except Exception as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        refuse(hf_config, f"fails in a forward over packed rows ({reason})", "a forward of tokens and positions alone")
    if len(logits) != 1 + len(token_ids):
        refuse(hf_config, "heeds no logits_to_keep", "logits of the rows that sample")
    return logits[1:]
