"""A bias by distance is the table's row of each pair's bucket; so are its gradients, and few numbers are added to a row."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from moe.nn.attention import RelativeBias
from parallel.numerics.position_bias import Bias
from parallel.process.process import World
from parallel.rehearse.stage import rehearsal

RUNS = [(range(7), range(7)), (range(3, 8), range(2, 9)), (range(1, 19, 3), range(2, 17, 3)), (range(6, 7), range(7))]
RUNS += [(range(4), range(9, 10))]


@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize(("queries", "keys"), RUNS)
def test_a_bias_and_its_gradients_are_those_of_each_pair(queries: range, keys: range, both_ways: bool) -> None:
    generator = torch.Generator().manual_seed(len(queries))
    table = torch.randn(32, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    grad = torch.randn(2, 3, len(queries), len(keys), dtype=torch.float64, generator=generator)
    bias, twin = Bias(table, RelativeBias(3, both_ways=both_ways).bucket), table.detach().clone().requires_grad_()
    made = bias.of(queries, keys)
    rows = [[int(bias.bucket(torch.tensor([query - key]))) for key in keys] for query in queries]
    want = torch.stack([torch.stack([twin[row] for row in line]) for line in rows]).permute(2, 0, 1)
    want.backward(grad.sum(0))
    made.backward(grad.sum(0))
    assert torch.equal(made, want) and made.is_contiguous() and table.grad is not None and twin.grad is not None
    torch.testing.assert_close(table.grad, twin.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(bias.gradient(grad, queries, keys), twin.grad, rtol=1e-12, atol=1e-12)


def test_few_numbers_are_added_to_the_rows_of_a_table_on_a_gpu() -> None:
    """2 L - 1 for each head instead of L^2: an operator that adds rows by index reads no tensor of all pairs."""
    with rehearsal(World(0, 1, place="cuda")) as pretended, mock.patch.object(pretended.work, "operator") as seen:
        bias = Bias(torch.zeros(32, 4, device="cuda:0", requires_grad=True), RelativeBias(4).bucket)
        bias.of(range(64), range(64)).sum().backward()
        bias.gradient(torch.zeros(2, 4, 64, 64, device="cuda:0"), range(64), range(64))
    adds = [call.args for call in seen.call_args_list if call.args[0]._opname.startswith(("index_put", "index_add"))]
    assert len(adds) == 2 and all(max(tensor.numel() for tensor in tensors) == 4 * 127 for _, _, _, tensors, _ in adds)
