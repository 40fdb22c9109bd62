"""One engine that decodes when asked: `beside_vllm.py` runs it with FastDecode's Python and with vLLM's.

It computes the prompts and prints READY. For each line on stdin, a number of steps, it decodes that many steps and
prints tokens per second.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

WARM_UP = 4
"""Steps after the prompts that nobody measures."""


def engine_of(side: str, settings: dict[str, Any]) -> tuple[Any, Any]:
    """Return the engine and the class of its sampling parameters. ``side``: "fastdecode" or "vllm"."""
    if side == "vllm":
        from vllm import LLM, SamplingParams

        return LLM(**settings).llm_engine, SamplingParams
    from fastdecode import LLM, SamplingParams  # type: ignore[assignment]

    return LLM(**settings).engine, SamplingParams


class Decoding:
    """Sequences of an engine, whose prompts have been computed."""

    def __init__(self, engine: Any, params: Any, rows: int, prompt: int) -> None:
        self._engine, self._made = engine, dict[str, int]()
        for index in range(rows):
            ids = [3 + (index * 7919 + place * 104729) % 4000 for place in range(prompt)]
            engine.add_request(str(index), {"prompt_token_ids": ids}, params)
        while len(self._made) < rows:
            self._step()

    def tokens_per_second(self, steps: int) -> float:
        """Decode at least ``steps`` tokens of each sequence; return tokens per second."""
        before, start = sum(self._made.values()), time.perf_counter()
        wanted = before + steps * len(self._made)
        while sum(self._made.values()) < wanted:
            self._step()
        return (sum(self._made.values()) - before) / (time.perf_counter() - start)

    def _step(self) -> None:
        for each in self._engine.step():
            self._made[each.request_id] = len(each.outputs[0].token_ids)


def main() -> None:
    side, (rows, prompt, most), settings = sys.argv[1], map(int, sys.argv[2:5]), json.loads(sys.argv[5])
    # vLLM compiles again for another number of sequences
    common = {
        "skip_tokenizer_init": True,
        "max_num_seqs": rows if side == "fastdecode" else max(rows, 64),
        "max_num_batched_tokens": 4096,
        "seed": 0,
    }
    common |= {"max_model_len": prompt + most + 16, "enable_prefix_caching": False}
    engine, kind = engine_of(side, common | settings)
    params = kind(temperature=0, max_tokens=most, min_tokens=most, ignore_eos=True, detokenize=False)
    decoding = Decoding(engine, params, rows, prompt)
    decoding.tokens_per_second(WARM_UP)
    print("\nREADY", flush=True)
    for line in sys.stdin:
        print(f"\nRATE {decoding.tokens_per_second(int(line))}", flush=True)


if __name__ == "__main__":
    main()
