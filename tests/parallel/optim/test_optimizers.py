"""Each optimizer's steps equal those of a plain implementation in float64 that loops over matrices, rows and elements."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from parallel.data.engine import AdamW, Rule
from parallel.data.stepped import at_rate
from parallel.data.whole import Cut, Whole
from parallel.mesh.mesh import Degrees
from parallel.optim import shared
from parallel.optim.adafactor import Adafactor
from parallel.optim.muon import Muon, Orientation, orthogonal, scale
from parallel.optim.sgd import Sgd
from parallel.process import process
from parallel.process.process import World
from tests.support.ranks import run_on_ranks

LRS = (0.1, 0.07, 0.02)
SHAPES = {"out_in": (5, 3), "in_out": (2, 3, 7), "table": (4, 6), "gain": (6,), "biases": (2, 5)}  # name -> shape
STACKS = ("in_out", "biases")  # of two experts


def decays(name: str, parameter: Tensor) -> bool:
    return parameter.ndim > 1 and name not in ("table", "biases")


def matrix(name: str, num_dims: int) -> Orientation | None:
    return name if name in ("out_in", "in_out") else None  # type: ignore[return-value]


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def stepped(rule: Rule) -> dict[str, Tensor]:
    """Return name -> parameter after three steps of the optimizer under test."""
    weights = {name: nn.Parameter(draw(shape, 50 + i).float()) for i, (name, shape) in enumerate(SHAPES.items())}
    optimizer = rule.build(rule.groups(weights.items()))
    for step, lr in enumerate(LRS):
        for group in optimizer.param_groups:
            group["lr"] = lr
        for i, weight in enumerate(weights.values()):
            weight.grad = draw(tuple(weight.shape), 10 * step + i).float()
        optimizer.step()
    kept = {kind for name, w in weights.items() for kind in rule.kept(name, w.ndim)}
    held = {kind for state in optimizer.state.values() for kind in state}
    assert held == kept | {"step"}, "Rule.kept, which checkpoints use, names all optimizer states"
    return {name: weight.detach() for name, weight in weights.items()}


Step = Callable[[str, Tensor, Tensor, dict[str, Tensor], int, float], Tensor]  # (name, weight, gradient, state, step, lr) -> update


def twin(step_of: Step, weight_decay: float, decay_factor: Callable[[str], float] = lambda name: 1.0) -> dict[str, Tensor]:
    """Return what `stepped` should return, computed in float64 by `step_of` for one matrix or vector at a time.
    decay_factor: name -> factor of the learning rate in weight decay."""
    found = {}
    for i, (name, shape) in enumerate(SHAPES.items()):
        weight = draw(shape, 50 + i).float().double()
        parts = list(weight) if name in STACKS else [weight]
        states: list[dict[str, Tensor]] = [{} for _ in parts]
        for step, lr in enumerate(LRS):
            grad = draw(shape, 10 * step + i).float().double()
            grads = list(grad) if name in STACKS else [grad]
            for j, part in enumerate(parts):
                moved = step_of(name, part, grads[j], states[j], step + 1, lr)
                shrunk = part * (1 - lr * decay_factor(name) * weight_decay) if decays(name, weight) else part
                parts[j] = shrunk - moved
        found[name] = torch.stack(parts) if name in STACKS else parts[0]
    return found


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in found.items():
        torch.testing.assert_close(tensor.double(), expected[name], rtol=3e-5, atol=3e-6, msg=lambda text, name=name: f"{name}: {text}")


def test_sgd() -> None:
    def step_of(name: str, weight: Tensor, grad: Tensor, state: dict[str, Tensor], step: int, lr: float) -> Tensor:
        state["m"] = 0.9 * state.get("m", torch.zeros_like(weight)) + grad
        return lr * state["m"]

    same(stepped(Sgd(0.9, 0.3, decays)), twin(step_of, 0.3))


def adamw(weight: Tensor, grad: Tensor, state: dict[str, Tensor], step: int, lr: float) -> Tensor:
    state["m"] = 0.8 * state.get("m", torch.zeros_like(weight)) + 0.2 * grad
    state["v"] = 0.9 * state.get("v", torch.zeros_like(weight)) + 0.1 * grad**2
    return lr * (state["m"] / (1 - 0.8**step)) / ((state["v"] / (1 - 0.9**step)).sqrt() + 1e-6)


@pytest.mark.parametrize("kind", ["rms", "spectral"])
def test_muon(kind: str) -> None:
    """The plain implementation uses the SVD: Newton-Schulz keeps singular vectors, and maps each singular value s five times to
    3.4445 s - 4.775 s^3 + 2.0315 s^5."""

    def step_of(name: str, weight: Tensor, grad: Tensor, state: dict[str, Tensor], step: int, lr: float) -> Tensor:
        if name not in ("out_in", "in_out"):
            return adamw(weight, grad, state, step, lr)
        state["m"] = 0.95 * state.get("m", torch.zeros_like(weight)) + grad
        u, s, vt = torch.linalg.svd(grad + 0.95 * state["m"], full_matrices=False)
        values = [float(value) / math.sqrt(sum(float(other) ** 2 for other in s)) for value in s]
        for _ in range(5):
            values = [3.4445 * value - 4.775 * value**3 + 2.0315 * value**5 for value in values]
        rows, columns = weight.shape
        outputs, inputs = (rows, columns) if name == "out_in" else (columns, rows)
        factor = 0.2 * math.sqrt(max(rows, columns)) if kind == "rms" else math.sqrt(max(1.0, outputs / inputs))
        return 3 * lr * factor * sum(value * torch.outer(u[:, k], vt[k]) for k, value in enumerate(values))

    rule = Muon(0.95, kind, 3.0, (0.8, 0.9), 1e-6, 0.1, decays, matrix)  # type: ignore[arg-type]
    same(stepped(rule), twin(step_of, 0.1, lambda name: 3.0 if name in ("out_in", "in_out") else 1.0))


def test_orthogonal_gives_singular_values_near_one_and_keeps_zero() -> None:
    for shape in ((40, 9), (9, 40), (3, 16, 16)):
        values = torch.linalg.svdvals(orthogonal(draw(shape, 3)))
        assert values.min() > 0.6 and values.max() < 1.3
    assert not orthogonal(torch.zeros(2, 4, 5)).any()
    assert scale("spectral", (8, 2), "out_in") == 2.0 and scale("spectral", (8, 2), "in_out") == 1.0


@pytest.mark.parametrize("step_kind", ["relative", "absolute"])
def test_adafactor(step_kind: str) -> None:
    """Adafactor equals algorithm 4 of Shazeer and Stern, computed element by element."""

    def step_of(name: str, weight: Tensor, grad: Tensor, state: dict[str, Tensor], step: int, lr: float) -> Tensor:
        b = 1 - step**-0.8
        square = grad**2 + 1e-30
        update = torch.zeros_like(grad)
        if grad.ndim == 1:
            state["v"] = b * state.get("v", torch.zeros_like(grad)) + (1 - b) * square
            update = grad / state["v"].sqrt()
        else:
            rows, columns = grad.shape
            r = state["r"] = b * state.get("r", torch.zeros(rows, dtype=torch.float64)) + (1 - b) * square.sum(1)
            c = state["c"] = b * state.get("c", torch.zeros(columns, dtype=torch.float64)) + (1 - b) * square.sum(0)
            for i in range(rows):
                for j in range(columns):
                    update[i, j] = grad[i, j] / math.sqrt(r[i] * c[j] / sum(r))
        rms = math.sqrt(sum(float(u) ** 2 for u in update.flatten()) / update.numel())
        update = update / max(1.0, rms)
        size = math.sqrt(float((weight**2).sum()) / weight.numel())
        return lr * (max(1e-3, size) if step_kind == "relative" else 1.0) * update

    rule = Adafactor(step_kind, 0.1, decays, lambda name: name == "biases")  # type: ignore[arg-type]
    same(stepped(rule), twin(step_of, 0.1))


def distributed(rank: int, ranks: int, cut: bool) -> tuple[dict[str, Tensor], int]:
    """Return (name -> whole weight after three steps of Muon, FLOPs of this rank). cut: True: ranks hold shards; False: copies."""
    mesh = process.connect(Degrees(dp=ranks), World(rank, ranks))
    axis = mesh.axis("dp")
    held: dict[str, nn.Parameter] = {}
    wholes: dict[int, Whole] = {}
    for n, (name, shape) in enumerate(UNLIKE.items()):
        dim = -1 - n % 2
        lie = Whole((Cut(dim, -(-shape[dim] // ranks), shape[dim], axis),)) if cut else Whole((), axis)
        part = draw(shape, n).float()
        held[name] = nn.Parameter(part.narrow(dim, *lie.cuts[0].run(rank)).contiguous() if cut else part)
        wholes[id(held[name])] = lie
    optimizer = MUON.build(MUON.groups(held.items()), wholes)
    flops = steps_of(optimizer, {name: (weight, wholes[id(weight)]) for name, weight in held.items()}, rank)
    return {name: Whole(wholes[id(weight)].cuts).gathered(weight.detach()) for name, weight in held.items()}, flops


def steps_of(optimizer: torch.optim.Optimizer, held: dict[str, tuple[nn.Parameter, Whole]], rank: int = 0) -> int:
    with FlopCounterMode(display=False) as counted:
        for step, lr in enumerate(LRS):
            for group in optimizer.param_groups:
                group["lr"] = lr
            for n, (name, (weight, whole)) in enumerate(held.items()):
                grad = draw(UNLIKE[name], 10 * step + n).float()
                for cut in whole.cuts:
                    grad = grad.narrow(cut.dim, *cut.run(rank)).contiguous()
                weight.grad = grad
            optimizer.step()
    return int(counted.get_total_flops())


UNLIKE = {
    "out_in a": (9, 5),
    "in_out": (5, 3, 8),
    "out_in b": (6, 11),
    "out_in c": (4, 4),
}  # name -> shape; in_out is a stack of five experts
MUON = Muon(0.95, "rms", 1.0, (0.8, 0.9), 1e-6, 0.1, decays, lambda name, _: "in_out" if name == "in_out" else "out_in")


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("cut", [False, True], ids=["copies", "parts"])
def test_distributed_muon_equals_one_process_bit_for_bit_and_balances_the_work(
    ranks: int, cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks' FLOPs add up to those of one process, and differ by at most the work on the largest matrix. Two ranks send in rounds."""
    if ranks == 2:
        monkeypatch.setattr(shared, "_ROUND_ELEMENTS", 1)
    alone = {name: nn.Parameter(draw(shape, n).float()) for n, (name, shape) in enumerate(UNLIKE.items())}
    flops = steps_of(MUON.build(MUON.groups(alone.items())), {name: (weight, Whole(())) for name, weight in alone.items()})
    found = run_on_ranks(distributed, ranks, ranks, cut)
    for weights, _ in found:
        for name, weight in weights.items():
            assert torch.equal(weight, alone[name]), name
    each = [work for _, work in found]
    largest = max(15 * (4 * max(n, m) * min(n, m) ** 2 + 2 * min(n, m) ** 3) for *_, n, m in UNLIKE.values())
    assert sum(each) == flops and max(each) - min(each) <= largest


@pytest.mark.parametrize("factor", [0.37, 2.0**-16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_with_a_factor_is_a_step_with_multiplied_gradients(factor: float, dtype: torch.dtype) -> None:
    """Moments and weights of AdamW in three steps: bitwise for a power of two, else within the rounding of a factor and of its inverse."""
    rule, ends = AdamW((0.9, 0.95), 1e-8, 0.1, decays), list[dict[str, Tensor]]()
    for folded in (True, False):
        weights = {name: nn.Parameter(draw(shape, 50 + i).to(dtype)) for i, (name, shape) in enumerate(SHAPES.items())}
        optimizer = rule.build(rule.groups(weights.items()))
        for step, lr in enumerate(LRS):
            for i, weight in enumerate(weights.values()):
                weight.grad = draw(tuple(weight.shape), 10 * step + i).to(dtype) * (1 if folded else factor)
            grads = [weight.grad for weight in weights.values() if weight.grad is not None]
            with at_rate(lr, factor if folded else 1.0, optimizer, weights=weights.values(), grads=grads):
                optimizer.step()
        ends.append({f"{name} {kind}": t for name, w in weights.items() for kind, t in ({"weight": w} | optimizer.state[w]).items()})
    for name, tensor in ends[0].items():
        bound = 0.0 if factor < 0.1 or dtype == torch.float64 else 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(tensor, ends[1][name], rtol=bound, atol=bound)


def test_a_step_of_fused_adamw_reads_each_gradient_once() -> None:
    """No operator other than the step reads a gradient, whatever the factor."""
    weight = nn.Parameter(torch.ones(4))
    weight.grad = torch.ones(4)
    optimizer = AdamW((0.9, 0.95), 1e-8, 0.1, decays).build([{"params": [weight], "weight_decay": 0.1}])
    read: list[str] = []

    class Readers(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(leaf is weight.grad for leaf in tree_leaves((args, kwargs))):
                read.append(func._opname)
            return func(*args, **(kwargs or {}))

    with Readers(), at_rate(0.1, 0.5, optimizer, weights=[weight], grads=[weight.grad]):
        optimizer.step()
    assert read == ["_fused_adamw_"]


@pytest.mark.parametrize(("factor", "fused"), [(0.0, True), (1e-39, True), (0.5, False)])
def test_gradients_are_multiplied_if_the_fused_step_cannot_divide_them(factor: float, fused: bool) -> None:
    """The step multiplies if 1 / factor is infinite in fp32, or if one of two groups is not fused; without gradients it is an error."""
    weights = [nn.Parameter(torch.ones(4)) for _ in range(2)]
    for weight in weights:
        weight.grad = torch.full((4,), 3.0)
    optimizer = torch.optim.AdamW([{"params": weights[:1]}, {"params": weights[1:], "fused": fused}], fused=True)
    with pytest.raises(AssertionError, match="needs `grads`"), at_rate(0.1, factor, optimizer, weights=weights):
        pass
    with at_rate(0.1, factor, optimizer, weights=weights, grads=[weight.grad for weight in weights if weight.grad is not None]):
        assert getattr(optimizer, "grad_scale", None) is None
    assert all(torch.equal(weight.grad, torch.full((4,), 3.0) * factor) for weight in weights if weight.grad is not None)
