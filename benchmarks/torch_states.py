"""One decode step of recurrent layers: the R-worker beside transformers' own torch code, in turns.

Of transformers, the convolution's update and the recurrence's, as its decode calls them, over states of a batch: gated
delta rule (32 heads of 128 x 128, Qwen3-Next) and Mamba-2 (80 heads of 128 x 64), float32, as many threads for either.
Prints milliseconds, and how many times as long torch takes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median

import torch
from states import SHAPES, TAPS, decode_steps, timed
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--num-sequences", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    for kind, of_torch in (("delta", delta_step), ("scan", scan_step)):
        for threads in args.threads:
            torch.set_num_threads(threads)
            turns = decode_steps(kind, threads, args.num_sequences, "float32", False), of_torch(args.num_sequences)
            for turn in turns:
                turn()
            rounds = [[timed(turn) for turn in turns] for _ in range(args.repeats)]
            ratios = [theirs / ours for ours, theirs in rounds]
            ours, theirs = (median(each) * 1e3 for each in zip(*rounds, strict=True))
            print(
                f"{kind:6} {threads} threads: {ours:.1f} ms, torch {theirs:.1f} ms, {median(ratios):.1f} times as long "
                f"({min(ratios):.1f} to {max(ratios):.1f})"
            )


def delta_step(num_sequences: int) -> Callable[[], None]:
    """What transformers computes between the projections of a Qwen3-Next layer for one token of each sequence."""
    heads, groups, key_dim, value_dim = SHAPES["delta"]
    wide, channels = groups * key_dim, 2 * groups * key_dim + heads * value_dim
    rows, filters = torch.randn(num_sequences, channels, 1), torch.randn(channels, TAPS)
    window = torch.randn(num_sequences, channels, TAPS - 1)
    state = torch.zeros(num_sequences, heads, key_dim, value_dim)
    decay, rate = torch.full((num_sequences, 1, heads), -0.1), torch.full((num_sequences, 1, heads), 0.5)

    @torch.inference_mode()
    def step() -> None:
        nonlocal state
        mixed = qwen3_next.causal_conv1d_update(rows, window, filters, activation="silu").transpose(1, 2)
        query, key, value = mixed.split([wide, wide, heads * value_dim], -1)
        _, state = qwen3_next.torch_recurrent_gated_delta_rule(
            query.unflatten(-1, (groups, key_dim)), key.unflatten(-1, (groups, key_dim)),
            value.unflatten(-1, (heads, value_dim)), g=decay, beta=rate, initial_state=state, output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip

    return step


def scan_step(num_sequences: int) -> Callable[[], None]:
    """The same of a Mamba-2 layer."""
    heads, groups, key_dim, value_dim = SHAPES["scan"]
    wide, channels = heads * value_dim, 2 * groups * key_dim + heads * value_dim
    rows, filters = torch.randn(num_sequences, channels, 1), torch.randn(channels, TAPS)
    window = torch.randn(num_sequences, channels, TAPS - 1)
    state = torch.zeros(num_sequences, heads, value_dim, key_dim)
    steps = torch.full((num_sequences, heads, 1), 0.5).expand(-1, -1, value_dim)
    factors = torch.full((heads, 1, 1), -0.2).expand(-1, value_dim, key_dim)

    @torch.inference_mode()
    def step() -> None:
        mixed = mamba2.causal_conv1d_update(rows, window, filters, activation="silu")[:, :, 0]
        hidden, key, query = mixed.split([wide, groups * key_dim, groups * key_dim], -1)
        mamba2.mamba2_selective_state_update(
            state, hidden.view(-1, heads, value_dim), steps, factors, key.view(-1, groups, key_dim),
            query.view(-1, groups, key_dim),
        )  # fmt: skip

    return step


if __name__ == "__main__":
    main()
