"""`moe verify --compare` on the outside programs of tests/peers/programs: a clean run is equal, and a fault is found and named.

All faults and many clean runs: `python -m tests.campaigns peers --full`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.peers.programs.run import compared, opened, program, record_many, record_one

TRIED = {
    "ddp": ["", "own number of tokens"],
    "fsdp_ep": ["", "rows' gradients in another order"],
    "tensor": ["wrong slice of the output weight", "fused weight cut in one block"],
    "megatron_tp": ["2: gathered logits as a part"],
    "megatron_cp": ["5: padding of another group's rank"],
    "deepspeed_moe": ["", "stale master weights", "weights not refreshed from the masters", "bf16 sums"],
    "transformers_ep": ["", "each rank divides by its own tokens"],
}


@pytest.fixture(scope="module")
def ones(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return functools.cache(lambda name: record_one(name, tmp_path_factory.mktemp(name)))


@pytest.mark.parametrize(("name", "fault"), [(name, fault) for name, faults in TRIED.items() for fault in faults])
def test_a_fault_is_found_and_named_and_a_clean_run_is_equal(ones: Callable[[str], Path], name: str, fault: str, tmp_path: Path) -> None:
    if name == "transformers_ep":
        distributed = pytest.importorskip("transformers.distributed.configuration_utils", reason="pip install moe-parallel[hf]")
        if "ep_size" not in distributed.DistributedConfig.__dataclass_fields__:
            pytest.skip("this release of transformers has no ep_size: pip install 'transformers>=5.23'")
    code, first, said = compared(ones(name), record_many(name, tmp_path / "many", fault=fault))
    if not fault:
        assert (code, first) == (0, []), said
        assert f" {opened(name)} not compared" in said
    else:
        where, word, *_ = program(name).FAULTS[fault]
        assert code == 1
        assert any(row["name"].startswith(where) and word in row["cause"] for row in first), said
