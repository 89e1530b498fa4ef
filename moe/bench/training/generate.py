"""Generated tokens a second with cached keys and values, compared with recomputing each context, and with transformers.

    cached        as moe generate does
    recomputed    for every token the whole context is computed again
    peer          transformers' Mixtral of the same sizes, with random weights, with its own `generate` and its own cache

The same for an encoder-decoder, compared with transformers' T5. Ratios are of seconds within each round: the median over rounds, with its
quartiles. `moe bench generate --rounds 9 --json FILE`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from moe.bench.timing import Race, conclude, in_turn, race_row
from moe.model.transformer import Transformer
from moe.recipe import sections
from moe.train.use.decode import Cached, Reads, Recomputed, Sampling, Written, continued, for_continuing

Kind = Literal["decoder", "encoder_decoder"]
# kind, width, number of texts in a batch
SIZES: tuple[tuple[Kind, int, int], ...] = (("decoder", 128, 1), ("decoder", 128, 8), ("decoder", 512, 1), ("encoder_decoder", 512, 1))
LAYERS, HEADS, EXPERTS, CHOICES, VOCABULARY, LENGTH = 4, 4, 8, 2, 256, 256
PROMPT, TOKENS = 32, 32  # numbers of prompt tokens and of generated tokens
CPU = torch.device("cpu")


def main(*, rounds: int = 9, peers: str = "all", json: str | None = None) -> int:
    """`moe bench generate`: returns 1 if the lower quartile of cached generation's seconds / another way's is above 1."""
    torch.set_num_threads(1)
    rows = [row for size in SIZES for row in _rows(*size, rounds, with_peer=peers != "none")]
    sizes = {"layers": LAYERS, "experts": EXPERTS, "choices": CHOICES, "max_length": LENGTH}
    return conclude(json, "generate", rows, rounds=rounds, prompt=PROMPT, tokens=TOKENS, **sizes)


def _rows(kind: Kind, width: int, texts: int, rounds: int, *, with_peer: bool) -> list[dict[str, Any]]:
    prompts = torch.randint(1, VOCABULARY, (texts, PROMPT), generator=torch.Generator().manual_seed(0))
    if kind == "decoder":
        model, name, peer_of = _model(width), "", _mixtral
        ways: list[Reads] = [Cached(model), Recomputed(model, LENGTH)]
    else:
        model, name, peer_of = _halves(width), "an encoder, ", _t5
        ways = [Cached(model, source=PROMPT, max_length=1 + TOKENS), Written(model, PROMPT)]
    begun = prompts if kind == "decoder" else torch.cat([prompts, torch.zeros_like(prompts[:, :1])], dim=1)
    work = {way: _ours(reads, begun) for way, reads in zip(("cached", "recomputed"), ways, strict=True)}
    races = [Race(f"cached over recomputed, {name}{width} wide, {texts} texts", "cached", "recomputed", 1.0)]
    if with_peer and (peer := peer_of(width, prompts)) is not None:
        work["peer"] = peer
        races.append(Race(f"cached over transformers, {name}{width} wide, {texts} texts", "cached", "peer", 1.0))
    seconds = in_turn(work, rounds=rounds, device=CPU, warmups=1)
    rows = [race_row(race, seconds, ranks=1) for race in races]
    about = {"kind": kind, "width": width, "texts": texts}
    return [row | about | {"tokens_per_second": texts * TOKENS / row["seconds"]} for row in rows]


def _model(width: int) -> Transformer:
    """A model with the sizes of `_mixtral`; every layer has experts."""
    model = sections.Model(num_layers=LAYERS, d_model=width, num_heads=HEADS, d_ff=2 * width, ffn="swiglu", max_length=LENGTH, moe_every=1)
    router: dict[str, Any] = {"num_choices": CHOICES}
    made = Transformer(model, sections.Experts(num_experts=EXPERTS), sections.Router(**router), vocab_size=VOCABULARY).eval()
    for_continuing(made)
    return made


def _halves(width: int) -> Transformer:
    """An encoder-decoder with the sizes of `_t5`."""
    sizes: dict[str, Any] = {"num_layers": 2 * LAYERS, "d_model": width, "num_heads": HEADS, "d_ff": 2 * width, "max_length": LENGTH}
    model = sections.Model(kind="encoder_decoder", positions="t5", ffn="relu", **sizes)
    return Transformer(model, vocab_size=VOCABULARY).eval()


def _ours(reads: Reads, prompts: torch.Tensor) -> Callable[[], object]:
    def run() -> object:
        options: dict[str, Any] = {"num_tokens": TOKENS, "max_length": LENGTH, "vocab_size": VOCABULARY}
        return list(continued(reads, prompts.tolist(), sampling=Sampling(0), seeds=[0] * len(prompts), **options))

    return run


FIXED: dict[str, Any] = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def _mixtral(width: int, prompts: torch.Tensor) -> Callable[[], object] | None:
    try:
        from transformers import MixtralConfig, MixtralForCausalLM
    except ImportError:
        return None
    sizes: dict[str, Any] = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": LAYERS}
    sizes |= {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "max_position_embeddings": LENGTH, "vocab_size": VOCABULARY}
    experts: dict[str, Any] = {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOICES}
    config = MixtralConfig(**sizes, **experts)
    return _theirs(MixtralForCausalLM(config).eval(), prompts)


def _t5(width: int, prompts: torch.Tensor) -> Callable[[], object] | None:
    try:
        from transformers import T5Config, T5ForConditionalGeneration
    except ImportError:
        return None
    sizes: dict[str, Any] = {"d_model": width, "d_kv": width // HEADS, "d_ff": 2 * width, "num_layers": LAYERS, "num_heads": HEADS}
    config = T5Config(vocab_size=VOCABULARY, **sizes)
    config.decoder_start_token_id = 0
    return _theirs(T5ForConditionalGeneration(config).eval(), prompts)


def _theirs(model: Any, prompts: torch.Tensor) -> Callable[[], object]:
    @torch.no_grad()
    def run() -> object:
        return model.generate(prompts, attention_mask=torch.ones_like(prompts), **FIXED)

    return run
