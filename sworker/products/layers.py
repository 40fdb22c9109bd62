"""Decoder layers in two calls: one before attention, and one after it, in place of some twenty torch operations.

The layer's code is not changed. The layer gets another ``forward`` if a trial on random rows gives equal bits, since
the calls use the kernels that replaced norms, rotary embeddings and products one by one.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from greenlet import getcurrent

from fastdecode import _sworker
from fastdecode.sworker.adapters.calls import DENSE, calls_of
from fastdecode.sworker.model.fused import OnePassNorm
from fastdecode.sworker.model.prepack import PROOF_ROWS
from fastdecode.sworker.model.recorder import Recorder
from fastdecode.sworker.products.gated import GatedLayers
from fastdecode.sworker.products.kernels import array
from fastdecode.sworker.products.linears import IntegerLinears, IntegerProduct
from fastdecode.sworker.run.pipeline import ModelGreenlet, attend
from fastdecode.sworker.run.staging import from_numpy

logger = logging.getLogger(__name__)


@dataclass
class Call:
    """An attention call of a layer's own code: q, k, v [1, heads, T, dim], and the arguments after the mask."""

    tensors: tuple[torch.Tensor, ...]
    options: dict[str, Any]


class LayersInTwoCalls:
    """Replaces the ``forward`` of a model's decoder layers, and can restore it."""

    def __init__(self, model: torch.nn.Module, linears: IntegerLinears, gated: GatedLayers) -> None:
        """Replace the ``forward`` of each layer for which a trial shows that the two calls give the same bits."""
        self._linears, self._gated = linears, gated
        self._replaced: list[torch.nn.Module] = []
        for module in model.modules():
            layer = self._made(module)
            if layer and layer.is_proven():
                module.__dict__["forward"] = layer
                self._replaced.append(module)
        logger.info("%d decoder layers in two calls", len(self._replaced))

    def undo(self) -> None:
        for module in self._replaced:
            del module.__dict__["forward"]
        self._replaced.clear()

    def _made(self, module: Any) -> LayerInTwoCalls | None:
        """Return ``module`` as two calls; None for other modules, and for layers that two calls cannot replace."""
        parts = module.named_children()
        children = {name: each for name, each in parts if not isinstance(each, torch.nn.Dropout)}
        attention, mlp = children.get("self_attn"), children.get("mlp")
        norms = [_norm_of(children.get(name)) for name in ("input_layernorm", "post_attention_layernorm")]
        activation = self._gated.activation_of(mlp) if mlp else None
        if set(children) != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"} or None in norms:
            return None
        linears: Any = dict(attention.named_children()) if attention else {}
        qkv = self._product_of(attention, "q_proj", "k_proj", "v_proj") or self._product_of(attention, "qkv_proj")
        gate_up = self._product_of(mlp, "gate_proj", "up_proj") or self._product_of(mlp, "gate_up_proj")
        found = qkv, self._product_of(attention, "o_proj"), gate_up, self._product_of(mlp, "down_proj")
        products = [product for product in found if product and not product.is_split]
        if not activation or len(products) < 4 or any(map(_is_hooked, module.modules())):
            return None
        no_norm = torch.empty(0).numpy(), 0.0, False
        own_norms = [_norm_of(linears[name]) if name in linears else no_norm for name in ("q_norm", "k_norm")]
        head_dim = getattr(attention, "head_dim", None)
        if None in own_norms or not isinstance(head_dim, int):
            return None
        return _layer_of(module, products, [*norms, *own_norms], head_dim, activation)

    def _product_of(self, module: Any, *names: str) -> IntegerProduct | None:
        """Return the one product that computes all layers ``names`` of ``module``; None if there is no such product."""
        products = {self._linears.products.get(id(getattr(module, name, None))) for name in names}
        return products.pop() if len(products) == 1 else None


def _norm_of(norm: Any) -> tuple[Any, float, bool] | None:
    """Return (weight, eps, whether rows are rounded before the weight multiplies them) of a norm in one pass."""
    form = vars(norm).get("forward") if norm else None
    return (form.weight, form.eps, form.round_first) if isinstance(form, OnePassNorm) else None


def _is_hooked(module: Any) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _layer_of(
    module: Any, products: list[IntegerProduct], norms: list[Any], head_dim: int, activation: str
) -> LayerInTwoCalls | None:
    qkv, o, gate_up, down = products
    heads, kv_heads = o.width // head_dim, (qkv.num_outputs - o.width) // (2 * head_dim)
    try:
        weights = qkv.packed, o.packed, gate_up.packed, down.packed
        input_norm, post_norm, q_norm, k_norm = norms
        layer = _sworker.IntegerLayer(
            *weights, input_norm, post_norm, q_norm, k_norm, heads=heads, kv_heads=kv_heads, activation=activation
        )
    except ValueError as error:
        logger.info("%s is left as it is: %s", type(module).__name__, error)
        return None
    return LayerInTwoCalls(module, layer, (heads, kv_heads, head_dim), qkv)


class Memory:
    """Arrays that layers in two calls share in one forward: q, k, v [T, heads, dim], cos and sin [T, dim].

    ``form``: the layers' form, see ``LayerInTwoCalls``. ``out``: the output of the layer that ran last, [1, T, hidden].
    ``rows``: a view of ``out``, [T, hidden].
    """

    def __init__(self, angles: tuple[torch.Tensor, ...], form: Form) -> None:
        """``angles``: cos and sin of a forward, [1, T, dim]."""
        self.angles, self.form = angles, form
        self.cos, self.sin = (array(each[0].contiguous()) for each in angles)
        self.qkv = tuple(array(torch.empty(len(self.cos), *shape, dtype=form.dtype)) for shape in form.shapes)
        self.num_threads = torch.get_num_threads()
        self.out: torch.Tensor | None = None
        self.rows: Any = None
        self._outs: list[tuple[torch.Tensor, Any]] = []

    def next_out(self, width: int) -> Any:
        """Set ``out`` and ``rows`` to new memory for rows of ``width`` elements; return ``rows``."""
        if not self._outs or self._outs[-1][0].shape[2] != width:
            # for several layers at once, since a torch operation takes 30 µs after attention; at most about 2 MB
            most_elements = 1 << 20
            count = max(1, most_elements // (len(self.cos) * width))
            made = torch.empty(count, 1, len(self.cos), width, dtype=self.form.dtype)
            self._outs = list(zip(made.unbind(), array(made)[:, 0], strict=True))
        self.out, self.rows = self._outs.pop()
        return self.rows


class Form(NamedTuple):
    """The (heads, dim) of a layer's q, k and v, and their dtype."""

    shapes: tuple[tuple[int, int], ...]
    dtype: torch.dtype


class LayerInTwoCalls:
    """The forward of a decoder layer. Arguments of unknown form go to the layer's own code."""

    def __init__(self, module: Any, layer: _sworker.IntegerLayer, heads: tuple[int, int, int], qkv: IntegerProduct):
        """``heads``: number of query heads, of KV heads, and elements per head."""
        self._module, self._attention, self._layer = module, module.self_attn, layer
        shapes = tuple((count, heads[2]) for count in (heads[0], heads[1], heads[1]))
        self._form, self._isa = Form(shapes, qkv.dtype), qkv.isa
        self._options: dict[str, Any] = {}

    def __call__(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        use_cache: Any = False,
        position_embeddings: Any = None,
        **more: Any,
    ) -> torch.Tensor:
        """Return the layer's output [1, T, hidden]; arguments are those of transformers' decoder layers."""
        x, angles = hidden_states, position_embeddings
        current: Any = getcurrent()
        memory: Any = getattr(current, "memory", None)
        # In decodes, nothing but numpy and C++ runs between two layers' attention: torch is slow when caches are cold
        is_next = memory is not None and memory.out is x and memory.angles is angles and memory.form == self._form
        if not is_next:
            if past_key_values is not None or not self._fits(x, angles):
                given = attention_mask, position_ids, past_key_values, use_cache, position_embeddings
                own: torch.Tensor = type(self._module).forward(self._module, x, *given, **more)
                return own
            memory = Memory(angles, self._form)
        rows = memory.rows if is_next else array(x[0].contiguous())
        q, k, v = memory.qkv
        self._layer.before(rows, memory.cos, memory.sin, q, k, v, self._isa, memory.num_threads)
        attend_rows = getattr(current, "attend_rows", None) if calls_of(self._attention) is DENSE else None
        if attend_rows:
            current.memory, o = memory, attend_rows(q, k, v).reshape(len(rows), -1)
        else:
            query, key, value = (from_numpy(each, self._form.dtype).transpose(0, 1)[None] for each in memory.qkv)
            attended, _ = attend(self._attention, query, key, value, attention_mask, **(self._options | more))
            o = array(attended[0].flatten(1).contiguous())
        out = memory.next_out(rows.shape[1])
        self._layer.after(rows, o, out, self._isa, memory.num_threads)
        return memory.out

    def _fits(self, x: torch.Tensor, angles: Any) -> bool:
        """Return whether ``x`` is one sequence of rows, and the rotary embeddings cover all elements of a head."""
        is_known = angles is not None and x.dtype == self._form.dtype and len(x) == 1
        return is_known and angles[0].shape[-1] == self._form.shapes[0][1]

    @torch.inference_mode()
    def is_proven(self) -> bool:
        """Return whether a trial gives the bits of the layer's own code: its q, k, v and its output."""
        generator = torch.Generator().manual_seed(0)
        width, head_dim, dtype = len(self._module.input_layernorm.weight), self._form.shapes[0][1], self._form.dtype
        hidden = torch.randn(1, PROOF_ROWS, width, generator=generator).to(dtype)
        angles = torch.randn(2, 1, PROOF_ROWS, head_dim, generator=generator).to(dtype).unbind()
        arguments: dict[str, Any] = {"position_ids": torch.arange(PROOF_ROWS)[None], "position_embeddings": angles}
        try:
            wanted, call = _tried(lambda: type(self._module).forward(self._module, hidden, **arguments))
            self._options = {name: value for name, value in call.options.items() if name not in arguments}
            found, same = _tried(lambda: self(hidden, **arguments))
        except Exception as error:  # the layer takes other arguments, or its attention is of another kind
            logger.info("%s is left as it is: %s", type(self._module).__name__, error)
            return False
        pairs = zip((found, *same.tensors), (wanted, *call.tensors), strict=True)
        return all(each.shape == own.shape and torch.equal(each, own) for each, own in pairs)


def _tried(run: Any) -> tuple[torch.Tensor, Call]:
    """Return the result of ``run``, a layer's forward, and its only attention call."""
    calls: list[Call] = []

    def answer(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> torch.Tensor:
        calls.append(Call((query, key, value), {name: each for name, each in options.items() if name != "calls"}))
        return Recorder.answer(module, query, key, value, **options)

    result = ModelGreenlet(run, answer).switch()
    (call,) = calls
    return (result[0] if isinstance(result, tuple) else result), call
