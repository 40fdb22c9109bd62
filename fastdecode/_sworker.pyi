"""What the S-part computes between its matrix products, in C++ (knows no torch).

Rows are float32, or uint16 with the bits of bfloat16; all arrays C-contiguous but ``rotate``'s x. ValueError for a
shape that does not fit or an unknown ``isa``, TypeError for another dtype.
"""

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.float32] | npt.NDArray[np.uint16]

def supported_isas() -> list[str]:
    """Which of "scalar", "avx2" and "avx512" this CPU can run, best last."""

def rms_norm(
    x: Rows,
    weight: npt.NDArray[np.float32],
    eps: float,
    round_first: bool,
    out: Rows,
    threads: int = 1,
    isa: str = "auto",
) -> None:
    """``out`` = x / sqrt(mean(x²) + eps) · weight, x and out [rows, dim], weight [dim]; mean and scale in float32.

    ``round_first``: to the rows' dtype before the weight is applied.
    """

def rotate(x: Rows, cos: Rows, sin: Rows, out: Rows, threads: int = 1, isa: str = "auto") -> None:
    """``out`` = x · cos + rotate_half(x) · sin; x and out [rows, heads, dim], cos and sin [rows, dim], dim even.

    x may have gaps between its rows, nowhere else.
    """

def sum_weighted(
    parts: Rows, places: npt.NDArray[np.int64], weights: Rows, out: Rows, threads: int = 1, isa: str = "auto"
) -> None:
    """``out[row]`` = Σ parts[places[row, i]] · weights[row, i], added in float32 in the order of i.

    parts [_, dim], places and weights [rows, terms], out [rows, dim]. Each product is rounded to the parts' dtype.
    """

def multiply_in_order(
    x: npt.NDArray[np.float32],
    weight: npt.NDArray[np.float32],
    out: npt.NDArray[np.float32],
    threads: int = 1,
    isa: str = "auto",
) -> None:
    """``out`` [rows, columns] = x · weightᵀ, each sum in one order of additions; weight [columns, width]."""

Codes = npt.NDArray[np.int8]
Floats = npt.NDArray[np.float32]

def integer_isas() -> list[str]:
    """Which of "scalar", "avx2" and "avx512_vnni" this CPU can multiply integers with, best last."""

def use_openmp(region: int) -> None:
    """Run what takes ``threads`` on the team of OpenMP's GOMP_parallel at this address; 0: on one thread."""

def quantize(x: Rows, block: int, codes: Codes, scales: Floats, isa: str, threads: int) -> None:
    """Rotate ``x`` [rows, width] in blocks and quantize each row to ``codes`` [rows, width] times ``scales`` [rows]."""

class IntegerWeights:
    """The weights of a linear layer in int8, packed; rows are rotated and quantized as they are multiplied.

    ``activation`` "silu" or "gelu_tanh": rows are [rows, 2 · width], gates first, and activation(gate) · value is
    multiplied; "none": rows are [rows, width].
    """

    num_bytes: int
    def __init__(self, codes: Codes, scales: Floats, bias: Floats | None, block: int, threads: int) -> None:
        """``codes`` [columns, width], rotated in blocks; ``scales`` and ``bias`` [columns]."""

    def unpack(self) -> Codes:
        """The codes as they were given."""

    def multiply(self, x: Rows, out: Rows, activation: str, isa: str, threads: int) -> None:
        """``out`` [rows, columns] = x · weights + bias."""

    def find_peaks(self, x: Rows, peaks: Floats, activation: str, isa: str, threads: int) -> None:
        """The largest magnitude of each rotated row, by which it is quantized."""

    def add_up(
        self, x: Rows, peaks: Floats, sums: npt.NDArray[np.int32], activation: str, isa: str, threads: int
    ) -> None:
        """The exact sums [rows, columns] of rows that are quantized by ``peaks``."""

    def scale(self, sums: npt.NDArray[np.int32], peaks: Floats, out: Rows, isa: str, threads: int) -> None:
        """``out`` [rows, columns] of the sums of all ranks, and the bias."""

class IntegerExperts:
    """The weights of a mixture's experts, all of one shape and block. Rows of x are sorted by expert.

    ``ends``, int64 [experts], says up to which row of x each expert's rows reach. All other arguments are those of
    ``IntegerWeights``. One call shares all experts' work among threads.
    """

    experts: list[IntegerWeights]
    def __init__(self, experts: list[IntegerWeights]) -> None: ...
    def multiply(
        self, x: Rows, ends: npt.NDArray[np.int64], out: Rows, activation: str, isa: str, threads: int
    ) -> None:
        """``out`` [rows, columns]: each row times its expert's weights, and the bias."""

    def find_peaks(self, x: Rows, peaks: Floats, activation: str, isa: str, threads: int) -> None:
        """The largest magnitude of each rotated row."""

    def add_up(
        self,
        x: Rows,
        ends: npt.NDArray[np.int64],
        peaks: Floats,
        sums: npt.NDArray[np.int32],
        activation: str,
        isa: str,
        threads: int,
    ) -> None:
        """The exact sums [rows, columns] of rows that are quantized by ``peaks``."""

    def scale(
        self,
        sums: npt.NDArray[np.int32],
        ends: npt.NDArray[np.int64],
        peaks: Floats,
        out: Rows,
        isa: str,
        threads: int,
    ) -> None:
        """``out`` [rows, columns] of the sums of all ranks."""
