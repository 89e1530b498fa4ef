"""Laws of data-parallel engines: discarded gradients change nothing, loaded states give bitwise equal steps, no rank waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe.model.initialize import global_name
from moe.verify.cases import Case
from parallel.data.ddp import DDP
from parallel.data.deepspeed import load_deepspeed
from parallel.data.engine import AdamW
from parallel.data.load import given
from parallel.kfac.grafted import KfacEngine
from parallel.mesh.layout import Layout
from parallel.mesh.mesh import Degrees, Mesh
from tests.support.ranks import each_case, run_on_ranks
from tests.support.tiny import State, Tiny, same, start

KINDS = ("ddp", "fsdp", "zero1", "zero2", "zero3", "zero2+cpu", "zero3+cpu-all")
DIFFERENT = ("ddp", "fsdp", "zero2", "zero3", "zero3+cpu-all")  # stages 1 and 2 are one class


def on_ranks(work: Callable[[int, Case], Any], *, kinds: tuple[str, ...] = KINDS, world: int = 2, **case: Any) -> dict[str, list[Any]]:
    """Run work(rank, case) for one kind of engine after another on the same ranks. Return kind -> result of each rank."""
    load_deepspeed()  # imported before the fork, because it takes seconds
    cases = [(replace(Case("switch", kind, world, world, 1, "fp32"), **case),) for kind in kinds]
    return dict(zip(kinds, each_case(work, world, cases), strict=True))


def gradients(tiny: Tiny) -> dict[str, Tensor]:
    return {name: tiny.engine.gradient(name).clone() for name in tiny.engine.layouts}


def test_dropped_gradients_leave_no_trace() -> None:
    """Dropping gradients leaves weights and moments bitwise equal, and the next step equals that of an engine without these gradients.
    Their memory is freed, except with offload and stage 3, which keep one buffer."""

    def work(rank: int, case: Case) -> list[bool]:
        found, buffers = [], "+" in case.kind or case.kind == "zero3"
        tiny, other = start(case, rank), start(case, rank)
        for t in (tiny, other):
            t.step(0)
        before = tiny.state()
        for dropped in (5, 6):
            tiny.accumulate(dropped)
            tiny.engine.drop_gradients()
            found.append(same(tiny.state(), before) and (buffers or not any(grad.any() for _, grad in tiny.engine.owned_gradients())))
        found.append(tiny.adam_steps() == {1.0})
        norms = [t.step(1).total for t in (tiny, other)]
        found += [norms[0] == norms[1], same(tiny.state(), other.state()), not same(tiny.state(), before)]
        return found

    assert on_ranks(work, microbatches=2) == dict.fromkeys(KINDS, [[True] * 6] * 2)


def test_a_loaded_state_is_the_saved_one_and_goes_on_as_if_nothing_had_been() -> None:
    def work(rank: int, case: Case) -> list[bool]:
        unbroken, resumed = start(case, rank), start(case, rank, train={"seed": 8})
        for step in range(2):
            unbroken.step(step)
        saved = unbroken.state()
        resumed.step(7)  # a state that loading must replace
        found = [not same(resumed.state(), saved)]
        resumed.engine.load_state(saved, given(saved), steps=2)
        found += [same(resumed.state(), saved), resumed.adam_steps() == unbroken.adam_steps() == {2.0}]
        resumed.run = unbroken.run
        losses = [t.accumulate(2).loss for t in (unbroken, resumed)]
        norms = [t.finish().total for t in (unbroken, resumed)]
        return [*found, losses[0] == losses[1], norms[0] == norms[1], same(resumed.state(), unbroken.state())]

    kinds = tuple(kind for kind in KINDS if kind != "zero1")  # the next test loads a state into stage 1
    assert on_ranks(work, kinds=kinds) == dict.fromkeys(kinds, [[True] * 6] * 2)


def test_every_kind_goes_on_from_what_another_saved() -> None:
    """Each engine loads the states of the one before it in KINDS bit by bit. The next step gives equal loss and weights."""

    def work(rank: int, case: Case) -> list[str]:
        engines = {kind: start(replace(case, kind=kind), rank) for kind in KINDS}
        saved, after = {}, {}
        for kind, tiny in engines.items():
            for step in range(2):
                tiny.step(step)
            saved[kind] = named(tiny.state())
            after[kind] = (tiny.accumulate(2).loss, tiny.finish().total, weights(named(tiny.state())))
        failed = []
        for source, target in pairwise((*KINDS, KINDS[0])):
            tiny = engines[target]
            states = {name: saved[source][global_name(name)] for name in tiny.engine.layouts}
            tiny.engine.load_state(states, given(states), steps=2)
            equal = same(named(tiny.state()), saved[source]) and tiny.adam_steps() == {2.0}
            loss, norm, left = tiny.accumulate(2).loss, tiny.finish().total, weights(named(tiny.state()))
            wanted_loss, wanted_norm, wanted = after[source]
            near = loss == pytest.approx(wanted_loss, rel=1e-6) and norm == pytest.approx(wanted_norm, rel=1e-6)
            apart = max(float((left[n] - w).abs().max() / w.abs().max()) for n, w in wanted.items())
            if not (equal and near and apart < 1e-5):
                failed.append(f"{source} -> {target}: equal {equal}, near {near}, weights {apart:.1e} apart")
        return failed

    assert on_ranks(work, kinds=("zero1",)) == {"zero1": [[], []]}


def named(state: State) -> State:
    """Return the state by the parameters' names in checkpoints, without the prefixes that an engine adds."""
    return {global_name(name): kinds for name, kinds in state.items()}


def weights(state: State) -> dict[str, Tensor]:
    return {name: kinds["weight"] for name, kinds in state.items()}


SPARED = [{"kind": "full", "every": 2, "loss_chunks": 3}, {"kind": "selective", "loss_chunks": 7}]


def test_recompute_and_chunks_of_the_loss_change_no_number() -> None:
    """Losses, gradients, norms and final weights of two steps are equal with and without recomputation, and with a loss in chunks."""

    def work(rank: int, case: Case) -> list[float]:
        def run(**recompute: Any) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
            tiny = start(case, rank, recompute=recompute)
            numbers, first = [], {}
            for step in range(2):
                numbers.append(tiny.accumulate(step).loss)
                first = first or gradients(tiny)
                numbers.append(tiny.finish().total)
            return numbers, first, weights(tiny.state())

        numbers, first, left = run()
        apart = []
        for recompute in SPARED:
            found = run(**recompute)
            apart.append(max(abs(a / b - 1) for a, b in zip(found[0], numbers, strict=True)))
            largest = max(float(g.abs().max()) for g in first.values())
            apart.append(max(float((found[1][n] - g).abs().max() / max(g.abs().max(), 1e-3 * largest)) for n, g in first.items()))
            apart.append(max(float((found[2][n] - w).abs().max() / w.abs().max()) for n, w in left.items()))
        return apart

    for kind, ranks in on_ranks(work, kinds=("ddp", "fsdp", "zero2", "zero3"), microbatches=2).items():
        assert all(len(apart) == 3 * len(SPARED) and max(apart) < 1e-5 for apart in ranks), kind


def test_micro_batches_add_up_and_a_step_multiplies_gradients_by_its_factor() -> None:
    """Gradients of a batch in three micro-batches equal those in one. With a power of two, a step with the gradients of a scaled loss and
    its inverse as factor is bitwise the step of the plain loss."""

    def work(rank: int, case: Case) -> list[Any]:
        three, one = start(replace(case, microbatches=3), rank), start(case, rank)
        losses = [t.accumulate(0).loss for t in (three, one)]
        a, b = gradients(three), gradients(one)
        found: list[Any] = [losses, max(float((a[n] - b[n]).abs().max() / b[n].abs().max()) for n in a)]
        scaled = start(case, rank)
        for step in range(2):
            if step:
                one.accumulate(step)
            scaled.accumulate(step, scale=4.0)
            one.engine.step(0.125)
            scaled.engine.step(0.125, factor=0.25)
        return [*found, same(scaled.state(), one.state()), scaled.adam_steps() == {2.0}]

    for kind, ranks in on_ranks(work, kinds=DIFFERENT).items():
        for losses, difference, equal, counted in ranks:
            assert losses[0] == pytest.approx(losses[1], rel=1e-6) and difference < 2e-6, kind
            assert equal and counted, kind


@pytest.mark.parametrize(("kernels", "kinds"), [("cpu", DIFFERENT), ("reference", ("ddp", "fsdp", "zero3"))])
def test_ranks_whose_experts_get_no_token_take_part(kernels: str, kinds: tuple[str, ...]) -> None:
    """If all tokens choose expert 0 of rank 0, no rank hangs, gradients of rank 1's experts are zero, and dense weights still change."""

    def work(rank: int, case: Case) -> list[Any]:
        tiny = start(case, rank, experts={"kernels": kernels}, router={"capacity_factor": None, "jitter": 0.0, "z_weight": 0.0})
        # the router reads only the first element of each embedding, which is large: all tokens choose expert 0
        states = tiny.state()
        (table,) = (state["weight"] for name, state in states.items() if name.startswith("embedding"))
        table[:, 0] = 50.0
        states["layers.1.moe.router.weight"]["weight"].zero_()[0, 0] = 1.0
        tiny.engine.load_state(states, given(states), steps=0)
        losses, loads, mine = [], [], []
        for step in range(2):
            numbers = tiny.accumulate(step)
            mine.append(float(tiny.engine.gradient("layers.1.moe.experts.w1").abs().max()))
            losses.append(numbers.loss)
            loads.append(numbers.layers[0].load)
            tiny.finish()
        return [losses, loads, mine]

    for kind, ((losses, loads, mine), (losses_1, _, mine_1)) in on_ranks(work, kinds=kinds).items():
        assert loads == [[1.0, 0.0, 0.0, 0.0]] * 2, kind
        assert min(mine) > 0 and mine_1 == [0.0] * 2, kind
        assert losses == losses_1 and len(set(losses)) == 2, kind


def test_one_process_needs_no_group() -> None:
    """One process without a process group gives the losses and norms of two ranks."""

    def alone(rank: int, case: Case) -> list[float]:
        dist.destroy_process_group()
        tiny = start(case, rank)
        found = [tiny.accumulate(0).loss, tiny.finish().total, tiny.accumulate(1).loss]
        tiny.finish()
        if not dist.is_initialized():  # run_on_ranks ends with a barrier, which needs a group
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return found

    def together(rank: int, case: Case) -> list[float]:
        tiny = start(case, rank)
        return [tiny.accumulate(0).loss, tiny.finish().total, tiny.accumulate(1).loss]

    for kind, of_two in on_ranks(together, kinds=("ddp", "fsdp", "zero1", "zero3")).items():
        (one,) = on_ranks(alone, kinds=(kind,), world=1)[kind]
        assert of_two == [pytest.approx(one, rel=1e-5)] * 2, kind


def test_gradients_are_shares_of_the_global_mean() -> None:
    """Gradients are sums over ranks, not means: an expert's gradient with ep 1 equals that with ep 2. A step clears gradients: the same
    batch after a step at learning rate 0 gives the same gradients, not twice as large ones."""

    def work(rank: int, case: Case) -> list[Tensor]:
        tiny = start(case, rank)
        tiny.accumulate(0)
        found = gradients(tiny)
        tiny.engine.step(lr=0.0)
        tiny.accumulate(0)
        assert same({"": gradients(tiny)}, {"": found})
        return [found["layers.1.moe.experts.w1"], found["layers.1.moe.router.weight"], found["norm.weight"]]

    split, copied = on_ranks(work, kinds=DIFFERENT), on_ranks(work, kinds=DIFFERENT, ep=1)
    for kind in DIFFERENT:
        (first, second), ((whole, router, norm), (again, _, _)) = split[kind], copied[kind]
        torch.testing.assert_close(torch.cat([first[0], second[0]]), whole, rtol=1e-5, atol=1e-7)
        assert torch.equal(whole, again) and torch.equal(first[1], second[1]), kind
        torch.testing.assert_close(first[1], router, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(first[2], norm, rtol=1e-5, atol=1e-7)


# --- DDP's own sums ---------------------------------------------------------------------------------------------------


def test_ddp_sums_each_gradient_once_a_step_whatever_the_micro_batches() -> None:
    """Bytes of all-reduces in a step equal the formula: dense gradients once over dp, experts' gradients once over edp."""

    def work(rank: int) -> list[Any]:
        found = []
        for ep, microbatches in ((2, 1), (2, 3), (4, 3), (1, 1)):
            tiny = start(Case("switch", "ddp", 4, ep, microbatches, "fp32"), rank)
            tiny.step(0)  # DDP rebuilds its buckets in the first step
            tiny.mesh.communicator.reset_counts()
            tiny.accumulate(1)
            # sums of a step: float64 of metrics (2; of the layer 7, choices by expert, 4 of its biases), 4 int64 that count tokens, chats
            row = 8 * (2 + 7 + 4 + 4) + 8 * 4
            sizes = {True: 0, False: 0}
            for name, p in tiny.model.named_parameters():
                sizes[".experts." in name] += 4 * p.numel()
            c = {key: n.bytes for key, n in tiny.mesh.communicator.counts().items() if key[1] == "all_reduce"}
            theory = {("dp", "all_reduce"): sizes[False] + row + (sizes[True] if ep == 1 else 0)}
            if ep == 2:
                theory["edp", "all_reduce"] = sizes[True]
            found.append([c, theory])
        return found

    for found in run_on_ranks(work, 4, timeout_s=60):
        for measured, theory in found:
            assert measured == theory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ddp_without_ranks_is_plain_adamw(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, twin = nn.Linear(3, 5), nn.Linear(3, 5)
    for m in (model, twin):
        m.to(dtype)
    twin.load_state_dict(model.state_dict())
    settings = AdamW((0.8, 0.9), 1e-6, 0.3, lambda name, p: name == "weight")
    engine = DDP(
        model, layouts={n: Layout(tuple(p.shape)) for n, p in model.named_parameters()}, mesh=Mesh.of(Degrees()), optimizer=settings
    )
    plain = torch.optim.AdamW(
        [{"params": [twin.weight], "weight_decay": 0.3}, {"params": [twin.bias], "weight_decay": 0.0}],
        lr=0.1,
        betas=(0.8, 0.9),
        eps=1e-6,
        fused=True,
    )
    for step in range(4):
        x = torch.randn(7, 3, dtype=dtype)
        engine.backward(engine.forward(x, last=True).float().square().sum(), last=True)
        plain.zero_grad()
        twin(x).float().square().sum().backward()
        for group in plain.param_groups:
            group["lr"] = 0.1 * (step + 1)
        engine.step(0.1 * (step + 1))
        plain.step()
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_parameter_groups_are_by_decay_and_none_is_empty() -> None:
    settings = AdamW((0.9, 0.95), 1e-8, 0.1, lambda name, p: p.ndim > 1)
    a, b = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    groups = settings.groups([("a", a), ("b", b)])
    assert {g["weight_decay"]: [id(p) for p in g["params"]] for g in groups} == {0.1: [id(a)], 0.0: [id(b)]}
    assert [g["weight_decay"] for g in settings.groups([("b", b)])] == [0.0]


def test_casts_at_each_step_change_no_number() -> None:
    """Losses, norms and states of three steps in bf16 are bitwise those of casts at each use. The model holds 16-bit weights, and a
    checkpoint of one form continues in the other."""

    def work(rank: int, case: Case) -> list[bool]:
        found = []
        for model, tied, ep, pp in (("switch", True, 2, 1), ("dense", False, 1, 2), ("kfac", False, 2, 1)):
            chosen = replace(case, model=model, ep=ep, pp=pp, layers=2 * pp)
            use, held = (start(chosen, rank, precision={"casts": casts}, model={"tied_embeddings": tied}) for casts in CASTS)
            for step in range(3):
                found.append(use.accumulate(step).loss == held.accumulate(step).loss and use.finish() == held.finish())
            found.append(same(use.state(), held.state()))
            engine = held.engine.engine if isinstance(held.engine, KfacEngine) else held.engine
            assert isinstance(engine, DDP)
            narrow = {name for name, weight in engine.weights.items() if weight.dtype == torch.bfloat16}
            kept = [w.dtype == torch.float32 for w in use.model.parameters()]
            found.append(narrow == engine.masters.keys() and len(narrow) > len(engine.weights) // 2 and all(kept))
            again = start(chosen, rank, precision={"casts": CASTS[1]}, model={"tied_embeddings": tied}, train={"seed": 8})
            again.run = held.run
            again.engine.load_state(use.state(), given(use.state()), steps=3)
            found.append(again.accumulate(3).loss == held.accumulate(3).loss)
        return found

    assert on_ranks(work, kinds=("ddp",), precision="bf16", microbatches=3, batch=12) == {"ddp": [[True] * 18] * 2}


CASTS = ("use", "step")
