"""Sessions that outlive their S-worker: what R-workers keep, for whom, and which S-workers are refused."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import contract, r_workers
from helpers.processes import PATIENCE_SECONDS
from helpers.scheduler_harness import AMPLE
from helpers.sessions import make

from fastdecode import SamplingParams
from fastdecode.api.config import EngineConfig
from fastdecode.cluster.r_worker.host import begin_step, end_step
from fastdecode.cluster.r_worker.lease import Lease, LeaseError, held_by
from fastdecode.cluster.wire import leases
from fastdecode.cluster.wire.leases import AskedLease
from fastdecode.cluster.wire.messages import Hello
from fastdecode.core.errors import ConfigError, FrameError
from fastdecode.core.held import HeldSequence, KnownTokens
from fastdecode.core.types import CONTROL, SPAN, RWorkerInfo, Verb, WorkerPlan
from fastdecode.engine.compose.timed_steps import profile_steps
from fastdecode.engine.engine import LLMEngine
from fastdecode.journal.past import pasts_of
from fastdecode.journal.records import Stepped, read
from fastdecode.scheduler.names import Names
from fastdecode.scheduler.places.place import Segment
from fastdecode.scheduler.places.workers import Workers
from fastdecode.scheduler.prefix.cache import PrefixCache
from fastdecode.scheduler.sequence import Sizes, TokenSequence


def hello(follows: str = "", epoch: int = 0, name: str = "a", fingerprint: str = "first", keep: float = 60.0) -> Hello:
    return Hello("host:1", contract.LAYOUT, 16, AskedLease(name, fingerprint, follows, keep, epoch))


def test_a_lease_goes_to_the_heir_with_the_next_epoch() -> None:
    lease = Lease()
    worker = lease.open(hello(), make)
    assert (lease.epoch, lease.goes_on) == (1, False)
    lease.leave(worker, is_broken=True)
    with pytest.raises(LeaseError, match="this R-worker keeps the caches of session a, for 60 s at most") as refused:
        lease.open(hello(name="b"), make)
    assert refused.value.kind == "busy"
    with pytest.raises(LeaseError, match="this R-worker keeps the caches of session a"):
        lease.open(Hello("host:2", contract.LAYOUT, 16), make)
    assert lease.open(hello("first", fingerprint="second"), make) is worker
    assert (lease.epoch, lease.goes_on) == (2, True)
    with pytest.raises(LeaseError, match=r"session a was continued by host:1: epoch 2, not 1") as refused:
        lease.open(hello("", epoch=1), make)
    assert refused.value.kind == "superseded"
    lease.leave(worker, is_broken=False)  # The S-worker says BYE, so nothing is kept.
    assert lease.open(Hello("host:2", contract.LAYOUT, 16), make) is not worker
    assert (lease.epoch, lease.goes_on) == (0, False)


@pytest.mark.parametrize("other", [hello("another"), hello(""), hello("first", epoch=1)])
def test_what_is_kept_is_freed_for_one_that_is_no_heir(other: Hello) -> None:
    """The other S-worker has other weights, no journal, or is the same one, which has counted this R-worker as lost."""
    lease = Lease()
    worker = lease.open(hello(), make)
    lease.leave(worker, is_broken=True)
    assert lease.open(other, make) is not worker and not lease.goes_on
    with pytest.raises(ValueError, match="closed"):
        worker.sequence_ids()


def test_one_that_did_not_get_all_of_its_r_workers_leaves_what_it_found() -> None:
    """A session that such an S-worker left untouched stays for the earlier S-worker's successor.

    One that an S-worker has worked with is kept for its own successor.
    """
    lease = Lease()
    worker = lease.open(hello(), make)
    lease.leave(worker, is_broken=True)
    for fingerprint in ("second", "third"):
        assert lease.open(hello("first", fingerprint=fingerprint), make) is worker and lease.kept_of == "first"
        lease.leave(worker, is_broken=True, is_untouched=True)
    assert lease.open(hello("first", fingerprint="fourth"), make) is worker and lease.epoch == 4
    lease.leave(worker, is_broken=True)
    assert lease.open(hello("fourth", fingerprint="fifth"), make) is worker


def test_what_prefill_workers_were_storing_is_not_kept() -> None:
    lease = Lease()
    worker = lease.open(hello(), make)
    for controls in ([(Verb.RESERVE, 3, 7, 32), (Verb.RESERVE, 4, 8, 16)], [(Verb.RELEASE, 3, 0, 0)]):
        begin_step(worker, WorkerPlan(np.array(controls, CONTROL), ()))
        end_step(worker)
    assert worker.incoming_ids() == [4]
    lease.leave(worker, is_broken=True)
    assert lease.open(hello("first"), make) is worker and held_by(worker) == []
    assert worker.blocks_free == worker.num_blocks


def test_what_is_kept_is_freed_in_time() -> None:
    lease = Lease()
    lease.leave(lease.open(hello(keep=0.0), make), is_broken=True)
    lease.open(Hello("host:2", contract.LAYOUT, 16), make)
    lease.leave(lease.open(hello(keep=1e-9), make), is_broken=True)
    time.sleep(1e-3)
    lease.expire()
    lease.open(Hello("host:2", contract.LAYOUT, 16), make)


HELD = [HeldSequence(0, 40, (0, 1, 2), 39), HeldSequence(7, 16, (0,), 17), HeldSequence(-3, 0, ())]


def test_what_is_held_is_read_as_it_was_said() -> None:
    data = leases.encode_held(HELD)
    assert leases.decode_held(data, 3, 16) == tuple(HELD) and leases.decode_held(b"", 3, 16) == ()
    for length in range(1, len(data)):
        try:
            found = leases.decode_held(data[:length], 3, 16)
        except FrameError:
            continue
        assert found == tuple(HELD[: len(found)])
    for numbers in (
        [0, 1, 0, 1, 3],
        [0, 17, 0, 1, 0],
        [0, 1, 0, 2, 0, 0],
        [0, -1, 0, 0],
        [0, 0, 0, -1],
        [0, 0, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 9],
        [0, 1, 3, 1, 0],
        [0, 1, -1, 1, 0],
    ):
        with pytest.raises(FrameError, match=r"HELD: entry [01] is no sequence that an R-worker can hold"):
            leases.decode_held(np.array(numbers, "<i8").tobytes(), 3, 16)


def test_adopted_blocks_are_counted_as_the_r_worker_does() -> None:
    """Sequences share blocks; one has a refused draft beyond what is known, and one is unknown.

    One goes on in place, without a message to its R-worker.
    """
    worker = make()
    rng = np.random.default_rng(0)
    text = list(range(60))

    def step(controls: list[tuple[int, int, int, int]], spans: list[tuple[int, int, int, int]]) -> None:
        begin_step(worker, WorkerPlan(np.array(controls, CONTROL), (np.array(spans, SPAN),)))
        rows = sum(span[2] for span in spans)
        for layer, shape in enumerate(contract.LAYOUT.layers if rows else ()):
            q = np.zeros((0, shape.num_heads, shape.key_head_dim), np.float32)
            k = rng.standard_normal((rows, shape.num_kv_heads, shape.key_head_dim)).astype(np.float32)
            v = rng.standard_normal((rows, shape.num_kv_heads, shape.value_head_dim)).astype(np.float32)
            o = np.zeros((0, shape.num_heads, shape.value_head_dim), np.float32)
            worker.run(0, layer, q, k, v, o, np.zeros((0, shape.num_heads, 2 + shape.value_head_dim), np.float32))
        end_step(worker)

    step([], [(0, 0, 40, 0)])
    step([(Verb.FORK, 1, 0, 32), (Verb.FORK, -1, 0, 32)], [(1, 32, 20, 0)])
    workers = Workers([worker.num_blocks], [1.0], Sizes(16))
    cache = PrefixCache(workers, replace(AMPLE, num_blocks=(worker.num_blocks,)), True, Names(False))
    known = {0: KnownTokens(0, 0, text[:38]), 1: KnownTokens(1, 0, text[:32] + [5] * 18)}
    assert cache.adopt({0: held_by(worker)}, known) == {0: 38 + 50}
    assert workers[0].free + workers[0].cached == worker.num_blocks and workers[0].cached == 5
    step(list(workers.take_controls()[0]), [])
    assert worker.blocks_free == workers[0].free and worker.sequence_ids() == [0, 1]
    assert [worker.sequence_length(each) for each in (0, 1)] == [38, 50] and cache.ids.new() == -2
    sequence = TokenSequence(0, text[:30], 20, output_token_ids=text[30:39], num_prefill=39)
    segment = Segment(0, 0, 3, [0])
    assert [hit[::2] for hit in cache.hits(sequence).values()] == [(2, 38)]
    cache.adopted.take(segment, segment.copies[0], cache.hits(sequence)[0])
    workers[0].take(1)
    cache.close(sequence)
    assert segment.num_tokens == 38 and not workers.has_controls and worker.blocks_free == workers[0].free
    assert cache.hits(sequence) == {} and list(workers[0].prefixes) == [1] and workers[0].cached == 2
    workers[0].give_back(1, segment.copies[0].shared)
    workers[0].release(0)
    cache.reset()
    step(list(workers.take_controls()[0]), [])
    assert worker.blocks_free == worker.num_blocks == workers[0].free


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"session": "a"}, "session: R-workers at host:port outlive an S-worker, and r_workers is inproc"),
        ({"session": ""}, "session must be a name of at most 200 characters, not ''"),
        ({"keep_session": 9.0}, "keep_session: R-workers keep sequences of the session that --session names: give one"),
        (
            {"keep_session": 9.0, "session": "a", "r_workers": "localhost:1"},
            "the session that --journal names: give one",
        ),
        ({"keep_session": -1.0}, "keep_session must be 0 to 86400 seconds, not -1.0"),
        (
            {
                "keep_session": 9.0,
                "session": "a",
                "r_workers": "localhost:1",
                "journal": "j",
                "enable_prefix_caching": False,
            },
            "keep_session needs enable_prefix_caching",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings)


def test_steps_are_timed_beside_what_is_kept() -> None:
    """R-workers may hold any sequence of the previous engine."""
    engine = LLMEngine(EngineConfig(device="cpu", s_threads=1, r_threads=1, kv_cache_memory="8MiB", max_model_len=64))
    try:
        engine.add_request("0", "def f(x):", SamplingParams(max_tokens=9))
        engine.step()
        assert profile_steps(engine.world.s_worker, engine.world.r_workers, 32)(32, 0) > 0
        while engine.has_unfinished_requests():
            (output,) = engine.step()
        assert len(output.outputs[0].token_ids) == 9
    finally:
        engine.close()
    held = tuple(HeldSequence(each, 20, (each, 2 + each)) for each in range(2))
    assert RWorkerInfo("r", 10, 16, 1, "scalar", True, state_blocks=1, held=held).room_tokens == 3 * 16


def rows() -> list[dict[str, Any]]:
    """Return rows of some 100 prompt tokens: greedy, unseeded, and with several samples."""
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.0}, {"temperature": 1.0, "n": 3}]
    return [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions"}
        | {
            "body": {"prompt": f"def function_{number}(x, y):" + " x = y + z;" * 8, "max_tokens": 160}
            | kinds[number % 3]
        }
        for number in range(6)
    ]


class Job:
    """A batch that S-workers answer, one after another."""

    def __init__(self, folder: Path, addresses: str) -> None:
        self.out, self.journal, self._asked = folder / "out.jsonl", folder / "journal", folder / "in.jsonl"
        self._asked.write_text("".join(json.dumps(row) + "\n" for row in rows()))
        self._flags = ["--r-workers", addresses, "--max-model-len", "512", "--s-threads", "1"]

    def start(self, *flags: str) -> subprocess.Popen[str]:
        command = [r_workers.FASTDECODE, "run-batch", "-i", str(self._asked), "-o", str(self.out), *self._flags, *flags]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def start_session(self) -> subprocess.Popen[str]:
        """Start an S-worker that keeps its session, and return once it has taken some steps."""
        wanted = self.num_tokens + 60
        process = self.start("--session", "s", "--keep-session", "60", "--journal", str(self.journal))
        while self.num_tokens < wanted:
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.005)
        return process

    @property
    def num_tokens(self) -> int:
        """Output tokens in the journal."""
        file = self.journal / "journal"
        records = read(file.read_bytes())[0] if file.exists() else []
        steps = [record for record in records if isinstance(record, Stepped)]
        return sum(len(tokens) for step in steps for _, tokens in step.tokens)

    @property
    def num_cached(self) -> int:
        """Tokens that are cached, by the journal, of samples that have begun and not ended."""
        pasts = pasts_of(read((self.journal / "journal").read_bytes())[0]).values()
        going = [(past, each) for past in pasts for each in past.samples if each.token_ids and not each.ended]
        return sum(len(past.asked.prompt_token_ids) + len(each.token_ids) - 1 for past, each in going)

    def answers(self) -> dict[str, Any]:
        lines = [json.loads(text) for text in self.out.read_text().splitlines()]
        assert len(lines) == len(rows())
        return {line["custom_id"]: line["response"]["body"]["choices"] for line in lines}


@pytest.fixture(scope="module")
def addresses() -> Iterator[str]:
    """Yield the addresses of two R-workers."""
    with ExitStack() as stack:
        yield ",".join(stack.enter_context(r_workers.listening())[1] for _ in range(2))


@pytest.fixture(scope="module")
def undisturbed(addresses: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return all answers of a run without kills."""
    job = Job(tmp_path_factory.mktemp("undisturbed"), addresses)
    _, err = (process := job.start()).communicate()
    assert process.returncode == 0, err
    return job.answers()


@pytest.mark.slow
def test_a_killed_s_worker_goes_on_with_what_was_kept(addresses: str, undisturbed: Any, tmp_path: Path) -> None:
    """After ``kill -9`` again and again the answers are the same, from what R-workers have kept."""
    job, rng = Job(tmp_path, addresses), random.Random(3)
    for _ in range(2):
        process = job.start_session()
        time.sleep(rng.uniform(0, 0.1))
        process.kill()
        process.communicate()
    known = job.num_cached
    process = job.start_session()
    _, err = process.communicate()
    assert process.returncode == 0, err
    kept = [int(count) for count in re.findall(r"has kept ([0-9]+) tokens of the session, which continues", err)]
    assert sum(kept) >= known > 0, err
    assert job.answers() == undisturbed


@pytest.mark.thorough  # test_standby.py stops a server in this way.
@pytest.mark.slow
def test_of_two_s_workers_one_goes_on(addresses: str, tmp_path: Path) -> None:
    """One S-worker is stopped within a step, another takes the session, and the first ends by name when it wakes up."""
    job = Job(tmp_path, addresses)
    first = job.start_session()
    first.send_signal(signal.SIGSTOP)
    second = job.start_session()
    first.send_signal(signal.SIGCONT)
    _, err = first.communicate(timeout=PATIENCE_SECONDS)
    assert first.returncode == 1 and re.search("session (continues with|s was continued by)", err), err
    _, err = second.communicate()
    assert second.returncode == 0 and "takes it over" in err, err
    assert len(job.answers()) == len(rows())
