"""Finds where a checkpoint's packed weights belong in a model: in linear layers, or in experts' stacked parameters.

Names are translated by transformers' own rules, so a weight is found under any name that transformers can load.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from fastdecode.sworker.model.kept_experts import keeps_experts
from fastdecode.sworker.model.prepack import multiplies_alone

Parts = list[list[str]]
"""The names of one parameter's packed weights: for each projection along its outputs, one name or one per expert."""


@dataclass
class PackedPlaces:
    """The modules to which packed weights belong. ``reason``: why some weight has no module; "" if each has one."""

    linears: dict[str, str] = field(default_factory=dict)
    """The name of the packed weight of each linear layer, by the layer's name."""

    experts: dict[str, dict[str, Parts]] = field(default_factory=dict)
    """The packed weights of each experts' module, by the module's name and the parameter's."""

    reason: str = ""


class Finder:
    """Finds the modules of packed weights by transformers' rules for renaming and joining tensors."""

    def __init__(self, model: Any) -> None:
        rules = get_model_conversion_mapping(model)
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._by_pattern = {pattern: rule for rule in self._converters for pattern in rule.source_patterns}
        self._modules = dict(model.named_modules())
        self._prefix, self._known = model.base_model_prefix, model.state_dict()
        self.found = PackedPlaces()

    def add(self, name: str) -> bool:
        """Record the module to which the packed weight ``name`` belongs; return False if none can keep it packed."""
        target, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, self._known)
        if target not in self._known and name in self._known:
            target, pattern = name, None
        owner, _, own = target.rpartition(".")
        module = self._modules.get(owner)
        if own == "weight" and pattern is None and isinstance(module, torch.nn.Linear):
            self.found.linears[owner] = name
            return multiplies_alone(type(module))  # type: ignore[arg-type]
        if not keeps_experts(module) or own not in getattr(module, "_parameters", {}):
            return False
        parts = self.found.experts.setdefault(owner, {}).setdefault(own, [])
        place = self._place(pattern)
        parts.extend([] for _ in range(place + 1 - len(parts)))
        parts[place].append(name)
        return place >= 0

    def _place(self, pattern: str | None) -> int:
        """Return which projection ``pattern`` fills, from 0; -1 if transformers does more than stack and join."""
        if pattern is None:
            return 0
        rule = self._by_pattern[pattern]
        done = [(type(step), getattr(step, "dim", None)) for step in rule.operations]
        stacks = done in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])
        return list(rule.source_patterns).index(pattern) if stacks and len(rule.target_patterns) == 1 else -1

    def incomplete(self) -> str:
        """Return the name of a parameter of which only some experts are packed; "" if there is none."""
        for owner, parameters in self.found.experts.items():
            module: Any = self._modules[owner]
            for own, parts in parameters.items():
                whole = all(len(part) == module.num_experts for part in parts) or [len(part) for part in parts] == [1]
                if not whole or module._parameters[own].shape[1] % len(parts):
                    return f"{owner}.{own}"
        return ""


def places_of(names: Iterable[str], model: Any) -> PackedPlaces:
    """Return the modules of ``model`` to which the packed weights ``names`` belong."""
    finder = Finder(model)
    for name in sorted(names, key=dot_natural_key):
        if not finder.add(name):
            finder.found.reason = f"{name} is no plain linear layer's, and no expert's that transformers only stacks"
            return finder.found
    if missing := finder.incomplete():
        finder.found.reason = f"some experts of {missing} are not packed"
    return finder.found
