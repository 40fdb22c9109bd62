"""Finds prompt seeds for the table in model_zoo.py: python tests/zoo_search.py [name ...] [--seeds 12]

Run it again if test_references.py fails, for instance with a new transformers, and put the seed with the largest gap
into the table. `noise` is the largest change of a logit when every weight moves by its last bit. The gap must be well
above it, or equality depends on rounding. The noise also shows whether a router of experts, or a whole model, is
unstable.
"""

from __future__ import annotations

import argparse
import dataclasses

import torch
import transformers

from helpers import model_zoo


def noise(name: str, reference: model_zoo.Reference) -> float:
    """Return the largest change of a logit if each weight changes by about half a unit in its last place."""
    exact, moved = model_zoo.build_model(name), model_zoo.build_model(name)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.mul_(1 + 6e-8 * torch.randn_like(parameter))
    return max(
        (model_zoo.reference_logits(exact, *pair) - model_zoo.reference_logits(moved, *pair)).abs().max().item()
        for pair in zip(model_zoo.prompts(name), reference.tokens, strict=True)
    )


def search(name: str, seeds: int) -> None:
    """Print the result of each prompt seed, and the best."""
    model, recipe, best = model_zoo.build_model(name), model_zoo.RECIPES[name], (0.0, 0)
    for seed in range(1, seeds + 1):
        model_zoo.RECIPES[name] = dataclasses.replace(recipe, prompt_seed=seed)
        prompts = model_zoo.prompts(name)
        found = model_zoo.generate(model, prompts)
        distinct = [len(set(tokens)) for tokens in found.tokens]
        changed = [
            model_zoo.disagreements(model, model_zoo.with_other_start(prompt), tokens)
            for prompt, tokens in zip(prompts, found.tokens, strict=True)
        ]
        holds = min(distinct) >= 16 and min(changed) >= 1
        ratio = noise(name, found)
        print(f"{name} {seed}: gap {found.min_gap:.1e} noise {ratio:.1e} {distinct=} {changed=} {holds=}", flush=True)
        if holds:
            best = max(best, (found.min_gap, seed))
    print(f"{name}: best prompt seed {best[1]} with a gap of {best[0]:.1e}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=model_zoo.ARCHITECTURES)
    parser.add_argument("--seeds", type=int, default=12)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for name in arguments.names:
        search(name, arguments.seeds)
