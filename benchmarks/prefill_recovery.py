"""Is anything lost with a prefill worker? python benchmarks/prefill_recovery.py --kills 20

Greedy float32 sequences whose prompts three spawned prefill workers compute as chains, in parts drawn at random. Two of
the three are killed with ``kill -9`` at random moments while prompts are under way; then come three new ones. Every
sequence must get the tokens of an undisturbed run. Printed for each round: the moments, what was computed again, and
whether anything was lost or differs.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
import time

from models import llama_folder

from fastdecode import LLM, SamplingParams
from fastdecode.remote_prefill import PrefillPart

NUM_PROMPTS, OUTPUT_LEN = 32, 24
GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, ignore_eos=True, detokenize=False)


class RandomChains:
    """A policy: two or three of those that are left, in random parts."""

    def __init__(self, draws: random.Random) -> None:
        self.workers, self.num_started, self._draws = [0, 1, 2], 0, draws

    def assign(self, num_tokens: int, context_len: int = 0) -> tuple[PrefillPart, ...]:
        """See ``PrefillPolicy``."""
        chosen = self._draws.sample(self.workers, min(len(self.workers), self._draws.choice((2, 3))))
        cuts = [0, *sorted(self._draws.sample(range(1, num_tokens), len(chosen) - 1)), num_tokens]
        bounds = [context_len + cut for cut in cuts]
        return tuple(PrefillPart(worker, bounds[i], bounds[i + 1]) for i, worker in enumerate(chosen))

    def started(self, job_id: int, parts: tuple[PrefillPart, ...]) -> None:
        """See ``PrefillPolicy``."""
        self.num_started += 1

    def lost(self, worker: int) -> None:
        """See ``PrefillPolicy``."""
        self.workers.remove(worker)

    def begin_step(self, now_seconds: float, num_waiting: int = 0, num_decoding: int = 0) -> None:
        """See ``PrefillPolicy``."""

    def ended(self, job_id: int, now_seconds: float, computed: bool = False) -> None:
        """See ``PrefillPolicy``."""

    def joined(self, worker: int) -> None:
        """See ``PrefillPolicy``."""


def main() -> None:
    """Print a line per two kills, and the sum."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, metavar="N", help="(20)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(0)")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    draws = random.Random(args.seed)
    prompts = [[draws.randrange(500) for _ in range(draws.randint(100, 400))] for _ in range(NUM_PROMPTS)]
    settings = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 512, "kv_cache_memory": "256MiB"}
    settings |= {"model": llama_folder(256, 4, initializer_range=0.2), "load_format": "dummy", "dtype": "float32"}
    with LLM(**settings) as llm:
        outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], GREEDY, use_tqdm=False)
        expected = [list(output.outputs[0].token_ids) for output in outputs]
    kills = lost = different = 0
    while kills < args.kills:
        with LLM(prefill_workers="spawn:3", prefill_threads=1, **settings) as llm:
            tokens, moments, again = disturbed(llm, prompts, draws)
        missing = sum(each is None or len(each) < OUTPUT_LEN for each in tokens)
        differing = sum(each != wanted for each, wanted in zip(tokens, expected, strict=True))
        kills, lost, different = kills + 2, lost + missing, different + differing
        when = ", ".join(f"{moment:.2f}" for moment in moments)
        print(
            f"killed after {when} s; {again} prompts handed out again; {missing} lost, {differing} differ",
            flush=True,
        )
    print(f"{kills} kills: {lost} requests lost, {different} differ")


def disturbed(llm: LLM, prompts: list[list[int]], draws: random.Random) -> tuple[list, list[float], int]:
    """Tokens of each prompt, when workers were killed, and how many prompts were handed out again."""
    engine, policy = llm.engine, RandomChains(draws)
    engine.scheduler.remote_prompts.policy = policy
    pids = draws.sample([client.process_id for client in engine._prefill_backend.clients], 2)
    start, moments, found = time.perf_counter(), [], {}
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, GREEDY)
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[output.request_id] = list(output.outputs[0].token_ids)
        if pids and engine.prefills.num_under_way and draws.random() < 0.15:
            os.kill(pids.pop(), signal.SIGKILL)
            moments.append(time.perf_counter() - start)
    return [found.get(str(number)) for number in range(len(prompts))], moments, policy.num_started - len(prompts)


if __name__ == "__main__":
    main()
