"""The public names of `moe` are the objects that their modules define, and `import moe` loads neither torch nor DeepSpeed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import moe
from parallel.errors import BadInput

LOADED = """
import sys
import moe
from moe import load
assert "torch" not in sys.modules and "deepspeed" not in sys.modules
run, origins = load("glam_tiny", {"model.num_layers": "2"})
assert run.model.num_layers == 2 and "torch" not in sys.modules
from moe import train, verify
assert callable(train) and callable(verify) and "torch" not in sys.modules
from moe import MoELayer, Transformer
import torch
model = Transformer(run.model, run.experts, run.router, vocab_size=run.vocab_size)
assert model(torch.randint(run.vocab_size, (2, 16))).logits_BLV.shape == (2, 16, run.vocab_size)
assert any(isinstance(module, MoELayer) for module in model.modules())
"""


def test_names_load_torch_only_when_they_are_used() -> None:
    subprocess.run([sys.executable, "-c", LOADED], check=True, timeout=120)


def test_a_users_parallel_py_does_not_replace_our_package(tmp_path: Path) -> None:
    """Python searches a script's own folder first, where a user may have a `parallel.py`."""
    (tmp_path / "parallel.py").write_text("mine = True")
    environment = os.environ | {"PYTHONPATH": str(Path(moe.__file__).parents[1])}

    def run(code: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)

    assert run("import moe, parallel.errors; moe.load('switch_tiny')").returncode == 0
    refused = run("import parallel; assert parallel.mine; import moe").stderr.splitlines()[-1]
    assert refused.startswith("ImportError: moe needs its own package `parallel`, but <module 'parallel' from") and "rename" in refused


def test_a_package_that_is_called_does_what_its_name_says() -> None:
    import moe.train.loop.trainer as trainer
    import moe.verify.verify as oracle

    assert moe.train.loop.trainer is trainer and moe.verify.verify is oracle, "the packages are still packages"
    with pytest.raises(BadInput, match="--only"):  # an error: no layout has this name
        moe.verify(nproc=1, only="no such layout", say=lambda line: None)


def test_a_name_that_is_not_there_is_answered_with_those_that_are() -> None:
    try:
        _ = moe.trane
    except AttributeError as error:
        assert "it has Callback, Context, MoELayer, RoutingRecord, Transformer" in str(error)
    else:
        raise AssertionError("moe.trane exists")
