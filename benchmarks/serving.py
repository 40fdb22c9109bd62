"""Measure the server's cost: the same requests through `fastdecode serve` and `LLM.generate`, A B A B.

python benchmarks/serving.py: tokens/s at full load, streamed and not (goal: 0.90 of offline), and the time to the first
token of an idle server (goal: at most 1.2 times that of `LLM.generate`). The client shares the cores with the server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from fastdecode import LLM, SamplingParams

FASTDECODE = str(Path(sys.executable).parent / "fastdecode")
EXAMPLE = str(Path(__file__).resolve().parents[1] / "examples" / "llama-demo-shape")


class Answer(asyncio.Protocol):
    """A client with little overhead: sends one request, and records the times of its first text and of its end."""

    def __init__(self, data: bytes, done: asyncio.Future[None]) -> None:
        self._data, self.done = data, done
        self.received = bytearray()
        self.first_seconds = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self._data)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self.received += data
        if not self.first_seconds and (b"data: {" in data or b'"text"' in data):
            self.first_seconds = time.perf_counter()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.received.startswith(b"HTTP/1.1 200 "):
            raise SystemExit(f"the server answered: {bytes(self.received[:500])!r}")
        self.done.set_result(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="folder of a model (examples/llama-demo-shape, random weights)")
    parser.add_argument("--requests", type=int, default=128, help="number of requests (128)")
    parser.add_argument("--seats", type=int, default=64, help="sequences that run at once (64)")
    parser.add_argument("--prompt-len", type=int, default=128, help="prompt tokens (128)")
    parser.add_argument("--output-len", type=int, default=64, help="output tokens (64)")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds (3)")
    parser.add_argument("--first-tokens", type=int, default=15, help="rounds of one request on idle engines (15)")
    args = parser.parse_args()
    settings: dict[str, object] = {"max_model_len": 1024, "max_num_seqs": args.seats, "enable_prefix_caching": False}
    settings["model"] = args.model or EXAMPLE
    if not args.model:
        settings |= {"load_format": "dummy", "skip_tokenizer_init": True}
    with LLM(**settings) as llm, serving(settings) as url:  # type: ignore[arg-type]
        vocab_size = llm.engine.s_model.vocab_size
        rng = random.Random(0)

        def prompts(count: int) -> list[list[int]]:
            return [[rng.randrange(vocab_size) for _ in range(args.prompt_len)] for _ in range(count)]

        compare_load(llm, url, prompts, args)
        compare_first_token(llm, url, prompts, args)


def compare_load(llm: LLM, url: str, prompts, args: argparse.Namespace) -> None:  # type: ignore[no-untyped-def]
    """Send all requests at once; print output tokens per second of the server and of ``LLM.generate``."""
    rates: dict[str, list[float]] = {"offline": [], "streamed": [], "whole": []}
    for number in range(args.rounds + 1):
        for way, found in rates.items():
            asked = prompts(args.requests)
            start = time.perf_counter()
            if way == "offline":
                params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=args.output_len)
                llm.generate([{"prompt_token_ids": each} for each in asked], params, use_tqdm=False)
            else:
                asyncio.run(ask(url, asked, args.output_len, way == "streamed"))
            rate = args.requests * args.output_len / (time.perf_counter() - start)
            if number:  # The first round only warms up.
                found.append(rate)
                print(f"{way}: {rate:.0f} output tokens/s", flush=True)
    for way in ("streamed", "whole"):
        each = [b / a for a, b in zip(rates["offline"], rates[way], strict=True)]
        ratio = statistics.median(rates[way]) / statistics.median(rates["offline"])
        print(f"server ({way}) / offline: {ratio:.3f} ({min(each):.3f} to {max(each):.3f}; wanted: 0.90)")


def compare_first_token(llm: LLM, url: str, prompts, args: argparse.Namespace) -> None:  # type: ignore[no-untyped-def]
    """Print the seconds to the first token of a single request."""
    seconds: dict[str, list[float]] = {"LLM.generate": [], "server": []}
    for number in range(args.first_tokens + 1):
        for way, found in seconds.items():
            asked = prompts(1)
            start = time.perf_counter()
            if way == "server":
                first = asyncio.run(ask(url, asked, 4, True))[0]
            else:
                given = {"prompt_token_ids": asked[0]}
                llm.generate([given], SamplingParams(temperature=0, ignore_eos=True, max_tokens=1), use_tqdm=False)
                first = time.perf_counter()
            if number:
                found.append(first - start)
    for way, found in seconds.items():
        low, high = min(found) * 1e3, max(found) * 1e3
        print(f"{way}: first token after {statistics.median(found) * 1e3:.1f} ms ({low:.1f} to {high:.1f})")
    server, offline = (statistics.median(seconds[way]) for way in ("server", "LLM.generate"))
    print(f"server / LLM.generate: {server / offline:.3f} (wanted: at most 1.2)")


async def ask(url: str, asked: list[list[int]], output_len: int, streamed: bool) -> list[float]:
    """Send all requests at once; return when the first text of each arrived."""
    loop = asyncio.get_running_loop()
    answers: list[Answer] = []
    address = urlsplit(url)
    for prompt in asked:
        body = {"prompt": prompt, "max_tokens": output_len, "temperature": 0, "ignore_eos": True, "stream": streamed}
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n"
        answer = Answer(head.encode() + data, loop.create_future())
        await loop.create_connection(functools.partial(lambda made: made, answer), address.hostname, address.port)
        answers.append(answer)
    await asyncio.gather(*(answer.done for answer in answers))
    for answer in answers:
        if streamed and b"[DONE]" not in answer.received:
            raise SystemExit("a stream was not complete")
    return [answer.first_seconds for answer in answers]


@contextlib.contextmanager
def serving(settings: dict[str, object]) -> Iterator[str]:
    """Start a server with these settings; yield its address."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items() if not isinstance(value, bool)]
    flags += [f"--{name.replace('_', '-')}" for name, value in settings.items() if value is True]
    flags += [f"--no-{name.replace('_', '-')}" for name, value in settings.items() if value is False]
    process = subprocess.Popen([FASTDECODE, "serve", "--port", "0", *flags], stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline() if process.stdout else ""
        found = re.search(r" at (http://\S+) ", line)
        if not found:
            raise SystemExit("the server did not start")
        yield found[1]
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
