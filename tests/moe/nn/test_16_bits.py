"""In 16 bits, numbers that need more than 8 or 11 bits are fp32: places in a sequence, sums of gradients, and statistics of norms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe.kernels.triton.norm import norm as on_gpu
from moe.nn.attention import Attention
from moe.nn.context import Context
from moe.nn.linear import Norm, linear_fp32
from moe.nn.vocabulary import Rows, look_up
from moe.recipe import sections

# B batch, L length, D model, V vocabulary
D = 24
HALVES = [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)]  # dtype, its unit roundoff


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("dtype", "unit"), HALVES)
def test_late_tokens_attend_as_in_fp32(dtype: torch.dtype, unit: float) -> None:
    """Places above 256 (bf16) or 2048 (fp16) are no 16-bit numbers. A short window, so that the nearest keys are not lost among others."""
    length, model = int(1 / unit) + 30, sections.Model(d_model=D, num_heads=2)
    attention = Attention(model, window=3)
    for seed, parameter in enumerate(attention.parameters()):
        parameter.data.copy_(random(*parameter.shape, seed=seed) / 3)
    x_BLD = random(1, length, D, seed=9).to(dtype)
    with torch.no_grad():
        got, want = (attention(x, Context.of(x[..., 0]))[0, -30:].float() for x in (x_BLD, x_BLD.float()))
    assert (got - want).abs().max() < 8 * unit * want.abs().max()


@pytest.mark.parametrize(("dtype", "unit"), HALVES)
@pytest.mark.parametrize("rows", ["matrix", "module", "tiles"])
def test_a_tokens_gradients_are_summed_in_fp32(rows: str, dtype: torch.dtype, unit: float) -> None:
    """The embedding's gradient is the exact sum over 1,500 tokens in a table in fp32, and its nearest number in a table in 16 bits."""
    tokens, grad = torch.arange(1500) % 3, random(1500, D, seed=1).abs().to(dtype)
    want = torch.stack([grad[tokens == v].double().sum(0) for v in range(3)])
    for held, allowed in ((torch.float32, 1e-6), (dtype, 1.01 * unit)):
        whole = Rows(slice(0, 5), D).to(held)
        whole.weight.data.copy_(random(5, D, seed=2))
        matrix = {"matrix": whole.weight, "module": whole, "tiles": whole.in_tiles(2)}[rows]
        look_up(tokens, matrix, dtype=dtype).backward(grad)
        parts = [matrix] if isinstance(matrix, Tensor) else list(matrix.parameters())
        found = torch.cat([part.grad for part in parts if part.grad is not None])[:3]
        assert ((found.double() - want).abs() <= allowed * want).all()


@pytest.mark.parametrize(("dtype", "unit"), HALVES)
def test_a_product_of_16_bit_tokens_in_fp32_has_exact_gradients(dtype: torch.dtype, unit: float) -> None:
    """A router's logits and its weight's gradient are exact to fp32; only the gradient of the tokens is rounded, to their dtype."""
    x, weight, grad = random(50, D, seed=1).to(dtype).requires_grad_(), random(7, D, seed=2).requires_grad_(), random(50, 7, seed=3)
    y = linear_fp32(x, weight)
    y.backward(grad)
    exact = x.detach().double(), weight.detach().double(), grad.double()
    pairs = ((y, exact[0] @ exact[1].T, 1e-6), (weight.grad, exact[2].T @ exact[0], 1e-6), (x.grad, exact[2] @ exact[1], 1.01 * unit))
    for found, want, allowed in pairs:
        assert found is not None and (found.double() - want).abs().max() <= allowed * want.abs().max()


@pytest.mark.parametrize(("dtype", "unit"), HALVES)
@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_norm_rounds_only_its_result(device: str, kind: str, dtype: torch.dtype, unit: float) -> None:
    """Output and input gradient are the exact ones with an fp32 gain, rounded once; the gain's gradient is exact to fp32. A GPU's kernels
    run in the interpreter. Values near 300, whose squares fp16 does not have."""
    norm, (x, grad) = Norm(D, kind), ((300 * random(50, D, seed=seed)).to(dtype) for seed in (1, 2))
    norm.weight.data.copy_(1 + random(D, seed=3) / 4)
    x.requires_grad_()
    if device == "gpu":
        norm.normed = on_gpu
    exact, gain = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    centered = exact - exact.mean(1, keepdim=True) if kind == "layernorm" else exact
    want = centered / (centered.square().mean(1, keepdim=True) + norm.eps).sqrt() * gain
    got = norm(x)
    got.backward(grad)
    want.backward(grad.double())
    for found, right in ((got, want), (x.grad, exact.grad)):
        assert found is not None and right is not None
        assert found.dtype == dtype and ((found - right).abs() <= 1.01 * unit * right.abs() + 1e-6 * right.abs().max()).all()
    assert norm.weight.grad is not None and gain.grad is not None
    assert (norm.weight.grad - gain.grad).abs().max() <= 1e-6 * gain.grad.abs().max()


def test_a_norm_of_no_tokens_gives_its_gain_a_gradient_of_0() -> None:
    gain = torch.ones(D, requires_grad=True)
    on_gpu(torch.zeros(0, D, dtype=torch.bfloat16), gain, centered=False, eps=1e-6).sum().backward()
    assert gain.grad is not None and not gain.grad.any()
