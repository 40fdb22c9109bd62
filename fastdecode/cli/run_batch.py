"""``fastdecode run-batch``: answers an OpenAI batch file. A restarted run skips the requests that have answers."""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fastdecode.api.from_vllm import OF_BATCHES, check_foreign
from fastdecode.api.outputs import RequestOutput
from fastdecode.api.sampling_params import SamplingParams
from fastdecode.batch.files import BatchInput, BatchOutput
from fastdecode.batch.lines import Asked, BatchLine, answer, chat_asked, read_request, refusal
from fastdecode.cli.flags import add_common_flags, add_engine_flags, add_flags, engine_config
from fastdecode.cli.output import progress_bar
from fastdecode.cli.vllm_flags import add_foreign_flags, add_server_flags
from fastdecode.core.errors import ConfigError, RequestError
from fastdecode.server.answer_reader import AnswerReading
from fastdecode.server.logprobs import LogprobForm, logprob_form
from fastdecode.server.prompt_reader import PromptReader
from fastdecode.server.protocol import COMPLETIONS
from fastdecode.server.readings import Readings
from fastdecode.server.server_settings import ServerSettings
from fastdecode.server.sources import SourceForm, source_form

if TYPE_CHECKING:
    from fastdecode.engine.engine import LLMEngine

OF_REQUESTS = (
    "served_model_name", "chat_template", "default_chat_template_kwargs", "enable_auto_tool_choice", "tool_call_parser",
    "reasoning_parser",
)  # fmt: skip
"""Server settings that affect how requests are read, and are flags of ``run-batch`` too."""


@dataclass(frozen=True)
class Rules:
    """The rules by which ``run-batch`` reads requests.

    ``names``: accepted model names; any if empty. ``template``: chat template arguments. ``readings``: the syntax in
    which the model writes its answers.
    """

    names: tuple[str, ...]
    template: Mapping[str, Any]
    readings: Readings

    @staticmethod
    def of(settings: ServerSettings, tokenizer: Any) -> Rules:
        """Return the rules that the flags in ``settings`` define. Raise ConfigError for a bad flag."""
        template = settings.template_arguments()
        parsers = settings.tool_call_parser, settings.reasoning_parser
        readings = Readings(tokenizer, template.get("chat_template"), *parsers)
        return Rules(settings.model_names("") if settings.served_model_name else (), template, readings)


@dataclass
class Running:
    """A batch line in the engine. ``outputs``: by engine request id, one per prompt; None until it has finished."""

    line: BatchLine
    request: Asked
    reading: AnswerReading
    logprobs: LogprobForm
    params: SamplingParams
    sources: SourceForm
    outputs: dict[str, RequestOutput | None] = field(default_factory=dict)


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "run-batch",
        help="answer an OpenAI batch file",
        description=f"Answers requests of {COMPLETIONS}, chats and Responses. Started again with the same files, it "
        "answers the rest.",
    )
    parser.add_argument(
        "-i", "--input-file", required=True, metavar="JSONL", help="batch file to read: one request per line"
    )
    parser.add_argument(
        "-o", "--output-file", required=True, metavar="JSONL",
        help="file to write: one answer per line, in the order in which requests finish",
    )  # fmt: skip
    names = {"help": "names by which requests may ask for the model; any name if unset. Answers give the first"}
    add_flags(parser.add_argument_group("requests"), ServerSettings, OF_REQUESTS, served_model_name=names)
    parser.add_argument(
        "--retry-failed", action="store_true", help="repeat the requests that were answered with an error (off)"
    )
    add_engine_flags(parser)
    add_server_flags(parser)
    add_foreign_flags(parser, OF_BATCHES)
    add_common_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the batch; return 0 if every request of the file has an answer without an error, else 1."""
    check_foreign(vars(args), foreign=OF_BATCHES)
    settings = ServerSettings(**{name: getattr(args, name) for name in OF_REQUESTS})
    settings.read_chat_template()  # refuses a bad template before the model is loaded
    config = engine_config(args)
    batch = BatchInput(args.input_file)
    for problem in batch.problems:
        print(f"fastdecode: {problem}; this line is left out", file=sys.stderr)
    total = len(batch.custom_ids)
    model = settings.model_names(config.model)[0]
    with BatchOutput(args.output_file, batch.custom_ids, model, args.retry_failed) as output:
        print(_progress_line(args.output_file, total, output), flush=True)
        if len(output.done) < total:
            from fastdecode.engine.engine import LLMEngine

            engine = LLMEngine(config)
            try:
                _answer_all(engine, batch, output, model, settings)
            except KeyboardInterrupt:
                told = _progress_line(args.output_file, total, output)
                print(f"fastdecode: {told}: the same command goes on with the rest", file=sys.stderr)
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
    engine: LLMEngine, batch: BatchInput, output: BatchOutput, model: str, settings: ServerSettings
) -> None:
    """Run all requests of ``batch``, and write each answer when it finishes. ``model``: the name in the answers."""
    waiting: Iterator[BatchLine] = (line for line in batch if line.custom_id not in output.done)
    running: dict[str, Running] = {}
    rules = Rules.of(settings, engine.s_model.tokenizer)
    # Requests in the engine per sequence that may run at once: enough to queue, without reading the whole file
    queued_per_seat = 2
    most = queued_per_seat * engine.config.max_num_seqs
    with progress_bar(len(batch.custom_ids), "req", desc="Requests", initial=len(output.done)) as bar:
        while True:
            while len(running) < most and (line := next(waiting, None)):
                try:
                    added = _add(engine, line, rules)
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
                        known = owner.reading, owner.logprobs, owner.params, owner.sources
                        output.write(answer(owner.line, owner.request, model, outputs, *known))
                        bar.update()


def _add(engine: LLMEngine, line: BatchLine, rules: Rules) -> Running:
    """Add one engine request per prompt of ``line``. If the engine refuses one, abort all of them."""
    asked = read_request(line)
    if rules.names and asked.model is not None and asked.model not in rules.names:
        raise RequestError(f"the model {asked.model!r:.200} does not exist: {', '.join(rules.names)} does")
    request = chat_asked(asked)
    params = rules.readings.sampling_params(request, engine.s_model.generation_defaults)
    model = engine.s_model
    reader = PromptReader(model.tokenizer, model.vocab_size, model.max_model_len, rules.template)
    found = reader.read(request)
    reader.check_room(request, found)
    logprobs, sources = logprob_form(model.tokenizer, params), source_form(model.tokenizer, request, found, params)
    added = Running(line, asked, rules.readings.of(request, found), logprobs, params, sources)
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
    """Return ``params`` with a seed derived from the request's ``name``; a restarted run draws the same tokens."""
    if params.seed is not None:
        return params
    digest = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest()
    return replace(params, seed=int.from_bytes(digest, "little"))
