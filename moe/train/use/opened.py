"""Opens a trained run in Python, as a model and its tokenizer: `moe.open("runs/NAME")`.

run = moe.open("runs/NAME")                          the newest checkpoint, with LoRA adapters merged, in evaluation mode
tokens_BL = torch.tensor([run.tokenizer.beginning("def main(")])
kept = run.model(tokens_BL, keep=("hidden", "routing")).kept
run.model(tokens_BL[:, :-1], None, tokens_BL[:, 1:]).loss.backward()
run.expert(layer=1, number=3)["w1"].gradient
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from moe.data import Tokenizer
from moe.data import load as load_tokenizer
from moe.model.transformer import Transformer, moe_layers
from moe.recipe.load import build_run
from moe.recipe.sections import Run
from moe.train.start.restore import choose, restore
from moe.train.start.state import opened
from parallel.errors import BadInput


class Weight(NamedTuple):
    """A weight matrix or bias of one expert, and its gradient (None before a backward pass)."""

    value: Tensor
    gradient: Tensor | None


@dataclass(frozen=True)
class Opened:
    """A run's model, tokenizer and recipe, and the step of its checkpoint."""

    model: Transformer
    tokenizer: Tokenizer
    recipe: Run
    step: int

    def expert(self, *, layer: int, number: int) -> dict[str, Weight]:
        """Return the weights of one expert, as views of the model's parameters: w1 [D, F], w2 [F, D], w3 [D, F] for gated activations, and
        biases (D: width of the model, F: hidden width of an expert).
        Raises BadInput for a layer without experts, and for an expert that the layer lacks."""
        experts = {moe.layer: moe.experts for moe in moe_layers(self.model)}
        if layer not in experts:
            needed = f"a layer with experts: {', '.join(map(str, experts)) or 'this model has none'}"
            fix = "choose one of them (layers count from 0)" if experts else "open a run with experts"
            raise BadInput("layer", got=layer, needed=needed, fix=fix)
        if not 0 <= number < experts[layer].num_experts:
            raise BadInput("number", got=number, needed=f"an expert from 0 to {experts[layer].num_experts - 1}", fix="choose another")
        stacks = experts[layer].named_parameters()
        return {name: Weight(stack[number], None if stack.grad is None else stack.grad[number]) for name, stack in stacks}


def open(folder: str | Path, *, step: int | None = None) -> Opened:
    """Open a run's newest checkpoint, or the one at `step`, in this process. Raises BadInput for a folder without a valid one."""
    path = choose(Path(folder), step=step)
    state = opened(path).state
    run = build_run(state["recipe"])
    model = restore(path, run)
    model.register_forward_pre_hook(partial(_check_tokens, vocab_size=run.vocab_size), with_kwargs=True)
    return Opened(model, load_tokenizer(state["tokenizer"]), run, int(state["counters"]["step"]))


def _check_tokens(model: Transformer, words: tuple[Tensor, ...], named: Mapping[str, Tensor], *, vocab_size: int) -> None:
    """Raise BadInput for a batch without tokens, and for a token id that the model does not have. words, named: positional and keyword
    arguments of the model's call."""
    tokens_BL = words[0] if words else named["tokens_BL"]
    if not tokens_BL.numel():
        needed, fix = "[B, L] with a token or more", "begin with run.tokenizer.beginning(text)"
        raise BadInput("tokens_BL", got=f"shape {list(tokens_BL.shape)}", needed=needed, fix=fix)
    if tokens_BL.is_floating_point():  # hidden states: the input if only later layers are run (`part` in Transformer)
        return
    least, most = (int(bound) for bound in tokens_BL.aminmax())
    if least < 0 or most >= vocab_size:
        needed, fix = f"ids from 0 to {vocab_size - 1}", "encode the text with run.tokenizer"
        raise BadInput("tokens_BL", got=f"id {least if least < 0 else most}", needed=needed, fix=fix)
