"""``fastdecode plan``: how many R-workers a model, GPU and workload need, and whether they are worth their cost."""

from __future__ import annotations

import argparse
from typing import Any

from fastdecode.cli.flags import add_common_flags, add_placing_flags
from fastdecode.cli.output import check_output_files, write_json
from fastdecode.perfmodel.lab.cli.machine_flags import add_machine_flags, add_number_flags, add_pipeline_flags
from fastdecode.perfmodel.lab.cli.model_list import model_lines
from fastdecode.perfmodel.lab.cli.plan_answer import answer_of, plan_figures
from fastdecode.perfmodel.lab.cli.plan_emit import FORMATS, emit
from fastdecode.perfmodel.lab.cli.plan_text import plan_text
from fastdecode.perfmodel.lab.cli.session_table import session_table, table_figures, table_lines
from fastdecode.perfmodel.lab.cli.shape_inputs import check_state_flags
from fastdecode.perfmodel.lab.cli.variants.prefill_workers import add_prefill_flags
from fastdecode.perfmodel.lab.cli.variants.speculative_decoding import add_speculation_flags
from fastdecode.perfmodel.lab.cli.variants.variant import as_json


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="how many R-workers for this model, GPU and workload",
        description="Sizes a FastDecode installation by the paper's equations, in under a second and without any "
        "hardware, and sets it beside the GPU alone. docs/planning.md has the equations.",
    )
    group = parser.add_argument_group("model and machine, by name")
    add_machine_flags(group)
    group.add_argument(
        "--num-r-workers", type=int, metavar="N",
        help="R-workers of an existing pool (as many as keep up with the S-worker)",
    )  # fmt: skip
    group.add_argument("--gpu-price", type=float, metavar="PRICE", help="price of one GPU per hour, in any currency")
    group.add_argument("--cpu-price", type=float, metavar="PRICE", help="price of one host of R-workers per hour")
    add_number_flags(parser.add_argument_group("or as measured"))
    _add_workload_flags(parser.add_argument_group("workload"))
    add_prefill_flags(parser.add_argument_group("prefill workers"), automatic=True)
    add_speculation_flags(parser.add_argument_group("speculative decoding"))
    group = parser.add_argument_group("output")
    group.add_argument("--output-json", metavar="FILE", help="file to write every figure to")
    group.add_argument("--plot", metavar="PNG", help="file for a picture: throughput and price by number of R-workers")
    group.add_argument("--list-models", action="store_true", help="print the models known by name, with their sizes")
    group.add_argument(
        "--table", action="store_true",
        help="print ms per token by sessions and context, for the GPU alone, FastDecode, and KV "
            "streamed over PCIe",
    )  # fmt: skip
    group.add_argument("--emit", choices=FORMATS, help="format to print in place of the plan")
    add_common_flags(parser)
    parser.set_defaults(run=run, tensor_parallel_size=None)


def _add_workload_flags(group: Any) -> None:
    group.add_argument(
        "--seq-len", type=float, metavar="TOKENS", help="mean tokens of prompt and output together (required)"
    )
    group.add_argument("--prompt-len", type=float, default=0.0, metavar="TOKENS", help="mean tokens of the prompt (0)")
    group.add_argument(
        "--shared-prefix-len", type=float, default=0.0, metavar="TOKENS",
        help="tokens at the start of all prompts that are equal (0)",
    )  # fmt: skip
    group.add_argument(
        "--output-len-cv", type=float, default=0.0, metavar="CV",
        help="standard deviation of output lengths over their mean (0)",
    )  # fmt: skip
    size = group.add_mutually_exclusive_group()
    size.add_argument(
        "--mini-batch-size", type=int, metavar="B", help="sequences of a mini-batch (the knee of B / T(B))"
    )
    size.add_argument(
        "--latency-limit", type=float, metavar="SECONDS",
        help="longest time of a whole sequence; sets the mini-batch size",
    )  # fmt: skip
    group.add_argument(
        "--tpot", type=float, metavar="MS",
        help="longest time per output token of each user, inf for any (100; any beside the two flags "
            "above)",
    )  # fmt: skip
    group.add_argument("--ttft", type=float, metavar="SECONDS", help="longest time to first token (any)")
    add_placing_flags(group, "auto: as the engine chooses")
    group.add_argument(
        "--interval-steps", type=int, metavar="F", help="steps between two micro-batches (1/32 of the output)"
    )
    add_pipeline_flags(group)


def run(args: argparse.Namespace) -> int:
    """Print the plan, or the files of ``--emit``; write the plan's figures, and draw the plan."""
    if args.list_models:
        print("\n".join(model_lines()))
        return 0
    check_output_files(args.output_json, plots=(args.plot,))
    check_state_flags(args)
    if args.table:
        table = session_table(args)
        print("\n".join(table_lines(table)))
        write_json({"table": table_figures(table)}, args.output_json)
        return 0
    answer = answer_of(args)
    print(emit(answer.case, answer.found) if args.emit else plan_text(answer))
    if args.output_json:
        figures = {name: as_json(each) for name, each in answer.found.items()}
        write_json(plan_figures(answer) | figures, args.output_json)
    if args.plot:
        from fastdecode.perfmodel.lab.measure.plan_plot import plot_plan

        case = answer.case
        title = f"{case.inputs.title}: {case.planner.workload.seq_len:g} tokens"
        plot_plan(case.planner, case.plan, case.inputs.server, answer.prices, case.limits, title, args.plot)
    return 0
