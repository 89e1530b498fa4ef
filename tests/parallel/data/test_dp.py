"""DP in one process: losses, gradients and steps equal those of one model for any number of replicas; sent bytes equal the formula.

Each test runs in a fork: replicas are threads, and a process with threads could not be forked for the ranks of later tests.
"""

from __future__ import annotations

import io
import json
import os
import signal
import textwrap
import traceback
from contextlib import redirect_stdout
from typing import Any

import pytest

from moe.checks.together import check_run
from moe.recipe.load import build_run
from parallel.errors import BadInput

HEAD = """
import json
import torch
from dataclasses import replace
from moe.train.loop.step import accumulate, finish
from moe.verify.plain.batches import batch
from moe.verify.cases import BATCH, Case
from moe.verify.expected import compare
from moe.verify.layouts import compute
from moe.verify.twin import reference
from parallel.data.dp import Replicas, _Meeting
from tests.support.tiny import start
"""


def alone(body: str) -> Any:
    """Run the body in its own fork. Return the last line that it prints, parsed as JSON."""
    names: dict[str, Any] = {}
    exec(HEAD, names)  # before the fork, which then need not import these modules
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        said = io.StringIO()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(90)  # ends replicas that wait for each other for ever
        try:
            with redirect_stdout(said):
                exec(textwrap.dedent(body), names)
        except BaseException:
            said.write(traceback.format_exc())
        os.write(writing, said.getvalue().encode())
        os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        last = pipe.read()
    os.waitpid(child, 0)
    try:
        return json.loads(last.splitlines()[-1])
    except (ValueError, IndexError):
        raise AssertionError(last) from None


@pytest.mark.usefixtures("three_steps")
def test_replicas_give_the_numbers_of_one_process() -> None:
    """Losses, gradients and weights of 2 to 6 replicas equal one process: dense and MoE models, recomputation, tiles, micro-batches."""
    found = alone("""
        want = {model: reference(Case(model, "ddp", 1, 1, 1, "fp32")) for model in ("dense", "switch", "gshard", "deepseek")}
        found = {}
        for model, replicas, rest in (
            ("dense", 4, {}), ("switch", 2, {"microbatches": 3}), ("gshard", 6, {}), ("deepseek", 3, {}),
            ("deepseek", 2, {"recompute": "full"}), ("deepseek", 2, {"microbatches": 3, "tiles": 5, "head_tiles": 3, "chunks": 4}),
        ):
            case = replace(Case(model, "dp", 1, 1, 1, "fp32", replicas=replicas), **rest)
            found[case.layout] = compare(compute(case), want[model])
        print(json.dumps(found))
    """)
    assert len(found) == 6 and all("replicas" in layout for layout in found)
    for layout, numbers in found.items():
        assert max(numbers.values()) <= 1e-5, (layout, numbers)


def test_padding_counts_by_each_replicas_tokens() -> None:
    """Replicas with unequal numbers of unpadded tokens, one of them with none, give the loss, reports and gradients of one process."""
    found = alone("""
        tokens = batch(0)
        tokens[0, 4:] = tokens[5, 7:] = -100
        tokens[8:12] = -100
        seen = []
        for kind in ("ddp", "dp"):
            tiny = start(Case("deepseek", kind, 1, 1, 1, "fp32", replicas=3), 0)
            n = accumulate(tiny.executor, tokens, shard=tiny.shard, microbatches=1, seed=7, step=0)
            layer = n.layers[0]
            gradients = torch.cat([tiny.engine.gradient(name).flatten() for name in tiny.engine.layouts])
            seen.append(([n.loss, layer.z_loss, layer.entropy, layer.importance_loss], layer.choices, layer.kept, gradients))
        (a, choices, kept, g), (b, *same, h) = seen
        print(json.dumps([a, b, same == [choices, kept], float((g - h).abs().max() / g.abs().max())]))
    """)
    one, replicas, same, difference = found
    assert same and difference < 2e-6
    assert replicas == pytest.approx(one, rel=1e-5)


def test_bytes_are_those_of_a_broadcast_and_a_reduction_each_micro_batch() -> None:
    """A micro-batch broadcasts (n - 1) P bytes of weights and reduces (n - 1) P bytes of gradients. After it, only the first replica, which
    is the model itself, is left in memory."""
    found = alone("""
        tiny = start(Case("switch", "dp", 1, 1, 3, "fp32", replicas=4), 0)
        tiny.accumulate(0)
        size = sum(p.nbytes for p in tiny.model.parameters())
        engine = tiny.engine
        print(json.dumps([dict(engine.model.sent), size, len(list(engine.model.parameters())), len(list(engine.module.parameters()))]))
    """)
    sent, size, held, own = found
    assert sent == {"broadcast": 3 * 3 * size, "reduce": 3 * 3 * size}
    assert held == own


def test_a_replica_that_fails_ends_the_pass_with_its_own_error() -> None:
    """If a replica fails, replicas that wait for it in a sum end too, and its error is raised. Replicas' threads have the caller's grad
    mode."""
    found = alone("""
        def scatter(args, devices, together):
            return [(i, together[i]) for i in range(len(devices))]
        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.w = torch.nn.Parameter(torch.ones(2))
            def forward(self, i, together):
                if i == 2 and self.training:
                    raise KeyError("the third")
                return together("sum", torch.tensor([float(i)])), (self.w * i).requires_grad
        cpu = torch.device("cpu")
        replicas = Replicas(Model(), devices=[cpu] * 3, scatter=scatter, gather=lambda args, outputs, device: outputs)
        found = []
        try:
            replicas()
        except KeyError as error:
            found.append(error.args[0])
        replicas.eval()
        with torch.no_grad():
            found.append([(s.tolist(), grad) for s, grad in replicas()])
        print(json.dumps(found))
    """)
    assert found == ["the third", [[[3.0], False]] * 3]


@pytest.mark.parametrize(
    ("values", "world", "line"),
    [
        ({}, 2, "sharding.kind: got dp with 2 processes, needed one process, which has all replicas; fix: add --nproc 1"),
        (
            {"sharding": {"kind": "dp", "replicas": 3}},
            1,
            "sharding.replicas: got 3 for 8 sequences of a micro-batch, needed a divisor of 8",
        ),
        ({"sharding": {"kind": "dp", "replicas": 1}}, 1, "sharding.replicas: got 1"),
        ({"router": {"group": 8}}, 1, "sharding.replicas: got 2 for 8 sequences of a micro-batch in groups of 8, needed a divisor of 1"),
    ],
)
def test_what_replicas_cannot_do_is_refused(values: dict[str, Any], world: int, line: str) -> None:
    sizes = {"model": {"moe_every": 2}, "train": {"global_batch": 8}, "sharding": {"kind": "dp", "replicas": 2}}
    with pytest.raises(BadInput, match=line):
        check_run(build_run(sizes | values), world)
