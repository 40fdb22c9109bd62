"""``python -m chaos.killed_servers --rounds 30``: kills servers with -9 during streams, whose clients reconnect.

A round is a load of streamed completions and chats. Clients are threads of a separate process. When a connection
breaks, they resume with Last-Event-ID at the server that serves now. The server's process group is killed while it
starts, or after a random number of events. The next server is then started, or the standby takes over and another one
stands by. At the end, each client must have each token of an undisturbed server exactly once.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from helpers.servers import CHAT_TEMPLATE
from helpers.streams import Client

from chaos.killed import Found, Workers, forked
from fastdecode.cli.main import main as run_command

KINDS = {
    "a server": "started again",
    "a server with a standby": "the standby goes on",
    "a server and one of its R-workers": "both started again, the R-worker empty",
    "a server with a standby, and one of its R-workers": "the standby goes on, the R-worker is started again, empty",
}
"""The victims of kills by name, and how service continues."""

KILLS_PER_ROUND = 3
START_SECONDS, ROUND_SECONDS = 90.0, 180.0
BARE = ("--port", "0", "--device", "cpu", "--s-threads", "1", "--max-model-len", "512")
COUNTS = ("rounds", "kills", "requests", "lost", "tokens", "more or fewer", "different")


@dataclass(frozen=True)
class Load:
    """The load of a round: the flags of its servers, and by name the path and body of each request."""

    seed: int
    kind: str
    folder: Path
    flags: tuple[str, ...]
    asked: dict[str, tuple[str, dict[str, Any]]]


@dataclass
class Server:
    """A process that serves or stands by, with its address once it has printed that."""

    pid: int
    out: Path
    url: str = ""

    def is_up(self) -> bool:
        """Return whether the server has printed its address. Raise ChildProcessError if it has ended before."""
        if not self.url and " at http" in (line := self.out.read_text()):
            self.url = line.split(" at ")[1].split()[0].rstrip(",:")
        if not self.url and os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            raise ChildProcessError("a server ended while it started")
        return bool(self.url)

    def serves(self) -> bool:
        """Return whether the server answers requests now."""
        with suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
            return bool(response.status == 200)
        return False

    def kill(self) -> None:
        """Kill the server's process group."""
        os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def draw(seed: int, folder: Path, kinds: tuple[str, ...]) -> Load:
    """Return the load of the round of ``seed``."""
    rng = random.Random(seed)
    (folder / "template").write_text(CHAT_TEMPLATE)
    flags = ["--chat-template", str(folder / "template"), "--served-model-name", "demo"]
    flags += ["--dtype", rng.choice(("float32", "bfloat16")), "--kv-cache-dtype", rng.choice(("auto", "auto", "int8"))]
    flags += ["--block-size", rng.choice(("16", "32")), "--max-num-seqs", rng.choice(("8", "24"))]
    flags += rng.choice(([], ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}']))
    flags += random.Random(f"integers {seed}").choice(([], [], ["--quantization", "int8"]))
    if "--quantization" in flags:
        flags += random.Random(f"again {seed}").choice(([], ["--int8-calibration-tokens", "96"]))
    return Load(seed, kinds[seed % len(kinds)], folder, tuple(flags), {f"{n}": _ask(rng, n) for n in range(12)})


def _ask(rng: random.Random, number: int) -> tuple[str, dict[str, Any]]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1.0, "n": 4},
        {"temperature": 0.8, "presence_penalty": 0.5},
        {"structured_outputs": {"regex": "([a-z]{5,9} = [0-9]{3};){6}"}},
    ]
    text = f"def function_{number}(x, y):" + " x = y + z;" * rng.randrange(16)
    body = {"max_tokens": rng.randrange(60, 240), "seed": rng.randrange(1000), "ignore_eos": True}
    body |= kinds[number % len(kinds)]
    if number % 3 == 2:
        body |= {"messages": [{"role": "user", "content": text}], "logprobs": True}
        return "/v1/chat/completions", body
    return "/v1/completions", body | {"prompt": text, "logprobs": 1}


def run_round(load: Load, options: argparse.Namespace) -> Found:
    """Kill servers of the round up to ``KILLS_PER_ROUND`` times, then compare the answers."""
    found, rng = Found(), random.Random(load.seed + 1)
    with ExitStack() as cleanup:
        clients = _clients(load, "reference", cleanup)
        alone = ("--r-workers", "inproc:1", "--r-threads", "1", "--kv-cache-memory", "64MiB")
        first = _started(load, "alone", (*alone, "--journal", str(load.folder / "undisturbed")), cleanup)
        _wait(first.is_up)
        (load.folder / "reference.url").write_text(first.url)
        _ended(clients, found, "the clients of the undisturbed server")
        first.kill()
    with ExitStack() as cleanup:
        workers = Workers(load.kind, options.r_workers, f"round {load.seed}", cleanup)
        journal = options.journal if options.journal == "r-workers" else str(load.folder / "journal")
        flags = ("--r-workers", workers.addresses, "--keep-session", "60", "--journal", journal)
        clients = _clients(load, "clients", cleanup)
        Killer(load, workers, flags, cleanup, rng, found).befall(clients)
        _ended(clients, found, "the clients")
    _compare(_answers(load, "reference"), _answers(load, "clients"), found)
    return found


class Killer:
    """Starts and kills servers, and tells clients which one serves."""

    def __init__(
        self,
        load: Load,
        workers: Workers,
        flags: tuple[str, ...],
        cleanup: ExitStack,
        rng: random.Random,
        found: Found,
    ) -> None:
        self._load, self._workers, self._flags, self._cleanup, self._rng = load, workers, flags, cleanup, rng
        self._found, self._stands_by, self._count = found, "standby" in load.kind, 0

    def befall(self, clients: int) -> None:
        """Kill servers until no kill is left and a server serves."""
        server = self._start("--session")
        _wait(server.is_up)  # otherwise the standby might get the session first
        standby = self._start("--standby") if self._stands_by else None
        had = 0
        while self._found.counts["kills"] < KILLS_PER_ROUND:
            if not self._rests(server, clients):
                return
            was_used = _events(self._load) > had
            had = _events(self._load)
            server.kill()
            self._found.counts["kills"] += 1
            self._workers.befall(self._rng, spared=not was_used)
            server = standby or self._start("--session")
            standby = self._start("--standby") if self._stands_by else None
        self._tell(server)

    def _rests(self, server: Server, clients: int) -> bool:
        """Wait until ``server`` should be killed; return False if everything was answered before."""
        if self._rng.random() < 0.15 and not self._stands_by:
            time.sleep(self._rng.uniform(0, 2.0))  # kill it during its start
            return True
        self._tell(server)
        until = _events(self._load) + self._rng.randrange(1, 500)
        while _events(self._load) < until:
            if os.waitid(os.P_PID, clients, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return False
            time.sleep(0.002)
        time.sleep(self._rng.uniform(0, 0.02))
        return True

    def _tell(self, server: Server) -> None:
        _wait(server.is_up)
        _wait(server.serves)
        path = self._load.folder / "clients.url"
        path.with_suffix(".new").write_text(server.url)
        path.with_suffix(".new").rename(path)

    def _start(self, role: str) -> Server:
        self._count += 1
        flags = (*self._flags, role, f"round {self._load.seed}")
        return _started(self._load, f"server-{self._count}", flags, self._cleanup)


def _started(load: Load, name: str, flags: tuple[str, ...], cleanup: ExitStack) -> Server:
    """Start ``fastdecode serve`` as a fork of this process, which has imported everything already."""
    out = load.folder / f"{name}.out"
    out.touch()

    def serve() -> None:
        with out.open("w") as file:
            os.dup2(file.fileno(), 1)
        if status := run_command(["serve", *BARE, *load.flags, *flags]):
            raise SystemExit(status)

    server = Server(forked(load.folder / "log", serve), out)
    cleanup.callback(_end, server.pid)
    return server


def _end(pid: int) -> None:
    with suppress(ProcessLookupError, ChildProcessError):
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _clients(load: Load, name: str, cleanup: ExitStack) -> int:
    """Start a process with all clients, which write what they receive to files called ``name``; return its id."""
    pid = forked(load.folder / "log", lambda: _read_all(load, name))
    cleanup.callback(_end, pid)
    return pid


def _read_all(load: Load, name: str) -> None:
    clients = {each: Noting(path, body, f"{name}-{each}", load.folder) for each, (path, body) in load.asked.items()}
    threads = [
        threading.Thread(target=each.read_whole, args=(load.folder / f"{name}.url",)) for each in clients.values()
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    told = {
        each: {"events": client.events, "ended": client.ended, "fault": client.fault}
        for each, client in clients.items()
    }
    (load.folder / name).write_text(json.dumps(told))


class Noting(Client):
    """A client that follows the servers. It appends a byte to ``folder``/events for each event."""

    def __init__(self, path: str, body: dict[str, Any], name: str, folder: Path) -> None:
        super().__init__(path, body, name)
        self._events = os.open(folder / "events", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.fault = ""

    def read_whole(self, url: Path) -> None:
        """Read the stream to its end. The file ``url`` has the address of the present server."""
        deadline = time.monotonic() + ROUND_SECONDS
        try:
            while not self.ended and time.monotonic() < deadline:
                if url.exists():
                    self.read(url.read_text())
                time.sleep(0.05)
        except Exception as error:
            self.fault = repr(error)

    def _take(self, line: str) -> None:
        super()._take(line)
        if line.startswith("data: "):
            os.write(self._events, b".")


def _events(load: Load) -> int:
    path = load.folder / "events"
    return path.stat().st_size if path.exists() else 0


def _wait(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{holds} did not come")
        time.sleep(0.01)


def _ended(pid: int, found: Found, name: str) -> None:
    if status := os.waitpid(pid, 0)[1]:
        found.faults.append(f"{name} ended with {status}")


@dataclass
class Said:
    """One choice of an answer: its text, its tokens and its end."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)


def _answers(load: Load, name: str) -> dict[str, tuple[dict[int, Said], bool, str]]:
    """Return, by request: its choices, whether it has ended, and its error."""
    told = json.loads((load.folder / name).read_text()) if (load.folder / name).exists() else {}
    return {each: (_said(one["events"]), one["ended"], one["fault"]) for each, one in told.items()}


def _said(events: list[Any]) -> dict[int, Said]:
    found: dict[int, Said] = {}
    for choice in (choice for each in events for choice in each["choices"]):
        one = found.setdefault(choice["index"], Said())
        one.text += choice.get("text", choice.get("delta", {}).get("content") or "")
        logprobs = choice.get("logprobs") or {}
        one.tokens += logprobs.get("tokens") or [each["token"] for each in logprobs.get("content") or ()]
        one.ends += [choice["finish_reason"]] if choice["finish_reason"] else []
    return found


def _compare(wanted: dict[str, Any], got: dict[str, Any], found: Found) -> None:
    for name, (choices, ended, fault) in wanted.items():
        if not ended or fault:
            raise RuntimeError(f"the undisturbed server did not answer {name}: {fault}")
        found.counts["requests"] += 1
        has, has_ended, its_fault = got.get(name, ({}, False, "nothing came"))
        if not has_ended or its_fault:
            found.counts["lost"] += 1
            found.faults.append(f"request {name} is lost: {its_fault or 'it did not end'}")
            continue
        for index, expected in choices.items():
            one = has.get(index, Said())
            found.counts["tokens"] += len(expected.tokens)
            found.counts["more or fewer"] += abs(len(expected.tokens) - len(one.tokens))
            found.counts["different"] += sum(a != b for a, b in zip(expected.tokens, one.tokens, strict=False))
            if one != expected:
                found.faults.append(f"request {name}, choice {index}: {one} and not {expected}")


def main() -> int:
    torch.set_num_threads(1)  # a fork would lack torch's other threads
    parser = argparse.ArgumentParser(prog="chaos.killed_servers", description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0, help="of the first round; the next ones follow")
    parser.add_argument("--journal", choices=("folder", "r-workers"), default="r-workers", help="where it lies")
    parser.add_argument("--r-workers", type=int, default=2)
    parser.add_argument("--kinds", nargs="+", type=int, default=range(len(KINDS)), help="of what is killed, by number")
    options = parser.parse_args()
    kinds = tuple(list(KINDS)[number] for number in options.kinds)
    totals: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    unclean = 0
    for seed in range(options.seed, options.seed + options.rounds):
        with tempfile.TemporaryDirectory(prefix="killed-", ignore_cleanup_errors=True) as name:
            load, start = draw(seed, Path(name), kinds), time.monotonic()
            try:
                found = run_round(load, options)
            except Exception as error:
                found = Found(faults=[repr(error)])
            unclean += bool(found.faults)
            log = (load.folder / "log").read_text()[-4000:] if found.faults else ""
        totals[load.kind].update({"rounds": 1, **found.counts})
        print(f"seed {seed}, {load.kind}: {'UNCLEAN' if found.faults else 'clean'}, "
              f"{time.monotonic() - start:.1f} s, {dict(found.counts)}, "
              f"{' '.join(load.flags[4:])}", flush=True)  # fmt: skip
        print("\n".join(["  " + fault[:2000] for fault in found.faults] + [log] * bool(log)), flush=True)
    print(f"| killed | {' | '.join(COUNTS)} |\n|---|{'---|' * len(COUNTS)}")
    for kind, counts in totals.items():
        print(f"| {kind}: {KINDS[kind]} | {' | '.join(f'{counts[name]:,}' for name in COUNTS)} |")
    return 1 if unclean else 0


if __name__ == "__main__":
    sys.exit(main())
