"""Records package versions and the machine's ceilings: the rate of large matrix products in TF/s (10^12 FLOPs per second), and the rate of
a copy in GB/s. Later parts of the benchmark compare their kernels with these ceilings."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import torch

from moe.bench.gpu.part import Machine, Row, table
from moe.calibrate.kernels import timed
from moe.records.results import matmul_flops

COPIED = {True: 2**31, False: 2**20}  # whether the device is a GPU -> bytes of the copied tensor
PACKAGES = ("torch", "triton", "numpy", "einops", "transformers", "deepspeed", "sonic-moe", "scattermoe", "pydantic")


def rows(machine: Machine, before: dict[str, list[Row]]) -> list[Row]:
    return [_about(machine), _copy(machine), *(_product(machine, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32))]


def page(rows: Sequence[Row]) -> list[str]:
    about, *ceilings = rows
    versions = ", ".join(f"{name} {number}" for name, number in about["packages"].items())
    memory = f", {about['gib']:.0f} GiB, {about['multiprocessors']} multiprocessors" if "gib" in about else ""
    return [f"{about['device']}{memory}; {versions}", *table([(r["ceiling"], r["rate"], r["unit"]) for r in ceilings], ("ceiling", "", ""))]


def ceiling(before: dict[str, list[Row]], name: str) -> float | None:
    """Return a measured ceiling by its name, such as copy or bfloat16, in GB/s (copy) or TF/s; None if the part `machine` did not run.
    before: name of each earlier part -> its rows."""
    return next((row["rate"] for row in before.get("machine", ()) if row.get("ceiling") == name), None)


def _about(machine: Machine) -> Row:
    about: Row = {"device": machine.name, "packages": {name: found for name in PACKAGES if (found := _version(name))}}
    if machine.gpu:
        facts = torch.cuda.get_device_properties(machine.device)
        about |= {"gib": facts.total_memory / 2**30, "multiprocessors": facts.multi_processor_count, "cuda": torch.version.cuda}
        about["capability"] = f"{facts.major}.{facts.minor}"
    return about


def _version(package: str) -> str | None:  # instead of version_of in parallel/process/extensions.py, which needs psutil
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _copy(machine: Machine) -> Row:
    source = torch.ones(COPIED[machine.gpu] // 2, dtype=torch.bfloat16, device=machine.device)
    target = torch.empty_like(source)
    return {"ceiling": "copy", "rate": 2 * source.nbytes / timed(lambda: target.copy_(source), machine.device) / 1e9, "unit": "GB/s"}


def _product(machine: Machine, dtype: torch.dtype) -> Row:
    """Return the rate of a large matrix product. fp32 products do not use TF32 (`measure` in __main__.py)."""
    return {"ceiling": str(dtype).removeprefix("torch."), "rate": matmul_flops(dtype, machine.device) / 1e12, "unit": "TF/s"}
