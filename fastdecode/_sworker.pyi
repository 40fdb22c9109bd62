"""The S-worker's C++: norms and rotary embeddings between matrix products, and int8 products. It knows no torch.

Rows are float32, or uint16 with the bits of bfloat16. All arrays are C-contiguous, except ``rotate``'s x. Functions
raise ValueError for a shape that does not fit or an unknown ``isa``, and TypeError for another dtype.
"""

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.float32] | npt.NDArray[np.uint16]

def supported_isas() -> list[str]:
    """Return which of "scalar", "avx2" and "avx512" this CPU supports, the best last."""

def rms_norm(
    x: Rows,
    weight: npt.NDArray[np.float32],
    eps: float,
    round_first: bool,
    out: Rows,
    threads: int = 1,
    isa: str = "auto",
    residual: Rows | None = None,
    total: Rows | None = None,
) -> None:
    """Set ``out`` = x / sqrt(mean(x²) + eps) · weight, with mean and scale in float32.

    ``x``, ``out``: [rows, dim]; ``weight``: [dim]. ``round_first``: round to the rows' dtype before the weight is
    applied. With ``residual``, x + residual is normalised before it is rounded, and ``total`` is set to it.
    """

def rotate(x: Rows, cos: Rows, sin: Rows, out: Rows, threads: int = 1, isa: str = "auto") -> None:
    """Set ``out`` = x · cos + rotate_half(x) · sin; x and out [rows, heads, dim], cos and sin [rows, dim], dim even.

    The rows of x may be apart in memory; each row is contiguous.
    """

def sum_weighted(
    parts: Rows, places: npt.NDArray[np.int64], weights: Rows, out: Rows, threads: int = 1, isa: str = "auto"
) -> None:
    """Set ``out[row]`` = Σ parts[places[row, i]] · weights[row, i], added in float32 in the order of i.

    parts [_, dim], places and weights [rows, terms], out [rows, dim]. Each product is rounded to the parts' dtype.
    """

def choose_likeliest(logits: Rows, tokens: npt.NDArray[np.int64], threads: int = 1, isa: str = "auto") -> None:
    """Set ``tokens`` [rows] to the index of the first largest logit in each row of ``logits`` [rows, vocab].

    The token is -1 if the row holds NaN or +inf, or nothing but -inf.
    """

def multiply_in_order(
    x: npt.NDArray[np.float32],
    weight: npt.NDArray[np.float32],
    out: npt.NDArray[np.float32],
    threads: int = 1,
    isa: str = "auto",
) -> None:
    """Set ``out`` [rows, columns] = x · weightᵀ; weight [columns, width]. Each sum always has the same order."""

Codes = npt.NDArray[np.int8]
Floats = npt.NDArray[np.float32]

def descend(
    moments: npt.NDArray[np.float64],
    gradient: npt.NDArray[np.float64],
    codes: Codes,
    unit: float,
    farthest: float,
    sweeps: int,
    threads: int = 1,
    isa: str = "auto",
) -> None:
    """Change ``codes`` q [rows, width] so that e · ``moments`` · e falls in each row, where e are the errors of q.

    ``gradient`` [rows, width]: e · ``moments``, in 1 / ``unit``; it is changed, too. ``farthest``: most steps between a
    code and its first value. All numbers are integers in float64 whose sums must stay below 2**53.
    """

def integer_isas() -> list[str]:
    """Return with which of "scalar", "avx2" and "avx512_vnni" this CPU can multiply integers, the best last."""

def use_openmp(region: int, thread_number: int) -> None:
    """Run functions with a ``threads`` argument on OpenMP's threads.

    ``region``, ``thread_number``: addresses of GOMP_parallel and omp_get_thread_num. With 0, functions use one thread.
    """

def quantize(x: Rows, block: int, codes: Codes, scales: Floats, isa: str, threads: int) -> None:
    """Rotate ``x`` [rows, width] in blocks and quantize each row to ``codes`` [rows, width] times ``scales`` [rows]."""

class IntegerWeights:
    """The packed int8 weights of a linear layer. Its methods rotate and quantize rows before they multiply them.

    ``activation`` "silu" or "gelu_tanh": rows are [rows, 2 · width], gates first, and activation(gate) · value is
    multiplied. "none": rows are [rows, width].
    """

    num_bytes: int
    def __init__(self, codes: Codes, scales: Floats, bias: Floats | None, block: int, threads: int) -> None:
        """``codes`` [columns, width], rotated in blocks; ``scales`` and ``bias`` [columns]."""

    def unpack(self) -> Codes:
        """Return the codes from which the weights were made."""

    def multiply(self, x: Rows, out: Rows, activation: str, isa: str, threads: int) -> None:
        """Set ``out`` [rows, columns] = x · weights + bias."""

    def find_peaks(self, x: Rows, peaks: Floats, activation: str, isa: str, threads: int) -> None:
        """Set ``peaks`` to the largest magnitude of each rotated row, from which the row's scale follows."""

    def add_up(
        self, x: Rows, peaks: Floats, sums: npt.NDArray[np.int32], activation: str, isa: str, threads: int
    ) -> None:
        """Set ``sums`` [rows, columns] to the exact integer products of rows that are quantized by ``peaks``."""

    def scale(self, sums: npt.NDArray[np.int32], peaks: Floats, out: Rows, isa: str, threads: int) -> None:
        """Set ``out`` [rows, columns] to ``sums``, added over all ranks, times their scales, plus the bias."""

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
        """Set ``out`` [rows, columns] to each row times its expert's weights, plus the bias."""

    def find_peaks(self, x: Rows, peaks: Floats, activation: str, isa: str, threads: int) -> None:
        """Set ``peaks`` [rows] to the largest magnitude of each rotated row."""

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
        """Set ``sums`` [rows, columns] to the exact integer products of rows that are quantized by ``peaks``."""

    def scale(
        self,
        sums: npt.NDArray[np.int32],
        ends: npt.NDArray[np.int64],
        peaks: Floats,
        out: Rows,
        isa: str,
        threads: int,
    ) -> None:
        """Set ``out`` [rows, columns] to ``sums``, added over all ranks, times their scales, plus the bias."""

Norm = tuple[Floats, float, bool]
"""A norm's weight [dim] (empty for no norm), its epsilon, and whether rows are rounded before the weight multiplies."""

class IntegerLayer:
    """A decoder layer's norms, rotary embedding and int8 products, in one call before attention and one after it."""

    def __init__(
        self,
        qkv: IntegerWeights,
        o: IntegerWeights,
        gate_up: IntegerWeights,
        down: IntegerWeights,
        input_norm: Norm,
        post_norm: Norm,
        q_norm: Norm,
        k_norm: Norm,
        heads: int,
        kv_heads: int,
        activation: str,
    ) -> None:
        """``q_norm``, ``k_norm``: over each head. Raise ValueError where shapes do not fit each other."""

    def before(self, x: Rows, cos: Rows, sin: Rows, q: Rows, k: Rows, v: Rows, isa: str, threads: int) -> None:
        """Set ``q`` [rows, heads, head_dim], and ``k``, ``v`` [rows, kv_heads, head_dim] from ``x`` [rows, hidden].

        ``cos``, ``sin``: [rows, head_dim], the angles of rotary embeddings.
        """

    def after(self, x: Rows, o: Rows, out: Rows, isa: str, threads: int) -> None:
        """Set ``out`` [rows, hidden], the layer's output for input ``x`` and attention's ``o`` [rows, heads · dim]."""
