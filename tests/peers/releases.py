"""`python -m tests.peers.releases HOME [PEER] [AXIS ...] [RELEASE ...]`: `moe verify --peer PEER` for releases side by side.

Each release is installed into a folder of its own in HOME, without the packages that all share. Each axis of each release is one run of
the command, whose rows are kept in HOME/rows, so that a second call runs only what is missing. All rows of a peer are written to
docs/benchmarks/peers-PEER.json, where rows that HOME lacks stay.
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

RELEASES = {  # peer -> releases, sparse first
    "transformers": ("5.4.0", "5.8.0", "5.12.1", "5.16.1", "5.18.0", "5.23.0", "5.6.0", "5.14.0", "5.17.0", "5.20.2", "5.24.0"),
    "torchtitan": ("0.3.0",),
    "megatron_core": ("0.16.1",),
}
AXES = {  # two ranks each. ep needs the ranks of tp or fsdp, but for earlier releases of transformers, and megatron-core
    "ep": "--ep 2",
    "ep-tp": "--ep 2 --tp 2 --only ep2_tp2",
    "ep-fsdp": "--ep 2 --fsdp 2 --only ep2_fsdp2",
    "tp": "--tp 2",
    "fsdp": "--fsdp 2",
    "others-ep": "--model others --ep 2",  # the families of a release of transformers that are not in FAMILIES
    "others-ep-tp": "--model others --ep 2 --tp 2 --only ep2_tp2",
    "others-ep-fsdp": "--model others --ep 2 --fsdp 2 --only ep2_fsdp2",
}
_OTHERS = ("others-ep", "others-ep-tp", "others-ep-fsdp")
NONE = {"torchtitan": ("ep", *_OTHERS), "megatron_core": ("ep-fsdp", *_OTHERS)}  # peer -> axes without a row of its own
FAMILIES = {"transformers": ["--model", "mixtral,qwen3_moe,olmoe,gpt_oss,deepseek_v3"]}
_OF_HUB = ("httpx", "httpcore", "h11", "anyio", "sniffio", "idna", "certifi")  # huggingface_hub 1.x needs them


def main(home: Path, peer: str, axes: list[str], releases: list[str]) -> int:
    """Run what is missing of these axes and releases, and write all rows that HOME has. Returns 1 if a run ended without rows."""
    lost = 0
    for axis, release in product((axis for axis in axes if axis not in NONE.get(peer, ())), releases):
        folder, file = home / f"{peer}-{release}", home / "rows" / peer / f"{release} {axis}.json"
        if not file.exists():
            install(peer, release, folder)
            file.parent.mkdir(parents=True, exist_ok=True)
            layout = [word.replace("_", " ") for word in AXES[axis].split()]
            families = [] if "--model" in layout else FAMILIES.get(peer, [])
            words = ["-m", "moe", "verify", "--peer", peer, *families, *layout, "--json", str(file)]
            subprocess.run([sys.executable, *words], env={**os.environ, "PYTHONPATH": str(folder)})
            lost += not file.exists()
        write(peer, file.parent)
    return int(lost > 0)


def write(peer: str, folder: Path) -> None:
    """Write the rows of all runs, each with its release and the first value that deviates, by release. They replace earlier rows of the
    same release, model and layout."""
    found = Path(f"docs/benchmarks/peers-{peer}.json")
    rows: list[dict[str, Any]] = loads(found.read_text())["rows"] if found.exists() else []
    for file in sorted(folder.glob("*.json")):
        known = loads(file.read_text())
        assert file.name.startswith(f"{known['version']} "), f"{file} has rows of {known['version']}"
        rows += [{"release": known["version"], **row, "rows": row.get("rows", [])[:1]} for row in known["rows"]]
    rows = list({(row["release"], row["model"], row["layout"]): row for row in rows}.values())
    rows.sort(key=lambda row: [int(number) for number in row["release"].split(".")])
    write_json(found, verb="peer releases", rows=rows, passed=sum(row["passed"] is True for row in rows))


def install(peer: str, release: str, folder: Path) -> None:
    """Install a release, and those of its requirements that the shared environment has not, or has in another version."""
    if folder.exists():
        return
    _pip(folder, f"{peer.replace('_', '-')}=={release}")
    (metadata,) = folder.glob(f"{peer}-*.dist-info/METADATA")
    needs = dict(re.findall(r"^Requires-Dist: (tokenizers|huggingface-hub|spmd_types)\b(.*)$", metadata.read_text(), flags=re.M))
    names = [f"{name}{version}" for name, version in needs.items() if peer != "torchtitan" or name == "spmd_types"]
    if names:
        _pip(folder, *names, *(_OF_HUB if peer == "transformers" else ()))


def _pip(folder: Path, *names: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *names], check=True)


if __name__ == "__main__":
    words = sys.argv[2:]
    peer = next((word for word in words if word in RELEASES), "transformers")
    axes, releases = ([word for word in words if (word in AXES) is known and word not in RELEASES] for known in (True, False))
    sys.exit(main(Path(sys.argv[1]), peer, axes or list(AXES), releases or list(RELEASES[peer])))
