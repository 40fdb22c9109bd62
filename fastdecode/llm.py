"""LLM: offline generation with the interface of vLLM's class of that name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from tqdm import tqdm

from fastdecode.api.config import EngineConfig
from fastdecode.api.from_vllm import MEMBERS, EngineArgs, check_call, check_lora
from fastdecode.api.outputs import RequestOutput
from fastdecode.api.sampling_params import SamplingParams
from fastdecode.api.text import PromptType
from fastdecode.core.errors import ConfigError
from fastdecode.engine.engine import LLMEngine
from fastdecode.sworker.model.tokenizer import HFTokenizer


class LLM:
    """A loaded model that generates text, a context manager. Arguments: every engine flag, with underscores."""

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        if model is not None:
            settings["model"] = str(model)
        self.engine = LLMEngine(EngineArgs(**settings))
        self._count = 0

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> LLM:
        """Return an LLM with the settings ``engine_args``, an ``EngineArgs(…)``."""
        return cls(**vars(engine_args))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"LLM has no {name}" + (f": {MEMBERS[name]}" if name in MEMBERS else ""))

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        **vllms: Any,
    ) -> list[RequestOutput]:
        """Generate for all ``prompts``; return the finished outputs in the order of ``prompts``.

        A prompt is text, or ``{"prompt_token_ids": […]}``. ``sampling_params``: one for all prompts, or a list with one
        each; None means the model's generation_config.json. All prompts are checked before any runs. After a failure or
        Ctrl-C the engine aborts the requests of this call. ``prompt_token_ids``: prompts as token ids; ``prompts`` may
        then be their texts. ``use_tqdm``: whether to show a progress bar, or a function that makes one.
        ``lora_request`` must be None, and ``vllms``, other arguments of vLLM, must have no effect.
        """
        check_lora(lora_request)
        check_call(vllms)
        batch = _batch(prompts, prompt_token_ids)
        params = self._params(sampling_params, len(batch))
        ids = [str(self._count + i) for i in range(len(batch))]
        self._count += len(batch)
        try:
            for request_id, prompt, each in zip(ids, batch, params, strict=True):
                self.engine.add_request(request_id, prompt, each)
            finished = self._run(set(ids), use_tqdm)
        except BaseException:
            self.engine.abort_request(ids)
            raise
        return [finished[request_id] for request_id in ids]

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        **vllms: Any,
    ) -> list[RequestOutput]:
        """Return the answers to one conversation, [{"role": …, "content": …}], or to a list of them.

        The model's chat template, or ``chat_template``, renders each conversation and ``tools`` as a prompt. Other
        arguments are as in ``generate``.

        Raises:
            RequestError: no chat template, or it does not take the messages.
            ConfigError: no tokenizer.
        """
        check_call(vllms)
        encode = self._tokenizer.encode_chat
        several = messages and all(isinstance(each, list) for each in messages)
        prompts = [
            {
                "prompt_token_ids": encode(
                    conversation,
                    self.engine.s_model.max_model_len,
                    tools=tools,
                    chat_template=chat_template,
                    content_format=chat_template_content_format,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    **(chat_template_kwargs or {}),
                )
            }
            for conversation in (messages if several else [messages])
        ]
        return self.generate(prompts, sampling_params, use_tqdm, lora_request)

    def get_tokenizer(self) -> Any:
        """Return the model's transformers tokenizer. Raise ConfigError if the engine runs without a tokenizer."""
        return self._tokenizer.hf

    @property
    def _tokenizer(self) -> HFTokenizer:
        if self.engine.s_model.tokenizer is None:
            raise ConfigError("the tokenizer was not loaded (skip_tokenizer_init)")
        return self.engine.s_model.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling defaults of generation_config.json."""
        return SamplingParams(**self.engine.s_model.generation_defaults)

    @property
    def llm_engine(self) -> LLMEngine:
        """The engine that runs this model; the name is vLLM's."""
        return self.engine

    def reset_prefix_cache(self, **vllms: Any) -> bool:
        """Evict every retained prefix; running requests continue.

        Return True, as vLLM does. ``vllms``: as in ``generate``.
        """
        check_call(vllms)
        self.engine.reset_prefix_cache()
        return True

    def close(self) -> None:
        """Close the engine and free its R-workers; may be called twice."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, wanted: set[str], use_tqdm: bool | Callable[..., Any]) -> dict[str, RequestOutput]:
        finished: dict[str, RequestOutput] = {}
        progress = use_tqdm if callable(use_tqdm) else tqdm
        with progress(total=len(wanted), desc="Requests", unit="req", disable=None if use_tqdm else True) as bar:
            while len(finished) < len(wanted):
                for output in self.engine.step():
                    if output.finished and output.request_id in wanted:
                        finished[output.request_id] = output
                        bar.update()
        return finished

    def _params(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if given is None:
            given = self.get_default_sampling_params()
        if isinstance(given, SamplingParams):
            return [given] * count
        if not isinstance(given, Sequence) or not all(isinstance(each, SamplingParams) for each in given):
            raise ConfigError(f"sampling_params must be SamplingParams(…), one or a list of them, not {given!r:.80}")
        if len(given) != count:
            raise ConfigError(f"generate: {count} prompts but {len(given)} sampling_params; give one, or one each")
        return list(given)


def _batch(prompts: Any, prompt_token_ids: Any) -> list[Any]:
    """Return a list of prompts: each is a text, a list of token ids, or both if both arguments are given.

    Raise ConfigError unless the numbers of texts and of token id lists are equal.
    """
    if prompts is None and prompt_token_ids is None:
        raise ConfigError("generate: give prompts or prompt_token_ids")
    texts: list[Any] = [] if prompts is None else [prompts] if _is_single(prompts) else list(prompts)
    if prompt_token_ids is None:
        return texts
    ids: list[Any] = [prompt_token_ids] if _is_single(prompt_token_ids) else list(prompt_token_ids)
    if prompts is None:
        return ids
    if len(texts) != len(ids) or not all(isinstance(each, str) for each in texts):
        raise ConfigError(
            f"generate: {len(texts)} prompts and {len(ids)} prompt_token_ids: give equal numbers, or no prompts"
        )
    return [{"prompt": text, "prompt_token_ids": each} for text, each in zip(texts, ids, strict=True)]


def _is_single(prompts: Any) -> bool:
    """Return whether ``prompts`` is a single prompt: text, a mapping, or a flat list of token ids."""
    if isinstance(prompts, (str, dict)):
        return True
    return bool(prompts) and all(isinstance(item, int) for item in prompts)
