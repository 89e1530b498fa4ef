"""moe.open: what a pass keeps equals a pass cut at that layer and its router by hand; an expert's weights and gradients are its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import moe
from moe.model.transformer import StageLayers
from moe.train.use.opened import Opened
from parallel.errors import BadInput
from tests.support import trained

TOKENS = torch.arange(22).view(2, 11)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    folder = tmp_path_factory.mktemp("opened")
    with pytest.MonkeyPatch.context() as patch:
        trained.train(trained.recipe(trained.home(folder, patch), train={"steps": 2}), folder / "run")
        yield moe.open(folder / "run")


def test_a_run_is_opened_with_its_recipe_and_tokenizer(run: Opened) -> None:
    assert (run.step, run.recipe.model.d_model, run.tokenizer.encode("ab").tolist()) == (2, 16, [97, 98])
    assert not run.model.training


def test_kept_values_are_those_of_the_pass(run: Opened) -> None:
    model, out = run.model, run.model(TOKENS, keep=("hidden", "routing"))
    assert torch.equal(out.logits_BLV, model(TOKENS).logits_BLV)
    first = model(TOKENS, part=StageLayers(range(1), begins=True, ends=False)).hidden_BLD
    assert out.kept is not None and torch.equal(out.kept.hidden[0], first)
    last = model(out.kept.hidden[1], moe.Context.of(TOKENS), None, StageLayers(range(0), begins=False, ends=True))
    assert torch.equal(last.logits_BLV, out.logits_BLV)
    (layer,) = out.kept.routing
    choices, moe_layer = out.kept.routing[layer], model.layers[1].moe
    x = first + model.layers[1].attention(model.layers[1].attention_norm(first), moe.Context.of(TOKENS), shared=None)
    probs = (model.layers[1].ffn_norm(x) @ moe_layer.router.weight.t()).softmax(-1)
    torch.testing.assert_close(choices.probs_BLE, probs)
    assert torch.equal(choices.expert_BLK[..., 0], probs.argmax(-1)) and choices.kept_BLK.shape == choices.gate_BLK.shape == (2, 11, 1)
    only = model(TOKENS, keep=("routing",)).kept
    assert only is not None and not only.hidden and model(TOKENS).kept is None


def test_an_experts_gradient_is_the_derivative_by_its_weight(run: Opened) -> None:
    assert run.expert(layer=1, number=2)["w1"].gradient is None
    choices = run.model(TOKENS, keep=("routing",)).kept.routing[1]  # type: ignore[union-attr]
    number = int(choices.expert_BLK[choices.kept_BLK][0])

    def loss() -> torch.Tensor:
        return run.model(TOKENS[:, :-1], None, TOKENS[:, 1:]).loss

    loss().backward()
    weight = run.expert(layer=1, number=number)["w2"]
    assert weight.gradient is not None
    row, column = divmod(int(weight.gradient.abs().argmax()), weight.gradient.shape[1])
    with torch.no_grad():
        found = []
        for step in (0.01, -0.02):
            weight.value[row, column] += step
            found.append(loss().item())
        weight.value[row, column] += 0.01
    assert (found[0] - found[1]) / 0.02 == pytest.approx(weight.gradient[row, column].item(), rel=0.02)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda run: run.model(TOKENS, keep=("hiden",)), "keep: got hiden, needed hidden or routing; fix: did you mean hidden?"),
        (lambda run: run.model(TOKENS[:, :0]), "tokens_BL: got shape [2, 0], needed [B, L] with a token or more"),
        (lambda run: run.model(tokens_BL=TOKENS - 1000), "tokens_BL: got id -"),
        (lambda run: run.model(TOKENS + 1000), "needed ids from 0 to 255; fix: encode the text with run.tokenizer"),
        (lambda run: run.expert(layer=0, number=0), "layer: got 0, needed a layer with experts: 1"),
        (lambda run: run.expert(layer=1, number=4), "number: got 4, needed an expert from 0 to 3"),
        (lambda run: moe.open("nowhere"), "run folder: got nowhere, needed a run with a checkpoint"),
    ],
)
def test_what_is_not_there_is_refused(call: object, said: str, run: Opened) -> None:
    with pytest.raises(BadInput) as bad:
        call(run)  # type: ignore[operator]
    assert said in str(bad.value)
