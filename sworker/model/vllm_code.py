"""Loads a model with vLLM's code: its modules, kernels and packed weights, without its engine and KV cache.

vLLM's configuration and loader make the module, without a worker or executor. Each attention layer gets another
``forward`` that passes q, k and v of the packed rows to our attention, with the arguments of transformers' attention
functions. Layers of other kinds are refused by the name of their class.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from fastdecode.api.config import EngineConfig
from fastdecode.sworker.files.weight_files import check_files
from fastdecode.sworker.model import vllm_lora
from fastdecode.sworker.model.code import AnyRank, LoadedCode, bytes_of
from fastdecode.sworker.model.held import weights_digest
from fastdecode.sworker.model.loader import apply_overrides, max_position_embeddings, resolve_dtype
from fastdecode.sworker.model.lora import check_adapter
from fastdecode.sworker.model.refusals import one_clear_error
from fastdecode.sworker.model.support import probe_layout
from fastdecode.sworker.model.vllm_attention import hand_over_attention
from fastdecode.sworker.model.vllm_layers import norm_in_one_pass, rotate_by_heads
from fastdecode.sworker.model.vllm_ranks import begin_groups
from fastdecode.sworker.model.vllm_refusals import as_refusals_of_vllm, check_ranks, check_settings, refuse
from fastdecode.sworker.run.staging import DTYPE_NAME, MIN_ROWS


class VllmCode:
    """A vLLM module whose attention layers call our attention; see ``ModelCode``."""

    def __init__(self, module: Any, vllm_config: Any, vocab_size: int, weight_bytes: int, num_parameters: int) -> None:
        """``weight_bytes``, ``num_parameters``: of the weights as they were loaded, before kernels packed them."""
        self.module = module
        self.least_rows = MIN_ROWS
        self.weight_bytes, self.num_parameters = weight_bytes, num_parameters
        self._vllm_config, self._vocab_size = vllm_config, vocab_size

    @property
    def device(self) -> torch.device:
        return torch.device(self._vllm_config.device_config.device)

    def logits(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return logits [rows, vocab_size] as vLLM's head computes them, with soft caps and scales."""
        from vllm.forward_context import set_forward_context

        with set_forward_context(None, self._vllm_config, num_tokens=input_ids.shape[1]):
            hidden = self.module(input_ids[0], position_ids[0])
            logits: torch.Tensor = self.module.compute_logits(hidden if rows is None else hidden.index_select(0, rows))
        return logits[:, : self._vocab_size]

    def of(self, module: torch.nn.Module) -> VllmCode:
        return VllmCode(module, self._vllm_config, self._vocab_size, bytes_of(module), self.num_parameters)


def load(config: EngineConfig, hf_config: Any, rank: AnyRank | None) -> LoadedCode:
    """Load ``config``'s model, or its part for ``rank``, by vLLM's loader.

    Raise ConfigError, ModelLoadError or UnsupportedModelError.
    """
    check_settings(config)
    check_files(Path(config.model))
    if config.lora:
        check_adapter(Path(config.lora[1]))
    with as_refusals_of_vllm(config, hf_config):
        vllm_config = _vllm_config(config, hf_config)
        code, digest = _load(config, vllm_config, hf_config, rank)
        rotate_by_heads(code.module)
        norm_in_one_pass(code.module)
        hand_over_attention(vllm_config, hf_config, config.latent_absorption == "r")
        layout = probe_layout(code, hf_config, config.kv_cache_dtype).with_state_dtype(config.state_dtype)
    return LoadedCode(code, layout, layout.absorbed, digest)


def _vllm_config(config: EngineConfig, hf_config: Any) -> Any:
    """Return vLLM's configuration of the model in ``config``, for a module that runs eagerly and caches nothing."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # vLLM reads this variable when it is imported
    from vllm.engine.arg_utils import EngineArgs

    def overridden(found: Any) -> Any:
        if found.model_type.startswith("dummy_"):
            return found  # an empty configuration, from which vLLM reads whether the type is overridden
        apply_overrides(found, config.hf_overrides)
        _state_what_vllm_assumes_otherwise(found.get_text_config())
        return found

    arguments = EngineArgs(
        model=config.model,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
        skip_tokenizer_init=True,
        load_format="safetensors"
        if config.load_format == "auto"
        else config.load_format,  # "auto" unpickles .bin files
        dtype=DTYPE_NAME[resolve_dtype(config.dtype, hf_config)],
        max_model_len=config.max_model_len or max_position_embeddings(hf_config),
        hf_overrides=overridden,
        seed=config.seed,
        model_impl="vllm",
        tensor_parallel_size=config.tensor_parallel_size,
        enforce_eager=True,
        kv_cache_memory_bytes=1,
    )
    if config.tensor_parallel_size > 1:
        check_ranks(config, arguments.create_model_config())
    return arguments.create_engine_config()


def _state_what_vllm_assumes_otherwise(text_config: Any) -> None:
    """Set how routers score experts if config.json does not say: vLLM would assume a softmax, but it is a sigmoid."""
    if text_config.model_type in ("deepseek_v3", "glm4_moe_lite"):
        for name, value in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
            if getattr(text_config, name, None) is None:
                setattr(text_config, name, value)


def _load(config: EngineConfig, vllm_config: Any, hf_config: Any, rank: AnyRank | None) -> tuple[VllmCode, str]:
    """Return (the loaded module's code, a digest of its weights, taken before kernels pack them)."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    model_config, device = vllm_config.model_config, torch.device(vllm_config.device_config.device)
    vllm_config.kernel_config.ir_op_priority.set_default()
    with set_current_vllm_config(vllm_config), set_default_torch_dtype(model_config.dtype):
        begin_groups(rank, model_config.is_moe)
        with device:
            module: Any = initialize_model(vllm_config)
        if type(module).__module__.startswith("vllm.model_executor.models.transformers"):
            refuse(hf_config, "has no code of vLLM's own, which would run transformers'")
        with one_clear_error(config.model):
            get_model_loader(vllm_config.load_config).load_weights(module, model_config)
        digest = weights_digest(module)
        sizes = bytes_of(module), sum(each.numel() for each in module.parameters())
        process_weights_after_loading(module, model_config, device)
        if config.lora:
            adapter = Path(config.lora[1])
            vllm_lora.add_adapter(module, adapter, vllm_config, hf_config)
            digest = vllm_lora.adapted_digest(digest, adapter)
    module.eval().requires_grad_(False)
    return VllmCode(module, vllm_config, int(hf_config.get_text_config().vocab_size), *sizes), digest
