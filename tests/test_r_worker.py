"""``fastdecode r-worker`` as a process: what it says, what it refuses, whom it serves, and that nothing stops it."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from helpers import contract, r_workers
from helpers.processes import PATIENCE_SECONDS, script
from helpers.sessions import HELLO, alone, frame, log_of, make_key, opened, serves, works
from msgspec.structs import replace

from fastdecode.cli.main import main
from fastdecode.cluster.pool.tcp import TcpBackend
from fastdecode.cluster.wire.frames import VERSION, Kind
from fastdecode.cluster.wire.messages import FIRST_HEAD, Hello, encode_hello
from fastdecode.cluster.wire.payload import encode_plan
from fastdecode.core.errors import BackendError, ConfigError, WorkerLostError
from fastdecode.core.types import SPAN, StepPlan, WorkerPlan
from fastdecode.kinds import Absorption, Latent
from fastdecode.kinds.layout import KVLayout

pytestmark = pytest.mark.slow


def test_it_says_what_it_bound_and_ends_cleanly() -> None:
    with r_workers.listening() as (process, address):
        assert serves(address)
        process.send_signal(signal.SIGTERM)
        out, log = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0 and "ended" in out and "Traceback" not in log
    with r_workers.listening() as (process, _):
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 130


def test_the_line_names_address_cores_threads_isa_and_memory() -> None:
    command = [r_workers.FASTDECODE, "r-worker", "--listen", "tcp://localhost:0", *r_workers.SMALL, "--cores", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline() if process.stdout else ""
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE_SECONDS)
    pattern = r"fastdecode r-worker: tcp://127\.0\.0\.1:\d+ \(loopback, not encrypted\), cores 0, 1 thread\(s\), "
    assert re.fullmatch(pattern + r"\w+ \(read-ahead [a-z0-9-]+\), 0\.06 GiB of KV cache, reads \d+\.\d GB/s\n", line)


def test_it_never_imports_torch() -> None:
    """The process imports neither torch nor what only the S side needs, even after a session."""
    code = f"""
        import sys
        from fastdecode.cli.main import main
        status = main(["r-worker", "--listen", "tcp://127.0.0.1:0", *{r_workers.SMALL}])
        print(status, sorted({{"torch", "transformers", "greenlet", "fastdecode.sworker"}} & set(sys.modules)))
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline() if process.stdout else ""
        assert serves(line.split("tcp://")[1].split()[0])
        process.terminate()
        assert process.communicate(timeout=PATIENCE_SECONDS)[0].splitlines()[-1] == "0 []"
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--listen", "tcp://0.0.0.0:0"], 2, "listen: 0.0.0.0 is reached over a network, which takes a --key-file"),
        (["--listen", "tcp://*:0"], 2, "--key-file on both sides"),
        (["--listen", "127.0.0.1:5580"], 2, "listen: must be tcp://HOST:PORT"),
        (["--listen", "tcp://127.0.0.1"], 2, "an address is host:port"),
        (["--listen", "tcp://127.0.0.1:70000"], 2, "a port of 0 to 65535"),
        (["--listen", "tcp://127.0.0.1:0", "--key-file", "/no/such/file"], 2, "key_file: cannot read /no/such/file"),
        (["--threads", "0"], 2, "threads must be 1 to 1024"),
        (["--cores", "100000"], 2, "cores: this process may not use [100000]"),
        (["--cores", "x"], 2, "cores must be a list of cores"),
        (["--listen", "tcp://127.0.0.1:0", "--kv-cache-memory", "90TiB"], 1, "are more than the"),
        (["--kv-cache-memory", "none"], 2, "kv_cache_memory must be a positive number of bytes"),
        (["--join", "host"], 2, "join: an address is host:port"),
        (["--join", "h:1", "--transport", "mpi"], 2, "join: an MPI job has the ranks it was started with"),
        (["--join", "10.1.2.3:1", "--listen", "tcp://127.0.0.1:0"], 2, "join: 10.1.2.3 is reached over a network"),
        (["--transport", "mpi", "--cores", "100000"], 2, "cores: this process may not use [100000]"),
    ],
)
def test_what_cannot_work_is_one_line(
    arguments: list[str], status: int, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["r-worker", *arguments]) == status
    error = capfd.readouterr().err.strip()
    assert error.startswith("fastdecode: error: ") and message in error and "\n" not in error


def test_a_port_in_use_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    with r_workers.listening() as (_, address):
        assert main(["r-worker", "--listen", f"tcp://{address}"]) == 1
    assert f"cannot listen on tcp://{address}: Address already in use" in capfd.readouterr().err


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660, 0o700])
def test_a_key_file_that_others_can_read_is_refused(mode: int, tmp_path: Path) -> None:
    key = make_key(tmp_path / "key", "5" * 64, mode)
    with pytest.raises(ConfigError, match=r"only its owner can use: chmod 600"):
        TcpBackend(["127.0.0.1:1"], 16, str(key))


def test_a_short_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds 31 bytes; it takes 32 to 4096 random ones"):
        TcpBackend(["127.0.0.1:1"], 16, str(make_key(tmp_path / "key", "5" * 31 + "\n")))


def test_a_second_s_worker_is_told_who_is_served() -> None:
    with r_workers.listening() as (_, address):
        first = opened(address)
        for _ in range(2):
            with pytest.raises(
                BackendError, match=rf"{address} refused: this R-worker serves another S-worker, .+:\d+"
            ):
                opened(address)
        assert works(first)
        first.close()
        assert serves(address)


HOLD = """
    import time
    from helpers import contract, sessions
    backend = sessions.opened({address!r})
    sessions.works(backend)
    if {in_step}:
        backend.begin_step(sessions.alone(contract.plan([([(9, 0, 50, 1)], [])])))
    print("holding", flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("in_step", [False, True])
def test_when_its_s_worker_dies_it_serves_the_next(in_step: bool) -> None:
    """After kill -9 between steps or within one, the next S-worker has all blocks."""
    with r_workers.listening() as (_, address):
        holding = script(HOLD.format(address=address, in_step=in_step))
        process = subprocess.Popen(holding, stdout=subprocess.PIPE, text=True)
        assert process.stdout and process.stdout.readline() == "holding\n"
        with pytest.raises(BackendError, match=rf"this R-worker serves another S-worker, .+:{process.pid}"):
            opened(address)
        process.kill()
        process.communicate()
        assert serves(address)


def test_a_lost_worker_is_said_and_the_other_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """The loss shows in the step; later steps run on the other R-worker, which then serves the next S-worker."""
    with r_workers.listening() as (process, address), r_workers.listening() as (_, other):
        backend = TcpBackend([other, address], contract.BLOCK_SIZE)
        backend.open(contract.LAYOUT)
        mini_batch = ([(1, 0, 4, 1)], [(2, 0, 4, 1)])
        backend.begin_step(contract.plan([mini_batch]))
        process.kill()
        process.wait()
        for layer in range(len(contract.LAYERS)):
            backend.submit(0, layer, *contract.rows(mini_batch, 0, layer))
            assert not backend.collect(0)[4:].any()
        assert backend.end_step().lost == (1,)
        assert f"R-worker {address} is lost: the connection is closed" in caplog.text
        backend.begin_step(contract.plan([([(1, 4, 1, 1)], [])]))
        backend.abandon_step()
        with pytest.raises(
            BackendError, match=f"R-worker {address} refused to export a sequence: the R-worker is lost"
        ):
            backend.export(1, 2)
        backend.close()
        assert serves(other)


def test_losing_the_last_one_is_one_clear_error() -> None:
    with r_workers.listening() as (first, one), r_workers.listening() as (second, other):
        backend = TcpBackend([one, other], contract.BLOCK_SIZE)
        backend.open(contract.LAYOUT)
        for process in (first, second):
            process.kill()
            process.wait()
        with pytest.raises(WorkerLostError, match=r"R-worker .* is lost: .*, and no other R-worker is left"):
            backend.begin_step(contract.plan([([(1, 0, 4, 1)], [(2, 0, 4, 1)])]))
        backend.close()


def test_nobody_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastdecode.cluster.pool.remote.OPEN_SECONDS", 0.3)
    with pytest.raises(BackendError, match=r"R-worker 127\.0\.0\.1:9 is lost: no answer came within 0\.3 s"):
        opened("127.0.0.1:9")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "no R-worker listens there: what answers does not use FastDecode's protocol"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "no R-worker listens there: what answers"),
        (None, "no R-worker listens there: what answers"),
        (b"", "the address accepts connections and sends nothing: no R-worker listens there, or its process hangs"),
    ],
    ids=["banner", "http", "closes", "silent"],
)
def test_a_port_that_is_no_r_worker_is_named(
    answer: bytes | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a port is neither taken for an R-worker with another key nor waited for, though answers may take long."""
    monkeypatch.setattr("fastdecode.cluster.links.zeromq.HANDSHAKE_SECONDS", 0.2)
    monkeypatch.setattr("fastdecode.cluster.links.tcp.GREETING_SECONDS", 1.0 if answer == b"" else PATIENCE_SECONDS)
    with stranger(answer) as address, pytest.raises(BackendError, match=f"R-worker {address} is lost: {message}"):
        opened(address)


@contextlib.contextmanager
def stranger(answer: bytes | None) -> Iterator[str]:
    """Yield the address of a server that answers every connection with ``answer``, or closes it where None."""
    connections: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection = server.accept()[0]
                    if answer is None:
                        connection.close()
                    else:
                        connections.append(connection)
                        connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
    for connection in connections:
        connection.close()


# With a key.


def test_both_sides_hold_the_key(key_file: Path) -> None:
    with r_workers.listening("--key-file", str(key_file)) as (_, address):
        for _ in range(2):
            assert serves(address, key_file)


def test_it_listens_beyond_loopback_with_a_key(key_file: Path) -> None:
    with r_workers.listening("--key-file", str(key_file), listen="tcp://*:0") as (_, address):
        assert address.startswith("0.0.0.0:")
        assert serves(address.replace("0.0.0.0", "127.0.0.1"), key_file)


def test_a_wrong_key_is_refused_and_the_job_goes_on(key_file: Path, tmp_path: Path) -> None:
    """Another key and no key are refused, on either side."""
    wrong = make_key(tmp_path / "wrong", "6" * 64)
    with r_workers.listening("--key-file", str(key_file)) as (process, address):
        served = opened(address, key_file)
        for key in (wrong, None):
            with pytest.raises(BackendError, match="do not agree on a key"):
                opened(address, key)
        assert works(served)
        served.close()
        assert serves(address, key_file)
        log_of(process, until="does not hold this R-worker's key")
    with r_workers.listening() as (_, address):
        with pytest.raises(BackendError, match="do not agree on a key"):
            opened(address, key_file)
        assert serves(address)


# Frames that a proper S-worker never sends.


def odd_hello(name: str, value: int, block_size: int = 16) -> bytes:
    """Return a HELLO with ``value`` as ``name`` in every layer, and the right fingerprint of that."""
    layout = KVLayout(tuple(replace(layer, **{name: value}) for layer in contract.LAYERS), "float32", "float32")
    return encode_hello(Hello("stranger", layout, block_size))


BAD: dict[str, list[bytes]] = {
    "a block of one token": frame(Kind.HELLO, odd_hello("window", 0, block_size=1)),
    "a scale that no float holds": frame(Kind.HELLO, HELLO.replace(b'"scale":0.3', b'"scale":1' + b"0" * 400)),
    "a head of no dims": frame(Kind.HELLO, odd_hello("key_head_dim", 0)),
    "nested": frame(Kind.HELLO, b"[" * 100_000),
    "nothing": [b""],
    "text": [b"GET / HTTP/1.1\r\n\r\n"],
    "truncated header": [frame(Kind.HELLO, HELLO)[0][:20]],
    "truncated body": [frame(Kind.HELLO, HELLO)[0], HELLO[:100]],
    "body missing": [frame(Kind.HELLO, HELLO)[0]],
    "body too long": [frame(Kind.HELLO, HELLO)[0], HELLO + b" "],
    "announces too much": frame(Kind.HELLO, HELLO, length0=2**62),
    "announces what it lacks": frame(Kind.HELLO, HELLO, length0=1 << 27),
    "another magic": frame(Kind.HELLO, HELLO, magic=b"XXXX"),
    "another version": frame(Kind.HELLO, HELLO, version=VERSION + 1),
    "another kind": frame(77, HELLO),
    "another session": frame(Kind.HELLO, HELLO, epoch=3),
    "not JSON": frame(Kind.HELLO, b"\x80\x04pickle"),
    "payload before hello": frame(Kind.PAYLOAD, b"q", b"k", b"v"),
    "plan before hello": frame(Kind.PLAN, bytes(16)),
    "a lying fingerprint": frame(Kind.HELLO, HELLO.replace(b'"num_heads":4', b'"num_heads":8')),
}


def test_malformed_frames_are_refused_and_it_goes_on() -> None:
    """Strangers send them while the R-worker is free and while it serves; the session does not notice."""
    with r_workers.listening() as (process, address):
        for busy in (False, True):
            served = opened(address) if busy else None
            for parts in BAD.values():
                with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
                    socket.linger = 1000
                    socket.connect(f"tcp://{address}")
                    socket.send_multipart(parts)
                    assert served or socket.poll(PATIENCE_SECONDS * 1000), f"no answer to {parts}"
            assert served is None or works(served)
            if served:
                served.close()
        assert serves(address)
        process.terminate()
        log = process.communicate(timeout=PATIENCE_SECONDS)[1]
    assert "Traceback" not in log and "refused: a frame of a peer that is not served" in log


def test_bad_frames_of_the_served_one_change_nothing() -> None:
    """A replayed frame and payloads of a wrong shape or place are each refused, and then the step ends."""
    with r_workers.listening() as (_, address):
        backend = opened(address)
        conversation = backend.workers[0].link  # type: ignore[attr-defined]
        mini_batch = ([(1, 0, 4, 1)], [])
        backend.begin_step(alone(contract.plan([mini_batch])))
        q, k, v = contract.rows(mini_batch, 0, 0)

        def refusal(send: Any, epoch_offset: int = 0) -> str:
            conversation.epoch += epoch_offset
            send()
            conversation.epoch -= epoch_offset
            answer = conversation.receive(PATIENCE_SECONDS)
            assert answer is not None and answer.kind is Kind.REFUSED
            return bytes(conversation.body(answer)).decode()

        assert "with parts of" in refusal(lambda: conversation.send(Kind.PAYLOAD, q, k, v[:2]))
        assert "with parts of" in refusal(lambda: conversation.send(Kind.PAYLOAD, q))
        assert "the plan does not have" in refusal(lambda: conversation.send(Kind.PAYLOAD, q, k, v, mini_batch=1))
        assert "the plan does not have" in refusal(lambda: conversation.send(Kind.PAYLOAD, q, k, v, layer=99))
        assert "was not announced" in refusal(lambda: conversation.send(Kind.DATA, b"123"))
        assert "does not take" in refusal(lambda: conversation.send(Kind.HELLO, HELLO))
        assert "24 at most" in refusal(lambda: conversation.send(Kind.EXPORT, bytes(25)))
        assert "not 32" in refusal(lambda: conversation.send(Kind.IMPORT, bytes(9)))
        assert "PLAN" in refusal(lambda: conversation.send(Kind.PLAN, bytes(9)))
        large = [np.array([(9, 0, 1 << 20, 1)], SPAN)] * 4
        plan = encode_plan(WorkerPlan(contract.plan([]).workers[0].controls, tuple(large)))
        assert "2,147,483,648 at most" in refusal(lambda: conversation.send(Kind.PLAN, plan))
        conversation.next_sent -= 1
        assert "came before" in refusal(lambda: conversation.send(Kind.END))
        assert "another session" in refusal(lambda: conversation.send(Kind.END), epoch_offset=1)
        for layer in range(len(contract.LAYERS)):
            backend.submit(0, layer, *contract.rows(mini_batch, 0, layer))
            backend.collect(0)
        assert backend.end_step().workers[0].bytes_read > 0
        assert works_again(backend)
        backend.close()


def test_no_plan_comes_before_the_weights_of_latents_which_are_checked() -> None:
    rows = np.ones((4, 8 + 12, 16), np.float32)
    layer = Latent(4, 1, 24, 16, 0.3, absorption=Absorption(8, 12))
    with r_workers.listening() as (_, address):
        backend = TcpBackend([address], 16, None, None)
        backend.open(KVLayout((layer,), "float32", "float32", weights={0: lambda: rows[:2]}))
        conversation = backend.workers[0].link  # type: ignore[attr-defined]

        def answer(*parts: Any, layer: int = 0) -> str:
            conversation.send(Kind.WEIGHTS, *parts, layer=layer)
            frame = conversation.receive(PATIENCE_SECONDS)
            return bytes(conversation.body(frame)).decode() if frame.kind is Kind.REFUSED else frame.kind.name

        plan = alone(contract.plan([([(1, 0, 4, 1)], [])]))
        with pytest.raises(BackendError, match="K and V of layer 0 did not come yet"):
            backend.begin_step(plan)
        head = FIRST_HEAD.pack(2)
        assert "multiplies no weights" in answer(head, rows[2:], layer=1)
        assert "no whole heads" in answer(head[:7], rows[2:])
        assert "no whole heads" in answer(head, bytes(9))
        assert "no whole heads" in answer(head, np.ones((5, 20, 16), np.float32))
        assert "no whole heads" in answer(head, rows[2:], bytes(1))
        assert "heads 2 to 5" in answer(head, rows)
        assert answer(head, rows[2:]) == "READY"
        backend.begin_step(plan)
        assert "a step is open" in answer(head, rows[2:])
        backend.abandon_step()
        backend.close()


def works_again(backend: TcpBackend) -> bool:
    nothing = WorkerPlan(contract.plan([]).workers[0].controls, ())
    backend.begin_step(StepPlan((nothing,)))
    return backend.end_step().workers[0].blocks_free > 0
