"""``fastdecode generate``: generates text from prompts, and streams it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from fastdecode.api.outputs import CompletionOutput, RequestOutput
from fastdecode.api.sampling_params import SamplingParams
from fastdecode.cli.flags import add_common_flags, add_engine_flags, engine_config
from fastdecode.core.errors import ConfigError

if TYPE_CHECKING:
    from fastdecode.engine.engine import LLMEngine


def add_command(commands: Any) -> None:
    parser = commands.add_parser("generate", help="generate and stream text")
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="text to continue")
    _add_sampling_flags(parser.add_argument_group("sampling"))
    parser.add_argument(
        "--chat", action="store_true", help="format each prompt as a user's message, by the chat template"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per prompt instead of streaming text"
    )
    add_engine_flags(parser)
    add_common_flags(parser)
    parser.set_defaults(run=run)


def _add_sampling_flags(group: Any) -> None:
    group.add_argument("--max-tokens", type=int, default=128, help="most tokens to generate per text (128)")
    group.add_argument("--min-tokens", type=int, default=0, help="fewest tokens before the text may end (0)")
    group.add_argument("--temperature", type=float, help="temperature; 0 is greedy (generation_config.json's, else 1)")
    group.add_argument("--top-p", type=float, help="total probability to keep (generation_config.json's, else 1)")
    group.add_argument("--top-k", type=int, help="likeliest tokens to keep; 0: all (generation_config.json's, else 0)")
    group.add_argument("--min-p", type=float, help="least probability, relative to the likeliest token (0)")
    group.add_argument("--repetition-penalty", type=float, help="above 1: repeat tokens less often (1)")
    group.add_argument("--stop", action="append", default=[], metavar="STRING", help="ends the text; may be repeated")
    group.add_argument("--n", type=int, default=1, help="texts to generate per prompt (1)")
    group.add_argument(
        "--logprobs", type=int, metavar="K", help="with --json: print the log-probabilities of the K likeliest tokens"
    )
    group.add_argument(
        "--show-sources", type=int, nargs="?", const=3, metavar="K", dest="attention_sources",
        help="print for each token the K (3) blocks of context that it attended to most",
    )  # fmt: skip
    group.add_argument(
        "--attention-source-block", type=int, default=16, metavar="N",
        help="with --show-sources: tokens of one block of context (16)",
    )  # fmt: skip
    group.add_argument(
        "--attention-source-layers", type=int, nargs="+", metavar="LAYER",
        help="with --show-sources: layers whose attention counts, numbered among the layers with "
            "attention (all that see the whole context)",
    )  # fmt: skip
    group.add_argument("--ignore-eos", action="store_true", help="continue after the end-of-text token")


def run(args: argparse.Namespace) -> int:
    """Generate and print texts; return the exit status. A single text is streamed, others print when finished."""
    config = engine_config(args)
    SamplingParams(**_given(args, {}))  # refuses bad sampling flags before the model is loaded
    from fastdecode.engine.engine import LLMEngine

    engine = LLMEngine(config)
    try:
        params = SamplingParams(**_given(args, engine.s_model.generation_defaults))
        for index, prompt in enumerate(args.prompts):
            engine.add_request(str(index), _said(engine, prompt) if args.chat else prompt, params)
        streaming = len(args.prompts) * params.n == 1
        tokenizer = engine.s_model.tokenizer
        decode = tokenizer.backend.decode if tokenizer else str
        printer = _JsonPrinter() if args.json else _TextPrinter(streaming, "\n" * args.chat, decode)
        return _print_all(engine, printer)
    finally:
        engine.close()


def _given(args: argparse.Namespace, defaults: dict[str, Any]) -> dict[str, Any]:
    """Return ``defaults``, the model's sampling fields, overridden by the sampling flags in ``args``."""
    names = {field.name for field in fields(SamplingParams)} - {"seed"}  # --seed seeds the engine, not a request
    return defaults | {name: value for name, value in vars(args).items() if name in names and value not in (None, [])}


def _said(engine: LLMEngine, text: str) -> dict[str, Any]:
    """Return a prompt: the chat template with ``text`` as the user's message. Outputs repeat only ``text``."""
    if engine.s_model.tokenizer is None:
        raise ConfigError("--chat needs the tokenizer (no --skip-tokenizer-init)")
    return {
        "prompt": text,
        "prompt_token_ids": engine.s_model.tokenizer.encode_chat([{"role": "user", "content": text}]),
    }


def _print_all(engine: Any, printer: _JsonPrinter | _TextPrinter) -> int:
    """Run the engine and print every output; return 1 if a request failed. On Ctrl-C, print unfinished outputs too."""
    latest: dict[str, RequestOutput] = {}
    try:
        while engine.has_unfinished_requests():
            for output in engine.step():
                latest[output.request_id] = output
                printer.show(output)
    except KeyboardInterrupt:
        for output in latest.values():
            if not output.finished:
                printer.show(replace(output, finished=True))
        raise
    return _report_failures(list(latest.values()))


def _report_failures(outputs: list[RequestOutput]) -> int:
    failed = {
        out.request_id: each.stop_reason for out in outputs for each in out.outputs if each.finish_reason == "error"
    }
    for request_id, reason in failed.items():
        print(f"fastdecode: error: prompt {request_id}: {reason}", file=sys.stderr)
    return int(bool(failed))


class _JsonPrinter:
    def show(self, output: RequestOutput) -> None:
        """Print a finished output as one line of JSON; ignore others."""
        if output.finished:
            print(json.dumps(output.to_dict(), ensure_ascii=False), flush=True)


class _TextPrinter:
    """Streams a single text as it grows; prints several requests as each finishes."""

    def __init__(
        self, streaming: bool, after_prompt: str = "", decode: Callable[[list[int]], str] = lambda ids: str(ids)
    ) -> None:
        self.streaming, self._decode = streaming, decode
        self._after_prompt = after_prompt
        self._shown = -1

    def show(self, output: RequestOutput) -> None:
        """Print the new text of ``output`` when streaming. Otherwise, print the whole text when it is finished."""
        if self.streaming:
            self._stream(output)
        elif output.finished:
            for completion in output.outputs:
                print(f"{output.prompt}{self._after_prompt}{completion.text}", flush=True)
                self._show_sources(output, completion)
                print("─" * 40, flush=True)

    def _show_sources(self, output: RequestOutput, completion: CompletionOutput) -> None:
        """Print a line per token: its text, and each block it attended to with weight, token numbers and text."""
        context = [*output.prompt_token_ids, *completion.token_ids]
        for token, sources in zip(completion.token_ids, completion.attention_sources or (), strict=False):
            told = [
                f"{each.weight:4.0%} {each.first}-{each.last} {self._decode(context[each.first : each.last + 1])!r}"
                for each in sources or ()
            ]
            print(f"{self._decode([token])!r:>16}  {'  '.join(told) or 'unknown'}", flush=True)

    def _stream(self, output: RequestOutput) -> None:
        if self._shown < 0:
            sys.stdout.write((output.prompt or "") + self._after_prompt)
            self._shown = 0
        text = output.outputs[0].text
        sys.stdout.write(text[self._shown :])
        self._shown = max(self._shown, len(text))
        if output.finished:
            sys.stdout.write("\n")
            self._show_sources(output, output.outputs[0])
        sys.stdout.flush()
