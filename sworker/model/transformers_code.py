"""Loads a model with transformers' code: quantizes it, cuts it for a rank, replaces layers, runs a trial forward."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch

from fastdecode.api.config import EngineConfig
from fastdecode.core.errors import ConfigError, UnsupportedModelError
from fastdecode.core.optional import optional
from fastdecode.kinds.layout import KVLayout
from fastdecode.sworker.adapters.latents import leave_absorption_to_r_workers
from fastdecode.sworker.model.checkpoints import published_codes, quantization
from fastdecode.sworker.model.code import AnyRank, LoadedCode
from fastdecode.sworker.model.fused import FusedRows
from fastdecode.sworker.model.held import files_digest, tensors_of, weight_bytes, weights_digest
from fastdecode.sworker.model.loader import load_model, multiplies_int8, place_model, resolve_device, resolve_dtype
from fastdecode.sworker.model.packed_weight import FileMaps
from fastdecode.sworker.model.packing import choose
from fastdecode.sworker.model.prepack import PackedLinears
from fastdecode.sworker.model.support import probe_layers, probe_layout
from fastdecode.sworker.run.staging import MIN_ROWS

logger = logging.getLogger(__name__)


class TransformersCode:
    """A model with transformers' code, in which faster forms may replace layers. See ``ModelCode``."""

    def __init__(self, module: torch.nn.Module, least_rows: int = MIN_ROWS) -> None:
        self.module = module
        self.least_rows = least_rows

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def weight_bytes(self) -> int:
        return weight_bytes(self.module)

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())

    def logits(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return logits [rows, vocab_size], as the module's own head computes them."""
        kept = {} if rows is None else {"logits_to_keep": rows}
        output = self.module(input_ids=input_ids, position_ids=position_ids, use_cache=False, **kept)
        logits: torch.Tensor = output.logits[0]
        return logits

    def of(self, module: torch.nn.Module) -> TransformersCode:
        return TransformersCode(module, self.least_rows)


def load(config: EngineConfig, hf_config: Any, rank: AnyRank | None) -> LoadedCode:
    """Load the model that ``config`` names, or its part for ``rank``.

    Raise ConfigError, ModelLoadError or UnsupportedModelError.
    """
    packed_in, form = quantization(hf_config), choose(config, hf_config, resolve_device(config.device))
    whole = load_model(config, hf_config)
    digest = weights_digest(whole)
    if form.how == "theirs":
        digest += files_digest(config.model, config.revision)
    if config.latent_absorption == "r" and not leave_absorption_to_r_workers(whole):
        raise ConfigError(f"latent_absorption: r needs latent attention (MLA), and {hf_config.model_type} has none")
    needs_whole = rank and (config.prefill_workers or config.journal)
    layers = probe_layers(TransformersCode(whole), hf_config) if needs_whole else None
    if config.int8_calibration_tokens and not multiplies_int8(config):
        raise ConfigError("int8_calibration_tokens: only quantization int8 on a CPU is calibrated: leave it out")
    if multiplies_int8(config):
        published = published_codes(config.model, config.revision, packed_in)
        dtype = resolve_dtype(config.dtype, hf_config)
        num_tokens = config.int8_calibration_tokens
        optional("integer products").quantize(whole, hf_config, published, dtype, num_tokens > 0)
        if num_tokens:
            # ranks cut the rounded weights, so their number changes none
            digest += optional("calibration").calibrate(TransformersCode(whole), hf_config, num_tokens, rank)
    code = TransformersCode(place_model(config, hf_config, whole, rank))
    layout = _replace_and_probe(code, hf_config, config)
    if multiplies_int8(config):
        # Norms keep files mapped, and thereby the pages of experts that were read from these files: give these back
        FileMaps(unwritten=True).let_all_go(each for _, each in tensors_of(code.module))
    return LoadedCode(code, layout, replace(layout, layers=layers or layout.layers).absorbed, digest)


def _replace_and_probe(code: TransformersCode, hf_config: Any, config: EngineConfig) -> KVLayout:
    """Replace layers of the model by faster forms; return the layout that the trial forward then finds.

    If the trial forward then fails, all layers are restored and tried again.
    """
    model = code.module
    integers = optional("integer products").IntegerProducts(model, hf_config) if multiplies_int8(config) else None
    replaced: list[Any] = [PackedLinears(model), FusedRows(model)]
    if code.device.type == "cuda":
        replaced.append(optional("GPU rows").GpuRows(model))
    if integers:
        replaced += integers.replaced_layers()
    try:
        layout = probe_layout(code, hf_config, config.kv_cache_dtype)
    except UnsupportedModelError as error:
        for each in replaced:
            each.undo()
        # if the model itself is unsupported, this raises the error again
        layout = probe_layout(code, hf_config, config.kv_cache_dtype)
        logger.info("the model runs unchanged, with nothing replaced: %s", error)
    return layout.with_state_dtype(config.state_dtype)
