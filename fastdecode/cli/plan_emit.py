"""A plan as the files that start it: a hostfile, a Slurm script, an mpirun line."""

from __future__ import annotations

import math
from collections.abc import Iterator

from fastdecode.perfmodel.plan import Plan
from fastdecode.perfmodel.token_budget import TILE_TOKENS

FORMATS = ("hostfile", "sbatch", "mpirun")


def emit(form: str, plan: Plan, args_text: str, rows_per_output_token: float) -> str:
    """``args_text``: the engine flags that the plan's own inputs fix, such as the model's."""
    s_worker = f"fastdecode bench throughput --r-workers mpi {args_text}{_flags(plan, rows_per_output_token)}"
    r_worker = "fastdecode r-worker --transport mpi"
    if form == "hostfile":
        return "\n".join(("s-worker slots=1", *_hosts(plan)))
    if form == "mpirun":
        return f"mpirun --hostfile hostfile -n 1 {s_worker} \\\n  : -n {plan.num_r_workers} {r_worker}"
    return "\n".join(_sbatch(plan, s_worker, r_worker))


def _hosts(plan: Plan) -> Iterator[str]:
    """Names are placeholders; R-workers are spread as evenly as they go."""
    least, more = divmod(plan.num_r_workers, plan.num_hosts)
    for index in range(plan.num_hosts):
        yield f"r-host-{index + 1} slots={least + (index < more)}"


def _sbatch(plan: Plan, s_worker: str, r_worker: str) -> Iterator[str]:
    """A heterogeneous job: one node with the GPU, and the hosts of R-workers, one R-worker per NUMA node."""
    yield "#!/bin/bash"
    yield "#SBATCH --job-name=fastdecode"
    yield "#SBATCH --nodes=1 --ntasks=1 --gpus-per-node=1"
    yield "#SBATCH hetjob"
    yield f"#SBATCH --nodes={plan.num_hosts} --ntasks={plan.num_r_workers} --exclusive"
    yield f"srun --mpi=pmix --het-group=0 {s_worker} \\"
    yield f"  : --het-group=1 --cpu-bind=ldoms {r_worker}"


def _flags(plan: Plan, rows_per_output_token: float) -> str:
    tokens = math.ceil(plan.in_flight * rows_per_output_token / TILE_TOKENS) * TILE_TOKENS
    return (
        f"--schedule sls --num-mini-batches {plan.num_mini_batches} --max-num-seqs {plan.in_flight} "
        f"--max-num-batched-tokens {tokens} --kv-load-limit {plan.kv_load_limit}"
    )
