"""Calibration: measures real engines and R-workers at several sizes, and makes a hardware profile of the times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np

from fastdecode.api.config import EngineConfig
from fastdecode.core.dtypes import WIRE_DTYPE
from fastdecode.kinds import Layer
from fastdecode.kinds.layout import KVLayout
from fastdecode.perfmodel.calibration import Anchor, steadily
from fastdecode.perfmodel.deployment import this_machine
from fastdecode.perfmodel.lab.measure.attention_rig import AttentionRig
from fastdecode.perfmodel.lab.measure.calibration_plan import CalibrationPlan
from fastdecode.perfmodel.lab.measure.decode_rig import DecodeRig, InstantBackend
from fastdecode.perfmodel.lab.measure.samples import (
    ANCHOR_CONTEXT,
    ANCHOR_SEQUENCES,
    BETWEEN_LAYERS_SECONDS,
    FEW_LAYERS,
    MANY_LAYERS,
    R_LAYERS,
    SHORT_CONTEXT,
    link_measured,
    measure_contention,
    measuring,
    r_anchor_seconds,
    r_samples,
    r_worker_config,
    s_anchor_seconds,
    s_samples,
    with_layers,
)
from fastdecode.perfmodel.measurements import (
    HERE,
    AnchorPoint,
    ContentionPoint,
    HostPoint,
    LinkPoint,
    PlanPoint,
    RPartPoint,
    SPartPoint,
)
from fastdecode.perfmodel.model_shape import ModelShape
from fastdecode.perfmodel.profile import HardwareProfile
from fastdecode.perfmodel.rank_costs import rank_shape


class Calibrator:
    """Carries out a ``CalibrationPlan``. It calls ``advance`` after each measurement."""

    def __init__(
        self, config: EngineConfig, shape: ModelShape, plan: CalibrationPlan, advance: Callable[[], object]
    ) -> None:
        self.plan, self.shape = plan, shape
        self.config, self._given = measuring(config), config
        self._advance = advance
        self._isa = ""

    def run(self) -> HardwareProfile:
        """Measure everything and return the profile."""
        with ExitStack() as cleanup:
            few, many = (cleanup.enter_context(self._s_rig(layers)) for layers in (FEW_LAYERS, MANY_LAYERS))
            s_anchors = {
                threads: Anchor.of(partial(s_anchor_seconds, many, threads)) for threads in self.plan.s_threads
            }
            device_name = many.engine.s_model.device_name
            s_part, host = self._s_part(few, many, s_anchors)
        r_part, r_anchors = self._r_part()
        links, plans = self._links()
        return HardwareProfile(
            machine=this_machine(device_name, ",".join(self.plan.r_workers), self._isa),
            shape=self.shape,
            s_part=s_part,
            r_part=r_part,
            links=links,
            host=host,
            plans=plans,
            contention=self._contention(),
            anchors=tuple(
                AnchorPoint(part, threads, anchor.reference_seconds)
                for part, anchors in (("s", s_anchors), ("r", r_anchors))
                for threads, anchor in anchors.items()
            ),
        )

    def _s_part(
        self, few: DecodeRig, many: DecodeRig, anchors: dict[int, Anchor]
    ) -> tuple[tuple[SPartPoint, ...], tuple[HostPoint, ...]]:
        s_part, host = [], []
        for threads, anchor in anchors.items():
            for batch_size in self.plan.batch_sizes:
                sample = partial(s_samples, few, many, batch_size, threads, self.plan.rounds)
                steadied = steadily([anchor], sample, self.plan.most_tries)[0]
                layer, head, engine = (steadied.measured(column) for column in range(3))
                s_part.append(SPartPoint(batch_size, layer.seconds, max(head.seconds, 0.0), layer.spread, threads))
                if threads == self.plan.s_threads[-1]:
                    host.append(HostPoint(batch_size, engine.seconds, engine.spread))
                self._advance()
        return tuple(s_part), tuple(host)

    def _r_part(self) -> tuple[tuple[RPartPoint, ...], dict[int, Anchor]]:
        if not self.plan.is_here:
            elsewhere = product(self.plan.r_workers, self.plan.kv_dtypes)
            return tuple(point for each in elsewhere for point in self._r_points(*each, None, ())), {}
        points: list[RPartPoint] = []
        anchors: dict[int, Anchor] = {}
        for threads in self.plan.r_threads:
            with self._r_anchor(threads) as anchor:
                anchors[threads] = anchor
                for kv_dtype in self.plan.kv_dtypes:
                    points += self._r_points(HERE, kv_dtype, threads, (anchor,))
        return tuple(points), anchors

    def _r_points(
        self, r_worker: str, kv_dtype: str, threads: int | None, anchors: tuple[Anchor, ...]
    ) -> Iterator[RPartPoint]:
        """Yield an R-worker's times: attention by query heads per KV head, absorbed latents, index scans, states.
        ``anchors``: () for a remote R-worker, since it serves one S-worker at a time.
        """
        shapes = [self.shape.with_kv_heads(self.shape.num_heads // group) for group in self.plan.groups]
        if self.shape.latent and self.plan.num_ranks > 1:
            shapes.append(rank_shape(self.shape, self.plan.num_ranks))
        kinds = [("rows", shape.num_heads, shape.num_kv_heads, shape.head_dim) for shape in shapes]
        measured: list[Layer] = [shape.layer_layout for shape in shapes]
        if self.shape.latent:
            kinds += [("absorbing", heads, kv_heads, dim) for _, heads, kv_heads, dim in kinds]
            measured += [shape.absorbing(True).layer_layout for shape in shapes]
        if index := self.shape.index:
            kinds.append(("scan", index.num_heads, 1, index.head_dim))
            measured.append(index.layer_layout)
        states = 0
        if state := self.shape.state:
            kinds.append(("state", state.heads, state.groups, state.value_dim))
            measured.append(state.layer_layout(self.shape.item_bytes))
            states = R_LAYERS * max(batch for batch, _ in self.plan.r_shapes)
        layers = tuple(layer for layer in measured for _ in range(R_LAYERS))
        layout = _with_weights(KVLayout(layers, self.shape.dtype, kv_dtype))
        tokens = max(batch * (context + 128) for batch, context in self.plan.r_shapes)
        of_states = states * layout.sequence_bytes(len(layers) - 1)
        with self._attention_rig(r_worker, threads, layout, tokens, of_states) as rig:
            for batch_size, context_len in self.plan.r_shapes:
                rig.fill(batch_size, context_len)
                rig.step()
                sample = partial(r_samples, rig, len(kinds), 2 * self.plan.rounds)
                steadied = steadily(anchors, sample, self.plan.most_tries)[0]
                for column, (kind, num_heads, num_kv_heads, head_dim) in enumerate(kinds):
                    found = steadied.measured(column)
                    yield RPartPoint(
                        kv_dtype, num_heads, num_kv_heads, head_dim, rig.r_workers[0].num_threads, batch_size,
                        context_len, found.seconds, found.spread, r_worker, kind,
                    )  # fmt: skip
                self._advance()

    def _links(self) -> tuple[tuple[LinkPoint, ...], tuple[PlanPoint, ...]]:
        links, plans = [], []
        layout = self.shape.some_layers(8)
        for name in self.plan.links:
            with self._attention_rig(name, None, layout, max(self.plan.message_rows) * 128) as rig:
                for rows in self.plan.message_rows:
                    rig.fill(rows, SHORT_CONTEXT)
                    rig.step(BETWEEN_LAYERS_SECONDS)
                    way, begin_end = link_measured(rig, self.plan.rounds)
                    message_bytes = rows * self.shape.attending_row_bytes
                    links.append(LinkPoint(name, message_bytes, max(way.seconds, 0.0), way.spread))
                    plans.append(PlanPoint(name, rows, begin_end.seconds, begin_end.spread))
                    self._advance()
        return tuple(links), tuple(plans)

    def _contention(self) -> tuple[ContentionPoint, ...]:
        found = []
        for (s_threads, r_threads), group in product(self.plan.contended, self.plan.groups):
            shape = self.shape.with_kv_heads(self.shape.num_heads // group)
            found.append(measure_contention(self.config, shape, s_threads, r_threads, self.plan.rounds))
            self._advance()
        return tuple(found)

    def _s_rig(self, num_layers: int) -> closing[DecodeRig]:
        return closing(DecodeRig(with_layers(self.config, num_layers), InstantBackend(self.config.block_size)))

    @contextmanager
    def _r_anchor(self, threads: int) -> Iterator[Anchor]:
        layout = self.shape.some_layers(R_LAYERS)
        tokens = ANCHOR_SEQUENCES * (ANCHOR_CONTEXT + 128)
        with self._attention_rig(HERE, threads, layout, tokens) as rig:
            rig.fill(ANCHOR_SEQUENCES, ANCHOR_CONTEXT)
            yield Anchor.of(partial(r_anchor_seconds, rig))

    def _attention_rig(
        self, r_worker: str, threads: int | None, layout: KVLayout, num_tokens: int, state_bytes: int = 0
    ) -> closing[AttentionRig]:
        base = self.config if self.plan.is_here else self._given
        num_bytes = num_tokens * layout.kv_bytes_per_token + layout.weight_bytes + 2 * state_bytes
        config = r_worker_config(base, r_worker, threads, num_bytes)
        rig = AttentionRig(config, layout)
        self._isa = rig.r_workers[0].isa
        return closing(rig)


def _with_weights(layout: KVLayout) -> KVLayout:
    """Return ``layout`` with zero weights for R-workers to multiply with. Zeros take as long as real weights."""
    weights = {}
    for number, layer in enumerate(layout.layers):
        if layer.weight_rows:
            rows = np.zeros((layer.num_heads, *layer.weight_rows), WIRE_DTYPE[layout.model_dtype])
            weights[number] = lambda rows=rows: rows
    return replace(layout, weights=weights)
