"""`moe bench dispatch` with packages that need a GPU: they get our layer's weights, and absent ones are listed. Also its table of moves.

The packages are replaced by fakes in plain torch, which have the names, arguments and weight layouts of the packages' documentation. A fake
must compute the same as our layer.
"""

from __future__ import annotations

import sys
from enum import Enum
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe.bench.layers import dispatch, gpu_layers, layers
from moe.bench.layers.layers import LayerCase, Shape
from moe.bench.timing import importable

CASE = LayerCase(Shape(48, 24, 20, 6, 3), torch.float32, "skewed")
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def each(x_TD: Tensor, gate_TK: Tensor, expert_TK: Tensor, network: Any) -> Tensor:
    tokens = x_TD.flatten(0, -2)
    rows = [sum(g * network(int(e), x) for g, e in zip(gs, es, strict=True)) for x, gs, es in zip(tokens, gate_TK, expert_TK, strict=True)]
    return torch.stack(rows).view_as(x_TD)


class ScatterLinear(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(*shape))


class ScatterMLP(nn.Module):
    """Fake of scattermoe.mlp.MLP. In GLUMLP (`gated`), w3 comes before w1."""

    gated = False

    def __init__(self, input_size: int, hidden_size: int, num_experts: int, top_k: int, bias: bool = False, activation: Any = None) -> None:
        super().__init__()
        self.experts = ScatterLinear(num_experts, hidden_size * (2 if self.gated else 1), input_size)
        self.output_experts = ScatterLinear(num_experts, input_size, hidden_size)
        self.activation = activation

    def forward(self, x: Tensor, expert_p: Tensor, expert_idxs: Tensor) -> Tensor:
        def network(e: int, x_D: Tensor) -> Tensor:
            h = self.experts.weight[e] @ x_D
            if self.gated:
                times, active = h.chunk(2)
                h = times * self.activation(active)
            else:
                h = self.activation(h)
            return self.output_experts.weight[e] @ h

        return each(x, expert_p, expert_idxs, network)


class ScatterGLU(ScatterMLP):
    gated = True


class Activation(Enum):
    SWIGLU = "swiglu"
    RELU = "relu"


class Sonic(nn.Module):
    """Fake of sonicmoe.MoE. Rows of w1 (even) and w3 (odd) alternate."""

    def __init__(
        self,
        num_experts: int,
        num_experts_per_tok: int,
        hidden_size: int,
        intermediate_size: int,
        activation_function: Any,
        add_bias: bool,
        std: float,
    ) -> None:
        super().__init__()
        self.k, self.gated = num_experts_per_tok, activation_function is Activation.SWIGLU
        self.router = nn.Linear(hidden_size, num_experts, bias=False)
        self.c_fc = ScatterLinear(num_experts, intermediate_size * (2 if self.gated else 1), hidden_size)
        self.c_proj = ScatterLinear(num_experts, hidden_size, intermediate_size)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        def network(e: int, x_D: Tensor) -> Tensor:
            h = self.c_fc.weight[e] @ x_D
            return self.c_proj.weight[e] @ (F.silu(h[::2]) * h[1::2] if self.gated else F.relu(h))

        top = self.router(x).topk(self.k)
        return each(x, top.values.softmax(-1), top.indices, network), torch.zeros(())


class Mega(nn.Module):
    """Fake of megablocks.layers.dmoe.dMoE with mlp_impl grouped. Each weight has the matrices of all experts, [E F, D]."""

    def __init__(self, args: Any) -> None:
        super().__init__()
        assert not args.bias and not args.return_bias and not args.fp16 and args.moe_loss_weight == 0 and args.mlp_impl == "grouped"
        self.args = args
        self.router = nn.Module()
        self.router.layer = nn.Linear(args.hidden_size, args.moe_num_experts, bias=False)
        self.experts = nn.Module()
        self.experts.mlp = nn.Module()
        for name in ("w1", "w2", *(["v1"] if args.mlp_type == "glu" else [])):
            setattr(self.experts.mlp, name, nn.Parameter(torch.zeros(args.moe_num_experts * args.ffn_hidden_size, args.hidden_size)))

    def forward(self, x: Tensor) -> Tensor:
        a, mlp = self.args, self.experts.mlp
        stacks = {name: w.view(a.moe_num_experts, -1, a.hidden_size) for name, w in mlp.named_parameters()}

        def network(e: int, x_D: Tensor) -> Tensor:
            h = a.activation_fn(stacks["w1"][e] @ x_D)
            return (h * (stacks["v1"][e] @ x_D) if "v1" in stacks else h) @ stacks["w2"][e]

        gate_TK, expert_TK = self.router.layer(x.flatten(0, -2)).softmax(-1).topk(a.moe_top_k)
        return each(x, gate_TK, expert_TK, network)


PACKAGES: dict[str, dict[str, Any]] = {
    "scattermoe": {},
    "scattermoe.mlp": {"MLP": ScatterMLP, "GLUMLP": ScatterGLU},
    "sonicmoe": {"MoE": Sonic},
    "sonicmoe.enums": {"ActivationType": Activation},
    "megablocks": {},
    "megablocks.layers": {},
    "megablocks.layers.arguments": {"Arguments": SimpleNamespace},
    "megablocks.layers.dmoe": {"dMoE": Mega},
}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in PACKAGES.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("ffn", ["relu", "swiglu"])
@pytest.mark.parametrize("name", gpu_layers.LAYERS)
def test_each_package_gets_the_same_layer(name: str, ffn: str, installed: None) -> None:
    """Each token's output has the same direction as ours (packages scale it by other gates), and all weights get a gradient."""
    made, ours = gpu_layers.LAYERS[name](CASE, ffn), layers.ours(CASE, ffn)
    y_TD, want_TD = (run().detach().view(CASE.shape.tokens, -1) for run in (made, ours))
    torch.testing.assert_close(F.cosine_similarity(y_TD, want_TD), torch.ones(len(y_TD)), atol=1e-5, rtol=0)
    assert all(leaf.grad is not None and leaf.grad.abs().sum() > 0 for leaf in made.leaves)
    assert dispatch._same(ours, made)


@pytest.mark.parametrize("name", gpu_layers.LAYERS)
def test_why_not_gives_the_reason_for_absent_packages_and_absent_gpus(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    assert gpu_layers.why_not(name, GPU) == gpu_layers.why_not(name, CPU) == f"not installed: {name}"
    there = ModuleType(name)
    there.__spec__ = ModuleSpec(name, None)
    monkeypatch.setitem(sys.modules, name, there)
    assert gpu_layers.why_not(name, CPU) == "needs a GPU" and gpu_layers.why_not(name, GPU) is None
    assert gpu_layers.why_not("grouped_mm", CPU) is None


def test_absent_packages_are_listed_in_both_tables(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_peak", lambda run, device: 1)  # a profiler costs seconds
    for name in gpu_layers.LAYERS:
        monkeypatch.setitem(sys.modules, name, None)
    for ffn in ("relu", "swiglu"):
        rows = dispatch.measure(CASE, ffn, list(gpu_layers.LAYERS), rounds=1)
        said = capsys.readouterr().out
        for name in gpu_layers.LAYERS:
            assert f"not installed: {name}" in said
            assert [row["not_run"] for row in rows if row["implementation"] == name] == [f"not installed: {name}"]


def test_a_package_that_refuses_this_gpu_does_not_end_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(case: LayerCase) -> Any:
        raise RuntimeError("only sm90\nand more")

    monkeypatch.setattr(gpu_layers, "why_not", lambda name, device: None)
    assert dispatch._made(CASE, "sonicmoe", refuse) == "not run: RuntimeError: only sm90"
    with pytest.raises(RuntimeError, match="only sm90"):  # an error in our own layer is not caught
        dispatch._made(CASE, "ours", refuse)


def test_moved_rows_are_counted_and_compared_with_a_copy(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "MOST_MOVES", 3)
    rows = dispatch.measure_moves([CASE, LayerCase(CASE.shape, torch.bfloat16, "balanced")], rounds=3)
    s = CASE.shape
    assert [(row["what"], row["bytes"]) for row in rows] == [
        (what, numbers * s.width * size) for size in (4, 2) for what, numbers in (("permute", 2 * s.rows), ("unpermute", s.rows + s.tokens))
    ]
    assert all(row["kind"] == "moves" and 0 < row["share"] < 100 and row["gb_per_s"] > 0 < row["copy_gb_per_s"] for row in rows)
    assert capsys.readouterr().out.count("permute") == 4


def test_a_peer_that_cannot_be_imported_is_left_out_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert importable("math") and capsys.readouterr().out == ""
    assert not importable("no_such_package")
    assert capsys.readouterr().out == "not compared with no_such_package: No module named 'no_such_package'\n"
