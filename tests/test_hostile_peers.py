"""An R-worker under attack decodes for a real S-worker: hostile frames are refused, and no token changes."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from helpers import model_zoo, r_workers
from helpers.examples import thinned
from helpers.forks import true_starts
from helpers.processes import PATIENCE_SECONDS, script, segments_of
from helpers.sessions import HELLO, frame, log_of, make_key, opened, works

from fastdecode import LLM, SamplingParams
from fastdecode.cluster.wire.frames import FRAME_LIMIT, Conversation, Kind
from fastdecode.cluster.wire.handshake import derive_key, read_secret
from fastdecode.core.errors import BackendError

pytestmark = pytest.mark.slow

NAME = "llama-gqa"
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, detokenize=False)


class Stranger:
    """A second connection, with the R-worker's key or without."""

    def __init__(self, address: str, key: Path | None, **options: int) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        for name, value in options.items():
            setattr(self.socket, name, value)
        if key:
            encode = zmq.utils.z85.encode
            private, theirs = (encode(derive_key(read_secret(str(key)), role)) for role in ("s-worker", "r-worker"))
            self.socket.curve_publickey, self.socket.curve_secretkey = zmq.curve_public(private), private
            self.socket.curve_serverkey = zmq.curve_public(theirs)
        self.socket.connect(f"tcp://{address}")

    def close(self) -> None:
        self._context.destroy(linger=500)


class Attack:
    """Sends bad frames between two layers of a step.

    On the served connection each is answered, and on others each is dropped.
    """

    def __init__(self, llm: LLM, stranger: Stranger) -> None:
        self.backend: Any = llm.engine.backend
        self.conversation: Conversation = self.backend.workers[0].link
        self.stranger, self.submits, self.reasons = stranger, 0, list[str]()
        self._submit, self.backend.submit = self.backend.submit, self.submit

    def submit(self, mini_batch: int, layer: int, q: Any, k: Any, v: Any) -> None:
        """Attack in the tenth and the hundredth layer, in each way twice."""
        self.submits += 1
        if self.submits in (10, 100):
            for _ in range(2):
                self.reasons += [self.refusal(make) for make in self.bad(layer, q, k, v)]
                for parts in self.foreign(layer):
                    self.stranger.socket.send_multipart(parts)
        self._submit(mini_batch, layer, q, k, v)

    def bad(self, layer: int, q: Any, k: Any, v: Any) -> list[Callable[[], None]]:
        """Return senders of frames of a wrong shape, length, place, number or session."""
        conversation, send = self.conversation, self.conversation.send
        header = frame(Kind.END, epoch=conversation.epoch, sequence=conversation.next_sent)[0]
        old = {"epoch": conversation.epoch, "sequence": 0}
        return [
            lambda: send(Kind.PAYLOAD, q, k, v[..., :-1].copy(), layer=layer),
            lambda: send(Kind.PAYLOAD, q, k, layer=layer),
            lambda: send(Kind.PAYLOAD, k, q, v, mini_batch=7, layer=layer),
            lambda: conversation.channel.send([header[:20]]),
            lambda: conversation.channel.send([header[:32] + b"\xff" * 24]),
            lambda: conversation.channel.send(frame(Kind.END, epoch=conversation.epoch, sequence=1 << 40)),
            lambda: conversation.channel.send(frame(Kind.END, **old)),
            lambda: conversation.channel.send(frame(Kind.ABANDON, epoch=conversation.epoch ^ 1, sequence=1 << 20)),
            lambda: send(Kind.PLAN, bytes(9)),
            lambda: send(Kind.IMPORT, bytes(23)),
        ]

    def foreign(self, layer: int) -> list[list[bytes]]:
        """Return correct frames of the served connection, to be sent on another one."""
        numbers = {"epoch": self.conversation.epoch, "sequence": self.conversation.next_sent, "layer": layer}
        return [
            frame(Kind.ABANDON, **numbers),
            frame(Kind.PAYLOAD, b"q", b"k", b"v", **numbers),
            frame(Kind.HELLO, HELLO, length0=FRAME_LIMIT + 1),
            [b"\0" * 56],
            frame(Kind.BYE, **numbers),
        ]

    def refusal(self, send: Callable[[], None]) -> str:
        send()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (answer := self.conversation.receive(1.0)) is None:
            assert time.monotonic() < deadline
        assert answer.kind is Kind.REFUSED
        return bytes(self.conversation.body(answer)).decode()


WANTED = [
    "with parts of", "with parts of", "the plan does not have", "bytes, not 56", "announces", "from far ahead",
    "came before", "another session", "PLAN: 9 bytes", "IMPORT frame of 23 bytes",
]  # fmt: skip


@pytest.mark.parametrize("security", thinned(["encrypt", "authenticate"], 2))
def test_a_job_goes_on_with_the_right_tokens(
    security: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Frames are truncated, oversized, replayed or of a wrong shape, and one peer has another key."""
    key, wrong = make_key(tmp_path / "key", "5" * 64), make_key(tmp_path / "wrong", "6" * 64)
    prompts, wanted = model_zoo.prompts(NAME), [list(tokens) for tokens in model_zoo.reference(NAME).tokens]
    settings: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 300, "s_threads": 1}
    folder = model_zoo.save_model(NAME, tmp_path_factory.mktemp("llama"))
    with r_workers.listening("--key-file", str(key), "--security", security) as (process, address):
        settings |= {"r_workers": address, "key_file": str(key), "security": security, "num_mini_batches": 1}
        with LLM(str(folder), **settings) as llm:
            stranger = Stranger(address, key if security == "encrypt" else None)
            attack = Attack(llm, stranger)
            for _ in range(2):
                with pytest.raises(BackendError, match="key"):
                    opened(address, wrong, security)
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
            assert [list(output.outputs[0].token_ids) for output in outputs] == wanted
            stranger.close()
        assert [each for each in zip(WANTED * 4, attack.reasons, strict=True) if each[0] not in each[1]] == []
        log = log_of(process)
    refusals = [line for line in log.splitlines() if "refused" in line]
    assert "Traceback" not in log and len(refusals) == len(set(refusals))
    assert sum("hold this R-worker's key" in line for line in refusals) == 1
    assert sum("a peer that is not served" in line for line in refusals) == (security == "encrypt")


def test_who_does_not_read_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger asks for service thousands of times, and never reads the answers."""
    monkeypatch.setattr("fastdecode.cluster.pool.remote.process_name", lambda: "x" * 4000)
    with r_workers.listening() as (_, address):
        served = opened(address)
        stranger = Stranger(address, None, rcvhwm=1, rcvbuf=4096)
        for _ in range(6000):
            stranger.socket.send_multipart(frame(Kind.HELLO, HELLO))
        time.sleep(1)  # Wait until the answers no longer fit into the queues.
        assert works(served)
        stranger.close()
        served.close()


S_WORKER = """
    import time
    from helpers import contract
    from fastdecode.cluster.pool.tcp import TcpBackend
    backend = TcpBackend({addresses!r}, contract.BLOCK_SIZE) if {addresses!r} else contract.spawn()
    backend.open(contract.LAYOUT)
    contract.run(backend, contract.FIRST)
    backend.begin_step(contract.plan([([(9, 0, 50, 1)], [])]))
    print("holding", flush=True)
    time.sleep(1000)
"""


def marked(mark: str) -> list[int]:
    """Return the live processes that were started with ``mark`` in their environment, at any depth."""
    name, value = mark.split("=")
    return [each.pid for each in psutil.process_iter(["environ"]) if (each.info["environ"] or {}).get(name) == value]


@pytest.mark.parametrize("kind", [pytest.param("spawn", marks=pytest.mark.thorough), "tcp"])
def test_kill_9_of_everything_leaves_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The S-worker and both R-workers are killed in a step; no process, shared memory or file remains.

    Forks would not show the mark.
    """
    mark = f"FASTDECODE_TEST_MARK={uuid.uuid4()}"
    monkeypatch.setenv(*mark.split("="))
    with true_starts(), r_workers.listening() as (first, one), r_workers.listening() as (second, other):
        addresses = [one, other] if kind == "tcp" else []
        process = subprocess.Popen(script(S_WORKER.format(addresses=addresses)), stdout=subprocess.PIPE, text=True)
        assert process.stdout and process.stdout.readline() == "holding\n"
        assert len(marked(mark)) == (5 if kind == "spawn" else 3)
        segments = segments_of(marked(mark))
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)
        for each in (process, first, second):
            each.communicate()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while marked(mark) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert marked(mark) == []
    assert not any(segment.exists() for segment in segments)
