"""A plan as the files that start it: a hostfile, a Slurm script, an mpirun line."""

from __future__ import annotations

import math
from collections.abc import Iterator

from fastdecode.cli.hostfile import HostSlots
from fastdecode.cli.launch_lines import S_COMMAND, JobShape, openmpi_line, slurm_script
from fastdecode.perfmodel.plan import Plan
from fastdecode.perfmodel.token_budget import TILE_TOKENS

FORMATS = ("hostfile", "sbatch", "mpirun")


def emit(form: str, plan: Plan, args_text: str, rows_per_output_token: float, r_flags: str = "") -> str:
    """Hosts are placeholders.

    ``args_text``: the engine flags that the plan's own inputs fix, such as the model's; ``r_flags``: each R-worker's,
    such as its memory, which an S-worker of an MPI job is not to be told.
    """
    s_command = f"{S_COMMAND} {args_text}{_flags(plan, rows_per_output_token)}"
    job = JobShape("s-worker", tuple(_hosts(plan)), s_command, r_flags, named=False)
    if form == "hostfile":
        return "\n".join(map(str, (HostSlots(job.s_host, 1), *job.r_hosts)))
    return openmpi_line(job, "hostfile") if form == "mpirun" else slurm_script(job)


def _hosts(plan: Plan) -> Iterator[HostSlots]:
    """R-workers are spread as evenly as they go."""
    least, more = divmod(plan.num_r_workers, plan.num_hosts)
    for index in range(plan.num_hosts):
        yield HostSlots(f"r-host-{index + 1}", least + (index < more))


def _flags(plan: Plan, rows_per_output_token: float) -> str:
    tokens = math.ceil(plan.in_flight * rows_per_output_token / TILE_TOKENS) * TILE_TOKENS
    return (
        f"--schedule sls --num-mini-batches {plan.num_mini_batches} --max-num-seqs {plan.in_flight} "
        f"--max-num-batched-tokens {tokens} --kv-load-limit {plan.kv_load_limit}"
    )
