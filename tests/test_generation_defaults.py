"""generation_config.json: values that cannot be used are left out with one line in the log, and clients see none."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from fastdecode.api.config import EngineConfig
from fastdecode.api.sampling_params import SamplingParams
from fastdecode.core.errors import ConfigError, ModelLoadError
from fastdecode.sworker.files.generation import generation_defaults

CONFIG = LlamaConfig(vocab_size=64, eos_token_id=2)


def read(folder: Path, told: Any, config: Any = CONFIG) -> tuple[dict[str, Any], list[int]]:
    text = told if isinstance(told, str) else json.dumps(told)
    (folder / "generation_config.json").write_text(text, encoding="utf-8")
    return generation_defaults(EngineConfig(model=str(folder)), config)


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        ({}, {}),
        ({"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}, None),
        ({"temperature": 0}, {"temperature": 0}),
        ({"temperature": 0.0, "do_sample": False}, {"temperature": 0.0}),
        ({"top_k": 0}, {"top_k": 0}),
        ({"top_k": -1}, {"top_k": -1}),
        ({"top_k": 50, "top_p": 1.0}, {"top_k": 50, "top_p": 1.0}),
        ({"max_new_tokens": 20}, {"max_tokens": 20}),
        ({"temperature": None, "top_p": None, "top_k": None}, {}),
    ],
)
def test_values_that_can_be_meant_are_defaults(
    told: dict[str, Any], wanted: dict[str, Any] | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert read(tmp_path, told) == (told if wanted is None else wanted, [2])
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_p", 0.0), ("top_p", 1.5), ("top_p", -1), ("top_p", "0.9"), ("top_p", True), ("top_p", math.nan),
        ("top_k", -2), ("top_k", 2.5), ("temperature", -1.0), ("temperature", math.inf), ("temperature", [1]),
        ("repetition_penalty", 0), ("repetition_penalty", -1.2), ("min_p", 2), ("max_new_tokens", 0),
        ("max_new_tokens", -1),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_one_line_at_the_start(
    name: str, value: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        defaults, ends = read(tmp_path, {name: value, "min_p": 0.1} | {name: value})
    assert defaults == ({} if name == "min_p" else {"min_p": 0.1}) and ends == [2]
    (record,) = caplog.records
    assert "generation_config.json is left out: " in record.getMessage() and "\n" not in record.getMessage()
    SamplingParams(**defaults)


@pytest.mark.parametrize(
    ("told", "ends", "lines"),
    [
        (7, [7], 0), ([7, 8], [7, 8], 0), ([], [], 0), (None, [2], 0), ([7, 7, 8], [7, 8], 0), ([7, None], [7], 1),
        (64, [], 1), (-1, [], 1), ([7, 1000], [7], 1), ("7", [], 1), (True, [], 1),
    ],
)  # fmt: skip
def test_ids_that_end_a_text_are_of_the_vocabulary(
    told: Any, ends: list[int], lines: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert read(tmp_path, {"eos_token_id": told})[1] == ends
    assert len(caplog.records) == lines


def test_what_writes_other_texts_in_transformers_alone_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    read(tmp_path, {"no_repeat_ngram_size": 3, "num_beams": 4, "typical_p": 1.0, "suppress_tokens": []})
    (record,) = caplog.records
    assert record.getMessage().endswith("not taken from generation_config.json: no_repeat_ngram_size, num_beams")


@pytest.mark.parametrize(("text", "reason"), [("{", "is not valid JSON"), ("[]", "must hold a JSON object")])
def test_a_broken_file_is_an_error(text: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=f"generation_config.json {reason}"):
        read(tmp_path, text)


def test_what_the_user_overrides_must_be_right(tmp_path: Path) -> None:
    def overridden(**settings: Any) -> dict[str, Any]:
        return generation_defaults(EngineConfig(model=str(tmp_path), **settings), CONFIG)[0]

    read(tmp_path, {"temperature": 0.6, "top_p": 0.0})
    assert overridden(override_generation_config={"top_p": 0.5}) == {"temperature": 0.6, "top_p": 0.5}
    assert overridden(generation_config="vllm") == {}
    with pytest.raises(ConfigError, match="top_p must be a number above 0"):
        overridden(override_generation_config={"top_p": 0.0})


def test_without_the_file_the_configuration_counts(tmp_path: Path) -> None:
    assert generation_defaults(EngineConfig(model=str(tmp_path)), CONFIG) == ({}, [2])
