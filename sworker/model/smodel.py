"""The S-worker's model: weights, KV layout, tokenizer and what generation needs to know of them."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from fastdecode.api.config import EngineConfig
from fastdecode.core.errors import ConfigError, ModelLoadError, RequestError, UnsupportedModelError
from fastdecode.core.machine import available_memory_bytes
from fastdecode.kinds.layout import KVLayout
from fastdecode.perfmodel.model_shape import ModelShape
from fastdecode.sworker.adapters.latents import leave_absorption_to_r_workers
from fastdecode.sworker.files.generation import generation_defaults
from fastdecode.sworker.model import packing
from fastdecode.sworker.model.checkpoints import published_codes, quantization
from fastdecode.sworker.model.first_layers import first_layers
from fastdecode.sworker.model.fused import FusedRows
from fastdecode.sworker.model.held import bits_of, files_digest, weights_digest
from fastdecode.sworker.model.loader import (
    load_hf_config,
    load_model,
    max_position_embeddings,
    model_shape,
    most_positions,
    place_model,
    resolve_device,
)
from fastdecode.sworker.model.prepack import PackedLinears
from fastdecode.sworker.model.refusals import check_rope
from fastdecode.sworker.model.sharding import Rank
from fastdecode.sworker.model.support import probe_layers, probe_layout, repeats_rows, varying_layers
from fastdecode.sworker.model.tokenizer import HFTokenizer
from fastdecode.sworker.products.experts import pack_experts, quantize_experts
from fastdecode.sworker.products.gated import GatedLayers
from fastdecode.sworker.products.linears import IntegerLinears, num_attention_heads, quantize_linears
from fastdecode.sworker.products.ordered import order_products
from fastdecode.sworker.run.staging import allow_few_rows
from fastdecode.sworker.sampling.grammar import Grammars

logger = logging.getLogger(__name__)

UNREAD = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
"""Keys of a configuration that change nothing of what is computed, or stand elsewhere."""


class SModel:
    """A transformers causal LM, loaded and probed; ``layout`` is what R-workers are told of it, ``whole_layout`` what
    prefill workers have."""

    def __init__(self, config: EngineConfig, rank: Rank | None = None) -> None:
        """``rank``: whose part of the model this is, of tensor parallelism; ``layout`` has that part's heads."""
        hf_config = load_hf_config(config)
        self.vocab_size = int(hf_config.get_text_config().vocab_size)
        self.max_model_len = _max_model_len(config, hf_config)
        check_rope(hf_config, self.max_model_len)
        self.tokenizer = None if config.skip_tokenizer_init else HFTokenizer(config)
        self.generation_defaults, self._eos_token_ids = generation_defaults(config, hf_config)
        packed_in = quantization(hf_config)
        form = packing.choose(config, hf_config, resolve_device(config.device))
        whole = load_model(config, hf_config)
        self._weights = weights_digest(whole)
        if form.how == "theirs":
            self._weights += files_digest(config.model, config.revision)
        if config.latent_absorption == "r" and not leave_absorption_to_r_workers(whole):
            raise ConfigError(f"latent_absorption: r needs latent attention (MLA), and {hf_config.model_type} has none")
        layers = probe_layers(whole, hf_config) if rank and (config.prefill_workers or config.journal) else None
        multiplies_int8 = config.quantization == "int8" and resolve_device(config.device).type == "cpu"
        if multiplies_int8:
            published = published_codes(config.model, config.revision, packed_in)
            quantize_linears(whole, hf_config, published)
            quantize_experts(whole, num_attention_heads(hf_config))
        self.model = place_model(config, hf_config, whole, rank)
        self.layout = _replace_and_probe(self.model, hf_config, config)
        self.whole_layout = replace(self.layout, layers=layers or self.layout.layers).absorbed
        self.model_type = str(hf_config.model_type)
        if not repeats_rows(self.model, hf_config):
            named = ", ".join(varying_layers(self.model)[:6]) or "layers that are no plain products"
            logger.warning(
                "torch's %s products give a row other bits among other numbers of rows here (%s): a sequence that is "
                "computed again, after a loss or a preemption, may get other tokens",
                self.layout.model_dtype,
                named,
            )
        elif multiplies_int8 and repeats_rows(self.model, hf_config, (1, 2, 5, 11)):
            allow_few_rows(self.model)
        self._config, self._hf_config, self._rank = config, hf_config, rank

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """Every token id that ends a text."""
        own = () if self.tokenizer is None or self.tokenizer.eos_token_id is None else (self.tokenizer.eos_token_id,)
        return frozenset((*self._eos_token_ids, *own))

    @property
    def identity(self) -> str:
        """Return the whole model's name, equal in processes with the same layers, dtype, vocabulary and weights."""
        layers = self.whole_layout.with_state_dtype("float32").layers
        text = f"{layers} {self.layout.model_dtype} {self.vocab_size} {self._weights}"
        text += f" {self._config.quantization}" if self._config.quantization in ("int4", "int8") else ""
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def identity_of_part(self) -> str:
        """``identity``, and of which rank of tensor parallelism this part of the model is, where there are several."""
        return self.identity + (f" {self._rank.index} of {self._rank.size}" if self._rank else "")

    @property
    def kv_identity(self) -> str:
        """Name all that a token's keys and values depend on, but for the arithmetic of R-workers: weights, the
        configuration, and the device."""
        known = {name: value for name, value in self._hf_config.to_dict().items() if name not in UNREAD}
        text = f"{self.identity} {self.device_name} {json.dumps(known, sort_keys=True, default=str)}"
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def num_parameters(self) -> int:
        """Parameters, tied ones once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def on_gpu(self) -> bool:
        """True when the dense layers run on a GPU, so that S and R share no core."""
        return next(self.model.parameters()).device.type == "cuda"

    @property
    def device_name(self) -> str:
        """Return the name of the GPU that the dense layers run on; "" for the CPU."""
        return torch.cuda.get_device_name() if self.on_gpu else ""

    @property
    def shape(self) -> ModelShape:
        """Its sizes; UnsupportedModelError for a model that the performance model's equations do not know."""
        shape = model_shape(self._config, self._hf_config).absorbing(self._config.latent_absorption == "r")
        if not shape.multiplies_int8:
            shape = replace(shape, weight_bits=bits_of(self.model))
        return shape.keeping_states(self._config.state_on == "s")

    def first_layers(self, num_layers: int) -> torch.nn.Module:
        """Its first layers, norm and head as a model that shares its weights; see ``early_exit.first_layers``."""
        return first_layers(self.model, self._hf_config, self.layout, num_layers)

    def shares_tokenizer(self, config: EngineConfig) -> bool:
        """Say whether the model that ``config`` names has the same tokens, as far as both have a tokenizer."""
        if self.tokenizer is None:
            return True
        try:
            other = HFTokenizer(config)
        except ModelLoadError:
            return True
        return other.backend.get_vocab() == self.tokenizer.backend.get_vocab()

    def free_memory_bytes(self) -> int:
        """Memory still free where the model is."""
        return torch.cuda.mem_get_info()[0] if self.on_gpu else available_memory_bytes()

    def bad_words_token_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences of each word, at the start of a text and after a space, as in vLLM."""
        if not words:
            return ()
        if self.tokenizer is None:
            raise ConfigError("bad_words needs the tokenizer, which was not loaded (skip_tokenizer_init)")
        encode = self.tokenizer.backend.encode
        spellings = (prefix + word.lstrip() for word in words for prefix in ("", " "))
        return tuple({tuple(encode(spelling, add_special_tokens=False).ids): None for spelling in spellings})

    @cached_property
    def grammars(self) -> Grammars:
        """Which tokens texts of a form may begin with, and so on; RequestError without a tokenizer."""
        if self.tokenizer is None:
            raise RequestError("structured_outputs needs the tokenizer, which was not loaded (skip_tokenizer_init)")
        return Grammars(self.tokenizer.backend, self.vocab_size, self.eos_token_ids)


def _replace_and_probe(model: torch.nn.Module, hf_config: Any, config: EngineConfig) -> KVLayout:
    """Replace what has a faster form, and prove by the probe that the model's code runs with it."""
    integers = IntegerLinears(model)
    if pack_experts(model) or integers.num_layers:
        order_products(model, hf_config)
    replaced = PackedLinears(model), FusedRows(model), GatedLayers(model, integers)
    try:
        layout = probe_layout(model, hf_config, config.kv_cache_dtype)
    except UnsupportedModelError as error:
        for each in replaced:
            each.undo()
        layout = probe_layout(model, hf_config, config.kv_cache_dtype)  # of a model that is refused this raises again
        logger.info("runs as it is, with nothing replaced: %s", error)
    return layout.with_state_dtype(config.state_dtype)


def _max_model_len(config: EngineConfig, hf_config: Any) -> int:
    most = most_positions(hf_config)
    if config.max_model_len is not None and config.max_model_len > most:
        raise ConfigError(f"max_model_len {config.max_model_len} is more than the model's own {most} tokens")
    return config.max_model_len or max_position_embeddings(hf_config)
