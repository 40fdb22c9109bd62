"""Follow one request and one token through a real engine, and print what crosses each border: python examples/tour.py

The demo model of the package runs on one R-worker in this process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fastdecode import LLM, SamplingParams
from fastdecode.core.step import ScheduledStep
from fastdecode.core.types import StepPlan, StepReport

PROMPT = "def read_lines(self, path):"
NUM_TOKENS = 2  # the prompt's step, then one decode step


def main() -> None:
    """Generate ``NUM_TOKENS`` tokens and print what crosses each border on the way."""
    with LLM(dtype="float32", r_workers="inproc:1", num_mini_batches=1, kv_cache_memory="64MiB") as llm:
        engine = llm.engine
        after(engine.scheduler, "schedule", show_step)
        before(engine.backend, "begin_step", show_plan)
        before(engine.backend, "submit", show_rows)
        after(engine.backend, "collect", show_answer)
        after(engine.backend, "end_step", show_report)
        engine.s_model.model.get_output_embeddings().register_forward_hook(show_logits)
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
        engine.add_request("tour", PROMPT, params)
        print(f"Request 'tour': {PROMPT!r}, {params.max_tokens} tokens at temperature {params.temperature}")
        while engine.has_unfinished_requests():
            for output in engine.step():
                completion = output.outputs[0]
                print(f"RequestOutput: token_ids {completion.token_ids}, text {completion.text!r}")
                print(f"               finished {output.finished}, because of {completion.finish_reason!r}\n")


def before(owner: Any, name: str, show: Callable[..., None]) -> None:
    """Have ``show`` see the arguments of ``owner``'s method ``name`` before each call."""
    method = getattr(owner, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        show(*args)
        return method(*args, **kwargs)

    setattr(owner, name, watched)


def after(owner: Any, name: str, show: Callable[..., None]) -> None:
    """Have ``show`` see the result of ``owner``'s method ``name`` after each call."""
    method = getattr(owner, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        show(result)
        return result

    setattr(owner, name, watched)


def show_step(step: ScheduledStep) -> None:
    """Print the chunks of a step."""
    for number, mini_batch in enumerate(step.mini_batches):
        for chunk in mini_batch:
            print(f"Chunk (mini-batch {number}): sequence {chunk.sequence_id}, R-worker {chunk.worker},")
            print(f"    context_len {chunk.context_len}, token_ids {list(chunk.token_ids)},")
            print(f"    attends {chunk.attends}, samples {chunk.samples}, is_decode {chunk.is_decode}")


def show_plan(plan: StepPlan) -> None:
    """Print the records that each R-worker gets once in a step."""
    for number, worker in enumerate(plan.workers):
        for spans in worker.mini_batches:
            for span in spans:
                fields = ", ".join(f"{name} {span[name]}" for name in spans.dtype.names)
                print(f"SPAN (R-worker {number}): {fields}")


def show_rows(mini_batch: int, layer: int, q: Any, k: Any, v: Any) -> None:
    """Print the shapes of layer 0's q, k and v, as they leave the S-worker: [rows, heads, head_dim]."""
    if layer == 0:
        print(f"submit(mini_batch {mini_batch}, layer {layer}): q {q.shape}, k {k.shape}, v {v.shape}, {q.dtype}")
        print(f"    last row of q, head 0, begins {q[-1, 0, :3].tolist()}")


def show_answer(o: Any) -> None:
    """Print the shape of a layer's o: [attending rows, heads, head_dim]."""
    print(f"collect: o {o.shape}, last row, head 0, begins {o[-1, 0, :3].tolist()}")


def show_logits(module: torch.nn.Module, inputs: Any, logits: torch.Tensor) -> None:
    """Print the largest logit of the row that samples; ``logits``: [1, rows, vocab_size]."""
    best = logits[0, 0].argmax().item()
    print(f"logits {tuple(logits.shape)}: the largest is {logits[0, 0, best]:.3f}, of token {best}")


def show_report(report: StepReport) -> None:
    """Print what the R-workers say of the step."""
    print(f"StepReport: lost {report.lost}, leaving {report.leaving}")


if __name__ == "__main__":
    main()
