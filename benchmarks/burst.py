"""Many more requests at once than a server takes: python benchmarks/burst.py --requests 10000

The demo model in float32 behind ``fastdecode serve`` as in ``soak.py``, with room for 64 running sequences and 4,096
waiting ones. All requests are sent at once, each on a connection of its own, ``--rounds`` times. What the server
accepts must end with all its tokens and the greedy text of its undisturbed time; everything else must hear 503 with
Retry-After and an error in OpenAI's shape, and nothing else may happen.

Printed for each round: answers by kind, seconds, and resident memory of the server's process before, at most, and
after. Exits with 1 where a request fails otherwise, KV blocks are held at the end, or memory is not bounded: more than
``KB_PER_REQUEST`` at the peak, or more after the last round than after the first by ``MOST_GROWTH``.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import aiohttp
from soak import MOST_GROWTH, Soak, serving

OUTPUT_LEN = 8
KB_PER_REQUEST = 100
SETTLE_SECONDS = 5.0


async def one(client: aiohttp.ClientSession, soak: Soak, index: int) -> str:
    """Send the prompt ``index``; what became of it: "ended", "refused", or what is wrong."""
    body: dict[str, Any] = {"model": "soak", "prompt": soak.items[index].prompt_token_ids, "max_tokens": OUTPUT_LEN}
    try:
        async with client.post(soak.target.url, json={**body, **soak.target.body}) as response:
            answer = await response.json()
            if response.status == 503:
                clean = "retry-after" in response.headers and answer["error"]["code"] == 503
                return "refused" if clean else f"503 of another shape: {answer}"
            if response.status != 200:
                return f"{response.status}: {answer}"
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    text, tokens = answer["choices"][0]["text"], answer["usage"]["completion_tokens"]
    if tokens != OUTPUT_LEN or soak.texts.setdefault(index, text) != text:
        return "another text"
    return "ended"


async def send(soak: Soak, count: int, most_at_once: int) -> Counter[str]:
    """So many requests, at most so many at once, each on its own connection; answers by kind."""
    room = asyncio.Semaphore(most_at_once)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=120)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:

        async def in_turn(index: int) -> str:
            async with room:
                return await one(client, soak, index)

        return Counter(await asyncio.gather(*(in_turn(number % len(soak.items)) for number in range(count))))


async def peak_of(soak: Soak, until: asyncio.Event) -> float:
    """The most resident memory, in MB."""
    peak = 0.0
    while not until.is_set():
        peak = max(peak, megabytes(soak))
        await asyncio.sleep(0.1)
    return peak


def megabytes(soak: Soak) -> float:
    """The server's resident memory now."""
    return float(soak.process.memory_info().rss / 1e6)


async def burst(soak: Soak, count: int, number: int) -> tuple[Counter[str], float, float]:
    """One round: answers, what memory grew by at the peak, and memory afterwards, in MB."""
    before, start, ended = megabytes(soak), time.monotonic(), asyncio.Event()
    watch = asyncio.create_task(peak_of(soak, ended))
    found = await send(soak, count, count)
    seconds = time.monotonic() - start
    ended.set()
    peak = await watch
    held = (await soak.held())["r_worker_kv_blocks_used"]
    await asyncio.sleep(SETTLE_SECONDS)
    after = megabytes(soak)
    other = count - found["ended"] - found["refused"]
    print(
        f"round {number}: {found['ended']} ended, {found['refused']} refused, {other} otherwise, {seconds:.0f} s; "
        f"{held:.0f} KV blocks held; memory {before:.1f} MB before, {peak:.1f} at most, {after:.1f} after",
        flush=True,
    )
    found["held"] = int(held)
    return found, peak - before, after


async def run(args: argparse.Namespace) -> int:
    """Serve, learn the texts, send the bursts."""
    async with serving() as soak:
        soak.items = [replace(item, output_len=OUTPUT_LEN) for item in soak.items]
        learnt = await send(soak, 2 * len(soak.items), 48)
        if learnt["ended"] != 2 * len(soak.items):
            sys.exit(f"the undisturbed run fails: {dict(learnt)}")
        rounds = [await burst(soak, args.requests, number) for number in range(1, args.rounds + 1)]
    other = sum((found for found, _, _ in rounds), Counter[str]())
    ended, refused, held = other.pop("ended", 0), other.pop("refused", 0), other.pop("held", 0)
    for what, count in other.most_common(10):
        print(f"{count} × {what}")
    growth = rounds[-1][2] / rounds[0][2] - 1
    per_request = max(peak for _, peak, _ in rounds) * 1e3 / args.requests
    print(
        f"{ended} ended, {refused} refused, {sum(other.values())} otherwise; at most {per_request:.0f} KB of memory "
        f"for each request at once; {growth:+.2%} from the first round's end to the last's"
    )
    return int(bool(other or held or not ended or growth > MOST_GROWTH or per_request > KB_PER_REQUEST))


def main() -> int:
    """0 where all ended or were refused as they should be, and memory is bounded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000, help="at once (10000)")
    parser.add_argument("--rounds", type=int, default=2, help="(2)")
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
