"""A peer is killed while its messages are unread; libzmq 4.3.5 then aborted the process that listens."""

import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from queue import Empty, SimpleQueue

import numpy as np
import pytest
from helpers.processes import PATIENCE_SECONDS

from fastdecode.cluster.links.port import Port, Reader
from fastdecode.cluster.prefill.messages import Place
from fastdecode.cluster.prefill.senders import ChainSender
from fastdecode.cluster.wire.frames import Frame, Kind
from fastdecode.cluster.wire.handshake import Security
from fastdecode.cluster.wire.messages import KV_ROWS, KV_STORED, MOST_IN_FLIGHT

MESSAGES = 450  # These are more messages than one queue holds, and fewer than two.

LISTEN = """
import sys
from fastdecode.cluster.links.zeromq import ZmqListener
end = ZmqListener("127.0.0.1", 0, None)
print(end.address.removeprefix("tcp://"), flush=True)
"""
CONNECT = """
import sys
from fastdecode.cluster.links.zeromq import ZmqChannel
end = ZmqChannel(sys.argv[1], None)
"""
SEND = """
import time
peer = end if {connects} else None
while peer is None:  # also returns for a connection's event
    peer = end.accept(60.0)
for _ in range({messages}):
    peer.send([bytes(56), bytes(10_000)])
print("sent", flush=True)
time.sleep(600)
"""
READ = """
import time
while not end.poll(60.0):
    pass  # it returns for a connection's event too
print("there", flush=True)
sys.stdin.readline()
time.sleep(0.5)  # several heartbeats
while end.poll(0.5):
    (end.next_peer if {listens} else end.socket.recv)()
    end.skip()
end.close()
"""


@contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


@pytest.mark.parametrize("reader_listens", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_peer_is_killed_while_its_messages_wait(reader_listens: bool) -> None:
    """The process that goes on reading lives, whichever side had connected."""
    send = SEND.format(connects=reader_listens, messages=MESSAGES)
    read = READ.format(listens=reader_listens)
    with ExitStack() as opened:
        listener = opened.enter_context(started(LISTEN + (read if reader_listens else send)))
        connects = CONNECT + (send if reader_listens else 'end.send([b"here"])' + read)
        connector = opened.enter_context(started(connects, line(listener)))
        reader, sender = (listener, connector) if reader_listens else (connector, listener)
        assert (line(reader), line(sender)) == ("there", "sent")
        time.sleep(0.3)  # Give libzmq's threads time to go on.
        sender.kill()
        sender.wait()
        reader.communicate("\n", timeout=PATIENCE_SECONDS)
        assert reader.returncode == 0


def test_a_chain_sends_no_more_than_its_window() -> None:
    """A worker that is slow to answer gets no more than the window, so its queue never fills."""
    taken: SimpleQueue[tuple[bytes, int]] = SimpleQueue()

    def take(port: Port, identity: bytes, frame: Frame, reader: Reader) -> None:
        taken.put((identity, reader.record(KV_ROWS)[1]))

    port = Port("127.0.0.1", 0, Security(), take)
    failures: list[str] = []
    sender = ChainSender(Place(port.address, port.epoch), Security(), lambda *failure: failures.append(failure[2]))
    try:
        for start in range(3 * MOST_IN_FLIGHT):
            sender.send(7, 0, start, (np.zeros((1, 2, 8), np.float32),) * 2)
        waiting = deque(taken.get(timeout=PATIENCE_SECONDS) for _ in range(MOST_IN_FLIGHT))
        for expected in range(MOST_IN_FLIGHT, 3 * MOST_IN_FLIGHT):
            with pytest.raises(Empty):
                taken.get(timeout=0.02)
            identity, start = waiting.popleft()
            port.send(identity, Kind.STORED, KV_STORED.pack(7, 0, start, 1))
            waiting.append(taken.get(timeout=PATIENCE_SECONDS))
            assert waiting[-1][1] == expected
        assert not failures
    finally:
        sender.close()
        port.close()
