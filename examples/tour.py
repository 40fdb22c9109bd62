"""Follow one request and one token through a real engine, and print what crosses each border: python examples/tour.py

The demo model of the package runs on one R-worker in this process; docs/tour.md explains what is printed.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import Any

import torch

from fastdecode import LLM, SamplingParams
from fastdecode.core.step import ScheduledStep
from fastdecode.core.types import StepPlan, StepReport
from fastdecode.engine.engine import LLMEngine

PROMPT = "def f("
NUM_TOKENS = 2  # One step computes the prompt, and one decodes.


def main() -> None:
    signal.signal(
        signal.SIGALRM, lambda *_: sys.exit("no end within 5 minutes: `fastdecode doctor` says what is wrong")
    )
    signal.alarm(300)
    with LLM(dtype="float32", r_workers="inproc:1", num_mini_batches=1, kv_cache_memory="64MiB") as llm:
        engine = llm.llm_engine
        watch(engine)
        engine.add_request("tour", PROMPT, SamplingParams(temperature=0, max_tokens=NUM_TOKENS))
        show_request(engine)
        while engine.has_unfinished_requests():
            for output in engine.step():
                completion = output.outputs[0]
                print(f"RequestOutput  token_ids {list(completion.token_ids)}, text {completion.text!r}, "
                      f"finished {output.finished}, finish_reason {completion.finish_reason!r}")  # fmt: skip
    signal.alarm(0)


def watch(engine: LLMEngine) -> None:
    """From now on, print what crosses each border."""
    after(engine.scheduler, "schedule", lambda step: show_step(engine, step))
    before(engine.backend, "begin_step", show_plan)
    before(engine.backend, "submit", show_rows)
    answers: list[Any] = []
    after(engine.backend, "collect", answers.append)
    engine.s_model.model.get_output_embeddings().register_forward_hook(lambda *args: show_logits(answers, args[2]))
    after(engine.world, "compute", show_sampled)
    after(engine.backend, "end_step", show_report)


def before(owner: Any, name: str, show: Callable[..., None]) -> None:
    """Call ``show`` with the same arguments before each call of ``owner``'s method ``name``."""
    method = getattr(owner, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        show(*args)
        return method(*args, **kwargs)

    setattr(owner, name, watched)


def after(owner: Any, name: str, show: Callable[..., None]) -> None:
    """Call ``show`` with the result after each call of ``owner``'s method ``name``."""
    method = getattr(owner, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        show(result)
        return result

    setattr(owner, name, watched)


def numbers(values: Any) -> str:
    """Return the first few of ``values`` as text, to three decimals."""
    return ", ".join(f"{value:.3f}" for value in values[:3].tolist()) + ", …"


def show_request(engine: LLMEngine) -> None:
    """Print the request, and its sequence in the scheduler."""
    request, (completion,) = engine.in_flight.family(0)
    params, sequence = request.params, completion.sequence
    print(f"Request        {request.request_id!r}: text {request.prompt!r}, temperature {params.temperature}, "
          f"max_tokens {params.max_tokens}")  # fmt: skip
    print(f"Sequence       {sequence.sequence_id}: prompt_token_ids {sequence.prompt_token_ids}, segments []")


def show_step(engine: LLMEngine, step: ScheduledStep) -> None:
    """Print the chunks of a step, and which R-workers hold their sequences."""
    print("\n-- a step")
    for mini_batch in step.mini_batches:
        for chunk in mini_batch:
            for each in engine.in_flight.completion(chunk.sequence_id).sequence.segments:
                print(f"Segment        cache_id {each.cache_id}, start {each.start}, num_tokens {each.num_tokens}, "
                      f"num_blocks {each.num_blocks}, copies on R-workers {each.workers}")  # fmt: skip
            print(f"Chunk          sequence {chunk.sequence_id}, token_ids {list(chunk.token_ids)}, "
                  f"context_len {chunk.context_len}, R-worker {chunk.worker}, samples {chunk.samples}")  # fmt: skip


def show_plan(plan: StepPlan) -> None:
    """Print the records that are sent to each R-worker once per step."""
    for number, worker in enumerate(plan.workers):
        for spans in worker.mini_batches:
            for span in spans:
                fields = ", ".join(f"{name} {span[name]}" for name in spans.dtype.names)
                print(f"SPAN           {fields} (R-worker {number})")


def show_rows(mini_batch: int, layer: int, q: Any, k: Any, v: Any) -> None:
    """Print the shapes of layer 0's q, k and v, as the S-worker sends them: [rows, heads, head_dim]."""
    if layer == 0:
        print(f"submit         mini-batch {mini_batch}, layer {layer}: q {q.shape}, k {k.shape}, v {v.shape}")
        print(f"               q of the last row, head 0: {numbers(q[-1, 0])}")


def show_logits(answers: list[Any], logits: torch.Tensor) -> None:
    """Print each layer's output of attention, [attending rows, heads, head_dim], and logits, [1, rows, vocab_size]."""
    print(f"collect        {len(answers)} layers of o {answers[0].shape}; the last, last row, head 0: "
          f"{numbers(answers[-1][-1, 0])}")  # fmt: skip
    answers.clear()
    best = logits[0, 0].argmax().item()
    print(f"logits         {tuple(logits.shape)}; of the first row the largest is {logits[0, 0, best]:.3f}, of {best}")


def show_sampled(sampled: Any) -> None:
    """Print the tokens that were drawn, by sequence."""
    print(f"tokens         { {each: [token.token_id for token in tokens] for each, tokens in sampled.items()} }")


def show_report(report: StepReport) -> None:
    """Print the R-workers' reports: of a step with rows, and of the last step, which only releases sequences."""
    print(f"StepReport     lost {report.lost}, leaving {report.leaving}")


if __name__ == "__main__":
    main()
