"""The instruction sets that the R-workers of a pool use."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from fastdecode.core.types import RWorkerInfo, best_common_isa

logger = logging.getLogger(__name__)


class Arithmetic:
    """The instruction sets that the R-workers of a pool use; each rounds differently.

    ``of_merges``: the one for merging their partial results, "scalar" or "auto".
    """

    def __init__(self) -> None:
        self.of_merges = "auto"
        self._isas: dict[str, str] = {}

    def add(self, infos: Sequence[RWorkerInfo]) -> None:
        """Add R-workers; warn if they round differently from the earlier ones."""
        before = len(self._isas)
        for info in infos:
            self._isas.setdefault(info.isa, info.name)
        self.of_merges = "scalar" if set(self._isas) == {"scalar"} else "auto"
        if len(self._isas) > max(before, 1):
            logger.warning(
                "R-workers attend in different arithmetic (%s): a sequence that moves may get other tokens; "
                "--uniform-arithmetic %s makes all use one",
                ", ".join(f"{isa} on {name}" for isa, name in self._isas.items()),
                best_common_isa(self._isas),
            )
