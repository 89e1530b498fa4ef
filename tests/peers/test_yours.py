"""`record` and `moe verify --compare` on outside programs of plain torch (tests/peers/programs), and the laws of a recording.

All faults and many clean runs: `python -m tests.campaigns peers --full`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from moe.cli.main import main as moe
from moe.verify import record
from moe.verify.yours.align import common, parts
from moe.verify.yours.values import Key, Piece, Recorded, Recording
from tests.peers.programs.run import compared, program, record_many, record_one

TRIED = {
    "ddp": ["", "own number of tokens"],
    "fsdp_ep": ["", "rows' gradients in another order"],
    "tensor": ["wrong slice of the output weight"],
}


@pytest.fixture(scope="module")
def ones(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: record_one(name, tmp_path_factory.mktemp(name)) for name in TRIED}


@pytest.mark.parametrize(("name", "fault"), [(name, fault) for name, faults in TRIED.items() for fault in faults])
def test_a_fault_is_found_and_named_and_a_clean_run_is_equal(ones: dict[str, Path], name: str, fault: str, tmp_path: Path) -> None:
    code, first, said = compared(ones[name], record_many(name, tmp_path / "many", fault=fault))
    if not fault:
        assert (code, first) == (0, []), said
        assert "0 not compared" in said
    else:
        where, word = program(name).FAULTS[fault]
        assert code == 1
        assert any(row["name"].startswith(where) and word in row["cause"] for row in first), said


def _net() -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 10), nn.Dropout(0.3), nn.BatchNorm1d(10), nn.Linear(10, 3))
    return net, torch.optim.AdamW(net.parameters(), lr=0.1), torch.randn(7, 6)


def test_recording_changes_no_number_and_leaves_no_hook(tmp_path: Path) -> None:
    """A recorded run of three steps ends with the weights, moments and random numbers of one that is not recorded, to the bit."""
    ends = []
    for recorded in (False, True):
        net, optimizer, x = _net()
        for number in range(3):
            for _ in record(tmp_path / "r", net, optimizer, on=recorded and number == 1):
                optimizer.zero_grad()
                net(x).square().mean().backward()
                optimizer.step()
        hooks = [h for m in net.modules() for h in (m._forward_hooks, m._forward_pre_hooks)]
        assert not any(hooks) and not any(p._post_accumulate_grad_hooks for p in net.parameters())
        ends.append([*net.state_dict().values(), *(s["exp_avg"] for s in optimizer.state.values()), torch.rand(3)])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    assert len(Recording.read(tmp_path / "r", what="ONE").rounded) == 3


def test_a_record_has_what_the_step_computed(tmp_path: Path) -> None:
    net, optimizer, x = _net()
    for step in record(tmp_path / "r", net, optimizer):
        first = net[0](x)
        loss = net[3](first).square().mean()
        loss.backward()
        before = net[0].weight.grad.clone()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
        step.note("loss", loss)
        optimizer.step()
    pieces = Recording.read(tmp_path / "r", what="ONE").ranks[0].pieces
    expected = {
        Key("input", "0", "0.0"): x,
        Key("output", "0"): first,
        Key("gradient", "0.weight"): before,
        Key("local gradient", "0.weight"): before,
        Key("weight after", "0.weight"): net[0].weight,
        Key("note", "loss"): loss,
    }
    for key, tensor in expected.items():
        assert torch.equal(pieces[key][0].values, tensor.detach()), key
    order = list(pieces)
    assert order.index(Key("output gradient", "3")) < order.index(Key("output gradient", "0")) < order.index(Key("norm", "total"))


def test_samples_of_parts_have_elements_of_the_sample_of_the_whole() -> None:
    whole = torch.arange(256.0 * 320).reshape(256, 320)
    one = Piece.of(whole, "layers.0.weight", 2**10)
    assert one.sampled and one.values.numel() <= 2**10
    assert one.norm is not None and abs(one.norm / float(whole.double().norm()) - 1) < 1e-6
    for number, rows in enumerate(whole.chunk(2)):
        here = Piece.of(rows, "layers.1.weight", 2**10)  # names differ in numbers only
        pairs = [common(one, here, part.maps) for part in parts(one.shape, here.shape, None)]
        assert torch.equal(*pairs[number]) and pairs[number][0].numel() >= 2**8  # of 2**10: one step of halving less along each dim
        assert not torch.equal(*pairs[1 - number])


@pytest.mark.parametrize(
    ("words", "said"), [("ONE", "--compare: got only ONE"), ("--compare ONE", "got only ONE"), ("--compare no no", "no rank-0.json")]
)
def test_bad_input_is_one_line(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert moe(["verify", *words.split()]) == 2
    assert said in capsys.readouterr().err


def test_a_record_of_other_ranks_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, world in (("one", 1), ("many", 2)):
        Recorded(0, world).write(tmp_path / name, "rank-0")
    assert moe(["verify", "--compare", str(tmp_path / "one"), str(tmp_path / "many")]) == 2
    assert "records of all 2 ranks" in capsys.readouterr().err
