"""What does a token cost where an index picks from many R-workers' ranges? python benchmarks/sparse_ranges.py

One decode of one index layer and of the layer that reads what it picks, at the shapes of ``sparse_attention.py``, over
random rows of one sequence of --tokens tokens in --ranges ranges. Each range has an R-worker of one thread in this
process, and these run one after another, so that each has the machine as if on a host of its own: "slowest" is what a
step would wait for, links apart. Printed: medians in milliseconds of scan and attention, of the slowest R-worker and of
one that holds all ranges; of sharing picks and of merging o on the S-worker; bytes of ranks and of partial results of a
token from an R-worker; and whether o has the same bits from both, and how far it is from that of one that holds the
sequence in one piece.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
from sparse_attention import APPENDED, BLOCK_SIZE, SHAPES, rows

from fastdecode import _rworker
from fastdecode.core.dtypes import from_wire
from fastdecode.core.routes import node_widths
from fastdecode.core.types import SPLIT_TOKENS, SpanMode
from fastdecode.kinds import Layer

NO_CONTROLS = np.zeros((0, 4), np.int64)


class Holder:
    """An R-worker of one thread with some ranges of the sequence, numbered from ``first`` on, each of ``size`` tokens;
    all rows come from the ranges' numbers, so that two holders of a range have the same."""

    def __init__(self, layers: tuple[Layer, ...], ranges: range, size: int, read_ahead: str) -> None:
        self.layers, self.ranges, self.size = layers, ranges, size
        self.worker = _rworker.RWorker(
            layers=list(layers),
            model_dtype="bfloat16",
            kv_dtype="bfloat16",
            block_size=BLOCK_SIZE,
            num_blocks=len(ranges) * (size // BLOCK_SIZE + 2),
            num_threads=1,
            read_ahead=read_ahead,
        )
        self.partials: list[np.ndarray] = []

    def fill(self, ids: list[int]) -> None:
        """Store each range's rows as sequence ``ids``, or all as one sequence where the ids are equal."""
        lengths = dict.fromkeys(ids, 0)
        for number, name in zip(self.ranges, ids, strict=True):
            rng = np.random.default_rng(number)
            for _ in range(self.size // APPENDED):
                span = name, lengths[name], APPENDED, SpanMode.APPEND
                self.worker.begin_step(NO_CONTROLS, [np.array([span], np.int64)])
                for index, layer in enumerate(self.layers):
                    fresh = APPENDED if layer.ranks_tokens else APPENDED // 64
                    q, k, v = (
                        np.resize(rows(rng, count, *shape), (count and APPENDED, *shape))
                        for count, shape in zip((0, fresh, fresh), layer.row_shapes, strict=False)
                    )
                    self.worker.run(0, index, q, k, v, np.empty((0, *layer.row_shapes[3]), np.uint16))
                self.worker.end_step()
                lengths[name] += APPENDED

    def begin(self, spans: list[tuple[int, int, int, int]]) -> None:
        """Begin a decode of one token with these spans."""
        self.spans = spans
        self.worker.begin_step(NO_CONTROLS, [np.array(spans, np.int64)])

    def run(self, index: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        """Seconds of a layer, its o and its partial results; each span has the same row."""
        layer, modes = self.layers[index], [mode for *_, mode in self.spans]
        stored = sum(mode != SpanMode.READ for mode in modes)
        nodes = sum(1 if mode == SpanMode.READ else len(self._widths(at)) for _, at, _, mode in self.spans if mode > 1)
        o = np.zeros((modes.count(SpanMode.ATTEND), *layer.row_shapes[3]), np.uint16)
        partials = np.empty((nodes, *layer.partial_shape), np.float32)
        payload = np.repeat(q, len(modes), 0), np.repeat(k, stored, 0), np.repeat(v, stored, 0)
        start = time.perf_counter()
        self.worker.run(0, index, *payload, o, partials)
        return time.perf_counter() - start, o, partials

    @staticmethod
    def _widths(context_len: int) -> list[int]:
        return node_widths(context_len + 1)


def parts_of(owners: list[int], size: int, tail_len: int) -> np.ndarray:
    """PART table of one row: closed ranges on R-workers ``owners``, the last one the tail's, in order."""
    splits, places, parts = size // SPLIT_TOKENS, [0] * (max(owners) + 1), []
    for number, owner in enumerate(owners[:-1]):
        parts.append((owner, places[owner], 1, number * splits, splits))
        places[owner] += 1
    split, widths = (len(owners) - 1) * splits, node_widths(tail_len + 1)
    for node, width in enumerate(widths):
        parts.append((owners[-1], places[owners[-1]] + node, len(widths), split, width))
        split += width
    return np.array(parts, np.int64)


def decode(
    holders: list[Holder], owners: list[int], size: int, tail_len: int, seed: int
) -> tuple[np.ndarray, dict[str, float]]:
    """The next token over ranges, the last of which grows: o of the second layer, and seconds of each part."""
    layers = holders[0].layers
    for worker, holder in enumerate(holders):
        closed = [(n, (len(owners) - 1 - n) * size + tail_len, 1, SpanMode.READ) for n in holder.ranges]
        mine = [each for each in closed if each[0] < len(owners) - 1]
        tail = [(len(owners) - 1, tail_len, 1, SpanMode.PARTIAL)] if owners[-1] == worker else []
        holder.begin([*mine, *tail])
    parts, spans = parts_of(owners, size, tail_len), np.zeros((1, 4), np.int64)
    spans[0] = 0, 1, 0, len(parts)
    seconds: dict[str, float] = {}
    o = np.zeros((1, *layers[1].row_shapes[3]), np.uint16)
    for index, (layer, name) in enumerate(zip(layers, ("scan", "attention"), strict=True)):
        runs = [holder.run(index, *token(layer, seed)) for holder in holders]
        seconds[name] = max(run[0] for run in runs)
        partials, start = [run[2] for run in runs], time.perf_counter()
        seconds[f"{name}_bytes"] = max(each.nbytes for each in partials)
        if layer.ranks_tokens:
            for holder, counts in zip(holders, _rworker.share_picks(partials, parts, spans), strict=True):
                holder.worker.share(0, 0, counts)
        else:
            _rworker.merge_partials(partials, parts, spans, [], o, "bfloat16")
        seconds["share" if layer.ranks_tokens else "merge"] = time.perf_counter() - start
    for holder in holders:
        holder.worker.end_step()
    return o, seconds


def whole(holder: Holder, length: int, seed: int) -> tuple[np.ndarray, dict[str, float]]:
    """The same of a sequence in one piece."""
    holder.begin([(0, length, 1, SpanMode.ATTEND)])
    runs = [holder.run(index, *token(layer, seed)) for index, layer in enumerate(holder.layers)]
    holder.worker.end_step()
    return runs[1][1], {"scan": runs[0][0], "attention": runs[1][0]}


def token(layer: Layer, seed: int) -> list[np.ndarray]:
    """q, k and v of one token."""
    rng = np.random.default_rng(1_000_000 + seed)
    found = [rows(rng, 1, *shape) for shape in layer.row_shapes[:3]]
    if layer.query_dim > layer.key_head_dim:  # the bits of 1.0
        found[0][..., layer.key_head_dim :] = (0, 0x3F80)
    return found


def medians(found: list[dict[str, float]]) -> dict[str, float]:
    """Milliseconds, and bytes as they are, but for the first run."""
    return {
        name: round(float(np.median([each[name] for each in found[1:]])) * (1 if "bytes" in name else 1e3), 3)
        for name in found[0]
    }


def main() -> None:
    """Fill, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokens", type=int, default=1_048_576)
    parser.add_argument("--ranges", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--read-ahead", default="run-l2")
    options = parser.parse_args()
    size, numbers = options.tokens // options.ranges, range(options.ranges)
    for name in options.shapes:
        outputs, seconds = {}, {}
        for kind in ("whole", "one", "many"):
            shares = [range(n, n + 1) for n in numbers] if kind == "many" else [numbers]
            holders = [Holder(SHAPES[name], each, size, options.read_ahead) for each in shares]
            for holder in holders:
                holder.fill([0] * options.ranges if kind == "whole" else list(holder.ranges))
            owners = list(numbers) if kind == "many" else [0] * options.ranges
            found = [
                whole(holders[0], options.tokens + each, each)
                if kind == "whole"
                else decode(holders, owners, size, size + each, each)
                for each in range(options.repeats + 1)
            ]
            outputs[kind], seconds[kind] = np.concatenate([each[0] for each in found]), [each[1] for each in found]
            for holder in holders:
                holder.worker.close()
        print(
            json.dumps(
                {"shape": name, "tokens": options.tokens, "ranges": options.ranges}
                | {kind: medians(each) for kind, each in seconds.items()}
                | {"same_bits": bool(np.array_equal(outputs["many"], outputs["one"]))}
                | {"most_from_whole": float(np.abs(_values(outputs["many"]) - _values(outputs["whole"])).max())}
                | {"largest": float(np.abs(_values(outputs["whole"])).max())}
            ),
            flush=True,
        )


def _values(bits: np.ndarray) -> np.ndarray:
    return from_wire(bits, "bfloat16")


if __name__ == "__main__":
    main()
