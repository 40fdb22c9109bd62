"""``fastdecode run-batch``: an OpenAI batch file, answered line by line; started again, it goes on."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fastdecode.batch.files import BatchInput, BatchOutput
from fastdecode.batch.lines import COMPLETIONS, BatchLine, answer, refusal, sampling_params
from fastdecode.cli.flags import add_common_flags, add_engine_flags, engine_config
from fastdecode.cli.output import progress_bar
from fastdecode.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from fastdecode.engine import LLMEngine

QUEUED_PER_SEAT = 2
"""Requests in the engine for each that can run: the scheduler sees who comes next, and the file stays on disk."""


def add_command(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "run-batch",
        help="answer an OpenAI batch file",
        description=f"Answers {COMPLETIONS} and chat requests. Started again with the same files, it answers the rest.",
    )
    parser.add_argument("-i", "--input-file", required=True, metavar="JSONL", help="a request per line")
    parser.add_argument("-o", "--output-file", required=True, metavar="JSONL", help="an answer per line, as they come")
    add_engine_flags(parser)
    add_common_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 when all requests are answered, 1 when some of the answers of this run are errors."""
    config = engine_config(args)
    batch = BatchInput(args.input_file)
    with BatchOutput(args.output_file, batch.custom_ids) as output:
        left = len(batch.custom_ids) - len(output.done)
        print(f"{args.output_file}: {len(output.done)} of {len(batch.custom_ids)} requests are answered", flush=True)
        if not left:
            return 0
        from fastdecode.engine import LLMEngine

        engine = LLMEngine(config)
        try:
            failed = _answer_all(engine, batch, output, left)
        finally:
            engine.close()
    print(
        f"{args.output_file}: all {len(batch.custom_ids)} requests are answered, {failed} of these {left} with an error"
    )
    return int(failed > 0)


def _answer_all(engine: LLMEngine, batch: BatchInput, output: BatchOutput, left: int) -> int:
    """Feed the engine and write what it makes; returns the number of errors."""
    waiting: Iterator[BatchLine] = (line for line in batch if line.custom_id not in output.done)
    running: dict[str, BatchLine] = {}
    most, failed = QUEUED_PER_SEAT * engine.config.max_num_seqs, 0
    with progress_bar(left, "req", desc="Requests") as bar:
        while True:
            while len(running) < most and (line := next(waiting, None)):
                try:
                    _add(engine, line)
                    running[line.custom_id] = line
                except (RequestError, ConfigError) as error:
                    output.write(refusal(line, error))
                    failed += 1
                    bar.update()
            if not running:
                return failed
            for each in engine.step():
                if each.finished:
                    written = answer(running.pop(each.request_id), engine.config.model, each)
                    output.write(written)
                    failed += written["response"]["status_code"] != 200
                    bar.update()


def _add(engine: LLMEngine, line: BatchLine) -> None:
    params = sampling_params(line, engine.s_model.generation_defaults)
    if line.url == COMPLETIONS:
        if "prompt" not in line.body:
            raise RequestError("prompt is missing: text, or a list of token ids")
        engine.add_request(line.custom_id, line.body["prompt"], params)
        return
    tokenizer = engine.s_model.tokenizer
    if tokenizer is None:
        raise RequestError("messages need a tokenizer, and it was not loaded (skip_tokenizer_init)")
    engine.add_request(line.custom_id, tokenizer.encode_chat(line.body.get("messages")), params)
