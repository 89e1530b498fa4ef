"""Drops the syntax trees of the code after each module of laws: they take 120 MB, which makes every later fork of the process slower."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.laws import test_architecture


@pytest.fixture(autouse=True, scope="module")
def trees_are_dropped() -> Iterator[None]:
    yield
    test_architecture.tree.cache_clear()
