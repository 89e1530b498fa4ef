"""LoRA with frozen experts in the blocks in which they were published: a run is that with decoded experts, to the bit, in less memory."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe.checks.together import check_run
from moe.experts.experts import Experts
from moe.kernels.network import ByProduct
from moe.kernels.products import PRODUCTS
from moe.model.initialize import FirstValues
from moe.parallelize.build import build
from moe.plan.job.of_recipe import network_of, plan_of
from moe.plan.machine.cluster import load_cluster
from moe.plan.machine.program import OWN
from moe.plan.memory.memory import memory
from moe.plan.memory.stack import OURS_ON_CPU
from moe.plan.time.layer_time import layer_time
from moe.recipe.load import build_run
from moe.recipe.sections import Run
from moe.recipe.shapes import DECODING
from moe.rehearse import walk
from moe.train.parts.audit import Auditor
from moe.train.start.restore import restore, whole
from parallel.data.dp import _replicas
from parallel.errors import BadInput
from parallel.mesh.layout import Box, Layout
from parallel.mesh.mesh import Degrees, Mesh
from parallel.process.process import World
from tests.support import trained

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
LINEAR = re.compile(r"layers\.\d+\.(attention|ffn)\.\w+\.weight")
SIZES: dict[str, Any] = {"model": {"d_model": 32, "d_ff": 64, "ffn": "swiglu"}}


def in_mxfp4(matrix_IO: Tensor) -> Tensor:
    """Round each run of 32 inputs to the nearest values of MXFP4."""
    runs = matrix_IO.t().unflatten(-1, (-1, 32))
    unit = 2.0 ** (runs.abs().amax(-1, keepdim=True).log2().floor() - 2)
    nearest = ((runs / unit).abs()[..., None] - FP4).abs().argmin(-1)
    return (FP4[nearest] * runs.sign() * unit).flatten(-2).t()


def in_fp8(matrix_IO: Tensor) -> Tensor:
    """Round a matrix smaller than a block of 128 x 128 to fp8 times a factor, and then to bf16."""
    factor = matrix_IO.abs().max() / 448
    return ((matrix_IO / factor).to(torch.float8_e4m3fn).float() * factor).bfloat16().float()


ROUNDED = {"mxfp4": in_mxfp4, "fp8": in_fp8, "fp8_all": in_fp8}


@pytest.fixture(scope="module")
def bases(home: Path) -> dict[str, Path]:
    """Return lora.base -> a run whose frozen matrices have only values of this form; all other weights were trained for a step."""
    found, filled = {}, FirstValues.fill
    for form, rounded in ROUNDED.items():

        def fill(self: FirstValues, name: str, out: Tensor, within: Box | None = None, form: str = form, rounded: Any = rounded) -> None:
            filled(self, name, out, within)
            if form == "fp8_all" and LINEAR.fullmatch(name):
                out.copy_(rounded(out.t()).t())
            if name.endswith((".experts.w1", ".experts.w2", ".experts.w3")):
                for matrix in out:
                    matrix.copy_(rounded(matrix))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FirstValues, "fill", fill)
            frozen = ["experts", "attention", "dense"] if form == "fp8_all" else ["experts"]
            train = {"steps": 1, "save_every": 1, "freeze": frozen}
            (summary,) = trained.train(trained.recipe(home, **SIZES, train=train), home / form)
        assert isinstance(summary, dict), summary
        found[form] = home / form
    return found


def adapted(home: Path, base: str, targets: tuple[str, ...], **sections: Any) -> Run:
    lora = {"rank": 2, "targets": targets, "base": base}
    return trained.recipe(home, **SIZES | {"lora": lora, "train": {"steps": 2, "save_every": 1}} | sections)


BOTH = ("attention", "experts")
H100 = load_cluster("h100-8")
QUICK = replace(H100, device=replace(H100.device, launch_us=1e-3))  # the bytes that kernels move need all of their time


@pytest.mark.parametrize(
    ("form", "ranks", "targets", "sections"),
    [
        ("mxfp4", 1, BOTH, {"recompute": {"kind": "full"}}),
        ("fp8", 1, BOTH, {"precision": {"compute": "bf16"}}),
        ("fp8", 2, BOTH, {"degrees": {"ep": 2}}),
        ("fp8", 2, BOTH, {"degrees": {"ep": 2}, "experts": {"rebalance_every": 1}}),
        ("mxfp4", 2, ("attention",), {"degrees": {"ep": 2}, "sharding": {"kind": "fsdp"}, "experts": {"rebalance_every": 1}}),
        ("mxfp4", 2, BOTH, {"sharding": {"kind": "fsdp"}}),
        ("fp8_all", 1, BOTH, {"sharding": {"kind": "dp", "replicas": 2}}),
        ("mxfp4", 2, ("experts",), {"sharding": {"kind": "zero", "stage": 3}, "degrees": {"ep": 2}}),
        ("fp8", 2, BOTH, {"degrees": {"dp": 1, "tp": 2}}),
        ("mxfp4", 2, ("attention", "experts", "dense"), {"degrees": {"dp": 1, "pp": 2}}),
        ("fp8_all", 1, ("attention", "experts", "dense"), {"precision": {"compute": "bf16"}, "recompute": {"kind": "full"}}),
        ("fp8_all", 2, ("experts",), {"sharding": {"kind": "fsdp"}, "degrees": {"ep": 2}}),
        ("fp8_all", 2, BOTH, {"sharding": {"kind": "zero", "stage": 3}, "degrees": {"sp": 2}}),
        ("fp8_all", 2, ("attention", "experts", "dense"), {"degrees": {"dp": 1, "pp": 2}, "pipeline": {"schedule": "zb_h1"}}),
    ],
    ids=lambda value: "-".join(str(inner) for part in value.values() for inner in part.values()) if isinstance(value, dict) else None,
)
def test_a_run_is_the_run_with_decoded_experts(
    form: str, ranks: int, targets: tuple[str, ...], sections: Any, home: Path, bases: dict[str, Path], tmp_path: Path
) -> None:
    """Losses, adapters and their moments are equal to the bit, also of a run that was resumed, and if experts move between ranks."""
    if "zero" in str(sections):
        trained.warm_zero()
    outs = {base: tmp_path / base for base in ("whole", form)}
    for base, out in outs.items():
        summary = trained.train(adapted(home, base, targets, **sections), out, ranks=ranks, init_from=bases[form], forked=True)[0]
        assert isinstance(summary, dict), summary
    moved = [line for out in outs.values() for line in trained.lines(out, "event") if line["event"] == "rebalanced" and line["step"] == 1]
    assert len(moved) == 2 * ("rebalance_every" in str(sections))
    want = trained.tensors(outs["whole"] / "checkpoints/step-2")
    assert trained.losses(outs[form]) == trained.losses(outs["whole"])
    assert trained.tensors(outs[form] / "checkpoints/step-2") == want
    shutil.rmtree(outs[form] / "checkpoints/step-2")
    trained.train(adapted(home, form, targets, **sections), outs[form], ranks=ranks, forked=True)
    assert trained.tensors(outs[form] / "checkpoints/step-2") == want
    if ranks == 1:
        weights = [restore(out / "checkpoints/step-2").state_dict() for out in outs.values()]
        assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
        assert whole(outs[form] / "checkpoints/step-2").names() == whole(bases[form] / "checkpoints/step-1").names()


def _flipped(number: int) -> Any:
    """Return a function (rank) that after step 3 flips a bit of the audited tensor `number`, counted from the last, on rank 1."""

    def prepare(rank: int) -> None:
        held: list[Any] = []
        made = Auditor.__init__

        def noted(self: Auditor, *args: Any, **more: Any) -> None:
            made(self, *args, **more)
            held.append(self)

        def flip() -> None:
            held[0]._held()[number].tensor.view(torch.uint8).view(-1)[5] ^= 8

        Auditor.__init__ = noted  # type: ignore[method-assign]
        if rank == 1:
            trained.on_line(3, flip)

    return prepare


@pytest.mark.parametrize(("form", "number", "kind"), [("fp8", -1, "scales of blocks"), ("fp8", -2, "blocks"), ("whole", 0, "weight")])
def test_an_audit_repairs_frozen_weights(form: str, number: int, kind: str, home: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    """Of three copies of a frozen matrix one has a flipped bit: the run ends as without audits, to the bit. Of two copies, none is known to
    be intact: the run ends, and the same command continues it from its adapters and their base."""
    sizes: dict[str, Any] = {"train": {"steps": 4, "save_every": 2, "global_batch": 6, "eval_sequences": 6}, "degrees": {"ep": 1}}
    audited = sizes | {"train": sizes["train"] | {"audit_every": 4}}
    base = bases["fp8"]
    trained.train(adapted(home, form, BOTH, **sizes), tmp_path / "plain", ranks=3, init_from=base)
    trained.train(adapted(home, form, BOTH, **audited), tmp_path / "audited", ranks=3, init_from=base, before=_flipped(number))
    (event,) = [line for line in trained.lines(tmp_path / "audited", "event") if line["event"] == "corruption"]
    assert event["step"] == 4 and re.search(rf"before the step: {kind} of \S+ on rank 1$", event["found"]), event
    assert trained.losses(tmp_path / "audited") == trained.losses(tmp_path / "plain")
    for step in (2, 4):
        name = f"checkpoints/step-{step}"
        assert trained.tensors(tmp_path / "audited" / name) == trained.tensors(tmp_path / "plain" / name)
    if kind == "blocks":
        two = tmp_path / "two"
        ended = trained.train(adapted(home, form, BOTH, **audited), two, ranks=2, init_from=base, before=_flipped(number))
        assert len(set(ended)) == 1 and f"the run continues from {two / 'checkpoints/step-2'}" in ended[0]
        trained.train(adapted(home, form, BOTH, **audited), two, ranks=2)
        trained.train(adapted(home, form, BOTH, **sizes), tmp_path / "undisturbed", ranks=2, init_from=base)
        assert trained.losses(two) == trained.losses(tmp_path / "undisturbed")


@pytest.mark.parametrize("kind", ["fsdp", "zero3"])
def test_an_audit_sees_a_frozen_shard_that_changes_during_the_passes(kind: str, home: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    sharding: dict[str, Any] = {"kind": "fsdp"} if kind == "fsdp" else {"kind": "zero", "stage": 3}
    run = adapted(home, "fp8", BOTH, sharding=sharding, train={"steps": 2, "save_every": 1, "audit_every": 2})
    if kind == "zero3":
        trained.warm_zero()

    def prepare(rank: int) -> None:
        computed = Auditor.passes

        def passes(self: Auditor, compute: Any, *, step: int) -> Any:
            (shard,) = [held.tensor for held in self.engine.tensors() if (held.name, held.kind) == ("layers.0.ffn.w1.weight", "weight")]

            def spoilt() -> Any:
                numbers = compute()
                if rank == 1:
                    shard.view(torch.uint8).view(-1)[5] ^= 8
                return numbers

            return computed(self, spoilt, step=step)

        Auditor.passes = passes  # type: ignore[method-assign]

    for said in trained.train(run, tmp_path / "out", ranks=2, init_from=bases["fp8"], before=prepare):
        assert "during the step: weight of layers.0.ffn.w1.weight on rank 1; no copy is known to be intact" in str(said)


def test_blocks_follow_a_replica_to_its_device() -> None:
    """Only on the replica: the first keeps its own."""
    experts = Experts(2, d_model=32, d_ff=64, ffn="swiglu")
    experts.keep_in_blocks("fp8", {"w1": Layout((2, 32, 64))}, torch.device("cpu"))
    first, second = _replicas(experts, [torch.device("cpu"), torch.device("meta")], Counter())
    assert first.blocks["w1"][0].values is experts.blocks["w1"][0].values  # type: ignore[index]
    assert {tensor.device.type for tensor in second.blocks["w1"][0].tensors.values()} == {"meta"}  # type: ignore[index, union-attr]


def test_experts_without_adapters_are_those_of_plain_products(
    home: Path, bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused kernels sum in another order, so the run with decoded experts multiplies expert by expert too."""
    read = Experts._read

    def by_product(self: Experts) -> Any:
        if not self.blocks and not isinstance(self.kernels, ByProduct):
            self.kernels = ByProduct(self.kernels, lambda _, *operands: PRODUCTS["plain"].product(*operands))
        return read(self)

    for base in ("whole", "fp8"):
        with monkeypatch.context() as patch:
            patch.setattr(Experts, "_read", by_product)
            trained.train(adapted(home, base, ("attention",)), tmp_path / base, init_from=bases["fp8"])
    assert trained.losses(tmp_path / "fp8") == trained.losses(tmp_path / "whole")
    assert trained.tensors(tmp_path / "fp8/checkpoints/step-2") == trained.tensors(tmp_path / "whole/checkpoints/step-2")


def test_a_base_with_other_values_is_refused(home: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    for ranks, degrees in ((1, {}), (2, {"ep": 2})):
        said = trained.train(adapted(home, "mxfp4", BOTH, degrees=degrees), tmp_path / str(ranks), ranks=ranks, init_from=bases["fp8"])
        refused = "lora.base: got mxfp4, which cannot hold expert 0 of layers.1.experts.w1 in step-1 exactly, needed"
        assert all(refused in one for one in said), said


def test_the_fix_for_a_base_in_which_not_all_is_in_blocks_works(home: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    trained.train(trained.recipe(home, **SIZES, train={"steps": 1, "save_every": 1}), tmp_path / "plain")
    for base, what, fix in ((tmp_path / "plain", "expert 0 of", "whole"), (bases["fp8"], "layers.0.attention.q.weight", "fp8")):
        (said,) = trained.train(adapted(home, "fp8_all", BOTH), tmp_path / fix, init_from=base)
        assert f"cannot hold {what}" in str(said) and str(said).endswith(f"set it to {fix}"), said
        trained.train(adapted(home, fix, BOTH), tmp_path / f"{fix} again", init_from=base)
        assert len(trained.losses(tmp_path / f"{fix} again")) == 2


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"lora": {"base": "fp8"}}, "lora.base: got fp8 with lora.rank=0"),
        ({"lora": {"rank": 4, "base": "fp8"}, "model": {"moe_every": 0}}, "lora.base: got fp8 in a dense model"),
        ({"lora": {"rank": 4, "base": "mxfp4"}, "experts": {"d_ff": 40}}, "experts.d_ff: got 40 with lora.base=mxfp4"),
        ({"lora": {"rank": 4, "base": "fp8"}, "degrees": {"etp": 2}}, "degrees.etp: got 2 with lora.base=fp8"),
        ({"lora": {"rank": 4, "base": "fp8_all"}, "degrees": {"tp": 2}}, "degrees.tp: got 2 with lora.base=fp8_all"),
        ({"lora": {"rank": 4, "base": "int4"}}, "lora.base"),
    ],
)
def test_what_does_not_go_together_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        check_run(build_run({"model": {"moe_every": 2}} | values), 2 if "degrees" in values else 1)


@pytest.mark.parametrize(("form", "kind"), [("mxfp4", "ddp"), ("fp8", "fsdp"), ("fp8_all", "ddp"), ("fp8_all", "fsdp")])
def test_memory_is_smaller_by_the_formula(form: str, kind: str) -> None:
    """A rank holds bytes of blocks instead of matrices: built exactly, at the peak of a rehearsed step within 5 %."""
    sizes = {
        "num_layers": 3,
        "d_model": 128,
        "num_heads": 4,
        "d_ff": 256,
        "max_length": 48,
        "vocab_size": 264,
        "ffn": "swiglu",
        "moe_every": 1,
    }
    values: dict[str, Any] = {"model": sizes, "experts": {"num_experts": 6}, "degrees": {"dp": 2, "ep": 2}, "sharding": {"kind": kind}}
    values |= {"train": {"global_batch": 4, "eval_sequences": 4}, "precision": {"compute": "fp32"}, "recompute": {"kind": "full"}}
    built, peaks = {}, {}
    for base in ("whole", form):
        run = check_run(build_run(values | {"lora": {"rank": 2, "targets": BOTH, "base": base}}), 2)
        walked = walk(run, World(0, 2))
        (said,) = memory(network_of(run), plan_of(run), OURS_ON_CPU)
        built[base], peaks[base] = walked.built_bytes, (said.allocated, walked.peak_bytes)
    experts, attention = 3 * 3 * 3 * 128 * 256, 3 * 4 * 128 * 128  # of 3 layers with 3 experts on the rank
    saved = experts * (4 - (17 / 32 if form == "mxfp4" else 1 + 4 / 128**2))
    if form == "fp8_all":  # fsdp shards whole matrices over two ranks
        saved += attention * (4 / (2 if kind == "fsdp" else 1) - 1 - 4 / 128**2)
    assert built["whole"] - built[form] == saved
    assert all(said == pytest.approx(peak, rel=0.05) for said, peak in peaks.values())
    assert peaks["whole"][1] - peaks[form][1] > 0.8 * (built["whole"] - built[form])  # one matrix at a time is decoded


@pytest.mark.parametrize("form", ["mxfp4", "fp8", "fp8_all"])
def test_the_time_of_decoding_is_predicted(form: str) -> None:
    """A GPU's kernels move as many bytes more than with whole matrices as the planner counts, in each pass. The first layer's attention has
    no gradient of its input."""
    values: dict[str, Any] = {
        "model": {"num_layers": 2, "d_model": 512, "num_heads": 4, "d_ff": 1024, "ffn": "swiglu", "moe_every": 2, "max_length": 64},
        "experts": {"num_experts": 4},
        "precision": {"compute": "bf16", "master": "bf16"},
        "train": {"global_batch": 4, "eval_sequences": 4},
    }
    moved, times = {}, {}
    for base in ("whole", form):
        run = check_run(build_run(values | {"lora": {"rank": 2, "targets": ("attention", "experts"), "base": base}}), 1)
        work = walk(run, World(0, 1, place="cuda")).work
        moved[base] = [sum(one.moved_bytes for (_, passing), one in work.items() if passing == each) for each in ("forward", "backward")]
        of = [layer_time(network_of(run), plan_of(run), QUICK, OWN, sparse=sparse).passes for sparse in (False, True)]
        times[base] = [sum(getattr(passes, each).compute for passes in of) for each in ("forward", "backward")]
    for index in range(2):
        said = (times[form][index] - times["whole"][index]) * QUICK.device.bandwidth
        first = 3 * 512**2 * DECODING["fp8"].moved if (form, index) == ("fp8_all", 1) else 0  # its q, k and v are not decoded again
        assert said - first == pytest.approx(moved[form][index] - moved["whole"][index], rel=0.05)


def test_blocks_stay_on_the_device_and_are_not_stashed() -> None:
    """Only parameters are offloaded, or kept as older weights by 2BW."""
    values: dict[str, Any] = {
        "model": SIZES["model"] | {"moe_every": 1, "num_layers": 2, "tied_embeddings": False},
        "precision": {"compute": "bf16"},
    }
    offload = {"sharding": {"kind": "zero", "stage": 3, "offload": {"optimizer": "cpu", "parameters": "cpu"}}}
    older = {
        "degrees": {"pp": 2, "dp": 1, "ep": 1},
        "pipeline": {"schedule": "two_bw", "microbatches": 2},
        "optimizer": {"clip_norm": None},
    }
    found: dict[str, Any] = {}
    for base in ("whole", "fp8"):
        lora = {"lora": {"rank": 2, "targets": BOTH, "base": base}, "train": {"global_batch": 4, "eval_sequences": 4}}
        for name, more in (("offload", offload), ("older", older)):
            run = check_run(build_run(values | lora | more), 2 if name == "older" else 1)
            found[name, base] = memory(network_of(run), plan_of(run))[0]
    whole, blocks = found["offload", "whole"], found["offload", "fp8"]
    assert whole.parts["parameters"] == 0 < blocks.parts["parameters"] and blocks.host["parameters"] < whole.host["parameters"]
    assert 0 < found["older", "fp8"].parts["older weights"] < found["older", "whole"].parts["older weights"] / 2


def test_experts_in_blocks_are_no_parameters() -> None:
    values = {"model": SIZES["model"] | {"moe_every": 1}, "lora": {"rank": 2, "base": "fp8"}}
    model, layouts = build(check_run(build_run(values), 1), Mesh.of(Degrees()), device=torch.device("cpu"))
    assert layouts.keys() == dict(model.named_parameters()).keys()
    assert not any(name.endswith(("w1", "w2", "w3")) and "experts" in name for name in layouts)
