"""Run fuzz targets without libFuzzer, on random inputs.

This serves Pythons for which atheris has no wheel, such as ARM's under qemu (``make arm-python``).

python fuzz/unguided.py --runs 200 session answers
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class Provider:
    """The methods of atheris.FuzzedDataProvider that targets use. When all bytes are used up, values are zeros."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def remaining_bytes(self) -> int:
        return len(self._data)

    def ConsumeBytes(self, count: int) -> bytes:
        """Return up to ``count`` bytes."""
        taken, self._data = self._data[:count], self._data[count:]
        return taken

    def ConsumeIntInRange(self, low: int, high: int) -> int:
        """Return a number from ``low`` to ``high``, both included."""
        size = ((high - low).bit_length() + 7) // 8
        return low + int.from_bytes(self.ConsumeBytes(size), "little") % (high - low + 1)

    def ConsumeBool(self) -> bool:
        return bool(self.ConsumeIntInRange(0, 1))

    def PickValueInList(self, values: Sequence[Any]) -> Any:
        return values[self.ConsumeIntInRange(0, len(values) - 1)]

    def ConsumeUnicode(self, count: int) -> str:
        """Return up to ``count`` characters, among them lone surrogates."""
        taken = self.ConsumeBytes(2 * count)
        return taken[: len(taken) // 2 * 2].decode("utf-16-le", "surrogatepass")


def targets() -> dict[str, Any]:
    """Return the targets of `one.py`, with this provider instead of atheris's."""
    atheris: Any = ModuleType("atheris")
    atheris.FuzzedDataProvider = Provider
    sys.modules["atheris"] = atheris
    import parsers
    import sessions

    return parsers.TARGETS | sessions.TARGETS


def main() -> None:
    known = targets()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="TARGET", help=f"{', '.join(known)}; all if none is named")
    parser.add_argument("--runs", type=int, default=1000, help="runs of each target (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of random choices (%(default)s)")
    options = parser.parse_args()
    for name in options.names or known:
        draw = random.Random(options.seed)
        for run in range(options.runs):
            data = draw.randbytes(draw.randint(0, 600))
            try:
                known[name](data)
            except Exception:
                print(f"{name}: input {run} of seed {options.seed}: {data.hex()}", file=sys.stderr)
                raise
        print(f"{name}: {options.runs} inputs", flush=True)


if __name__ == "__main__":
    main()
