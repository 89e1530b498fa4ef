"""`python -m moe.bench.gpu --minutes 25 --json F [--resume]`: runs the measurements listed in `parts`, and prints one page.

The JSON file is written after each measurement (part), and `--resume` continues from it, so several short calls can share the work. A part
that fails is recorded with its error, and the next one runs. Without a GPU all sizes are tiny and Triton's interpreter runs the kernels.
This only tests the command; the times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "triton", "numpy", "einops")
LIMIT_S = 480  # largest number of seconds of a part
# as BEFORE_TORCH of moe/launch/environment.py, which needs psutil: ranks of `moe train` allocate so too
ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def main(words: list[str] | None = None) -> int:
    """Run the command. Return 1 if a part failed or found a wrong result, 2 for bad input, else 0."""
    parser = argparse.ArgumentParser(prog="python -m moe.bench.gpu", description="check and measure a new GPU")
    parser.add_argument("--minutes", type=float, default=25, help="time limit on a GPU, 25 by default; longer measurements are left out")
    parser.add_argument("--json", type=Path, required=True, help="file of the results, written after each measurement")
    parser.add_argument("--resume", action="store_true", help="continue the --json file: run the measurements without results in it")
    args = parser.parse_args(words)
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        print(f"error: got a Python without {', '.join(missing)}, needed {', '.join(PACKAGES)}; fix: install them", file=sys.stderr)
        return 2
    if args.json.exists() and not args.resume:
        print(f"error: --json: got {args.json}, which exists, needed a new file; fix: add --resume, or name another", file=sys.stderr)
        return 2
    return measure(args.minutes, args.json)


def measure(minutes: float, file: Path) -> int:
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.update(ALLOCATOR | os.environ)  # before torch is loaded
    import torch

    from parallel.process.process import World

    torch.set_float32_matmul_precision("highest")  # no TF32, which NVIDIA's containers allow by TORCH_ALLOW_TF32_CUBLAS_OVERRIDE
    device = World().device
    if device.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is loaded
    from moe.bench.gpu.part import Machine
    from moe.records.results import source_commit
    from parallel.store.files import replace_file

    machine = Machine(device)
    fresh: dict[str, Any] = {"commit": source_commit(), "device": machine.name, "parts": {}}
    try:
        done = json.loads(file.read_text()) if file.exists() else fresh
        if not isinstance(done, dict) or done.get("device") != machine.name or not isinstance(done.get("parts"), dict):
            raise ValueError(f"not made on {machine.name}")
        replace_file(file, json.dumps(done := fresh | done))  # before measuring, because it raises OSError if the file cannot be written
    except (OSError, ValueError) as error:
        print(f"error: --json: got {file} ({error}), needed a file of this machine's results; fix: name another file", file=sys.stderr)
        return 2
    until = time.monotonic() + 60 * minutes
    for part in parts():
        rows = done["parts"].get(part.name, {}).get("rows")
        if rows is not None and not any("failed" in row for row in rows):  # a row fails if memory runs out, for example
            continue
        result = _result(part, machine, done["parts"], minutes_left=(until - time.monotonic()) / 60)
        other = {"commit": fresh["commit"]} if fresh["commit"] != done["commit"] else {}  # the file is of another commit
        done["parts"][part.name] = result | other
        replace_file(file, json.dumps(done, indent=1))
    print(*page(done), sep="\n")
    results = [result for part in done["parts"].values() for result in part.get("rows", [{"passed": "left_out" in part}])]
    return int(any(result.get("passed") is False for result in results))


def _result(part: Any, machine: Any, before: dict[str, Any], *, minutes_left: float) -> dict[str, Any]:
    """Run a part and return its entry in the JSON file: rows and seconds, or the reason why it was left out or failed. before: name of each
    earlier part -> its entry."""
    if lacking := [name for name in part.packages if find_spec(name) is None]:
        return {"left_out": f"needs {', '.join(lacking)}"}
    if machine.gpu and part.minutes > minutes_left:
        return {"left_out": f"takes up to {part.minutes:g} minutes, {max(0.0, minutes_left):.0f} are left"}
    from moe.bench.gpu.part import TooLong

    started, before_limit = time.perf_counter(), signal.signal(signal.SIGALRM, _stop)
    signal.alarm(LIMIT_S)
    try:
        rows = part.rows(machine, {name: entry["rows"] for name, entry in before.items() if "rows" in entry})
    except (Exception, TooLong) as error:  # the other parts can still be measured
        return {"failed": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before_limit)
    return {"seconds": time.perf_counter() - started, "rows": rows}


def _stop(*_: Any) -> None:
    from moe.bench.gpu.part import TooLong

    raise TooLong(f"more than {LIMIT_S} s")


def parts() -> list[Any]:
    """Return the parts in the order in which they run. They import triton, so without a GPU `measure` first sets TRITON_INTERPRET."""
    from moe.bench.gpu import ceilings, layer, right, step
    from moe.bench.gpu.part import Part

    return [
        Part("machine", 1, ceilings.rows, ceilings.page),
        Part("right", 5, right.rows, right.page),
        Part("kernels", 3, layer.kernel_rows, layer.kernel_page),
        Part("steps", 5, step.step_rows, step.step_page, ("pydantic", "yaml")),
        Part("losses", 2, step.loss_rows, step.loss_page, ("pydantic", "yaml")),
        Part("layers", 7, layer.race_rows, layer.race_page),
    ]


def page(done: dict[str, Any]) -> list[str]:
    lines = [f"# {done['device']}"]
    for part in parts():
        entry = done["parts"].get(part.name, {"left_out": "not begun"})
        lines += ["", f"## {part.name}"]
        lines += part.page(entry["rows"]) if "rows" in entry else [f"{word}: {reason}" for word, reason in entry.items()]
    return [*lines, "", "## next", *next_steps({name: entry.get("rows", []) for name, entry in done["parts"].items()})]


def next_steps(rows: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return lines of advice that follow from the parts' rows (name of a part -> its rows), the most urgent first."""
    wrong = [f"first correct the wrong results of {name}" for name, found in rows.items() if any(r.get("passed") is False for r in found)]
    lost = [(r["seconds"] * (1 - r["share"]), r) for r in rows.get("kernels", []) if r.get("share")]
    most = max(lost, key=lambda one: one[0], default=None)
    gain = [] if most is None else [f"most to gain in a kernel: {1e3 * most[0]:.2f} ms of {most[1]['kernel']} at {most[1]['what']}"]
    times = {(r["kernel"], r["what"]): r["seconds"] for r in rows.get("kernels", []) if "kernel" in r}
    ratios = {what: taken / times["product", what] for (kernel, what), taken in times.items() if kernel == "persistent product"}
    faster = [f"set experts.kernels to triton_persistent: {x:.2f} of the product's time at {what}" for what, x in ratios.items() if x < 1]
    races = [(ratio, peer, r["what"]) for r in rows.get("layers", []) for peer, ratio in r.get("over_peers", {}).items() if ratio > 1]
    slower = [f"slower than {peer} at {what}: {ratio:.2f} times its time" for ratio, peer, what in sorted(races, reverse=True)]
    waits = [f"the host waits {n} times a step: {r['what']}" for r in rows.get("steps", []) if (n := r.get("synchronizations") or 0) > 2]
    return [*wrong, *gain, *faster, *slower, *waits] or ["no measurement suggests a change"]


if __name__ == "__main__":
    sys.exit(main())
