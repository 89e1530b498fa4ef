"""Laws of ZeRO: memory of a rank, dtype of gradient sums, weights gathered only during use; offload changes no bit.

Laws of all engines are in test_engines.py, resuming is in test_resume.py, layouts are in `moe verify`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe.model.initialize import FirstValues
from moe.nn.linear import Linear
from moe.recipe import sections
from moe.recipe.sections import Run
from moe.verify.cases import Case
from moe.verify.plain.batches import batch
from parallel.data import zero3
from parallel.data.deepspeed import compile_async_io, each_op_as_one_file, load_deepspeed, start_deepspeed
from parallel.data.engine import AdamW
from parallel.data.offload import Offload
from parallel.data.zero import DeepSpeed, Zero, settings
from parallel.errors import BadInput
from parallel.mesh.layout import Box, Layout
from parallel.mesh.mesh import Degrees
from parallel.process import process
from parallel.process.extensions import extensions_dir, missing_for_nvme
from parallel.process.process import World
from tests.parallel.data.test_buckets import assert_early, compared
from tests.support import trained
from tests.support.ranks import each_case, run_on_ranks
from tests.support.tiny import same, start

SPARSE = Case("deepseek", "zero3", 2, 1, 1, "fp32")


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    load_deepspeed()  # imported before the forks, because it takes seconds


def test_deepspeed_is_loaded_without_torchs_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("muon_optimizer", "original_muon"):
        monkeypatch.delitem(sys.modules, f"deepspeed.runtime.zero.muon.{name}")
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("a function was compiled"))
    loaded = load_deepspeed()
    assert "deepspeed.runtime.zero.muon.original_muon" in sys.modules
    assert loaded.runtime.compiler.compile() is torch.compile  # what was replaced during the import is back


# --- dtype of gradient sums -------------------------------------------------------------------------------------------


def engine_of(stage: int, rank: int, *, dtype: torch.dtype, offload: Offload) -> DeepSpeed:
    """Return the engine of a rank (of two) for a matrix of ones that computes in `dtype`."""
    mesh = process.connect(Degrees(dp=2), World(rank, 2))
    layer = Linear(3, 4)
    nn.init.ones_(layer.weight)
    model, layouts = nn.Sequential(layer), {"0.weight": Layout((4, 3))}
    optimizer = AdamW((0.8, 0.9), 1e-6, 0.0, lambda name, p: False)
    if stage < 3:
        return Zero(model, stage, layouts=layouts, mesh=mesh, optimizer=optimizer, offload=offload, working=lambda name: dtype)
    layer.recast = True
    zero3.ShardedInit(layouts, mesh, device=torch.device("cpu"), fill=lambda _, out, box: out.fill_(1.0), offload=offload)(model)
    return zero3.Zero3(model, layouts=layouts, mesh=mesh, optimizer=optimizer, offload=offload, working=lambda name: dtype)


def test_gradients_are_summed_in_fp32_whatever_weights_are_read_in() -> None:
    """Gradients 2048 and 1 of two micro-batches or two ranks are added exactly. In 16 bits, 2048 + 1 would be rounded."""

    def work(rank: int, stage: int, place: Any, dtype: torch.dtype) -> list[float]:
        engine = engine_of(stage, rank, dtype=dtype, offload=Offload(optimizer=place))
        for number, value in enumerate([2048.0, 1.0] if rank == 0 else [1.0, 1.0]):
            out = engine.forward(torch.full((1, 3), value, dtype=dtype), last=number == 1)
            engine.backward(out.float().sum(), last=number == 1)
        return [float(value) for value in engine.gradient("0.weight").unique()]

    cases = [*product((1, 2, 3), ("none", "cpu"), (torch.float32, torch.bfloat16, torch.float16))]
    for case, found in zip(cases, each_case(work, 2, cases), strict=True):
        assert found == [[2051.0]] * 2, case


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_clip_factor_goes_to_the_kernel_of_adamw(stage: int) -> None:
    """No operator multiplies or divides gradients before the fused AdamW, which gets the factor."""

    class Called(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(isinstance(leaf, Tensor) and leaf.numel() > 1 for leaf in tree_leaves((args, kwargs))):
                found.append((func._opname, (kwargs or {}).get("grad_scale") is not None))
            return func(*args, **(kwargs or {}))

    found: list[tuple[str, bool]] = []

    def work(rank: int) -> list[tuple[str, bool]]:
        engine = engine_of(stage, rank, dtype=torch.bfloat16, offload=Offload())
        engine.backward(engine.forward(torch.ones(1, 3, dtype=torch.bfloat16), last=True).float().sum(), last=True)
        with Called():
            engine.step(0.1, factor=0.5)
        return found

    for called in run_on_ranks(work, 2, timeout_s=60):
        assert {scaled for name, scaled in called if name == "_fused_adamw_"} == {True}
        assert not [name for name, _ in called if name.removeprefix("_foreach_").startswith(("mul", "div"))]


# --- stage 3: weights gathered only during use ------------------------------------------------------------------------


def whole(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.numel()]


def test_between_passes_no_weight_is_whole() -> None:
    def work(rank: int, case: Case) -> list[list[str]]:
        tiny = start(case, rank)
        found = [whole(tiny.model)]
        for step in range(2):
            tiny.accumulate(step)
            found.append(whole(tiny.model))
            tiny.finish()
            found.append(whole(tiny.model))
        with torch.no_grad():
            tiny.model(batch(3)[:2, :-1])
        return [*found, whole(tiny.model)]

    pair = [(replace(SPARSE, microbatches=3),), (replace(SPARSE, recompute="full", tiles=4),)]
    assert each_case(work, 2, pair) == [[[[]] * 6] * 2] * 2
    assert run_on_ranks(work, 4, replace(SPARSE, world=4, ep=2), timeout_s=60) == [[[]] * 6] * 4


def test_first_values_of_a_shard_equal_those_of_ddp() -> None:
    """A rank draws first values only for its own shard of each weight, one weight at a time. They equal DDP's."""

    def work(rank: int, patch: pytest.MonkeyPatch) -> list[Any]:
        drawn: dict[str, int] = {}
        fill, make = FirstValues.fill, zero3.ShardedInit._make
        held: list[int] = []

        def noted(self: FirstValues, name: str, out: Tensor, *box: Box) -> None:
            drawn[name] = drawn.get(name, 0) + out.numel()
            fill(self, name, out, *box)

        def made(self: zero3.ShardedInit, full: str, module: nn.Module, *cut: Any) -> None:
            make(self, full, module, *cut)
            held.append(module.get_parameter(full.rpartition(".")[2]).numel())

        patch.setattr(FirstValues, "fill", noted)
        patch.setattr(zero3.ShardedInit, "_make", made)
        tiny = start(SPARSE, rank)
        parts = {name: p.ds_numel // 2 + (p.ds_numel % 2 if rank == 0 else 0) for name, p in tiny.model.named_parameters()}
        patch.undo()
        return [max(held), len(held) == len(parts), drawn == parts, same(tiny.state(), start(replace(SPARSE, kind="ddp"), rank).state())]

    with pytest.MonkeyPatch.context() as patch:
        assert run_on_ranks(work, 2, patch, timeout_s=60) == [[0, True, True, True]] * 2


# --- overlapped sums and offload change no number ---------------------------------------------------------------------


def test_sums_of_stage_1_begin_before_the_backward_pass_ends_and_several_are_in_flight() -> None:
    """Each gradient's sum over two ranks is bitwise that of one all-reduce after the pass, and is sent to the ranks that update it."""

    def work(rank: int) -> list[Any]:
        return compared(rank, Case("dense", "zero1", 2, 1, 2, "fp32", layers=6), {})

    assert_early(run_on_ranks(work, 2, timeout_s=90), "zero1")


def test_sums_beside_the_backward_pass_change_no_bit() -> None:
    """`overlap_comm`, which is on only with CUDA streams, is forced on a CPU: losses, norms and states stay bitwise equal."""

    def with_overlap(*args: Any, device: torch.device) -> dict[str, Any]:
        found = settings(*args, device=device)
        found["zero_optimization"]["overlap_comm"] = True
        return found

    def work(rank: int, stage: int) -> list[bool]:
        case = replace(SPARSE, kind=f"zero{stage}", microbatches=2)
        plain = start(case, rank)
        with mock.patch.object(zero3, "settings", with_overlap), mock.patch("parallel.data.zero.settings", with_overlap):
            beside = start(case, rank)
        assert beside.engine.zero.overlap_comm if stage == 2 else beside.engine.engine.zero_overlap_comm()
        numbers = [[[tiny.accumulate(step).loss, tiny.finish().total] for step in range(2)] for tiny in (plain, beside)]
        return [numbers[0] == numbers[1], same(plain.state(), beside.state())]

    assert each_case(work, 2, [(2,), (3,)]) == [[[True, True]] * 2] * 2


def test_offload_to_the_host_changes_no_bit() -> None:
    """Losses, weights and moments of two steps are bitwise equal. Clipping is off, because norms are added in another order."""

    def work(rank: int, stage: int, precision: str) -> list[list[Any]]:
        case = replace(SPARSE, kind=f"zero{stage}", microbatches=2, precision=precision)
        kinds = [f"zero{stage}", f"zero{stage}+cpu", *(["zero3+cpu-all"] if stage == 3 else [])]
        here, *moved = (start(replace(case, kind=kind), rank, optimizer={"clip_norm": None}) for kind in kinds)
        steps = [[[tiny.accumulate(step).loss, tiny.finish().total] for step in range(2)] for tiny in (here, *moved)]
        return [[loss_and_norm, same(tiny.state(), here.state())] for loss_and_norm, tiny in zip(steps, (here, *moved), strict=True)]

    cases = [(1, "bf16"), (2, "fp32"), (3, "fp32"), (3, "bf16")]  # stages 1 and 2 are one class
    for (first, _), *others in chain(*each_case(work, 2, cases)):
        assert others
        for found, equal in others:
            assert equal and [loss for loss, _ in found] == [loss for loss, _ in first]
            assert [norm for _, norm in found] == pytest.approx([norm for _, norm in first], rel=1e-6)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    trained.warm_zero()
    with pytest.MonkeyPatch.context() as patch:
        yield trained.home(tmp_path_factory.mktemp("home"), patch)


def test_compiling_is_said_once_and_its_failure_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """compile_async_io prints a message before it compiles, and none if async_io is compiled already. A failed compilation raises BadInput
    of one line. (Fake builders replace the compiler.)"""
    from deepspeed.accelerator import get_accelerator

    said: list[str] = []
    built = tmp_path / "async_io" / "async_io.so"

    class Builder:
        def load(self, verbose: bool) -> None:
            assert said, "said before, not after"
            built.parent.mkdir(exist_ok=True)
            built.touch()

    class Broken:
        def load(self, verbose: bool) -> None:
            raise RuntimeError(
                "Error building extension 'async_io': [1/4] c++ -c a.cpp\nc++ b.cpp\na.cpp:3: fatal error: libaio.h: no\nninja: stopped"
            )

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(type(get_accelerator()), "create_op_builder", lambda self, name: {"AsyncIOBuilder": Builder()}[name])
    compile_async_io(said.append)
    compile_async_io(said.append)
    assert len(said) == 1 and "compiling DeepSpeed's async_io" in said[0] and "a minute or two" in said[0] and str(tmp_path) in said[0]
    monkeypatch.setattr(type(get_accelerator()), "create_op_builder", lambda self, name: Broken())
    with pytest.raises(BadInput) as refused:
        compile_async_io(said.append)
    line = str(refused.value)
    assert "async_io does not compile (a.cpp:3: fatal error: libaio.h: no)" in line and "; fix: see: moe doctor" in line


def test_an_op_is_compiled_as_one_file_or_else_as_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sources with the same constant and an unguarded header compile as one joined file. If that fails, they compile separately."""
    from deepspeed.accelerator import get_accelerator
    from torch.utils import cpp_extension

    files = {
        "sizes.h": "struct sizes_t { int n; };",
        "a.cpp": "static const int c_block_size = 1;",
        "b.cpp": "static const int c_block_size = 2;",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(f'#include "sizes.h"\n{text}\n' if name.endswith(".cpp") else text)
    own = [str(tmp_path / name) for name in ("a.cpp", "b.cpp")]
    compiled: list[list[str]] = []

    def load(*, name: str, sources: list[str], extra_cflags: list[str], verbose: bool) -> str:
        compiled.append(sources)
        assert extra_cflags == (["-g", "-O0"] if sources == own else ["-O0"])
        subprocess.run(["c++", "-w", "-fsyntax-only", sources[0]], check=True)
        if len(compiled) > 1 and sources != own:
            raise RuntimeError("does not compile")
        return name

    class Builder:
        def load(self, verbose: bool) -> None:
            cpp_extension.load(name="op", sources=own, extra_cflags=["-g", "-O0"], verbose=verbose)

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setattr(type(get_accelerator()), "create_op_builder", lambda self, name: Builder())
    monkeypatch.setattr(cpp_extension, "load", load)
    for tried in ([["op.cpp"]], [["op.cpp"], ["op.cpp"], ["a.cpp", "b.cpp"]]):
        compile_async_io(lambda text: None)
        assert [[Path(source).name for source in sources] for sources in compiled] == tried
    assert cpp_extension.load is load and [path.name for path in (tmp_path / "extensions").iterdir()] == ["op.cpp"]


def test_deepspeeds_own_builder_compiles_one_file_without_debug_information(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.accelerator import get_accelerator
    from torch.utils import cpp_extension

    told: list[dict[str, Any]] = []
    builder = get_accelerator().create_op_builder("AsyncIOBuilder")
    monkeypatch.setattr(type(builder), "is_compatible", lambda *_: True)
    monkeypatch.setattr(cpp_extension, "verify_ninja_availability", lambda: None)
    monkeypatch.setattr(cpp_extension, "load", lambda **given: told.append(given))
    own = [builder.deepspeed_src_path(path) for path in builder.sources()]
    with each_op_as_one_file(tmp_path):
        builder.jit_load(verbose=False)
    (given,) = told
    assert given["sources"] == [str(tmp_path / "async_io.cpp")] and "-O0" in given["extra_cflags"] and "-g" not in given["extra_cflags"]
    assert re.findall(r'^#include "(.*)"$', (tmp_path / "async_io.cpp").read_text(), flags=re.M) == own and len(own) > 1


@pytest.fixture(scope="module")
def async_io() -> None:
    """Compile DeepSpeed's async_io into the user's cache, unless it is there. This takes minutes."""
    script = "import sys; from parallel.data.deepspeed import compile_async_io; compile_async_io(lambda text: print(text, file=sys.stderr))"
    environment = os.environ | {"TORCH_EXTENSIONS_DIR": str(extensions_dir())}
    built = extensions_dir() / "async_io"
    if not (built / "async_io.so").exists() or (built / "lock").exists():
        subprocess.run([sys.executable, "-c", script], check=True, timeout=1200, env=environment)
    # a second call must not need a compiler
    again = subprocess.run([sys.executable, "-c", script], timeout=120, env=environment | {"PATH": ""}, capture_output=True, text=True)
    assert again.returncode == 0 and "compiling" not in again.stderr, again.stderr


@pytest.mark.packages
@pytest.mark.timeout(1300)
@pytest.mark.skipif(bool(missing_for_nvme()), reason=f"offload to a disk needs {' and '.join(missing_for_nvme())}")
def test_a_disk_changes_no_bit_and_is_left_empty(async_io: None, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, weights and moments are equal with all states on a disk and without offload. The run can be resumed without the disk.

    Only this test would notice 16-bit weights on the disk, which are DeepSpeed's default on processors without fp16 products."""
    swap = tmp_path / "swap"
    swap.mkdir()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(extensions_dir({k: v for k, v in os.environ.items() if k != "XDG_CACHE_HOME"})))

    def recipe(place: str, steps: int) -> Run:
        path = str(swap) if place == "nvme" else None
        offload = sections.Offload(optimizer=place, parameters=place, path=path)
        values: dict[str, dict[str, Any]] = {
            "degrees": {"ep": 2},
            "sharding": {"kind": "zero", "stage": 3, "offload": offload},
            "train": {"steps": steps},
            "model": {"d_model": 64, "d_ff": 8208},  # DeepSpeed keeps shards below 1 MiB in memory
        }
        values["optimizer"] = {"clip_norm": None}  # gradients read from a disk are scaled then, with one more rounding
        return trained.recipe(home, **values)

    trained.train(recipe("none", 6), tmp_path / "plain", ranks=2)
    trained.train(recipe("nvme", 6), tmp_path / "disk", ranks=2)
    assert len(list(swap.iterdir())) == 2  # forked ranks skip clean-up, like killed ones
    folder = Offload("nvme", path=str(swap)).folder()
    assert folder is not None and [str(path) for path in swap.iterdir()] == [folder.name]
    del folder
    assert list(swap.iterdir()) == []
    assert trained.losses(tmp_path / "disk") == trained.losses(tmp_path / "plain") and len(trained.losses(tmp_path / "plain")) == 6
    for step in (3, 6):
        a, b = (trained.tensors(tmp_path / name / "checkpoints" / f"step-{step}") for name in ("plain", "disk"))
        assert a == b and any(re.search("experts.*exp_avg", name) for name in a)
    for name in ("plain", "disk"):
        trained.train(recipe("none", 8), tmp_path / name, ranks=2)
    assert trained.losses(tmp_path / "disk") == trained.losses(tmp_path / "plain") and len(trained.losses(tmp_path / "disk")) == 8


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda", "cpu:gloo,cuda:nccl")])
def test_one_process_gets_a_group_for_the_tensors_of_its_device(device: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed sums gradients also in a single process; gloo has no reduce_scatter for CUDA tensors. Without a GPU: only asked for."""
    asked: list[str] = []
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend, **_: asked.append(backend))
    monkeypatch.setattr(load_deepspeed(), "init_distributed", lambda **_: None)
    start_deepspeed(torch.device(device))
    assert asked == [backend]
    assert settings(2, {}, device=torch.device(device))["zero_optimization"]["overlap_comm"] is (device == "cuda")
