"""Draws what `moe train` shows in a terminal while it trains: python docs/pictures/live.py RUN STEP, from a run's own records.

It is the display's own code (moe/records/panel.py), given the lines that the run wrote, as vector graphics by rich.
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from moe.recipe.load import load  # noqa: E402
from moe.records.metrics import read, read_summary  # noqa: E402
from moe.records.panel import State, panel  # noqa: E402
from moe.train.start.opening import title  # noqa: E402
from parallel.process.process import World  # noqa: E402


def main(run_dir: str, step: str) -> None:
    """Write live.svg beside this file."""
    run, _ = load(f"{run_dir}/recipe.yaml")
    world = (read_summary(Path(run_dir)) or {"world": 1})["world"]
    state = State(run.train.steps, recipe=Path(run_dir).name, world=world, lines=title(run, World(size=world, local_size=world)))
    for line in read(Path(run_dir)):
        if line["step"] <= int(step) and line["kind"] == "train":
            state.add(line)
        elif line["step"] <= int(step) and line["kind"] == "eval":
            state.evaluation = line
    console = Console(record=True, width=96, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(panel(state, width=94, height=24))
    plain = re.sub(r"\s*@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.S)  # no font from another host
    console.save_svg(str(HERE / "live.svg"), title=f"moe train {Path(run_dir).name}", code_format=plain, unique_id="live")


if __name__ == "__main__":
    main(*sys.argv[1:])
