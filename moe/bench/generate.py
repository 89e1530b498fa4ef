"""Tokens a second of texts continued with keys and values kept, beside the same model reading each context again, and beside transformers.

    cached        moe generate's way
    recomputed    every token reads its whole context
    peer          transformers' Mixtral of the same sizes, with random weights, by its own `generate` and its own cache

A ratio is of seconds, taken within each round: the median over rounds, with its quartiles. `moe bench generate --rounds 9 --json FILE`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moe.bench.races import Race, race_row
from moe.bench.timing import in_turn
from moe.launch import exit_codes
from moe.model.transformer import Transformer
from moe.recipe import sections
from moe.records.results import write_json
from moe.train.decode import Cached, Reads, Recomputed, continued, for_continuing
from moe.train.sampling import Sampling

SIZES = ((128, 1), (128, 8), (512, 1))  # width, texts at once
LAYERS, HEADS, EXPERTS, CHOICES, VOCABULARY, LENGTH = 4, 4, 8, 2, 256, 256
PROMPT, TOKENS = 32, 32  # tokens
CPU = torch.device("cpu")


def main(*, rounds: int = 9, peers: str = "all", json: str | None = None) -> int:
    """`moe bench generate`: returns 1 if ours is slower than a peer, beyond the quartiles."""
    torch.set_num_threads(1)
    rows = [row for width, texts in SIZES for row in _rows(width, texts, rounds, with_peer=peers != "none")]
    if json:
        sizes = {"layers": LAYERS, "experts": EXPERTS, "choices": CHOICES, "max_length": LENGTH}
        write_json(json, verb="bench generate", rows=rows, rounds=rounds, prompt=PROMPT, tokens=TOKENS, **sizes)
    return exit_codes.of(all(row.get("passed") is not False for row in rows))


def _rows(width: int, texts: int, rounds: int, *, with_peer: bool) -> list[dict[str, Any]]:
    prompts = torch.randint(1, VOCABULARY, (texts, PROMPT), generator=torch.Generator().manual_seed(0))
    model = _model(width)
    work = {"cached": _ours(Cached(model), prompts), "recomputed": _ours(Recomputed(model, LENGTH), prompts)}
    races = [Race(f"cached over recomputed, {width} wide, {texts} texts", "cached", "recomputed", 1.0)]
    if with_peer and (peer := _peer(width, prompts)) is not None:
        work["peer"] = peer
        races.append(Race(f"cached over transformers, {width} wide, {texts} texts", "cached", "peer", 1.0))
    seconds = in_turn(work, rounds=rounds, device=CPU, warmups=1)
    rows = [race_row(race, seconds, ranks=1) for race in races]
    return [row | {"width": width, "texts": texts, "tokens_per_second": texts * TOKENS / row["seconds"]} for row in rows]


def _model(width: int) -> Transformer:
    """Sizes of transformers' Mixtral below; every layer has experts."""
    model = sections.Model(num_layers=LAYERS, d_model=width, num_heads=HEADS, d_ff=2 * width, ffn="swiglu", max_length=LENGTH, moe_every=1)
    router: dict[str, Any] = {"num_choices": CHOICES}
    made = Transformer(model, sections.Experts(num_experts=EXPERTS), sections.Router(**router), vocab_size=VOCABULARY).eval()
    for_continuing(made)
    return made


def _ours(reads: Reads, prompts: torch.Tensor) -> Callable[[], object]:
    def run() -> object:
        options: dict[str, Any] = {"num_tokens": TOKENS, "max_length": LENGTH, "vocab_size": VOCABULARY}
        return list(continued(reads, prompts.tolist(), sampling=Sampling(0), seeds=[0] * len(prompts), **options))

    return run


def _peer(width: int, prompts: torch.Tensor) -> Callable[[], object] | None:
    try:
        from transformers import MixtralConfig, MixtralForCausalLM
    except ImportError:
        return None
    sizes: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
    }
    experts: dict[str, Any] = {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOICES}
    config = MixtralConfig(vocab_size=VOCABULARY, num_key_value_heads=HEADS, max_position_embeddings=LENGTH, **sizes, **experts)
    model = MixtralForCausalLM(config).eval()

    @torch.no_grad()
    def run() -> object:
        fixed = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        return model.generate(prompts, attention_mask=torch.ones_like(prompts), **fixed)

    return run
