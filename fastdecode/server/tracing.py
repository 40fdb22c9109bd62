"""Sends OpenTelemetry spans: one per prompt, with the name and attributes of vLLM's ``llm_request``."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastdecode.api.outputs import RequestMetrics, RequestOutput
from fastdecode.core.errors import ConfigError
from fastdecode.server.exchanges import Exchange

if TYPE_CHECKING:
    from opentelemetry.context import Context

SPAN = "llm_request"

LAST_SPANS_SECONDS = 5.0
"""Most seconds that the ending server waits for the collector to accept the last spans."""


class RequestTracer:
    """Sends spans to a collector from a thread of its own. Spans are dropped if the collector cannot be reached.

    Only the event loop calls it. OpenTelemetry's environment variables apply: OTEL_SERVICE_NAME (default: fastdecode),
    OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS and so on.
    """

    def __init__(self, endpoint: str, model_name: str) -> None:
        """``endpoint``: the collector's URL for OTLP over HTTP. Raise ConfigError if OpenTelemetry is not installed."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import SERVICE_NAME, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(
                f"otlp_traces_endpoint needs OpenTelemetry ({error}): pip install 'fastdecode[otel]'"
            ) from None
        resource = Resource.create()
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "fastdecode"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("fastdecode")
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name

    def context(self, headers: Mapping[str, str]) -> Context:
        """Return the trace that ``traceparent`` and ``tracestate`` name. ``headers``: with names in lower case."""
        return self._propagator.extract(headers)

    def ended(self, exchange: Exchange, context: Context) -> None:
        """Create a span per prompt of ``exchange``, from its arrival to its end. ``context``: the request's trace."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        now = time.perf_counter()
        to_wall_clock = time.time() - now
        for request_id, prompt, output in zip(exchange.request_ids, exchange.prompts, exchange.outputs, strict=True):
            span = self._tracer.start_span(
                SPAN, context, SpanKind.SERVER, start_time=_nanoseconds(exchange.arrival_seconds + to_wall_clock)
            )
            span.set_attribute("gen_ai.request.id", request_id)
            span.set_attribute("gen_ai.response.model", self._model_name)
            span.set_attribute("gen_ai.usage.prompt_tokens", len(prompt.token_ids))
            span.set_attributes(_asked(exchange))
            end = now
            if output is not None:
                span.set_attributes(_done(output))
                end = output.metrics.token_seconds[-1] if output.finished and output.metrics.token_seconds else now
            if exchange.error is not None and (output is None or not output.finished):
                span.set_status(Status(StatusCode.ERROR, str(exchange.error)))
            span.end(_nanoseconds(end + to_wall_clock))

    def close(self) -> None:
        """Send the remaining spans, for at most LAST_SPANS_SECONDS."""
        last = threading.Thread(target=self._provider.shutdown, name="spans", daemon=True)
        last.start()
        last.join(LAST_SPANS_SECONDS)


def _asked(exchange: Exchange) -> dict[str, Any]:
    params = exchange.params
    found = {"temperature": params.temperature, "top_p": params.top_p, "n": params.n, "max_tokens": params.max_tokens}
    return {f"gen_ai.request.{name}": value for name, value in found.items() if value is not None}


def _done(output: RequestOutput) -> dict[str, Any]:
    reasons = [each.finish_reason for each in output.outputs if each.finish_reason]
    return {
        "gen_ai.usage.completion_tokens": sum(len(each.token_ids) for each in output.outputs),
        "gen_ai.response.finish_reasons": reasons,
        **{f"gen_ai.latency.{name}": seconds for name, seconds in _latencies(output.metrics).items()},
    }


def _latencies(metrics: RequestMetrics) -> dict[str, float]:
    """Return the latencies in ``metrics`` in seconds, by vLLM's attribute names."""
    arrival, moments = metrics.arrival_seconds, metrics.token_seconds
    if not moments:
        return {}
    first, last = moments[0], moments[-1]
    started = first if metrics.started_seconds is None else metrics.started_seconds
    return {
        "time_in_queue": started - arrival,
        "time_to_first_token": first - arrival,
        "e2e": last - arrival,
        "time_in_model_prefill": first - started,
        "time_in_model_decode": last - first,
        "time_in_model_inference": last - started,
    }


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
