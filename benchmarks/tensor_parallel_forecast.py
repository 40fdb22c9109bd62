"""Steps of a tensor-parallel S-worker, predicted from one rank's and from all-reduces alone, beside measured ones.

    python benchmarks/tensor_parallel_forecast.py --model examples/llama-demo-shape --ranks 2

Every rank has one thread, and R-workers of one thread on the same core, which take turns with it (one mini-batch). One
rank is run first: seconds of S, R and host of its decode steps. All-reduces over gloo between as many processes are
timed by themselves, and a message's time and the link's rate fitted to them (``RankGroup``). Predicted: S and R over
the ranks, plus two all-reduces per layer and the logits' gather, plus the host's time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence

import numpy as np

from fastdecode import LLM, SamplingParams
from fastdecode.metrics import StepRecord
from fastdecode.perfmodel.calibration import fit_parts
from fastdecode.perfmodel.hardware import Figure
from fastdecode.perfmodel.model_shape import find_shape
from fastdecode.perfmodel.tensor_parallel import PeerLink, RankGroup

OUTPUT_LEN = 24
ALL_REDUCE = """
import json, sys, time, torch, torch.distributed as dist
rank, size, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=size)
found = []
for num_bytes in map(int, sys.argv[4:]):
    tensor, seconds = torch.zeros(num_bytes // 4), []
    for _ in range(60):
        start = time.perf_counter()
        dist.all_reduce(tensor)
        seconds.append(time.perf_counter() - start)
    found.append((num_bytes, sorted(seconds[20:])[20]))
if rank == 0:
    print(json.dumps(found))
"""


def main() -> None:
    """Print a row per batch and prompt length, and the median error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="examples/llama-demo-shape")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", default="16x128,64x128,64x512,128x256", metavar="LIST", help="sequences x prompt")
    args = parser.parse_args()
    shape = find_shape(args.model)
    sizes = [tuple(map(int, size.split("x"))) for size in args.sizes.split(",")]
    alone, together = (measure(args.model, ranks, sizes) for ranks in (1, args.ranks))
    group = measured_group(args.ranks, [rows * shape.hidden_size * shape.item_bytes for rows, _ in sizes])
    print(
        "| in flight | prompt | one rank: step, S, R, host ms | all-reduces ms | predicted ms | measured ms | error |"
    )
    print("|" + "---|" * 7)
    errors = []
    for (rows, prompt_len), one, real in zip(sizes, alone, together, strict=True):
        collectives = shape.num_layers * group.layer_seconds(shape, rows) + group.head_seconds(shape, rows)
        wall, s_part, r_part, host = one
        predicted = (s_part + r_part) / args.ranks + collectives + host
        errors.append(predicted / real[0] - 1)
        cells = f"{1e3 * wall:.1f}, {1e3 * s_part:.1f}, {1e3 * r_part:.1f}, {1e3 * host:.1f} | {1e3 * collectives:.1f}"
        print(f"| {rows} | {prompt_len} | {cells} | {1e3 * predicted:.1f} | {1e3 * real[0]:.1f} | {errors[-1]:+.1%} |")
    print(f"median error {np.median(np.abs(errors)):.1%}")


def measure(model: str, ranks: int, sizes: Sequence[tuple[int, ...]]) -> list[tuple[float, ...]]:
    """Median seconds of a decode step, of its S, R and host."""
    settings = {"tensor_parallel_size": ranks, "num_mini_batches": 1, "s_threads": 1, "r_threads": 1}
    steps: list[StepRecord] = []
    found = []
    with LLM(
        model, load_format="dummy", skip_tokenizer_init=True, device="cpu", r_workers="inproc", max_num_seqs=256,
        kv_cache_memory=1 << 30, enable_prefix_caching=False, schedule="prefill-first", max_num_batched_tokens=8192,
        **settings,
    ) as llm:  # fmt: skip
        llm.engine.on_step = steps.append
        params = SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, ignore_eos=True, detokenize=False)
        rng = np.random.default_rng(0)
        for rows, prompt_len in sizes:
            steps.clear()
            prompts = [{"prompt_token_ids": rng.integers(1, 1000, prompt_len).tolist()} for _ in range(rows)]
            llm.generate(prompts, params, use_tqdm=False)
            steady = [step for step in steps if step.is_decode and step.num_output_tokens == rows][2:]
            columns = [(s.wall_seconds, s.s_seconds, max(s.r_seconds), s.host_seconds) for s in steady]
            found.append(tuple(np.median(columns, axis=0).tolist()))
    return found


def measured_group(ranks: int, sizes: Sequence[int]) -> RankGroup:
    """Ranks of this machine, whose all-reduces take what these of ``sizes`` bytes took."""
    path = subprocess.run(["mktemp", "-u"], capture_output=True, text=True, check=True).stdout.strip()
    words = [str(ranks), path, *map(str, sorted({4096, *sizes}))]
    started = [
        subprocess.Popen([sys.executable, "-c", ALL_REDUCE, str(rank), *words], stdout=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    first, *_ = [process.communicate()[0] for process in started]
    points = json.loads(first)
    # The ring of RankGroup: 2(N - 1) messages of an N-th each; with two ranks its two messages carry all of it once.
    steps = 2 * (ranks - 1)
    columns = np.array([(steps, steps * num_bytes / ranks) for num_bytes, _ in points])
    once, per_byte = fit_parts(columns, np.array([seconds for _, seconds in points])).tolist()
    for num_bytes, seconds in points:
        print(f"all-reduce of {num_bytes} bytes: {1e3 * seconds:.3f} ms")
    rate = Figure(1 / per_byte if per_byte else 1e12, 1.0, True, "gloo, measured here")
    return RankGroup(ranks, PeerLink("gloo", rate, once))


if __name__ == "__main__":
    main()
