"""--elastic: numbers of processes on which a run can continue, equal losses with fewer processes, and a rendezvous after each change."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from moe.cli.main import main as command
from moe.launch import environment, start
from moe.launch.arguments import Arguments
from moe.launch.elastic import for_world, size, smaller, whole
from moe.launch.launch import main as rank_main
from moe.launch.processes import Rank
from moe.launch.restarts import End, Restarts
from moe.launch.verdict import first_to_fail
from moe.recipe.load import build_run
from moe.recipe.sections import Run
from parallel.errors import BadInput
from parallel.watch.meet import meet
from tests.support import trained


def recipe(**sections: dict[str, Any]) -> Run:
    values: dict[str, Any] = {"model": {"num_layers": 4, "moe_every": 2}, "experts": {"num_experts": 12}}
    return build_run({name: values.get(name, {}) | sections.get(name, {}) for name in values | sections})


@pytest.mark.parametrize("batch", [24, 36, 40])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize(("tp", "dp"), [(1, 4), (2, 4), (1, 12), (2, 1)])
def test_numbers_of_processes_are_those_that_divide(batch: int, microbatches: int, tp: int, dp: int) -> None:
    """`smaller` and `for_world` allow the same numbers as a plain search: dp divides the batches of training and evaluation, and a
    micro-batch is no larger than planned."""
    run = recipe(
        degrees={"dp": dp, "tp": tp, "ep": dp * tp if 12 % (dp * tp) == 0 else 1},
        train={"global_batch": batch, "eval_sequences": 48},
        pipeline={"microbatches": microbatches},
    )
    meant, left_over = divmod(batch, dp * microbatches)
    if left_over:
        return

    def most(world: int) -> int:
        """Return the largest possible number of sequences in a micro-batch; 0 if the run cannot be divided among `world` processes."""
        each, rest = divmod(world, tp)
        if rest or batch % each or 48 % each:
            return 0
        return max((n for n in range(1, meant + 1) if batch // each % n == 0), default=0)

    assert smaller(run, below=size(run), least=1) == [world for world in range(dp * tp - 1, 0, -1) if most(world)]
    for world in range(1, 3 * dp * tp):
        if not (held := most(world)):
            with pytest.raises(BadInput):
                for_world(run, world, least=1)
            continue
        left = for_world(run, world, least=1).resolve(world)
        assert (left.degrees.tp, left.degrees.dp) == (tp, world // tp) and world % int(left.degrees.ep) == 0 == 12 % int(left.degrees.ep)
        assert batch // (world // tp * left.pipeline.microbatches) == held
        assert left.train == run.train and left.model == run.model


def test_what_a_micro_batch_decides_keeps_its_sequences() -> None:
    """If routing depends on a micro-batch (capacity or balance over a rank's tokens), only numbers of processes are allowed with which a
    micro-batch keeps its number of sequences."""
    sections: dict[str, Any] = {"train": {"global_batch": 12, "eval_sequences": 12}, "degrees": {"dp": 4}}
    free = recipe(**sections, router={"capacity_factor": 1.0})
    bound = recipe(**sections, router={"capacity_factor": 1.0, "group": "rank"})
    balanced = recipe(**sections, router={"balance_scope": "micro_batch", "balance_weight": 0.01})
    noisy = {"noise": "noisy_top_k", "load_weight": 0.01, "balance_weight": 0.0, "capacity_factor": None}
    loaded = recipe(**sections, router={"balance_scope": "micro_batch", **noisy})
    assert smaller(free, below=4, least=1) == [3, 2, 1]
    assert smaller(bound, below=4, least=1) == smaller(balanced, below=4, least=1) == smaller(loaded, below=4, least=1) == [2, 1]


def test_the_refusal_names_the_numbers_that_work() -> None:
    run = recipe(degrees={"dp": 4, "tp": 2}, train={"global_batch": 12, "eval_sequences": 12})
    for world, least, fix in ((5, 1, "start 4 processes"), (4, 6, "--elastic 4"), (1, 1, "start 2 processes")):
        with pytest.raises(BadInput, match="8 6 4 2") as refused:
            for_world(run, world, least=least)
        assert str(refused.value.fix) == fix
    with pytest.raises(BadInput, match="--degrees.dp N"):
        whole(recipe(), None)
    assert size(whole(recipe(degrees={"tp": 2}), 6)) == 6


T = ["train", "switch_tiny", "--nproc", "4"]
R = ["--restarts", "2"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*T, "--elastic", "2"], "--restarts 3 --elastic 2"),
        ([*T, *R, "--elastic", "0"], "--elastic 1"),
        ([*T, *R, "--elastic", "4"], "got 4 with 4 processes, needed one of 2 1"),
        ([*T, *R, "--elastic", "5"], "got 5 with 4 processes, needed one of 2 1"),
        ([*T, *R, "--elastic", "1", "--degrees.pp", "4"], "needed a run that can continue on fewer processes"),
        ([*T[:2], *R, "--elastic", "1"], "leave --elastic out"),
        ([*T[:3], "3", *R, "--elastic", "1", "--degrees.dp", "8"], "start 2 processes"),
    ],
)
def test_the_command_refuses_what_could_not_go_on(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(words) == 2
    line = capsys.readouterr().err
    assert said in line and line.count("\n") == 1


def test_a_rank_of_another_launcher_is_told_how_many_there_should_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["switch_tiny", "--out", str(tmp_path / "run")]
    assert rank_main([*words, "--elastic", "1"]) == 2 and "--degrees.dp N" in capsys.readouterr().err
    assert rank_main([*words, "--elastic", "one"]) == 2 and "--elastic: got one" in capsys.readouterr().err
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert rank_main([*words, "--elastic", "1", "--degrees.dp", "4"]) == 2 and "4 2 1" in capsys.readouterr().err
    assert command(["train", *words, "--elastic", "0"]) == 2 and "--elastic: got 0" in capsys.readouterr().err


# --- decisions after each attempt ------------------------------------------------------------------------------------------


def killed(first: int | None = None) -> End:
    return End(1, ["a rank was killed"], {0: {"exit": 1, "pid": 5, "error": "x", "of_all": True}}, first=first)


def failed(error: str) -> End:
    return End(1, [error], {0: {"exit": 1, "pid": 5, "error": error}, 1: {"exit": 1, "pid": 6, "error": "x", "of_all": True}}, first=0)


def test_fewer_go_on_where_restarts_do_not_help(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lives = Restarts(tmp_path, limit=2, fresh=False, smaller=[3, 1])
    processes: list[int | None] = []
    for first in (2, 0, 2, None, 0, 0, 0, 0):
        assert lives.after(killed(first)) is None
        processes.append(lives.processes)
        if len(processes) == 3:
            assert lives.gone == 2
            (tmp_path / "checkpoints" / "step-4").mkdir(parents=True)  # a new checkpoint: restarts are counted from 0 again
    assert processes == [None, None, 3, 3, 3, 1, 1, 1]
    assert lives.after(killed()) == 1
    lines = capsys.readouterr().err.splitlines()
    assert "rank 2 is no longer used: 2 restarts in a row (--restarts 2) brought no new checkpoint" in lines
    assert "restart 3: the run continues from its beginning on 3 processes" in lines
    assert "restart 4: the run continues from step-4 on 3 processes" in lines
    assert lines[-1].endswith("brought no new checkpoint, and --elastic allows no fewer processes")


def test_an_error_that_comes_again_lets_one_rank_go_and_no_more(tmp_path: Path) -> None:
    lives = Restarts(tmp_path, limit=5, fresh=False, smaller=[2, 1])
    assert lives.after(failed("RuntimeError: an ECC error")) is None and lives.processes is None
    assert lives.after(failed("RuntimeError: an ECC error")) is None and lives.processes == 2
    assert lives.after(failed("RuntimeError: an ECC error")) == 1  # the error came again without rank 0, so no further rank leaves
    lives = Restarts(tmp_path, limit=5, fresh=False)
    assert lives.after(failed("boom")) is None and lives.after(failed("boom")) == 1


def test_who_was_first_to_fail() -> None:
    """`first_to_fail` returns the rank that died first by itself; without one, the rank that was killed here and left no status."""
    said, of_all = {"exit": 1, "pid": 5, "error": "x"}, {"exit": 1, "pid": 5, "error": "x", "of_all": True}
    ranks = [Rank(0, 10, ended_at=2.0), Rank(1, 11, ended_at=1.0), Rank(2, 12, ended_at=3.0)]
    assert first_to_fail({0: of_all, 2: of_all}, ranks, ended_here=set()) == 1
    assert first_to_fail({0: said, 1: of_all, 2: said}, ranks, ended_here=set()) == 0
    assert first_to_fail({0: of_all, 1: of_all}, ranks, ended_here={2}) == 2
    assert first_to_fail({0: of_all, 1: of_all, 2: of_all}, ranks, ended_here=set()) is None


def test_the_device_of_the_rank_that_left_stays_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "has_gpu", lambda _: True)
    assert environment.devices_without(1, {}, 4) == {"CUDA_VISIBLE_DEVICES": "0,2,3"}
    assert environment.devices_without(0, {"CUDA_VISIBLE_DEVICES": "4, 6,7"}, 3) == {"CUDA_VISIBLE_DEVICES": "6,7"}
    assert environment.devices(environment.devices_without(0, {"CUDA_VISIBLE_DEVICES": "4,6,7"}, 3), 2) == "6,7"
    assert environment.devices_without(None, {}, 4) == {}
    monkeypatch.setattr(environment, "has_gpu", lambda _: False)
    assert environment.devices_without(1, {}, 4) == {}


LAUNCHER = """
import json, os, pathlib, signal, sys
world, status = int(sys.argv[1]), pathlib.Path(sys.argv[2])
with (status.parent / "lives").open("a") as file:
    file.write(json.dumps([world, [word for word in sys.argv if "elastic" in word]]) + "\\n")
if world > 2:
    (status / "0.json").write_text(json.dumps({"exit": 1, "pid": 1, "error": "", "of_all": True}))
    os.kill(os.getpid(), signal.SIGKILL)
for rank in range(world):
    (status / f"{rank}.json").write_text(json.dumps({"exit": 0}))
"""


def test_the_command_goes_on_with_fewer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def line(launch: start.Launch, *_: object, folder: Path, **__: object) -> list[str]:
        return [sys.executable, "-S", "-c", LAUNCHER, str(launch.nproc), str(folder)]

    monkeypatch.setattr(start, "_command", line)
    code = start.start(Arguments("recipe", out=tmp_path / "run", elastic=1), nproc=4, restarts=1, smaller=[3, 2, 1])
    lives = [json.loads(life) for life in (tmp_path / "run" / "lives").read_text().splitlines()]
    assert code == 0 and lives == [[world, ["--elastic=1"]] for world in (4, 4, 3, 3, 2)]


# --- runs with fewer ranks -------------------------------------------------------------------------------------------------


def test_losses_stay_those_of_the_run_that_lost_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on 3 ranks (one expert each) that continues on 2 ranks has the losses of one process, and the same bits of weights as a run
    that is resumed on 2 ranks with degrees set by hand."""
    home = trained.home(tmp_path, monkeypatch)
    sizes = {"train": {"global_batch": 12, "eval_sequences": 12, "steps": 5}, "experts": {"num_experts": 3}, "degrees": {"dp": 3, "ep": 3}}
    run, out, by_hand = trained.recipe(home, **sizes), tmp_path / "run", tmp_path / "by hand"
    trained.train(trained.recipe(home, **sizes | {"degrees": {"ep": 1}}), tmp_path / "uncut")
    assert trained.train(run, out, ranks=3, before=trained.stop_at(2)) == [trained.STOPPED] * 3
    shutil.copytree(out, by_hand)
    trained.train(for_world(run, 2, least=2), out, ranks=2)
    trained.train(trained.recipe(home, **sizes | {"degrees": {"dp": 2, "ep": 1}, "pipeline": {"microbatches": 2}}), by_hand, ranks=2)
    trained.close(out, tmp_path / "uncut", rel=2e-6)
    assert trained.tensors(out / "checkpoints" / "step-5") == trained.tensors(by_hand / "checkpoints" / "step-5")
    (resumed,) = [line for line in trained.lines(out, "event") if line["event"] == "resumed"]
    assert (resumed["world_before"], resumed["world"]) == (3, 2) and "degrees.dp: 3 -> 2" in resumed["changed"]


def test_ranks_meet_whatever_earlier_ones_left_in_the_agents_store() -> None:
    """`meet` gives all ranks of a start the same store inside torchrun's store, which keeps the keys of earlier starts: first 3 ranks, then
    2, then 3 again, each rank with another restart count."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    for world in (3, 2, 3):
        stores: dict[int, Any] = {}

        def come(rank: int, world: int = world, stores: dict[int, Any] = stores) -> None:
            here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
            stores[rank] = meet(rank, world, environment=here | {"TORCHELASTIC_RESTART_COUNT": str(rank)}, timeout_s=20)

        ranks = [threading.Thread(target=come, args=(rank,)) for rank in range(world)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        assert not stores[1].check(["left"])
        stores[0].set("left", f"{world}")
        assert [stores[rank].get("left") for rank in range(world)] == [f"{world}".encode()] * world
