"""The parts of a hybrid's prompt: how long the R-worker takes for states and attention beside the model's own code.

A Qwen3-Next of random weights, four layers of which one attends, 16 heads of 128 x 128, float32, one prompt, one thread
for either side. Prints seconds and the R-worker's share of their sum.
"""

from __future__ import annotations

import argparse
import tempfile

import numpy as np
from transformers import Qwen3NextConfig

from fastdecode import LLM, SamplingParams
from fastdecode.core.metrics import StepRecord

SIZES = {
    "hidden_size": 1024, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts": 4,
    "num_experts_per_tok": 2, "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "linear_num_value_heads": 16,
    "linear_num_key_heads": 8, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "vocab_size": 4096,
    "max_position_embeddings": 8192,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--input-len", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    prompt = np.random.default_rng(0).integers(8, 4000, args.input_len).tolist()
    with tempfile.TemporaryDirectory() as folder:
        Qwen3NextConfig(**SIZES).save_pretrained(folder)
        llm = LLM(
            folder, load_format="dummy", skip_tokenizer_init=True, device="cpu", dtype="float32", s_threads=1,
            r_threads=1, r_workers="inproc:1", num_mini_batches=1, max_num_batched_tokens=args.input_len,
            max_model_len=args.input_len + 32, kv_cache_memory="512MiB", enable_prefix_caching=False,
        )  # fmt: skip
        with llm:
            for _ in range(args.repeats):
                record = step_of(llm, prompt)
                s, r = record.s_seconds, max(record.r_seconds)
                print(f"S-part {s:.2f} s, R-worker {r:.2f} s: {r / (s + r):.0%} of both")


def step_of(llm: LLM, prompt: list[int]) -> StepRecord:
    """The step that computes all of ``prompt``."""
    records: list[StepRecord] = []
    llm.engine.on_step = records.append
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    return records[0]


if __name__ == "__main__":
    main()
