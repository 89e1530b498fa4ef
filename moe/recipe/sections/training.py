"""Sections of a recipe that describe data, optimizer, adapters and the training loop."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from moe.recipe.plugin import Plugin, is_plugin
from moe.recipe.section import OneOrMore, Section


class Source(Section):
    """One of several sources of text."""

    path: str
    weight: float = Field(gt=0, lt=1e18, description="its share of the sequences is this over the sum of all sources' weights")
    text_key: str | None = Field(None, description="the field or column that holds the text; null: data.text_key")


class Data(Section):
    source: Literal["python_stdlib", "text", "jsonl", "given"] | Plugin = Field(
        "python_stdlib", description="text and jsonl need path; given: from Python, train(run, data=...)"
    )
    path: str | None = Field(None, description="a file or folder of text, JSONL, Parquet or Arrow, also .gz or .zst; of ids: *.bin")
    sources: tuple[Source, ...] = Field((), description="instead of path: several, as {path, weight} or {path, weight, text_key}")
    text_key: str = Field("text", description="the field of a JSONL line, or the column of a table, that holds the text")
    tokenizer: Literal["bytes", "bpe", "ids"] = Field("bytes", description="ids: the data are token ids, not text")
    vocab_size: int = Field(4096, gt=0, description="of bpe, above 256; and of ids")
    validation_share: float = Field(0.05, gt=0, lt=1, description="of the files")
    objective: Literal["next_token", "span_corruption"] = Field(
        "next_token", description="span_corruption: an encoder reads a text with hidden spans, a decoder writes the hidden tokens (T5)"
    )

    @property
    def is_own(self) -> bool:
        """True if a user's program gives the samples."""
        return self.source == "given" or is_plugin(self.source)

    @property
    def name(self) -> str:
        """Name of the text, for reports: its path, its sources' paths, or its source."""
        return self.path or ", ".join(source.path for source in self.sources) or self.source


class Kfac(Section):
    """Settings of K-FAC: how its factors are estimated and damped."""

    damping: float = Field(0.3, gt=0, le=1e6, description="its square root is added to each factor, scaled to mean eigenvalue 1")
    ema: float = Field(0.5, ge=0, lt=1, description="share of the old factors that is kept at a refresh")
    refresh_every: int = Field(5, gt=0, description="steps from one update of factors to the next; inverses are stale between")
    delay: int = Field(0, ge=0, description="steps until new inverses are used, so that pipeline bubbles can compute them")
    experts: bool = Field(True, description="false: experts' matrices take AdamW's steps")


class Muon(Section):
    """Settings of Muon, for matrices; embedding, head, router, gates and norms take AdamW's steps."""

    momentum: float = Field(0.95, ge=0, lt=1)
    nesterov: bool = True
    iterations: int = Field(5, gt=0, le=100, description="of Newton-Schulz")
    scale: Literal["rms", "spectral"] = Field("rms", description="rms: steps as large as AdamW's; spectral: sqrt(max(1, out / in))")
    lr_factor: float = Field(1.0, gt=0, le=1e6, description="factor on optimizer.lr for matrices")


class Adafactor(Section):
    """Settings of Adafactor."""

    decay_rate: float = Field(0.8, gt=0, le=1, description="squares are averaged with the weight t^-decay_rate of the newest")
    clip: float | None = Field(1.0, gt=0, description="largest root mean square of a matrix's step; null: none")
    step: Literal["relative", "absolute"] = Field("relative", description="relative: times the root mean square of the weights")
    floor: float = Field(1e-3, gt=0, description="of that root mean square")
    eps: float = Field(1e-30, ge=1e-38, description="added to squares, which may all be 0")


class Sgd(Section):
    """Settings of SGD."""

    momentum: float = Field(0.9, ge=0, lt=1)
    nesterov: bool = False


class Optimizer(Section):
    """The optimizer, its learning rate and its weight decay. No weight decay on norms, biases and the router."""

    kind: Literal["adamw", "kfac", "muon", "adafactor", "sgd", "given"] | Plugin = Field(
        "adamw",
        description="kfac: K-FAC's direction with AdamW's length; muon: orthogonal steps of matrices; given: from Python",
    )
    lr: float = Field(1e-3, gt=0, le=1e3)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0, le=1)
    weight_decay: float = Field(0.1, ge=0, le=1e3)
    warmup_steps: int = Field(50, ge=0)
    schedule: Literal["cosine", "wsd", "constant", "linear", "inverse_sqrt"] | Plugin = "cosine"
    decay_share: float = Field(0.2, gt=0, le=1, description="wsd: the last share of the steps, where the rate falls")
    min_lr_share: float = Field(0.1, ge=0, le=1)
    clip_norm: float | None = Field(1.0, ge=1e-8)
    kfac: Kfac = Kfac()
    muon: Muon = Muon()
    adafactor: Adafactor = Adafactor()
    sgd: Sgd = Sgd()

    @property
    def is_own(self) -> bool:
        """True if a user's program gives the optimizer."""
        return self.kind == "given" or is_plugin(self.kind)


class Lora(Section):
    """LoRA adapters: two narrow matrices for each frozen one. The frozen weights are loaded from another run (--init_from)."""

    rank: int = Field(0, ge=0, le=100_000, description="W + alpha / rank B A replaces W; 0: no adapters, all weights are trained")
    alpha: float = Field(16.0, gt=0, le=1e6)
    targets: Annotated[tuple[Literal["attention", "experts", "dense"], ...], OneOrMore] = Field(
        ("attention",), description="modules that get adapters; dense: networks that are no experts, shared and residual ones too"
    )

    @property
    def scale(self) -> float:
        return self.alpha / self.rank if self.rank else 0.0


class Train(Section):
    steps: int = Field(300, gt=0)
    global_batch: int = Field(32, gt=0, description="sequences in one step, over all ranks and micro-batches")
    eval_every: int = Field(100, ge=0, description="steps; 0: only at the end")
    eval_sequences: int = Field(64, gt=0)
    save_every: int = Field(100, ge=0, description="steps; 0: only at the end")
    keep: int = Field(2, gt=0, description="newest checkpoints kept")
    save_mode: Literal["sync", "async"] = Field("sync", description="async: steps continue while a copy in host memory is written")
    grace_s: float = Field(600.0, ge=1, le=86_400, description="seconds that ranks have after a signal to end their step and save")
    timeout_s: float | None = Field(
        None, ge=1, le=86_400, description="seconds that a rank waits for others before the run ends on all ranks; null: gloo 120, NCCL 600"
    )
    seed: int = Field(0, ge=0)
    audit_every: int = Field(
        0, ge=0, description="steps between audits, which compute a step twice and compare copies, to find silent corruption; 0: never"
    )
    compile: bool = Field(False, description="torch's compiler makes kernels for norms, activations and the loss in the first step")
    deterministic: bool = Field(False, description="the same run twice gives the same bits, or says what cannot")
    on_nan: Literal["skip", "stop"] = Field("skip", description="reaction to a gradient that is not finite")
    max_skips: int = Field(20, gt=0, description="skipped steps in a row before the run stops (dynamic loss scale: at its floor)")
    sample_tokens: int = Field(160, ge=0, le=10_000, description="tokens of a text that the model writes after the last step; 0: none")
    measure_speed: bool = Field(
        True, description="after the last step: time plain matrix products, to report the run's share of their speed"
    )
    report: bool = Field(True, description="after the last step: pictures and page; false: moe report makes them")
    trackers: Annotated[tuple[Literal["wandb", "trackio", "mlflow"], ...], OneOrMore] = Field((), description="in addition to TensorBoard")
