"""Plans of a calibration: the sizes to measure, complete or quick."""

from __future__ import annotations

from dataclasses import dataclass

from fastdecode.api.engine_fields import KV_CACHE_DTYPES
from fastdecode.core.machine import usable_cores
from fastdecode.perfmodel.measurements import (
    HERE,
)
from fastdecode.perfmodel.model_shape import ModelShape


@dataclass(frozen=True)
class CalibrationPlan:
    """The sizes that a calibration measures.

    ``s_threads``, ``r_threads``: of local S-worker and R-workers, each measured alone. ``groups``: query heads per KV
    head. ``r_shapes``: (sequences, context). ``links``: "inproc", "spawn" or "host:port". ``contended``: (S threads, R
    threads) measured together. ``rounds``: samples of each measurement, taken again up to ``most_tries`` times while
    the machine's speed changes. ``num_ranks``: latent attention is also measured with the heads of one of so many
    ranks.
    """

    batch_sizes: tuple[int, ...]
    s_threads: tuple[int, ...]
    r_threads: tuple[int, ...]
    kv_dtypes: tuple[str, ...]
    groups: tuple[int, ...]
    r_shapes: tuple[tuple[int, int], ...]
    links: tuple[str, ...]
    message_rows: tuple[int, ...]
    contended: tuple[tuple[int, int], ...]
    rounds: int
    most_tries: int
    num_ranks: int = 1

    @property
    def is_here(self) -> bool:
        """True if the R-workers run on this machine."""
        return bool({"inproc", "spawn"} & set(self.links))

    @property
    def r_workers(self) -> tuple[str, ...]:
        """The names of the measured R-workers in the profile."""
        return (HERE,) if self.is_here else self.links

    @property
    def num_measurements(self) -> int:
        """The number of measurements, each one tick of the progress bar."""
        r_workers = len(self.r_threads) if self.is_here else len(self.links)
        r_part = r_workers * len(self.kv_dtypes) * len(self.r_shapes)
        s_part, links = len(self.s_threads) * len(self.batch_sizes), len(self.links) * len(self.message_rows)
        return s_part + r_part + links + len(self.contended) * len(self.groups)


def full_plan(shape: ModelShape, links: tuple[str, ...], on_gpu: bool) -> CalibrationPlan:
    """Return a plan that measures all that ``plan``, ``simulate`` and ``validate`` may need of this machine."""
    cores = len(usable_cores())
    threads = tuple(sorted({max(1, cores // 2), cores}))
    here = "inproc" in links
    # On a CPU the S-worker uses another matrix product above 128 rows, so sizes lie close around 128
    cpu_batch_sizes = (16, 32, 64, 128, 160, 256)
    gpu_batch_sizes = (16, 64, 128, 256, 512, 1024, 2048, 4096)
    return CalibrationPlan(
        batch_sizes=gpu_batch_sizes if on_gpu else cpu_batch_sizes,
        s_threads=(1,) if on_gpu else threads,
        r_threads=threads,
        kv_dtypes=KV_CACHE_DTYPES[1:],
        groups=(shape.group,) if shape.latent else _groups(shape),
        r_shapes=((16, 128), (128, 128), (16, 1024), (32, 1024), (8, 4096)),
        links=links,
        message_rows=(16, 64, 256, 1024),
        contended=((cores // 2, cores // 2),) if here and cores > 1 and not on_gpu else (),
        rounds=5,
        most_tries=3,
    )


def _groups(shape: ModelShape) -> tuple[int, ...]:
    """Return the numbers of query heads per KV head to measure: the model's own number, and common numbers."""
    return tuple(sorted({shape.group, *(group for group in (1, 4, 8) if shape.num_heads % group == 0)}))


def quick_plan(shape: ModelShape, kv_dtype: str, links: tuple[str, ...], on_gpu: bool) -> CalibrationPlan:
    """Return a plan that measures only this model and KV dtype on all cores, in under a minute."""
    cores = len(usable_cores())
    return CalibrationPlan(
        batch_sizes=(16, 64, 256),
        s_threads=(1 if on_gpu else cores,),
        r_threads=(cores,),
        kv_dtypes=(kv_dtype,),
        groups=(shape.group,),
        r_shapes=((64, 128), (16, 1024)),
        links=links[:1] if links[0] in ("inproc", "spawn") else links,
        message_rows=(16, 256),
        contended=(),
        rounds=2,
        most_tries=1,
    )
