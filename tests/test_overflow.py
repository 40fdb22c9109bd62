"""A request whose model overflows costs requests with the same prefix no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from helpers import model_zoo
from helpers.engine_checks import assert_nothing_held

from fastdecode import LLM, SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
NAN = 99
"""The token whose embedding is NaN."""
SHARED = [5, *range(1, 22)]
SOUND = [*SHARED, *range(30, 40)]
SETTINGS: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 256, "s_threads": 1}
SETTINGS |= {"kv_cache_memory": "4MiB", "r_workers": "inproc:1", "r_threads": 1, "block_size": 16}


def generate(llm: LLM, prompt: list[int]) -> tuple[str | None, list[int]]:
    """Return the reason of the end, and the tokens."""
    (output,) = llm.generate(cast(Any, [prompt]), PARAMS, use_tqdm=False)
    return output.outputs[0].finish_reason, list(output.outputs[0].token_ids)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model with windows of 8 tokens, in which the token NAN overflows, and return its folder."""
    model = model_zoo.build_model("mistral", sliding_window=8)
    model.get_input_embeddings().weight.data[NAN] = float("nan")
    folder = tmp_path_factory.mktemp("overflowing")
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("copies", [1, 2])
def test_a_failed_request_leaves_no_prefix(copies: int, folder: Path) -> None:
    """The tokens before NAN in its chunk may be NaN too. Another request would begin with their blocks, and fail."""
    settings = SETTINGS | {"r_workers": f"inproc:{copies}", "kv_replicas": copies}
    with LLM(str(folder), **settings) as llm:
        wanted = generate(llm, SOUND)
        assert wanted[0] == "length"
    with LLM(str(folder), **settings) as llm:
        assert generate(llm, [*SHARED, NAN, *range(40, 70)])[0] == "error"
        assert generate(llm, SOUND) == wanted
        assert generate(llm, SOUND) == wanted
        assert llm.engine.scheduler.statistics.prefix_hit_tokens == 16
        assert_nothing_held(llm.engine)


def test_a_request_that_fails_by_a_kept_prefix_evicts_it(folder: Path) -> None:
    """A window lets a request forget its NaN and end well; the prefix that it leaves is not sound."""
    with LLM(str(folder), **SETTINGS) as llm:
        wanted = generate(llm, SOUND)
    with LLM(str(folder), **SETTINGS) as llm:
        assert generate(llm, [*SHARED, NAN, *(each % 90 for each in range(40, 240))])[0] == "length"
        assert [generate(llm, SOUND)[0], generate(llm, SOUND)] == ["error", wanted]
