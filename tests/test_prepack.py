"""Packed linear layers give what torch's own give, in every dtype and at every number of rows."""

from __future__ import annotations

import pytest
import torch

from fastdecode.sworker.prepack import PACKED_ROWS, prepack_linears


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_rows", [0, 1, 16, PACKED_ROWS, PACKED_ROWS + 1, 300])
def test_packed_product_matches(dtype: torch.dtype, bias: bool, num_rows: int) -> None:
    """Against the same product in float64."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(96, 72, bias=bias).to(dtype).requires_grad_(False)
    model = torch.nn.Sequential(linear)
    assert prepack_linears(model) == 1
    rows = torch.randn(1, num_rows, 96).to(dtype)
    exact = torch.nn.functional.linear(rows.double(), linear.weight.double(), linear.bias.double() if bias else None)
    product = model(rows)
    assert product.dtype == dtype and product.shape == exact.shape
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    assert torch.allclose(product.double(), exact, rtol=tolerance, atol=tolerance)


def test_only_plain_linears_are_packed() -> None:
    """Subclasses may compute something else; they are left alone."""

    class Scaled(torch.nn.Linear):
        pass

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), Scaled(8, 8), torch.nn.LayerNorm(8))
    assert prepack_linears(model) == 1
    assert "forward" not in vars(model[1])
