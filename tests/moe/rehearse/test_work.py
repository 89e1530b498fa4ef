"""A step on a GPU keeps its host waiting as seldom as it can. The rehearsal counts the waits, on tensors without values.

The counter itself is compared with operators of which torch's documentation says whether the host waits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from moe.checks.together import check_run
from moe.data import Dataset
from moe.data.token_shard import TokenShard
from moe.experts.dispatch import open_exchange
from moe.experts.dispatch.dispatcher import Sizes
from moe.experts.layer import MoELayer
from moe.nn.context import Context
from moe.nn.linear import normed
from moe.nn.vocabulary import PADDING
from moe.plan.job.of_recipe import network_of, plan_of
from moe.plan.machine.cluster import load_cluster
from moe.plan.machine.program import OWN
from moe.plan.time.layer_messages import grouping
from moe.plan.time.layer_time import _experts
from moe.recipe import sections
from moe.recipe.load import build_run
from moe.recipe.sections import Run
from moe.rehearse import Walked, open_job, walk
from moe.train.start.job import Job
from moe.verify.cases import Case
from parallel.mesh.host import on_device, read_later
from parallel.mesh.mesh import Axis, Degrees
from parallel.numerics.clip import squares, squares_together
from parallel.process import process
from parallel.process.process import World
from parallel.rehearse.pretended import Pretended, RehearsalError
from parallel.rehearse.stage import _triton_kernels, rehearsal
from parallel.rehearse.work import Counted
from tests.moe.rehearse.test_rehearse import run_of

GPU = torch.device("cuda", 0)
WAITS: dict[str, tuple[int, Callable[[Tensor], Any]]] = {
    "item": (1, lambda x: x[0].item()),
    "tolist": (1, lambda x: x.tolist()),
    "int": (1, lambda x: int(x.sum())),
    "cpu": (1, lambda x: x.cpu()),
    "cpu, not blocking": (0, lambda x: x.to("cpu", non_blocking=True)),
    "nonzero": (1, lambda x: (x > 1).nonzero()),
    "a mask": (1, lambda x: x[x > 1]),
    "indices": (0, lambda x: x[x.clamp(max=2)]),
    "bincount": (2, lambda x: torch.bincount(x)),
    "repeats": (2, lambda x: torch.repeat_interleave(x, x)),
    "repeats of known length": (0, lambda x: torch.repeat_interleave(x, x, output_size=10)),
    "a list": (1, lambda x: torch.tensor([1, 2], device=x.device)),
    "pinned": (0, lambda x: on_device(torch.tensor([1, 2]), x.device)),
    "read later": (1, lambda x: read_later(x, x.sum())()),
    "read after another wait": (1, lambda x: (read := read_later(x), x.sum().item(), read())),
    "arithmetic": (0, lambda x: (x + 1).sort().values.cumsum(0)),
}


@pytest.mark.parametrize("name", WAITS)
def test_an_operator_makes_the_host_wait_as_often_as_a_gpu_would(name: str) -> None:
    waits, run = WAITS[name]
    with rehearsal(World(0, 1, place="cuda")) as pretended:
        x = torch.arange(5, device=GPU)
        pretended.work.begin()
        run(x)
        assert sum(work.waits.total() for work in pretended.work.by_module.values()) == waits
        assert sum(work.copies.total() for work in pretended.work.by_module.values()) == (name in ("a list", "pinned"))
        assert all("test_work.py" in place for work in pretended.work.by_module.values() for place in work.waits)


def test_nccl_refuses_what_it_cannot_send() -> None:
    from parallel.mesh.collectives import sum_over
    from parallel.mesh.mesh import Degrees
    from parallel.process.process import connect

    with rehearsal(World(1, 2, place="cuda")):
        axis = connect(Degrees(dp=2), World(1, 2, place="cuda")).axis("dp")
        sum_over(torch.zeros(2, 3, device=GPU), axis)
        with pytest.raises(RehearsalError, match="of torch.int16, which NCCL does not know"):
            sum_over(torch.zeros(3, dtype=torch.int16, device=GPU), axis)
        with pytest.raises(RehearsalError, match="not contiguous"):
            torch.distributed.all_reduce(torch.zeros(2, 3, device=GPU).t(), group=axis.group)


def test_the_norm_of_all_gradients_is_at_most_ten_kernels_and_equals_one_sum_for_each() -> None:
    families, shapes = ("dense", "expert", "router"), [(3, 4), (5,), (2, 2, 7), (1,)] * 10
    mine = [(families[i % 2], torch.randn(shape, generator=torch.Generator().manual_seed(i))) for i, shape in enumerate(shapes)]
    together = squares_together(mine, families)
    torch.testing.assert_close(together, squares(mine, families=families, device=torch.device("cpu")), rtol=1e-12, atol=0)
    assert together[0] > 0 and together[2] == 0
    with rehearsal(World(0, 1, place="cuda")) as pretended:
        grads = [(family, torch.empty(grad.shape, device=GPU)) for family, grad in mine]
        pretended.work.begin()
        squares(grads, families=families, device=GPU)
        assert pretended.work.now.kernels <= 10 and not pretended.work.now.waits


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])  # ZeRO: tests/parallel/data/test_zero.py
def test_the_clip_factor_goes_to_the_kernel_of_adamw(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the gradient norm and the end of the step, no operator multiplies or divides anything: the fused AdamW gets the factor."""
    called: list[tuple[str, bool]] = []
    steps: list[list[tuple[str, bool]]] = []
    operator = Counted.operator

    def noted(work: Counted, func: Any, args: Any, kwargs: Any, *tensors: Any) -> None:
        called.append((func._opname, kwargs.get("grad_scale") is not None))
        operator(work, func, args, kwargs, *tensors)

    monkeypatch.setattr(Counted, "operator", noted)
    monkeypatch.setattr("moe.train.loop.step.clip_factor", lambda *_: called.clear() or 0.5)
    monkeypatch.setattr("moe.train.loop.step.move_biases", lambda *_: steps.append([*called]))
    walk(run_of(Case("gshard", kind, 2, 2, 2, "bf16", layers=2)), World(1, 2, place="cuda"), steps=1)
    (step,) = steps
    assert {scaled for name, scaled in step if name == "_fused_adamw_"} == {True}
    assert not [name for name, _ in step if name.removeprefix("_foreach_").startswith(("mul", "div"))]


@pytest.mark.parametrize("centered", [False, True])
def test_a_norm_of_16_bits_is_read_and_written_once_and_keeps_no_wider_copy(centered: bool) -> None:
    with rehearsal(World(0, 1, place="cuda")) as pretended:
        x = torch.empty(64, 1024, dtype=torch.bfloat16, device=GPU, requires_grad=True)
        gain = torch.ones(1024, device=GPU, requires_grad=True)
        pretended.work.begin()
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
            normed(x, gain, centered=centered, eps=1e-6)
        assert pretended.work.now.moved_bytes <= 2 * x.nbytes + 8 * 1024 + 8 * 64
        assert sum(t.nbytes for t in kept) <= x.nbytes + gain.nbytes + 2 * 4 * 64


# dispatch section, capacity factor, degrees, whether sequences have padding, waits of a layer
LAYERS = [
    ({}, None, {}, False, 0),
    ({}, 1.25, {}, False, 0),
    ({"kind": "all_to_all"}, None, {"ep": 4}, False, 1),
    ({"kind": "all_to_all", "overlap_chunks": 4}, None, {"ep": 2}, False, 1),
    ({"kind": "all_to_all", "overlap_chunks": 2}, 1.25, {"ep": 2, "etp": 2}, True, 1),
    ({"kind": "hierarchical", "node_size": 2}, 1.25, {"ep": 4, "etp": 2}, False, 1),
    ({"kind": "padded"}, 1.25, {"ep": 4}, False, 0),
    ({"kind": "padded"}, 1.25, {"ep": 2, "etp": 2}, True, 0),
    ({"kind": "padded"}, None, {"ep": 2, "etp": 2}, False, 1),
    ({"kind": "all_gather"}, 1.25, {"ep": 2, "etp": 2}, False, 1),
    ({}, 1.25, {"etp": 2}, False, 1),
    ({"kind": "padded"}, 1.25, {"ep": 2, "tp": 2}, True, 0),
    ({"kind": "all_to_all"}, 1.25, {"ep": 4, "tp": 2, "dp": 2}, True, 1),
]


def one_layer(
    dispatch: dict[str, Any], factor: float | None, degrees: dict[str, int], microbatches: int = 1, **router: Any
) -> tuple[Run, int]:
    """Return (the recipe of a model with one MoE layer, its number of ranks)."""
    model = {"num_layers": 1, "moe_every": 1, "d_model": 32, "d_ff": 48, "num_heads": 2, "vocab_size": 256, "max_length": 32}
    router = {"preset": "gshard", "capacity_factor": factor} | router
    parts = {
        "experts": {"num_experts": 8, "ffn": "swiglu"},
        "router": router,
        "degrees": degrees,
        "dispatch": dispatch,
        "train": {"global_batch": 8},
    }
    parts |= {"pipeline": {"microbatches": microbatches}, "precision": {"compute": "bf16"}}
    world = math.prod(degrees.values()) if "tp" not in degrees else degrees["tp"] * degrees.get("dp", 1)
    return check_run(build_run({"model": model, **parts}), world), world


def walked(*sizes: Any, **more: Any) -> Walked:
    run, world = one_layer(*sizes, **more)
    return walk(run, World(world - 1, world, place="cuda"), steps=1)


def half_padded(run: Run, world: World) -> Job:
    """Return the rehearsal's job, with batches of which the second half of each sequence is padding."""

    def batch(step: int, shard: TokenShard) -> Any:
        ids_NL = np.zeros(shard.shape, np.int64)
        ids_NL[:, shard.shape[1] // 2 :] = PADDING
        return ids_NL

    return replace(open_job(run, world), data=cast(Dataset, SimpleNamespace(train=SimpleNamespace(batch=batch))))


@pytest.mark.parametrize(("dispatch", "factor", "degrees", "padded", "waits"), LAYERS)
def test_a_step_waits_twice_and_a_layer_at_most_once(
    dispatch: dict[str, Any], factor: float | None, degrees: dict[str, int], padded: bool, waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if padded:
        monkeypatch.setattr("moe.rehearse.open_job", half_padded)
    found: Counter[tuple[str, str]] = Counter()
    for (module, passing), work in walked(dispatch, factor, degrees, 1 + padded).work.items():
        assert work.kernels > 0
        found[module, passing] += work.waits.total()
    assert found["layers.0.moe", "forward"] == waits * (1 + padded)  # each micro-batch waits
    assert found["", "forward"] == 2
    assert found.total() == waits * (1 + padded) + 2  # none in backward, none in attention


GROUPS = {"preset": "deepseek_v3", "num_choices": 2, "expert_groups": 4, "top_groups": 2}
ALL = {"kind": "all_to_all"}
ALIKE = {"group": "rank", "balance_scope": "micro_batch"}  # one group, which has tokens on all ranks of tp
# dispatch section, degrees, router section, kernels forward, kernels backward; with sp and tp, groups have tokens on several ranks. With
# sp, two ranks have copies of each expert: one kernel of the backward pass copies their gradients into a bucket of the sum
LAUNCHES: list[tuple[dict[str, Any], dict[str, int], dict[str, Any], int, int]] = [
    ({}, {}, {"preset": "switch", "capacity_factor": 1.25, "jitter": 0.01}, 16, 15),
    ({}, {}, {"preset": "glam", "capacity_factor": 1.25}, 15, 15),
    ({}, {}, {"preset": "mixtral"}, 13, 15),
    ({}, {}, GROUPS, 13, 15),
    (ALL, {"ep": 4}, {"preset": "switch", "capacity_factor": 1.25, "jitter": 0.01}, 23, 19),
    (ALL, {"ep": 4}, {"preset": "glam", "capacity_factor": 1.25}, 22, 18),
    (ALL, {"ep": 4, "sp": 2}, {"preset": "mixtral"}, 21, 19),
    (ALL, {"ep": 4, "sp": 2}, GROUPS, 21, 19),
    (ALL, {"ep": 4, "sp": 2}, {"preset": "glam", "capacity_factor": 1.25}, 23, 19),
    (ALL, {"ep": 2, "tp": 2}, {"preset": "glam", "capacity_factor": 1.25} | ALIKE, 23, 18),
]


@pytest.mark.parametrize(("dispatch", "degrees", "router", "forward", "backward"), LAUNCHES)
def test_a_layer_launches_few_kernels_and_the_planner_counts_them(
    dispatch: dict[str, Any], degrees: dict[str, int], router: dict[str, Any], forward: int, backward: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, count = Counter[str](), Axis.count

    def counted(axis: Axis, name: str, tensor: Tensor, **rows: Any) -> None:
        sent[name] += tensor.nbytes * axis.label.startswith("layers.0.router")
        count(axis, name, tensor, **rows)

    monkeypatch.setattr(Axis, "count", counted)
    (run, world), found = one_layer(dispatch, None, degrees, **router), walked(dispatch, None, degrees, **router)
    work = found.work
    assert work["layers.0.moe", "forward"].kernels <= forward
    assert work["layers.0.moe", "backward"].kernels <= backward
    if "ep" in degrees:  # of 8 sequences of 32 tokens no choice is dropped; rows of 32 bf16 numbers go and come back, forward and backward
        assert found.counts["ep", "all_to_all"].bytes == 4 * (8 * 32 // world) * run.router.num_choices * 32 * 2
    messages = [m for of in grouping(network_of(run), plan_of(run), OWN.router) for m in of]
    assert +sent == {m.name: m.handed for m in messages}  # of groups with tokens on several ranks
    if "tp" in degrees:  # the planner counts the kernels that divide tokens over tp with tensor parallelism
        return
    predicted = _experts(network_of(run), plan_of(run), load_cluster("h100-8"), OWN)
    for passing, one in (("forward", predicted.forward), ("backward", predicted.backward)):
        assert one.kernels == pytest.approx(work["layers.0.moe", passing].kernels, abs=2), passing


# dispatch section, capacity factor, degrees, router section, copies from the host in a pass of the layer
COPIES: list[tuple[dict[str, Any], float | None, dict[str, int], dict[str, Any], int]] = [
    (ALL | {"overlap_chunks": 2}, 1.25, {"ep": 2, "sp": 2}, {"preset": "glam"}, 0),
    ({"kind": "padded"}, 1.25, {"ep": 2, "sp": 2}, {"preset": "glam", "importance_weight": 0.1}, 0),  # in torch operations
    ({"kind": "all_gather"}, None, {"ep": 2, "etp": 2}, {"preset": "mixtral"}, 1),  # the number of this rank's choices
]


@pytest.mark.parametrize(("dispatch", "factor", "degrees", "router", "copies"), COPIES)
def test_a_layer_copies_nothing_from_the_host_that_it_already_has_on_the_gpu(
    dispatch: dict[str, Any], factor: float | None, degrees: dict[str, int], router: dict[str, Any], copies: int
) -> None:
    """In the second step, indices of a layer's tokens and experts are on the GPU."""
    run, world = one_layer(dispatch, factor, degrees, **router)
    work = walk(run, World(world - 1, world, place="cuda"), steps=2).work
    assert sum((work["layers.0.moe", passing].copies for passing in ("forward", "backward")), Counter()).total() == copies
    assert work["", "forward"].copies  # the step's tokens


class Shapes:
    """Within the context: shapes of the inputs and results of every operator and Triton kernel, and the numbers given to the kernels."""

    def __init__(self, pretended: Pretended, patch: pytest.MonkeyPatch) -> None:
        self.found: list[tuple[Any, ...]] = []
        work, operator = pretended.work, pretended.work.operator

        def noted(func: Any, args: Any, kwargs: Any, tensors: Any, made: Any) -> None:
            numbers = [leaf for leaf in tree_leaves((args, kwargs)) if not isinstance(leaf, Tensor)]
            self.found.append((func, work.passing, str(numbers), *(t.shape for t in (*tensors, *made))))
            operator(func, args, kwargs, tensors, made)

        patch.setattr(work, "operator", noted)
        for kernels in _triton_kernels():
            patch.setattr(kernels, "run", self._launched(kernels.run))

    def _launched(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def launched(kernel: Any, *args: Any, **named: Any) -> Any:
            given = [*args, *named.values()]
            self.found.append((kernel.fn.__name__, *(v.shape if isinstance(v, Tensor) else v for v in given)))
            return run(kernel, *args, **named)

        return launched


@pytest.mark.parametrize(
    ("times", "ep", "etp", "kernels"), [(10, 1, 1, "auto"), (3, 1, 1, "triton_persistent"), (3, 2, 1, "grouped_mm"), (10, 2, 2, "auto")]
)
def test_a_layer_with_a_capacity_has_constant_shapes_and_never_waits(times: int, ep: int, etp: int, kernels: str) -> None:
    """Ten (or three) passes with other choices, of which other numbers are dropped, call the same operators with the same shapes, so a CUDA
    graph could replay them. `padded` sends blocks of slots; a rank with all experts sends nothing."""
    world, sizes = World(ep * etp - 1, ep * etp, place="cuda"), {"d_model": 32, "d_ff": 48}
    router, passes, kept = sections.Router(preset="gshard", capacity_factor=1.25), [], set()
    with rehearsal(world) as pretended, pytest.MonkeyPatch.context() as patch:
        mesh = process.connect(Degrees(dp=world.size, ep=ep, etp=etp), world)
        with torch.device("meta"):
            layer = MoELayer(sections.Experts(num_experts=8, kernels=kernels), router, **sizes, ffn="swiglu", layer=0)
            layer.experts.hold(range(8 // ep), hidden=slice(0, 48 // etp))
        layer.to_empty(device=world.device)
        layer.dispatcher = open_exchange(sections.Dispatch(kind="padded"), mesh, Sizes(32, 8, 2, layer.experts.kernels)).layer("here")
        shapes = Shapes(pretended, patch)
        for number in range(times):
            shapes.found = []
            layer.zero_grad()
            patch.setattr("moe.router.router.balanced_logits", partial(any_logits, number))
            pretended.work.begin()
            x_BLD = torch.empty(4, 16, 32, dtype=torch.bfloat16, device=world.device, requires_grad=True)
            y_BLD, report = layer(x_BLD, Context.of(torch.zeros(4, 16, device=world.device)))
            y_BLD.sum().backward()
            passes.append(shapes.found)
            assert not sum((work.waits for work in pretended.work.by_module.values()), Counter())
            kept.add(int(pretended.known(report.kept)))
    assert len(kept) > 2 and len(passes[0]) > 100
    for found in passes[1:]:
        assert found == passes[0]


def any_logits(seed: int, tokens: int, *, num_experts: int, num_choices: int) -> Tensor:
    return torch.randn(tokens, num_experts, generator=torch.Generator().manual_seed(seed)) + torch.arange(num_experts) / 4
