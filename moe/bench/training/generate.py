"""Measures generated tokens per second with a KV cache, compared with recomputing the context, and with transformers.

    cached        with a KV cache, as in `moe generate`
    recomputed    the whole context is computed again for every token
    peer          transformers' `generate` with its own KV cache: a Mixtral with random weights and the same sizes

The same is measured for an encoder-decoder; its peer is transformers' T5. A ratio compares two times of the same round; the table has the
median and quartiles over rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from moe.bench.timing import Race, conclude, importable, in_turn, race_row
from moe.model.transformer import Transformer
from moe.recipe import sections
from moe.train.use.decode import Cached, Reads, Recomputed, Sampling, Written, continued, for_continuing
from parallel.errors import counted

Kind = Literal["decoder", "encoder_decoder"]
# (kind of model, width, number of texts generated at the same time)
SIZES: tuple[tuple[Kind, int, int], ...] = (("decoder", 128, 1), ("decoder", 128, 8), ("decoder", 512, 1), ("encoder_decoder", 512, 1))
LAYERS, HEADS, EXPERTS, CHOICES, VOCABULARY, LENGTH = 4, 4, 8, 2, 256, 256
PROMPT, TOKENS = 32, 32  # number of prompt tokens, number of generated tokens


def main(*, rounds: int = 9, peers: str = "all", json: str | None = None) -> int:
    """`moe bench generate`. Returns 1 if generating with a KV cache is slower than recomputing or than transformers."""
    torch.set_num_threads(1)
    rows = [row for size in SIZES for row in _rows(*size, rounds, with_peer=peers != "none")]
    sizes = {"layers": LAYERS, "experts": EXPERTS, "choices": CHOICES, "max_length": LENGTH}
    return conclude(json, "generate", rows, rounds=rounds, prompt=PROMPT, tokens=TOKENS, **sizes)


def _rows(kind: Kind, width: int, texts: int, rounds: int, *, with_peer: bool) -> list[dict[str, Any]]:
    prompts = torch.randint(1, VOCABULARY, (texts, PROMPT), generator=torch.Generator().manual_seed(0))
    if kind == "decoder":
        model, name, peer_of, begun = _decoder(width), "", _mixtral, prompts
        readers: dict[str, Reads] = {"cached": Cached(model), "recomputed": Recomputed(model, LENGTH)}
    else:
        model, name, peer_of = _encoder_decoder(width), "an encoder, ", _t5
        begun = torch.cat([prompts, torch.zeros_like(prompts[:, :1])], dim=1)
        readers = {"cached": Cached(model, source=PROMPT, max_length=1 + TOKENS), "recomputed": Written(model, PROMPT)}
    work = {how: _ours(reads, begun) for how, reads in readers.items()}
    races = [Race(f"cached over recomputed, {name}{width} wide, {counted(texts, 'text')}", "cached", "recomputed", 1.0)]
    if with_peer and importable("transformers"):
        work["peer"] = peer_of(width, prompts)
        races.append(Race(f"cached over transformers, {name}{width} wide, {counted(texts, 'text')}", "cached", "peer", 1.0))
    seconds = in_turn(work, rounds=rounds, warmups=1)
    rows = [race_row(race, seconds, ranks=1) for race in races]
    about = {"kind": kind, "width": width, "texts": texts}
    return [row | about | {"tokens_per_second": texts * TOKENS / row["seconds"]} for row in rows]


def _decoder(width: int) -> Transformer:
    """Return this project's model with the sizes of `_mixtral`; every layer has experts."""
    model = sections.Model(num_layers=LAYERS, d_model=width, num_heads=HEADS, d_ff=2 * width, ffn="swiglu", max_length=LENGTH, moe_every=1)
    router: dict[str, Any] = {"num_choices": CHOICES}
    made = Transformer(model, sections.Experts(num_experts=EXPERTS), sections.Router(**router), vocab_size=VOCABULARY).eval()
    for_continuing(made)
    return made


def _encoder_decoder(width: int) -> Transformer:
    """Return this project's encoder-decoder with the sizes of `_t5`."""
    sizes: dict[str, Any] = {"num_layers": 2 * LAYERS, "d_model": width, "num_heads": HEADS, "d_ff": 2 * width, "max_length": LENGTH}
    model = sections.Model(kind="encoder_decoder", positions="t5", ffn="relu", **sizes)
    return Transformer(model, vocab_size=VOCABULARY).eval()


def _ours(reads: Reads, prompts: torch.Tensor) -> Callable[[], object]:
    options: dict[str, Any] = {"num_tokens": TOKENS, "max_length": LENGTH, "vocab_size": VOCABULARY}
    return lambda: list(continued(reads, prompts.tolist(), sampling=Sampling(0), seeds=[0] * len(prompts), **options))


def _mixtral(width: int, prompts: torch.Tensor) -> Callable[[], object]:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes: dict[str, Any] = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
    sizes |= {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "max_position_embeddings": LENGTH}
    sizes |= {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOICES}
    return _theirs(MixtralForCausalLM(MixtralConfig(**sizes)).eval(), prompts)


def _t5(width: int, prompts: torch.Tensor) -> Callable[[], object]:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes: dict[str, Any] = {"d_model": width, "d_kv": width // HEADS, "d_ff": 2 * width, "num_layers": LAYERS, "num_heads": HEADS}
    config = T5Config(vocab_size=VOCABULARY, **sizes)
    config.decoder_start_token_id = 0
    return _theirs(T5ForConditionalGeneration(config).eval(), prompts)


def _theirs(model: Any, prompts: torch.Tensor) -> Callable[[], object]:
    lengths = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS}
    options = {"attention_mask": torch.ones_like(prompts), "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return torch.no_grad()(lambda: model.generate(prompts, **lengths, **options))
