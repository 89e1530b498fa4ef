"""`moe doctor`: checks what this machine has for training. Prints one table; the exit code is 1 if a needed check fails.

A row is (check, value, state, fix). States: "ok", "note" (works, but with a limit) and "FAIL" (training cannot work).
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from moe.launch import exit_codes
from moe.launch.environment import free_port
from parallel.machine import MATRIX_INSTRUCTIONS, matrix_instructions, processor, usable_cores
from parallel.process.extensions import extensions_dir, missing_for_nvme

# package -> (oldest supported version, whether training needs it)
PACKAGES = {
    "torch": ("2.10", True),
    "deepspeed": ("0.18", True),
    "pydantic": ("2", True),
    "safetensors": ("0", True),
    "numpy": ("1", True),
    "rich": ("0", True),
    "matplotlib": ("0", True),
    "tensorboard": ("0", True),
    "tokenizers": ("0", False),
    "transformers": ("0", False),
    "triton": ("0", False),
}
LITTLE_DISK_BYTES = 2e9
EXCHANGE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Row:
    """One check of the table. `fix`: what to do if the state is not "ok"."""

    check: str
    value: str
    state: Literal["ok", "note", "FAIL"] = "ok"
    fix: str = ""


def main(*, json: str | None = None) -> int:
    """Print the table; `json`: also write it to this file. Returns 1 if a needed check fails."""
    rows: list[Row] = []
    for check in (_python, _packages, _deepspeed, _exchange, _devices, _speed, _port, _disk, _extensions, _nvme):
        try:
            rows += check()
        except Exception as error:  # a broken installation must not hide the other checks
            rows.append(Row(check.__name__.strip("_"), f"{type(error).__name__}: {error}".splitlines()[0], "FAIL", "see the message"))
    _print(rows)
    if json is not None:
        from moe.records.results import write_json

        write_json(json, verb="doctor", rows=[asdict(row) | {"passed": row.state != "FAIL"} for row in rows])
    return exit_codes.of(all(row.state != "FAIL" for row in rows))


def _print(rows: list[Row]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    colours = {"ok": "green", "note": "yellow", "FAIL": "bold red"}
    for row in rows:
        table.add_row(Text(row.state, style=colours[row.state]), row.check, Text(row.value), Text(row.fix))
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    failed = sum(row.state == "FAIL" for row in rows)
    print(
        f"{failed} of {len(rows)} checks failed"
        if failed
        else f"all {len(rows)} checks passed. A first run: moe train switch_tiny --nproc 2"
    )


def _python() -> list[Row]:
    right = sys.version_info >= (3, 11)
    return [
        Row(
            "python",
            f"{platform.python_version()} {sys.executable}",
            "ok" if right else "FAIL",
            "" if right else "install Python 3.11 or newer",
        )
    ]


def _packages() -> list[Row]:
    rows = []
    for package, (oldest, needed) in PACKAGES.items():
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            rows.append(Row(package, "not installed", "FAIL" if needed else "note", f"pip install {package}" if needed else "optional"))
            continue
        old = _numbers(version) < _numbers(oldest)
        rows.append(Row(package, version, "FAIL" if old else "ok", f"pip install '{package}>={oldest}'" if old else ""))
    return rows


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdecimal())


def _deepspeed() -> list[Row]:
    """Import DeepSpeed in a separate process: a missing compiler or CUDA toolkit shows up at its import."""
    command = [sys.executable, "-c", "import deepspeed; print(deepspeed.accelerator.get_accelerator()._name)"]
    started = time.perf_counter()
    got = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if got.returncode:
        last = (got.stderr.strip() or "no message").splitlines()[-1]
        return [Row("deepspeed import", last, "FAIL", "moe train --launcher torchrun works without it, sharding.kind zero does not")]
    return [Row("deepspeed import", f"{time.perf_counter() - started:.1f} s, accelerator {got.stdout.split()[-1]}")]


def exchange_rows(rank: int) -> list[float]:
    """The values that `rank` receives in an uneven all-to-all between two ranks, in which rank 1 sends itself no rows."""
    import torch
    import torch.distributed as dist

    sends = {0: [1, 3], 1: [2, 0]}  # rank -> number of rows that it sends to each rank
    receives = [sends[0][rank], sends[1][rank]]
    rows = torch.arange(sum(sends[rank]), dtype=torch.float32)[:, None] + 10 * (rank + 1)
    got = torch.empty(sum(receives), 1)
    dist.all_to_all_single(got, rows, receives, sends[rank])
    received: list[float] = got.flatten().tolist()
    return received


def _exchange() -> list[Row]:
    import torch

    from parallel.process.fork import run_on_ranks

    torch.set_num_threads(1)  # before any other torch call, since ranks are forked
    started = time.perf_counter()
    try:
        got = run_on_ranks(exchange_rows, 2, timeout_s=EXCHANGE_TIMEOUT_S)
    except RuntimeError as error:
        lines = str(error).splitlines()
        return [Row("gloo all-to-all, 2 ranks", lines[-1], "FAIL", "check the host's name in /etc/hosts, or set GLOO_SOCKET_IFNAME=lo")]
    wanted = [[10.0, 20.0, 21.0], [11.0, 12.0, 13.0]]
    if got != wanted:
        return [Row("gloo all-to-all, 2 ranks", f"wrong rows: {got}", "FAIL", "another version of torch")]
    return [Row("gloo all-to-all, 2 ranks", f"uneven splits right, {time.perf_counter() - started:.1f} s")]


def _devices() -> list[Row]:
    import torch

    cores = usable_cores()
    rows = [Row("processor", f"{processor()}, {cores} of {os.cpu_count()} cores usable, {_memory()}")]
    flags = matrix_instructions()
    found = sorted({MATRIX_INSTRUCTIONS[flag] for flag in flags})
    rows.append(
        Row(
            "16-bit instructions",
            f"{' and '.join(found)} ({', '.join(flags)})" if found else "none: 16-bit products are emulated",
            "ok" if found else "note",
        )
    )
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        return [
            *rows,
            Row("GPU", f"none; torch is built for {built or 'CPU'}", "note" if built else "ok", "" if not built else "check nvidia-smi"),
        ]
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        bf16 = "bf16" if torch.cuda.is_bf16_supported() else "no bf16: use precision.compute fp16"
        rows.append(Row(f"GPU {index}", f"{p.name}, {p.total_memory / 2**30:.0f} GiB, sm_{p.major}{p.minor}, {bf16}"))
    nccl = torch.distributed.is_nccl_available()
    return [
        *rows,
        Row("backend", "nccl" if nccl else "no nccl in this torch", "ok" if nccl else "FAIL", "" if nccl else "install torch with CUDA"),
    ]


def _memory() -> str:
    import psutil

    memory = psutil.virtual_memory()
    return f"{memory.total / 2**30:.0f} GiB memory, {memory.available / 2**30:.0f} free"


def _speed() -> list[Row]:
    """Speed of square matrix products in fp32 and bf16, on all usable cores or the first GPU."""
    import torch

    from moe.records.results import matmul_flops

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(usable_cores())
    speed = {dtype: matmul_flops(dtype, device) / 1e9 for dtype in (torch.float32, torch.bfloat16)}
    fp32, bf16 = speed[torch.float32], speed[torch.bfloat16]
    value = f"fp32 {fp32:,.0f} GFLOP/s, bf16 {bf16:,.0f} GFLOP/s ({bf16 / fp32:.1f} times)"
    slow = bf16 < fp32
    return [Row("matrix products", value, "note" if slow else "ok", "--precision.compute fp32 is faster here" if slow else "")]


def _port() -> list[Row]:
    asked = os.environ.get("MASTER_PORT")
    return [Row("free port", f"{free_port()}" + (f" (MASTER_PORT={asked} is asked for)" if asked else ""))]


def _disk() -> list[Row]:
    """Free space in the folder for runs: ./runs, or its nearest existing parent."""
    folder = next(p for p in (Path("runs").absolute(), *Path("runs").absolute().parents) if p.exists())
    free = shutil.disk_usage(folder).free
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        return [Row("runs/", f"{folder}: {error.strerror}", "FAIL", "train with --out FOLDER, in a folder that can be written")]
    little = free < LITTLE_DISK_BYTES
    return [Row("runs/", f"{folder}, {free / 1e9:.0f} GB free", "note" if little else "ok", "free some disk space" if little else "")]


def _extensions() -> list[Row]:
    """The folder of DeepSpeed's compiled ops. Training on a CPU compiles none."""
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or extensions_dir())
    nearest = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    right = os.access(nearest, os.W_OK)
    fix = "" if right else "set XDG_CACHE_HOME to a folder that can be written"
    return [Row("TORCH_EXTENSIONS_DIR", str(folder), "ok" if right else "note", fix)]


def _nvme() -> list[Row]:
    """Requirements of offload to disk: DeepSpeed's async_io, compiled once. Offload to host memory needs nothing."""
    missing = missing_for_nvme()
    if missing:
        fix = f"only for sharding.offload to nvme: apt-get install {' '.join(missing)}"
        return [Row("offload to nvme", f"no {' or '.join(missing)} found", "note", fix)]
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or extensions_dir())
    there = (folder / "async_io" / "async_io.so").exists()
    return [Row("offload to nvme", "ready" if there else "async_io is compiled with the first run, in a minute or two", "ok", "")]
