"""Products of bf16 tokens with fp32 matrices from bf16 parts (moe/kernels/triton/wide.py) are as exact as products in fp32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe.nn.linear import linear_fp32
from parallel.numerics.weight_gradient import linear
from parallel.process.process import World
from parallel.rehearse.stage import rehearsal

pytest.importorskip("triton", reason="Triton's package is not installed; it has none for this system", exc_type=ImportError)

import tests.support.interpreted  # noqa: E402, F401
from moe.kernels.triton import wide  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []
T, I, O = 141, 37, 21  # tokens, inputs, outputs: no multiples of a block  # noqa: E741
UNIT = 2.0**-24  # of fp32


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def products(x_TI: Tensor, weight_OI: Tensor, grad_TO: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return x W^T and the gradients of W and, in fp32, of x."""
    return wide.forward(x_TI, weight_OI), wide.of_weight(grad_TO, x_TI), wide.of_input(grad_TO, weight_OI, torch.float32)


def test_no_bit_of_an_fp32_number_is_lost() -> None:
    """With one token for each input (or output), each sum has one term, so the products are the fp32 numbers themselves, or their
    gradients."""
    one_II, one_OO = (torch.eye(n, device=DEVICE) for n in (I, O))
    weight_OI, grad_IO = random(O, I, seed=1), random(I, O, seed=2)
    assert torch.equal(wide.forward(one_II.bfloat16(), weight_OI), weight_OI.t())
    assert torch.equal(wide.of_weight(grad_IO, one_II.bfloat16()), grad_IO.t())
    assert torch.equal(wide.of_input(one_OO, weight_OI, torch.float32), weight_OI)


def test_products_differ_from_exact_ones_by_rounding_in_sums_alone() -> None:
    """Bound of each element: (number of terms + 1) 2^-24 times the sum of the terms' magnitudes, as for fp32 products in any order."""
    x_TI, weight_OI, grad_TO = random(T, I, seed=3, dtype=torch.bfloat16), random(O, I, seed=4), random(T, O, seed=5)
    x, weight, grad = x_TI.double(), weight_OI.double(), grad_TO.double()
    want = (x @ weight.t(), grad.t() @ x, grad @ weight)
    size = (x.abs() @ weight.abs().t(), grad.abs().t() @ x.abs(), grad.abs() @ weight.abs())
    for found, exact, most, terms in zip(products(x_TI, weight_OI, grad_TO), want, size, (I, T, O), strict=True):
        assert found.dtype == torch.float32 and ((found - exact).abs() <= (terms + 1) * UNIT * most).all()


def test_no_tokens_have_no_products_and_a_gradient_of_0() -> None:
    y_TO, of_weight, of_input = products(random(0, I, seed=1, dtype=torch.bfloat16), random(O, I, seed=2), random(0, O, seed=3))
    assert y_TO.shape == (0, O) and of_input.shape == (0, I) and of_weight.shape == (O, I) and not of_weight.any()


def test_a_product_and_its_gradients_equal_torchs() -> None:
    x_TI, weight_OI, grad_TO = random(T, I, seed=6, dtype=torch.bfloat16), random(O, I, seed=7), random(T, O, seed=8)
    found = []
    for kernels in (wide, None):
        x, weight = x_TI.clone().requires_grad_(), weight_OI.clone().requires_grad_()
        y = linear(x, weight, dtype=torch.float32, kernels=kernels)
        y.backward(grad_TO)
        found.append((y.detach(), weight.grad, x.grad))
    (y, of_weight, of_x), want = found
    assert of_x is not None and of_x.dtype == torch.bfloat16
    torch.testing.assert_close(y, want[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(of_weight, want[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(of_x, want[2], rtol=2**-7, atol=1e-5)  # rounded to bf16 from sums in other orders


def test_a_gpu_takes_the_kernels_for_bf16_tokens_and_torchs_fp32_product_otherwise() -> None:
    with rehearsal(World(0, 1, place="cuda")) as pretended:
        for dtype, kernels in ((torch.bfloat16, (1, 3)), (torch.float32, (1, 2))):
            x = torch.empty(1024, 32, dtype=dtype, device="cuda", requires_grad=True)
            weight = torch.empty(8, 32, device="cuda", requires_grad=True)
            pretended.work.begin()
            y = linear_fp32(x, weight)
            y.backward(torch.empty_like(y))
            assert tuple(pretended.work.by_module["", passing].kernels for passing in ("forward", "backward")) == kernels, dtype
            assert y.dtype == torch.float32 and weight.grad is not None and x.grad is not None and x.grad.dtype == dtype
