"""The S-worker's model: weights, KV layout, tokenizer, and what generation must know of the model."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from fastdecode.api.config import EngineConfig
from fastdecode.core.errors import ConfigError, ModelLoadError, RequestError
from fastdecode.core.machine import available_memory_bytes
from fastdecode.core.optional import optional
from fastdecode.sworker.files.generation import generation_defaults
from fastdecode.sworker.model.code import AnyRank, ModelCode
from fastdecode.sworker.model.first_layers import first_layers
from fastdecode.sworker.model.loader import (
    load_hf_config,
    max_position_embeddings,
    most_positions,
    multiplies_int8,
)
from fastdecode.sworker.model.refusals import check_rope
from fastdecode.sworker.model.support import repeats_rows, varying_layers
from fastdecode.sworker.model.tokenizer import HFTokenizer
from fastdecode.sworker.model.transformers_code import load as load_with_transformers
from fastdecode.sworker.sampling.grammar import Grammars

logger = logging.getLogger(__name__)


class SModel:
    """A loaded and probed causal LM. ``code`` runs it, ``tokenizer`` is None if none was loaded.

    ``layout`` describes this rank's heads to R-workers, ``whole_layout`` all ranks' heads to prefill workers.
    """

    def __init__(self, config: EngineConfig, rank: AnyRank | None = None) -> None:
        """``rank``: the tensor-parallel rank whose part of the model to load; None for the whole model."""
        hf_config = load_hf_config(config)
        self.vocab_size = int(hf_config.get_text_config().vocab_size)
        self.max_model_len = _max_model_len(config, hf_config)
        check_rope(hf_config, self.max_model_len)
        self.tokenizer = None if config.skip_tokenizer_init else HFTokenizer(config)
        self.generation_defaults, self._eos_token_ids = generation_defaults(config, hf_config)
        load = optional("vLLM's code").load if config.model_impl == "vllm" else load_with_transformers
        loaded = load(config, hf_config, rank)
        self.code, self._weights = loaded.code, loaded.digest
        self.layout, self.whole_layout = loaded.layout, loaded.whole_layout
        self.model_type = str(hf_config.model_type)
        logger.info("%s: %.4g GB of weights", type(self.model).__name__, self.code.weight_bytes / 1e9)
        if not repeats_rows(self.code, hf_config):
            named = ", ".join(varying_layers(self.model)[:6]) or "layers that are no plain products"
            logger.warning(
                "torch's %s products give a row other bits among other numbers of rows here (%s): a sequence that is "
                "computed again, after a loss or a preemption, may get other tokens",
                self.layout.model_dtype,
                named,
            )
        elif multiplies_int8(config) and repeats_rows(self.code, hf_config, (1, 2, 5, 11)):
            self.code.least_rows = 1
        self._config, self._hf_config, self._rank = config, hf_config, rank

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """Every token id that ends a text."""
        own = () if self.tokenizer is None or self.tokenizer.eos_token_id is None else (self.tokenizer.eos_token_id,)
        return frozenset((*self._eos_token_ids, *own))

    @property
    def identity(self) -> str:
        """A name of the whole model, equal in processes with the same layers, dtype, vocabulary and weights."""
        layers = self.whole_layout.with_state_dtype("float32").layers
        text = f"{layers} {self.layout.model_dtype} {self.vocab_size} {self._weights}"
        text += f" {self._config.quantization}" if self._config.quantization in ("int4", "int8") else ""
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def identity_of_part(self) -> str:
        """``identity``, followed by this process's rank if the model is split among ranks."""
        return self.identity + (f" {self._rank.index} of {self._rank.size}" if self._rank else "")

    @property
    def kv_identity(self) -> str:
        """A name for everything in the S-worker that determines keys and values: weights, configuration, device.

        The R-workers' arithmetic also changes keys and values, but is not part of this name.
        """
        # Entries of the configuration that do not affect keys and values, or that ``identity`` already covers
        unread = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
        known = {name: value for name, value in self._hf_config.to_dict().items() if name not in unread}
        text = f"{self.identity} {self.device_name} {json.dumps(known, sort_keys=True, default=str)}"
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def model(self) -> torch.nn.Module:
        return self.code.module

    @property
    def num_parameters(self) -> int:
        """Number of parameters; tied parameters count once."""
        return self.code.num_parameters

    @property
    def on_gpu(self) -> bool:
        """True if the dense layers run on a GPU, so that S-worker and R-workers do not compete for cores."""
        return self.code.device.type == "cuda"

    @property
    def device_name(self) -> str:
        """The name of the GPU with the dense layers; "" for the CPU."""
        return torch.cuda.get_device_name() if self.on_gpu else ""

    @property
    def shape(self) -> Any:
        """The model's ``ModelShape``. Raise UnsupportedModelError if the performance model does not cover the model."""
        return optional("model shape").loaded_shape(self._config, self._hf_config, self.model)

    def first_layers(self, num_layers: int) -> ModelCode:
        """Return the code of the model's first ``num_layers`` layers, norm and head; see `first_layers.py`."""
        return first_layers(self.code, self._hf_config, self.layout, num_layers)

    def shares_tokenizer(self, config: EngineConfig) -> bool:
        """Return whether the model in ``config`` has the same vocabulary; True if either model has no tokenizer."""
        if self.tokenizer is None:
            return True
        try:
            other = HFTokenizer(config)
        except ModelLoadError:
            return True
        return other.backend.get_vocab() == self.tokenizer.backend.get_vocab()

    def free_memory_bytes(self) -> int:
        """Return the free memory in bytes on the model's device."""
        return torch.cuda.mem_get_info()[0] if self.on_gpu else available_memory_bytes()

    def bad_words_token_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return each word's token sequences, at the start of a text and after a space, as in vLLM."""
        if not words:
            return ()
        if self.tokenizer is None:
            raise ConfigError("bad_words needs the tokenizer, which was not loaded (skip_tokenizer_init)")
        encode = self.tokenizer.backend.encode
        spellings = (prefix + word.lstrip() for word in words for prefix in ("", " "))
        return tuple({tuple(encode(spelling, add_special_tokens=False).ids): None for spelling in spellings})

    @cached_property
    def grammars(self) -> Grammars:
        """The grammars over this tokenizer. Raise RequestError without a tokenizer."""
        if self.tokenizer is None:
            raise RequestError("structured_outputs needs the tokenizer, which was not loaded (skip_tokenizer_init)")
        return Grammars(self.tokenizer.backend, self.vocab_size, self.eos_token_ids)


def _max_model_len(config: EngineConfig, hf_config: Any) -> int:
    most = most_positions(hf_config)
    if config.max_model_len is not None and config.max_model_len > most:
        raise ConfigError(f"max_model_len {config.max_model_len} is more than the model's own {most} tokens")
    return config.max_model_len or max_position_embeddings(hf_config)
