"""Reads and writes schedules as CSV files: a line for each rank, a cell for each action, written stage-op-micro-batch@version.

    0F0,0F1,0B0,0B1,0U@1            0U@1: update of stage 0 that makes version 1; @0 is not written
    1F0,1B0,1F1,1B1,1U@1            (0F4;7B1)OVERLAP_F_B: a pair of F and B, which runs as one block

Ops: F forward, B backward, I input gradient only, W weight gradient only, S all-reduce of a stage's replicas, U update. A rank holds the
stages in its line. S and U are appended to each rank's order if the file has neither, as in the compute-only files of
torch.distributed.pipelining. Empty cells in these files (waits) are ignored.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from pathlib import Path

from parallel.errors import BadInput, counted
from parallel.pipeline.check import check
from parallel.pipeline.schedule import COMPUTE, OF_A_BATCH, Action, Node, Op, Schedule, updates
from parallel.store.files import read_text, write_text

_ACTION = re.compile(r"(\d{1,9})([FBIWSU])(\d{0,9})(?:@(\d{1,9}))?", re.ASCII)
_PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")


def write_order(schedule: Schedule, path: str | Path, *, what: str = "--out") -> None:
    """Write the schedule to `path`; create its folder if needed. Raises BadInput (for option `what`) if the file cannot be written."""
    lines = []
    for rank, order in enumerate(schedule.orders):
        cells: list[str] = []
        for index, action in enumerate(order):
            if Node(rank, index - 1) in schedule.pairs:
                cells[-1] = f"({cells[-1]};{action})OVERLAP_F_B"
            else:
                cells.append(str(action))
        lines.append(",".join(cells) + "\n")
    write_text(Path(path), "".join(lines), what=what)


def read_order(path: str | Path) -> Schedule:
    """Read a schedule from a CSV file and check it. Raises BadInput if the file is invalid, incomplete or has a deadlock."""
    try:
        rows = csv.reader(io.StringIO(read_text(path, newline="").removeprefix("\ufeff")))
        lines = [(rows.line_num, cells) for cells in rows if cells]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        said = getattr(error, "strerror", None) or "not a text file in CSV"
        fix = "write one with moe simulate 1f1b --out order.csv"
        raise BadInput("schedule", got=f"{path}: {said}", needed="a CSV file of actions", fix=fix) from None
    orders: list[list[Action]] = []
    pairs: set[Node] = set()
    for rank, (number, cells) in enumerate(lines):
        orders.append([])
        for column, cell in enumerate(cells):
            where = f"{path} line {number} cell {column + 1}"
            pair = _PAIR.fullmatch(cell.strip())
            if pair:
                pairs.add(Node(rank, len(orders[-1])))
            orders[-1] += [_action(text.strip(), where) for text in (pair.groups() if pair else (cell,)) if text.strip()]
        if not orders[-1]:
            fix = "add actions, or remove the line"
            raise BadInput(f"{path} line {number}", got="no action", needed="a stage on every rank", fix=fix)
    if not any(action.op is Op.F for order in orders for action in order):
        needed = "a line of actions for each rank, such as 0F0,0B0"
        raise BadInput("schedule", got=f"{path} without a forward pass (F)", needed=needed, fix="add actions to the file")
    return check(_schedule(Path(path).stem, orders, frozenset(pairs)))


def _action(text: str, where: str) -> Action:
    found = _ACTION.fullmatch(text)
    if found is None or (not found[3]) != (found[2] in "SU") or (found[2] in "SU" and found[4] and not int(found[4])):
        needed = "stage, then F, B, I or W, then micro-batch (2F0), or stage, then S or U, then version from 1 (2U@1)"
        raise BadInput(where, got=repr(text), needed=needed, fix="correct or remove the cell")
    op = Op(found[2])
    version = int(found[4] or (op in (Op.S, Op.U)))
    return Action(op, int(found[1]), int(found[3]) if found[3] else OF_A_BATCH, version)


def _schedule(name: str, orders: Sequence[list[Action]], pairs: frozenset[Node]) -> Schedule:
    compute = [action for order in orders for action in order if action.op in COMPUTE]
    num_stages, microbatches = 1 + max(a.stage for a in compute), 1 + max(a.microbatch for a in compute)
    there = {a.stage for order in orders for a in order}
    missing = next((stage for stage in range(num_stages) if stage not in there), None)
    if missing is not None:
        got, fix = f"stages up to {num_stages - 1} without stage {missing}", f"add stage {missing} to a rank, or renumber the stages"
        raise BadInput(f"schedule {name}", got=got, needed="all stages from 0", fix=fix)
    homes = [tuple(r for r, order in enumerate(orders) if any(a.stage == stage for a in order)) for stage in range(num_stages)]
    if not any(action.op in (Op.S, Op.U) for order in orders for action in order):
        for rank, order in enumerate(orders):
            mine = [stage for stage, ranks in enumerate(homes) if rank in ranks]
            order += [Action(Op.S, stage, version=1) for stage in mine if len(homes[stage]) > 1]
            order += updates(order)
    num_updates = max((action.version for order in orders for action in order if action.op is Op.U), default=1)
    if microbatches % num_updates:
        got = f"{counted(microbatches, 'micro-batch')} and {num_updates} updates"
        needed = "the same number of micro-batches for each update"
        raise BadInput(f"schedule {name}", got=got, needed=needed, fix="add or remove updates")
    return Schedule(name, tuple(homes), microbatches, microbatches // num_updates, tuple(tuple(order) for order in orders), pairs)
