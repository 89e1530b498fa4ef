"""Measures the host memory of `moe convert RUN hf:PATH`: its peak above the peak for a tiny model, divided by the size of the output.

`python -m tests.measured writing`. The model is a dense Llama with random weights, of which no tensor has more than a tenth of the bytes.
"""

from __future__ import annotations

import json as json_text
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from moe.convert.huggingface.config import config_of
from moe.convert.huggingface.convert import shapes_of, to_run
from moe.convert.huggingface.families import FAMILIES
from moe.convert.huggingface.tensors import by_key, shape_of, write
from moe.recipe.load import load
from moe.records.results import write_json

SHARE = 1.1
# the kernel's own number, because getrusage counts the parent's memory too
PEAK = "import sys; from moe.cli.main import main; assert not main(sys.argv[1:]); print(open('/proc/self/status').read())"


def main(*, layers: int = 16, d_model: int = 512, json: str | None = None) -> int:
    """Print the table row. Returns 1 if the peak is more than SHARE times the output."""
    with tempfile.TemporaryDirectory() as folder:
        (tiny, _), (held, size) = (
            converted(Path(folder) / name, *sizes) for name, sizes in (("tiny", (1, 64)), ("run", (layers, d_model)))
        )
    row = {"bytes": size, "tiny_peak_bytes": tiny, "peak_bytes": held, "share": (held - tiny) / size}
    row["passed"] = row["share"] <= SHARE
    print(f"{'output':>10}{'peak':>10}{'tiny model':>12}{'share':>8}")
    print(f"{size / 2**20:>6.0f} MiB{held / 2**20:>6.0f} MiB{tiny / 2**20:>8.0f} MiB{row['share']:>8.2f}")
    if json:
        write_json(json, verb="bench writing", rows=[row], aim=SHARE)
    return 0 if row["passed"] else 1


def converted(folder: Path, layers: int, d_model: int) -> tuple[int, int]:
    """Convert a model to a run, and the run back in a process of its own. Return (that process's peak, bytes of the written tensors)."""
    folder.mkdir()
    keys = {"model.ffn": "swiglu", "model.norm": "rmsnorm", "model.positions": "rotary", "model.num_layers": layers}
    run, _ = load("dense_tiny", {key: str(value) for key, value in (keys | {"model.d_model": d_model, "model.d_ff": 4 * d_model}).items()})
    family, shapes = FAMILIES["llama"], shapes_of(run)
    forms = {key: (torch.float32, shape_of(names, family, shapes)) for key, names in by_key(shapes, family).items()}
    (folder / "config.json").write_text(json_text.dumps(config_of(run, "llama")))
    write(folder, forms, lambda key: torch.randn(forms[key][1]))
    to_run(folder, folder / "run", overrides={})
    words = [sys.executable, "-c", PEAK, "convert", str(folder / "run"), f"hf:{folder / 'back'}"]
    said = subprocess.run(words, capture_output=True, text=True, check=True, timeout=600).stdout
    peak = re.search(r"VmHWM:\s*(\d+) kB", said)
    assert peak is not None, "no /proc/self/status, which Linux has"
    return int(peak[1]) * 1024, sum(path.stat().st_size for path in (folder / "back").glob("*.safetensors"))
