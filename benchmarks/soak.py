"""Check that a server stays correct and its memory flat for a long time: python benchmarks/soak.py --minutes 20

``fastdecode serve`` runs with one spawned R-worker and two that joined. Its capacity is measured first, with a fixed
number of requests at a time; the load is the fraction ``--part`` of it, or ``--rate``. Requests of random lengths
arrive at random. The client aborts one in ten at a random moment. Once a minute a joined R-worker is killed with ``kill
-9``, and another joins. The greedy float32 text of each prompt must equal the text of its first, undisturbed run.

Printed each minute: requests, tokens per second, R-workers, and the memory of the server's process. Printed at the end:
lost requests (not aborted, but without all their tokens), texts that differ, KV blocks still in use, and how much
memory grew from the second third of the time to the last. The exit status is 1 if one of these is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import psutil

from fastdecode.perfmodel.lab.measure.dataset import WorkItem
from fastdecode.perfmodel.lab.measure.serving import ServedRequest, Target, ask, session

FASTDECODE = [sys.executable, "-m", "fastdecode.cli.main"]
NUM_PROMPTS, LONGEST_PROMPT, LONGEST_OUTPUT = 200, 200, 160
ABORTED_PART = 0.1
CAPACITY_CONCURRENCY = 48
MOST_GROWTH = 0.02
SAMPLE_SECONDS = 5.0


@dataclass
class Soak:
    """A server under load, and counts of requests by their outcome."""

    url: str
    process: psutil.Process
    pool: str
    folder: Path
    items: list[WorkItem]
    texts: dict[int, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    megabytes: list[float] = field(default_factory=list)
    joined: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def target(self) -> Target:
        """Return the server as a target for greedy requests that ignore the end token."""
        return Target(f"{self.url}/v1/completions", "soak", body={"temperature": 0, "ignore_eos": True})

    def join(self) -> None:
        """Start one more R-worker, which joins."""
        command = [*FASTDECODE, "r-worker", "--join", self.pool, "--threads", "1", "--kv-cache-memory", "128MiB"]
        log = (self.folder / f"r-worker-{len(self.joined)}.log").open("wb")
        self.joined.append(subprocess.Popen(command, stdout=log, stderr=log))

    async def request(self, client: aiohttp.ClientSession, rng: random.Random, aborts: bool) -> None:
        """Send one of the requests and read its answer to the end. With ``aborts``, sometimes abort it before."""
        index = rng.randrange(len(self.items))
        item, request = self.items[index], ServedRequest(0)
        patience = rng.uniform(0, 5) if aborts and rng.random() < ABORTED_PART else None
        try:
            await asyncio.wait_for(ask(client, self.target, item, request), patience)
        except asyncio.TimeoutError:
            self.counts["given up"] += 1
            return
        if request.error or request.output_len != item.output_len:
            self.counts["lost"] += 1
            print("lost:", request.error or f"{request.output_len} tokens, not {item.output_len}", flush=True)
            return
        self.counts["ended"] += 1
        self.counts["tokens"] += request.output_len
        self.counts["differ"] += self.texts.setdefault(index, request.text) != request.text

    async def measure_capacity(self, seconds: float) -> float:
        """Record the texts of all prompts.
        Then return the requests per second with a fixed number of requests at a time.
        """
        rng = random.Random(1)
        async with session(self.target) as client:
            order = iter(range(len(self.items)))

            async def learn() -> None:
                for index in order:
                    request = ServedRequest(0)
                    await ask(client, self.target, self.items[index], request)
                    if request.error:
                        sys.exit(f"the undisturbed run fails: {request.error}")
                    self.texts[index] = request.text

            async def ask_on(end: float) -> None:
                while time.monotonic() < end:
                    await self.request(client, rng, aborts=False)

            await asyncio.gather(*(learn() for _ in range(CAPACITY_CONCURRENCY)))
            start, before = time.monotonic(), self.counts["ended"]
            await asyncio.gather(*(ask_on(start + seconds) for _ in range(CAPACITY_CONCURRENCY)))
            return (self.counts["ended"] - before) / (time.monotonic() - start)

    async def load(self, rate: float, seconds: float) -> None:
        """Send requests at random times (Poisson) for ``seconds``, and wait until the last has ended."""
        rng, tasks, end = random.Random(2), set(), time.monotonic() + seconds
        async with session(self.target) as client:
            due = time.monotonic()
            while due < end:
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                task = asyncio.create_task(self.request(client, rng, aborts=True))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                due += rng.expovariate(rate)
            await asyncio.gather(*tasks)

    async def kill_and_join(self, minutes: int) -> None:
        """Kill a joined R-worker at a random moment of each minute, and start another one."""
        rng = random.Random(3)
        for _ in range(minutes):
            before = rng.uniform(5, 45)
            await asyncio.sleep(before)
            victim = rng.choice([each for each in self.joined if each.poll() is None])
            victim.kill()
            victim.wait()
            self.counts["killed"] += 1
            self.join()
            await asyncio.sleep(60 - before)

    async def watch(self, minutes: int) -> None:
        """Measure memory every few seconds, and print a line each minute."""
        start, before = time.monotonic(), Counter(self.counts)
        for minute in range(1, minutes + 1):
            while time.monotonic() < start + 60 * minute:
                self.megabytes.append(self.process.memory_info().rss / 1e6)
                await asyncio.sleep(SAMPLE_SECONDS)
            told, counts = await self.metrics(), self.counts - before
            print(
                f"minute {minute}: {counts['ended']} ended, {counts['given up']} given up, {counts['lost']} lost, "
                f"{counts['differ']} differ, {counts['tokens'] / 60:.0f} tokens/s; {told['num_requests_running']:.0f} "
                f"running, {told['num_requests_waiting']:.0f} waiting, {told['r_workers_alive']:.0f} R-workers; "
                f"{self.megabytes[-1]:.1f} MB",
                flush=True,
            )
            before = Counter(self.counts)

    async def metrics(self) -> Counter[str]:
        """Return each metric's sum over its labels."""
        found: Counter[str] = Counter()
        async with aiohttp.ClientSession() as client, client.get(f"{self.url}/metrics") as response:
            for line in (await response.text()).splitlines():
                if match := re.match(r"fastdecode:(\w+)\{.*\} (\S+)$", line):
                    found[match[1]] += float(match[2])  # type: ignore[assignment]
        return found

    async def held(self) -> Counter[str]:
        """Return the metrics when no request runs and no block is in use, or after half a minute."""
        for _ in range(60):
            told = await self.metrics()
            if not told["num_requests_running"] + told["num_requests_waiting"] + told["r_worker_kv_blocks_used"]:
                break
            await asyncio.sleep(0.5)
        return told


def main() -> int:
    """Return 0 if no request was lost or differed, no block is in use, and memory did not grow; else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=int, default=20, help="minutes under load (20)")
    parser.add_argument("--part", type=float, default=0.8, help="load, as a part of the capacity (0.8)")
    parser.add_argument("--rate", type=float, help="requests per second, in place of --part")
    parser.add_argument("--capacity-seconds", type=float, default=40, help="seconds of the capacity's measurement (40)")
    args = parser.parse_args()
    return asyncio.run(run(args))


async def run(args: argparse.Namespace) -> int:
    """Serve, send the load and report."""
    async with serving() as soak:
        capacity = await soak.measure_capacity(args.capacity_seconds)
        rate = args.rate or args.part * capacity
        print(f"capacity {capacity:.2f} requests/s; {rate:.2f} arrive", flush=True)
        soak.counts.clear()
        await asyncio.gather(
            soak.load(rate, args.minutes * 60), soak.kill_and_join(args.minutes), soak.watch(args.minutes)
        )
        return report(soak, await soak.held())


def report(soak: Soak, told: Counter[str]) -> int:
    """Print the results; return 1 if any check fails."""
    third = max(1, len(soak.megabytes) // 3)
    first, last = statistics.median(soak.megabytes[third : 2 * third]), statistics.median(soak.megabytes[-third:])
    blocks, growth = told["r_worker_kv_blocks_used"], last / first - 1
    counts = soak.counts
    print(
        f"{counts['ended']} ended, {counts['given up']} given up, {counts['killed']} R-workers killed; "
        f"{counts['lost']} lost, {counts['differ']} texts differ, {blocks:.0f} KV blocks held; "
        f"memory {first:.1f} MB in the second third, {last:.1f} MB in the last ({growth:+.2%})"
    )
    return int(bool(counts["lost"] or counts["differ"] or blocks or growth > MOST_GROWTH))


@asynccontextmanager
async def serving() -> AsyncIterator[Soak]:
    """Start a server of the demo model, and two R-workers that join it; yield its ``Soak``."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        pool = f"127.0.0.1:{free_port()}"
        command = [*FASTDECODE, "serve", "--port", "0", "--served-model-name", "soak", "--dtype", "float32"]
        command += ["--r-workers", "spawn:1", "--pool-listen", pool, "--max-num-seqs", "64", "--max-model-len", "512"]
        command += ["--kv-cache-memory", "128MiB", "--s-threads", "1", "--r-threads", "1", "--num-mini-batches", "1"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        line = process.stdout.readline() if process.stdout else ""
        found = re.search(r" at (http://\S+) ", line)
        if not found:
            sys.exit(f"the server does not start: {line}")
        soak = Soak(found[1], psutil.Process(process.pid), pool, folder, random_items())
        try:
            for _ in range(2):
                soak.join()
            while (await soak.metrics())["r_workers_alive"] < 3:
                await asyncio.sleep(0.5)
            yield soak
        finally:
            for each in (process, *soak.joined):
                each.kill()
                each.wait()


def random_items() -> list[WorkItem]:
    """Return random prompts for the byte-level model, each with a number of tokens to generate."""
    rng = random.Random(0)
    return [
        WorkItem(
            [rng.randrange(32, 127) for _ in range(rng.randint(8, LONGEST_PROMPT))], rng.randint(8, LONGEST_OUTPUT)
        )
        for _ in range(NUM_PROMPTS)
    ]


def free_port() -> int:
    """Return a port at which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
