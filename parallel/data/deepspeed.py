"""DeepSpeed as this project starts it: imported quietly, its ops compiled once, told of stages and of experts.

Over whom a parameter's gradients are summed, layouts say. DeepSpeed is always told its data-parallel group (`tell_groups`), that of
dense weights; every other group is one of experts to it, under the name of its axis, and it makes none itself. With
parallel/data/zero.py and zero3.py the only files of `parallel` that import it.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parallel.errors import BadInput
from parallel.gradients import data_axis
from parallel.layout import Layout, dense
from parallel.mesh import Axis, Mesh

_DEFINED_TWICE = ("c_library_name", "c_block_size", "c_io_queue_depth")  # constants in files of async_io


def load_deepspeed() -> Any:
    """Import DeepSpeed, quiet and with its communication through torch alone.

    Its CPU backend would compile a shared-memory op on first use (80 to 120 s) that training does not need, and whose
    kernels fault on processors without AVX2: it is marked as unavailable before anything asks for it.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    os.environ.setdefault("LOCAL_RANK", "0")
    import deepspeed

    with suppress(ImportError):  # what the first engine imports (1.2 s), now: ranks forked after this have it
        import deepspeed.runtime.zero.muon.muon_optimizer
        import deepspeed.runtime.zero.stage3  # noqa: F401

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=r".*(all_gather_into_tensor|reduce_scatter_tensor)", category=FutureWarning)  # its calls
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def compile_async_io(say: Callable[[str], None]) -> None:
    """What reads and writes a disk: compiled once for each version of torch and DeepSpeed. Every rank must call it before an engine starts.

    Raises BadInput where it does not compile.
    """
    load_deepspeed()
    from deepspeed.accelerator import get_accelerator

    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or ".")
    if not (folder / "async_io" / "async_io.so").exists():
        say(f"compiling DeepSpeed's async_io for offload to a disk: once, a minute or two; it stays in {folder} ...")
    try:
        with redirect_stdout(StringIO()):  # what is printed: each compiler's command
            _take_built(folder)
            try:
                with each_op_as_one_file(folder):
                    get_accelerator().create_op_builder("AsyncIOBuilder").load(verbose=False)
            except RuntimeError:  # another version's files may not go together
                get_accelerator().create_op_builder("AsyncIOBuilder").load(verbose=False)
    except (RuntimeError, ImportError, OSError) as failed:
        lines = str(failed).splitlines()
        why = next((line.strip() for line in lines if " error: " in line or "out of memory" in line), lines[0])  # among the commands
        raise BadInput(
            "sharding.offload",
            got=f"nvme, whose async_io does not compile ({why})",
            needed="a C++ compiler, ninja and libaio's headers",
            fix="see: moe doctor; or set it to cpu",
        ) from failed


@contextmanager
def each_op_as_one_file(folder: Path) -> Iterator[None]:
    """Have torch compile an op's files as one that includes them all, and without the debug information that DeepSpeed asks for.

    That takes 47 seconds of a processor for the twelve of async_io, nearly all for torch's headers, which each file would read for itself.
    """
    from torch.utils import cpp_extension

    extension: Any = cpp_extension
    load = extension.load

    def load_one(*, name: str, sources: Sequence[str], extra_cflags: Sequence[str], **rest: Any) -> Any:
        folder.mkdir(parents=True, exist_ok=True)
        one = folder / f"{name}.cpp"
        mine = folder / f".{name}.{os.getpid()}"  # other ranks write the same: each puts a whole file in place
        mine.write_text(as_one_file(sources))
        mine.replace(one)
        return load(name=name, sources=[str(one)], extra_cflags=[flag for flag in extra_cflags if flag != "-g"], **rest)

    extension.load = load_one
    try:
        yield
    finally:
        extension.load = load


def as_one_file(sources: Sequence[str]) -> str:
    """A file of C++ that includes these. Headers come first, once each (some have no guard); what two files define has two names."""
    headers = {header for source in sources for header in Path(source).parent.glob("*.h")}
    lines = [f'#import "{header}"' for header in sorted(headers)]
    for number, source in enumerate(sources):
        lines += [f"#define {name} {name}_{number}" for name in _DEFINED_TWICE]
        lines += [f'#include "{source}"', *(f"#undef {name}" for name in _DEFINED_TWICE)]
    return "\n".join([*lines, ""])


def _take_built(folder: Path) -> None:
    """Have DeepSpeed use the extensions in a folder, which is of one version of everything, as they are.

    By itself it looks each time whether they must be compiled again, which needs a compiler and its memory, and compiles them again for
    every environment of the same versions.
    """
    from deepspeed.ops.op_builder import PinMemoryBuilder
    from deepspeed.ops.op_builder.builder import OpBuilder

    with suppress(ImportError, OSError):  # not there yet, or not whole: it is compiled
        for name in ("pin_memory", "async_io"):
            spec = spec_from_file_location(name, folder / name / f"{name}.so")
            assert spec is not None and spec.loader is not None
            module = module_from_spec(spec)
            spec.loader.exec_module(module)
            OpBuilder._loaded_ops[name] = module
            if name == "pin_memory":
                PinMemoryBuilder().load(verbose=False)  # async_io takes its symbols


def start_deepspeed() -> Any:
    """DeepSpeed with its communication up."""
    deepspeed = load_deepspeed()
    if not dist.is_initialized():  # one process: DeepSpeed wants a group all the same
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed(dist_init_required=False)
    return deepspeed


def group_of(axis: Axis, mesh: Mesh) -> Any:
    """The axis's process group; a rank that is alone on it has one of its own: DeepSpeed takes None for all ranks."""
    if axis.group is not None:
        return axis.group
    return mesh.alone() if dist.get_world_size() > 1 else dist.group.WORLD


def tell_groups(mesh: Mesh, layouts: Iterable[Layout]) -> Any:
    """Have DeepSpeed use these groups and make none; what it asks of who cuts a model (`mpu`), with the data-parallel one. Collective."""
    from deepspeed.utils import groups

    if dist.get_world_size() > 1:
        mesh.alone()  # on every rank, whether or not its stages have something for it: all make equally many groups
    axes = {axis.name: group_of(axis, mesh) for axis in (data_axis(layout, mesh) for layout in layouts)}
    groups._EXPERT_PARALLEL_GROUP = dict(axes)  # never used: nothing is exchanged by DeepSpeed
    groups._EXPERT_DATA_PARALLEL_GROUP = dict(axes)
    groups.mpu = _Told(mesh, dense_axis(mesh))
    return groups.mpu


def dense_axis(mesh: Mesh) -> Axis:
    """The ranks that dense weights' gradients are summed over."""
    return data_axis(dense(()), mesh)


@dataclass(frozen=True)
class _Told:
    """Megatron's names for a mesh with stages outermost. Of tensor parallelism DeepSpeed need not know: those ranks it leaves alone."""

    mesh: Mesh
    axis: Axis

    def get_data_parallel_group(self) -> Any:
        return group_of(self.axis, self.mesh)

    def get_data_parallel_group_ranks(self) -> tuple[int, ...]:
        return self.axis.ranks

    def get_data_parallel_world_size(self) -> int:
        return self.axis.size

    def get_data_parallel_rank(self) -> int:
        return self.axis.index

    def get_model_parallel_group(self) -> Any:
        return None

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_pipe_parallel_world_size(self) -> int:
        return self.mesh.axis("pp").size


def marked(model: nn.Module) -> nn.Module:
    """The model with an empty layer of DeepSpeed's MoE class beside it, by which the engine learns that there are other groups."""
    from deepspeed.moe.layer import MoE

    class Mark(MoE):  # type: ignore[misc]
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.num_experts = 1

        def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
            return None  # its groups are there

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.mark = model, Mark()

        def forward(self, *args: Any) -> Any:
            return self.model(*args)

    return Wrapped()
