"""Reads tables of measured runs: a line of CSV -> Row(network, plan, software, measured seconds and memory), or a reason why it has none.

    read_folder(folder)    Table of every file there; a table that lacks columns has only their names
    read_table(file)       Table(rows, unusable)

COLUMNS names the columns. An empty cell is not stated: tests/planner/table_rules.py fills the gap by a rule, or the row is unusable. Memory
is in bytes; tools of torch, XLA and nvidia-smi count in powers of two, so only a plain "GB" of another tool is 10^9. Seconds of a step are
stated or computed from

    samples/s, tokens/s and GPU      divided into the batch
    TFLOP/s and GPU, MFU             72 B s L h^2 (1 + s/6h + V/12Lh) and its general form, per token 6 N + 12 L w s
                                     rows that count recomputation: 96 B s L h^2 (1 + s/6h + V/16Lh)

Sources: Narayanan et al. (arXiv 2104.04473), section 5.1; Korthikanti et al. (arXiv 2205.05198), appendix A.
"""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moe.plan.job.network import Network, Plan
from moe.plan.memory.stack import Stack
from parallel.errors import BadInput
from tests.planner.table_rules import Cells, NotUsable, layer_parameters, network_of, peak_tflops, plan_of, software_of

COLUMNS = (
    *(
        "source",
        "source_ref",
        "seen",
        "kind",
        "model",
        "family",
        "params_b",
        "layers",
        "hidden",
        "ffn",
        "heads",
        "kv_heads",
        "seq",
        "vocab",
    ),
    *("experts", "topk", "moe_ffn", "gpus", "gpu_type", "gpus_per_node", "tp", "pp", "vpp", "dp", "cp", "ep", "zero", "microbatch"),
    *("global_batch", "schedule", "recompute", "precision", "offload", "measured_tflops_per_gpu", "mfu_pct", "iteration_time_s"),
    *("tokens_per_s_per_gpu", "samples_per_s", "memory_GB", "memory_kind", "status", "notes"),
)
Kind = Literal["allocated", "reserved", "nvidia-smi", "planned", "unknown"]
Status = Literal["ok", "out of memory", "failed"]


@dataclass(frozen=True)
class Row:
    """One run. `formula`: the numbers were computed by its source, not measured. `inferred`: columns that rules filled."""

    table: str
    line: int
    model: str
    network: Network
    plan: Plan
    stack: Stack
    status: Status
    seconds: float | None
    memory: float | None
    memory_kind: Kind
    gpu: str
    gpus_per_node: int
    precision: str
    formula: bool
    inferred: tuple[str, ...]
    cells: dict[str, str]

    @property
    def gpus(self) -> int:
        return self.plan.world


@dataclass(frozen=True)
class Table:
    """A table's rows, and its `unusable` lines: (line number, reason). `missing`: names of missing columns; then there are no rows."""

    name: str
    rows: tuple[Row, ...]
    unusable: tuple[tuple[int, str], ...] = ()
    missing: tuple[str, ...] = ()

    def reasons(self) -> Counter[str]:
        """Return reason -> number of unusable lines."""
        return Counter(reason for _, reason in self.unusable)


def read_folder(folder: str | Path) -> tuple[Table, ...]:
    """Return a Table for every CSV file of a folder, sorted by name. Raises BadInput if no file has all columns."""
    path = Path(folder).expanduser()
    files = sorted(path.glob("*.csv"))
    if not files:
        raise BadInput("--tables", got=f"{path}: no .csv file", needed="a folder of measured tables", fix="name the folder that holds them")
    tables = []
    for file in files:
        header, lines = _lines(file)
        missing = tuple(name for name in COLUMNS if name not in header)
        tables.append(Table(file.stem, (), missing=missing) if missing else _table(file.stem, lines))
    if all(table.missing for table in tables):
        needed = f"a table with the columns {', '.join(COLUMNS)}"
        raise BadInput("--tables", got=f"{path}: {len(files)} tables of other columns", needed=needed, fix=f"{_complaint(tables[0])}")
    return tuple(tables)


def read_table(file: str | Path) -> Table:
    """Read one table. Raises BadInput for a file without a header, and for missing columns, with their names."""
    path = Path(file).expanduser()
    header, lines = _lines(path)
    missing = tuple(name for name in COLUMNS if name not in header)
    if missing:
        raise BadInput(str(path), got=f"no columns {', '.join(missing)}", needed="the columns of a measured table", fix="add them, empty")
    return _table(path.stem, lines)


def _complaint(table: Table) -> str:
    return f"add to {table.name}.csv the columns {', '.join(table.missing)}, empty if unknown"


def _lines(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as opened:
            reader = csv.DictReader(opened)
            lines = [{key: value or "" for key, value in line.items() if isinstance(key, str)} for line in reader]
            return list(reader.fieldnames or ()), lines
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        fix = "name a file of comma-separated values"
        raise BadInput(str(path), got=str(error), needed="a table in UTF-8", fix=fix) from None


def _table(name: str, lines: list[dict[str, str]]) -> Table:
    rows, unusable = [], []
    for number, line in enumerate(lines, start=2):
        try:
            rows.append(_row(name, number, line))
        except NotUsable as reason:
            unusable.append((number, str(reason)))
    return Table(name, tuple(rows), tuple(unusable))


def _row(table: str, number: int, line: dict[str, str]) -> Row:
    cells = Cells(line)
    network, stack = network_of(cells), software_of(cells)
    plan = plan_of(cells, network, stack)
    _same_work(cells, network, plan)
    kind, memory = _memory(cells)
    return Row(
        table=table,
        line=number,
        model=cells.text("model"),
        network=network,
        plan=plan,
        stack=stack,
        status=_status(cells),
        seconds=seconds_of(cells, network, plan),
        memory=memory,
        memory_kind=kind,
        gpu=cells.text("gpu_type"),
        gpus_per_node=cells.count("gpus_per_node") or 8,
        precision=cells.text("precision"),
        formula=not cells.text("kind").lower().startswith("measured"),
        inferred=tuple(dict.fromkeys(cells.inferred)),
        cells=line,
    )


def _status(cells: Cells) -> Status:
    """Return the status of a run. It is out of memory only if this is stated: a run without a result may have failed for another reason."""
    said = cells.text("status").lower()
    if said in ("oom", "out of memory"):
        return "out of memory"
    if said.startswith("outlier"):
        raise NotUsable("an outlier, according to its source")
    return "ok" if said in ("", "ok") else "failed"


def _memory(cells: Cells) -> tuple[Kind, float | None]:
    said, value = cells.text("memory_kind").lower(), cells.number("memory_GB")
    kinds: dict[str, Kind] = {"nvidia-smi": "nvidia-smi", "planned": "planned", "reserved": "reserved", "allocated": "allocated"}
    kind: Kind = next((kind for word, kind in kinds.items() if word in said), "unknown")
    binary = "gib" in said or "mib" in said or kind in ("nvidia-smi", "planned") or "peak" in said
    return kind, None if value is None else value * (2**30 if binary else 1e9)


def seconds_of(cells: Cells, network: Network, plan: Plan) -> float | None:
    """Return the seconds of one step, as stated or converted from another speed; None if the row has no speed."""
    tokens = plan.global_batch * network.length
    if cells.number("iteration_time_s"):
        return cells.number("iteration_time_s")
    if "global_batch" in cells.inferred:
        return None
    if rate := cells.number("tokens_per_s_per_gpu"):
        return tokens / (rate * plan.world)
    if rate := cells.number("samples_per_s"):
        return plan.global_batch / rate
    tflops = cells.number("measured_tflops_per_gpu")
    if tflops is None and cells.number("mfu_pct"):
        peak = peak_tflops(cells.text("gpu_type"))
        tflops = peak * (cells.number("mfu_pct") or 0) / 100 if peak else None
    if not tflops:
        return None
    flops = step_flops(network, tokens, counts_recompute=counts_recompute(cells), pairs=pairs(cells))
    return flops / (tflops * 1e12 * plan.world)


def _same_work(cells: Cells, network: Network, plan: Plan) -> None:
    """Raise NotUsable if seconds * TFLOP/s of a row differ by more than half from the FLOPs of its network and batch."""
    seconds, tflops = cells.number("iteration_time_s"), cells.number("measured_tflops_per_gpu")
    if seconds and tflops and "global_batch" not in cells.inferred:
        done = seconds * tflops * 1e12 * plan.world
        flops = step_flops(network, plan.global_batch * network.length, counts_recompute=counts_recompute(cells))
        if not 1 / 1.5 < flops / done < 1.5:
            raise NotUsable(f"seconds and TFLOP/s make {done:.2g} FLOPs, the network and batch {flops:.2g}")


def counts_recompute(cells: Cells) -> bool:
    """Return whether the source's TFLOP/s count recomputed forward passes, as in the SC21 paper and for BLOOM."""
    said = f"{cells.text('source')} {cells.text('notes')}".lower()
    stated = "count recompute" in said or "counts recompute" in said or "sc21" in said or "readme jan 2021" in said
    return stated and cells.text("recompute").lower().startswith("full")


def pairs(cells: Cells) -> Literal["all", "causal"]:
    """Return which pairs of query and key the source's TFLOP/s count. Megatron-Core counts only those of a causal mask since 2025: rows of
    its model zoo that state TFLOP/s and seconds show it, within a thousandth."""
    said = f"{cells.text('source')} {cells.text('seen')}".lower()
    return "causal" if "modelzoo" in said or "megatron-bridge" in said or "megatron bridge" in said else "all"


def step_flops(network: Network, tokens: float, *, counts_recompute: bool, pairs: Literal["all", "causal"] = "all") -> float:
    """Return the FLOPs of one step as publications count them. counts_recompute: the layers' forward pass counts twice, the head's once.
    pairs: pairs of query and key that attention counts."""
    inner, keys = network.heads * network.channels, network.groups * network.channels
    attention = 2.0 * network.width * (2 * inner + 2 * keys)
    dense = 2 * layer_parameters(network) - attention
    sparse = 0.0
    if e := network.experts:
        sparse = 2.0 * network.width * ((3 if e.gated else 2) * (e.choices * e.hidden + e.shared_hidden) + e.count)
    cores = (4.0 if pairs == "all" else 2.0) * inner * network.length * network.layers
    networks = dense * (network.layers - len(network.sparse_layers)) + sparse * len(network.sparse_layers)
    layers = attention * network.layers + networks + cores
    return tokens * ((4 if counts_recompute else 3) * layers + 3 * 2.0 * network.width * network.vocab)
