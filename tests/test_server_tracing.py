"""OpenTelemetry spans that a collector gets over HTTP from a server that answers real requests."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from helpers.processes import PATIENCE_SECONDS
from helpers.servers import CHAT_TEMPLATE, serving, stream
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from fastdecode import SamplingParams
from fastdecode.core.errors import ConfigError
from fastdecode.server import tracing
from fastdecode.server.exchanges import Exchange, PromptTokens
from fastdecode.server.server_settings import ServerSettings
from fastdecode.server.tracing import RequestTracer

pytestmark = pytest.mark.slow

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
LATENCIES = ("time_in_queue", "time_to_first_token", "e2e", "time_in_model_prefill", "time_in_model_decode")


class Collector:
    """A collector of OTLP over HTTP at ``url``, which keeps the spans by request."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.services: set[str] = set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf":
                    collector.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1/traces"

    def take(self, sent: ExportTraceServiceRequest) -> None:
        for resource in sent.resource_spans:
            self.services |= {str(attributes(resource.resource)["service.name"])}
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    thread = threading.Thread(target=found.http.serve_forever)
    thread.start()
    yield found
    found.http.shutdown()
    thread.join()
    found.http.server_close()


def attributes(told: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in told.attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found


def test_a_collector_gets_a_span_per_prompt(tmp_path: Path, collector: Collector) -> None:
    """Spans belong to the trace of the request's header unless it is not recorded; the last come at the end."""
    asked = {"prompt": ["def f(", "import "], "max_tokens": 6, "temperature": 0, "top_p": 0.5, "ignore_eos": True}
    flags = ["--otlp-traces-endpoint", collector.url, "--chat-template", CHAT_TEMPLATE, "--served-model-name", "demo"]
    start = time.time_ns()
    with serving(tmp_path, *flags) as server:
        recorded = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        status, answer = server.request("/v1/completions", asked, recorded)
        assert status == 200
        not_recorded = {"traceparent": f"00-{'1' * 32}-{PARENT}-00"}
        assert server.request("/v1/completions", asked, not_recorded)[0] == 200
        gone = asyncio.run(stream(server, {**asked, "prompt": "x", "max_tokens": 200}, leave_after=3))
        assert gone.status == 200
        asked_of_chat = {"input": "hi", "max_output_tokens": 2}
        assert server.request("/v1/responses", asked_of_chat, {"traceparent": "nonsense"})[0] == 200
        server.process.terminate()
        assert server.process.wait(PATIENCE_SECONDS) == 0
        assert "Traceback" not in server.log.read_text()
    spans = collector.spans
    assert {span.name for span in spans} == {"llm_request"} and {span.kind for span in spans} == {Span.SPAN_KIND_SERVER}
    assert len(spans) == 4 and collector.services == {"fastdecode"}
    assert all(start < span.start_time_unix_nano < span.end_time_unix_nano < time.time_ns() for span in spans)
    for number, span in enumerate(spans[:2]):
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
        found = attributes(span)
        assert found["gen_ai.request.id"] == f"{answer['id'].removeprefix('cmpl-')}-{number}"
        # The prompt includes the token that begins a text.
        assert found["gen_ai.usage.prompt_tokens"] == (7, 8)[number]
        assert found["gen_ai.usage.completion_tokens"] == found["gen_ai.request.max_tokens"] == 6
        assert (found["gen_ai.request.temperature"], found["gen_ai.request.top_p"]) == (0, 0.5)
        assert (found["gen_ai.request.n"], found["gen_ai.response.model"]) == (1, "demo")
        assert found["gen_ai.response.finish_reasons"] == ["length"]
        queue, first, whole, prefill, decode = (found[f"gen_ai.latency.{name}"] for name in LATENCIES)
        assert 0 < queue < first < whole and abs(queue + prefill + decode - whole) < 1e-6
        seconds = (span.end_time_unix_nano - span.start_time_unix_nano) * 1e-9
        assert abs(seconds - whole) < 1e-3 and span.status.code == Status.STATUS_CODE_UNSET
    left, chat = spans[2:]
    assert left.status.code == Status.STATUS_CODE_ERROR and "gone" in left.status.message
    assert not left.parent_span_id and not chat.parent_span_id and chat.trace_id != left.trace_id
    assert attributes(chat)["gen_ai.usage.completion_tokens"] == 2


def test_a_collector_that_is_away_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "LAST_SPANS_SECONDS", 0.5)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "600")  # The exporter would try again for so many seconds.
    tracer = RequestTracer("http://127.0.0.1:9/v1/traces", "demo")
    exchange = Exchange("1", [PromptTokens([1, 2])], SamplingParams())
    tracer.ended(exchange, tracer.context({}))
    start = time.monotonic()
    tracer.close()
    assert time.monotonic() - start < PATIENCE_SECONDS


def test_what_is_missing_or_wrong_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="otlp_traces_endpoint must begin with http"):
        ServerSettings(otlp_traces_endpoint="127.0.0.1:4317")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'fastdecode\[otel\]'"):
        RequestTracer("http://127.0.0.1:4318/v1/traces", "demo")
