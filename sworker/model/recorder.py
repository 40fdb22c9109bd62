"""Records a model's attention calls during the trial forward at loading."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fastdecode.kinds import Layer
from fastdecode.kinds.kind import MAX_HEAD_DIM
from fastdecode.kinds.latent import Weights
from fastdecode.sworker.adapters.calls import DENSE, INDEX_ARGUMENTS, Calls, Rule
from fastdecode.sworker.adapters.masks import MaskProbe
from fastdecode.sworker.model.refusals import OTHER_MASK, refuse
from fastdecode.sworker.run.prompts import Sight


class Recorder:
    """Replaces attention in the trial forward at loading: returns v, records each call's shapes and scoring rule."""

    def __init__(self, hf_config: Any, masks: MaskProbe | None = None, sights: Sequence[Sight | None] = ()) -> None:
        """``masks``: records the forward's mask requests. ``sights``: the rule of each mask, None if unknown."""
        self.hf_config = hf_config
        self.layers: dict[int, Layer] = {}
        self._indexes: dict[int, Layer] = {}
        self._weights: dict[int, Weights] = {}
        self._picked: set[int] = set()
        self.num_calls = 0
        self.has_states = False
        self.dtype = torch.float32
        self._masks = masks or MaskProbe()
        self._sights = sights

    def record(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        alibi_slopes: tuple[float, ...] = (),
        is_picked: bool = False,
        calls: Calls = DENSE,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Record the call of a layer or of an index; return a tensor in place of o.

        Shapes are those of :func:`fastdecode.sworker.run.pipeline.attend`.
        """
        if not calls.caches_rows:
            self.dtype, self.has_states = key.dtype, True
            self._note(self.num_calls, module, calls, calls.layer(query, key, value, Rule(scale=1.0)))
            return calls.answer(module, query, key, value)
        self._check(module, query, key, kwargs)
        sight = Sight(sliding_window or 0) if attention_mask is None else self._sight(attention_mask)
        number = self.num_calls if self.has_states else int(getattr(module, "layer_idx", self.num_calls))
        self.dtype = query.dtype
        if is_picked:
            self._picked.add(number)
        rule = Rule(
            scale=query.shape[3] ** -0.5 if scaling is None else float(scaling),
            window=sight.window,
            soft_cap=float(softcap or 0.0),
            sinks=() if s_aux is None else tuple(s_aux.float().tolist()),
            alibi_slopes=alibi_slopes,
            chunked=sight.chunked,
        )
        self._note(number, module, calls, calls.layer(query, key, value, rule))
        return calls.answer(module, query, key, value)

    def _note(self, number: int, module: Any, calls: Calls, layer: Layer) -> None:
        (self._indexes if layer.ranks_tokens else self.layers)[number] = layer
        self.num_calls += not layer.ranks_tokens
        if weights := calls.weights(module):
            self._weights[number] = weights

    def in_order(self) -> tuple[Layer, ...]:
        """Return the recorded layers in the order of their calls; an index comes before the layers that use it."""
        return tuple(layer for _, layer in self._numbered())

    def weights(self) -> dict[int, Weights]:
        """Return, by layer number, the functions that make the weights with which R-workers multiply."""
        places = {number: place for place, (number, layer) in enumerate(self._numbered()) if not layer.ranks_tokens}
        return {places[number]: weights for number, weights in self._weights.items()}

    def _numbered(self) -> list[tuple[int, Layer]]:
        found: list[tuple[int, Layer]] = []
        index = -1
        for number, layer in sorted(self.layers.items()):
            if number in self._indexes:
                index = len(found)
                found.append((number, self._indexes[number]))
            found.append((number, layer.reading(index) if number in self._picked else layer))
        return found

    @staticmethod
    def answer(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, calls: Calls = DENSE,
        **__: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Return a tensor in place of o, of the shape that the module expects, and record nothing."""
        return calls.answer(module, query, key, value)

    def _sight(self, mask: torch.Tensor) -> Sight:
        """Return the rule of ``mask``: which tokens a query sees. Refuse a model whose mask has no known rule."""
        number = self._masks.find(mask)
        if number is None:
            refuse(self.hf_config, "adds a mask or bias of its own to the scores (ALiBi, dynamic masks)", OTHER_MASK)
        sight = self._sights[number] if number < len(self._sights) else None
        if sight is None:
            refuse(
                self.hf_config, "asks for a mask that is neither causal nor a sliding window nor chunked", OTHER_MASK
            )
        return sight

    def _check(self, module: Any, query: torch.Tensor, key: torch.Tensor, kwargs: dict[str, Any]) -> None:
        if getattr(module, "is_causal", True) is False or kwargs.pop("is_causal", True) is False:
            refuse(self.hf_config, "attends in both directions", "attention that is causal")
        if query.shape[2] != key.shape[2] or query.shape[1] % key.shape[1]:
            refuse(self.hf_config, "does not hand over one key and value per token")
        # Arguments of attention calls that do not change o
        harmless = "dropout position_ids use_cache cache_position output_attentions output_router_logits logits_to_keep"
        unknown = [name for name, given in kwargs.items() if given is not None and name not in harmless.split()]
        if unknown:
            needs = "an adapter of its indexer (`sworker/adapters/index.py`)" if {*unknown} & {*INDEX_ARGUMENTS} else ""
            refuse(self.hf_config, f"asks its attention for {', '.join(unknown)}", needs)
        if key.shape[3] > MAX_HEAD_DIM:
            refuse(self.hf_config, f"has keys of {key.shape[3]} dims", f"more than {MAX_HEAD_DIM} in the kernels")
