"""Sections of a recipe that describe data, optimizer, adapters and the training loop."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from moe.recipe.plugin import Plugin, is_plugin
from moe.recipe.section import OneOrMore, Section, TokenizerFile, key


class Source(Section):
    """One of several sources of text."""

    path: str
    weight: float = Field(gt=0, lt=1e18, description="share of the sequences, relative to the sum of all sources' weights")
    text_key: str | None = Field(None, description="field or column with the text, or a chat's messages; null: data.text_key")
    encoding: str | None = Field(None, description="encoding of this source's text, JSONL and CSV files; null: data.encoding")


class Data(Section, alters="training"):
    source: Literal["python_stdlib", "text", "jsonl", "chat", "given"] | Plugin = key(
        "python_stdlib",
        "python_stdlib: Python's source code, or data.path read by its content; text, jsonl, chat: files of data.path; chat predicts "
        "only assistant messages or ids with labels; given: from train(run, data=...)",
    )
    path: str | None = key(None, "a file or folder of text, JSONL, CSV, Parquet or Arrow, also as .gz or .zst; with tokenizer ids: *.bin")
    sources: tuple[Source, ...] = key((), "several sources instead of path, each {path, weight}, optionally with text_key and encoding")
    text_key: str = key("text", "field of a JSONL line, or column of a table, that has the text; for chat: the messages")
    encoding: str = key("utf-8", "encoding of text, JSONL and CSV, such as windows-1252 or utf-16")
    chat_template: str | None = key(None, "a Jinja file; null: the model's own chat template", of="data.source=chat")
    packing: bool = key(False, "several chats share a sequence; a token attends only to tokens of its chat", of="data.source=chat")
    tokenizer: Literal["bytes", "bpe", "ids"] | TokenizerFile = key(
        "bytes",
        "bytes: 256 ids; bpe: trained on the data; ids: the data are token ids; FILE.json: a tokenizer.json, with vocab_size ids",
        alters="function",
    )
    vocab_size: int = key(4096, "number of token ids; bpe: above 256", gt=0, alters="function", off_without="data.tokenizer=bpe|ids|*.json")
    validation_share: float = key(0.05, "share of the data that is held out for validation", gt=0, lt=1)
    objective: Literal["next_token", "span_corruption"] = key(
        "next_token", "span_corruption: an encoder reads a text with hidden spans, a decoder writes the hidden tokens (T5)"
    )

    @property
    def is_own(self) -> bool:
        """Whether a user's program or plugin gives the samples."""
        return self.source == "given" or is_plugin(self.source)

    @property
    def tokenizer_file(self) -> str | None:
        """Path of the tokenizer.json, if the recipe names one."""
        return self.tokenizer if self.tokenizer.endswith(".json") else None

    def each(self) -> list[tuple[Data, str]]:
        """Return, for each source, (this section with only this source, name of its text_key in messages). Without sources, return this
        section and "data.text_key"."""
        found = []
        for source in self.sources:
            own = {"text_key": source.text_key or self.text_key, "encoding": source.encoding or self.encoding}
            one = self.model_copy(update={"path": source.path, "sources": ()} | own)
            found.append((one, f"text_key of {source.path} in data.sources"))
        return found or [(self, "data.text_key")]

    @property
    def name(self) -> str:
        """Name of the text in reports: its path, its sources' paths, or data.source."""
        return self.path or ", ".join(source.path for source in self.sources) or self.source


class Kfac(Section, alters="training", of="optimizer.kind=kfac"):
    """Settings of K-FAC: how its factors (covariances of inputs and of gradients) are estimated and damped."""

    damping: float = key(0.3, "eigenvalues of each covariance are scaled to mean 1; then sqrt(damping) is added", gt=0, le=1e6)
    ema: float = key(0.5, "weight of old covariances in the moving average at a refresh", ge=0, lt=1)
    refresh_every: int = key(5, "steps between refreshes of covariances and their inverses", gt=0)
    delay: int = key(0, "steps between a refresh and the use of its inverses, which can be computed in pipeline bubbles meanwhile", ge=0)
    experts: bool = key(True, "false: AdamW updates the experts' matrices")


class Muon(Section, alters="training", of="optimizer.kind=muon", gone={"nesterov": True, "iterations": 5}):
    """Settings of Muon, which updates matrices. AdamW updates the embedding, head, router, gates and norms."""

    momentum: float = key(0.95, "decay rate of the momentum", ge=0, lt=1)
    scale: Literal["rms", "spectral"] = key("rms", "factor on updates; rms: updates as large as AdamW's; spectral: sqrt(max(1, out / in))")
    lr_factor: float = key(1.0, "factor on optimizer.lr for matrices", gt=0, le=1e6)


_GONE_OF_ADAFACTOR = {"decay_rate": 0.8, "clip": 1.0, "floor": 1e-3, "eps": 1e-30}


class Adafactor(Section, alters="training", of="optimizer.kind=adafactor", gone=_GONE_OF_ADAFACTOR):
    """Settings of Adafactor, which stores row and column means of squared gradients instead of two moments."""

    step: Literal["relative", "absolute"] = key("relative", "relative: the update is multiplied by the root mean square of the weights")


class Sgd(Section, alters="training", of="optimizer.kind=sgd", gone={"nesterov": False}):
    """Settings of SGD with momentum."""

    momentum: float = key(0.9, "decay rate of the momentum", ge=0, lt=1)


class Optimizer(Section, alters="training"):
    """The optimizer, its learning rate and its weight decay. Norms, biases and the router have no weight decay."""

    kind: Literal["adamw", "kfac", "muon", "adafactor", "sgd", "given"] | Plugin = key(
        "adamw", "kfac: K-FAC's direction, AdamW's length; muon: orthogonalized updates of matrices; given: from train(run, optimizer=...)"
    )
    lr: float = key(1e-3, "highest learning rate, after the warm-up", gt=0, le=1e3)
    beta1: float = key(0.9, "decay rate of AdamW's first moment", ge=0, lt=1, off_without="optimizer.kind=adamw|kfac|muon")
    beta2: float = key(0.95, "decay rate of AdamW's second moment", ge=0, lt=1, off_without="optimizer.kind=adamw|kfac|muon")
    eps: float = key(1e-8, "added to AdamW's denominator", gt=0, le=1, off_without="optimizer.kind=adamw|kfac|muon")
    weight_decay: float = key(0.1, "decoupled weight decay; none on norms, biases and router", ge=0, le=1e3)
    warmup_steps: int = key(50, "first steps, in which the learning rate rises linearly", ge=0)
    schedule: Literal["cosine", "wsd", "constant", "linear", "inverse_sqrt"] | Plugin = key(
        "cosine", "learning rate after the warm-up; wsd: constant, then a linear fall; inverse_sqrt: lr sqrt(warmup_steps / step)"
    )
    decay_share: float = key(
        0.2, "share of the steps, at the end, in which the learning rate falls", gt=0, le=1, off_without="optimizer.schedule=wsd"
    )
    min_lr_share: float = key(0.1, "final learning rate / lr", ge=0, le=1, off_without="optimizer.schedule=cosine|wsd|linear")
    clip_norm: float | None = key(1.0, "gradients are scaled down to this norm if it is larger; null: no clipping", ge=1e-8)
    kfac: Kfac = Kfac()
    muon: Muon = Muon()
    adafactor: Adafactor = Adafactor()
    sgd: Sgd = Sgd()

    @property
    def is_own(self) -> bool:
        """Whether a user's program or plugin gives the optimizer."""
        return self.kind == "given" or is_plugin(self.kind)

    @property
    def of_matrices(self) -> bool:
        """Whether the optimizer needs each parameter, or its shard, as a matrix: it cannot step flat ranges of elements."""
        return self.kind in ("muon", "adafactor", "sgd") or self.is_own


class Lora(Section, alters="shape"):
    """LoRA adapters: two narrow matrices, which are trained, for each frozen one. Frozen weights come from another run (--init_from)."""

    rank: int = key(0, "rank of B A in W + (alpha / rank) B A, which replaces W; 0: no adapters, all weights are trained", ge=0, le=100_000)
    alpha: float = key(16.0, "numerator of the adapters' factor alpha / rank", gt=0, le=1e6, alters="function", of="lora.rank")
    targets: Annotated[tuple[Literal["attention", "experts", "dense"], ...], OneOrMore] = key(
        ("attention",), "modules that get adapters; dense: dense layers' networks, shared experts and residual networks", of="lora.rank"
    )

    base: Literal["whole", "mxfp4", "fp8", "fp8_all"] = key(
        "whole",
        "format of frozen experts; whole: master dtype; mxfp4, fp8: quantized blocks; fp8_all: fp8, also of attention and dense networks",
        alters="cost",
        of="lora.rank",
    )

    @property
    def in_blocks(self) -> Literal["mxfp4", "fp8"] | None:
        """Format of the frozen matrices that are kept in quantized blocks (`blocks_of`); None if there are none."""
        return None if not self.blocks_of else "mxfp4" if self.base == "mxfp4" else "fp8"

    @property
    def blocks_of(self) -> tuple[Literal["attention", "experts", "dense"], ...]:
        """Modules with frozen matrices in quantized blocks of MXFP4 or FP8: attention, experts, dense."""
        if not self.rank or self.base == "whole":
            return ()
        return ("attention", "experts", "dense") if self.base == "fp8_all" else ("experts",)

    @property
    def scale(self) -> float:
        return self.alpha / self.rank if self.rank else 0.0


class Train(Section, alters="cost"):
    steps: int = key(300, "training steps, skipped ones included", gt=0, alters="training", off_without="train.epochs=null")
    epochs: float | None = key(None, "passes over the training data instead of train.steps", gt=0, le=1e6, alters="training")
    global_batch: int = key(32, "sequences in one step, over all ranks and micro-batches", gt=0, alters="training")
    loss: Literal["cross_entropy"] | Plugin = key(
        "cross_entropy", "a plugin gets the log-probabilities and returns a loss for each sequence", alters="training"
    )
    freeze: Annotated[tuple[str, ...], OneOrMore] = key(
        (), "weights that are not trained: embedding, head, attention, dense, experts, router, norms, layers.0-3", alters="training"
    )
    eval_every: int = key(100, "steps between evaluations; 0: only after the last step", ge=0)
    eval_sequences: int = key(64, "held-out sequences in each evaluation", gt=0)
    save_every: int = key(100, "steps between checkpoints; 0: only after the last step", ge=0)
    keep: int = key(2, "newest checkpoints that are not deleted", gt=0)
    save_mode: Literal["sync", "async"] = key("sync", "async: training continues while a checkpoint is written from a copy in host memory")
    grace_s: float = key(600.0, "seconds that ranks have after a signal to end their step and save", ge=1, le=86_400)
    timeout_s: float | None = key(
        None, "seconds that a rank waits for others before the run ends; null: gloo 120, NCCL 600", ge=1, le=86_400
    )
    seed: int = key(0, "seed of initial weights, order of data, dropout and noise", ge=0, alters="training")
    audit_every: int = key(
        0, "steps between audits for silent corruption: a step is computed twice, ranks' copies are compared; 0: never", ge=0
    )
    compile: bool = key(False, "torch's compiler makes kernels for norms, activations and the loss in the first step")
    deterministic: bool = key(False, "two runs give the same bits; an operation that cannot do this raises an error")
    on_nan: Literal["skip", "stop"] = key("skip", "at gradients that are not finite; skip: no update; stop: end the run", alters="training")
    max_skips: int = key(
        20, "skipped steps in a row after which the run stops; not read with a dynamic loss scale", gt=0, alters="training"
    )
    sample_tokens: int = key(160, "tokens that a decoder generates as a sample after the last step; 0: none", ge=0, le=10_000)
    measure_speed: bool = key(True, "after the last step, time matrix products alone, to report the run's FLOP/s as a share of theirs")
    report: bool = key(True, "draw pictures and the HTML page after the last step; moe report can draw them later")
    trackers: Annotated[tuple[Literal["wandb", "trackio", "mlflow"], ...], OneOrMore] = key(
        (), "services to which metrics are sent, in addition to the run's folder"
    )

    @property
    def has_own_loss(self) -> bool:
        """Whether the loss is a user's function."""
        return is_plugin(self.loss)
