"""T5 and Switch models of transformers and models of this project with the same random weights give the same logits and gradients, and the
same losses in 20 steps.

T5, v1.0     plain ReLU networks, tied embedding, logits scaled
T5, v1.1     gated GELU; logits not scaled. transformers 5 ties embedding and head, so its gradient is the sum of these two gradients here
Switch       experts in every second layer of encoder and decoder, and tokens without a slot

Only these tests detect a position bias in the wrong direction, a missing scale, and cross-attention keys from the wrong half.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe.model.transformer import Transformer
from moe.nn.context import Context
from moe.parallelize.engines import optimizer_of
from moe.recipe import sections
from moe.train.use.decode import Cached, Sampling, continued, for_continuing
from parallel.data.ddp import DDP
from parallel.mesh.layout import Layout
from parallel.mesh.mesh import Degrees, Mesh

transformers = pytest.importorskip("transformers", reason="pip install moe-parallel[hf]")

V, READ, WRITTEN, EXPERTS = 60, 140, 33, 4  # 140 tokens have distances in T5's exact, logarithmic and last buckets
SIZES = {
    "vocab_size": V, "d_model": 24, "d_kv": 5, "d_ff": 20, "num_layers": 4, "num_decoder_layers": 2, "num_heads": 3, "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5", {"feed_forward_proj": "relu"}),
    "t5_v1.1": ("T5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "switch": (
        "SwitchTransformers",
        {"num_experts": EXPERTS, "num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 1, "expert_capacity": 30}
        | {"router_jitter_noise": 0.0},
    ),
}  # fmt: skip


def theirs_of(kind: str) -> Any:
    family, values = KINDS[kind]
    model = getattr(transformers, f"{family}ForConditionalGeneration")(getattr(transformers, f"{family}Config")(**SIZES, **values))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.2 + float("layer_norm" in name))
    return model


def ours_of(kind: str) -> Transformer:
    gated, tied = kind == "t5_v1.1", kind != "t5_v1.1"
    model = sections.Model(
        kind="encoder_decoder", num_layers=6, encoder_layers=4, d_model=24, head_size=5, num_heads=3, d_ff=20, positions="t5",
        ffn="geglu" if gated else "relu", moe_every=2 if kind == "switch" else 0, tied_embeddings=tied, max_length=READ,
    )  # fmt: skip
    router = sections.Router(preset="switch", capacity_factor=1e-9, min_capacity=30, balance_weight=0.0)  # 30 slots for any length
    return Transformer(model, sections.Experts(num_experts=EXPERTS), router, vocab_size=V).train()


def named(ours: str) -> str:
    """Return transformers' name of the parameter `ours`; {} stands for the number of an expert."""
    if not ours.startswith("layers."):
        ends = {"encoder_norm": "encoder.final_layer_norm", "norm": "decoder.final_layer_norm", "embedding": "shared", "head": "lm_head"}
        return ends[ours.removesuffix(".weight")] + ".weight"
    layer, _, rest = ours.removeprefix("layers.").partition(".")
    half, number = ("encoder", int(layer)) if int(layer) < 4 else ("decoder", int(layer) - 4)
    last = 1 if half == "encoder" else 2
    places = {"attention": "0.SelfAttention", "cross": "1.EncDecAttention"}
    part, _, inside = rest.partition(".")
    if part.endswith("_norm"):
        found = f"{ {'attention_norm': 0, 'cross_norm': 1, 'ffn_norm': last}[part] }.layer_norm.weight"
    elif part in places:
        found = f"{places[part]}.{'relative_attention_bias.weight' if inside == 'bias.weight' else inside.replace('out', 'o')}"
    elif part == "moe":
        experts = {"w1": "experts.expert_{}.wi.weight", "w2": "experts.expert_{}.wo.weight"}
        found = f"{last}.mlp.{'router.classifier.weight' if inside == 'router.weight' else experts[inside.removeprefix('experts.')]}"
    else:
        found = f"{last}.ffn.{inside}"
    return f"{half}.block.{number}.layer.{found.replace(' ', '')}"


def there(tensors: dict[str, Tensor], name: str) -> Tensor:
    """Return transformers' tensor with this name (a result of `named`) in this project's layout; experts are stacked and transposed."""
    if "{}" in name:
        return torch.stack([tensors[name.format(expert)].t() for expert in range(EXPERTS)])
    if ".ffn." in name:
        gated = any("wi_0" in other for other in tensors)
        stem, _, matrix = name.partition(".ffn.")
        dense = "mlp" if f"{stem}.mlp.wi.weight" in tensors else "DenseReluDense"
        return tensors[
            f"{stem}.{dense}.{ {'w1': 'wi_0' if gated else 'wi', 'w3': 'wi_1', 'w2': 'wo'}[matrix[:2]] }.weight".replace(" ", "")
        ]
    return tensors[name if name in tensors else "shared.weight"]


def pair(kind: str) -> tuple[Any, Transformer]:
    theirs, ours = theirs_of(kind), ours_of(kind)
    weights = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, p in ours.named_parameters():
            p.copy_(there(weights, named(name)))
    return theirs, ours


def joined(read: Tensor, targets: Tensor) -> tuple[Tensor, Context]:
    """Return this project's tokens, those of the encoder and then those of the decoder, with their context."""
    tokens = torch.cat([read, torch.zeros(2, 1, dtype=torch.long), targets[:, :-1]], dim=1)
    return tokens, Context.of(tokens, source=READ)


@pytest.mark.parametrize("kind", ["t5", "switch"])
def test_greedy_texts_are_theirs(kind: str) -> None:
    theirs, ours = (model.eval() for model in pair(kind))
    for_continuing(ours)
    read = torch.randint(1, V, (2, 25), generator=torch.Generator().manual_seed(5))  # fewer tokens than slots, so no token is dropped
    want = theirs.generate(read, max_new_tokens=12, min_new_tokens=12, do_sample=False, num_beams=1, eos_token_id=V - 1, pad_token_id=0)
    prompts = [[*row, 0] for row in read.tolist()]
    steps = continued(
        Cached(ours, source=25, max_length=13),
        prompts,
        num_tokens=12,
        max_length=99,
        vocab_size=V - 1,
        sampling=Sampling(temperature=0.0),
        seeds=[0, 1],
    )
    assert torch.tensor(list(steps)).t().tolist() == want[:, 1:].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_every_gradient_are_theirs(kind: str) -> None:
    theirs, ours = pair(kind)
    weights = dict(theirs.named_parameters())
    generator = torch.Generator().manual_seed(5)
    read = torch.randint(1, V, (2, READ), generator=generator)
    targets = torch.randint(1, V, (2, WRITTEN), generator=generator)
    want = theirs(input_ids=read, labels=targets).logits
    F.cross_entropy(want.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    tokens, context = joined(read, targets)
    torch.testing.assert_close(ours(tokens, context).logits_BLV, want, rtol=0, atol=2e-6 * want.abs().max().item())
    found = ours(tokens, context, targets)
    found.loss.backward()
    if kind == "switch":
        assert sum(int(layer.dropped) for layer in found.layers) > 0 and all(int(layer.kept) for layer in found.layers)
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in weights.items()}
    mine = {name: p.grad for name, p in ours.named_parameters()}
    if kind == "t5_v1.1":
        mine["embedding"] = mine["embedding"] + mine.pop("head.weight")
    for name, gradient in mine.items():
        wanted = there(gradients, named(name))
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=4e-6 * wanted.abs().max().item(), msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", ["t5", "switch"])
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_twenty_losses_with_an_optimizer_are_theirs(kind: str, optimizer: Any) -> None:
    """transformers' model learns by torch's AdamW, or by transformers' Adafactor. An expert without tokens has a gradient of 0, as here;
    transformers leaves it out of the step, so that its moments wait."""
    theirs, ours, lr = *pair(kind), 1e-3
    if optimizer == "adamw":
        rule: torch.optim.Optimizer = torch.optim.AdamW(theirs.parameters(), lr=lr, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.0)
    else:
        rule = transformers.Adafactor(theirs.parameters(), lr=lr, scale_parameter=True, relative_step=False)
    layouts = {name: Layout(tuple(p.shape)) for name, p in ours.named_parameters()}
    settings = sections.Optimizer(kind=optimizer, lr=lr, eps=1e-4 if optimizer == "adamw" else 1e-8, weight_decay=0.0)
    engine = DDP(ours, layouts=layouts, mesh=Mesh.of(Degrees()), optimizer=optimizer_of(settings))
    generator = torch.Generator().manual_seed(7)
    read, targets = (torch.randint(1, V, (2, length), generator=generator) for length in (READ, WRITTEN))
    found, want = [], []
    for _ in range(20):
        for p in theirs.parameters():
            p.grad = torch.zeros_like(p)
        loss = theirs(input_ids=read, labels=targets).loss
        loss.backward()
        rule.step()
        want.append(loss.item())
        tokens, context = joined(read, targets)
        mine = engine.forward(tokens, context, targets, last=True).loss / targets.numel()
        engine.backward(mine, last=True)
        engine.step(lr)
        found.append(mine.item())
    assert found == pytest.approx(want, rel=1e-6) and found[-1] < 0.97 * found[0]
