"""``--security authenticate``: handshakes that let a peer in, and messages where the two sides disagree."""

from __future__ import annotations

import argparse
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from helpers import contract, r_workers
from helpers.processes import PATIENCE_SECONDS
from helpers.sessions import HELLO, alone, frame, log_of, make_key, opened, works

from fastdecode.api.config import EngineConfig
from fastdecode.api.settings import check_security
from fastdecode.cli.flags import add_common_flags, add_engine_flags, engine_config
from fastdecode.cli.main import main
from fastdecode.cluster.pool.tcp import TcpBackend, listen_for_joins
from fastdecode.cluster.wire import handshake as proof
from fastdecode.cluster.wire.frames import HEADER, Kind
from fastdecode.cluster.wire.handshake import read_security
from fastdecode.core.errors import BackendError, ConfigError

pytestmark = pytest.mark.slow


@pytest.fixture
def guarded(key_file: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield an R-worker that lets in peers that prove the key, and sends unencrypted data."""
    with r_workers.listening("--key-file", str(key_file), "--security", "authenticate") as started:
        yield started


def test_it_serves_one_after_another(guarded: tuple[Any, str], key_file: Path) -> None:
    """The results are those of any other backend; a second S-worker learns who is served."""
    _, address = guarded
    for _ in range(2):
        backend = opened(address, key_file, "authenticate")
        with pytest.raises(BackendError, match=rf"{address} refused: this R-worker serves another S-worker, .+:\d+"):
            opened(address, key_file, "authenticate")
        mine = contract.FIRST[0][0], []
        local = contract.inproc()
        local.open(contract.LAYOUT)
        for each in (backend, local):
            each.begin_step(alone(contract.plan([mine])) if each is backend else contract.plan([mine]))
        for layer in range(len(contract.LAYERS)):
            outputs = []
            for each in (backend, local):
                each.submit(0, layer, *contract.rows(mine, 0, layer))
                outputs.append(each.collect(0).tobytes())
            assert outputs[0] == outputs[1]
        for each in (backend, local):
            each.end_step()
            each.close()


def test_one_that_joins_proves_its_key_as_well(key_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A joining R-worker proves the key too, and one that would encrypt where the pool does not is refused."""
    lobby = listen_for_joins("127.0.0.1:0", contract.BLOCK_SIZE, str(key_file), "authenticate")
    backend = TcpBackend([], contract.BLOCK_SIZE)
    backend.accept_joins(lobby)
    backend.open(contract.LAYOUT)
    level = ["--key-file", str(key_file), "--security"]
    with r_workers.joining(lobby.address, *level, "encrypt") as (other, _):
        with r_workers.joining(lobby.address, *level, "authenticate") as (_, address):
            deadline, joined = time.monotonic() + PATIENCE_SECONDS, []
            while not (joined and "asked to join and cannot" in caplog.text) and time.monotonic() < deadline:
                joined += backend.admit().values()
                time.sleep(0.02)
            assert [info.name for info in joined] == [address] and "do not agree on a key" in caplog.text
            assert works(backend)
            backend.close()
        log_of(other, until="another --security")


def test_both_sides_say_what_is_in_force(key_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = [r_workers.FASTDECODE, "r-worker", "--listen", "tcp://127.0.0.1:0", *r_workers.SMALL]
    command += ["--key-file", str(key_file), "--security", "authenticate"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline() if process.stdout else ""
        process.terminate()
    assert "(authenticated, NOT encrypted), cores" in line
    address = "127.0.0.1:5580"
    parser = argparse.ArgumentParser()
    add_common_flags(parser)
    add_engine_flags(parser)
    arguments = ["--r-workers", address, "--key-file", str(key_file)]
    for more, guard in (
        (["--security", "authenticate"], "authenticated, NOT encrypted"),
        (["--security", "encrypt"], "CURVE, authenticated and encrypted"),
        ([], "CURVE, authenticated and encrypted"),
    ):
        engine_config(parser.parse_args([*arguments, *more]))
        assert capfd.readouterr().err == f"fastdecode: R-workers at {address} ({guard})\n"
    engine_config(parser.parse_args(["--r-workers", address]))
    assert capfd.readouterr().err == f"fastdecode: R-workers at {address} (loopback, not encrypted)\n"


LEVELS: dict[str, list[str]] = {"none": [], "encrypt": ["--key-file", "KEY"]}
LEVELS["authenticate"] = [*LEVELS["encrypt"], "--security", "authenticate"]


MISMATCHES = {
    "authenticate": [
        (
            "none",
            "serves only peers that prove to hold its key: --key-file with --security authenticate",
            "does not prove to hold",
        ),
        ("encrypt", "do not agree on a key: the same --key-file and --security", "another --security"),
    ],
    "encrypt": [("authenticate", "do not agree on a key: the same --key-file and --security", "another --security")],
    "none": [
        (
            "authenticate",
            "this R-worker has no key: --key-file with --security authenticate must be on both",
            "has none",
        )
    ],
}


@pytest.mark.parametrize("theirs", MISMATCHES)
def test_levels_that_differ_are_one_message_on_both_sides(theirs: str, key_file: Path) -> None:
    arguments = [str(key_file) if each == "KEY" else each for each in LEVELS[theirs]]
    with r_workers.listening(*arguments) as (process, address):
        for mine, message, _ in MISMATCHES[theirs]:
            key = None if mine == "none" else key_file
            with pytest.raises(BackendError, match=message):
                opened(address, key, None if mine == "none" else mine)
        log = log_of(process, until=MISMATCHES[theirs][-1][2])
    lines = log.splitlines()
    assert len(lines) == len(set(lines)) and all(said in log for _, _, said in MISMATCHES[theirs]), log


def test_a_level_needs_a_key_file(capfd: pytest.CaptureFixture[str]) -> None:
    for level in ("authenticate", "encrypt"):
        with pytest.raises(ConfigError, match=f"security: {level} rests on a secret that both sides hold"):
            EngineConfig(r_workers="127.0.0.1:5580", security=level)
        assert main(["r-worker", "--security", level]) == 2
        assert "give --key-file as well" in capfd.readouterr().err
    with pytest.raises(ConfigError, match="security must be one of encrypt, authenticate, not 'plain'"):
        check_security("plain", "key")
    assert main(["r-worker", "--listen", "tcp://*:0", "--security", "authenticate"]) == 2


class Raw:
    """A peer that sends any frames."""

    def __init__(self, address: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.connect(f"tcp://{address}")

    def ask(self, parts: list[bytes]) -> tuple[Kind, bytes]:
        """Send ``parts``, and return kind and body of the answer."""
        self.socket.send_multipart(parts)
        assert self.socket.poll(PATIENCE_SECONDS * 1000)
        header, *bodies = self.socket.recv_multipart()
        return Kind(HEADER.unpack(header)[2]), b"".join(bodies)

    def close(self) -> None:
        self.context.destroy(linger=0)


def test_only_a_fresh_proof_opens_a_session(guarded: tuple[Any, str], key_file: Path) -> None:
    """No proof and proofs that are wrong, sent back, old, or of another connection are each refused."""
    process, address = guarded
    key = read_security(str(key_file), "authenticate").proof_key
    assert key is not None
    nonce = b"n" * 32
    challenge = frame(Kind.CHALLENGE, nonce)
    served = opened(address, key_file, "authenticate")
    for busy in (True, False):
        peers = [Raw(address), Raw(address)]
        assert peers[0].ask(frame(Kind.HELLO, HELLO))[0] is Kind.REFUSED
        assert peers[0].ask(frame(Kind.PROOF, bytes(32)))[0] is Kind.REFUSED
        assert peers[0].ask(frame(Kind.CHALLENGE, nonce[:31]))[0] is Kind.REFUSED
        kind, body = peers[0].ask(challenge)
        assert kind is Kind.CHALLENGED and body[32:] == proof.proof(key, "r-worker", nonce + body[:32])
        assert peers[0].ask(frame(Kind.PROOF, body[32:]))[0] is Kind.REFUSED  # The R-worker's own proof is sent back.
        good = frame(Kind.PROOF, proof.proof(key, "s-worker", nonce + body[:32]))
        assert peers[0].ask(good)[0] is Kind.REFUSED  # The challenge had been used.
        kind, body = peers[0].ask(challenge)
        good = frame(Kind.PROOF, proof.proof(key, "s-worker", nonce + body[:32]))
        assert peers[1].ask(good)[0] is Kind.REFUSED  # The proof was overheard on another connection.
        kind, answer = peers[0].ask(good)
        assert kind is Kind.PROVEN
        deadline = time.monotonic() + PATIENCE_SECONDS
        while kind is not Kind.WELCOME:  # Ask until the R-worker has seen that the other peer is gone.
            assert time.monotonic() < deadline
            kind, answer = peers[0].ask(frame(Kind.HELLO, HELLO))
            assert kind is Kind.WELCOME or b"this R-worker serves another S-worker" in answer
            if busy:
                break
        assert (kind is Kind.REFUSED) == busy
        if busy:
            assert works(served)
            served.close()
        for peer in peers:
            peer.close()
    refused = "refused: a peer that does not prove"
    assert log_of(process, until=refused).count(refused) == 1


def test_a_wrong_key_is_said_on_both_sides(guarded: tuple[Any, str], key_file: Path, tmp_path: Path) -> None:
    """The log has one line, however often the key is wrong, and the job goes on."""
    process, address = guarded
    served = opened(address, key_file, "authenticate")
    wrong = make_key(tmp_path / "wrong", "6" * 64)
    for _ in range(3):
        with pytest.raises(BackendError, match=f"R-worker {address}: the other side does not hold this side's key"):
            opened(address, wrong, "authenticate")
    assert works(served)
    served.close()
    refused = "does not prove to hold this R-worker's key"
    assert log_of(process, until=refused).count(refused) == 1


def test_what_is_kept_of_unproven_peers_is_bounded() -> None:
    """A peer that was dropped for the bound is refused, not admitted."""
    gate = proof.Gate(bytes(32))
    nonce = bytes(32)

    class Told:
        def __init__(self, parts: list[bytes]) -> None:
            self.parts, self.told = parts, list[bytes]()

        def receive(self, timeout_seconds: float) -> bytes:
            return self.parts[0]

        def read_into(self, buffer: Any) -> None:
            buffer[:] = self.parts[1]

        def send(self, parts: list[Any]) -> None:
            self.told = [bytes(part) for part in parts]

        def close(self) -> None: ...

    def admits(kind: Kind, body: bytes, identity: bytes) -> tuple[bool, bytes]:
        channel = Told(frame(kind, body))
        return gate.admits(channel, identity), channel.told[1] if channel.told else b""

    def proof_of(answer: bytes) -> bytes:
        return proof.proof(bytes(32), "s-worker", nonce + answer[:32])

    first = admits(Kind.CHALLENGE, nonce, b"first")[1]
    for number in range(1000):
        last = admits(Kind.CHALLENGE, nonce, b"%d" % number)[1]
        assert len(gate._pending) <= proof.MOST_PENDING
    assert not admits(Kind.PROOF, proof_of(first), b"first")[0]
    assert admits(Kind.PROOF, proof_of(last), b"999") == (True, b"")
    assert not admits(Kind.PROOF, proof_of(last), b"999")[0]
