"""Laws of FSDP: results equal one process; a rank keeps 1/N of all states; weights are gathered only during use; collectives and bytes
equal the formulas. Laws of all engines are in test_engines.py, resuming is in test_resume.py, precisions are in `moe verify`.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from typing import Any

import pytest
import torch
import torch._dynamo  # imported by fully_shard: here once, instead of in every forked rank
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe.model.initialize import FirstValues, global_name
from moe.recipe.sections import Offload
from moe.verify.cases import Case
from moe.verify.tape import owned
from parallel.data.ddp import DDP
from parallel.data.engine import MOMENTS, AdamW
from parallel.data.fsdp import FSDP, Unit, dim_to_cut, shard
from parallel.data.load import given
from parallel.mesh.debug_collectives import DEBUG, Agreement, Call
from parallel.mesh.layout import Box, Layout
from parallel.mesh.mesh import Degrees, Mesh
from parallel.numerics.precision import DTYPES
from parallel.process import process
from parallel.process.process import World
from tests.support.ranks import each_case, run_on_ranks
from tests.support.tiny import Tiny, start

DENSE = Case("dense", "fsdp", 2, 1, 1, "fp32")
SPARSE = Case("deepseek", "fsdp", 4, 2, 1, "fp32", experts=8)  # dp 4 = edp 2 x ep 2


# --- results of one process -------------------------------------------------------------------------------------------


def two_steps(rank: int, case: Case, sharding: dict[str, Any]) -> dict[str, Any]:
    tiny = start(case, rank, sharding=sharding)
    found: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(2):
        found["losses"].append(tiny.accumulate(step).loss)
        found["gradients"] = owned(tiny.engine, tiny.mesh, "gradient", 1.0)
        found["norms"].append(tiny.finish().total)
    return found | {"weights": owned(tiny.engine, tiny.mesh, "weight", 1.0)}


@cache
def alone(case: Case) -> dict[str, Any]:
    return run_on_ranks(two_steps, 1, case, {}, timeout_s=60)[0]  # type: ignore[no-any-return]


def together(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return whole gradients and weights, added up from all ranks: each rank has zeros outside the elements that it owns."""
    first = parts[0]
    for part in parts[1:]:
        for what in ("gradients", "weights"):
            for name, tensor in part[what].items():
                first[what][name] = first[what].get(name, 0) + tensor
    return first


STEPS: list[tuple[Case, dict[str, Any]]] = [
    (SPARSE, {}),
    (replace(SPARSE, microbatches=3, recompute="full"), {"prefetch": 2}),
    (replace(SPARSE, ep=1, recompute="selective", rows="overlapped"), {"reshard": False}),
    (replace(SPARSE, ep=2, microbatches=3, rows="overlapped"), {"prefetch": 0}),
    (replace(SPARSE, ep=1, etp=2), {}),
    (replace(SPARSE, ep=4), {"reshard": False, "prefetch": 2}),  # each expert is on one rank only, so FSDP does not shard experts
    (replace(SPARSE, model="gshard", world=3, ep=1, experts=4), {}),  # tied embeddings; 3 ranks divide no dim
    (replace(DENSE, tiles=4, head_tiles=2, chunks=5, recompute="full"), {"prefetch": 2}),
]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_step_is_that_of_one_process(world: int) -> None:
    cases = [(case, sharding) for case, sharding in STEPS if case.world == world]
    one: dict[str, Any] = {"kind": "ddp", "world": 1, "ep": 1, "etp": 1, "microbatches": 1, "tiles": 1, "head_tiles": 1}
    for (case, sharding), ranks in zip(cases, each_case(two_steps, world, cases), strict=True):
        want, got = alone(replace(case, recompute="none", rows="all_to_all", **one)), together(ranks)
        where = f"{case.layout} {sharding}"
        assert got["losses"] == pytest.approx(want["losses"], rel=1e-6), where
        assert got["norms"] == pytest.approx(want["norms"], rel=1e-6), where
        assert got["gradients"].keys() == want["gradients"].keys(), where
        largest = max(float(g.abs().max()) for g in want["gradients"].values())
        for name, gradient in want["gradients"].items():
            torch.testing.assert_close(got["gradients"][name], gradient, rtol=1e-5, atol=1e-6 * largest, msg=f"{where} {name}")
            torch.testing.assert_close(got["weights"][name], want["weights"][name], rtol=1e-5, atol=1e-6, msg=f"{where} {name}")


def test_gradients_are_summed_in_fp32_whatever_they_are_gathered_in() -> None:
    """Gradients 2048 and 1 are added exactly, from two uses on a rank and from two ranks. In 16 bits, 2048 + 1 would be rounded."""

    def work(rank: int, dtype: str) -> list[float]:
        engine, _ = linear(rank, 2, torch.ones(4, 3), dtype=DTYPES[dtype])
        x = torch.tensor([[2048.0 if rank == 0 else 2.0], [1.0]], dtype=DTYPES[dtype]).expand(2, 3)
        engine.backward(engine.forward(x, last=True).float().sum(), last=True)
        return [float(value) for value in engine.gradient("one.weight").unique()]

    assert each_case(work, 2, [("fp32",), ("bf16",), ("fp16",)]) == [[[2052.0]] * 2] * 3


class Linear(nn.Module):
    """Returns x W^T + b in x's dtype, by one product with W for each row of x."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.zeros(len(weight), device=weight.device))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        return torch.stack([row @ weight.t() for row in x]) + self.bias.to(x.dtype)


def linear(rank: int, ranks: int, value: Tensor, *, dtype: torch.dtype = torch.float32) -> tuple[FSDP, AdamW]:
    """Return an FSDP engine for a model of one matrix `value`, which is a unit, and a bias, which stays whole; and the engine's rule."""
    mesh = process.connect(Degrees(dp=ranks), World(rank, ranks))
    model = nn.Sequential()
    model.add_module("one", Linear(torch.empty_like(value, device="meta")))
    layouts = {"one.weight": Layout(tuple(value.shape)), "one.bias": Layout((len(value),))}

    def fill(name: str, out: Tensor, within: Box | None = None) -> None:
        whole = value if name == "one.weight" else torch.zeros(len(value))
        out.copy_(whole if within is None else whole[within])

    unit = Unit("one", ("one.weight",), dtype if dtype != torch.float32 else None)
    shard(model, [unit], layouts=layouts, mesh=mesh, device=torch.device("cpu"), reshard=True, prefetch=1, fill=fill)
    settings = AdamW((0.8, 0.9), 1e-6, 0.3, lambda name, p: True)
    return FSDP(model, layouts=layouts, mesh=mesh, optimizer=settings), settings


@pytest.mark.parametrize("ranks", [2, 4])
def test_any_shape_is_cut_steps_and_comes_back(ranks: int) -> None:
    """AdamW's steps equal those without sharding, and loaded states are read back, if no dim divides or rows are fewer than ranks."""

    def work(rank: int, *shape: int) -> list[bool]:
        torch.manual_seed(0)
        value = torch.randn(shape)
        engine, settings = linear(rank, ranks, value)
        twin = Linear(value.clone())
        plain = DDP(twin, layouts={"weight": Layout(shape), "bias": Layout(shape[:1])}, mesh=Mesh.of(Degrees()), optimizer=settings)
        name, found = "one.weight", []
        for _ in range(3):
            x = torch.randn(ranks, 4, shape[1])
            engine.backward(engine.forward(x[rank], last=True).square().sum(), last=True)
            plain.backward(plain.forward(x.flatten(0, 1), last=True).square().sum(), last=True)
            found.append(
                all(torch.allclose(engine.gradient(f"one.{n}"), plain.gradient(n), rtol=1e-5, atol=1e-5) for n in ("weight", "bias"))
            )
            engine.step(0.1)
            plain.step(0.1)
            a, b = engine.state(name), plain.state("weight")
            found.append(all(torch.allclose(a[kind], b[kind], rtol=1e-5, atol=1e-5) for kind in a))
        saved = {kind: torch.randn(shape) for kind in ("weight", *MOMENTS)}
        engine.load_state([name], given({name: saved}), steps=9)
        found.append(all(torch.equal(tensor, saved[kind]) for kind, tensor in engine.state(name).items()))
        dim = dim_to_cut(shape, ranks)
        most = math.ceil(shape[dim] / ranks) * math.prod(shape) // shape[dim]
        found.append(engine.parameters[name].numel() <= most)
        return found

    assert each_case(work, ranks, [(5, 7), (1, 3), (6, 5), (3, 8), (9, 1)]) == [[[True] * 8] * ranks] * 5


def test_the_first_dim_that_divides_is_cut() -> None:
    """Dim 0 may be indivisible: a stack can have fewer experts than the ranks that share it."""
    assert [dim_to_cut(shape, 4) for shape in ((8, 3), (2, 24, 20), (2, 5, 20), (5, 7), (3,))] == [0, 1, 2, 0, 0]


# --- memory of a rank -------------------------------------------------------------------------------------------------


def cut_numel(tiny: Tiny) -> int:
    return sum(p.numel() for p in tiny.model.parameters() if isinstance(p, DTensor))


def test_states_are_one_nth() -> None:
    """Weights, gradients and moments of the sharded parameters take exactly 16 P / N bytes a rank. Unsharded parameters are small."""

    def work(rank: int, case: Case) -> list[int]:
        tiny = start(case, rank)
        tiny.step(0)
        tiny.accumulate(1)
        engine = tiny.engine
        assert isinstance(engine, FSDP)
        size = Counter[bool]()
        for name, held in engine.parameters.items():
            grad = dict(engine.gradients())[name]
            moments = [engine.optimizer.state[held][m] for m in MOMENTS]
            size[name in engine.cut] += sum(t.untyped_storage().nbytes() for t in (held, *moments))
            size[name in engine.cut] += grad.numel() * grad.element_size()
        axes = {name: 2 if ".experts." in name else 4 for name in engine.cut}
        theory = sum(16 * math.prod(tiny.model.get_parameter(name).shape) // axes[name] for name in engine.cut)
        return [size[True] - theory, size[False], 16 * sum(p.numel() for p in engine.whole.values()), theory]

    for over, whole, wanted, theory in chain(*each_case(work, 4, [(SPARSE,), (replace(SPARSE, microbatches=3),)])):
        assert over == 0 and whole == wanted < 0.1 * theory


def test_offloaded_states_have_memory_of_their_own_and_change_no_bit() -> None:
    """With the optimizer on the host, three steps and a loaded state equal those without offload to the bit, and the device's weights are
    copies of those that the host has stepped."""

    def work(rank: int) -> list[Any]:
        plain, offloaded = (start(SPARSE, rank, sharding={"offload": Offload(optimizer=place)}) for place in ("none", "cpu"))
        engine = offloaded.engine
        assert isinstance(engine, FSDP)
        for step in range(3):
            plain.step(step)
            offloaded.step(step)
            saved = offloaded.state()
            engine.load_state(saved, given(saved), steps=step + 1)
        found = [torch.equal(t, saved[name][kind]) for name, states in plain.state().items() for kind, t in states.items()]
        held = engine.on_device.items()
        found += [torch.equal(p, engine.parameters[name]) and p.data_ptr() != engine.parameters[name].data_ptr() for name, p in held]
        return [all(found), len(engine.on_device) == len(engine.layouts)]

    assert run_on_ranks(work, 4, timeout_s=60) == [[True] * 2] * 4


def test_weights_are_whole_only_while_they_run() -> None:
    """Gathered weights are freed after the forward pass (kept with `reshard: false`), and after the backward pass."""

    def work(rank: int, reshard: bool) -> list[Any]:
        tiny = start(replace(SPARSE, recompute="full"), rank, sharding={"reshard": reshard})
        seen: dict[str, Tensor] = {}

        def note(path: str, module: nn.Module, *_: Any) -> None:
            for name, parameter in module.named_parameters(recurse=False):
                assert not isinstance(parameter, DTensor), f"{path} runs on parts"
                seen[f"{path}.{name}"] = parameter

        for path, module in tiny.model.named_modules():
            module.register_forward_pre_hook(partial(note, path))
        tokens = torch.zeros(2, 10, dtype=torch.int64)
        engine = tiny.engine
        assert isinstance(engine, FSDP)
        loss = engine.forward(tokens, None, tokens, last=True).loss
        cut = [seen[name] for name in engine.cut]
        found = [sum(t.untyped_storage().nbytes() for t in cut) == (0 if reshard else sum(t.numel() * 4 for t in cut))]
        engine.backward(loss, last=True)
        found.append(sum(t.untyped_storage().nbytes() for t in cut) == 0)
        found.append(all(isinstance(tiny.model.get_parameter(name), DTensor) for name in engine.cut))
        engine.drop_gradients()
        return found

    assert each_case(work, 4, [(True,), (False,)]) == [[[True] * 3] * 4] * 2


def test_first_values_of_a_shard_equal_those_of_ddp() -> None:
    """A rank draws first values only for its own shard of a parameter. They are bitwise equal to DDP's."""

    def work(rank: int, case: Case, patch: pytest.MonkeyPatch) -> list[bool]:
        drawn: dict[str, int] = {}
        fill = FirstValues.fill

        def watched(self: FirstValues, name: str, out: Tensor, *box: Box) -> None:
            drawn[name] = drawn.get(name, 0) + out.numel()
            fill(self, name, out, *box)

        patch.setattr(FirstValues, "fill", watched)
        tiny = start(case, rank)
        patch.undo()
        other = start(replace(case, kind="ddp"), rank)
        there = {global_name(name): other.engine.state(name) for name in other.engine.layouts}
        assert isinstance(tiny.engine, FSDP)
        found = [drawn.get(name, 0) == held.numel() for name, held in tiny.engine.parameters.items()]
        for name in tiny.engine.layouts:
            found.append(all(torch.equal(t, there[global_name(name)][kind]) for kind, t in tiny.engine.state(name).items()))
        return [all(found), len(tiny.engine.cut) > 8]

    with pytest.MonkeyPatch.context() as patch:
        assert run_on_ranks(work, 4, SPARSE, patch, timeout_s=60) == [[True, True]] * 4


# --- collectives and bytes --------------------------------------------------------------------------------------------


UNITS: list[tuple[Case, dict[str, Any], dict[str, int], dict[str, int]]] = [
    # case, sharding, gathers, sums
    # two blocks and the head are gathered in both passes, the embedding only forward; gradients of all four are scattered
    (DENSE, {}, {"dp": 2 * 3 + 1}, {"dp": 4}),
    (DENSE, {"reshard": False}, {"dp": 4}, {"dp": 4}),
    (DENSE, {"prefetch": 0}, {"dp": 7}, {"dp": 4}),
    (replace(DENSE, recompute="full", microbatches=3), {"prefetch": 2}, {"dp": 3 * 7}, {"dp": 3 * 4}),
    # experts are gathered over edp; the shared expert is a unit of dp
    (SPARSE, {}, {"dp": 2 * 4 + 1, "edp": 2}, {"dp": 5, "edp": 1}),
    (replace(SPARSE, recompute="selective"), {"prefetch": 2}, {"dp": 9, "edp": 2}, {"dp": 5, "edp": 1}),
    (replace(SPARSE, recompute="full"), {"reshard": False}, {"dp": 5, "edp": 1}, {"dp": 5, "edp": 1}),
    # a tied table is gathered for embedding and head, but its gradient is scattered once
    (replace(SPARSE, model="gshard"), {}, {"dp": 2 * 3 + 4, "edp": 2}, {"dp": 3 + 1, "edp": 1}),
    # four tiles of each feed-forward network, two of the embedding and two of the head
    (replace(DENSE, tiles=4, head_tiles=2), {"prefetch": 2}, {"dp": 2 * (2 + 2 * 4 + 2) + 2}, {"dp": 2 + 2 * 4 + 4}),
]


@pytest.mark.parametrize("world", [2, 4])
def test_every_unit_is_gathered_twice_and_its_gradient_summed_once(world: int) -> None:
    def work(rank: int, case: Case, sharding: dict[str, Any]) -> list[dict[str, int]]:
        tiny = start(case, rank, sharding=sharding)
        tiny.step(0)
        tiny.mesh.communicator.reset_counts()
        tiny.accumulate(1)
        sent = tiny.mesh.communicator.counts()
        found = {name: {a: c.calls for (a, n), c in sent.items() if n == name} for name in ("all_gather", "reduce_scatter")}
        return [found["all_gather"], found["reduce_scatter"]]

    rows = [row for row in UNITS if row[0].world == world]
    for (case, sharding, *want), found in zip(rows, each_case(work, world, [row[:2] for row in rows]), strict=True):
        assert found == [want] * world, f"{case.layout} {sharding}"


def test_bytes_sent_are_those_of_zero_3() -> None:
    """A step sends (N - 1) / N of 2 `width` P bytes by gathers (compute dtype, `width` bytes an element) and of 4 P bytes by fp32 sums.
    The embedding is gathered once, in fp32."""

    def work(rank: int, precision: str, width: int) -> list[int]:
        tiny = start(replace(DENSE, precision=precision), rank)
        tiny.step(0)
        tiny.mesh.communicator.reset_counts()
        tiny.accumulate(1)
        sent = tiny.mesh.communicator.counts()
        table = tiny.model.get_parameter("embedding.weight").numel()
        rest = cut_numel(tiny) - table
        theory = [(2 * width * rest + 4 * table) // 2, 4 * (rest + table) // 2]
        return [sent["dp", "all_gather"].sent - theory[0], sent["dp", "reduce_scatter"].sent - theory[1]]

    assert each_case(work, 2, [("fp32", 4), ("bf16", 2)]) == [[[0, 0]] * 2] * 2


def test_debug_mode_knows_each_unit_by_name() -> None:
    def work(rank: int, patch: pytest.MonkeyPatch) -> list[str]:
        labels: set[str] = set()
        check = Agreement.check

        def noted(self: Agreement, ranks: tuple[int, ...], call: Call) -> None:
            labels.add(f"{call.name} {call.label}")
            check(self, ranks, call)

        patch.setattr(Agreement, "check", noted)
        patch.setenv(DEBUG, "20")
        start(replace(SPARSE, world=2, ep=1), rank).step(0)
        return sorted(labels)

    with pytest.MonkeyPatch.context() as patch:
        labels = set(run_on_ranks(work, 2, patch, timeout_s=60)[0])
    assert {"all_gather layers.1.moe", "all_gather embedding", "reduce_scatter the gradients of layers.0"} <= labels
