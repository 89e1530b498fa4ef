"""Adapter of DeepSpeed: ZeRO 1 to 3, its MoE layer with experts on different ranks, and AutoEP, which spreads the experts of transformers'
Mixtral.

The single process runs plain torch with AdamW. Each rank has different samples. With ZeRO, DeepSpeed's API gathers the gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import partial
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe.verify.peer import VOCABULARY, Pair, adamw, batch, loss_of, train
from moe.verify.yours.recorder import record
from parallel.data.deepspeed import load_deepspeed, start_deepspeed

PACKAGES = {"deepspeed": "moe-parallel"}
MODELS = ("zero1", "zero2", "zero3", "moe", *(("autoep",) if find_spec("transformers") else ()))
DEGREES = ("ep", "fsdp")
ROUTED = ("moe",)
_WIDTH, _EXPERTS = 32, 4
_STAGE = {"zero1": 1, "zero2": 2, "zero3": 3, "moe": 0, "autoep": 0}  # name in MODELS -> ZeRO stage


def load() -> None:
    """Import the modules that the ranks need."""
    load_deepspeed()
    if "autoep" in MODELS:
        from moe.verify.peers import transformers

        transformers.load()


def pairs(models: tuple[str, ...], degrees: dict[str, int], pin: bool) -> Iterator[Pair]:
    """Yield one comparison for each model whose axis is in `degrees`: ep for models with experts, fsdp for the others, which run with
    ZeRO."""
    for model in models:
        axis = "ep" if model in ("moe", "autoep") else "fsdp"
        if axis in degrees:
            layout = f"{'dp' if axis == 'fsdp' else axis}{degrees[axis]}"
            yield Pair(model, layout, degrees[axis], partial(_one, model, pin), partial(_many, model, pin))


class Layer(nn.Module):
    """A feed-forward network (ep 0), or DeepSpeed's MoE layer with top-2 routing, in which each expert has capacity for all tokens."""

    def __init__(self, ep: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        ffn = nn.Sequential(nn.Linear(_WIDTH, 2 * _WIDTH), nn.GELU(), nn.Linear(2 * _WIDTH, _WIDTH))
        if ep:
            from deepspeed.moe.layer import MoE

            self.moe = MoE(_WIDTH, ffn, _EXPERTS, ep_size=ep, k=2, min_capacity=40, use_rts=False, top2_2nd_expert_sampling=False)
        else:
            self.ffn = ffn

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x)
        y = self.moe(y)[0] if hasattr(self, "moe") else self.ffn(y)
        return x + y


class Model(nn.Module):
    """Embedding, two layers, head. ep: ranks over which experts are spread; 0: no experts."""

    def __init__(self, ep: int) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(VOCABULARY, _WIDTH), nn.ModuleList([Layer(ep) for _ in range(2)])
        self.head = nn.Linear(_WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def _model(kind: str, ranks: int, rank: int) -> Any:
    """Return the model. Its initial values do not depend on the number of ranks, because each expert is seeded with its global index."""
    torch.manual_seed(0)
    if kind == "autoep":
        import transformers

        from moe.verify.peers.transformers import config_of

        return transformers.AutoModelForCausalLM.from_config(config_of("mixtral"), dtype=torch.float32)
    model: Any = Model(ranks if kind == "moe" else 0)
    for number, layer in enumerate(model.layers if kind == "moe" else ()):
        own = layer.moe.deepspeed_moe.experts.deepspeed_experts
        for index, expert in enumerate(own):
            draws = torch.Generator().manual_seed(100 * number + rank * len(own) + index)
            for parameter in expert.parameters():
                parameter.data.normal_(std=0.2, generator=draws)
        # the balance loss is left out: it is computed over a rank's own samples, so it differs from one process by definition
        layer.moe.deepspeed_moe.gate.register_forward_hook(lambda module, given, out: (torch.zeros(()), *out[1:]))
        layer.moe.deepspeed_moe.gate.wg.weight.data.normal_(generator=torch.Generator().manual_seed(number))
    return model


def _logits(kind: str, model: Any, tokens: Tensor) -> Tensor:
    logits: Tensor = model(tokens, use_cache=False).logits if kind == "autoep" else model(tokens)
    return logits


def _one(kind: str, pin: bool, folder: Path) -> None:
    start_deepspeed(torch.device("cpu"))
    model = _model(kind, 1, 0)
    for layer in model.layers if kind == "moe" else ():
        with redirect_stdout(StringIO()):
            layer.moe.set_deepspeed_parallelism()
    train(folder, model, partial(_logits, kind, model), batch(), pin=pin)


def _many(kind: str, pin: bool, folder: Path) -> None:
    deepspeed, rank, world = start_deepspeed(torch.device("cpu")), dist.get_rank(), dist.get_world_size()
    tokens = batch().chunk(world)[rank]
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": len(tokens), "zero_force_ds_cpu_optimizer": False}
    config["gradient_clipping"] = 0.0  # DeepSpeed clips at a norm of 1 if this is not given
    config["zero_optimization"] = {"stage": _STAGE[kind], "overlap_comm": False}
    if kind == "autoep":
        config["expert_parallel"] = {"enabled": True, "autoep_size": world, "preset_model": "mixtral", "use_grouped_mm": False}
    model = _model(kind, world, rank)
    with redirect_stdout(StringIO()):
        engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config, dist_init_required=False)
    for step in record(folder, engine, pin=folder.parent / "one" if pin else None):
        loss = loss_of(_logits(kind, engine, tokens[:, :-1]), tokens[:, 1:])
        step.note("loss", loss)
        engine.backward(loss)
        step.gradients()
        engine.step()
