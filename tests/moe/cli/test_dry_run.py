"""`moe train --dry-run` starts nothing, writes nothing, does not import torch for another cluster, prints the numbers of the planner's
functions, and proposes a fix that works if memory is too small.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from moe.checks.together import check_run
from moe.cli.main import main
from moe.launch import launch, start
from moe.plan.job.flops import size
from moe.plan.job.of_recipe import network_of, plan_of
from moe.plan.memory.memory import peak
from moe.recipe.load import load
from moe.records.summary import count
from moe.records.summary import size as bytes_of

ELSEWHERE = ["dense_8b", "--cluster", "h100-8x128", "--train.global_batch", "2048"]
REFUSED = {
    "states": ELSEWHERE,
    "activations": ["dense_8b", "--cluster", "h100-8", "--nproc", "64", "--degrees.tp", "8", "--train.global_batch", "1024"],
    "experts": ["glam_8b_64e", "--cluster", "a100-80-8x4"],
    "stages": ["dense_8b", "--cluster", "a100-40-8x2", "--degrees.pp", "8", "--pipeline.microbatches", "16"],
}


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    def started(*_: object, **__: object) -> int:
        raise AssertionError("a dry run started something")

    monkeypatch.setattr(launch, "main", started)
    monkeypatch.setattr(start, "start", started)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def dry(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(["train", *words, "--dry-run"])
    said = capsys.readouterr()
    return code, said.out, said.err.strip()


def test_it_says_what_the_planner_gives_and_leaves_no_trace(nothing_starts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = {"sharding.kind": "fsdp", "recompute.kind": "full", "train.global_batch": "2048"}
    code, said, _ = dry(["dense_8b", "--cluster", "h100-8x128", *(f"--{key}={value}" for key, value in words.items())], capsys)
    run = check_run(load("dense_8b", words)[0], 1024)
    fullest = peak(network_of(run), plan_of(run))
    sizes = size(run)
    assert code == 0 and not list(nothing_starts.iterdir())
    assert said.startswith("1024 ranks (h100-8, H100-SXM5-80GB): dp 1024, fsdp")
    for value in (count(sizes.total), count(sizes.training * 2048 * run.model.max_length), bytes_of(fullest.allocated)):
        assert value in said
    for name, held in fullest.parts.items():
        assert not held or re.search(rf"^  {name} +{re.escape(bytes_of(held))}$", said, re.MULTILINE)


@pytest.mark.parametrize("case", REFUSED)
def test_the_fix_of_a_refusal_fits(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = dry(REFUSED[case], capsys)
    assert code == 2 and "\n" not in error and "too much" in error
    fix = re.search(r"fix: add (.+): then", error)
    assert fix, error
    code, said, error = dry([*REFUSED[case], *shlex.split(fix[1])], capsys)
    assert code == 0 and not error and "may not fit" not in said


def test_force_goes_on_and_what_nothing_mends_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    code, said, _ = dry([*ELSEWHERE, "--force"], capsys)
    assert code == 0 and "it would not fit" in said
    code, _, error = dry(["dense_8b", "--cluster", "v100-8", "--nproc", "1", "--model.max_length", "1000000"], capsys)
    assert code == 2 and "times as much memory" in error


def test_a_cluster_that_is_elsewhere_needs_no_torch() -> None:
    program = (
        "import sys; from moe.cli.main import main; "
        f"code = main({['train', *ELSEWHERE, '--sharding.kind', 'fsdp', '--recompute.kind', 'full', '--dry-run']!r}); "
        "sys.exit(code or 10 * ('torch' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["switch_tiny", "--lora.rank", "4"], "lora.rank: got 4 without weights to start from"),
        (["dense_tiny", "--cluster", "h1000"], "cluster: got h1000"),
        (["dense_tiny", "--cluster", "none.yaml"], "cluster: got none.yaml, needed a file that exists"),
        (["dense_tiny", "--nproc", "3", "--cluster", "a100-80-8", "--train.global_batch", "16"], "train.global_batch"),
    ],
)
def test_bad_input_is_one_line(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = dry(words, capsys)
    assert code == 2 and line in error and "fix:" in error and "\n" not in error


def test_the_engine_that_carries_out_zero_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["dense_tiny", "--nproc", "2", "--sharding.kind", "zero", "--sharding.stage", "2"]
    assert dry([*words, "--optimizer.kind", "muon"], capsys)[1].splitlines()[0].endswith("compute; zero2, carried out by fsdp")
    assert re.search(" zero2, 1 micro-batch of 8; (bf16|fp32) compute$", dry(words, capsys)[1].splitlines()[0])  # as the CPU has bf16


def test_chats_without_a_template_are_refused_as_by_the_run(nothing_starts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    messages = '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]'
    for line, words, refusal in (
        (f'\n{{"messages": {messages}}}', [], "data.chat_template: got null, needed a template"),
        (f'{{"said": {messages}}}', ["--data.text_key", "said"], "data.chat_template: got null, needed a template"),
        (f'{{"said": {messages}}}', [], "line 1: got an object with said, needed messages"),
        ('{"prompt": "a", "completion": "b"}', ["--data.chat_template", "none.jinja"], "data.chat_template: got none.jinja: "),
        ('{"prompt": "a", "completion": "b"}', [], ""),
    ):
        (nothing_starts / "chats.jsonl").write_text(line)
        code, said, error = dry(["dense_tiny", "--data.source", "chat", "--data.path", "chats.jsonl", *words], capsys)
        assert (code, bool(said)) == ((2, False) if refusal else (0, True)) and refusal in error


@pytest.mark.parametrize("words", ["missing", "empty", "hf:empty", "hf:missing"])
def test_weights_to_start_from_must_exist(words: str, nothing_starts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (nothing_starts / "empty").mkdir()
    code, _, error = dry(["switch_tiny", "--init_from", words], capsys)
    assert code == 2 and words.removeprefix("hf:") in error and "fix: " in error and "\n" not in error
