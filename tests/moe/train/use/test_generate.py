"""`moe generate`: the same seed gives the same text, temperature 0 the likeliest tokens, and ranks the text of one process."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe.cli.run import run_dir
from moe.data import Tokenizer
from moe.model.initialize import global_name
from moe.model.transformer import Transformer
from moe.recipe.load import build_run
from moe.train.use import generate, opened
from moe.train.use.decode import Sampling
from moe.train.use.generate import sample
from parallel.errors import BadInput
from parallel.process.process import World
from parallel.store.stored import Reader
from tests.support import trained
from tests.support.ranks import run_on_ranks

LENGTH = trained.VALUES["model"]["max_length"]


@pytest.fixture(scope="module")
def out(home: Path) -> Path:
    """The folder of a run with expert parallelism over two ranks."""
    run = trained.recipe(home, degrees={"ep": 2}, train={"steps": 20, "save_every": 0}, router={"group": 2})
    trained.train(run, home / "run", ranks=2)
    return home / "run"


@pytest.fixture(scope="module")
def model(out: Path) -> tuple[torch.nn.Module, Tokenizer]:
    run = opened.open(out)
    assert run.step == 20 and not run.model.training
    return run.model, run.tokenizer


def text(model: tuple[torch.nn.Module, Tokenizer], prompt: str, num_tokens: int, **options: float) -> str:
    return sample(model[0], model[1], prompt=prompt, num_tokens=num_tokens, max_length=LENGTH, **options)  # type: ignore[arg-type]


def test_temperature_0_takes_the_likeliest_token(model: tuple[torch.nn.Module, Tokenizer]) -> None:
    ids = list(b"abc ")
    with torch.no_grad():
        for _ in range(LENGTH - 4):
            ids.append(int(model[0](torch.tensor([ids])).logits_BLV[0, -1].argmax()))  # unpadded
    assert text(model, "abc ", LENGTH - 4, temperature=0) == bytes(ids).decode(errors="replace")
    assert text(model, "abc ", 2 * LENGTH, temperature=0, seed=1) == text(model, "abc ", 2 * LENGTH, temperature=0, seed=2)


def test_a_seed_gives_one_text_and_another_seed_another(model: tuple[torch.nn.Module, Tokenizer]) -> None:
    first = text(model, "abc", 60, temperature=1.0, seed=1)
    assert first == text(model, "abc", 60, temperature=1.0, seed=1)
    assert first != text(model, "abc", 60, temperature=1.0, seed=2)


def test_torchs_own_generator_is_left_alone(model: tuple[torch.nn.Module, Tokenizer]) -> None:
    before = torch.random.get_rng_state()
    text(model, "abc", 5)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("prompt", ["", "a", "a" * LENGTH, "abcdefgh " * 3 * LENGTH, "naïve ✓"])
def test_any_prompt_is_continued(prompt: str, model: tuple[torch.nn.Module, Tokenizer]) -> None:
    tokenizer = model[1]
    got = text(model, prompt, 7, temperature=0)
    ids = list(tokenizer.encode(prompt)) or [tokenizer.separator]
    assert got.startswith(tokenizer.decode(ids)) and len(got) > len(prompt)
    again = sample(model[0], tokenizer, prompt=tokenizer.decode(ids[-LENGTH:]), num_tokens=7, max_length=LENGTH, temperature=0)
    assert got.endswith(again) if prompt.isascii() and prompt else True  # only the prompt's last max_length tokens are read


def test_the_text_of_two_ranks_is_the_text_of_one_process(out: Path, model: tuple[torch.nn.Module, Tokenizer]) -> None:
    """`sample` on two ranks with half of the experts each gives the text of one process with all experts."""
    from moe.parallelize.build import build
    from parallel.mesh.mesh import Degrees
    from parallel.process import process

    reader = Reader(out / "checkpoints/step-20")
    run = build_run(reader.state["recipe"])

    def work(rank: int) -> str:
        mesh = process.connect(Degrees(dp=2, ep=2), World(rank, 2, rank, 2))
        half, layouts = build(run, mesh, device=torch.device("cpu"))
        for name, parameter in half.named_parameters():
            parameter.data.copy_(reader.load(global_name(name), "weight", layouts[name], mesh))
        return text((half.eval(), model[1]), "abc", 40)

    assert run_on_ranks(work, 2, timeout_s=60) == [text(model, "abc", 40)] * 2


def test_what_a_vocabulary_holds_beyond_the_tokenizer_never_comes(home: Path, tmp_path: Path) -> None:
    trained.train(trained.recipe(home, model={"vocab_size": 300}, train={"steps": 2}), tmp_path / "run")
    run = opened.open(tmp_path / "run")
    model, tokenizer = run.model, run.tokenizer
    first = sample(model, tokenizer, prompt="abc", num_tokens=30, max_length=LENGTH)
    model.embedding.data[256:] *= 1e4  # the tied head then gives these ids extreme logits
    assert sample(model, tokenizer, prompt="abc", num_tokens=30, max_length=LENGTH) == first


def test_a_folder_of_runs_or_in_a_run_is_answered_with_the_runs(tmp_path: Path) -> None:
    runs = [tmp_path / f"run{number}" for number in range(7)]
    for run in runs:
        (run / "checkpoints" / "step-3").mkdir(parents=True)
    listed = ", ".join(map(str, runs[:5]))
    with pytest.raises(BadInput) as refused:
        opened.open(tmp_path)
    assert str(refused.value).endswith(f"fix: one of {listed} or 2 more (ls {tmp_path})")
    for within in (runs[2] / "checkpoints", runs[2] / "checkpoints" / "step-3"):
        with pytest.raises(BadInput, match=f"fix: did you mean {runs[2]}[?]"):
            opened.open(within)
        with pytest.raises(BadInput, match=f"fix: did you mean {runs[2]}[?]"):
            run_dir(str(within), "checkpoints")


def test_a_folder_without_a_checkpoint_is_refused_in_one_line(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(BadInput, match="needed a run with a checkpoint") as refused:
            opened.open(folder)
        assert "\n" not in str(refused.value) and str(folder) in str(refused.value)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"tokens": 0}, "--tokens"),
        ({"samples": 0}, "--samples"),
        ({"temperature": -0.5}, "--temperature"),
        ({"step": 7}, "--step: got 7, needed one of 20; fix: --step 20"),
        ({"prompt_file": "/nowhere.txt"}, "--prompt_file"),
        ({"chat": True}, "--prompt TEXT or"),
        ({"prompt_file": "/dev/null", "prompt": "a"}, "remove --prompt"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], what: str, out: Path) -> None:
    with pytest.raises(BadInput, match=what):
        generate.main(str(out), **options)


def test_the_command_prints_one_text_as_it_comes_and_says_how_fast(
    out: Path, model: tuple[Transformer, Tokenizer], capsys: pytest.CaptureFixture[str]
) -> None:
    generate.main(str(out), prompt="abc", tokens=9, temperature=0.7, seed=4, step=20)
    printed = capsys.readouterr()
    (want,) = generate.generate(*model, ["abc"], num_tokens=9, sampling=Sampling(0.7), seed=4)
    assert printed.out == f"abc{want.text}\n"
    assert "tokens of 1 text in" in printed.err and "a second" in printed.err


def test_a_prompt_that_is_longer_than_the_model_reads_is_said(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for length, said in ((LENGTH, ""), (LENGTH + 3, f"a prompt has {LENGTH + 3} tokens, and the model reads the last {LENGTH}")):
        generate.main(str(out), prompt="a" * length, tokens=1)
        first = capsys.readouterr().err.splitlines()[0]
        assert first.startswith(said) and ("model reads" in first) == bool(said)


def test_a_text_does_not_depend_on_other_texts_in_its_batch(model: tuple[Transformer, Tokenizer]) -> None:
    """Three samples of four prompts, generated together, equal the same samples generated one by one."""
    prompts, options = ["abc", "xyz", "a" * 2 * LENGTH, ""], {"num_tokens": 2 * LENGTH, "sampling": Sampling(1.0, top_k=30)}
    got = generate.generate(*model, prompts, samples=3, seed=5, max_batch=2, **options)
    assert [(one.prompt, one.sample) for one in got] == [(prompt, n) for prompt in prompts for n in range(3)]
    for one in got:
        (alone,) = generate.generate(*model, [one.prompt], seed=5 + one.sample, **options)
        assert (alone.ids, alone.text, alone.ended) == (one.ids, one.text, one.ended)
    assert len({one.text for one in got[:3]}) == 3


def test_a_separator_ends_a_text_and_whole_characters_are_heard(model: tuple[Transformer, Tokenizer]) -> None:
    tokenizer, heard = model[1], []
    euro = list("€".encode())
    steps = iter([[97], [euro[0]], [euro[1]], [euro[2]], [98], [tokenizer.separator], [99]])
    assert generate._until_separators(steps, 1, tokenizer, heard.append) == [([97, *euro, 98], True)]
    assert [piece for piece in heard if piece] == ["a", "€", "b"]
    assert next(steps) == [99]  # the step after the separator was not computed


def test_prompts_come_from_a_file_and_texts_go_to_one(out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.txt").write_text("abc\n\nxy z\n")
    (tmp_path / "p.jsonl").write_text('{"prompt": "abc"}\n{"prompt": "xy z"}\n')
    for name in ("p.txt", "p.jsonl"):
        generate.main(str(out), prompt_file=str(tmp_path / name), tokens=5, samples=2, json=str(tmp_path / f"{name}.json"))
    first, second = (json.loads((tmp_path / f"{name}.json").read_text())["rows"] for name in ("p.txt", "p.jsonl"))
    assert first == second and [row["prompt"] for row in first] == ["abc", "abc", "xy z", "xy z"]
    assert all(row["text"] in capsys.readouterr().out for row in first[:1])
    (tmp_path / "bad.jsonl").write_text('{"prompt": "abc"}\n[1]\n')
    with pytest.raises(BadInput, match="line 2"):
        generate.main(str(out), prompt_file=str(tmp_path / "bad.jsonl"))


def test_the_decoders_text_is_printed_below_the_encoders_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A warning names a sentinel in the prompt that the model does not have."""
    config = SimpleNamespace(kind="encoder_decoder", spans=SimpleNamespace(num_spans=1), max_length=99)
    tokenizer = SimpleNamespace(beginning=list)
    run = SimpleNamespace(model=SimpleNamespace(config=config), tokenizer=tokenizer)
    monkeypatch.setattr(opened, "open", lambda *_, **__: run)
    prompt = "a <extra_id_0> <extra_id_1>"
    written = [generate.Continued(prompt, n, [1], f"{n} b", ended=True) for n in range(2)]
    monkeypatch.setattr(generate, "generate", lambda *_, **__: written)
    generate.main("run", prompt=prompt, samples=2)
    said = capsys.readouterr()
    assert said.out == f"--- 1.1\n{prompt}\n0 b\n--- 1.2\n{prompt}\n1 b\n"
    assert "<extra_id_1> is no sentinel of this model, which has <extra_id_0>: it is read as text" in said.err
