"""Rounds the int8 weights of a model again, layer after layer, in one forward of random tokens.

The forward multiplies int8 weights. A layer is rounded when its input arrives, so later layers see the effect.
Only operations that have the same bits on every machine are allowed, so the weights have the same bits, too.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fastdecode import _sworker
from fastdecode.core.errors import ConfigError, FastDecodeError, ModelLoadError
from fastdecode.sworker.adapters.calls import DENSE, Calls
from fastdecode.sworker.model.code import ModelCode
from fastdecode.sworker.model.fused import FusedRows
from fastdecode.sworker.model.packed_weight import FileMaps, PackedWeight
from fastdecode.sworker.products.codes import IntegerCodes, Ranks, codes_of
from fastdecode.sworker.products.exact import attended, cosine
from fastdecode.sworker.products.gated import GatedLayers
from fastdecode.sworker.products.kernels import array, as_rows, integer_isa
from fastdecode.sworker.products.linears import IntegerProduct, ProductOfCodes, expert_counts, groups_of
from fastdecode.sworker.products.rounding import moments_of, round_again
from fastdecode.sworker.run.pipeline import ModelGreenlet

logger = logging.getLogger(__name__)

FLAG = "int8_calibration_tokens"

LENGTH = 128
"""Tokens of a sequence of the calibrating forward."""


@torch.inference_mode()
def calibrate(code: ModelCode, hf_config: Any, num_tokens: int, rank: Ranks | None = None) -> str:
    """Round the int8 weights of ``code``, which are neither cut nor packed yet, for ``num_tokens`` random tokens.

    Return a hash of the weights. Raise ConfigError if they could differ among machines, ModelLoadError if they differ
    among the ranks.
    """
    model = code.module
    if expert_counts(hf_config):
        raise ConfigError(f"{FLAG}: the experts of {hf_config.model_type} stay rounded to nearest: leave it out")
    products = CalibratedProducts(model)
    if not any(each.can_round for each in products.products.values()):
        raise ConfigError(f"{FLAG}: the checkpoint's own int8 weights are used unchanged: leave it out")
    replaced: list[Any] = [FusedRows(model)]
    replaced.append(GatedLayers(model, products.products))
    logger.info("rounding the weights of %d linear layers for %d random tokens", len(products.products), num_tokens)
    products.begin()
    vocabulary = int(hf_config.get_text_config().vocab_size)
    tokens = torch.randint(vocabulary, (1, num_tokens), generator=torch.Generator().manual_seed(0))
    places = (torch.arange(num_tokens) % LENGTH)[None]

    def run() -> None:
        with SameEverywhere(hf_config.model_type):
            code.logits(tokens, places, torch.arange(num_tokens))

    try:
        ModelGreenlet(run, _attend).switch()
        logger.warning("%d linear layers stay rounded to nearest: the forward does not use them", products.num_waiting)
    except AllRoundedError:
        pass
    except FastDecodeError:
        raise
    except Exception as error:  # a model's own code may raise anything
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ModelLoadError(f"{FLAG}: the calibrating forward fails ({reason}): leave it out") from error
    finally:
        for each in reversed(replaced):
            each.undo()
        products.undo()
    digest = products.digest()
    if rank:
        check_ranks(rank, digest)
    return digest


def check_ranks(rank: Ranks, digest: str) -> None:
    """Raise ModelLoadError unless all ranks have the same ``digest`` of the whole model's int8 weights."""
    found = rank.gather(torch.tensor(list(bytes.fromhex(digest)), dtype=torch.float32))
    others = [index for index, each in enumerate(found) if not torch.equal(each, found[0])]
    if others:
        raise ModelLoadError(
            f"{FLAG}: rank {others[0]} and rank 0 round weights differently: give all ranks the same checkpoint, torch "
            f"and {FLAG}, or leave it out"
        )


class AllRoundedError(Exception):
    """Ends the calibrating forward: no layer is left to round."""


class CalibratedProducts:
    """The products of a model's int8 layers in the calibrating forward. Each packs weights for one call only."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Replace the ``forward`` of every layer with an int8 weight that is not packed yet."""
        self.products: dict[int, CalibratedProduct] = {}
        """The product of each layer, by the layer's ``id()``."""
        self._linears: list[torch.nn.Linear] = []
        self._waiting: set[CalibratedProduct] = set()
        self._maps = FileMaps()
        for linears in list(groups_of(model)):
            product = CalibratedProduct(linears, self._rounded)
            for index, linear in enumerate(linears):
                linear.__dict__["forward"] = product.forward_of(index)
                self.products[id(linear)] = product
            self._linears += linears

    @property
    def num_waiting(self) -> int:
        """The number of layers whose weights wait for rows."""
        return sum(len(each.linears) for each in self._waiting)

    def begin(self) -> None:
        """Let each product round its weights when its next rows arrive."""
        self._waiting = {each for each in self.products.values() if each.can_round}
        for product in self._waiting:
            product.waits = True

    def _rounded(self, product: CalibratedProduct) -> None:
        self._waiting.discard(product)
        for linear, codes in zip(product.linears, product.codes, strict=True):
            plain, codes.plain = codes.plain, None
            if plain is not None and isinstance(linear.weight, PackedWeight) and not isinstance(plain, PackedWeight):
                self._maps.let_go(plain)
        if not self._waiting:
            raise AllRoundedError

    def undo(self) -> None:
        for linear in self._linears:
            del linear.__dict__["forward"]
            if codes := codes_of(linear):
                codes.plain = None

    def digest(self) -> str:
        """Return a hash of all int8 weights."""
        found = hashlib.sha256()
        for codes in filter(None, map(codes_of, self._linears)):
            found.update(codes.codes.numpy().tobytes())
        return found.hexdigest()


class CalibratedProduct(ProductOfCodes):
    """One product for layers that read the same rows, which can round the layers' weights for the rows of a call."""

    def __init__(self, linears: Sequence[torch.nn.Linear], on_rounded: Callable[[CalibratedProduct], None]) -> None:
        """``on_rounded``: called with this product after the weights were rounded."""
        self.codes: list[IntegerCodes] = [found for linear in linears if (found := codes_of(linear))]
        super().__init__(linears[0].weight.dtype, self.codes)
        self.waits = False
        self.linears, self._on_rounded = linears, on_rounded

    @property
    def can_round(self) -> bool:
        """True if the unrounded weight of some layer is known."""
        return any(each.plain is not None for each in self.codes)

    def compute(self, rows: torch.Tensor, activation: str = "none") -> torch.Tensor:
        """See ``ProductOfCodes.compute``; round the weights first if they wait for rows."""
        with _disable_current_modes():
            if self.waits:
                self.waits = False
                moments = moments_of(row_codes(rows, self.width, self.codes[0].block, activation))
                for codes in self.codes:
                    if codes.plain is not None:
                        round_again(codes, codes.plain, moments)
                self._on_rounded(self)
            return IntegerProduct(self.linears, self.codes).compute(rows, activation)


def row_codes(rows: torch.Tensor, width: int, block: int, activation: str, num_outputs: int = 512) -> torch.Tensor:
    """Return the int8 codes of ``rows`` [..., inputs] in a product of ``width`` inputs, [rows, width] in int32.

    They are the products of the rows and an identity matrix, which is made in parts of ``num_outputs`` rows.
    """
    x, threads, isa = as_rows(rows), torch.get_num_threads(), integer_isa()
    found, peaks = torch.empty(len(x), width, dtype=torch.int32), torch.empty(len(x))
    for start in range(0, width, num_outputs):
        some = torch.eye(width, dtype=torch.int8)[start : start + num_outputs].contiguous()
        sums = torch.empty(len(x), len(some), dtype=torch.int32)
        weights = _sworker.IntegerWeights(some.numpy(), torch.ones(len(some)).numpy(), None, block, threads)
        weights.find_peaks(array(x), peaks.numpy(), activation, isa, threads)
        weights.add_up(array(x), peaks.numpy(), sums.numpy(), activation, isa, threads)
        found[:, start : start + num_outputs] = sums
    return found


def _attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, scaling: float | None = None,
    calls: Calls = DENSE, **__: Any,
) -> torch.Tensor:  # fmt: skip
    """Return o of an attention call: causal within each sequence, without windows, soft caps or sinks."""
    if calls is not DENSE:
        raise ConfigError(f"{FLAG}: layers that keep latents or states stay rounded to nearest: leave it out")
    with _disable_current_modes():
        scale = 1 / math.sqrt(query.shape[3]) if scaling is None else float(scaling)
        parts = zip(*(each[0].split(LENGTH, 1) for each in (query, key, value)), strict=True)
        return torch.cat([attended(q, k, v, scale) for q, k, v in parts], 1).transpose(0, 1)[None].to(query.dtype)


class SameEverywhere(TorchDispatchMode):
    """Refuses operations of torch that can have other bits on another machine; computes cosines itself."""

    # Operations that move elements, or compute each one with a single rounding
    MOVING = """_to_copy _unsafe_view alias arange as_strided cat chunk clone contiguous copy_ detach embedding empty
        empty_like expand flatten full gather index index_select lift_fresh new_empty new_ones new_zeros ones permute
        reshape resolve_conj resolve_neg select slice split split_with_sizes squeeze stack t to transpose unbind
        unsqueeze view zeros zeros_like"""
    COMPUTING = "add div ge gt lt mul neg rsub sub"

    def __init__(self, model_type: str) -> None:
        super().__init__()
        self._model_type = model_type
        self._known = {*self.MOVING.split(), *self.COMPUTING.split()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute ``func``, or raise ConfigError."""
        name = func.overloadpacket.__name__
        if name in ("cos", "sin"):
            return cosine(args[0] if name == "cos" else args[0].double() - torch.pi / 2).to(args[0].dtype)
        is_outer = name in ("bmm", "mm") and args[0].shape[-1] == 1  # each sum has one product
        is_idle = name == "dropout" and args[2:] == (False,)
        is_scaled = (kwargs or {}).get("alpha", 1) != 1  # vectorized code rounds a + alpha * b once
        if is_scaled or not (name in self._known or is_outer or is_idle):
            raise ConfigError(
                f"{FLAG}: {name}, which {self._model_type} calls, may give other bits on other machines: leave it out"
            )
        return func(*args, **(kwargs or {}))
