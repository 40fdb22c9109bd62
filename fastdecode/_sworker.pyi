"""What the S-part computes between its matrix products, in C++ on one thread (knows no torch).

Rows are float32, or uint16 with the bits of bfloat16; all arrays C-contiguous but ``rotate``'s x. ValueError for a
shape that does not fit or an unknown ``isa``, TypeError for another dtype.
"""

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.float32] | npt.NDArray[np.uint16]

def supported_isas() -> list[str]:
    """Which of "scalar", "avx2" and "avx512" this CPU can run, best last."""

def rms_norm(
    x: Rows, weight: npt.NDArray[np.float32], eps: float, round_first: bool, out: Rows, isa: str = "auto"
) -> None:
    """``out`` = x / sqrt(mean(x²) + eps) · weight, x and out [rows, dim], weight [dim]; mean and scale in float32.

    ``round_first``: to the rows' dtype before the weight is applied.
    """

def rotate(x: Rows, cos: Rows, sin: Rows, out: Rows, isa: str = "auto") -> None:
    """``out`` = x · cos + rotate_half(x) · sin; x and out [rows, heads, dim], cos and sin [rows, dim], dim even.

    x may have gaps between its rows, nowhere else.
    """
