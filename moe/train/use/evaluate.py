"""`moe eval`: a trained model's loss on held-out text, or on any other text.

For the recipe's text and `train.eval_sequences` sequences, the loss equals the one recorded in training. With several sources
(data.sources) it differs: evaluations in training take sequences of a source in proportion to its weight, `moe eval` to its length.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe.data import CorruptedTrain, CorruptedValidation, Dataset, MixedTrain, MixedValidation, Stream, ValidationSet
from moe.data.token_shard import TokenShard
from moe.model.transformer import Transformer
from moe.recipe.load import build_run, load
from moe.records.results import write_json
from moe.train.parts.numbers import LayerNumbers, Sums
from moe.train.parts.passes import count_tokens, passes_of
from moe.train.start.opening import read_data
from moe.train.start.restore import choose, restore
from moe.train.start.state import opened
from parallel.errors import BadInput, counted

TOKENS_AT_ONCE = 8192  # about this many tokens in a forward pass
_OF_MODEL = ("data.tokenizer", "data.vocab_size", "data.objective")  # keys of section `data` that must stay as in training
Text = ValidationSet | CorruptedValidation


@dataclass(frozen=True)
class Evaluated:
    """Results of an evaluation. loss: mean, in nats a token. layers: load and dropped choices of each MoE layer over all tokens."""

    sequences: int
    tokens: int
    loss: float
    bits_per_byte: float
    layers: list[LayerNumbers]

    @property
    def perplexity(self) -> float:
        """exp(loss), or infinity if that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


@dataclass
class _Total:
    """Sums over the passes of an evaluation. planned: number of sequences. loss: summed over tokens."""

    planned: int
    sums: Sums
    loss: float = 0.0
    tokens: int = 0
    num_bytes: float = 0.0

    def add(self, text: _Total) -> None:
        self.loss, self.tokens, self.num_bytes = self.loss + text.loss, self.tokens + text.tokens, self.num_bytes + text.num_bytes

    def evaluated(self) -> Evaluated:
        loss, bits = self.loss / self.tokens, self.loss / math.log(2) / self.num_bytes
        return Evaluated(self.planned, self.tokens, loss, bits, self.sums.total(()).layers)


@torch.no_grad()
def evaluate_each(model: Transformer, sources: Sequence[Sequence[Text]], *, sequences: int) -> tuple[Evaluated, list[Evaluated | None]]:
    """Evaluate on `sequences` sequences (0: all), taken from each text in proportion to its length, with router.eval_capacity_factor.
    sources: the texts of each source. Return (results of all texts, results of each source; None for a source without a sequence)."""
    device, m, group = next(model.parameters()).device, model.config, model.router_spec.group
    multiple = group if isinstance(group, int) else 1  # an expert's capacity is counted over this number of sequences
    texts = [(text, number) for number, source in enumerate(sources) for text in source]
    there = [text.windows.num_windows for text, _ in texts]
    asked = sum(there) if sequences == 0 else min(sequences, sum(there))
    ends = [round(asked * sum(there[: n + 1]) / sum(there)) for n in range(len(there))]
    counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    planned = [sum(count for count, (_, of) in zip(counts, texts, strict=True) if of == number) for number in range(len(sources))]
    whole, *parts = (_Total(count, Sums(model.expert_counts, device, 0)) for count in (asked, *planned))
    for (text, number), count in zip(texts, counts, strict=True):
        if count == 0:
            continue
        shard, of_text = TokenShard.whole(count, m.read_length, source=m.source_length), _Total(count, parts[number].sums)
        held = text.held(shard)
        counted = count_tokens(stored := torch.from_numpy(held.sequences), shard)
        for inputs in passes_of(_on(device, stored, multiple), counted, shard):
            found = model(inputs.inputs_BL, inputs.context, inputs.targets_BL)
            of_text.loss += found.loss.double().item()
            for total in (whole, parts[number]):
                total.sums.add(None, found.layers, inputs.share * count / total.planned)
        of_text.tokens, of_text.num_bytes = counted.targets, held.bytes_per_token * counted.targets
        whole.add(of_text)
        parts[number].add(of_text)
    return whole.evaluated(), [part.evaluated() if part.tokens else None for part in parts]


def evaluate(model: Transformer, texts: Sequence[Text], *, sequences: int) -> Evaluated:
    """Evaluate as `evaluate_each` does, and return only the results over all texts together."""
    return evaluate_each(model, [texts], sequences=sequences)[0]


def _on(device: torch.device, sequences_NL: Tensor, multiple: int) -> Iterator[Tensor]:
    """Yield chunks of `sequences_NL` on `device`, of about TOKENS_AT_ONCE tokens each. Every chunk but the last has a multiple of
    `multiple` sequences."""
    at_once = max(1, TOKENS_AT_ONCE // (multiple * sequences_NL.shape[1])) * multiple
    whole = len(sequences_NL) // multiple * multiple
    parts = [*sequences_NL[:whole].split(at_once), sequences_NL[whole:]]
    return (part.to(device) for part in parts if len(part))


def main(run_dir: str, *, overrides: dict[str, str], sequences: int = 512, step: int | None = None, json: str | None = None) -> None:
    """Print the loss on the run's validation text, or on all of another text if `overrides` has data.path or data.sources. overrides:
    recipe key -> value. sequences: number of sequences; 0: all. step: the checkpoint's; None: the newest. json: file for the results."""
    for key in overrides:
        if not key.startswith("data.") or key in _OF_MODEL:
            needed = f"keys of data except {', '.join(_OF_MODEL)}, which the trained model fixes"
            raise BadInput(f"--{key}", got="a key that moe eval does not take", needed=needed, fix=f"remove --{key}")
    if overrides.get("data.source") == "python_stdlib":
        overrides = {"data.path": "null", "data.sources": "[]"} | overrides
    overrides = ({"data.sources": "[]"} if "data.path" in overrides else {}) | overrides
    path = choose(Path(run_dir), step=step)
    state = opened(path).state
    run = build_run(state["recipe"])
    data_config = load(Path(run_dir) / "recipe.yaml", overrides)[0].data if overrides else run.data
    sources = "data.sources" in overrides and bool(data_config.sources)
    if sources and "data.path" not in overrides:
        data_config = data_config.model_copy(update={"path": None})
    if data_config.sources and data_config.path is not None:
        raise BadInput("--data.path", got="data.sources as well", needed="one of the two", fix="remove --data.path")
    another = sources or "data.path" in overrides
    data = read_data(run, data_config, tokenizer=state["tokenizer"], log=partial(print, file=sys.stderr))
    if run.train.has_own_loss or data.has_pairs:
        answers = ", of chosen and rejected answers" if data.has_pairs else ""
        other = f", and not train.loss {run.train.loss}" if run.train.has_own_loss else ""
        print(f"this is cross-entropy{answers}{other}", file=sys.stderr)
    found, by_source = evaluate_each(restore(path, run), _texts(data, whole=another), sequences=sequences)
    where = "all of" if another else "the validation part of"
    print(f"{path}: {where} {data_config.name}, {counted(found.sequences, 'sequence')}, {counted(found.tokens, 'token')}")
    print(f"loss {found.loss:.4f} nats a token   {found.bits_per_byte:.4f} bits per byte   perplexity {found.perplexity:.2f}")
    _print_layers(found)
    each = list(zip(data_config.sources, by_source, strict=True)) if len(data_config.sources) > 1 else []
    for source, part in each:
        if part is None:
            print(f"{source.path}: no sequence")
            continue
        print(f"{source.path}: {counted(part.sequences, 'sequence')}   loss {part.loss:.4f}   {part.bits_per_byte:.4f} bits per byte")
        _print_layers(part)
    if json:
        row: dict[str, Any] = {"step": int(state["counters"]["step"])} | _row(found)
        row |= {"sources": [{"path": source.path} | (_row(part) if part else {}) for source, part in each]} if each else {}
        write_json(json, verb="eval", rows=[row], text=data_config.name)


def _print_layers(found: Evaluated) -> None:
    for layer in found.layers:
        choices = layer.kept + layer.dropped
        dropped = layer.dropped / choices if choices else 0.0
        loads = " ".join(f"{share:.1%}" for share in sorted(layer.load, reverse=True)[:8])
        rest = " ..." if len(layer.load) > 8 else ""
        print(f"layer {layer.layer}   dropped {dropped:.2%}   busiest experts {loads}{rest}   (even: {1 / len(layer.load):.1%})")


def _row(found: Evaluated) -> dict[str, Any]:
    layers = [{"layer": n.layer, "load": n.load, "kept": n.kept, "dropped": n.dropped} for n in found.layers]
    return vars(found) | {"perplexity": found.perplexity, "layers": layers}


def _texts(data: Dataset, *, whole: bool) -> list[list[Text]]:
    """Return the held-out part of each source; with `whole` also its training part. Span corruption is applied if the data has it."""
    held = data.validation.inner if isinstance(data.validation, CorruptedValidation) else data.validation
    train = data.train.inner if isinstance(data.train, CorruptedTrain) else data.train
    sources: list[list[Text]] = []
    parts = list(held.parts) if isinstance(held, MixedValidation) else [held]
    for part, trained in zip(parts, train.parts if isinstance(train, MixedTrain) else (train,), strict=True):
        texts = [part]
        if whole:
            if isinstance(trained, Stream):
                got, needed = "samples without len() and []", "samples that can all be evaluated"
                raise BadInput("--data.path", got=got, needed=needed, fix="leave --data.path out, to evaluate the validation part")
            texts = [ValidationSet(trained.windows, part.bytes_per_id), part]
        objective = data.validation.objective if isinstance(data.validation, CorruptedValidation) else None
        sources.append([text if objective is None else CorruptedValidation(text, objective) for text in texts])
    return sources
