"""LoRA: training adapters equals a plain reference on one process and on ranks, and adapters can be merged into their base. Checkpoints
hold adapters alone and name their base; frozen weights neither change nor cost memory of optimizer states or gradients."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from moe.checks.together import check_run
from moe.experts.experts import Experts as ExpertsStack
from moe.kernels.grouped import grouped_ffn
from moe.kernels.network import ByProduct
from moe.kernels.products import PRODUCTS
from moe.model.transformer import Transformer
from moe.nn.context import Context
from moe.nn.linear import linear_fp32
from moe.nn.lora import adapt, freeze, is_adapter
from moe.nn.lora import adapted as joined_with
from moe.nn.vocabulary import summed_loss
from moe.parallelize.build import build, save_memory
from moe.recipe.changes import function_changes
from moe.recipe.load import build_run
from moe.recipe.sections import Experts, Latent, Lora, Model, Recompute, Router, Run
from moe.train.start.opening import trained_parameters
from moe.train.start.restore import restore, whole
from moe.train.use.decode import Cached
from moe.verify.cases import Case
from moe.verify.expected import compare
from moe.verify.layouts import compute, run_world
from parallel.errors import BadInput
from parallel.mesh.mesh import Degrees, Mesh
from parallel.numerics.weight_gradient import linear
from parallel.store.stored import Reader
from tests.support import trained
from tests.support.networks import network_of
from tests.support.twins import three_steps_of

ALL = ("attention", "experts", "dense")


@dataclass(frozen=True)
class Adapted(Case):
    """A case of `moe verify` that trains LoRA adapters of rank 3 on `targets`; all other weights are frozen."""

    targets: tuple[str, ...] = ALL

    def run(self) -> Run:
        values = super().run().model_dump(mode="json")
        return build_run(values | {"lora": {"rank": 3, "alpha": 6.0, "targets": self.targets}})


def farthest(ran: Any, twin: Case) -> float:
    """Return the largest error against the reference. The error of the update is left out: Adam's first step magnifies the rounding of tiny
    gradients, so `moe verify` would compare it once more (moe/verify/expected.py)."""
    assert not isinstance(ran, str), ran
    return max(value for name, value in compare(ran, three_steps_of(twin)).items() if name != "update")


@pytest.mark.usefixtures("three_steps")
def test_three_steps_are_the_plain_twins() -> None:
    case = Adapted("gshard", "ddp", 1, 1, 3, "fp32", "selective")
    ran = compute(case)
    assert farthest(ran, case) < 1e-5
    assert ran.gradients and all(is_adapter(name) for name in ran.gradients)


@pytest.mark.usefixtures("three_steps")
def test_three_steps_on_ranks_are_the_plain_twins() -> None:
    cases: list[Case] = [
        Adapted("gshard", "ddp", 2, 2, 1, "fp32", "full"),
        Adapted("gshard", "fsdp", 2, 1, 3, "fp32"),
        Adapted("deepseek", "ddp", 2, 1, 1, "fp32", etp=2),
        Adapted("deepseek", "ddp", 2, 2, 1, "fp32", rows="overlapped", targets=("experts",)),
        Adapted("t5_untied", "fsdp", 2, 2, 1, "fp32", "full"),
        Adapted("latent", "ddp", 2, 2, 1, "fp32", tp=2, tensor="sliced"),
        Adapted("gshard", "zero3", 2, 1, 1, "fp32", tp=2, tensor="overlapped"),
        Adapted("deepseek", "ddp", 2, 1, 4, "fp32", pp=2, schedule="zb_v", layers=5),
    ]
    for case, ran in run_world(cases, 2):
        assert not isinstance(ran, str), (case.layout, ran)
        assert isinstance(case, Adapted)
        twin = Adapted(case.model, "ddp", 1, 1, 1, "fp32", targets=case.targets, layers=case.layers)
        assert farthest(ran[0], twin) < 1e-5, case.layout


@pytest.mark.usefixtures("three_steps")
@pytest.mark.parametrize("world", [2, 4])
def test_a_stage_without_adapters_passes_gradients_on(world: int) -> None:
    """The first of two stages has no adapters, or the last: targets name only parts of the other, or pipeline.layers gives it no layer."""
    given: list[dict[str, Any]] = [{"targets": ("experts",)}, {"targets": ("dense",)}, {"stages": (2, 0)}, {"stages": (0, 2)}]
    varied = ({"schedule": "1f1b"}, {"schedule": "zb_h1"}) if world == 2 else ({"kind": "ddp", "ep": 2}, {"kind": "fsdp"})
    cases: list[Case] = [
        replace(Adapted("switch", "ddp", world, 1, 3, "fp32", pp=2), **case, **values) for case in given for values in varied
    ]
    for case, ran in run_world(cases, world):
        assert not isinstance(ran, str), (case.layout, ran)
        assert isinstance(case, Adapted)
        assert farthest(ran[0], Adapted("switch", "ddp", 1, 1, 1, "fp32", targets=case.targets)) < 1e-5, case.layout


LATENT = Latent(key_rank=10, query_rank=14, rotary_size=4, value_size=5)


READS = {"kind": "encoder_decoder", "positions": "t5", "moe_every": 1}


@pytest.mark.parametrize(
    ("compute_dtype", "form", "source"),
    [(torch.float64, {}, 0), (torch.bfloat16, {}, 0), (torch.float64, {"latent": LATENT}, 0), (torch.float64, READS, 5)],
    ids=["fp64", "bf16", "latents", "encoder-decoder"],
)
def test_adapters_begin_as_the_base_and_can_be_merged(compute_dtype: torch.dtype, form: dict[str, Any], source: int) -> None:
    """With B = 0 logits are bitwise the base's, whose experts compute the same products one after another. A merged model has the adapted
    model's logits, also when decoding with a cache. `source`: tokens that an encoder reads."""
    sizes = Model(**{"num_layers": 2, "d_model": 24, "num_heads": 4, "d_ff": 20, "max_length": 9, "moe_every": 2, "ffn": "swiglu"} | form)
    parts: Any = (sizes, Experts(num_experts=4, shared=1), Router(preset="mixtral"))
    exact = compute_dtype == torch.float64
    model = Transformer(*parts, vocab_size=31, compute=compute_dtype).to(torch.float64 if exact else torch.float32).eval()
    stacks = [module for module in model.modules() if isinstance(module, ExpertsStack)]
    fused, plain = stacks[0].kernels, PRODUCTS["plain"].product
    base = {name: value.clone() for name, value in model.state_dict().items()}
    tokens_BL = torch.randint(31, (2, 9), generator=torch.Generator().manual_seed(1))
    context = Context.of(tokens_BL, source=source)
    with torch.no_grad():
        for stack in stacks:
            stack.kernels = ByProduct(fused, lambda _, *operands: plain(*operands), unit=1 if exact else 32)
        before = model(tokens_BL, context).logits_BLV
        for stack in stacks:
            stack.kernels = fused
        adapt(model, lora := Lora(rank=3, alpha=6.0, targets=ALL))
        freeze(model)
        adapters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        assert adapters.keys() == {name for name, _ in model.named_parameters() if is_adapter(name)} and not adapters.keys() & base.keys()
        attends = {name for name in base if re.search(r"\.(attention|cross)\.(q|k|v|out|\w+_down|\w+_up)\.", name)}
        assert attends == {
            name for name in base if re.search(r"\.(attention|cross)\.", name) and f"{name.removesuffix('.weight')}.lora_a" in adapters
        }
        generator = torch.Generator().manual_seed(2)
        for name, p in adapters.items():
            zero = name.endswith("lora_b") or name.endswith("_b") and ".experts." in name
            p.copy_(torch.zeros(p.shape) if zero else torch.randn(p.shape, generator=generator))
        assert torch.equal(model(tokens_BL, context).logits_BLV, before)
        for p in adapters.values():
            p.copy_(torch.randn(p.shape, generator=generator) / 5)
        unmerged = model(tokens_BL, context).logits_BLV
        alone = Transformer(*parts, vocab_size=31, compute=compute_dtype).to(base["embedding"].dtype).eval()
        for name, p in alone.named_parameters():
            stem = name.removesuffix(".weight")
            pair = (f"{stem}.lora_b", f"{stem}.lora_a") if f"{stem}.lora_a" in adapters else (f"{name}_a", f"{name}_b")
            found = (adapters[one] for one in pair if one in adapters)
            p.copy_(joined_with(base[name], *found, scale=lora.scale, dtype=p.dtype) if pair[0] in adapters else base[name])
        assert not torch.allclose(unmerged, before, atol=0.1)
        joined = alone(tokens_BL, context).logits_BLV
        assert (joined - unmerged).norm() <= (1e-14 if exact else 0.05) * unmerged.norm()  # one element in 16 bits may be far off
        if exact:
            torch.testing.assert_close(Cached(model, source=source, max_length=9)(tokens_BL, 0), unmerged[:, -1], rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def base(home: Path) -> Path:
    trained.train(trained.recipe(home, degrees={"ep": 2}), home / "base", ranks=2)
    return home / "base"


def adapted(home: Path, **sections: Any) -> Run:
    lora = {"rank": 2, "targets": ["attention", "experts"]}
    return trained.recipe(home, **{"lora": lora, "train": {"steps": 4, "save_every": 2}} | sections)


@pytest.mark.parametrize(("kind", "ranks"), [("ddp", 1), ("fsdp", 2), ("zero3", 2)])
def test_a_run_keeps_adapters_alone_and_goes_on(kind: str, ranks: int, home: Path, base: Path, tmp_path: Path) -> None:
    sharding = {"kind": kind} if not kind.startswith("zero") else {"kind": "zero", "stage": int(kind[-1])}
    if kind == "zero3":
        trained.warm_zero()
    run = adapted(home, sharding=sharding)
    whole_run, cut = tmp_path / "whole", tmp_path / "cut"
    summary = trained.train(run, whole_run, ranks=ranks, init_from=base)[0]
    assert isinstance(summary, dict), summary
    saved = Reader(whole_run / "checkpoints/step-4")
    assert {kind for _, kind in saved.entries} == {"weight", "exp_avg", "exp_avg_sq"}
    assert all(is_adapter(name) for name, _ in saved.entries) and len(saved.names()) == 2 * (2 * 4 + 4 * 2)
    assert saved.state["base"]["path"] == str((base / "checkpoints/step-6").resolve())
    shutil.copytree(whole_run, cut)
    shutil.rmtree(cut / "checkpoints/step-4")
    trained.train(run, cut, ranks=ranks)
    assert trained.tensors(cut / "checkpoints/step-4") == trained.tensors(whole_run / "checkpoints/step-4")
    if kind == "ddp":
        model = restore(whole_run / "checkpoints/step-4")  # with adapters merged into the base
        assert not any(is_adapter(name) for name, _ in model.named_parameters())
        again = trained.train(trained.recipe(home, train={"steps": 1}, optimizer={"lr": 1e-30, "warmup_steps": 0}), tmp_path / "on",
                              init_from=whole_run)[0]  # fmt: skip
        assert again["validation_loss"] == pytest.approx(summary["validation_loss"], rel=1e-6)
        assert whole(whole_run / "checkpoints/step-4").names() == Reader(base / "checkpoints/step-6").names()


@pytest.mark.parametrize("target", ["dense", "experts"])
def test_a_run_with_a_stage_without_adapters_is_that_of_one_process_and_continues(
    target: str, home: Path, base: Path, tmp_path: Path
) -> None:
    one, run = (adapted(home, lora={"rank": 2, "targets": [target]}, degrees={"dp": 1, "pp": pp}) for pp in (1, 2))
    for name, given in (("one", one), ("whole", run)):
        assert isinstance(trained.train(given, tmp_path / name, ranks=given.degrees.pp, init_from=base)[0], dict)
    trained.train(run, tmp_path / "cut", ranks=2, init_from=base, before=trained.stop_at(2))
    assert isinstance(trained.train(run, tmp_path / "cut", ranks=2)[0], dict)
    assert trained.losses(tmp_path / "cut") == trained.losses(tmp_path / "whole")
    name = "checkpoints/step-4"
    assert trained.tensors(tmp_path / "cut" / name) == trained.tensors(tmp_path / "whole" / name)
    saved = Reader(tmp_path / "whole" / name)
    assert saved.entries.keys() == Reader(tmp_path / "one" / name).entries.keys() and all(map(is_adapter, saved.names()))
    trained.close(tmp_path / "whole", tmp_path / "one", rel=1e-6)


def test_a_base_that_is_not_there_or_another_is_refused(home: Path, base: Path, tmp_path: Path) -> None:
    run = adapted(home, train={"steps": 1, "save_every": 1})
    (said,) = trained.train(run, tmp_path / "a")
    assert said == "lora.rank: got 2 without weights to start from, needed --init_from, the run or checkpoint whose weights are frozen; " \
        "fix: --init_from runs/NAME"  # fmt: skip
    moved = tmp_path / "moved"
    shutil.copytree(base, moved)
    trained.train(run, tmp_path / "b", init_from=moved)
    shutil.rmtree(moved)
    longer = adapted(home, train={"steps": 2, "save_every": 1})
    (said,) = trained.train(longer, tmp_path / "b")
    assert "got no checkpoint in" in said and "moe train also accepts --init_from WHERE_IT_IS" in said
    with pytest.raises(BadInput, match="got no checkpoint in") as refused:  # moe generate, eval and convert load a model in this way
        restore(tmp_path / "b/checkpoints/step-1")
    link = str(refused.value.fix).partition("(")[2].partition(")")[0].replace("WHERE_IT_IS", str(base / "checkpoints/step-6"))
    subprocess.run(link, shell=True, check=True)
    restore(tmp_path / "b/checkpoints/step-1")
    shutil.rmtree(moved)
    (said,) = trained.train(longer, tmp_path / "b", init_from=base / "checkpoints/step-3")
    assert "got another checkpoint in" in said
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    for name, where in (("b", base / "checkpoints/step-6"), ("c", base)):  # the checkpoint, or the run that it is in
        (summary,) = trained.train(longer, tmp_path / name, init_from=where)
        assert summary["steps"] == 2
    (said,) = trained.train(adapted(home, lora={"rank": 0, "targets": ["attention"]}), tmp_path / "b", init_from=base)
    assert said.startswith("lora.rank: got 0, needed 2: step-2 has adapters; fix: --lora.rank 2, or begin another run")
    manifest = json.loads((base / "checkpoints/step-6/manifest.json").read_text())
    assert manifest["state"]["counters"]["step"] == 6


STAGES: dict[str, Any] = {"degrees": {"dp": 1, "pp": 2}, "sharding": {"kind": "zero", "stage": 1}}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"lora": {"alpha": 4.0}}, "lora.alpha: got 4 with lora.rank=0"),
        ({"lora": {"rank": 4, "targets": []}}, "lora.targets: got .., needed some of"),
        ({"lora": {"rank": 4, "targets": ["experts"]}}, "lora.targets: got experts in a dense model"),
        (
            STAGES | {"lora": {"rank": 4, "targets": ["experts"]}, "model": {"moe_every": 2}},
            "targets: got .experts. with degrees.pp=2 and zero1, needed adapters in every layer.*; fix: set it to .attention, experts.",
        ),
        (
            STAGES | {"lora": {"rank": 4}, "model": {"num_layers": 2}, "pipeline": {"layers": [2, 0]}},
            "pipeline.layers: got .2, 0., which gives rank 1 of the pipeline no layer and so no adapters to train",
        ),
        ({"lora": {"rank": 4}, "tiling": {"ffn": 2}}, "tiling.ffn: got 2 with lora.rank=4"),
        ({"lora": {"rank": 4}, "optimizer": {"kind": "kfac"}}, "optimizer.kind: got kfac with lora.rank=4"),
    ],
)
def test_what_does_not_go_together_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        check_run(build_run(values), 2 if "degrees" in values else 1)


def test_trained_parameters_are_those_that_a_model_trains() -> None:
    base = Adapted("gshard", "ddp", 1, 1, 1, "fp32").run()
    frozen = base.model_copy(update={"lora": Lora(), "train": base.train.model_copy(update={"freeze": ("experts", "layers.0")})})
    for run in (base, frozen, frozen.model_copy(update={"tiling": frozen.tiling.model_copy(update={"ffn": 2})})):
        model, _ = build(run.resolve(1), Mesh.of(Degrees()), device=torch.device("cpu"))
        assert trained_parameters(run) == sum(p.numel() for p in model.parameters() if p.requires_grad) > 0


def test_another_alpha_is_another_function() -> None:
    one = Adapted("dense", "ddp", 1, 1, 1, "fp32", targets=("attention", "dense")).run()
    other, none = (one.model_copy(update={"lora": one.lora.model_copy(update=values)}) for values in ({"alpha": 9.0}, {"rank": 0}))
    assert [change.key for change in function_changes(one, other)] == ["lora.alpha"] and not function_changes(one, none)


def test_a_frozen_weight_costs_no_gradient() -> None:
    """For our own autograd functions, a frozen weight saves the FLOPs of its gradient; the gradient of x is bitwise unchanged."""
    rows_RD, gate, weight = (torch.randn(*shape, generator=torch.Generator().manual_seed(1)) for shape in ((9, 6), (9,), (11, 6)))
    w1, w2, w3 = (torch.randn(3, *shape, generator=torch.Generator().manual_seed(2)) for shape in ((6, 10), (10, 6), (6, 10)))
    targets = torch.arange(9).unsqueeze(0)
    uses: dict[str, tuple[Any, tuple[Tensor, ...], float]] = {
        "experts": (lambda x, *w: grouped_ffn(x * gate[:, None], network_of("swiglu", *w), counts=[2, 0, 7]), (w1, w2, w3), 1 / 2),
        "head": (lambda x, w: summed_loss(x.unsqueeze(0).bfloat16(), targets, w, chunks=2), (weight,), 2 / 3),
        "router": (linear_fp32, (weight,), 1 / 2),
        "cast again": (linear, (weight,), 1 / 2),
    }
    for name, (use, weights, share) in uses.items():
        found: list[tuple[int, Tensor]] = []
        for trained_too in (True, False):
            x = rows_RD.clone().requires_grad_()
            out = use(x, *(w.clone().requires_grad_(trained_too) for w in weights)).sum()
            with FlopCounterMode(display=False) as flops:
                out.backward()
            assert x.grad is not None
            found.append((flops.get_total_flops(), x.grad))
        assert torch.equal(found[0][1], found[1][1]), name
        assert found[1][0] == pytest.approx(share * found[0][0]), name


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_adapters_save_the_flops_of_frozen_weights_gradients(recompute: Any) -> None:
    """FLOPs of forward and backward equal a formula: no gradient of frozen matrices, and none of the first layer's input."""
    model = Model(num_layers=3, d_model=24, num_heads=3, d_ff=40, max_length=9, moe_every=0, ffn="swiglu", tied_embeddings=False)
    tokens, width, hidden, rank, layers, vocabulary = 2 * 9, 24, 40, 2, 3, 31
    tokens_BL = torch.randint(vocabulary, (2, 9), generator=torch.Generator().manual_seed(1))

    def flops(lora: Lora) -> int:
        made = Transformer(model, vocab_size=vocabulary)
        adapt(made, lora)
        for name, parameter in made.named_parameters():
            if is_adapter(name):
                nn.init.normal_(parameter)
        save_memory(made, recompute=Recompute(kind=recompute))
        if lora.rank:
            freeze(made)
        with FlopCounterMode(display=False) as counted:
            made(tokens_BL, None, tokens_BL).loss.backward()
        return int(counted.get_total_flops())

    matrices = layers * (4 * width**2 + 3 * width * hidden) + vocabulary * width
    narrow = 2 * tokens * rank * width  # FLOPs of a product of one matrix's narrow tensors: two in each forward pass, four in the backward
    passes = 2 if recompute == "full" else 1
    # + 3 * narrow: the first layer's three matrices need no gradient of x
    saved = 2 * tokens * (matrices + 3 * width**2) - 4 * layers * (2 * passes + 4) * narrow + 3 * narrow
    assert flops(Lora(rank=0)) - flops(Lora(rank=rank, targets=("attention",))) == saved


@pytest.mark.parametrize(("dtype", "unit"), [(torch.float64, 1), (torch.bfloat16, 32)])
def test_adapted_experts_never_make_the_matrix_nor_its_gradient(dtype: torch.dtype, unit: int) -> None:
    """4 FLOPs for each frozen weight that a row meets, 6 for each element of its narrow matrices; no tensor as large as a matrix is kept.
    Output and gradients are those of W + s A B. In 16 bits each expert's rows are padded to a multiple of `unit` on a CPU."""
    width, hidden, rank, counts = 160, 128, 3, [5, 0, 2, 9]
    experts = ExpertsStack(4, d_model=width, d_ff=hidden, ffn="swiglu").double()
    experts.adapt(rank, 0.7)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in experts.named_parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype) / 10
        parameter.requires_grad_(is_adapter(name))
    x = torch.randn(sum(counts), width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t), FlopCounterMode(display=False) as flops:
        out = experts(x, counts=counts)
        out.square().sum().backward()
    rows = sum(-(-count // unit) * unit for count in counts)
    assert flops.get_total_flops() == rows * 3 * (4 * width * hidden + 6 * rank * (width + hidden))
    frozen = {w.data_ptr() for w in (experts.w1, experts.w2, experts.w3)}
    assert all(t.data_ptr() in frozen for t in kept if t.numel() >= width * hidden) and experts.w1.grad is None
    wide = {name: p.detach().double().requires_grad_() for name, p in experts.named_parameters()}
    w1, w2, w3 = (wide[name] + 0.7 * wide[f"{name}_a"] @ wide[f"{name}_b"] for name in ("w1", "w2", "w3"))
    y = x.detach().double().requires_grad_()
    parts = [(nn.functional.silu(r @ a) * (r @ c)) @ b for r, a, b, c in zip(y.split(counts), w1, w2, w3, strict=True)]
    torch.cat(parts).square().sum().backward()
    pairs = [(out, torch.cat(parts)), (x.grad, y.grad)]
    pairs += [(p.grad, wide[name].grad) for name, p in experts.named_parameters() if is_adapter(name)]
    for found, want in pairs:
        assert found is not None and want is not None and found.dtype == dtype
        assert (found.double() - want).norm() <= 16 * torch.finfo(dtype).eps * want.norm(), "16 values are rounded one after another"
