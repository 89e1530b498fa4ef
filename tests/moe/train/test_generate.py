"""Text from a trained model: the same from the same seed, the likeliest at temperature 0, and from any run's checkpoint alike."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moe.data import Tokenizer
from moe.model.names import global_name
from moe.recipe.load import build_run
from moe.train import generate
from moe.train.generate import load_model, sample
from parallel.errors import BadInput
from parallel.process import World
from parallel.stored import Reader
from tests.support import trained
from tests.support.ranks import run_on_ranks

LENGTH = trained.VALUES["model"]["max_length"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        yield trained.home(tmp_path_factory.mktemp("home"), patch)


@pytest.fixture(scope="module")
def out(home: Path) -> Path:
    """A run on two ranks with its experts on both."""
    run = trained.recipe(home, degrees={"ep": 2}, train={"steps": 20, "save_every": 0}, router={"group": 2})
    trained.train(run, home / "run", ranks=2)
    return home / "run"


@pytest.fixture(scope="module")
def model(out: Path) -> tuple[torch.nn.Module, Tokenizer]:
    model, tokenizer, step = load_model(out)
    assert step == 20 and not model.training
    return model, tokenizer


def text(model: tuple[torch.nn.Module, Tokenizer], prompt: str, num_tokens: int, **options: float) -> str:
    return sample(model[0], model[1], prompt=prompt, num_tokens=num_tokens, max_length=LENGTH, **options)  # type: ignore[arg-type]


def test_temperature_0_takes_the_likeliest_token_given_the_last_max_length_ones(model: tuple[torch.nn.Module, Tokenizer]) -> None:
    ids = list(b"abc ")
    with torch.no_grad():
        for _ in range(2 * LENGTH):
            ids.append(int(model[0](torch.tensor([ids[-LENGTH:]])).logits_BLV[0, -1].argmax()))  # as long as it is, without filling up
    assert text(model, "abc ", 2 * LENGTH, temperature=0) == bytes(ids).decode(errors="replace")
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
    assert got.endswith(again) if prompt.isascii() and prompt else True  # what came before the last max_length tokens says nothing


def test_the_text_of_two_ranks_is_the_text_of_one_process(out: Path, model: tuple[torch.nn.Module, Tokenizer]) -> None:
    """In the run itself every rank samples with half of the experts; from its checkpoint one process has all."""
    from moe.parallelize.build import build
    from parallel import process
    from parallel.mesh import Degrees

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
    model, tokenizer, _ = load_model(tmp_path / "run")
    first = sample(model, tokenizer, prompt="abc", num_tokens=30, max_length=LENGTH)
    model.embedding.data[256:] *= 1e4  # tied to the head: now far likelier, or far unlikelier, than any token
    assert sample(model, tokenizer, prompt="abc", num_tokens=30, max_length=LENGTH) == first


def test_a_folder_without_a_checkpoint_is_refused_in_one_line(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(BadInput, match="needed a run with a checkpoint") as refused:
            load_model(folder)
        assert "\n" not in str(refused.value) and str(folder) in str(refused.value)


@pytest.mark.parametrize(("options", "what"), [({"tokens": 0}, "--tokens"), ({"temperature": -0.5}, "--temperature")])
def test_numbers_that_cannot_be_are_refused(options: dict[str, float], what: str, out: Path) -> None:
    with pytest.raises(BadInput, match=what):
        generate.main(str(out), **options)  # type: ignore[arg-type]


def test_the_command_prints_the_continuation(
    out: Path, model: tuple[torch.nn.Module, Tokenizer], capsys: pytest.CaptureFixture[str]
) -> None:
    generate.main(str(out), prompt="abc", tokens=9, temperature=0.7, seed=4)
    assert capsys.readouterr().out == text(model, "abc", 9, temperature=0.7, seed=4) + "\n"
