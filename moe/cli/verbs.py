"""The verbs of `moe`: one frozen dataclass each, from which tyro makes values, help and shell completion.

A field without a default is a word after the verb; a field marked as a word is an optional word; the others are flags. For completion,
`train` and `show` also get every section of a recipe as a field, so that a shell knows each dotted key and its choices.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

RECIPE_VERBS = ("train", "show", "plan", "convert", "rehearse", "simulate", "energy", "eval", "hash-table")


def _word(help: str) -> Any:
    return dataclasses.field(metadata={"help": help})


def _word_or_none(help: str) -> Any:
    return dataclasses.field(default=None, metadata={"help": help, "word": True})


def is_word(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING or bool(field.metadata.get("word"))


def _flag(default: Any, help: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": help})


@dataclasses.dataclass(frozen=True)
class Train:
    """Train a recipe; continues from the newest checkpoint in its run folder."""

    recipe: str = _word("a name (see: moe recipes) or a YAML file")
    nproc: int | None = _flag(None, "processes on this machine, 1 by default; with --hostfile: on each host, its slots by default")
    launcher: Literal["deepspeed", "torchrun"] | None = _flag(
        None, "what starts them; deepspeed by default, and nothing is needed for one process"
    )
    out: Path | None = _flag(None, "run folder; runs/RECIPE by default")
    fresh: bool = _flag(False, "set earlier checkpoints aside and start over")
    from_step: int | None = _flag(
        None, "go on from the checkpoint of this step instead of the newest; later ones are set aside, not deleted"
    )
    allow_change: tuple[str, ...] = _flag((), "a key, such as model.num_heads, that may change what the resumed model computes; repeatable")
    init_from: Path | None = _flag(None, "a run, one of its checkpoints, or hf:PATH, with whose weights and tokenizer a new run begins")
    hostfile: Path | None = _flag(None, "several machines: one `host slots=N` a line")
    restarts: int | None = _flag(
        None, "start a run whose ranks died again from its newest checkpoint: so often in a row without a new one; 0 by default"
    )
    elastic: int | None = _flag(
        None, "with --restarts: where that does not help, go on with fewer processes at the same global batch, so many at least"
    )
    dry_run: bool = _flag(False, "say what the run would need, memory by part, FLOPs and seconds a step, and start and write nothing")
    cluster: str | None = _flag(None, "what predicts memory and time, as in moe plan; with --dry_run all its devices train")
    force: bool = _flag(False, "start what is predicted not to fit all the same")
    profile: bool = _flag(False, "record three steps: a trace for ui.perfetto.dev, and a table of where their time goes")
    debug_collectives: bool = _flag(False, "compare every collective over its ranks before it runs: an error instead of a hang")


@dataclasses.dataclass(frozen=True)
class Verify:
    """Compare every legal layout of a tiny model with one process: losses, gradients, weights; exit code 1 if one differs."""

    nproc: int = _flag(2, "layouts of up to so many processes")
    json: Path | None = _flag(None, "also write the table as JSON")
    kinds: str = _flag(
        "data,expert,tensor,sequence,pipeline,hybrid",
        "data: engines, precisions; expert: routers, ways that rows travel; tensor: tp; sequence: sp; pipeline: schedules; "
        "hybrid: all together, with --nproc 8",
    )
    only: str | None = _flag(None, "only layouts whose name holds this text")
    recipe: str | None = _flag(None, "a recipe of your own, made small, with the parts that it names; runs their code")
    timeout_s: float | None = _flag(None, "seconds for a layout of up to 4 processes, 120 if not given: a busy machine needs more")
    go_on: bool = _flag(False, "keep the rows that passed in the file of --json, as an interrupted run left it, and run the others")
    debug_collectives: bool = _flag(False, "compare every collective over its ranks before it runs: an error instead of a hang")


@dataclasses.dataclass(frozen=True)
class Generate:
    """Continue a text with a trained model."""

    run_dir: str = _word("a run's folder, such as runs/switch_tiny")
    prompt: str | None = _flag(None, "the text to continue")
    prompt_file: Path | None = _flag(None, 'many: one a line, or in a .jsonl file one {"prompt": TEXT} a line')
    tokens: int | None = _flag(None, "how many tokens to add, at most: a separator ends a text")
    samples: int | None = _flag(None, "continuations of each prompt")
    temperature: float | None = _flag(None, "0 takes the likeliest token each time")
    top_k: int | None = _flag(None, "choose among so many likeliest tokens")
    top_p: float | None = _flag(None, "choose among the likeliest tokens that have this probability together")
    seed: int | None = _flag(None, "of the random choices")
    step: int | None = _flag(None, "of the checkpoint; the newest if not given")
    json: Path | None = _flag(None, "also write the texts as JSON")


@dataclasses.dataclass(frozen=True)
class Eval:
    """A trained model's loss, bits per byte, expert load and drops on the run's validation text, or on another (--data.path)."""

    run_dir: str = _word("a run's folder, such as runs/switch_tiny")
    sequences: int | None = _flag(None, "how many, spread evenly over the text, 512 by default; 0: all")
    step: int | None = _flag(None, "of the checkpoint; the newest if not given")
    json: Path | None = _flag(None, "also write the figures as JSON")


@dataclasses.dataclass(frozen=True)
class Report:
    """Draw a run's curves, expert load, drops and memory: PNG files and one HTML page. Of two runs: what differs, and what came of it."""

    run_dir: str = _word("a run's folder, such as runs/switch_tiny")
    other: str | None = _word_or_none("another run's folder: compare the two")
    json: Path | None = _flag(None, "also list the files as JSON")


@dataclasses.dataclass(frozen=True)
class Bench:
    """Run a measurement."""

    name: str = _word("of the measurement")
    steps: int | None = _flag(None, "training steps, where it trains")
    seeds: int | None = _flag(None, "repetitions with another seed")
    out: Path | None = _flag(None, "folder of the runs it trains")
    nproc: int | None = _flag(None, "processes, where it runs on several")
    peers: str | None = _flag(None, "all, none, or names with commas between")
    only: str | None = _flag(None, "only rows whose text holds this, such as bf16 or E64; where a measurement has named parts, only those")
    kinds: str | None = _flag(
        None,
        "of data parallelism, with commas between: ddp, zero1, zero2+cpu, ...; comm, memory: or sequence, tensor; "
        "pipeline, kfac: schedules",
    )
    full: bool = _flag(False, "as often, or as much, as the aims say; by default each once")
    rounds: int | None = _flag(None, "how often each is timed, in turn with the others, or tried")
    tables: Path | None = _flag(None, "of planner: a folder of measured runs")
    json: Path | None = _flag(None, "also write the table as JSON")


@dataclasses.dataclass(frozen=True)
class Plan:
    """Choose how a recipe is trained on a cluster, by predicted memory and time, without a device; say why the others were not chosen."""

    recipe: str | None = _word_or_none("a name (see: moe recipes) or a YAML file; needed but with --calibrate")
    calibrate: bool = _flag(False, "instead: measure this machine and write it as a cluster file, --out F.yaml or the user's machine.yaml")
    nproc: int | None = _flag(None, "with --calibrate: collectives of up to so many processes, the number of cores by default")
    cluster: str | None = _flag(None, "a shipped cluster, as h100-8 or h100-8x4 for 4 nodes, or a YAML file; needed")
    top: int = _flag(10, "plans to print")
    exhaustive: bool = _flag(False, "try every choice for every way to cut the ranks, not only for the fastest ways")
    as_is: bool = _flag(False, "try nothing: the recipe's own plan, with its seconds and bytes, whether it fits or not")
    search: Literal["enumerate", "alpa", "flexflow", "mesh-tf", "gspmd"] = _flag(
        "enumerate", "try all plans; or search on the graph of the recipe's operators"
    )
    explain: bool = _flag(False, "first walk through the guide that chooses a strategy, with this recipe's numbers")
    order: Path | None = _flag(None, "also search an order of actions for the best plan's stages, and write it, *.csv, if it is faster")
    out: Path | None = _flag(None, "also write the best plan as a recipe, *.yaml")
    pictures: Path | None = _flag(None, "also draw the best plan into this folder: its pipeline over time, and what each rank holds")
    json: Path | None = _flag(None, "also write what was chosen, ranked and refused as JSON")


@dataclasses.dataclass(frozen=True)
class Simulate:
    """Draw a pipeline schedule and count its bubbles, activations and weight versions; without a name, print a table of all schedules."""

    name: str | None = _word_or_none("a schedule, such as 1f1b or chimera, or a CSV file of actions")
    recipe: str | None = _flag(None, "a name (see: moe recipes) or a YAML file, whose model then decides times and memory")
    stages: int | None = _flag(None, "ranks of the pipeline; 4 by default, or the recipe's degrees.pp")
    microbatches: int | None = _flag(None, "to a batch; 8 by default, or the recipe's")
    chunks: int | None = _flag(None, "stages a rank, where the schedule has a choice: 2 by default")
    batches: int | None = _flag(None, "one after the other; 1 by default, for two_bw 2")
    vertical_sync: Literal["on", "off"] | None = _flag(
        None, "of pipedream: every stage reads the version that the first reads; off by default"
    )
    pipelines: int | None = _flag(None, "of chimera: half of them down, half up; 2 by default")
    placement: Literal["line", "loop", "v"] | None = _flag(
        None, "of search: stages on ranks, one each (default), as interleaved has them (--chunks), or as zb_v has them"
    )
    memory: float | None = _flag(None, "of search: the most that a rank may keep, in micro-batches of all its layers; no limit by default")
    tflops: float | None = _flag(None, "with --recipe: what a rank reaches; 140 by default, an A100 in 16 bits")
    link_gb_s: float | None = _flag(None, "with --recipe: from a rank to another, each way; 25 by default, 200 Gbit/s")
    forward_time: str | None = _flag(
        None, "of one micro-batch through the layers of a rank, 1 by default; or one for each stage, with commas"
    )
    backward_time: str | None = _flag(None, "likewise; 2 by default")
    weight_share: float | None = _flag(None, "of the backward time: the weights' gradient, where it is split; 0.5 by default")
    transfer_time: float | None = _flag(None, "from a rank to the next; 0 by default")
    overlap: Literal["on", "off"] | None = _flag(None, "whether ranks compute while they send; on by default")
    out: Path | None = _flag(None, "also write .png, .csv (the actions), .txt, or .json (a trace for chrome://tracing or Perfetto)")
    json: Path | None = _flag(None, "also write the table as JSON")


@dataclasses.dataclass(frozen=True)
class Energy:
    """Plan a clock for every action of a pipeline step, so that slower actions only use up waiting time (EnvPipe), and what that saves."""

    name: str | None = _word_or_none("a schedule or a CSV file of actions; 1f1b by default, with forwards pulled ahead")
    profile: Path | None = _flag(None, "JSON: seconds and joules of each stage's F and B at each clock; else a power model is assumed")
    recipe: str | None = _flag(None, "a name (see: moe recipes) or a YAML file, whose model then decides times")
    stages: int | None = _flag(None, "ranks of the pipeline; 4 by default, or the recipe's or the profile's")
    microbatches: int | None = _flag(None, "to a batch; 8 by default, or the recipe's")
    chunks: int | None = _flag(None, "stages a rank, where the schedule has a choice: 2 by default")
    slowdown: float | None = _flag(None, "how much longer the step may be, as a share: 0 by default")
    ahead: int | None = _flag(None, "of 1f1b: most forwards a rank has memory to pull ahead; as many as help by default")
    forward_time: str | None = _flag(None, "seconds at full clock, 0.01 by default; or one for each stage, with commas")
    backward_time: str | None = _flag(None, "likewise; 0.02 by default")
    transfer_time: float | None = _flag(None, "seconds from a rank to the next; 0 by default")
    tflops: float | None = _flag(None, "with --recipe: what a rank reaches at full clock; 140 by default")
    link_gb_s: float | None = _flag(None, "with --recipe: from a rank to another, each way; 25 by default")
    apply: bool = _flag(False, "set the plan's clocks on this machine's GPUs, one a rank, for --steps steps, and give them back: as root")
    steps: int | None = _flag(None, "with --apply; 1 by default")
    out: Path | None = _flag(None, "also write .json (the plan) or .png")
    json: Path | None = _flag(None, "also write the table as JSON")


@dataclasses.dataclass(frozen=True)
class Convert:
    """Convert a checkpoint of one model into one of another: dense layers to experts, or experts to fewer or to dense; or a model of
    Hugging Face's transformers into a run (hf:PATH RUN) and back (RUN hf:PATH)."""

    from_run: str = _word("a run's folder, or one checkpoint in it; or hf:PATH, a folder with config.json and *.safetensors")
    to_run: str = _word("a new run's folder, from which moe train goes on; or hf:PATH, a new folder for transformers")
    to: str | None = _flag(None, "recipe of the new model: a name (see: moe recipes) or a YAML file; needed but with hf:PATH")
    method: Literal["copy", "granular", "noise", "drop", "merge", "prune"] | None = _flag(
        None, "dense to experts: copy (default), granular, noise, drop; experts to fewer: merge, prune"
    )
    share: float | None = _flag(None, "noise: share of the weights; drop: share of the hidden units; 0.5 by default")
    scale: float | None = _flag(None, "noise: its size in standard deviations of a matrix; 0.01 by default")
    weights: Literal["uniform", "load"] | None = _flag(None, "merge: what experts count by; uniform by default")
    load: Path | None = _flag(None, "prune, or merge by load: a run's folder, its metrics.jsonl, or JSON; the source's own by default")
    moments: Literal["fresh", "copy"] | None = _flag(None, "copy: the optimizer's moments and counters go along; fresh by default")
    approximate: bool = _flag(False, "accept gates that do not sum to a constant, so that outputs differ from the source's")
    check: bool = _flag(False, "run both models on random tokens and print how far they are apart")
    dtype: Literal["fp32", "bf16", "fp16"] | None = _flag(
        None, "RUN hf:PATH: of the weights that are written; by default the dtype that they came in, or that the run has"
    )
    json: Path | None = _flag(None, "also write what was done as JSON")


@dataclasses.dataclass(frozen=True)
class HashTable:
    """Make a table for router.hash_table: each token id's experts, so that all get about as many of the recipe's training tokens."""

    recipe: str = _word("a name (see: moe recipes) or a YAML file: its text, vocabulary, experts and choices")
    out: Path = _word("a new file, *.json")


@dataclasses.dataclass(frozen=True)
class Show:
    """Print a recipe merged with its parents, each value with its origin; or its plan, which part of each parameter a rank holds."""

    recipe: str | None = _word_or_none("a name (see: moe recipes) or a YAML file; needed but with --keys")
    keys: str | None = _flag(None, "instead: the keys of a section, as model or model.rope, or of all, each with its choices and meaning")
    plan: bool = _flag(False, "instead: parameters by path, their style, whole shape and the part held here, and its bytes")
    nproc: int | None = _flag(None, "with --plan: of so many processes, 1 by default")
    rank: int | None = _flag(None, "with --plan: as this rank holds it, 0 by default")
    json: Path | None = _flag(None, "also write keys, values and origins, or the plan's rows, as JSON")


@dataclasses.dataclass(frozen=True)
class Combinations:
    """Print what goes with what: which kinds run together, which are not recommended and which are refused, each with its reason."""

    out: Path | None = _flag(None, "write the page (Markdown) there instead")
    json: Path | None = _flag(None, "also write a row for each pair as JSON")


@dataclasses.dataclass(frozen=True)
class Rehearse:
    """Walk one rank of a world that is not there through build, steps and a save: devices, shapes, memory, collectives; without a GPU."""

    recipe: str = _word("a name (see: moe recipes) or a YAML file")
    world: int | None = _flag(None, "of so many ranks; needed")
    rank: int | None = _flag(None, "as this rank; 0 by default")
    device: str | None = _flag(None, "cpu (default), or cuda as if there were a GPU")
    json: Path | None = _flag(None, "also write the table as JSON")


@dataclasses.dataclass(frozen=True)
class Recipes:
    """List the recipes by name, with their parameters: all, and those that a token uses."""


@dataclasses.dataclass(frozen=True)
class Doctor:
    """Check this machine: versions, devices, speed, communication, ports, disk, compilers. Or read what a run that hung left behind."""

    trace: Path | None = _flag(None, "instead: a folder of torch's flight recorder traces; which ranks did the others wait for?")
    json: Path | None = _flag(None, "also write the table as JSON")


VERBS: dict[str, type] = {
    "train": Train,
    "verify": Verify,
    "generate": Generate,
    "eval": Eval,
    "report": Report,
    "bench": Bench,
    "plan": Plan,
    "simulate": Simulate,
    "energy": Energy,
    "convert": Convert,
    "hash-table": HashTable,
    "show": Show,
    "combinations": Combinations,
    "rehearse": Rehearse,
    "recipes": Recipes,
    "doctor": Doctor,
}
