"""``python -m chaos.killed --kills 200``: kills engines with -9 at random moments, and starts the next one each time.

An engine with a journal answers a load, and its client writes down each token as it arrives. The process group is
killed while the engine starts, or at any instruction of its steps. The next engine gets the same requests, and the
client takes the tokens that it lacks. At the end, the client must have the tokens of an undisturbed engine. Each engine
is a fork of this process, which has imported everything already.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from helpers import r_workers
from helpers.model_zoo import POSITIONS, VOCABULARY
from helpers.tiny_hybrids import built

from chaos.configuration import HYBRIDS, Ask
from chaos.reference import params_of, prompt_of
from fastdecode.api.config import EngineConfig
from fastdecode.api.outputs import RequestOutput
from fastdecode.engine.engine import LLMEngine

KINDS = {
    "the engine": "R-workers at host:port go on",
    "the engine and one of two R-workers": "started again, empty",
    "the engine and all R-workers": "those that it had started",
    "both ranks of the engine": "R-workers at host:port go on",
    "an engine of one rank, of two, of one again": "R-workers at host:port begin anew",
    "the engine of a hybrid": "R-workers at host:port go on",
    "the engine and its prefill worker": "R-workers at host:port go on",
    "an engine of chats": "R-workers at host:port go on",
    "the engine of a hybrid and one of two R-workers": "started again, empty",
    "the engine of a hybrid and its prefill worker": "R-workers at host:port go on",
}
"""The victims of kills by name, and what then happens to the R-workers."""

KILLS_PER_ROUND = 10
MOST_UNCLEAN = 5
"""Failed rounds after which the command stops."""

MOST_FAILED = 3
"""Most engines of a round that may fail by themselves, and are started again.
For instance, an engine may lose its R-workers while it starts on a busy machine.
"""

START_SECONDS = 30.0
"""Most seconds until a restarted R-worker listens again."""

END_SECONDS = 120.0
"""Most seconds until an undisturbed engine has answered a load."""

ALARMS = ("is at fault", "an audit names no R-worker")
"""Parts of log lines of an audit that finds a fault; these R-workers have none."""

PR_SET_PDEATHSIG = 1
"""The option of prctl(2) that sends a process a signal when its parent ends."""

Streams = dict[str, list[list[int]]]
"""The tokens that a client has of each sample, by request."""


@dataclass(frozen=True)
class Round:
    """One load, the settings of all its engines, and what is killed. ``turns``: of each chat; 1 without chats."""

    seed: int
    kind: str
    settings: dict[str, Any]
    asks: dict[str, Ask]
    folder: Path
    turns: int = 1

    @property
    def client(self) -> Path:
        """The client's file: one line per step with the tokens that each request got."""
        return self.folder / "client"


@dataclass
class Found:
    """The outcome of a round."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def draw(seed: int, folder: Path, kinds: tuple[str, ...]) -> Round:
    """Return the round of ``seed``."""
    rng = random.Random(seed)
    settings: dict[str, Any] = {
        "dtype": rng.choice(("float32", "bfloat16")),
        "kv_cache_dtype": rng.choice(("auto", "auto", "int8")),
        "num_mini_batches": rng.choice((1, 2, 3)),
        "block_size": rng.choice((16, 32)),
        "max_num_batched_tokens": rng.choice((64, 512)),
        "max_num_seqs": rng.choice((8, 24)),
        "speculative_config": rng.choice(({}, {}, {"method": "ngram", "num_speculative_tokens": 3})),
    }
    asks = {str(number): _ask(rng, number) for number in range(12)}
    settings |= rng.choice(({}, {"kv_replicas": 2}, {"kv_shard_tokens": 512, "max_model_len": 2048}))
    if "kv_shard_tokens" in settings:
        asks |= {str(number): _ask(rng, number, 48 + rng.randrange(64)) for number in range(0, 12, 4)}
    kind = kinds[seed % len(kinds)]
    settings |= random.Random(f"integers {seed}").choice(({}, {}, {"quantization": "int8"}))
    if "quantization" in settings and "hybrid" not in kind:
        settings |= random.Random(f"again {seed}").choice(({}, {"int8_calibration_tokens": 96}))
    settings |= random.Random(f"audit {seed}").choice(({}, {"audit": 0.05}, {"audit": 0.5}))
    if "rank" in kind:
        settings |= {"tensor_parallel_size": 2}
        # Ranks add floats in an order that depends on their number, which rounds differently in 16 bits.
        if "both" not in kind and "quantization" not in settings:
            settings |= {"dtype": "float32", "kv_cache_dtype": "auto"}
    if "prefill" in kind:
        settings |= {"prefill_workers": "spawn:1", "prefill_threads": 1}
        asks |= {str(number): _ask(rng, number, 8 + rng.randrange(16)) for number in range(0, 12, 2)}
    if "hybrid" in kind:
        settings, asks = _of_hybrid(settings, asks, rng, folder)
    # After a kill the turns of chats come in another order, so unseeded requests would draw other tokens
    if "chats" in kind:
        more = {name: {"max_tokens": rng.randrange(8, 40), "seed": rng.randrange(1000)} for name in asks}
        asks = {name: replace(ask, params=ask.params | more[name]) for name, ask in asks.items()}
    return Round(seed, kind, settings, asks, folder, turns=4 if "chats" in kind else 1)


def _of_hybrid(
    settings: dict[str, Any], asks: dict[str, Ask], rng: random.Random, folder: Path
) -> tuple[dict[str, Any], dict[str, Ask]]:
    """Return settings of a tiny hybrid without a tokenizer, and ``asks`` requests, some with a shared beginning."""
    name, shared = rng.choice(HYBRIDS), [rng.randrange(VOCABULARY) for _ in range(60)]
    built(name, vocab_size=VOCABULARY, max_position_embeddings=POSITIONS).save_pretrained(folder / name)
    kept = {each: value for each, value in settings.items() if each not in ("kv_shard_tokens", "max_model_len")}
    more = {"model": str(folder / name), "skip_tokenizer_init": True}
    more["mamba_ssm_cache_dtype"] = rng.choice(("auto", "auto", "bfloat16"))
    found = {}
    for number, (key, ask) in enumerate(asks.items()):
        own = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 200))]
        params = {each: value for each, value in ask.params.items() if each != "structured_outputs"}
        found[key] = Ask(0, shared * (number % 2) + own, params, None)
    if "prefill_workers" not in settings and rng.random() < 0.5:
        more |= {"state_on": "s", "state_memory": "1GiB"}
    return kept | more, found


def _ask(rng: random.Random, number: int, length: int = 0) -> Ask:
    """Return request number ``number``. ``length``: statements in its prompt; by default few."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1.0, "n": 4},
        {"temperature": 0.8, "seed": 3, "logprobs": 2, "presence_penalty": 0.5},
        {"structured_outputs": {"regex": "([a-z]{5,9} = [0-9]{3};){6}"}},
    ]
    prompt = f"def function_{number}(x, y):" + " x = y + z;" * (length or rng.randrange(16))
    params = {"max_tokens": rng.randrange(40, 200), "ignore_eos": True} | kinds[number % len(kinds)]
    return Ask(0, prompt, params, None)


def run_round(drawn: Round, most_kills: int, extra: dict[str, Any] | None = None) -> Found:
    """Kill engines of the round up to ``most_kills`` times, then compare the tokens that its client got.
    ``extra``: further settings of the killed engines.
    """
    found, rng = Found(), random.Random(drawn.seed + 1)
    plain = {
        "r_workers": "inproc:1",
        "r_threads": 1,
        "kv_cache_memory": "64MiB",
        "kv_replicas": 1,
        "kv_shard_tokens": None,
        "prefill_workers": None,
        "prefill_threads": None,
    }
    if "of one again" in drawn.kind:
        plain["tensor_parallel_size"] = 1
    _wait(_engine(drawn, plain, drawn.folder / "reference"), found, "the undisturbed engine")
    wanted = _read(drawn.folder / "reference")
    with ExitStack() as cleanup:
        count = 0 if "all" in drawn.kind else 4 if "rank" in drawn.kind else 2
        workers = Workers(drawn.kind, count, f"round {drawn.seed}", cleanup)
        num_ranks = drawn.settings.get("tensor_parallel_size", 1)
        journal = {"journal": str(drawn.folder / "journal")}
        in_memory = (extra or {}).get("journal") == "r-workers"
        more = {**journal, **workers.settings(), **(extra or {})}
        if in_memory:  # beside which no states are saved
            more |= {"state_on": "auto", "state_memory": None}
        while found.counts["kills"] < most_kills and found.counts["failed"] < MOST_FAILED:
            had = _size(drawn.client)
            pid = _engine(drawn, more | {"tensor_parallel_size": num_ranks}, drawn.client)
            if _kill(pid, drawn, rng):
                found.counts["kills"] += 1
                num_ranks = 3 - num_ranks if "of one again" in drawn.kind else num_ranks
                workers.befall(rng, spared=in_memory and _size(drawn.client) == had)
            elif os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT).si_status == 0:  # type: ignore[union-attr]
                break
            else:
                os.waitpid(pid, 0)
                found.counts["failed"] += 1
        else:
            pid = _engine(drawn, more | {"tensor_parallel_size": num_ranks}, drawn.client)
        _wait(pid, found, "the last engine")
    _compare(wanted, _read(drawn.client), found)
    alarms = [line for line in (drawn.folder / "log").read_text().splitlines() if any(each in line for each in ALARMS)]
    found.faults += [f"an audit's false alarm: {line}" for line in alarms]
    for line in _lines(drawn.folder / "begun"):
        found.counts.update({"known": line["known"], "again": line["again"]})
    return found


class Workers:
    """The R-workers of a round of this ``kind`` and ``session``. ``count`` is 0 if the engine starts its own."""

    def __init__(self, kind: str, count: int, session: str, cleanup: ExitStack) -> None:
        self._kind, self._cleanup, self._session = kind, cleanup, session
        self._running = [self._start() for _ in range(count)]

    def settings(self) -> dict[str, Any]:
        """Return the R-worker settings of the next engine."""
        if not self._running:
            return {"r_workers": "spawn:2", "r_threads": 1, "kv_cache_memory": "64MiB"}
        return {"r_workers": self.addresses, "session": self._session, "keep_session": 60.0}

    @property
    def addresses(self) -> str:
        return ",".join(address for _, address, _ in self._running)

    def befall(self, rng: random.Random, spared: bool) -> None:
        """Handle that the engine was just killed, perhaps by killing R-workers too.
        ``spared``: kill no R-worker, since only one may still have the journal.
        """
        if "one of two" in self._kind or "one of its R-workers" in self._kind:
            index = rng.randrange(len(self._running))
            if spared:
                return
            process, address, one = self._running[index]
            process.kill()
            one.close()
            self._running[index] = self._start(address)

    def _start(self, address: str = "127.0.0.1:0") -> tuple[Any, str, ExitStack]:
        one, deadline = self._cleanup.enter_context(ExitStack()), time.monotonic() + START_SECONDS
        while True:
            try:
                process, where = one.enter_context(r_workers.listening(listen=f"tcp://{address}"))
            except RuntimeError:  # another process may have its port for a moment
                if time.monotonic() > deadline:
                    raise
            else:
                return process, where, one


def _engine(drawn: Round, more: dict[str, Any], client: Path) -> int:
    """Start an engine by ``forked``; return its process id."""
    return forked(drawn.folder / "log", lambda: _answer(drawn, more, client))


def forked(log: Path, act: Callable[[], object]) -> int:
    """Call ``act`` in a forked process group that ends with this process; return its process id.
    Its stderr is appended to ``log``. Its exit status is 0 unless ``act`` raised an error.
    """
    sys.stdout.flush()
    campaign = os.getpid()
    if pid := os.fork():
        return pid
    status = 1
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != campaign:  # the parent was killed before that call
            return os._exit(status)
        with log.open("a") as file:
            os.dup2(file.fileno(), 2)
        act()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _answer(drawn: Round, more: dict[str, Any], client: Path) -> None:
    """Run in the engine's process: send all requests, and write the tokens that the client lacks."""
    settings: dict[str, Any] = {"device": "cpu", "s_threads": 1, "max_model_len": 512, **drawn.settings, **more}
    engine = LLMEngine(EngineConfig(**settings))
    if "journal" in more:
        _note_starts(engine, drawn.folder / "begun")
    had = _read(client)
    for name, ask in drawn.asks.items():
        engine.add_request(name, prompt_of(ask), params_of(ask))
    with client.open("ab", buffering=0) as file:
        while engine.has_unfinished_requests():
            brought = []
            for output in engine.step():
                samples = had.setdefault(output.request_id, [[] for _ in output.outputs])
                for index, each in enumerate(output.outputs):
                    tokens, start = list(each.token_ids), len(samples[index])
                    if tokens[:start] != samples[index]:
                        raise ValueError(f"request {output.request_id}, sample {index}: other tokens than before")
                    brought.append((output.request_id, index, len(output.outputs), tokens[start:]))
                    samples[index] = tokens
                for name, ask in _next_turn(drawn, output):
                    engine.add_request(name, prompt_of(ask), params_of(ask))
            file.write(json.dumps(brought).encode() + b"\n")
    engine.close()


def _next_turn(drawn: Round, output: RequestOutput) -> Iterator[tuple[str, Ask]]:
    """Yield the next turn of a chat whose answer has ended: the conversation, and a part of it once more."""
    name, _, turn = output.request_id.partition(" turn ")
    number = int(turn or 1) + 1
    if output.finished and number <= drawn.turns:
        before = list(output.prompt_token_ids)
        prompt = [*before, *output.outputs[0].token_ids, *before[: 5 * number]]
        yield f"{name} turn {number}", replace(drawn.asks[name], prompt=prompt)


def _note_starts(engine: LLMEngine, path: Path) -> None:
    """Write how many tokens of each continued sequence the journal calls cached, and how many are recomputed."""
    store = engine.scheduler.store
    begin = store.begin

    def noting(sequence: Any, segments: Any, hit: Any, second: int = -1) -> None:
        if sequence.outputs_at_start is None and sequence.output_token_ids:
            known = sequence.num_tokens - 1
            line = {"known": known, "again": max(0, known - (hit.num_tokens if hit else 0))}
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        begin(sequence, segments, hit, second)

    store.begin = noting  # type: ignore[method-assign]


def _kill(pid: int, drawn: Round, rng: random.Random) -> bool:
    """Kill the process group of engine ``pid`` during its start or later. Return False if it ended before."""
    size = _size(drawn.client)
    steps = 0 if rng.random() < 0.15 else rng.randrange(1, 40)
    deadline = time.monotonic() + (rng.uniform(0, 1.0) if steps == 0 else END_SECONDS)
    while time.monotonic() < deadline and (steps == 0 or _size(drawn.client, size) < steps):
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return False
        time.sleep(0.001)
    time.sleep(rng.uniform(0, 0.02))
    if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        return False
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return True


def _size(path: Path, start: int | None = None) -> int:
    """Return the bytes of a file, or the number of its lines after byte ``start``."""
    if not path.exists():
        return 0
    if start is None:
        return path.stat().st_size
    with path.open("rb") as file:
        file.seek(start)
        return file.read().count(b"\n")


def _wait(pid: int, found: Found, name: str) -> None:
    """Wait until engine ``pid`` has ended by itself."""
    deadline = time.monotonic() + END_SECONDS
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
            ended = os.waitpid(pid, 0)
            break
        time.sleep(0.005)
    if ended[1]:
        found.faults.append(f"{name} ended with {ended[1]}")


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _read(path: Path) -> Streams:
    """Return the tokens that a client has written."""
    streams: Streams = {}
    for line in _lines(path):
        for name, index, count, tokens in line:
            streams.setdefault(name, [[] for _ in range(count)])[index] += tokens
    return streams


def _compare(wanted: Streams, got: Streams, found: Found) -> None:
    for name, samples in wanted.items():
        found.counts["requests"] += 1
        if name not in got:
            found.counts["lost"] += 1
            found.faults.append(f"request {name} is lost")
            continue
        for index, (expected, tokens) in enumerate(zip(samples, got[name], strict=True)):
            found.counts["tokens"] += len(expected)
            found.counts["more or fewer"] += abs(len(expected) - len(tokens))
            if differing := sum(a != b for a, b in zip(expected, tokens, strict=False)):
                found.counts["different"] += differing
            if expected != tokens:
                found.faults.append(f"request {name}, sample {index}: {tokens} and not {expected}")


COLUMNS = ("kills", "failed", "requests", "lost", "tokens", "more or fewer", "different", "known", "again")


def main() -> int:
    torch.set_num_threads(1)  # a fork would lack torch's other threads
    parser = argparse.ArgumentParser(prog="chaos.killed", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first round; the next ones follow")
    parser.add_argument("--journal", choices=("folder", "r-workers"), default="folder", help="where it lies")
    parser.add_argument("--kinds", nargs="+", type=int, default=range(len(KINDS)), help="of what is killed, by number")
    options = parser.parse_args()
    kinds = tuple(list(KINDS)[number] for number in options.kinds)
    totals: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    seed, unclean = options.seed, 0
    while (left := options.kills - sum(each["kills"] for each in totals.values())) > 0 and unclean < MOST_UNCLEAN:
        with tempfile.TemporaryDirectory(prefix="killed-", ignore_cleanup_errors=True) as name:
            drawn = draw(seed, Path(name), kinds)
            start = time.monotonic()
            extra = {"journal": "r-workers"} if options.journal == "r-workers" else {}
            found = run_round(drawn, min(left, KILLS_PER_ROUND), extra)
            unclean += bool(found.faults)
            log = (drawn.folder / "log").read_text()[-3000:] if found.faults else ""
        totals[drawn.kind].update(found.counts)
        print(f"seed {seed}, {drawn.kind}: {'UNCLEAN' if found.faults else 'clean'}, "
              f"{time.monotonic() - start:.1f} s, {dict(found.counts)}, {drawn.settings}", flush=True)  # fmt: skip
        print("\n".join(["  " + fault for fault in found.faults] + [log] * bool(log)), flush=True)
        seed += 1
    print(f"| killed | {' | '.join(COLUMNS)} |\n|---|{'---|' * len(COLUMNS)}")
    for kind, counts in totals.items():
        print(f"| {kind}: {KINDS[kind]} | {' | '.join(f'{counts[name]:,}' for name in COLUMNS)} |")
    return 1 if unclean else 0


if __name__ == "__main__":
    raise SystemExit(main())
