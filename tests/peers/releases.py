"""`python -m tests.peers.releases HOME [AXIS ...] [RELEASE ...]`: `moe verify --peer transformers` for releases side by side.

Each release is installed into a folder of its own in HOME, without the packages that all share. Each axis of each release is one run of
the command, whose rows are kept in HOME/rows, so that a second call runs only what is missing. All rows are written to FOUND.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import product
from json import loads
from pathlib import Path
from typing import Any

from moe.records.results import write_json

RELEASES = ("5.4.0", "5.8.0", "5.12.1", "5.16.1", "5.18.0", "5.23.0", "5.6.0", "5.14.0", "5.17.0", "5.20.2", "5.24.0")  # sparse first
AXES = {  # two ranks each. Later releases have ep only with tp or fsdp
    "ep": "--ep 2",
    "ep-tp": "--ep 2 --tp 2 --only ep2_tp2",
    "ep-fsdp": "--ep 2 --fsdp 2 --only ep2_fsdp2",
    "tp": "--tp 2",
    "fsdp": "--fsdp 2",
}
FAMILIES = "mixtral,qwen3_moe,olmoe,gpt_oss,deepseek_v3"
FOUND = Path("docs/benchmarks/peers-transformers.json")
_OF_HUB = ("httpx", "httpcore", "h11", "anyio", "sniffio", "idna", "certifi")  # huggingface_hub 1.x needs them


def main(home: Path, axes: list[str], releases: list[str]) -> int:
    """Run what is missing of these axes and releases, and write all rows that HOME has. Returns 1 if a run ended without rows."""
    lost = 0
    for axis, release in product(axes, releases):
        folder, file = home / f"transformers-{release}", home / "rows" / f"{release} {axis}.json"
        if not file.exists():
            install(release, folder)
            file.parent.mkdir(parents=True, exist_ok=True)
            layout = [word.replace("_", " ") for word in AXES[axis].split()]
            words = ["-m", "moe", "verify", "--peer", "transformers", "--model", FAMILIES, *layout, "--json", str(file)]
            subprocess.run([sys.executable, *words], env={**os.environ, "PYTHONPATH": str(folder)})
            lost += not file.exists()
            write(home / "rows")
    return int(lost > 0)


def write(folder: Path) -> None:
    """Write the rows of all runs, each with its release and the first value that deviates."""
    rows: list[dict[str, Any]] = []
    for file in sorted(folder.glob("*.json"), key=lambda file: [int(number) for number in file.name.split(" ")[0].split(".")]):
        known = loads(file.read_text())
        assert file.name.startswith(f"{known['version']} "), f"{file} has rows of {known['version']}"
        rows += [{"release": known["version"], **row, "rows": row.get("rows", [])[:1]} for row in known["rows"]]
    write_json(FOUND, verb="peer releases", rows=rows, passed=sum(row["passed"] is True for row in rows))


def install(release: str, folder: Path) -> None:
    """Install a release, and those of its requirements that the shared environment has in another version."""
    if folder.exists():
        return
    _pip(folder, f"transformers=={release}")
    (metadata,) = folder.glob("transformers-*.dist-info/METADATA")
    needs = dict(re.findall(r"^Requires-Dist: (tokenizers|huggingface-hub)(.*)$", metadata.read_text(), flags=re.M))
    _pip(folder, *(f"{name}{version}" for name, version in needs.items()), *_OF_HUB)


def _pip(folder: Path, *names: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *names], check=True)


if __name__ == "__main__":
    chosen = [word for word in sys.argv[2:] if word in AXES]
    sys.exit(main(Path(sys.argv[1]), chosen or list(AXES), [word for word in sys.argv[2:] if word not in AXES] or list(RELEASES)))
