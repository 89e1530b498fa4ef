"""The report that `moe convert` prints: how each part was converted, whether the output is unchanged, and how to continue."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from moe.convert.checks import even_gate_sum, experts_of, gate_sum, layers_that, parts
from moe.convert.layers import Conversion, feed_forward
from moe.model.transformer import Transformer
from moe.nn.context import Context
from moe.recipe.changes import ORDER, changes, function_changes
from moe.recipe.router_spec import RouterSpec
from moe.train.start.restore import restore


def report_lines(conversion: Conversion, source: Path, out: Path) -> list[str]:
    """Return lines of text: one for each part of the model, then the expected output and the next command."""
    rows = changes_by_part(conversion)
    width = max(len(part) for part, _ in rows)
    return [
        f"{conversion.settings.method}: {source} -> {out}",
        *(f"  {part:<{width}}  {what}" for part, what in rows),
        f"output: {expected_output(conversion)}",
        f"continue with: moe train {out / 'recipe.yaml'} --out {out}",
    ]


def changes_by_part(conversion: Conversion) -> list[tuple[str, str]]:
    """Return (part of the model, how it was converted) for each part, and for the recipe, the moments and the order of samples."""
    s, before, run = conversion.settings, conversion.before, conversion.run
    changed = layers_that("grow", before, run) + layers_that("shrink", before, run)
    kept = [n for n in conversion.shapes if not (feed_forward(n) and int(n.split(".")[1]) in changed)]
    rows = [("unchanged", f"{len(kept)} tensors: all but the feed-forward part of layers {_listed(changed)}")]
    rows += [(f"layer {layer}", _layer(conversion, layer)) for layer in changed]
    other = ", ".join(map(str, function_changes(before, run)))
    rows += [("recipe", f"the new recipe changes what the weights compute: {other}")] if other else []
    if s.moments == "copy":
        step = conversion.reader.state["counters"]["step"]
        rows += [("moments", f"the source's, divided by the number of copies; continues at step {step}")]
        changed_order = ", ".join(str(change) for change in changes(before, run) if change.key in ORDER)
        rows += [("samples", f"in another order than the source's: {changed_order}")] if changed_order else []
    else:
        rows += [("moments", "fresh; starts at step 0")]
    return rows


def _layer(conversion: Conversion, layer: int) -> str:
    s, before, run = conversion.settings, conversion.before, conversion.run
    old, new = experts_of(before, layer), experts_of(run, layer)
    if new > old:
        one = {
            "copy": "copies of the dense network",
            "granular": f"{parts(before, run)} shards of it, {new // parts(before, run)} copies of each",
            "noise": f"copies with noise of {s.scale:g} deviations on {s.share:g} of the weights",
            "drop": f"copies with {s.share:g} of the hidden units drawn anew",
        }[s.method]
        factor = (parts(before, run) if s.method == "granular" else 1) / even_gate_sum(run.router, new)
        scaled = f"; down projection times {factor:g}" if factor != 1 else ""
        beside = "; residual network: the dense one" if run.experts.residual else ""
        beside += "; shared experts: new, their down projection zero" if run.experts.shared else ""
        return f"dense -> {new} experts, {one}{scaled}; router new, seed {run.train.seed}{beside}"
    into = f"{new} experts" if new else "dense"
    how = "the most used" if s.method == "prune" else f"means, {s.weights} weights"
    beside = "; shared experts joined to it" if not new and before.experts.shared else ""
    return f"{old} experts -> {into}: {how}{beside}{'; their router rows' if new else ''}"


def expected_output(conversion: Conversion) -> str:
    """Describe when the new model's output is equal to the source's."""
    s, before, run = conversion.settings, conversion.before, conversion.run
    if s.method in ("noise", "drop"):
        return "near the source's: the experts differ from its network on purpose"
    if s.method in ("copy", "granular"):
        if gate_sum(run.router) is None:
            return f"not the source's: gates of {run.router.preset} depend on the token, the scale is right if all logits are equal"
        return "the source's, up to rounding, wherever no choice is dropped or declined"
    if run.model.layers_with_experts() and any(getattr(before.router, key) != getattr(run.router, key) for key in RouterSpec.model_fields):
        return "not the source's: the recipe has another router"
    if s.method == "merge":
        return "the source's only where the merged experts were equal"
    as_is = "" if gate_sum(before.router) is not None else "; gates grow by the probability that the pruned experts had"
    return f"the source's for tokens that chose no pruned expert{as_is}"


@dataclass(frozen=True)
class Difference:
    """Largest difference between two models' logits on the same tokens, and the largest logit of the first model."""

    tokens: int
    largest_difference: float
    largest_logit: float

    def said(self) -> str:
        differ = f"logits differ by at most {self.largest_difference:.2e} of {self.largest_logit:.2e}"
        return f"checked on {self.tokens} random tokens: {differ}"


@torch.no_grad()
def compared(source: Path, model: torch.nn.Module) -> Difference:
    """Compare the logits of the checkpoint `source` and of `model` on the same random tokens, in evaluation mode and fp32."""
    assert isinstance(model, Transformer)
    old = restore(source)
    tokens_BL = torch.randint(old.vocab_size, (4, min(128, old.config.max_length)), generator=torch.Generator().manual_seed(0))
    read = tokens_BL.shape[1] // 2 if old.config.kind == "encoder_decoder" else 0
    context, device = Context.of(tokens_BL, source=read), next(old.parameters()).device
    was = model.compute
    old.compute = model.compute = torch.float32
    want = old(tokens_BL.to(device), context.to(device)).logits_BLV.cpu()
    got = model.eval()(tokens_BL, context).logits_BLV
    model.compute = was
    return Difference(got[..., 0].numel(), (got - want).abs().max().item(), want.abs().max().item())


def _listed(layers: list[int]) -> str:
    return ", ".join(map(str, layers))
