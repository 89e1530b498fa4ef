"""The swap folder of a rank is deleted when its process has ended, and never while the process runs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from parallel.data.offload import Offload

HOLD = """
import sys
from parallel.data.offload import Offload

folder = Offload("nvme", path=sys.argv[1]).folder()
print(folder.name, flush=True)
input()
"""


def test_only_folders_of_dead_processes_of_this_host_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of other hosts stay, even if the other name begins with this host's. Locked folders stay: a process of another container,
    whose process id this one cannot see, uses them."""
    monkeypatch.setattr(socket, "gethostname", lambda: "node")
    offload = Offload("nvme", path=str(tmp_path))
    monkeypatch.setattr(os, "getpid", lambda: 999_999)
    elsewhere = offload.folder()
    monkeypatch.undo()
    monkeypatch.setattr(socket, "gethostname", lambda: "node")
    others = [tmp_path / name for name in ("moe-swap-node-77-999999-abc", "moe-swap-node-a-5-abc", "moe-swap-nodes-999999-abc")]
    for folder in (*others, tmp_path / "moe-swap-node-999999-abc"):
        folder.mkdir()
    mine = offload.folder()
    assert mine is not None and elsewhere is not None
    assert set(tmp_path.iterdir()) == {*others, Path(mine.name), Path(elsewhere.name)}


def test_a_killed_process_leaves_a_folder_that_the_next_deletes(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        left = Path(holder.stdout.readline().strip())
        offload = Offload("nvme", path=str(tmp_path))
        mine = offload.folder()
        assert mine is not None and left.exists()
        holder.kill()
    mine.cleanup()
    mine = offload.folder()
    assert mine is not None and os.listdir(tmp_path) == [Path(mine.name).name]
