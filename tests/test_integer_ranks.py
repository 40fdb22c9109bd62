"""Sessions in int8 products pass between engines of one and two ranks, in 16 bits and with every cache dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastdecode import LLM, SamplingParams
from fastdecode.api.outputs import RequestOutput

ENGINE: dict[str, Any] = {
    "quantization": "int8", "dtype": "bfloat16", "device": "cpu", "s_threads": 1, "r_threads": 1,
    "r_workers": "inproc:1", "kv_cache_memory": "64MiB", "max_model_len": 256, "max_num_seqs": 8,
}  # fmt: skip
PROMPTS = ("def read(path):", "import os\n\n", "class Tree:\n    def __init__(self, ", "x = [1, 2, 3]\nfor ")
PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def ask(llm: LLM) -> None:
    """Send requests as a client that begins, or that asks again."""
    for number, prompt in enumerate(PROMPTS):
        params = PARAMS if number % 2 else SamplingParams(temperature=0.8, seed=number, max_tokens=40, ignore_eos=True)
        llm.engine.add_request(str(number), prompt, params)


def take(found: dict[str, list[int]], outputs: list[RequestOutput]) -> None:
    """Keep the tokens of each request, which may only grow."""
    for output in outputs:
        tokens = list(output.outputs[0].token_ids)
        assert tokens[: len(found.get(output.request_id, ()))] == found.get(output.request_id, [])
        found[output.request_id] = tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    "kv_cache_dtype",
    ["int8", *(pytest.param(each, marks=pytest.mark.thorough) for each in ("bfloat16", "float32", "int4"))],
)
def test_one_rank_two_ranks_and_one_again(kv_cache_dtype: str, tmp_path: Path) -> None:
    settings = ENGINE | {"kv_cache_dtype": kv_cache_dtype}
    wanted: dict[str, list[int]] = {}
    with LLM(**settings) as llm:
        ask(llm)
        while llm.engine.has_unfinished_requests():
            take(wanted, llm.engine.step())
    found: dict[str, list[int]] = {}
    for num_ranks, num_steps in ((1, 12), (2, 12), (1, 1000)):
        with LLM(journal=str(tmp_path), tensor_parallel_size=num_ranks, **settings) as llm:
            ask(llm)
            before = sum(map(len, found.values()))
            for _ in range(num_steps):
                if llm.engine.has_unfinished_requests():
                    take(found, llm.engine.step())
            assert sum(map(len, found.values())) > before
            if num_steps < 1000:  # The engine ends like one that is killed.
                llm.engine._requests.journal.close()
    assert found == wanted
    assert len({token for tokens in wanted.values() for token in tokens}) > 10
