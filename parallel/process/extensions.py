"""The folder of the extensions that DeepSpeed compiles, and the packages that compiling needs. Does not import torch.

Only files and package metadata are read, because importing torch takes two seconds.
"""

from __future__ import annotations

import ctypes.util
import os
import shutil
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import psutil


def extensions_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder for compiled extensions in the user's cache: one for each combination of versions of torch, DeepSpeed and Python.
    torch's default is one folder for all, so each switch between two environments would compile the extensions again."""
    python = f"{sys.implementation.name}{sys.version_info.major}.{sys.version_info.minor}"
    return cache_dir(environment) / "extensions" / f"torch-{version_of('torch')}-deepspeed-{version_of('deepspeed')}-{python}"


def cache_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """Return this project's folder in the user's cache."""
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moe-parallel"


def use_extensions_dir() -> None:
    """Make this process and its children use `extensions_dir`, unless the environment names another folder."""
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(extensions_dir()))


def missing_for_nvme() -> list[str]:
    """Return the packages that must be installed to compile DeepSpeed's async_io; [] if none is missing, or it is compiled already."""
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or extensions_dir())
    if (folder / "async_io" / "async_io.so").exists() and ctypes.util.find_library("aio"):
        return []
    needed = {
        "libaio-dev": any(Path(root, "libaio.h").exists() for root in ("/usr/include", "/usr/local/include")),
        "g++": shutil.which("g++") is not None,
        "ninja-build": shutil.which("ninja") is not None or Path(sys.executable).with_name("ninja").exists(),
    }
    return [package for package, there in needed.items() if not there]


def version_of(package: str) -> str:
    """Return the version of a package; "none" if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def remove_stale_locks(folder: Path) -> list[Path]:
    """Remove lock files that killed compilations left, because torch would wait for them for ever. Keep locks in use. Return the removed
    paths."""
    locks = [path for path in folder.glob("*/lock") if path.is_file()]
    stale = [path for path in locks if not _is_open(path)]
    for path in stale:
        path.unlink(missing_ok=True)
    return stale


def _is_open(path: Path) -> bool:
    wanted = path.resolve()
    for process in psutil.process_iter():
        try:
            if any(Path(os.readlink(handle)) == wanted for handle in Path(f"/proc/{process.pid}/fd").iterdir()):
                return True
        except OSError:  # the process has ended, or belongs to another user
            continue
    return not sys.platform.startswith("linux")
