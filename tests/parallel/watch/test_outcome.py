"""An error of one rank's work is raised on every rank with the same line, for any text of the message."""

from __future__ import annotations

import pytest

from parallel.errors import BadInput, where
from parallel.mesh.mesh import Axis
from parallel.watch.outcome import Failure, agree, of_all
from tests.support.ranks import run_on_ranks

LONG = {"letters": "x" * 3000, "accents": "é" * 400, "emoji": "\U0001f600" * 700, "halves": "\udcff" * 700, "lines": '"\n\\' * 500}


@pytest.mark.parametrize("form", ["an exception", "bad input"])
def test_a_long_line_is_said_on_every_rank(form: str) -> None:
    def work(rank: int) -> list[str]:
        world, found = Axis("world", (0, 1), rank), []
        for said in LONG.values():

            def fails(said: str = said) -> None:
                if rank == 1 and form == "an exception":
                    raise RuntimeError(said)
                if rank == 1:
                    raise BadInput(said, got=said, needed=said, fix=said)

            with pytest.raises(BadInput) as raised:
                of_all(fails, world, what="a part")
            found.append(str(raised.value))
            failure = agree(fails, world, said=where)
            assert isinstance(failure, Failure) and failure.rank == 1 and 100 < len(failure.line) < 10_000
        return found

    first, second = run_on_ranks(work, 2)
    assert first == second
    for line, said in zip(first, LONG.values(), strict=True):
        assert form == "bad input" or line.startswith("a part: got RuntimeError: ")
        assert "\n" not in line and (said[:50] in line or not said.isprintable())
