"""`record` and `moe verify --compare` on small recordings, and the laws of a recording."""

from __future__ import annotations

import json
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe.cli.main import main as moe
from moe.verify import record
from moe.verify.yours.align import common, nearest, parts
from moe.verify.yours.causes import explain
from moe.verify.yours.judge import Comparison
from moe.verify.yours.recorder import Step
from moe.verify.yours.rows import _global
from moe.verify.yours.values import Key, Piece, Recorded, Recording
from parallel.errors import BadInput
from tests.peers.programs.run import compared
from tests.support.ranks import run_on_ranks


def _net() -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 10), nn.Dropout(0.3), nn.BatchNorm1d(10), nn.Linear(10, 3))
    return net, torch.optim.AdamW(net.parameters(), lr=0.1), torch.randn(7, 6)


def test_recording_changes_no_number_and_leaves_no_hook(tmp_path: Path) -> None:
    """A recorded run of three steps ends with the weights, moments and random numbers of one that is not recorded, to the bit."""
    ends = []
    for recorded in (False, True):
        net, optimizer, x = _net()
        for number in range(3):
            for _ in record(tmp_path / "r", net, optimizer, on=recorded and number == 1):
                optimizer.zero_grad()
                net(x).square().mean().backward()
                optimizer.step()
        hooks = [h for m in net.modules() for h in (m._forward_hooks, m._forward_pre_hooks)]
        assert not any(hooks) and not any(p._post_accumulate_grad_hooks for p in net.parameters())
        ends.append([*net.state_dict().values(), *(s["exp_avg"] for s in optimizer.state.values()), torch.rand(3)])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    assert len(Recording.read(tmp_path / "r", what="ONE").rounded) == 3


def test_a_record_has_what_the_step_computed(tmp_path: Path) -> None:
    net, optimizer, x = _net()
    for step in record(tmp_path / "r", net, optimizer):
        first = net[0](x)
        loss = net[3](first).square().mean()
        loss.backward()
        before = net[0].weight.grad.clone()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
        step.note("loss", loss)
        optimizer.step()
    pieces = Recording.read(tmp_path / "r", what="ONE").ranks[0].pieces
    expected = {
        Key("input", "0", "0.0"): x,
        Key("output", "0"): first,
        Key("gradient", "0.weight"): before,
        Key("local gradient", "0.weight"): before,
        Key("weight after", "0.weight"): net[0].weight,
        Key("note", "loss"): loss,
    }
    for key, tensor in expected.items():
        assert torch.equal(pieces[key][0].values, tensor.detach()), key
    order = list(pieces)
    assert order.index(Key("output gradient", "3")) < order.index(Key("output gradient", "0")) < order.index(Key("norm", "total"))


def test_the_order_of_gradients_does_not_depend_on_the_number_of_micro_batches(tmp_path: Path) -> None:
    """A parameter's gradient comes after its own module's output gradient and before that of the module below, so that the first deviation
    in backward order is the first cause."""
    orders = []
    for micro in (1, 3):
        net, optimizer, x = _net()
        for _ in record(tmp_path / "r", net, optimizer):
            optimizer.zero_grad()
            for part in torch.cat((x, x[:2])).chunk(micro):
                net(part).square().mean().backward()
            optimizer.step()
        one = Recording.read(tmp_path / "r", what="ONE")
        orders.append([key for key in Comparison.of(one, one).order if key.kind in ("output gradient", "gradient")])
    assert orders[0] == orders[1]
    last, above, first = (Key("output gradient", "3"), Key("gradient", "3.weight"), Key("output gradient", "0"))
    assert orders[1].index(last) < orders[1].index(above) < orders[1].index(first)


def test_samples_of_parts_have_elements_of_the_sample_of_the_whole() -> None:
    whole = torch.arange(256.0 * 320).reshape(256, 320)
    one = Piece.of(whole, "layers.0.weight", 2**10)
    assert one.sampled and one.values.numel() <= 2**10
    assert one.norm is not None and abs(one.norm / float(whole.double().norm()) - 1) < 1e-6
    for number, rows in enumerate(whole.chunk(2)):
        here = Piece.of(rows, "layers.1.weight", 2**10)  # names differ in numbers only
        pairs = [common(one, here, part.maps) for part in parts(one.shape, here.shape, None)]
        assert torch.equal(*pairs[number]) and pairs[number][0].numel() >= 2**8  # of 2**10: one step of halving less along each dim
        assert not torch.equal(*pairs[1 - number])


def test_a_strided_shard_has_the_elements_that_torch_gives_it() -> None:
    """A fused weight is cut in each half, and FSDP2 cuts a tensor-parallel shard again: its elements are not contiguous."""

    def work(rank: int) -> list[int]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor
        from torch.distributed.tensor.placement_types import _StridedShard

        whole = torch.arange(7.0 * 24).reshape(7, 24)
        tensor = distribute_tensor(whole, init_device_mesh("cpu", (2, 2)), [Shard(0), _StridedShard(1, split_factor=2)])
        piece = Piece.of(tensor, "w", 2**10)
        expected = whole[piece.places[0]][:, piece.places[1]]
        assert torch.equal(piece.values, expected) and torch.equal(piece.values, piece.cut(whole))
        return piece.places[1].tolist()

    for rank, held in enumerate(run_on_ranks(work, 4)):
        first = 6 * (rank % 2)
        assert held == [*range(first, first + 6), *range(first + 12, first + 18)]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11], "3 blocks (such as q, k, v) were each cut over ranks before they were joined along dim 0"),
        ([6, 7, 8, 9, 10, 11, 0, 1, 2, 3, 4, 5], "the shards together are equal up to a permutation along dim 0 (here [6, 7"),
        ([0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 10], "other values before the step"),
    ],
)
def test_rows_that_another_rank_holds_are_named_as_an_order(rows: list[int], said: str) -> None:
    """Found with transformers' Kimi Linear and Bailing hybrid: q, k and v were each cut over FSDP's ranks, then joined."""
    weight = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))

    def of(rank: int, w: Tensor, **placed: Any) -> Recorded:
        return Recorded(rank, 2, pieces={Key("weight", "conv.weight"): [replace(Piece.of(w, "conv.weight", 99), **placed)]})

    ranks = [of(rank, weight[rows].chunk(2)[rank], whole=(12, 5), offset=(6 * rank, 0)) for rank in range(2)]
    comparison = Comparison(of(0, weight), ranks, [of(0, weight)])
    comparison.run(explain)
    (deviation,) = [d for d, _ in comparison.found]
    assert not deviation.passed and said in deviation.cause


@pytest.mark.parametrize(("error", "passed"), [(1e-8, True), (5e-8, False)])
def test_rounding_of_a_ranks_small_rows_is_relative_to_these_rows(error: float, passed: bool) -> None:
    """Found with GPT-OSS on four ranks: a rank held the router's rows of experts that few tokens choose."""
    weight = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    gradient = weight / weight.abs().amax(1, keepdim=True) * torch.tensor([[0.01], [0.01], [1.0], [1.0]])

    def of(rank: int, w: Tensor, g: Tensor) -> Recorded:
        values = {"weight": w, "gradient": g}
        return Recorded(rank, 2, pieces={Key(kind, "w"): [Piece.of(value, "w", 99)] for kind, value in values.items()})

    off = torch.zeros(4, 3)
    off[0, 0] = 1
    ranks = [of(rank, weight.chunk(2)[rank], (gradient + error * off).chunk(2)[rank]) for rank in range(2)]
    comparison = Comparison(of(0, weight, gradient), ranks, [of(0, weight, gradient - 1e-8 * off)])
    comparison.run(lambda *_: (None, ""))
    assert [d.passed for d, _ in comparison.found if d.kind == "gradient"] == [passed]


@pytest.mark.parametrize(("error", "passed"), [(2e-6, True), (5e-3, False)])
def test_an_update_of_a_sampled_weight_may_differ_as_its_gradient_may(error: float, passed: bool) -> None:
    """Found with transformers' Gemma 4 and Dots 3: the norm of a large weight took the place of rank 0's elements of its gradient."""
    draws = torch.Generator().manual_seed(0)
    weight, gradient = torch.randn(256, 320, generator=draws), torch.randn(256, 320, generator=draws)
    gradient[::2] *= 1e-5
    noise = 1e-6 * torch.randn(256, 320, generator=draws)

    def of(rank: int, g: Tensor, wrong: float, take: Any) -> Recorded:
        after = weight - (0.01 + wrong) * g / (g.abs() + 1e-6)  # Adam's first step
        values = {"weight": weight, "gradient": g, "weight after": after}
        return Recorded(rank, 2, pieces={Key(kind, "w"): [Piece.of(take(value), "w", 2**10)] for kind, value in values.items()})

    ranks = [of(rank, gradient + noise, error - 2e-6, lambda t, rank=rank: t.chunk(2)[rank]) for rank in range(2)]
    whole, rounded = of(0, gradient, 0, lambda t: t), of(0, gradient - noise, 0, lambda t: t)
    comparison = Comparison(whole, ranks, [rounded])
    comparison.run(lambda *_: (None, ""))
    assert [d.passed for d, _ in comparison.found] == [True, True, passed]


def test_counts_of_tokens_are_sums_over_micro_batches_and_ranks() -> None:
    """Found with DeepSpeed's gate: tokens of each expert in each micro-batch, which no rank has as the single process does."""
    for last in (1, 2):
        counts = [[[5, 1], [0, 4]], [[3, 1], [1, 1]], [[0, 2], [1, last]]]  # of the single process and of two ranks, two calls each
        one, *ranks = [
            Recorded(rank, 2, pieces={Key("output", "gate", "2"): [Piece.of(torch.tensor(call), "gate", 99) for call in calls]})
            for rank, calls in enumerate(counts, -1)
        ]
        comparison = Comparison(one, ranks, [one])
        comparison.run(lambda *_: (None, ""))
        assert [d.passed for d, _ in comparison.found] == [last == 1]


@pytest.mark.parametrize(
    ("dtype", "terms", "said"),
    [
        (torch.bfloat16, 1, "rounded to bf16"),
        (torch.bfloat16, 2, "sums of numbers that were rounded to bf16"),
        (torch.bfloat16, 4, "sums of numbers that were rounded to bf16"),
        (torch.float16, 1, "rounded to fp16"),
        (torch.float16, 2, "sums of numbers that were rounded to fp16"),
        (torch.float32, 2, "the computation of this gradient differs"),
    ],
)
def test_gradients_summed_in_16_bits_are_named(dtype: torch.dtype, terms: int, said: str) -> None:
    """Terms in fp32 have errors as large as those of bf16, but are not rounded to it."""
    draws = torch.Generator().manual_seed(0)
    weight, parts = torch.randn(8, 30, generator=draws), torch.randn(terms, 8, 30, generator=draws)
    wrong = parts.to(dtype).float() * (1 if dtype != torch.float32 else 1 + 4e-3 * torch.rand(parts.shape, generator=draws))

    def of(rank: int, gradient: Tensor) -> Recorded:
        values = {"weight": weight, "gradient": gradient}
        return Recorded(rank, 2, pieces={Key(kind, "w"): [Piece.of(value, "w", 999)] for kind, value in values.items()})

    one = of(0, parts.sum(0))
    comparison = Comparison(one, [of(rank, wrong.sum(0)) for rank in range(2)], [one])
    comparison.run(explain)
    (deviation,) = [d for d, _ in comparison.found if not d.passed]
    assert deviation.cause.startswith(said), deviation


def test_rows_left_over_are_padding_only_if_they_are_alike() -> None:
    one = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    padded = torch.cat((one[[3, 1]], torch.ones(2, 3), one[[0, 4, 2]], torch.ones(1, 3)))
    order = nearest(one, padded)
    assert order is not None and torch.equal(padded[order], one)
    padded[-1] = 2
    assert nearest(one, padded) is None and nearest(padded, one) is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("ONE", "got the word ONE, needed flags alone; a word only as MANY in --compare ONE MANY; fix: to test a recipe: moe verify --rec"),
        ("switch_tiny", "fix: to test a recipe: moe verify --recipe switch_tiny; "),
        ("--compare ONE", "--compare: got only ONE"),
        ("--compare no no", "no rank-0.json"),
    ],
)
def test_bad_input_is_one_line(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert moe(["verify", *words.split()]) == 2
    assert said in capsys.readouterr().err


def test_a_record_of_other_ranks_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, world in (("one", 1), ("many", 2)):
        Recorded(0, world).write(tmp_path / name, "rank-0")
    assert moe(["verify", "--compare", str(tmp_path / "one"), str(tmp_path / "many")]) == 2
    assert "records of 2 ranks" in capsys.readouterr().err


def test_vectors_of_an_experts_input_follow_its_rows() -> None:
    """Found with megatron-core: the gates of an expert's tokens, one number each, were a false deviation."""
    draws = torch.Generator().manual_seed(0)
    rows, gates, order = torch.randn(6, 3, generator=draws), torch.randn(6, generator=draws), torch.tensor([4, 1, 5, 0, 3, 2])

    def of(rank: int, x: Tensor, r: Tensor, g: Tensor) -> Recorded:
        values = {Key("input", "m", "0"): x, Key("input", "e", "0"): r, Key("input", "e", "1"): g}
        return Recorded(rank, 2, pieces={key: [Piece.of(value, "e", 99, hashed=key.name == "m")] for key, value in values.items()})

    for wrong in (False, True):
        here = gates[order] if not wrong else gates[order].flip(0)
        ranks = [of(rank, SAMPLES.chunk(2)[rank], rows[order].chunk(2)[rank], here.chunk(2)[rank]) for rank in range(2)]
        comparison = Comparison(of(0, SAMPLES, rows, gates), ranks, [of(0, SAMPLES, rows, gates + 1e-8)])
        comparison.run(lambda *_: (None, ""))
        assert [d.passed for d, _ in comparison.found if d.kind == "input"] == [True, True, not wrong]


@pytest.mark.parametrize("wrong", [False, True])
def test_rows_with_equal_inputs_are_told_apart_by_their_gradients(wrong: bool) -> None:
    """Found with DeepSpeed: two sequences began with the same token, so an expert got two equal rows with different gradients."""
    draws = torch.Generator().manual_seed(0)
    rows, gradients, order = torch.randn(6, 3, generator=draws), torch.randn(6, 3, generator=draws), torch.tensor([4, 1, 5, 0, 3, 2])
    rows[4] = rows[1]

    def of(rank: int, x: Tensor, r: Tensor, y: Tensor, g: Tensor) -> Recorded:
        values = {Key("input", "m", "0"): x, Key("input", "e", "0"): r, Key("output", "e"): y, Key("output gradient", "e"): g}
        return Recorded(rank, 2, pieces={key: [Piece.of(value, "e", 99, hashed=key.name == "m")] for key, value in values.items()})

    for exchanged in (order, torch.tensor([1, 4, 5, 0, 3, 2])):  # the two rows either way round
        here = gradients[exchanged] * (torch.tensor([[1.0]] * 5 + [[1.01]]) if wrong else 1.0)
        ranks = [of(rank, *(x.chunk(2)[rank] for x in (SAMPLES, rows[order], 2 * rows[order], here))) for rank in range(2)]
        comparison = Comparison(of(0, SAMPLES, rows, 2 * rows, gradients), ranks, [of(0, SAMPLES, rows, 2 * rows, gradients + 1e-8)])
        comparison.run(lambda *_: (None, ""))
        assert [d.passed for d, _ in comparison.found if d.kind == "output gradient"] == [not wrong]


def test_the_scale_of_a_ranks_gradients_is_that_of_a_shard_that_says_its_place() -> None:
    """Found with torchtitan: DTensors say their place, so rows of experts, in another order on each rank, were the first that looked like
    samples, and their ratio became the scale of all gradients."""
    x, g = (torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(2))

    def of(rank: int, first: Tensor, own: Tensor, rows: Tensor, **placed: Any) -> Recorded:
        values = {Key("input", "m", "0"): first, Key("output gradient", "head"): own, Key("output gradient", "expert"): rows}
        pieces = {key: [Piece.of(value, "m", 99, hashed=key.kind == "input")] for key, value in values.items()}
        pieces[Key("output gradient", "head")] = [replace(pieces[Key("output gradient", "head")][0], **placed)]
        return Recorded(rank, 2, pieces=pieces)

    other = torch.tensor([3, 0, 2, 1])
    ranks = [of(r, x.chunk(2)[r], g.chunk(2)[r], 2 * g[other].chunk(2)[r], whole=(4, 3), offset=(2 * r, 0)) for r in range(2)]
    one = of(0, x, g, g)
    assert Comparison(one, ranks, [one]).scales == [1.0, 1.0]


@pytest.mark.parametrize(
    ("kind", "share", "passed"), [("output gradient", 0.5, True), ("output gradient", 0.3, False), ("output", 0.5, False)]
)
def test_columns_of_an_output_gradient_may_be_terms_of_a_sum_next_to_copies(kind: str, share: float, passed: bool) -> None:
    """Found with transformers' latent attention: the rotary columns of its keys are summed over tp after the projection's output."""
    x, g = (torch.randn(4, 5, generator=torch.Generator().manual_seed(seed)) for seed in range(2))

    def of(rank: int, own: Tensor) -> Recorded:
        values = {Key("input", "m", "0"): x, Key(kind, "m"): own}
        return Recorded(rank, 2, pieces={key: [Piece.of(value, "m", 99, hashed=key.kind == "input")] for key, value in values.items()})

    ranks = [of(rank, torch.cat((g[:, :3], part * g[:, 3:]), 1)) for rank, part in enumerate((share, 0.5))]
    comparison = Comparison(of(0, g), ranks, [of(0, g)])
    comparison.run(lambda *_: (None, ""))
    assert [d.passed for d, _ in comparison.found if d.kind == kind] == [passed]


SAMPLES = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 9.0]])


class _Scaled(nn.Module):
    """Multiplies by one weight without dimensions."""

    def __init__(self, value: float = 2.0, name: str = "scale") -> None:
        super().__init__()
        self.name = name
        self.register_parameter(name, nn.Parameter(torch.tensor(value)))

    def forward(self, x: Tensor) -> Tensor:
        return x * getattr(self, self.name)


def _one_and_two(
    folder: Path, *, nets: list[nn.Module], gradient: Any, note: list[Tensor] | None = None, x: Tensor = SAMPLES, strided: bool = False
) -> tuple[Path, Path]:
    """Record a step of one process on samples x, and of two ranks on one half each: chunks, or every second sample.

    gradient: what reduction leaves on the ranks, or None."""
    for rank, net in enumerate(nets, -1):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        here = Step(net, (optimizer,), Recorded(rank, 2), 2**14)
        for step in record(folder / "one", net, optimizer) if rank < 0 else (here,):
            with step.hooks() if rank >= 0 else nullcontext():
                optimizer.zero_grad()
                net(x if rank < 0 else x[rank::2] if strided else x.chunk(2)[rank]).mean().backward()
                if rank >= 0 and gradient is not None:
                    next(net.parameters()).grad = torch.as_tensor(gradient[rank])
                if note:
                    step.note("load", note[rank + 1])
                optimizer.step()
        if rank >= 0:
            here.record.write(folder / "many", f"rank-{rank}")
    return folder / "one", folder / "many"


MEAN = 37 / 8, 37 / 8  # of the samples: the gradient of the scale on two ranks


@pytest.mark.parametrize(
    ("weights", "gradient", "note", "wrong"),
    [
        ((2.0, 2.0), MEAN, None, []),
        ((2.0, 2.0), None, None, ["gradient", "weight after"]),  # the mean of the ranks' own gradients is right
        ((2.0, 2.0), (5.0, 6.0), None, ["gradient", "weight after"]),  # no factor explains both ranks
        ((1.5, 2.5), MEAN, None, ["weight", "output", "weight after"]),  # the mean of their weights is right
        ((2.0, 2.0), MEAN, [[1.0, 3.0], [1.0, 1.0], [0.0, 2.0]], []),  # a sum over ranks
        ((2.0, 2.0), MEAN, [[1.0, 3.0], [3.0, 1.0], [3.0, 1.0]], ["note"]),  # its mean alone is right
    ],
)
def test_numbers_and_notes_are_compared_by_element(
    weights: tuple[float, float], gradient: tuple[float, float] | None, note: list[list[float]] | None, wrong: list[str], tmp_path: Path
) -> None:
    nets = [_Scaled(2.0), *map(_Scaled, weights)]
    one, many = _one_and_two(tmp_path, nets=nets, gradient=gradient, note=note and [torch.tensor(n) for n in note])
    code, _, said = compared(one, many)
    kinds = {row["value"] for row in json.loads((many / "result.json").read_text())["rows"] if not row["passed"]}
    assert (code, kinds) == (int(bool(wrong)), set(wrong)), said


def test_a_comparison_without_gradients_fails(tmp_path: Path) -> None:
    one, many = _one_and_two(tmp_path, nets=[_Scaled(), *(_Scaled(name="factor") for _ in range(2))], gradient=MEAN)
    code, _, said = compared(one, many)
    assert code == 1 and "no gradient of a parameter was compared" in said


def test_a_gradient_that_rounding_moves_far_is_not_compared(tmp_path: Path) -> None:
    one, many = _one_and_two(tmp_path, nets=[_Scaled() for _ in range(3)], gradient=MEAN)
    loose = Recorded.read(one / "rounded-2.json")
    key = Key("gradient", "scale")
    loose.pieces[key] = [replace(p, values=p.values * torch.inf) for p in loose.pieces[key]]
    loose.write(one, "rounded-2")
    code, _, said = compared(one, many)
    assert code == 1 and "gradients are not compared" in said and "not compared: gradient of scale" in said


def test_a_step_that_is_not_finite_in_another_order_is_refused(tmp_path: Path) -> None:
    net = _Scaled()
    Recorded(0, 1).write(tmp_path, "rank-0")
    with pytest.raises(BadInput, match="a gradient of scale that is not finite"):
        for _ in record(tmp_path, net):
            (net(torch.ones(2)) * torch.inf).sum().backward()
    assert not list(tmp_path.glob("rank-*"))  # no record of an earlier step is left


def test_states_of_all_objects_are_restored_in_their_dtype(tmp_path: Path) -> None:
    """A bf16 weight with fp32 moments, a scaler and a schedule: after four runs of the body they are as after one."""
    ends = []
    for on in (False, True):
        net = nn.Linear(4, 4).bfloat16()
        nn.init.constant_(net.weight, 0.5)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        optimizer.state[net.weight]["moment"] = torch.full((4, 4), 1 / 3)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=1)
        for _ in record(tmp_path, net, optimizer, schedule, scaler, on=on):
            scaler.scale(net(torch.ones(1, 4, dtype=torch.bfloat16)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            optimizer.state[net.weight]["moment"] += 1
        ends.append((optimizer.state[net.weight]["moment"], scaler.get_scale(), schedule.last_epoch, optimizer.param_groups[0]["lr"]))
    assert torch.equal(ends[0][0], ends[1][0]) and ends[0][0].dtype == ends[1][0].dtype == torch.float32
    assert ends[0][1:] == ends[1][1:]


@pytest.mark.parametrize("name", ["rank-0.json", "rank-0.pt"])
@pytest.mark.parametrize("content", [b"", b"{}", b"no record"])
def test_a_broken_record_is_one_line(name: str, content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Recorded(0, 1, pieces={Key("note", "loss"): [Piece.of(torch.ones(2), "loss", 8)]}).write(tmp_path, "rank-0")
    (tmp_path / name).write_bytes(content)
    assert moe(["verify", "--compare", str(tmp_path), str(tmp_path)]) == 2
    assert "record the step again" in capsys.readouterr().err


@pytest.mark.parametrize("strided", [False, True])
def test_samples_of_a_large_first_input_are_found_by_hash(strided: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, whole = torch.randn(8, 4096), nn.Linear(4096, 2, bias=False)
    gradient = torch.autograd.grad(whole(x).mean(), whole.weight)[0]
    one, many = _one_and_two(tmp_path, nets=[deepcopy(whole) for _ in range(3)], gradient=(gradient,) * 2, x=x, strided=strided)
    code, _, said = compared(one, many)
    assert code == 0 and " 0 differ, 0 not compared" in said, said


def test_ranks_of_different_steps_are_refused(tmp_path: Path) -> None:
    for rank in range(2):
        Recorded(rank, 2, step=str(rank)).write(tmp_path, f"rank-{rank}")
    with pytest.raises(BadInput, match="records of different steps"):
        Recording.read(tmp_path, what="MANY")


@pytest.mark.parametrize("one", [[[0, 3], [2, 1]], [[0, 1], [1, 0]]], ids=["all", "no token chose an expert of rank 1"])
@pytest.mark.parametrize("rest", [-1, 2])
def test_choices_that_ranks_number_from_0_are_the_single_processs(one: list[list[int]], rest: int) -> None:
    """Each of two ranks holds two of four experts. `rest`: its number for all other experts."""
    whole = torch.tensor(one).double()
    here = torch.stack([torch.where((whole // 2) == rank, whole - 2 * rank, rest) for rank in range(2)])
    assert torch.equal(_global(whole, here), whole)
    here[0, 0, 0] = rest  # an expert of no rank
    assert _global(whole, here) is None
