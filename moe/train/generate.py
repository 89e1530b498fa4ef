"""Continue a text with a trained model, token by token.

Every rank of an expert-parallel model must call `sample` with the same arguments: the experts are exchanged as in training.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from moe.data import Tokenizer
from moe.data import load as load_tokenizer
from moe.model.names import global_name
from moe.model.transformer import Output, Transformer
from moe.parallelize.build import build
from moe.recipe.load import build_run
from moe.train.state import load_extra
from parallel import checkpoint
from parallel.errors import BadInput
from parallel.mesh import Degrees, Mesh
from parallel.stored import Reader, check_same_parameters


@torch.no_grad()
def sample(
    model: Callable[[Tensor], Output],
    tokenizer: Tokenizer,
    *,
    prompt: str,
    num_tokens: int,
    max_length: int,
    temperature: float = 0.8,
    seed: int = 0,
    device: torch.device | None = None,
) -> str:
    """The prompt and `num_tokens` more; temperature 0 takes the likeliest token each time. The context is the last max_length tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = list(tokenizer.encode(prompt)) or [tokenizer.separator]
    for _ in range(num_tokens):
        seen = ids[-max_length:]
        # filled up to one length, because every new length costs new code; a causal model does not see what comes after
        context_1L = torch.tensor([seen + [0] * (max_length - len(seen))], device=device)
        logits_V = model(context_1L).logits_BLV[0, len(seen) - 1, : tokenizer.vocab_size].float().cpu()
        ids.append(_choose(logits_V, temperature, generator))
    return tokenizer.decode(ids)


def _choose(logits_V: Tensor, temperature: float, generator: torch.Generator) -> int:
    if not logits_V.isfinite().all():
        raise BadInput(
            "model",
            got="logits that are not finite",
            needed="finite weights",
            fix="take an earlier checkpoint, or lower optimizer.lr",
        )
    if temperature == 0:
        return int(logits_V.argmax())
    return int(torch.multinomial((logits_V / temperature).softmax(-1), 1, generator=generator))


def load_model(run_dir: Path) -> tuple[Transformer, Tokenizer, int]:
    """A run's newest whole checkpoint as one model on this device: (model, tokenizer, step). Raises BadInput."""
    mesh = Mesh.of(Degrees())
    path = checkpoint.newest(run_dir / "checkpoints", world=mesh.axis("world"), log=print)
    if path is None:
        raise BadInput("run folder", got=run_dir, needed="a run with a checkpoint", fix="train first: moe train switch_tiny")
    state = Reader(path).state
    return restore(path), load_tokenizer(state["tokenizer"]), int(state["counters"]["step"])


def restore(path: Path) -> Transformer:
    """The model of one checkpoint, whole on this device, ready to evaluate."""
    mesh, reader = Mesh.of(Degrees()), Reader(path)
    run = build_run(reader.state["recipe"] | {"degrees": {"dp": 1, "ep": 1}, "tiling": {}})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, layouts = build(run, mesh, device=device)
    check_same_parameters(reader, {global_name(n): layout for n, layout in layouts.items()})
    for name, parameter in model.named_parameters():
        parameter.data.copy_(reader.load(global_name(name), "weight", layouts[name], mesh))
    load_extra(reader, model, log=print)
    return model.eval()


def main(run_dir: str, *, prompt: str = "def ", tokens: int = 200, temperature: float = 0.8, seed: int = 0) -> None:
    """`moe generate`: print a continuation of the prompt."""
    for what, value, low in (("--tokens", tokens, 1), ("--temperature", temperature, 0)):
        if value < low:
            raise BadInput(what, got=value, needed=f"at least {low}", fix=f"try {what} {200 if low else 0.8}")
    model, tokenizer, _ = load_model(Path(run_dir))
    options = {"num_tokens": tokens, "max_length": model.config.max_length, "device": next(model.parameters()).device}
    print(sample(model, tokenizer, prompt=prompt, temperature=temperature, seed=seed, **options))  # type: ignore[arg-type]
