"""The verbs of `moe`, one frozen dataclass each. flags.py fills them from a command line; tyro makes help and shell completion from them.

A field made by `_word` is a positional word after the verb. With the default None, the word is optional; with the default (), this last
field takes all further words. Fields made by `_flag` are flags.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, Literal

# keys of section `degrees` that `moe simulate` and `moe energy` ignore, because they treat each pipeline rank as one device
NOT_SIMULATED = ("tp", "sp", "etp")
# verbs with a command line that may set recipe keys, as --section.key VALUE
RECIPE_VERBS = ("train", "show", "plan", "convert", "rehearse", "simulate", "energy", "eval", "hash-table")


def _word(help: str, default: Any = dataclasses.MISSING) -> Any:
    return dataclasses.field(default=default, metadata={"help": help, "word": True})


def _flag(help: str, default: Any = None) -> Any:
    return dataclasses.field(default=default, metadata={"help": help, "word": False})


@dataclasses.dataclass(frozen=True)
class Train:
    """Train a recipe; continue from the newest checkpoint in the run folder, if there is one."""

    recipe: str = _word("a name (see: moe recipes), a YAML file or hf:PATH (a Hugging Face model)")
    nproc: int | None = _flag("processes on this machine, 1 by default; with --hostfile: on each host, by default the N of its slots=N")
    launcher: Literal["deepspeed", "torchrun"] | None = _flag(
        "program that starts the processes; by default deepspeed, or none for one process without --restarts and --hostfile"
    )
    out: Path | None = _flag("run folder; runs/RECIPE by default")
    fresh: bool = _flag("start over; earlier checkpoints are renamed, not deleted", False)
    from_step: int | None = _flag("resume from the checkpoint of this step instead of the newest; later ones are moved away, not deleted")
    allow_change: tuple[str, ...] = _flag(
        "recipe key whose value may differ from the checkpoint's, although this changes results; repeatable", ()
    )
    init_from: Path | None = _flag(
        "begin a new run with the weights and tokenizer of this run folder or checkpoint, or of a Hugging Face model (hf:PATH)"
    )
    hostfile: Path | None = _flag("file with a line `HOST slots=N` for each machine")
    restarts: int | None = _flag(
        "if ranks die, restart from the newest checkpoint; give up after N restarts without a new checkpoint; 0 by default"
    )
    elastic: int | None = _flag(
        "with --restarts: instead of giving up, continue with fewer processes, at least N, and with the same global batch"
    )
    dry_run: bool = _flag("print the predicted memory, FLOPs and seconds per step; start nothing and write nothing", False)
    cluster: str | None = _flag(
        "predict memory and time for this cluster (see moe plan), not this machine; --dry_run: for all its devices by default"
    )
    force: bool = _flag("start even if the predicted memory exceeds the available memory", False)
    profile: bool = _flag(
        "record steps 3 to 5 of this process: a trace for ui.perfetto.dev, and a table of times by part of the code",
        False,
    )
    debug_collectives: bool = _flag("before each collective, compare its arguments across ranks: an error instead of a hang", False)


@dataclasses.dataclass(frozen=True)
class Verify:
    """Train a tiny model in all legal parallel layouts, and compare losses, gradients and weights with one process; exit code 1 if any
    differ. --compare ONE MANY: compare two recorded steps of any PyTorch program. --peer NAME: compare another project's layouts."""

    many: str | None = _word("with --compare ONE: folder with the record (moe.verify.record) of the same step on several ranks", None)
    compare: str | None = _flag("folder ONE with the record of a step of your own program on one process: print how MANY differs from it")
    peer: str | None = _flag(
        "compare another project's step on several ranks with one rank: transformers, deepspeed, torch, torchtitan or megatron_core"
    )
    model: str | None = _flag(
        "with --peer: comma-separated models of the project, by default all; transformers: by default five; others: all other MoE families"
    )
    ep: int | None = _flag(
        "with --peer: ranks of expert parallelism, 2 or 4; without --ep, --tp and --fsdp: 2 for each that the project supports"
    )
    tp: int | None = _flag("with --peer: ranks of tensor parallelism, 2 or 4")
    fsdp: int | None = _flag("with --peer: ranks of FSDP, 2 or 4")
    pin_routing: bool = _flag(
        "with --peer: each token gets the experts of the one-process step; in your own program: record(..., pin=ONE)", False
    )
    nproc: int | None = _flag("test layouts of up to N processes, 2 by default")
    json: Path | None = _flag("also write the table as JSON")
    device: str | None = _flag("cuda or cpu: start the processes on this device as moe train does; without it, fork them on the CPU")
    kinds: str = _flag(
        "comma-separated kinds of layouts: data (engines, precisions), expert (routers, dispatchers), tensor (tp), sequence (sp), "
        "pipeline (schedules), hybrid (combinations; needs --nproc 8)",
        "data,expert,tensor,sequence,pipeline,hybrid",
    )
    only: str | None = _flag("only rows with this text in layout, kind or precision; with --peer: in model or layout")
    recipe: str | None = _flag(
        "test your own recipe instead, at a small size, with the methods and plugins that it names; runs the plugins' code"
    )
    types: bool = _flag(
        "check instead, without a reference run, that values are replicated, varying or partial over ranks as the layout requires",
        False,
    )
    draws: int | None = _flag("test N random tiny recipes of up to --nproc processes instead")
    seed: str | None = _flag("seed of --draws, 0 by default: the same seed gives the same recipes")
    timeout_s: float | None = _flag(
        "time limit in seconds for a layout of up to 4 processes: 120 by default, 300 with --peer; set more on a busy machine"
    )
    go_on: bool = _flag("continue an interrupted run: keep the rows of the --json file that passed, and run the others", False)
    debug_collectives: bool = _flag("before each collective, compare its arguments across ranks: an error instead of a hang", False)


@dataclasses.dataclass(frozen=True)
class Generate:
    """Continue a text with a trained model."""

    run_dir: str = _word("a run's folder, such as runs/switch_tiny")
    prompt: str | None = _flag("the text to continue; by default the start of a Python function")
    prompt_file: Path | None = _flag('file with a prompt on each line; in a .jsonl file as {"prompt": TEXT}')
    chat: bool = _flag("format each prompt as a user's message by the model's chat template", False)
    tokens: int | None = _flag("maximum number of tokens to add, 200 by default; a separator token ends a text earlier")
    samples: int | None = _flag("number of continuations of each prompt, 1 by default")
    temperature: float | None = _flag("divides the logits before sampling, 0.8 by default; 0 always takes the most likely token")
    top_k: int | None = _flag("sample only from the K most likely tokens; default: all")
    top_p: float | None = _flag("sample only from the fewest most likely tokens with a total probability of at least P; default: all")
    seed: int | None = _flag("seed of the sampling, 0 by default")
    step: int | None = _flag("step of the checkpoint, by default the newest")
    json: Path | None = _flag("also write the texts as JSON")


@dataclasses.dataclass(frozen=True)
class Eval:
    """Evaluate a trained model on the run's validation text or another (--data.path): loss, bits per byte, expert load, dropped (token,
    expert) pairs."""

    run_dir: str = _word("a run's folder, such as runs/switch_tiny")
    sequences: int | None = _flag("number of sequences, spread evenly over the text; 512 by default, 0 for all")
    step: int | None = _flag("step of the checkpoint, by default the newest")
    json: Path | None = _flag("also write the figures as JSON")


@dataclasses.dataclass(frozen=True)
class Report:
    """Draw a run's curves, expert load, dropped (token, expert) pairs and memory: PNG files and one HTML page. Or compare two runs."""

    run_dir: str = _word("a run's folder, such as runs/switch_tiny")
    other: str | None = _word("another run's folder, to compare the two", None)
    json: Path | None = _flag("also write the list of files as JSON")


@dataclasses.dataclass(frozen=True)
class Bench:
    """Run a measurement."""

    name: str = _word("name of the measurement")
    steps: int | None = _flag("sparse-vs-dense: number of training steps of each run")
    seeds: int | None = _flag("sparse-vs-dense: number of runs of each model, each with another seed")
    out: Path | None = _flag("sparse-vs-dense: folder for the runs")
    nproc: int | None = _flag("number of processes, for measurements that run on several")
    peers: str | None = _flag("other systems to compare with: all, none, or comma-separated names")
    only: str | None = _flag(
        "dispatch: only rows with this text, or only the table growth or moves; memory: dense or sparse; "
        "sparse-vs-dense: recipes or experts; step: fp32 or bf16"
    )
    kinds: str | None = _flag(
        "memory: comma-separated kinds of data parallelism, such as ddp,zero2+cpu; pipeline: schedules, such as 1f1b,zb_v"
    )
    full: bool = _flag("memory: all cases, as in docs/benchmarks; by default fewer and smaller ones", False)
    rounds: int | None = _flag("number of times that each case is timed; the cases take turns")
    json: Path | None = _flag("also write the table as JSON")


@dataclasses.dataclass(frozen=True)
class Plan:
    """Choose how to train a recipe on a cluster by predicted memory and time, and say why other plans were not chosen. Needs no device."""

    recipe: str | None = _word(
        "a name (see: moe recipes), a YAML file or hf:PATH (a Hugging Face model); required without --calibrate", None
    )
    calibrate: bool = _flag(
        "measure this machine instead, and write a cluster file: --out F.yaml, or machine.yaml in the user's cache", False
    )
    nproc: int | None = _flag("with --calibrate: measure collectives of up to N processes, by default the number of cores")
    nccl: Path | None = _flag(
        "with --calibrate: measure nothing; add the times of nccl-tests' outputs in this folder to --cluster, and write it to --out"
    )
    runs: Path | None = _flag("with --calibrate: measure nothing; fit --cluster to the finished runs in this folder, and write it to --out")
    cluster: str | None = _flag(
        "a shipped cluster, such as h100-8, h100-2 (part of a node), h100-8x4 (4 nodes), or a YAML file; required with a recipe"
    )
    top: int = _flag("number of plans to print", 10)
    exhaustive: bool = _flag("try every engine, schedule and recomputation with all degrees, not only with the fastest degrees", False)
    as_is: bool = _flag("predict only the recipe as it is written, even if it does not fit", False)
    compare: str | None = _flag("instead compare the recipe with this other one, both as written: each component of time and memory")
    search: Literal["enumerate", "alpa", "flexflow", "mesh-tf", "gspmd"] = _flag(
        "enumerate: try all plans; the others: search the graph of the recipe's operators, as the paper of that name does", "enumerate"
    )
    explain: bool = _flag("first print the rules by which a strategy is chosen by hand, with this recipe's numbers", False)
    order: Path | None = _flag("also search for a faster order of the best plan's pipeline actions, and write it, if found, to this *.csv")
    out: Path | None = _flag("also write the best plan as a recipe, *.yaml")
    pictures: Path | None = _flag("also draw the best plan into this folder: the pipeline's timeline, and the memory of each rank")
    json: Path | None = _flag("also write the chosen, ranked and refused plans as JSON")


@dataclasses.dataclass(frozen=True)
class Simulate:
    """Draw pipeline schedules and count their bubbles, activations and weight versions. Without a name, print a table of all schedules."""

    name: str | None = _word("a schedule, such as 1f1b or chimera; a CSV file of actions; or search, to find an order of actions", None)
    others: tuple[str, ...] = _word("further schedules, drawn below the first on the same time scale", ())
    recipe: str | None = _flag("a name (see: moe recipes), a YAML file or hf:PATH; times and memory are then computed from its model")
    stages: int | None = _flag("number of pipeline ranks; 4 by default, or the recipe's degrees.pp")
    microbatches: int | None = _flag("number of micro-batches in a batch; 8 by default, or the recipe's")
    chunks: int | None = _flag("stages on each rank, if the schedule allows a choice; 2 by default")
    batches: int | None = _flag("number of batches in a row; 1 by default, 2 for two_bw")
    vertical_sync: Literal["on", "off"] | None = _flag("for pipedream: every stage uses the first stage's weight version; off by default")
    pipelines: int | None = _flag("for chimera: number of pipelines, half of them in each direction; 2 by default")
    placement: Literal["line", "loop", "v"] | None = _flag(
        "for search: one stage on each rank (line, the default), --chunks stages as in interleaved (loop), or two stages as in zb_v (v)"
    )
    memory: float | None = _flag("for search: limit of a rank's activations, 1 = one micro-batch in all its layers; none by default")
    tflops: float | None = _flag("with --recipe: TFLOP/s of a rank; 140 by default, an A100 in 16 bits")
    link_gb_s: float | None = _flag("with --recipe: GB/s between two ranks, each way; 25 by default (200 Gbit/s)")
    forward_time: str | None = _flag(
        "forward time of a micro-batch on a rank, in any unit, 1 by default; or one for each stage, comma-separated"
    )
    backward_time: str | None = _flag("backward time, in the same form and unit; 2 by default")
    weight_share: float | None = _flag("share of the backward time for weight gradients, if the schedule splits it; 0.5 by default")
    transfer_time: float | None = _flag("time of a message between two ranks, in the same unit; 0 by default")
    overlap: Literal["on", "off"] | None = _flag("whether ranks compute while they send; on by default")
    out: Path | None = _flag(
        "also write the schedule as *.png, *.csv (its actions), *.txt or *.json (a trace for chrome://tracing or Perfetto)"
    )
    json: Path | None = _flag("also write the table as JSON")


@dataclasses.dataclass(frozen=True)
class Energy:
    """Plan a GPU clock for each forward and backward pass of a pipeline step, and print the saved energy. A pass gets a lower clock if its
    rank would otherwise wait after it (EnvPipe)."""

    name: str | None = _word("a schedule or a CSV file of actions; by default 1f1b, with some forward passes earlier (--ahead)", None)
    profile: Path | None = _flag(
        "JSON file: seconds and joules of each stage's forward and backward pass at each clock; default: a power model"
    )
    recipe: str | None = _flag("a name (see: moe recipes), a YAML file or hf:PATH; times are then computed from its model")
    stages: int | None = _flag("number of pipeline ranks; 4 by default, or the recipe's or the profile's")
    microbatches: int | None = _flag("number of micro-batches in a batch; 8 by default, or the recipe's")
    chunks: int | None = _flag("stages on each rank, if the schedule allows a choice; 2 by default")
    slowdown: float | None = _flag("share by which the step may take longer, such as 0.01 for 1%; 0 by default")
    ahead: int | None = _flag(
        "for 1f1b: largest number of forward passes moved earlier on a rank (each takes memory); by default, as many as help"
    )
    forward_time: str | None = _flag("forward seconds at full clock, 0.01 by default; or one for each stage, comma-separated")
    backward_time: str | None = _flag("backward seconds, in the same form; 0.02 by default")
    transfer_time: float | None = _flag("seconds of a message from a rank to the next; 0 by default")
    tflops: float | None = _flag("with --recipe: TFLOP/s of a rank at full clock; 140 by default")
    link_gb_s: float | None = _flag("with --recipe: GB/s between two ranks, each way; 25 by default")
    apply: bool = _flag(
        "test the plan's clocks on this machine, one GPU per rank: set them for --steps steps without computing, then restore; needs root",
        False,
    )
    steps: int | None = _flag("with --apply: number of steps; 1 by default")
    out: Path | None = _flag("also write the plan (*.json) or a picture of it (*.png)")
    json: Path | None = _flag("also write the table as JSON")


@dataclasses.dataclass(frozen=True)
class Convert:
    """Convert a checkpoint to another model: dense layers to experts, or experts to fewer experts or to dense layers. Or convert a model of
    Hugging Face's transformers to a run (hf:PATH RUN) and back (RUN hf:PATH)."""

    from_run: str = _word("a run's folder, or one checkpoint in it; or hf:PATH, a folder with config.json and *.safetensors")
    to_run: str = _word("folder of the new run, which moe train continues; or hf:PATH, a new folder for transformers")
    to: str | None = _flag("recipe of the new model: a name (see: moe recipes) or a YAML file; required without hf:PATH")
    method: Literal["copy", "granular", "noise", "drop", "merge", "prune"] | None = _flag(
        "dense to experts: copy (default), granular (shards of the layer), noise (noisy copies), drop (copies with some new units); "
        "experts to fewer or dense: merge (averages; default), prune (keeps the most used)"
    )
    share: float | None = _flag(
        "for noise: share of the weights that get noise; for drop: share of the hidden units drawn anew; 0.5 by default"
    )
    scale: float | None = _flag("for noise: its size in standard deviations of each matrix; 0.01 by default")
    weights: Literal["uniform", "load"] | None = _flag("for merge: average experts equally (uniform, the default) or weighted by load")
    load: Path | None = _flag(
        "for prune and --weights load: run folder, metrics.jsonl or JSON file with experts' loads; default: the run of FROM_RUN"
    )
    moments: Literal["fresh", "copy"] | None = _flag(
        "for method copy: convert the optimizer states too (copy), or start with new ones (fresh, the default)"
    )
    approximate: bool = _flag(
        "accept a router with gates that do not sum to a constant, although outputs then differ from the source's", False
    )
    check: bool = _flag("run both models on random tokens and print the largest difference of logits", False)
    dtype: Literal["fp32", "bf16", "fp16"] | None = _flag(
        "for RUN hf:PATH: dtype of the written weights; default: of the files that the run was made from, else of the checkpoint"
    )
    adapters: bool = _flag("for RUN hf:PATH: write the run's LoRA adapters alone, for PEFT", False)
    without_mtp: bool = _flag("for hf:PATH RUN: leave out the files' layers for multi-token prediction", False)
    json: Path | None = _flag("also write the report as JSON")


@dataclasses.dataclass(frozen=True)
class HashTable:
    """Write a table for router.hash_table: experts for each token id, so that all experts get about equally many training tokens."""

    recipe: str = _word("a name (see: moe recipes) or a YAML file; its text, vocabulary, number of experts and router.num_choices are used")
    out: Path = _word("a new file, *.json")


@dataclasses.dataclass(frozen=True)
class Show:
    """Print a recipe merged with the recipes that it extends, each value with its origin. Or print a rank's parameter shards (--plan)."""

    recipe: str | None = _word("a name (see: moe recipes), a YAML file or hf:PATH (a Hugging Face model); required without --keys", None)
    keys: str | None = _flag("print the keys of a section instead (model, model.rope, ... or all), each with default, choices and meaning")
    plan: bool = _flag("print each parameter instead: name, kind of sharding, full shape, and the shape and bytes of its shard", False)
    nproc: int | None = _flag("with --plan: number of processes, 1 by default")
    rank: int | None = _flag("with --plan: rank whose shards are printed, 0 by default")
    json: Path | None = _flag("also write keys, values and origins, or the plan's rows, as JSON")


@dataclasses.dataclass(frozen=True)
class Rehearse:
    """Run one rank of a larger run here without GPUs: build the model, take two steps, save. Print devices, shapes, memory, collectives."""

    recipe: str = _word("a name (see: moe recipes), a YAML file or hf:PATH (a Hugging Face model)")
    world: int | None = _flag("number of ranks of the run; required")
    rank: str | None = _flag("rank to rehearse, 0 by default; all: each rank, and compare the order of collectives and messages")
    device: str | None = _flag("cpu (default), or cuda: rehearse the GPU code without a GPU")
    json: Path | None = _flag("also write the table as JSON")


@dataclasses.dataclass(frozen=True)
class Recipes:
    """List the recipes by name, each with its number of parameters and the number that one token uses."""


@dataclasses.dataclass(frozen=True)
class Doctor:
    """Check this machine: versions, devices, speed, communication, ports, disk, compilers. Or say what is wrong with a run's router or loss
    (RUN_DIR), or why a run hung (--trace)."""

    run_dir: str | None = _word("a run's folder; its records are checked instead of this machine", None)
    trace: Path | None = _flag("read a folder of torch's flight recorder traces instead, and name the ranks that the others waited for")
    json: Path | None = _flag("also write the table as JSON")


_KINDS = (Train, Verify, Generate, Eval, Report, Bench, Plan, Simulate, Energy, Convert, HashTable, Show, Rehearse, Recipes, Doctor)
VERBS: dict[str, type] = {re.sub("(?<=[a-z])(?=[A-Z])", "-", kind.__name__).lower(): kind for kind in _KINDS}
