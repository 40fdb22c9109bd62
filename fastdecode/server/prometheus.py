"""Metrics for Prometheus, with vLLM's names after the prefix ``fastdecode:``."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from fastdecode.api.outputs import RequestOutput
from fastdecode.core.metrics import PoolChanges, StepRecord
from fastdecode.scheduler import DraftCounts
from fastdecode.server.engine_state import EngineState, SessionState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "fastdecode:"

_FAST = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80,
)  # fmt: skip
_WHOLE = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_LENGTHS = tuple(digit * 10**power for power in range(7) for digit in (1, 2, 5))

_HISTOGRAMS = {
    "time_to_first_token_seconds": ((
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
    2560,
), "From arrival to the first token"),
    "inter_token_latency_seconds": (_FAST, "From one token to the next"),
    "time_per_output_token_seconds": (_FAST, "Mean time between the tokens of a finished request"),
    "request_time_per_output_token_seconds": (_FAST, "The same time, under vLLM's newer name"),
    "e2e_request_latency_seconds": (_WHOLE, "From arrival to the last token"),
    "request_queue_time_seconds": (_WHOLE, "From arrival to the step in which the prompt began"),
    "request_prefill_time_seconds": (_WHOLE, "From the step in which the prompt began to the first token"),
    "request_decode_time_seconds": (_WHOLE, "From the first token to the last"),
    "request_inference_time_seconds": (_WHOLE, "From the step in which the prompt began to the last token"),
    "request_prompt_tokens": (_LENGTHS, "Prompt tokens of a finished request"),
    "request_generation_tokens": (_LENGTHS, "Tokens generated for a finished request"),
    "iteration_tokens_total": (_LENGTHS, "Tokens computed in a step"),
}  # fmt: skip


class Histogram:
    """Counts observed values per bucket. ``bounds``: the buckets' upper bounds; one more bucket has no bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = np.array(bounds, float)
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._sum = 0.0

    def observe(self, values: Sequence[float]) -> None:
        """Add each of ``values`` to its bucket and to the sum."""
        if values:
            found = np.asarray(values, float)
            self._counts += np.bincount(np.searchsorted(self._bounds, found), minlength=len(self._counts))
            self._sum += float(found.sum())

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Return upper bound and cumulative count of each bucket, and the sum of all values."""
        names = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
        return list(zip(names, np.cumsum(self._counts).tolist(), strict=True)), self._sum


class Metrics:
    """Prometheus metrics. The engine's thread updates them after each step; the event loop reads them."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._lock = threading.Lock()
        self._histograms = {name: Histogram(bounds) for name, (bounds, _) in _HISTOGRAMS.items()}
        self._counts: Counter[str] = Counter()
        self._ends: Counter[str] = Counter()
        self._r_seconds: Counter[str] = Counter()
        self._transfer_seconds: Counter[str] = Counter()
        self._state: EngineState | None = None
        self.num_api_requests: Callable[[], int] = int
        self.stored_responses: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self.num_tasks = 0
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def after_step(
        self, state: EngineState, records: Sequence[StepRecord], outputs: Sequence[RequestOutput], prefix_caching: bool
    ) -> None:
        """Add the steps ``records`` and the ``outputs`` since the last call. ``state``: the engine's present state."""
        with self._lock:
            self._state = state
            for record in records:
                self._count_step(record, state)
            self._forget_gone(state)
            first = [output for output in outputs if len(output.metrics.moments) == 1]
            self._count_starts(first, prefix_caching)
            moments = (output.metrics.moments for output in outputs)
            self._observe("inter_token_latency_seconds", [each[-1] - each[-2] for each in moments if len(each) > 1])
            self._count_ends([output for output in outputs if output.finished])

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            yield from self._histogram_families()
            yield from self._counter_families()
            if self._state:
                yield from self._gauge_families(self._state)

    def _count_step(self, record: StepRecord, state: EngineState) -> None:
        self._counts.update(
            generation_tokens=record.num_output_tokens,
            steps=1,
            kv_bytes_read=record.kv_bytes_read,
        )
        for name in ("s", "wait", "host"):
            self._counts[f"{name}_seconds"] += getattr(record, f"{name}_seconds")
        for worker, busy, transfer in zip(state.r_workers, record.r_seconds, record.transfer_seconds, strict=False):
            self._r_seconds[worker.name] += busy  # type: ignore[assignment]
            self._transfer_seconds[worker.name] += transfer  # type: ignore[assignment]
        self._observe("iteration_tokens_total", [record.num_tokens])

    def _forget_gone(self, state: EngineState) -> None:
        """Remove the time series of R-workers that ``state`` no longer has, which would otherwise accumulate."""
        present = {worker.name for worker in state.r_workers if worker.present}
        for seconds in (self._r_seconds, self._transfer_seconds):
            for name in seconds.keys() - present:
                del seconds[name]

    def _count_starts(self, outputs: Iterable[RequestOutput], prefix_caching: bool) -> None:
        times = [(each.metrics.arrival_seconds, each.metrics.started_seconds, each) for each in outputs]
        for arrival, started, output in times:
            first = output.metrics.moments[0]
            begun = first if started is None else started
            self._counts["prompt_tokens"] += len(output.prompt_token_ids)
            self._counts["prefix_cache_queries"] += len(output.prompt_token_ids) * prefix_caching
            self._observe("time_to_first_token_seconds", [first - arrival])
            self._observe("request_queue_time_seconds", [begun - arrival])
            self._observe("request_prefill_time_seconds", [first - begun])

    def _count_ends(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            arrival, moments = output.metrics.arrival_seconds, output.metrics.moments
            for each in output.outputs:
                self._ends[each.finish_reason or ""] += 1
            self._observe("request_prompt_tokens", [len(output.prompt_token_ids)])
            self._observe("request_generation_tokens", [sum(len(each.tokens) for each in output.outputs)])
            if not moments:
                continue
            started = output.metrics.started_seconds
            self._observe("e2e_request_latency_seconds", [moments[-1] - arrival])
            self._observe("request_decode_time_seconds", [moments[-1] - moments[0]])
            self._observe("request_inference_time_seconds", [moments[-1] - (started or arrival)])
            most = max(len(each.tokens) for each in output.outputs)
            if most > 1:
                mean = (moments[-1] - moments[0]) / (most - 1)
                self._observe("time_per_output_token_seconds", [mean])
                self._observe("request_time_per_output_token_seconds", [mean])

    def _observe(self, name: str, values: Sequence[float]) -> None:
        self._histograms[name].observe(values)

    def _histogram_families(self) -> Iterator[Metric]:
        for name, histogram in self._histograms.items():
            family = HistogramMetricFamily(PREFIX + name, _HISTOGRAMS[name][1], labels=["model_name"])
            family.add_metric([self._model_name], *histogram.buckets())
            yield family

    def _counter_families(self) -> Iterator[Metric]:
        state = self._state
        counts = {
            "prompt_tokens": "Prompt tokens of requests that have begun",
            "generation_tokens": "Tokens generated",
            "prefix_cache_queries": "Prompt tokens that were looked up in the prefix cache",
            "steps": "Steps of the engine",
            "s_seconds": "Seconds in which the S-worker ran model code",
            "wait_seconds": "Seconds in which the S-worker waited for R-workers",
            "host_seconds": "Seconds in which it scheduled and kept its tables",
            "kv_bytes_read": "Bytes of KV cache that R-workers read",
        }
        for name, text in counts.items():
            yield self._counter(name, text, self._counts[name])
        changes = state.changes if state else PoolChanges()
        comings = {"joined": "have joined", "left": "were let go", "lost": "were lost"}
        for name, text in comings.items():
            yield self._counter(f"r_workers_{name}", f"R-workers that {text}", getattr(changes, name))
        text = "Rows of attention that audits compared"
        yield self._counter("audited_rows", text, changes.audited)
        text = "Differences for which audits named no R-worker"
        yield self._counter("audits_undecided", text, changes.undecided)
        text = "R-workers that audits found at fault, by name"
        yield self._labelled("r_workers_faulty", text, "r_worker", Counter(changes.faulty))
        yield self._counter("num_preemptions", "Sequences that were preempted", state.num_preemptions if state else 0)
        hits = state.prefix_hit_tokens if state else 0
        yield self._counter("prefix_cache_hits", "Prompt tokens that were found in the prefix cache", hits)
        woken = state.woken_tokens if state else 0
        by_level = Counter({"ram": max(0, hits - woken), "disk": woken})
        text = "Prompt tokens found, by where they were: in memory, or read back from a disk"
        yield self._labelled("prefix_cache_level_hits", text, "level", by_level)
        text = "Prefixes that were on a disk and could not be read back"
        yield self._counter("prefix_wakes_failed", text, state.failed_wakes if state else 0)
        yield from self._draft_families(state.drafts if state else DraftCounts())
        yield self._labelled("request_success", "Sequences that ended, by reason", "finished_reason", self._ends)
        yield self._labelled("r_seconds", "Seconds in which an R-worker was busy", "r_worker", self._r_seconds)
        text = "Seconds from sending rows to receiving outputs, without busy and queued time"
        yield self._labelled("transfer_seconds", text, "r_worker", self._transfer_seconds)

    def _draft_families(self, drafts: DraftCounts) -> Iterator[Metric]:
        """Yield the metrics of draft tokens under vLLM's names."""
        yield self._counter("spec_decode_num_drafts", "Verifications of draft tokens", drafts.num_drafts)
        yield self._counter("spec_decode_num_draft_tokens", "Draft tokens verified", drafts.num_draft_tokens)
        accepted = drafts.num_accepted_tokens
        yield self._counter("spec_decode_num_accepted_tokens", "Draft tokens accepted", accepted)
        by_position = Counter({str(place): n for place, n in enumerate(drafts.num_accepted_tokens_per_pos)})
        name, text = "spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted, by position"
        yield self._labelled(name, text, "position", by_position)

    def _session_families(self, session: SessionState) -> Iterator[Metric]:
        text = "Servers that have had the session, one after another, this one included"
        family = GaugeMetricFamily(PREFIX + "session_epoch", text, labels=["model_name", "session"])
        family.add_metric([self._model_name, session.name], session.epoch)
        yield family
        count, num_bytes = self.stored_responses()
        for name, text, value in (
            ("journal_bytes", "Bytes of the journal's file", session.journal_bytes),
            ("stored_responses", "Responses that are stored", count),
            ("stored_response_bytes", "Bytes that they take on disk", num_bytes),
        ):
            yield self._gauge(name, text, value)
        text = "Seconds in which steps have waited for the journal"
        yield self._counter("journal_seconds", text, session.journal_seconds)

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _labelled(self, name: str, text: str, label: str, values: Counter[str]) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=["model_name", label])
        for each, value in values.items():
            family.add_metric([self._model_name, each], value)
        return family

    def _gauge_families(self, state: EngineState) -> Iterator[Metric]:
        present = [worker for worker in state.r_workers if worker.present]
        gauges = {
            "num_requests_running": ("Sequences that hold a cache", state.num_running),
            "num_requests_waiting": ("Sequences that wait", state.num_waiting),
            "kv_cache_usage_perc": ("Part of all KV blocks that sequences hold; 1 is all", state.kv_cache_usage),
            "r_workers_alive": ("R-workers that are connected", len(present)),
            "num_api_requests": ("HTTP requests that are being answered with text", self.num_api_requests()),
            "server_tasks": ("Tasks of the server's event loop, this request's among them", self.num_tasks),
        }
        for name, (text, value) in gauges.items():
            yield self._gauge(name, text, value)
        if state.session:
            yield from self._session_families(state.session)
        text = "Sequences that hold a cache, by the number of R-workers that hold it"
        family = GaugeMetricFamily(PREFIX + "sequences_with_copies", text, labels=["model_name", "copies"])
        for number, count in (("1", state.pool.once), ("2", state.pool.twice)):
            family.add_metric([self._model_name, number], count)
        yield family
        by_worker = {
            "r_worker_kv_load_tokens": ("KV tokens that an R-worker attended in the last step", "kv_load"),
            "r_worker_kv_load_limit_tokens": ("Limit of the KV tokens that it attends in a step", "kv_load_limit"),
            "r_worker_sequences": ("Sequences whose cache it holds", "num_sequences"),
            "r_worker_kv_blocks_used": ("KV blocks that sequences hold there", "blocks_used"),
            "r_worker_kv_blocks": ("KV blocks that it has", "num_blocks"),
            "r_worker_parked_bytes": ("Bytes of prefixes on its disk", "parked_bytes"),
        }
        for name, (text, attribute) in by_worker.items():
            family = GaugeMetricFamily(PREFIX + name, text, labels=["model_name", "r_worker"])
            for worker in present:
                if getattr(worker, attribute) is not None:
                    family.add_metric([self._model_name, worker.name], getattr(worker, attribute))
            yield family
