"""A tiled layer equals the untiled one in output, gradients, steps, first values and checkpoints, and needs less memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from moe.checks.together import check_run
from moe.experts.experts import Experts
from moe.kernels import choose
from moe.model.initialize import global_name
from moe.model.transformer import Transformer
from moe.nn.context import Context
from moe.nn.linear import FeedForward
from moe.parallelize.build import build as build_model
from moe.parallelize.build import save_memory
from moe.parallelize.plan import lay_out
from moe.recipe import sections
from moe.recipe.load import build_run
from moe.train.start import state
from moe.train.start.state import Counters
from moe.verify.cases import Case
from moe.verify.expected import FP32_TOLERANCE
from parallel.data.tiling import Tiled, tile_of, tiles_of, without_tiles
from parallel.errors import BadInput
from parallel.mesh.layout import Layout, Tile
from parallel.mesh.mesh import EXPERT, Degrees, Mesh
from parallel.store import checkpoint
from parallel.store.checkpoint import pieces
from parallel.store.stored import Reader
from tests.support.ranks import run_on_ranks
from tests.support.tiny import CPU, start

# B sequences, L length, D model, F hidden units, R rows, E experts
B, L, D, F = 3, 5, 8, 24
FFNS = ["relu", "gelu", "swiglu"]


def networks(ffn: str, tiles: int, dtype: torch.dtype) -> tuple[FeedForward, Tiled]:
    torch.manual_seed(0)
    whole, tiled = FeedForward(D, F, ffn), FeedForward(D, F, ffn).in_tiles(tiles)
    for name, parameter in whole.named_parameters():
        nn.init.normal_(parameter)
        for i, part in enumerate(parameter.detach().chunk(tiles, dim=int(name.startswith("w2")))):
            tiled.get_parameter(f"tiles.{i}.{name}").data = part.clone()
    return whole.to(dtype), tiled.to(dtype)


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return name of each whole parameter -> its gradient, concatenated from the tiles' gradients."""
    found: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found.setdefault(without_tiles(name), []).append(parameter.grad)
    return {name: torch.cat(parts, int(name.endswith("w2.weight"))) if len(parts) > 1 else parts[0] for name, parts in found.items()}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
@pytest.mark.parametrize("tiles", [2, 6])
@pytest.mark.parametrize("ffn", FFNS)
def test_a_sum_of_narrower_networks_is_the_network(ffn: str, tiles: int, dtype: torch.dtype, tolerance: float) -> None:
    """Output and gradients of a tiled feed-forward network equal the untiled one's, up to rounding."""
    whole, tiled = networks(ffn, tiles, dtype)
    x, toward = torch.randn(B, L, D, dtype=dtype, requires_grad=True), torch.randn(B, L, D, dtype=dtype)
    y = x.detach().clone().requires_grad_()
    want, got = whole(x), tiled(y)
    (want * toward).sum().backward()
    (got * toward).sum().backward()
    assert x.grad is not None and y.grad is not None
    expected = {"y": want, "x": x.grad} | whole_gradients(whole)
    found = {"y": got, "x": y.grad} | whole_gradients(tiled)
    assert expected.keys() == found.keys()
    for name, tensor in found.items():
        assert (tensor - expected[name]).abs().max() <= tolerance * expected[name].abs().max(), name


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16])
def test_in_16_bits_a_tiled_network_is_no_farther_from_the_truth_than_the_untiled_one(compute: torch.dtype) -> None:
    """With 16-bit compute and many tiles, errors against fp64 do not exceed the untiled network's: tiles' results are added in fp32."""
    torch.manual_seed(1)
    x, toward = torch.randn(B, L, D).to(compute), torch.randn(B, L, D)

    def errors(network: nn.Module) -> list[float]:
        y = x.clone().requires_grad_()
        out = network(y)
        (out.float() * toward).sum().backward()
        assert y.grad is not None
        grads = whole_gradients(network)
        return [float((t.double() - truth[n]).norm() / truth[n].norm()) for n, t in ({"y": out.detach(), "x": y.grad} | grads).items()]

    whole, tiled = networks("swiglu", 12, torch.float32)
    exact, _ = networks("swiglu", 12, torch.float64)
    z = x.double().requires_grad_()
    out = exact(z)
    (out * toward).sum().backward()
    assert z.grad is not None
    truth = {"y": out.detach(), "x": z.grad} | whole_gradients(exact)
    for got, want in zip(errors(tiled), errors(whole), strict=True):
        assert 0 < got <= 1.25 * want


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize("ffn", FFNS)
@pytest.mark.parametrize("entry", ["rows", "tokens", "runs"])
def test_tiled_experts_are_the_experts(entry: str, ffn: str, kernels: str) -> None:
    """Tiled experts equal untiled ones, with dropout, for each `entry`: rows and their counts, tokens and gates, overlapped chunks."""
    if entry == "tokens":
        from moe.experts.experts import Routed
    num, tiles, rows = 4, 3, 14
    torch.manual_seed(2)
    sizes: dict[str, Any] = {"d_model": D, "d_ff": F, "ffn": ffn, "kernels": kernels}
    whole, tiled = Experts(num, **sizes).double(), Experts(num, **sizes, tiles=tiles).double()
    for name, parameter in whole.named_parameters():
        nn.init.normal_(parameter)
        for i, part in enumerate(parameter.detach().chunk(tiles, dim=1 if name == "w2" else 2)):
            tiled.get_parameter(f"tiles.{i}.{name}").data = part.clone()
    assert [t.hidden for t in tiled.tiles] == [slice(0, 8), slice(8, 16), slice(16, 24)]  # type: ignore[union-attr]
    dropped = (torch.rand(rows, F) > 0.3).double()
    x0, gate0 = torch.randn(rows, D, dtype=torch.float64), torch.rand(rows, 1, dtype=torch.float64)
    expert = torch.randint(num, (rows, 1))

    def passed(experts: Experts) -> list[Tensor]:
        x, gate = x0.clone().requires_grad_(), gate0.clone().requires_grad_()
        if entry == "tokens":
            plan = choose(kernels).plan(expert, torch.ones_like(expert, dtype=torch.bool), num_experts=num)
            out = experts(x, counts=Routed(gate, plan), dropped_RF=dropped)
        elif entry == "rows":
            out = experts(x, counts=[5, 0, 6, 3], dropped_RF=dropped)
        else:
            first, second = experts.chunks(2)
            parts = [experts(x[:5], counts=[5, 0], weights=first), experts(x[5:], counts=[6, 3], weights=second)]
            out = torch.cat(parts)
        out.sin().sum().backward()
        grads = {n: p.grad for n, p in experts.named_parameters()}
        if experts.num_tiles > 1:
            w = [n for n in ("w1", "w2", "w3") if f"tiles.0.{n}" in grads]
            grads = {n: torch.cat([grads[f"tiles.{i}.{n}"] for i in range(tiles)], 1 if n == "w2" else 2) for n in w}  # type: ignore[misc]
        return [out, x.grad, *([gate.grad] if entry == "tokens" else []), *grads.values()]  # type: ignore[list-item]

    for got, want in zip(passed(tiled), passed(whole), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


# --- the whole model --------------------------------------------------------------------------------------------------

SPARSE: dict[str, Any] = {
    "model": {
        "num_layers": 2,
        "d_model": D,
        "num_heads": 2,
        "d_ff": F,
        "moe_every": 2,
        "max_length": L,
        "ffn": "swiglu",
        "vocab_size": 259,
    },
    "experts": {"num_experts": 4, "shared": 1, "d_ff": 12, "dropout": 0.1},
    "train": {"global_batch": 8, "eval_sequences": 8},
}
TILES = {"tiling": {"ffn": 4, "head": 3}}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("beside", [{}, {"shared": 0, "residual": True}])
def test_first_values_are_the_untiled_ones_to_the_bit(beside: dict[str, Any], tied: bool) -> None:
    """Tiles have the untiled model's first values, bit by bit. Each element of an untiled tensor is in exactly one tile."""
    values = SPARSE | {"model": SPARSE["model"] | {"tied_embeddings": tied}, "experts": SPARSE["experts"] | beside}
    mesh = Mesh.of(Degrees())
    plain, _ = build_model(check_run(build_run(values), 1), mesh, device=CPU)
    tiled, layouts = build_model(check_run(build_run(values | TILES), 1), mesh, device=CPU)
    want = {p.name: p.tensor for n, t in plain.named_parameters() for p in pieces(global_name(n), lay_out(plain)[n], mesh, t)}
    got = {name: torch.full_like(t, torch.nan) for name, t in want.items()}
    for name, parameter in tiled.named_parameters():
        assert parameter.untyped_storage().nbytes() == 4 * parameter.numel()  # a tile has memory of its own, no view of the whole
        for piece in pieces(global_name(name), layouts[name], mesh, parameter):
            assert piece.shape == tuple(want[piece.name].shape)
            place = got[piece.name][tuple(slice(s, s + n) for s, n in zip(piece.start, piece.tensor.shape, strict=True))]
            assert bool(place.isnan().all())
            place.copy_(piece.tensor.detach())
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)
    assert sum(p.numel() for p in tiled.parameters()) == sum(p.numel() for p in plain.parameters())


def test_a_model_made_alone_is_the_one_that_is_laid_out() -> None:
    """A tiled model built directly equals the one that `build_model` makes on the meta device and lays out over a mesh."""
    run = build_run(SPARSE | TILES)
    alone = save_memory(Transformer(run.model, run.experts, run.router, vocab_size=run.vocab_size), tiling=run.tiling)
    made, _ = build_model(check_run(run, 1), Mesh.of(Degrees()), device=CPU)
    assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), made.parameters(), strict=True))
    names = [name for name, module in made.named_modules() if any(module is tile for tile in tiles_of(made))]
    assert len(names) == 3 + 4 + 4 + 4 and all(
        re.fullmatch(r".*tiles\.\d", name) for name in names
    )  # tiles of embedding, dense network, experts, shared expert


def test_a_tiled_model_computes_what_the_untiled_one_does() -> None:
    """Losses and gradients in fp32 agree within the bound of `moe verify`, with dropout, router noise and dropped tokens."""
    values = SPARSE | {"model": SPARSE["model"] | {"dropout": 0.1}, "router": {"capacity_factor": 1.0, "jitter": 0.1}}
    tokens = torch.randint(256, (B, L + 1), generator=torch.Generator().manual_seed(4))
    found = []
    for extra in ({}, TILES, TILES | {"recompute": {"kind": "selective", "loss_chunks": 3}}):
        run = check_run(build_run(values | extra), 1)
        model, layouts = build_model(run, Mesh.of(Degrees()), device=CPU)
        output = model(tokens[:, :-1], Context.of(tokens[:, :-1], seed=1), tokens[:, 1:])
        output.loss.backward()
        grads: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            for p in pieces(global_name(name), layouts[name], Mesh.of(Degrees()), parameter.grad):  # type: ignore[arg-type]
                whole = grads.setdefault(p.name, torch.zeros(p.shape))
                whole[tuple(slice(s, s + n) for s, n in zip(p.start, p.tensor.shape, strict=True))] = p.tensor
        found.append((output, grads))
    (want, right), *others = found
    for got, grads in others:
        torch.testing.assert_close(got.loss, want.loss, rtol=1e-6, atol=0)
        torch.testing.assert_close(got.layers[0].balance_loss, want.layers[0].balance_loss, rtol=1e-6, atol=0)
        assert grads.keys() == right.keys()
        for name, grad in grads.items():
            stack = [g for n, g in right.items() if _stack(n) == _stack(name)]
            assert (grad - right[name]).abs().max() <= FP32_TOLERANCE * max(float(g.abs().max()) for g in stack), name


def _stack(name: str) -> str:
    """Return the name of the stack that contains an expert's matrix."""
    return re.sub(r"experts\.\d+", "experts", name)


def test_tiles_lie_within_what_ranks_hold() -> None:
    """With etp 2 and ep 2, each rank cuts its own hidden units into tiles. All ranks' tiles together cover each expert's matrix once."""
    degrees = Degrees(dp=4, ep=2, etp=2)
    counted = {f"experts.{e}.w1": torch.zeros(5, 12) for e in range(4)}
    for rank in range(4):
        mesh = Mesh.of(degrees, rank)
        for index in range(3):
            layout = replace(Layout((4, 5, 12), {0: "ep", 2: "etp"}, EXPERT, "expert", "experts.{}.w1"), tile=Tile(2, index, 3))
            assert layout.local_shape(mesh) == (2, 5, 2)
            for p in pieces("", layout, mesh, torch.ones(layout.local_shape(mesh))):
                counted[p.name][tuple(slice(s, s + n) for s, n in zip(p.start, p.tensor.shape, strict=True))] += 1
    assert all(torch.equal(held, torch.ones(5, 12)) for held in counted.values())


def test_uneven_tiles_differ_by_one() -> None:
    runs = [Tile(0, i, 4).run(10) for i in range(4)]
    assert [r.stop - r.start for r in runs] == [2, 3, 2, 3] and [r.start for r in runs[1:]] == [r.stop for r in runs[:-1]]
    assert Layout((10, 3), tile=Tile(0, 1, 4)).region(Mesh.of(Degrees())) == (slice(2, 5), slice(0, 3))


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("layers.0.ffn.tiles.1.w1.weight", "layers.0.ffn.w1.weight"),
        ("layers.3.moe.experts.tiles.12.w1", "layers.3.experts.w1"),
        ("head.tiles.0.weight", "head.weight"),
        ("embedding.tiles.0.weight", "embedding"),
    ],
)
def test_a_tile_has_the_global_name_of_its_whole(name: str, whole: str) -> None:
    assert global_name(name) == whole
    assert tile_of(nn.Linear(2, 3), "weight", dim=0) is None


# --- engines and checkpoints ------------------------------------------------------------------------------------------


def stepped(rank: int, kind: str, tiling: dict[str, int], folder: Path | None, then: dict[str, int] | None) -> list[Any]:
    """Train two steps with `tiling`, save, and train two more, with the tiling `then` after a reload if given. Return losses and norms."""
    case = Case("gshard", kind, 2, 1, 3, "fp32", etp=2)
    tiny = start(replace(case, tiles=tiling.get("ffn", 1), head_tiles=tiling.get("head", 1)), rank)
    numbers = [value for step in range(2) for value in (tiny.accumulate(step).loss, tiny.finish().total)]
    if folder is not None:
        about: dict[str, Any] = {"recipe": tiny.run.model_dump(mode="json"), "data": ""}
        state.save(folder, tiny.engine, tiny.mesh, counters=Counters(2, 2), scale=tiny.scale, tokenizer={}, keep=1, **about)
        if then is not None:
            tiny = start(replace(case, tiles=then.get("ffn", 1), head_tiles=then.get("head", 1)), rank, train={"seed": 8})
            assert state.resume(
                state.find(folder, tiny.mesh, log=print), tiny.engine, tiny.mesh, counters=Counters(), scale=tiny.scale, log=print, **about
            )
            tiny.run = tiny.run.model_copy(update={"train": tiny.run.train.model_copy(update={"seed": 7})})
        numbers += [value for step in (2, 3) for value in (tiny.accumulate(step).loss, tiny.finish().total)]
    return numbers


def test_what_one_tiling_saves_another_goes_on_from(tmp_path: Path) -> None:
    """A run that changes its tiling at a resume (2 tiles to none, none to 5, 2 to 5) has the losses and norms of an uninterrupted run."""
    from parallel.data.deepspeed import load_deepspeed

    load_deepspeed()
    two, five = {"ffn": 2, "head": 3}, {"ffn": 5, "head": 2}
    (want, _) = run_on_ranks(stepped, 2, "zero1", {}, tmp_path / "plain", None, timeout_s=90)
    for name, (before, after) in {"to_none": (two, {}), "from_none": ({}, five), "other": (two, five)}.items():
        (got, _) = run_on_ranks(stepped, 2, "zero1", before, tmp_path / name, after, timeout_s=90)
        assert got == pytest.approx(want, rel=2e-6)
    plain, tiled = (Reader(checkpoint.numbered(tmp_path / n)[0][1]) for n in ("from_none", "to_none"))
    assert plain.names() == tiled.names() and plain.names("exp_avg_sq") == tiled.names("exp_avg_sq")


# --- memory of weights and gradients ----------------------------------------------------------------------------------


@dataclass(repr=False)  # a repr would read freed tensors
class Stream:
    """A small engine like FSDP: a unit's weights are in memory only while it computes, its gradients only until they are complete.
    alive(): current bytes of weights and gradients. peak: their maximum. ahead: number of units whose weights are fetched early."""

    units: list[nn.Module]
    ahead: int = 0
    home: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    gradients: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    peak: int = 0

    def alive(self) -> int:
        held = [t for unit in self.units for p in unit.parameters() for t in (p.data, p.grad) if t is not None]
        return sum({StorageWeakRef(t.untyped_storage()).cdata: t.untyped_storage().nbytes() for t in held}.values())

    def fetch(self, unit: nn.Module) -> None:
        for p in unit.parameters():
            if p.untyped_storage().nbytes() == 0:
                p.untyped_storage().resize_(self.home[p].untyped_storage().nbytes())
                p.data.copy_(self.home[p])
        self.peak = max(self.peak, self.alive())

    def free(self, unit: nn.Module) -> None:
        for p in unit.parameters():
            p.untyped_storage().resize_(0)

    def take(self, p: nn.Parameter, unit: nn.Module) -> None:
        self.peak = max(self.peak, self.alive())
        if all(q.grad is not None for q in unit.parameters()):
            for q in unit.parameters():
                self.gradients[q], q.grad = q.grad, None  # type: ignore[assignment]
            self.free(unit)

    @contextmanager
    def running(self) -> Iterator[Stream]:
        order, hooks = list(self.units), []
        for i, unit in enumerate(order):
            for p in unit.parameters():
                self.home[p] = p.data.clone()
                hooks.append(p.register_post_accumulate_grad_hook(lambda p, unit=unit: self.take(p, unit)))
            self.free(unit)
            later, earlier = order[i : i + 1 + self.ahead], order[max(0, i - self.ahead) : i + 1]
            hooks.append(unit.register_forward_pre_hook(lambda *_, now=later: [self.fetch(u) for u in now] and None))
            hooks.append(unit.register_forward_hook(lambda unit, *_: self.free(unit)))
            hooks.append(unit.register_full_backward_pre_hook(lambda *_, now=earlier[::-1]: [self.fetch(u) for u in now] and None))
        try:
            yield self
        finally:
            for hook in hooks:
                hook.remove()


def matrices(tiles: int) -> tuple[nn.Module, list[nn.Module]]:
    made: nn.Module = FeedForward(D, F, "gelu")
    made = made.in_tiles(tiles) if tiles > 1 else made  # type: ignore[operator]
    torch.manual_seed(3)
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made, list(tiles_of(made)) or [made]


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("tiles", [1, 2, 4, 12])
def test_live_weights_fall_with_the_tiles(tiles: int, ahead: int, compute: torch.dtype) -> None:
    """With q tiles, weights and gradients take 2/q of the untiled weights' bytes at most, and 1/q more if the next tile is prefetched."""
    size = 2 * D * F * 4  # bytes of both matrices
    model, units = matrices(tiles)
    with Stream(units, ahead=ahead).running() as stream:
        model(torch.randn(B, L, D, dtype=compute, requires_grad=True)).float().sum().backward()
    assert stream.peak == 2 * size // tiles + (size // tiles if ahead and tiles > 1 else 0)


@pytest.mark.parametrize("part", ["ffn", "experts", "head"])
def test_streamed_tiles_give_the_gradients_of_those_that_stay(part: str) -> None:
    """Gradients are equal whether the tiles' weights are freed between forward and backward pass or not: the graph saves no weights."""
    run = check_run(
        build_run(SPARSE | {"tiling": {"ffn": 3, "head": 4}, "recompute": {"loss_chunks": 2}, "precision": {"compute": "bf16"}}), 1
    )
    tokens = torch.randint(256, (B, L + 1), generator=torch.Generator().manual_seed(4))

    def passed(streamed: bool) -> list[Tensor]:
        model, _ = build_model(run, Mesh.of(Degrees()), device=CPU)
        home = {"ffn": model.layers[0].ffn, "experts": model.layers[1].moe.experts, "head": model.embedding}[part]  # type: ignore[union-attr]
        stream = Stream(list(tiles_of(home)))  # type: ignore[arg-type]
        if part == "head":  # untied here: a tied table's gradients are complete only after its second use
            model.embedding = nn.Parameter(torch.cat([t.weight.detach() for t in home.tiles]))  # type: ignore[union-attr]
            model.head = home
        loss = lambda: model(tokens[:, :-1], Context.of(tokens[:, :-1]), tokens[:, 1:]).loss  # noqa: E731
        if not streamed:
            loss().backward()
            return [p.grad for unit in stream.units for p in unit.parameters()]  # type: ignore[misc]
        with stream.running():
            loss().backward()
            assert stream.alive() == 0
        return [stream.gradients[p] for unit in stream.units for p in unit.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(passed(True), passed(False), strict=True))


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"tiling": {"ffn": 5}}, r"tiling.ffn: got 5, needed a divisor of model.d_ff=24"),
        (
            {"tiling": {"ffn": 8}},
            r"tiling.ffn: got 8, needed a divisor of the experts' d_ff=12: .*; fix: set it to one of \[1, 2, 3, 4, 6, 12\]",
        ),
        ({"tiling": {"head": 300}}, r"tiling.head: got 300, needed at most the vocabulary size 259"),
        ({"tiling": {"ffn": 0}}, r"tiling.ffn: got 0"),
    ],
)
def test_tiles_that_do_not_fit_are_refused(values: dict[str, Any], line: str) -> None:
    with pytest.raises(BadInput, match=line):
        check_run(build_run(SPARSE | values), 1)


def test_tiles_of_split_experts_divide_what_a_rank_holds() -> None:
    with pytest.raises(BadInput, match=r"tiling.ffn: got 4, needed a divisor of the experts' d_ff / degrees.etp=2=6"):
        check_run(build_run(SPARSE | {"tiling": {"ffn": 4}, "degrees": {"etp": 2, "ep": 1}}), 2)


def test_tiling_is_a_section_with_the_untiled_model_as_default() -> None:
    assert sections.Run().tiling == sections.Tiling(ffn=1, head=1)
