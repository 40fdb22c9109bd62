"""``fastdecode run-batch``: an OpenAI batch file, answered line by line; started again, it goes on."""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fastdecode.api.outputs import RequestOutput
from fastdecode.api.sampling_params import SamplingParams
from fastdecode.batch.files import BatchInput, BatchOutput
from fastdecode.batch.lines import Asked, BatchLine, answer, chat_asked, read_request, refusal
from fastdecode.cli.flags import add_common_flags, add_engine_flags, engine_config
from fastdecode.cli.output import progress_bar
from fastdecode.core.errors import ConfigError, RequestError
from fastdecode.server.answer_reader import AnswerReading
from fastdecode.server.logprobs import LogprobForm, logprob_form
from fastdecode.server.prompt_reader import PromptReader
from fastdecode.server.protocol import COMPLETIONS
from fastdecode.server.readings import Readings

if TYPE_CHECKING:
    from fastdecode.engine.engine import LLMEngine

QUEUED_PER_SEAT = 2
"""Requests in the engine for each that can run: the scheduler sees which come next, and the file stays on disk."""


@dataclass
class Running:
    """A line that the engine works on: engine requests by id, one per prompt, each with its output once finished."""

    line: BatchLine
    request: Asked
    reading: AnswerReading
    logprobs: LogprobForm
    params: SamplingParams
    outputs: dict[str, RequestOutput | None] = field(default_factory=dict)


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "run-batch",
        help="answer an OpenAI batch file",
        description=f"Answers requests of {COMPLETIONS}, chats and Responses. Started again with the same files, it "
        "answers the rest.",
    )
    parser.add_argument("-i", "--input-file", required=True, metavar="JSONL", help="a request per line")
    parser.add_argument("-o", "--output-file", required=True, metavar="JSONL", help="an answer per line, as they come")
    parser.add_argument(
        "--served-model-name", nargs="+", action="extend", metavar="NAME",
        help="what requests may call the model; answers give the first (--model; requests may give any)",
    )  # fmt: skip
    parser.add_argument("--retry-failed", action="store_true", help="ask again what was answered with an error (off)")
    add_engine_flags(parser)
    add_common_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 when all requests of the file are answered without an error, by this run or one before; else 1."""
    config = engine_config(args)
    batch = BatchInput(args.input_file)
    for problem in batch.problems:
        print(f"fastdecode: {problem}; this line is left out", file=sys.stderr)
    total = len(batch.custom_ids)
    names = tuple(args.served_model_name or ())
    model = names[0] if names else config.model
    with BatchOutput(args.output_file, batch.custom_ids, model, args.retry_failed) as output:
        print(_progress_line(args.output_file, total, output), flush=True)
        if len(output.done) < total:
            from fastdecode.engine.engine import LLMEngine

            engine = LLMEngine(config)
            try:
                _answer_all(engine, batch, output, model, names)
            except KeyboardInterrupt:
                print(
                    f"fastdecode: {_progress_line(args.output_file, total, output)}: start it again to go on",
                    file=sys.stderr,
                )
                raise
            finally:
                engine.close()
            print(_progress_line(args.output_file, total, output))
        if output.failed:
            print("fastdecode: --retry-failed asks those answered with an error again", file=sys.stderr)
    return int(bool(output.failed or batch.problems))


def _progress_line(path: str, total: int, output: BatchOutput) -> str:
    failed = f", {len(output.failed)} of them with an error" if output.failed else ""
    return f"{path}: {len(output.done)} of {total} requests are answered{failed}"


def _answer_all(
    engine: LLMEngine, batch: BatchInput, output: BatchOutput, model: str, names: Sequence[str] = ()
) -> None:
    """Feed the engine, and write each answer, by ``model``, as it is finished. ``names``: what requests may call it;
    none: anything."""
    waiting: Iterator[BatchLine] = (line for line in batch if line.custom_id not in output.done)
    running: dict[str, Running] = {}
    readings = Readings(engine.s_model.tokenizer)
    most = QUEUED_PER_SEAT * engine.config.max_num_seqs
    with progress_bar(len(batch.custom_ids), "req", desc="Requests", initial=len(output.done)) as bar:
        while True:
            while len(running) < most and (line := next(waiting, None)):
                try:
                    added = _add(engine, readings, line, names)
                    running |= dict.fromkeys(added.outputs, added)
                except (RequestError, ConfigError) as error:
                    output.write(refusal(line, error))
                    bar.update()
            if not running:
                return
            for each in engine.step():
                if each.finished:
                    owner = running.pop(each.request_id)
                    owner.outputs[each.request_id] = each
                    outputs = [found for found in owner.outputs.values() if found]
                    if len(outputs) == len(owner.outputs):
                        known = owner.reading, owner.logprobs, owner.params
                        output.write(answer(owner.line, owner.request, model, outputs, *known))
                        bar.update()


def _add(engine: LLMEngine, readings: Readings, line: BatchLine, names: Sequence[str]) -> Running:
    """An engine request per prompt; where one is refused, all are."""
    asked = read_request(line)
    if names and asked.model is not None and asked.model not in names:
        raise RequestError(f"the model {asked.model!r:.200} does not exist: {', '.join(names)} does")
    request = chat_asked(asked)
    params = readings.sampling_params(request, engine.s_model.generation_defaults)
    model = engine.s_model
    reader = PromptReader(model.tokenizer, model.vocab_size, model.max_model_len, {})
    found = reader.read(request)
    reader.check_room(request, found)
    added = Running(line, asked, readings.of(request, found), logprob_form(model.tokenizer, params), params)
    try:
        for index, prompt in enumerate(found):
            request_id = f"{line.custom_id}/{index}"
            engine.add_request(request_id, prompt.for_engine(), _seeded(params, f"{engine.config.seed}/{request_id}"))
            added.outputs[request_id] = None
    except (RequestError, ConfigError):
        engine.abort_request(added.outputs)
        raise
    return added


def _seeded(params: SamplingParams, name: str) -> SamplingParams:
    """Without a seed the draws follow from the request's name, not from how many a run has answered before it."""
    if params.seed is not None:
        return params
    digest = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest()
    return replace(params, seed=int.from_bytes(digest, "little"))
