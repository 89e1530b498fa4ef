"""`moe doctor`: checks whether this machine can train. Prints one table; the exit code is 1 if training could not work.

`moe doctor RUN` instead says what is wrong with a run's router or loss, from its records (moe/records/rules.py). `moe doctor --trace
FOLDER` finds the ranks that a hung run waited for, from the traces of torch's flight recorder.
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
from typing import TYPE_CHECKING, Any, Literal

from moe.cli.run import refuse, run_dir, write_rows
from moe.cli.verbs import Doctor
from moe.launch import exit_codes
from moe.launch.environment import free_port
from parallel.errors import counted, plain
from parallel.machine import MATRIX_INSTRUCTIONS, matrix_instructions, processor, usable_cores
from parallel.process.extensions import extensions_dir, missing_for_nvme
from parallel.store.files import user_path

if TYPE_CHECKING:
    from parallel.watch.flight_recorder import Diagnosis

# package that training needs -> its oldest supported version
NEEDED = {"torch": "2.10", "deepspeed": "0.18", "pydantic": "2", "safetensors": "0", "numpy": "1"}
NEEDED |= {"rich": "0", "matplotlib": "0", "tensorboard": "0"}
OPTIONAL = ("tokenizers", "transformers", "triton")
LITTLE_DISK_BYTES = 2e9
EXCHANGE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Row:
    """One row of the table. check: name of the check. value: what it found. state: "ok"; "note" for a limitation with which training works;
    "FAIL" if training cannot work. fix: advice."""

    check: str
    value: str
    state: Literal["ok", "note", "FAIL"] = "ok"
    fix: str = ""

    @staticmethod
    def of(check: str, value: str, right: bool, otherwise: Literal["note", "FAIL"], fix: str = "") -> Row:
        return Row(check, value) if right else Row(check, value, otherwise, fix)


def main(flags: Doctor, _: dict[str, str]) -> int:
    """Print the table, and write it to --json. Return exit code 1 if a check of the machine failed or, with RUN, if a rule fired."""
    if flags.run_dir is not None:
        refuse({"trace": flags.trace}, got="with a run", needed="a run, or --trace")
        return _run(Path(run_dir(flags.run_dir, "metrics.jsonl")), flags.json)
    if flags.trace is not None:
        return _trace(flags.trace, flags.json)
    rows: list[Row] = []
    for check in (_python, _packages, _deepspeed, _exchange, _devices, _speed, _port, _disk, _extensions, _nvme):
        try:
            rows += check()
        except Exception as error:  # a broken installation may stop one check; the others still run
            rows.append(Row(check.__name__.strip("_"), f"{type(error).__name__}: {error}".splitlines()[0], "FAIL", "see the message"))
    _print(rows)
    write_rows(flags.json, "doctor", [asdict(row) | {"passed": row.state != "FAIL"} for row in rows])
    return exit_codes.of(all(row.state != "FAIL" for row in rows))


def _run(folder: Path, json: Path | None) -> int:
    """Print a line for each rule that fires on the run in `folder`."""
    from moe.recipe.load import load
    from moe.records.metrics import read
    from moe.records.rules import RULES, diagnose

    lines = read(folder)
    found = diagnose(lines, load(str(folder / "recipe.yaml"))[0])
    for finding in found:
        print(finding.line)
    if not found:
        steps = sum(line.get("kind", "train") == "train" for line in lines)
        print(f"nothing found: {len(RULES)} rules, {counted(steps, 'step')}")
    write_rows(json, "doctor", [finding.row() | {"passed": False} for finding in found])
    return exit_codes.of(not found)


def _print(rows: list[Row]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    colors = {"ok": "green", "note": "yellow", "FAIL": "bold red"}
    for row in rows:
        table.add_row(Text(row.state, style=colors[row.state]), row.check, Text(row.value), Text(row.fix))
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    failed = sum(row.state == "FAIL" for row in rows)
    passed = f"all {len(rows)} checks passed. A first run: moe train switch_tiny --nproc 2"
    print(f"{failed} of {len(rows)} checks failed" if failed else passed)


def _python() -> list[Row]:
    found = f"{platform.python_version()} {sys.executable}"
    return [Row.of("python", found, sys.version_info >= (3, 11), "FAIL", "install Python 3.11 or newer")]


def _packages() -> list[Row]:
    rows = []
    for package, oldest in (NEEDED | dict.fromkeys(OPTIONAL, "0")).items():
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            fix = "optional" if package in OPTIONAL else f"pip install {package}"
            rows.append(Row(package, "not installed", "note" if package in OPTIONAL else "FAIL", fix))
            continue
        rows.append(Row.of(package, version, _numbers(version) >= _numbers(oldest), "FAIL", f"pip install '{package}>={oldest}'"))
    return rows


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdecimal())


def _deepspeed() -> list[Row]:
    command = [sys.executable, "-c", "import deepspeed; print(deepspeed.accelerator.get_accelerator()._name)"]
    started = time.perf_counter()
    got = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if got.returncode:
        last = (got.stderr.strip() or "no message").splitlines()[-1]
        return [Row("deepspeed import", last, "FAIL", "moe train --launcher torchrun works without it, sharding.kind zero does not")]
    return [Row("deepspeed import", f"{time.perf_counter() - started:.1f} s, accelerator {got.stdout.split()[-1]}")]


def exchange_rows(rank: int) -> list[float]:
    """Return the values that `rank` receives in an uneven all-to-all between two ranks, in which rank 1 sends itself no rows."""
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

    torch.set_num_threads(1)  # forked ranks would hang in OpenMP if this process had started OpenMP's threads
    started = time.perf_counter()
    try:
        got = run_on_ranks(exchange_rows, 2, timeout_s=EXCHANGE_TIMEOUT_S)
    except RuntimeError as error:
        lines = str(error).splitlines()
        return [Row("gloo all-to-all, 2 ranks", lines[-1], "FAIL", "check the host's name in /etc/hosts, or set GLOO_SOCKET_IFNAME=lo")]
    wanted = [[10.0, 20.0, 21.0], [11.0, 12.0, 13.0]]
    if got != wanted:
        return [Row("gloo all-to-all, 2 ranks", f"wrong rows: {got}", "FAIL", "install another version of torch")]
    return [Row("gloo all-to-all, 2 ranks", f"uneven splits are right, {time.perf_counter() - started:.1f} s")]


def _devices() -> list[Row]:
    import psutil
    import torch

    from parallel.process.process import gpus

    memory = psutil.virtual_memory()
    about_memory = f"{memory.total / 2**30:.0f} GiB memory, {memory.available / 2**30:.0f} free"
    flags = matrix_instructions()
    found = sorted({MATRIX_INSTRUCTIONS[flag] for flag in flags})
    products = f"{' and '.join(found)} ({', '.join(flags)})" if found else "none: 16-bit products are emulated"
    rows = [
        Row("processor", f"{processor()}, {usable_cores()} of {os.cpu_count()} cores usable, {about_memory}"),
        Row.of("16-bit instructions", products, bool(found), "note"),
    ]
    if not gpus():
        built = torch.version.cuda or torch.version.hip
        return [*rows, Row.of("GPU", f"none; torch is built for {built or 'CPU'}", not built, "note", "check nvidia-smi")]
    for index in range(gpus()):
        p = torch.cuda.get_device_properties(index)
        bf16 = "bf16" if torch.cuda.is_bf16_supported() else "no bf16: use precision.compute fp16"
        rows.append(Row(f"GPU {index}", f"{p.name}, {p.total_memory / 2**30:.0f} GiB, sm_{p.major}{p.minor}, {bf16}"))
    nccl = torch.distributed.is_nccl_available()
    return [*rows, Row.of("backend", "nccl" if nccl else "no nccl in this torch", nccl, "FAIL", "install torch with CUDA")]


def _speed() -> list[Row]:
    import torch

    from moe.records.results import matmul_flops
    from parallel.process.process import World

    device = World().device
    torch.set_num_threads(usable_cores())
    speed = {dtype: matmul_flops(dtype, device) / 1e9 for dtype in (torch.float32, torch.bfloat16)}
    fp32, bf16 = speed[torch.float32], speed[torch.bfloat16]
    value = f"fp32 {fp32:,.0f} GFLOP/s, bf16 {bf16:,.0f} GFLOP/s ({bf16 / fp32:.1f} times)"
    return [Row.of("matrix products", value, bf16 >= fp32, "note", "--precision.compute fp32 is faster here")]


def _port() -> list[Row]:
    asked = os.environ.get("MASTER_PORT")
    return [Row("free port", f"{free_port()}" + (f" (MASTER_PORT={asked} is asked for)" if asked else ""))]


def _disk() -> list[Row]:
    folder = next(p for p in (Path("runs").absolute(), *Path("runs").absolute().parents) if p.exists())
    free = shutil.disk_usage(folder).free
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        return [Row("runs/", f"{folder}: {error.strerror}", "FAIL", "train with --out FOLDER, in a folder that can be written")]
    return [Row.of("runs/", f"{folder}, {free / 1e9:.0f} GB free", free >= LITTLE_DISK_BYTES, "note", "free some disk space")]


def _extensions() -> list[Row]:
    """Check that the folder for DeepSpeed's compiled ops can be written. A failure is only a note, because a CPU needs no compiled ops."""
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or extensions_dir())
    nearest = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    fix = "set XDG_CACHE_HOME to a folder that can be written"
    return [Row.of("TORCH_EXTENSIONS_DIR", str(folder), os.access(nearest, os.W_OK), "note", fix)]


def _nvme() -> list[Row]:
    missing = missing_for_nvme()
    if missing:
        fix = f"only for sharding.offload to nvme: apt-get install {' '.join(missing)}"
        return [Row("offload to nvme", f"no {' or '.join(missing)} found", "note", fix)]
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or extensions_dir())
    there = (folder / "async_io" / "async_io.so").exists()
    return [Row("offload to nvme", "ready" if there else "the first run compiles async_io, which takes a minute or two")]


def _trace(folder: Path, json: Path | None) -> int:
    """Print the ranks that a hung run waited for (culprits), then a row for each waiting rank. folder: the flight recorder's traces."""
    from parallel.watch.flight_recorder import diagnose, read_folder

    traces = read_folder(user_path(folder, what="--trace"))
    found = diagnose(traces)
    culprits = f"rank{'s' if len(found.culprits) > 1 else ''} {' '.join(map(str, found.culprits))}"
    line = plain(f"{culprits if found.culprits else 'no culprit'}: {found.said}")
    print(line)
    rows = _waiting(found)
    if rows:
        print(f"{'rank':>5}  {'waits at':<44} {'over':<40} for")
    for row in rows:
        print(f"{row['rank']:>5}  {row['collective'][:44]:<44} {row['group'][:40]:<40} {row['waits_for']}")
    about = {"culprits": list(found.culprits), "line": line, "traces": len(traces), "silent": list(found.silent)}
    write_rows(json, "doctor", [row | {"passed": True} for row in rows], **about)
    return exit_codes.DONE


def _waiting(found: Diagnosis) -> list[dict[str, Any]]:
    """Return a row for each waiting rank, with one of its collectives: the first in which it waits for a culprit (a rank that caused the
    hang). If there is none: the first in which it waits."""
    rows = []
    for rank in sorted({wait.rank for wait in found.waits if wait.behind}):
        waits = [wait for wait in found.waits if wait.rank == rank and wait.behind]
        wait = next((w for w in waits if set(w.behind) & set(found.culprits)), waits[0])
        call, group = plain(f"{wait.call.kind} {wait.call.number}"), plain(wait.group[1] or wait.group[0])
        rows.append({"rank": rank, "collective": call, "group": group, "waits_for": " ".join(map(str, wait.behind))})
    return rows
