"""The served model as clients see it: names, sizes, and tokenization."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from fastdecode.api.config import EngineConfig
from fastdecode.api.text import check_token_ids
from fastdecode.server.errors import ApiError
from fastdecode.server.prompt_reader import PromptReader
from fastdecode.server.protocol import TokenizeRequest
from fastdecode.server.readings import Readings
from fastdecode.server.server_settings import ServerSettings
from fastdecode.sworker import SModel


class ServedModel:
    """The served model. ``names``: names that clients may use. ``reader``: tokenizes prompts. It is thread-safe."""

    def __init__(self, config: EngineConfig, settings: ServerSettings, model: SModel, template: str | None) -> None:
        """``template``: the chat template; None for the tokenizer's own."""
        name, self.folder = config.lora or (config.model, config.model)  # ``lora`` is an adapter's name and folder
        self._base = config.model if config.lora else None
        self.names = settings.model_names(name)
        self.tokenizer, self.vocab_size, self.max_model_len = model.tokenizer, model.vocab_size, model.max_model_len
        self.generation_defaults = model.generation_defaults
        told = settings.default_chat_template_kwargs | {"content_format": settings.chat_template_content_format}
        told |= {} if template is None else {"chat_template": template}
        self.reader = PromptReader(self.tokenizer, self.vocab_size, self.max_model_len, told)
        self.readings = Readings(self.tokenizer, template, settings.tool_call_parser, settings.reasoning_parser)
        self._created = int(time.time())

    def check_name(self, name: str | None) -> None:
        """Raise ApiError 404 if ``name`` is not a name of this model. None is accepted."""
        if name is not None and name not in self.names:
            raise ApiError(404, f"the model {name!r:.200} does not exist: {', '.join(self.names)} does", param="model")

    def cards(self) -> list[dict[str, Any]]:
        """Return the objects of GET /v1/models, one per name of the model."""
        told = {"object": "model", "created": self._created, "owned_by": "fastdecode", "root": self.folder}
        told |= {"parent": self._base, "max_model_len": self.max_model_len}
        return [{"id": name, **told} for name in self.names]

    def tokenize(self, request: TokenizeRequest) -> list[int]:
        """Return the token ids of the request's text or conversation. Raise ApiError or RequestError."""
        self.check_name(request.model)
        return self.reader.tokenize(request)

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token, decoded separately."""
        return [self.detokenize([token_id]) for token_id in token_ids]

    def detokenize(self, token_ids: list[int]) -> str:
        """Return the text of ``token_ids``. Raise ApiError without a tokenizer, RequestError for unknown ids."""
        if self.tokenizer is None:
            raise ApiError(400, "the tokenizer was not loaded (skip_tokenizer_init)")
        check_token_ids(token_ids, self.vocab_size)
        return self.tokenizer.backend.decode(token_ids, skip_special_tokens=False)
