"""Laws of loading: `boxes` cuts consecutive elements of a tensor of any shape into boxes of limited size, in order."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given as sampled
from hypothesis import strategies as st
from torch import Tensor

from parallel.data import load
from parallel.data.load import boxes, fill, fill_run
from parallel.mesh.layout import Box


@sampled(st.lists(st.integers(1, 5), max_size=4), st.integers(1, 40), st.data())
def test_the_boxes_of_a_run_are_its_elements_in_order(shape: list[int], at_once: int, data: st.DataObject) -> None:
    whole = torch.arange(math.prod(shape)).reshape(shape)
    first = data.draw(st.integers(0, whole.numel()))
    end = data.draw(st.integers(first, whole.numel()))
    found = list(boxes(tuple(shape), first, end, at_once=at_once))
    parts = [whole[box].reshape(-1) for _, box in found]
    assert torch.equal(torch.cat([whole.new_empty(0), *parts]), torch.arange(first, end))
    assert [at for at, _ in found] == [int(part[0]) for part in parts]
    assert all(part.numel() <= at_once for part in parts)
    assert len(list(boxes(tuple(shape), 0, whole.numel(), at_once=whole.numel()))) == 1


def test_tensors_are_filled_by_boxes_of_limited_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """`fill` and `fill_run` fill a shard along dim 1 (FSDP), consecutive elements (ZeRO), and a scalar, by boxes of at most 7 elements."""
    monkeypatch.setattr(load, "ELEMENTS_AT_ONCE", 7)
    whole, asked = torch.randn(4, 6, 5), []

    def read(box: Box) -> Tensor:
        asked.append(whole[box].numel())
        return whole[box]

    part, run = torch.zeros(4, 2, 5), torch.zeros(61)
    fill(part, read, start=(0, 3, 0))
    fill_run(run, read, shape=(4, 6, 5), first=47)
    assert torch.equal(part, whole[:, 3:5]) and torch.equal(run, whole.reshape(-1)[47:108])
    assert max(asked) <= 7 and sum(asked) == 40 + 61
    one = torch.zeros(())
    fill(one, lambda box: torch.tensor(3.0)[box])
    assert one == 3.0
