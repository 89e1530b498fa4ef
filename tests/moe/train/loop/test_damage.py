"""Each damage of `python -m tests.campaigns damage`, once: a damaged checkpoint is refused or an older one is loaded, never wrong values.

Some damages have correct hashes, computed after the change: another dtype, overlapping tensors, an impossible state."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from moe.train.start.state import opened
from parallel.errors import BadInput
from tests.campaigns import damage


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> damage.Saved:
    return damage.saved(tmp_path_factory.mktemp("home") / "saved")


@pytest.mark.parametrize("name", damage.damages())
def test_a_damaged_checkpoint_is_refused_or_skipped(given: damage.Saved, name: str, tmp_path: Path) -> None:
    found = [damage.once(given, each, f"{name} {number}", tmp_path)[0] for number, each in enumerate(damage.damages()[name])]
    assert found == [""] * len(found)


def test_an_undamaged_checkpoint_is_loaded_as_saved(given: damage.Saved, tmp_path: Path) -> None:
    """The campaign itself works too: it reports a changed weight with correct hashes as loaded with other contents."""
    step, values, state = damage.resumed(given, given.folder, lambda _: None)
    assert step == 4 and state == given.states[4] and values.keys() == given.values[4].keys()
    forged = damage._values(lambda tensor: tensor + 1, "weight")
    assert damage.once(given, forged, "forged", tmp_path)[0] == "trained on: step 4 was loaded with other contents"


def test_a_state_is_refused_by_its_section(given: damage.Saved, tmp_path: Path) -> None:
    for section, got in (("counters", "a state without counters"), ("tokenizer", "a state without tokenizer")):
        path = shutil.copytree(given.folder / "checkpoints" / "step-4", tmp_path / section)
        damage._manifest(lambda manifest, _, name=section: manifest["state"].pop(name))(path, random.Random(0))
        with pytest.raises(BadInput, match=got):
            opened(path)
