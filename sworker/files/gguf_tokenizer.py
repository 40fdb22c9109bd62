"""Facts about the tokenizer in a GGUF file that transformers' reader drops."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import decoders, normalizers, pre_tokenizers
from transformers.integrations.gguf import read_gguf_metadata
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

logger = logging.getLogger(__name__)

WHOLE_WORDS = {
    "falcon-h1", "falcon3", "jina-v5-nano", "lfm2", "llama-bpe", "llama-v3", "llama3", "midm-2.0", "pixtral", "tekken",
}  # fmt: skip
"""Splitting kinds whose tokenizers keep a word that is a token whole, and begin a text with BOS by default:

Llama 3's and Mistral's. The names are llama.cpp's.
"""

ENDS = re.compile(r"tokenizer\.ggml\.e(?:os|ot|om|og)_token_ids?")
"""Matches a GGUF file's keys that hold ids of tokens that end a text, a turn or a message."""

SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
"""Sampling defaults in a file (general.sampling.…), with our names."""


def arguments(file: Path) -> dict[str, Any]:
    """Return the arguments of ``from_pretrained`` that set what llama.cpp does by default."""
    metadata, _ = read_gguf_metadata(str(file))
    return {"add_bos_token": True} if metadata.get("tokenizer.ggml.pre") in WHOLE_WORDS else {}


def complete(hf: Any, file: Path) -> None:
    """Set in the transformers tokenizer ``hf`` what its GGUF reader drops; log an unknown pre-tokenizer."""
    metadata, _ = read_gguf_metadata(str(file))
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if kind == "gpt2":
        _set_splitting(hf, pre, file)
    elif kind == "llama" and metadata.get("tokenizer.ggml.add_space_prefix") is False:
        _leave_out_space(hf.backend_tokenizer)
    # Keys of the chat templates for special uses, such as tool_use
    template = re.compile(r"tokenizer\.chat_template\.(.+)")
    named = {match[1]: value for name, value in metadata.items() if (match := template.fullmatch(name))}
    if named and isinstance(hf.chat_template, str):
        hf.chat_template = {"default": hf.chat_template, **named}


def ends(file: Path) -> list[int]:
    """Return every token id that ends a text."""
    return [each for name, value in _of(file, ENDS).items() for each in (value if isinstance(value, list) else [value])]


def sampling(file: Path) -> dict[str, Any]:
    """Return the sampling defaults in ``file``."""
    metadata, _ = read_gguf_metadata(str(file))
    named = {name: metadata.get(f"general.sampling.{key}") for key, name in SAMPLING.items()}
    return {name: value for name, value in named.items() if value is not None}


def _of(file: Path, names: re.Pattern[str]) -> Mapping[str, Any]:
    metadata, _ = read_gguf_metadata(str(file))
    return {name: value for name, value in metadata.items() if names.fullmatch(name)}


def _set_splitting(hf: Any, pre: str, file: Path) -> None:
    backend = hf.backend_tokenizer
    # Names of pre-tokenizers that first separate every digit, and then split text like GPT-2
    digits = {"codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder"}
    # Names of pre-tokenizers that split text like GPT-2's, which transformers also uses for unknown names
    alike = {"default", "gpt-2", "gpt2", "jais", "mpt", "olmo", "phi-2", "roberta-bpe"}
    if pre in WHOLE_WORDS:
        backend.model.ignore_merges = True
    elif pre in digits:
        as_gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), as_gpt2])
    elif pre not in alike | GGUF_PRE_TOKENIZER_SPLITS.keys():
        logger.warning(
            "%s: its text is split as GPT-2 does it, since the way %r (tokenizer.ggml.pre) is not known: where tokens "
            "differ, give the original's --tokenizer", file, pre,
        )  # fmt: skip


def _leave_out_space(backend: Any) -> None:
    """Make ``backend`` add no space before a text; by default its Metaspace or its normalizer adds one."""
    if isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace):
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never", split=False)
    else:
        backend.normalizer = normalizers.Replace(pattern=" ", content="▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
