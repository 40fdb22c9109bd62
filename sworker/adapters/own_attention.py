"""Adapters for models with their own attention code, which does not use transformers' ``AttentionInterface``.

Each adapter subclasses the model's own attention class. It replaces only the computation of o from q, k and v.
Projections, rotary embeddings and the order of heads stay the model's. This module is imported only for such models.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from transformers.models.bloom import modeling_bloom as bloom
from transformers.models.codegen import modeling_codegen as codegen
from transformers.models.falcon import modeling_falcon as falcon
from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb  # by name: `fused.py` replaces it
from transformers.models.gpt_neo import modeling_gpt_neo as gpt_neo
from transformers.models.gpt_neox_japanese import modeling_gpt_neox_japanese as japanese
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.megatron_bert import modeling_megatron_bert as megatron_bert
from transformers.models.mpt import modeling_mpt as mpt
from transformers.models.openai import modeling_openai as openai
from transformers.models.rembert import modeling_rembert as rembert
from transformers.models.xglm import modeling_xglm as xglm

from fastdecode.sworker.run.pipeline import ATTENTION_NAME, attend

Slopes = tuple[float, ...]


def _attended(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    alibi_slopes: Slopes = (),
    window: int = 0,
) -> torch.Tensor:
    """Let R-workers attend: return o [1, T, num_heads · dim] for query, key and value [1, heads, T, dim]."""
    query, key = query.to(value.dtype), key.to(value.dtype)
    rules: Any = {"scaling": scale, "alibi_slopes": alibi_slopes, "sliding_window": window}
    return attend(module, query, key, value, None, **rules)[0].flatten(2)


def _as_heads(o: torch.Tensor, num_heads: int) -> torch.Tensor:
    return o.unflatten(2, (num_heads, -1)).transpose(1, 2)


class FalconAttention(falcon.FalconAttention):
    """Falcon's attention: old and new decoder architecture, with rotary embeddings or ALiBi."""

    @cached_property
    def alibi_slopes(self) -> Slopes:
        """The ALiBi slopes. Falcon adds ALiBi before it scales scores, and rounds slopes to bfloat16 in every dtype.

        Falcon's code in transformers also rounds slope · position, which is inexact beyond some 256 tokens. We do not.
        """
        if not self.config.alibi:
            return ()
        positions = torch.ones(1, 2, dtype=torch.long)
        slopes = falcon.build_alibi_tensor(positions, self.num_heads, torch.float32)[:, 0, 1]
        return tuple((slopes * self.inv_norm_factor).tolist())

    def forward(
        self,
        hidden_states: torch.Tensor,
        alibi: torch.Tensor | None,
        attention_mask: Any,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        # In the projection's output, each KV head's queries come first, then its key and value. The model's own
        # `_split_heads` would copy key and value for every query.
        groups = self.query_key_value(hidden_states).unflatten(-1, (self.num_kv_heads, -1, self.head_dim))
        heads = groups[..., :-2, :].flatten(2, 3), groups[..., -2, :], groups[..., -1, :]
        query, key, value = (each.transpose(1, 2) for each in heads)
        if position_embeddings is not None and alibi is None:
            query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        return self.dense(_attended(self, query, key, value, self.inv_norm_factor, self.alibi_slopes)), None


class BloomAttention(bloom.BloomAttention):
    """BLOOM's attention, with ALiBi. ``slow_but_exact`` only changes an order of additions, and is not needed."""

    @cached_property
    def alibi_slopes(self) -> Slopes:
        """The slopes in float32, which the model multiplies by positions."""
        positions = torch.ones(1, 2, dtype=torch.long)
        return tuple(bloom.build_alibi_tensor(positions, self.num_heads, torch.float32)[:, 0, 1].tolist())

    def forward(
        self, hidden_states: torch.Tensor, residual: torch.Tensor, alibi: Any, attention_mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        """Return ``residual`` plus the attention layer's output for ``hidden_states`` [1, T, hidden]."""
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        o = self.dense(_attended(self, query, key, value, self.inv_norm_factor, self.alibi_slopes))
        return bloom.dropout_add(o, residual, self.hidden_dropout, self.training), None


class MptAttention(mpt.MptAttention):
    @cached_property
    def alibi_slopes(self) -> Slopes:
        """The slopes in float32, which the model multiplies by distances."""
        return tuple((-mpt.build_mpt_alibi_tensor(self.n_heads, 2)[:, 0, 0]).tolist())

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        fused = self.Wqkv(hidden_states)
        if self.clip_qkv:
            fused = fused.clamp(-self.clip_qkv, self.clip_qkv)
        parts = fused.chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for part in parts)
        return self.out_proj(_attended(self, query, key, value, self.softmax_scale, self.alibi_slopes)), None


class MptModel(mpt.MptModel):
    """The MPT model without its own mask and ALiBi bias, which cover only ``max_seq_len`` positions."""

    def build_mpt_alibi_tensor(self, *_: Any, **__: Any) -> None:
        """Return None: R-workers get the ALiBi slopes, so the model needs no bias tensor."""

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        """Call the model with a dummy mask; a mask of four dimensions keeps the model from building one."""
        return super().forward(input_ids, **kwargs | {"attention_mask": input_ids.new_ones(1, 1, 1, 1)})


class GPTJAttention(gptj.GPTJAttention):
    def _attn(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any = None
    ) -> tuple[torch.Tensor, None]:
        return _as_heads(_attended(self, query, key, value, 1 / self.scale_attn), self.num_attention_heads), None


class CodeGenAttention(codegen.CodeGenAttention):
    """CodeGen's attention: GPT-J's, with q, k and v from one projection."""

    _attn = GPTJAttention._attn


class GPTNeoSelfAttention(gpt_neo.GPTNeoSelfAttention):
    """GPT-Neo's attention: scores are not scaled, and every other layer has a window."""

    def _attn(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any = None
    ) -> tuple[torch.Tensor, None]:
        window = self.config.window_size if self.attention_type == "local" else 0
        return _as_heads(_attended(self, query, key, value, 1.0, window=window), self.num_heads), None


class GPTNeoXJapaneseAttention(japanese.GPTNeoXJapaneseAttention):
    def _attn(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any = None
    ) -> tuple[torch.Tensor, None]:
        return _as_heads(_attended(self, query, key, value, 1 / self.norm_factor), self.num_attention_heads), None


class OpenAIGPTAttention(openai.Attention):
    """OpenAI GPT's attention, whose keys are transposed."""

    def _attn(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attention_mask: Any = None,
        output_attentions: Any = None,
    ) -> list[torch.Tensor]:
        scale = v.shape[-1] ** -0.5 if self.scale else 1.0
        return [_as_heads(_attended(self, q, k.transpose(2, 3), v, scale), self.n_head)]


class XGLMAttention(xglm.XGLMAttention):
    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (_as_heads(project(hidden_states), self.num_heads) for project in projections)
        return self.out_proj(_attended(self, query, key, value, self.scaling)), None


class _BertSelfAttention:
    """BERT's attention in a decoder. Loading refuses a model that was not configured as a decoder."""

    @property
    def is_causal(self: Any) -> bool:
        """True if the configuration made the model a decoder."""
        return bool(self.is_decoder)

    def forward(self: Any, hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        projections = (self.query, self.key, self.value)
        query, key, value = (_as_heads(project(hidden_states), self.num_attention_heads) for project in projections)
        return _attended(self, query, key, value, self.attention_head_size**-0.5), None


class MegatronBertSelfAttention(_BertSelfAttention, megatron_bert.MegatronBertSelfAttention):
    """Megatron-BERT's attention, which is BERT's."""


class RemBertSelfAttention(_BertSelfAttention, rembert.RemBertSelfAttention):
    """RemBERT's attention, which is BERT's."""


def register() -> None:
    """Register our attention classes in those models' tables that choose an attention class by its name."""
    falcon.FALCON_ATTENTION_CLASSES[ATTENTION_NAME] = FalconAttention
    gptj.GPTJ_ATTENTION_CLASSES[ATTENTION_NAME] = GPTJAttention
    gpt_neo.GPT_NEO_ATTENTION_CLASSES[ATTENTION_NAME] = GPTNeoSelfAttention


def adapt(model: torch.nn.Module) -> None:
    """Replace the attention modules of a loaded model by our adapters, if the model chooses none by name."""
    in_place_of: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
        bloom.BloomAttention: BloomAttention,
        mpt.MptAttention: MptAttention,
        mpt.MptModel: MptModel,
        codegen.CodeGenAttention: CodeGenAttention,
        japanese.GPTNeoXJapaneseAttention: GPTNeoXJapaneseAttention,
        openai.Attention: OpenAIGPTAttention,
        xglm.XGLMAttention: XGLMAttention,
        megatron_bert.MegatronBertSelfAttention: MegatronBertSelfAttention,
        rembert.RemBertSelfAttention: RemBertSelfAttention,
    }
    for module in model.modules():
        module.__class__ = in_place_of.get(type(module), type(module))
