"""Starts DeepSpeed: imports it without output, compiles its ops, and gives it the process groups of this project's layouts.

Each layout has an axis of ranks over which its gradients are summed. `set_groups` gives DeepSpeed the axis of dense weights as its
data-parallel group, and all axes as its groups of experts, by name. So DeepSpeed makes no groups itself.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parallel.errors import BadInput
from parallel.fixes import Set
from parallel.mesh.gradients import data_axis
from parallel.mesh.layout import Layout
from parallel.mesh.mesh import Axis, Mesh
from parallel.process.process import gpus
from parallel.store.files import replace_file

_DEFINED_TWICE = ("c_library_name", "c_block_size", "c_io_queue_depth")  # names that several files of async_io define


def load_deepspeed() -> Any:
    """Import DeepSpeed without its output, return the module, and let torch do all communication. DeepSpeed's shared-memory op is marked as
    unavailable: training does not need it, its compilation takes 80 to 120 s, and it crashes on processors without AVX2."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if gpus() else "cpu")
    os.environ.setdefault("LOCAL_RANK", "0")
    import deepspeed

    # import now the modules that the first engine would import: ranks that are forked later inherit them
    with suppress(ImportError):
        import_module("torch._dynamo")
        with _uncompiled():
            import deepspeed.runtime.zero.muon.muon_optimizer
        import deepspeed.runtime.zero.stage3  # noqa: F401

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # hide torch's warnings about functions that torch will remove, and DeepSpeed still calls
    warnings.filterwarnings("ignore", message=r".*(all_gather_into_tensor|reduce_scatter_tensor)", category=FutureWarning)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Return a context manager in which DeepSpeed's decorator for torch's compiler changes nothing. Decorating DeepSpeed's Muon, which this
    project does not use, would import Inductor: 1.2 s of processor time and 40 MB in each rank."""
    from deepspeed.runtime import compiler

    decorated = compiler.compile
    compiler.compile = lambda: lambda function: function
    try:
        yield
    finally:
        compiler.compile = decorated


def compile_async_io(say: Callable[[str], None]) -> None:
    """Compile DeepSpeed's op async_io, which reads and writes a disk, once for each version of torch and DeepSpeed. Raise BadInput if the
    compilation fails. Every rank must call this function before an engine starts. `say` gets a message before the compilation."""
    load_deepspeed()
    from deepspeed.accelerator import get_accelerator

    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or ".")
    if not (folder / "async_io" / "async_io.so").exists():
        say(f"compiling DeepSpeed's async_io for offload to a disk: once, a minute or two; it stays in {folder} ...")
    try:
        with redirect_stdout(StringIO()):  # hides the compilers' commands
            _use_compiled(folder)
            try:
                with each_op_as_one_file(folder):
                    get_accelerator().create_op_builder("AsyncIOBuilder").load(verbose=False)
            except RuntimeError:  # sources of an untested DeepSpeed version may not compile as one file
                get_accelerator().create_op_builder("AsyncIOBuilder").load(verbose=False)
    except (RuntimeError, ImportError, OSError) as failed:
        lines = str(failed).splitlines()
        # the other lines are the compilers' commands
        why = next((line.strip() for line in lines if " error: " in line or "out of memory" in line), lines[0])
        raise BadInput(
            "sharding.offload",
            got=f"nvme, whose async_io does not compile ({why})",
            needed="a C++ compiler, ninja and libaio's headers",
            fix="see: moe doctor" | Set("sharding.offload.optimizer", "cpu"),
        ) from failed


@contextmanager
def each_op_as_one_file(folder: Path) -> Iterator[None]:
    """Return a context manager in which torch compiles the files of an op as one file, without debug information. The twelve files of
    async_io then take 47 CPU seconds, because torch's headers are read only once."""
    from torch.utils import cpp_extension

    extension: Any = cpp_extension
    load = extension.load

    def load_one(*, name: str, sources: Sequence[str], extra_cflags: Sequence[str], **rest: Any) -> Any:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(one := folder / f"{name}.cpp", as_one_file(sources))  # atomic, as other ranks write the same file
        return load(name=name, sources=[str(one)], extra_cflags=[flag for flag in extra_cflags if flag != "-g"], **rest)

    extension.load = load_one
    try:
        yield
    finally:
        extension.load = load


def as_one_file(sources: Sequence[str]) -> str:
    """Return C++ code that includes these files. Headers come first, once each (some have no guard). Names defined twice are renamed."""
    headers = {header for source in sources for header in Path(source).parent.glob("*.h")}
    lines = [f'#import "{header}"' for header in sorted(headers)]
    for number, source in enumerate(sources):
        lines += [f"#define {name} {name}_{number}" for name in _DEFINED_TWICE]
        lines += [f'#include "{source}"', *(f"#undef {name}" for name in _DEFINED_TWICE)]
    return "\n".join([*lines, ""])


def _use_compiled(folder: Path) -> None:
    """Load the compiled extensions of a folder into DeepSpeed. Without this, DeepSpeed would check at each start whether to compile them (a
    check that needs a compiler and memory), and would compile them again in every Python environment, even with equal versions of torch
    and DeepSpeed."""
    from deepspeed.ops.op_builder import PinMemoryBuilder
    from deepspeed.ops.op_builder.builder import OpBuilder

    with suppress(ImportError, OSError):  # if the extension is missing or incomplete, DeepSpeed compiles it later
        for name in ("pin_memory", "async_io"):
            spec = spec_from_file_location(name, folder / name / f"{name}.so")
            assert spec is not None and spec.loader is not None
            module = module_from_spec(spec)
            spec.loader.exec_module(module)
            OpBuilder._loaded_ops[name] = module
            if name == "pin_memory":
                PinMemoryBuilder().load(verbose=False)  # its symbols must be loaded before async_io, which needs them


def start_deepspeed(device: torch.device) -> Any:
    """Return DeepSpeed with its communication initialized, for a model on `device`."""
    deepspeed = load_deepspeed()
    if not dist.is_initialized():  # DeepSpeed needs a group even for a single process; on a GPU also gloo, for offloaded tensors
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed(dist_init_required=False)
    return deepspeed


def group_of(axis: Axis, mesh: Mesh) -> Any:
    """Return the axis's process group. For an axis of size 1, return a group of this rank alone, because DeepSpeed reads None as the group
    of all ranks."""
    if axis.group is not None:
        return axis.group
    return mesh.alone() if dist.get_world_size() > 1 else dist.group.WORLD


def set_groups(mesh: Mesh, layouts: Iterable[Layout]) -> Any:
    """Make DeepSpeed use the layouts' process groups instead of its own. Return the `mpu` object for DeepSpeed's engine. Collective."""
    from deepspeed.utils import groups

    if dist.get_world_size() > 1:
        mesh.alone()  # on every rank, even if this rank does not need it, because all ranks must make the same groups
    axes = {axis.name: group_of(axis, mesh) for axis in (data_axis(layout, mesh) for layout in layouts)}
    groups._EXPERT_PARALLEL_GROUP = dict(axes)  # DeepSpeed requires it but does not use it: this project exchanges tokens itself
    groups._EXPERT_DATA_PARALLEL_GROUP = dict(axes)
    groups.mpu = _mpu(mesh, dense_axis(mesh))
    return groups.mpu


def dense_axis(mesh: Mesh) -> Axis:
    """Return the axis over which gradients of dense weights are summed."""
    return data_axis(Layout(()), mesh)


def _mpu(mesh: Mesh, axis: Axis) -> SimpleNamespace:
    """Return an object like Megatron's `mpu`, which gives DeepSpeed `axis` as data-parallel group, and 1 as tensor-parallel size."""
    return SimpleNamespace(
        get_data_parallel_group=lambda: group_of(axis, mesh),
        get_data_parallel_group_ranks=lambda: axis.ranks,
        get_data_parallel_world_size=lambda: axis.size,
        get_data_parallel_rank=lambda: axis.index,
        get_model_parallel_group=lambda: None,
        get_model_parallel_world_size=lambda: 1,
        get_model_parallel_rank=lambda: 0,
        get_pipe_parallel_world_size=lambda: mesh.axis("pp").size,
    )


def with_mark(model: nn.Module) -> nn.Module:
    """Return a module that contains the model and an empty layer of DeepSpeed's MoE class. This layer makes DeepSpeed's engine use the
    process groups of experts."""
    from deepspeed.moe.layer import MoE

    class Mark(MoE):  # type: ignore[misc]
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.num_experts = 1

        def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
            return None  # nothing to do: set_groups has set the groups already

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.mark = model, Mark()

        def forward(self, *args: Any) -> Any:
            return self.model(*args)

    return Wrapped()
