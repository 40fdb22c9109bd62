"""How close attention comes to what the machine gives: the roofline of one shape."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Roofline:
    """``kv_bytes`` must be read and ``multiply_adds`` done, one per cached element and query head that attends to it;
    the machine reads scattered pieces of its size at ``scattered_read`` GB/s and does ``mac_peak`` 1e9 multiply-adds a
    second."""

    kv_bytes: int
    multiply_adds: int
    scattered_read: float
    mac_peak: float

    @property
    def arithmetic_gb_per_s(self) -> float:
        """KV rate at which arithmetic would be the limit: without a shared prefix, the multiply-add peak times the
        bytes of an element, over query heads per KV head and query tokens."""
        return self.mac_peak * self.kv_bytes / self.multiply_adds

    @property
    def gb_per_s(self) -> float:
        """The most KV a call can go through: min(scattered read, multiply-add peak × intensity)."""
        return min(self.scattered_read, self.arithmetic_gb_per_s)
