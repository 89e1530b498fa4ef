"""Counts the work that a rehearsed step gives a GPU: kernels launched, bytes that they move, and waits of the host.

    host synchronization    an operator that reads values of a CUDA tensor on the host, such as `.item()`, `nonzero` or a mask as an index,
                            and a copy between host and GPU that waits. torch.cuda.set_sync_debug_mode warns of the same synchronizations
    copy from the host      a copy of a CPU tensor to the GPU, also one from pinned memory, for which the host does not wait
    kernel                  an operator that computes, or a Triton kernel; views and allocations do not count. Several kernels that torch
                            launches for one operator (a sort) count as one
    moved bytes             all inputs and results of each kernel; kernels of matrix products and attention are left out

Each count is recorded for the module that runs (`watch`) and its pass, forward or backward.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from inspect import getsource
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

_ROOT = f"{Path(__file__).parents[2]}/"
_OUTSIDE = (str(Path(torch.__file__).parent), str(Path(__file__).parent), f"{_ROOT}parallel/mesh/host.py", "<")  # paths that `where` skips
READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}  # the operator's result, or its shape, depends on values
_WAITS = {"bincount": 2, "repeat_interleave": 2}  # operator -> its number of host synchronizations; others have one
_IDLE = ("empty", "new_empty", "detach", "alias", "_unsafe_view", "lift_fresh", "resize_", "set_", "record_stream")  # no kernel
_PRODUCTS = (
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "_grouped_mm",
    "convolution",
    "_scaled_dot_product",
    "_flash_attention",
    "_efficient_attention",
)


@dataclass
class Work:
    """A GPU's work for one module in one pass. kernels: number of launched kernels. moved_bytes: bytes of their inputs and results. waits:
    source file, line and function of a host synchronization -> number of times. copies: the same for copies from the host."""

    kernels: int = 0
    moved_bytes: int = 0
    waits: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)


class Counted:
    """Counts a GPU's work since `begin`, by (module's name, "forward" or "backward"). Name "": outside of the watched modules."""

    def __init__(self) -> None:
        self.by_module: dict[tuple[str, str], Work] = {}
        self._module, self._within, self.passing = "", 0, "forward"
        self.waited = 0  # host synchronizations so far

    def begin(self) -> None:
        self.by_module = {}

    @property
    def now(self) -> Work:
        key = self._module, self.passing
        if key not in self.by_module:
            self.by_module[key] = Work()
        return self.by_module[key]

    def wait(self, times: int = 1) -> None:
        """Count `times` host synchronizations in the line of code that runs now."""
        self.now.waits[where()] += times
        self.waited += times

    @contextmanager
    def one_kernel(self, *read: Tensor) -> Iterator[None]:
        """Return a context in which all operators count as one kernel. read: its inputs; its results are assumed to be as large."""
        if not self._within:
            self.now.kernels += 1
            self.now.moved_bytes += 2 * sum(t.nbytes for t in read)
        self._within += 1
        try:
            yield
        finally:
            self._within -= 1

    def launch(self, tensors: Sequence[Tensor], *, product: bool) -> None:
        """Count a kernel with these inputs and results. product: True for a matrix product or attention, whose bytes are not counted."""
        self.now.kernels += 1
        if not product:
            self.now.moved_bytes += sum(t.nbytes for t in tensors)

    def read(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> None:
        """Count a host synchronization if `func`, an operator with one of the tags READS, makes the host wait for a GPU's values."""
        masked = func._opname not in ("index", "index_put", "index_put_") or any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if masked and not self._within and any(map(_on_gpu, tensors)) and kwargs.get("output_size") is None:
            self.wait(_WAITS.get(func._opname, 1))

    def operator(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        """Count an operator that was called with `tensors`, and made the tensors `made`."""
        name = func._opname
        if self._within or not any(map(_on_gpu, (*tensors, *made))):
            return
        if name in ("_to_copy", "copy_"):
            self._copy(name, args, kwargs, tensors, made)
        if not (func.is_view or name.startswith(_IDLE)) and any(t.numel() for t in made or tensors):
            self.launch([*tensors, *made], product=name.startswith(_PRODUCTS))

    def _copy(self, name: str, args: Any, kwargs: Any, tensors: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        source, target = (tensors[1], tensors[0]) if name == "copy_" and len(tensors) == 2 else (tensors[0], made[0])
        if _on_gpu(target) and not _on_gpu(source):
            self.now.copies[where()] += 1
        ahead = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
        # a copy from host memory that is not pinned may wait even if it is non_blocking
        if _on_gpu(source) != _on_gpu(target) and not (ahead and (_on_gpu(source) or getattr(source, "_pinned", False))):
            self.wait()

    def watch(self, name: str, module: nn.Module) -> None:
        """Count work in the module's passes under `name`. Work in a watched submodule counts under the submodule's name."""
        outer: list[str] = []

        def begin(_: nn.Module, given: Any, named: Any) -> None:
            outer.append(self._module)
            self._module = name
            self._switch(given, self._module if self.passing == "backward" else "")

        def end(_: nn.Module, given: Any, out: Any) -> None:
            self._module = outer.pop()
            self._switch(out, name)

        module.register_forward_pre_hook(begin, with_kwargs=True)
        module.register_forward_hook(end)

    def _switch(self, tensors: Any, name: str) -> None:
        """Count work for module `name` from the moment at which autograd has computed the gradient of the first of these tensors."""
        first = next((t for t in tree_leaves(tensors) if isinstance(t, Tensor) and t.requires_grad), None)

        def enter(_: Tensor) -> None:
            self._module = name

        if first is not None:
            first.register_hook(enter)


def _on_gpu(tensor: Any) -> bool:
    return isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cuda"


def launches(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for the method `run` of Triton's kernels. For fake tensors, it counts the kernel instead of launching it."""

    def launch(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        mode: Any = next((t.fake_mode for t in tensors if isinstance(t, FakeTensor)), None)
        if mode is None:
            return run(kernel, *args, **kwargs)
        mode.work.launch(tensors, product=_is_product(kernel.fn))
        return None

    return launch


@cache
def _is_product(kernel: Any) -> bool:
    return "dot(" in getsource(kernel)


def where(*skipped: str) -> str:
    """Return file, line and function of the innermost stack frame outside of torch, this folder and the files `skipped`."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith((*_OUTSIDE, *skipped)) and "contextlib.py" not in path:
            return f"{path.removeprefix(_ROOT)}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "torch"
