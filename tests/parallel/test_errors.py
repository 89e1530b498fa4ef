"""Words of error messages, such as "1 file" and "2 files"."""

from __future__ import annotations

from parallel.errors import counted


def test_one_is_singular_and_any_other_number_is_not() -> None:
    assert [counted(n, "text") for n in (0, 1, 2, 12_345)] == ["0 texts", "1 text", "2 texts", "12,345 texts"]
    assert [counted(n, "process") for n in (1, 2)] == ["1 process", "2 processes"]
    assert [counted(n, "micro-batch") for n in (1, 3)] == ["1 micro-batch", "3 micro-batches"]
