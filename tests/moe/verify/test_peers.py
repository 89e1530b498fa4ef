"""`moe verify --peer`: a clean pair of each adapter passes, and a fault put into the other project's code is named."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe.cli.main import main as moe
from moe.verify.peer import _models, _reason, main, names
from moe.verify.yours.choices import read
from moe.verify.yours.compare import first_deviations, judged
from moe.verify.yours.recorder import Step, record
from moe.verify.yours.values import Recorded
from parallel.errors import BadInput


def _unreduced() -> AbstractContextManager[Any]:
    """DDP that leaves one weight's gradient out of its reduction."""
    ddp = nn.parallel.DistributedDataParallel

    def wrap(model: nn.Module) -> nn.Module:
        ddp._set_params_and_buffers_to_ignore_for_model(model, ["blocks.2.up.weight"])
        return ddp(model)

    return mock.patch.object(nn.parallel, "DistributedDataParallel", wrap)


def _doubled() -> AbstractContextManager[Any]:
    """An exchange of tokens whose backward gives twice the gradient."""
    from deepspeed.moe import sharded_moe

    right: Callable[..., Any] = sharded_moe._AllToAll.backward
    return mock.patch.object(sharded_moe._AllToAll, "backward", staticmethod(lambda ctx, g: (None, 2 * right(ctx, g)[1])))


def _not_summed() -> AbstractContextManager[Any]:
    """Experts cut over ranks whose gradients of gates are not summed."""
    from transformers.distributed import tensor_parallel

    own = mock.Mock(apply=lambda x, group: x)
    return mock.patch.object(tensor_parallel, "_AllReduceBackward", own)


def _averaged() -> AbstractContextManager[Any]:
    """Gradients that FSDP divides by the number of ranks, although the loss is a share of the global mean already."""
    from torchtitan.distributed import fsdp

    return mock.patch.object(fsdp, "disable_fsdp_gradient_division", lambda model: None)


def _parts_of_norms() -> AbstractContextManager[Any]:
    """Norms of which each rank sees a part of the tokens, without the sum of their gradients."""
    from megatron.core.distributed import finalize_model_grads

    module = importlib.import_module(finalize_model_grads.__module__)
    return mock.patch.object(module, "_allreduce_non_tensor_model_parallel_grads", lambda *_: None)


FAULTS: dict[str, tuple[str, Callable[[], AbstractContextManager[Any]], str, str]] = {
    "torch": ("ddp", _unreduced, "blocks.2.up.weight: gradient", "not reduced"),
    "deepspeed": ("moe", _doubled, "layers.1.moe", "x"),
    "transformers": ("olmoe tp2", _not_summed, "model.layers.1.", "not summed"),
    "torchtitan": ("llama3 fsdp2 full_dtensor", _averaged, "lm_head.weight: gradient", "1/2: averaged"),
    "megatron_core": ("gpt tp2 sequence", _parts_of_norms, "decoder.final_layernorm.weight: gradient", "not"),
}


def test_each_adapter_has_a_fault() -> None:
    assert names() == sorted(FAULTS)


@pytest.mark.parametrize("peer", FAULTS)
def test_a_clean_pair_passes_and_a_fault_is_named(peer: str, tmp_path: Path) -> None:
    for module, package in importlib.import_module(f"moe.verify.peers.{peer}").PACKAGES.items():
        pytest.importorskip(module, reason=f"pip install {package}")
    only, fault, where, word = FAULTS[peer]
    axis = next((axis for axis in ("tp", "fsdp") if f"{axis}2" in only), None)
    given = {"model": only.split()[0], "only": only, "degrees": axis and {axis: 2}}
    for wrong in (False, True):
        said: list[str] = []
        with fault() if wrong else nullcontext():
            code = main(peer, json=str(tmp_path / "rows.json"), say=said.append, **given)
        (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
        if wrong:
            assert code == 1 and row["said"].startswith(where) and word in row["said"], said
            assert "1 failed, 0 did not run; 1 pair" in said[-1]
        else:
            assert code == 0 and row["passed"] and row["equal"] > 50, said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--peer torhc", "--peer: got torhc, needed one of deepspeed, megatron_core, torch, torchtitan, transformers; fix: --peer torch"),
        ("--peer torch --model ddpp", "--model: got ddpp"),
        ("--peer torch --ep 2", "--ep: got 2, needed only --tp and --fsdp with torch"),
        ("--peer megatron-core", "fix: --peer megatron_core"),
        ("--peer torch --pin-routing", "--pin_routing: got --pin_routing with torch, needed a peer with routers"),
        ("--peer deepspeed --pin-routing --model zero1", "--model: got zero1, needed some of moe"),
        ("--peer torch --nproc 2", "--nproc: got --nproc with --peer"),
        ("--peer torch --fsdp 3", "--fsdp: got 3, needed 2 or 4"),  # a rank had no samples: "Connection closed by peer"
        ("--peer torch --tp 2 --model tensor,ddp", "--model: got ddp with --tp 2"),  # ddp was left out, or there was an IndexError
        ("--peer deepspeed --fsdp 2 --pin-routing", "--model: got moe with --fsdp 2"),
        ("--peer torch --only nothing", "--only: got nothing, needed a part of a row's text: ddp dp2"),
        ("--model ddp", "--model: got --model without --peer"),
        ("--pin_routing", "--pin_routing: got --pin_routing without --peer"),
    ],
)
def test_bad_input_is_one_line(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert moe(["verify", *words.split()]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", ["no_such_package", "no_such.package", "json.no_such"])
def test_a_missing_package_is_one_line(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from moe.verify.peers import transformers

    monkeypatch.setattr(transformers, "PACKAGES", {name: "moe-parallel[hf]"})
    assert moe(["verify", "--peer", "transformers"]) == 2
    assert f"got transformers without {name}" in (said := capsys.readouterr().err) and "pip install moe-parallel[hf]" in said


def test_other_families_are_those_of_the_release_which_is_not_read_for_a_default() -> None:
    others = mock.Mock(return_value=("b", "c"))
    adapter = mock.Mock(MODELS=("a",), ROUTED=("a",), others=others)
    assert _models("a", adapter, "peer", False) == _models(None, adapter, "peer", False) == ("a",) and not others.called
    assert _models("others", adapter, "peer", True) == ("b", "c") and _models("c,a", adapter, "peer", False) == ("c", "a")
    with pytest.raises(BadInput, match="got d, needed some of a,b,c"):
        _models("d", adapter, "peer", False)


class _Routed(nn.Module):
    """Two choices of four experts. Two experts have equal scores; `nudge` decides which of them wins."""

    def __init__(self, nudge: list[float], fault: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.gate = nn.Embedding(20, 6), nn.Linear(6, 4, bias=False)
        self.experts = nn.Parameter(torch.randn(4, 6, 6))
        self.gate.weight.data[1] = self.gate.weight.data[0]
        self.nudge, self.fault = torch.tensor(nudge), fault
        self.router = _Router(self)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).flatten(0, 1)
        gates, chosen = self.router(x)
        y = torch.einsum("td,tkdf->tkf", x, self.experts[chosen])
        return (y * (2 * gates if self.fault == "gates" else gates)[..., None]).sum(1)


class _Router(nn.Module):
    def __init__(self, of: _Routed) -> None:
        super().__init__()
        self.of = [of]  # not a submodule

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        best = (self.of[0].gate(x).softmax(-1) + self.of[0].nudge).topk(2)
        return best.values, best.indices


TIE = [1e-7, 0.0, 0.0, 0.0], [0.0, 1e-7, 0.0, 0.0]


@pytest.mark.parametrize(
    ("pin", "nudge", "fault", "where"),
    [
        (False, TIE[1], "", "router"),  # the tie fakes an error
        (True, TIE[1], "", None),
        (True, TIE[1], "gates", "the model"),  # and hides none
        (True, [0.0, 0.0, 0.0, 0.5], "", "router"),  # nor does a replayed choice hide a wrong one
    ],
)
def test_a_tie_neither_fakes_nor_hides_an_error(pin: bool, nudge: list[float], fault: str, where: str | None, tmp_path: Path) -> None:
    tokens = torch.randint(0, 20, (4, 5), generator=torch.Generator().manual_seed(0))
    net, one = _Routed(TIE[0]), tmp_path / "one"
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in record(one, net, optimizer, pin=one if pin else None):
        _train(net, optimizer, tokens)
    other = _Routed(nudge, fault)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    step = Step(other, (optimizer,), Recorded(0, 1), 2**14, read(one) if pin else None)
    with step.hooks():
        _train(other, optimizer, tokens.flip(0))  # the same samples in another order
    step.record.write(tmp_path / "many", "rank-0")
    comparison, lacking = judged(one, tmp_path / "many")
    first = next((cells for cells in first_deviations(comparison) if cells), None)
    assert (first is None) == (where is None), first
    assert first is None or first[0].startswith(str(where)), first
    assert where is not None or not lacking and not comparison.refused


def _train(net: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
    optimizer.zero_grad()
    net(tokens).square().mean().backward()
    optimizer.step()


def test_choices_that_one_process_did_not_keep_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="without choices.pt"):
        read(tmp_path)


def test_the_reason_of_ranks_that_failed_is_an_error_of_their_own_or_that_they_ran_too_long() -> None:
    """It was the first rank's lost connection, and nothing at all if ranks hung."""
    lost = 'rank 0 failed:\nTraceback\n  File "a.py", line 1\n    f()\nRuntimeError: [gloo/pair.cc:537] Read error\n'
    own = 'rank 1 failed:\nTraceback\n  File "b.py", line 2\n    g()\n    ~^^\nIndexError: list index\nout of range\n'
    assert _reason(f"2 ranks\n{lost}\n{own}") == "IndexError: list index out of range"
    listed = 'rank 0 failed:\nTraceback\n  File "a.py", line 1\n    f()\nFieldError: wrong\n    TypeError: int\n\n'
    assert _reason(f"1 rank\n{listed}") == "FieldError: wrong"  # it was empty
    assert _reason(f"2 ranks\n{lost}") == "RuntimeError: [gloo/pair.cc:537] Read error"
    hung = 'rank 0 was still running at:\n  File "a.py", line 1 in f\n'
    assert _reason(f"2 ranks, 9 s allowed\n{hung}") == "2 ranks, 9 s allowed: rank 0 was still running"


class _Changed(_Routed):
    """A router whose choices cannot be replayed. how: fewer tokens, another function, or a second run in the backward pass."""

    def __init__(self, how: str) -> None:
        super().__init__(TIE[1])
        self.how = how

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).flatten(0, 1)
        if self.how == "recomputed":
            gates, _ = checkpoint(self.router, x, use_reentrant=False)
        elif self.how == "another function":
            with mock.patch.object(Tensor, "topk", lambda scores, k: scores.sort(-1, descending=True)):
                gates, _ = self.router(x)
        else:
            gates, _ = self.router(x[1:])
        return gates.sum(1, keepdim=True) * x.sum()


@pytest.mark.parametrize("how", ["fewer tokens", "another function", "recomputed"])
def test_a_router_that_cannot_be_pinned_is_refused(how: str, tmp_path: Path) -> None:
    """Its own choices were kept, and a tie named as an error, or forgotten in the backward pass."""
    tokens = torch.randint(0, 20, (4, 5), generator=torch.Generator().manual_seed(0))
    net, other = _Routed(TIE[0]), _Changed(how)
    for _ in record(tmp_path, net, torch.optim.SGD(net.parameters(), lr=0.1), pin=tmp_path):
        net(tokens).square().mean().backward()
    step = Step(other, (), Recorded(0, 1), 2**14, read(tmp_path))
    with pytest.raises(BadInput, match=r"^pin: got router.*checkpointing" if how == "recomputed" else "router, which chose"), step.hooks():
        other(tokens).square().mean().backward()
    for _ in record(tmp_path, net):  # without pin: the old choices are no longer of this step
        net(tokens).square().mean().backward()
    with pytest.raises(BadInput, match="without choices.pt"):
        read(tmp_path)


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_router_that_is_pinned_in_one_of_two_micro_batches_is_refused(wrong: int, tmp_path: Path) -> None:
    """It made its own choices in one of them, and was accepted because of the other."""
    tokens = torch.randint(0, 20, (4, 5), generator=torch.Generator().manual_seed(0))
    net = _Routed(TIE[0])
    for _ in record(tmp_path, net, pin=tmp_path):
        net(tokens).square().mean().backward()
    step, right = Step(net, (), Recorded(0, 1), 2**14, read(tmp_path)), net.router.forward
    with pytest.raises(BadInput, match="router, which chose"), step.hooks():
        for micro in range(2):
            net.router.forward = (lambda x: right(x[:1])) if micro == wrong else right  # type: ignore[method-assign]
            net(tokens).square().mean().backward()


def test_micro_batches_of_several_lengths_are_not_pinned(tmp_path: Path) -> None:
    net = _Routed(TIE[0])
    with pytest.raises(BadInput, match="micro-batches with sequences of 3 and 5 tokens"):
        for _ in record(tmp_path, net, pin=tmp_path):
            for length in (5, 3):
                net(torch.arange(2 * length).view(2, length)).square().mean().backward()
