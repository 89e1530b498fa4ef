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

    recipe: str = _word("a name (see: moe recipes) or a YAML file")
    nproc: int | None = _flag("number of processes on this machine, 1 by default; with --hostfile: on each host, by default its slots=N")
    launcher: Literal["deepspeed", "torchrun"] | None = _flag(
        "program that starts the processes, deepspeed by default; not used for one process"
    )
    out: Path | None = _flag("run folder; runs/RECIPE by default")
    fresh: bool = _flag("set earlier checkpoints aside and start over", False)
    from_step: int | None = _flag("resume from the checkpoint of this step instead of the newest; later ones are set aside, not deleted")
    allow_change: tuple[str, ...] = _flag("recipe key that may differ from the checkpoint's, although this changes results; repeatable", ())
    init_from: Path | None = _flag(
        "begin a new run with the weights and the tokenizer of this run folder, checkpoint or folder of transformers (hf:PATH)"
    )
    hostfile: Path | None = _flag("file that lists the machines, one `host slots=N` a line")
    restarts: int | None = _flag(
        "if ranks die, restart from the newest checkpoint; give up after N restarts without a new checkpoint; default 0"
    )
    elastic: int | None = _flag(
        "if restarts (--restarts) do not help, continue with fewer processes, at least N, and with the same global batch"
    )
    dry_run: bool = _flag("print the predicted memory, FLOPs and seconds a step; start nothing and write nothing", False)
    cluster: str | None = _flag("cluster for which memory and time are predicted, as in moe plan; --dry_run assumes all its devices")
    force: bool = _flag("start even if the prediction says that memory is too small", False)
    profile: bool = _flag("record three steps: a trace for ui.perfetto.dev, and a table of the time of each part of the code", False)
    debug_collectives: bool = _flag("before each collective, compare its arguments over the ranks: an error instead of a hang", False)


@dataclasses.dataclass(frozen=True)
class Verify:
    """Compare every legal layout of a tiny model with one process: losses, gradients, weights; exit code 1 if any differ.
    --compare ONE MANY: compare two recorded steps of any PyTorch program. --peer NAME: compare another project's parallel layouts."""

    many: str | None = _word("with --compare ONE: folder with the record (moe.verify.record) of the same step on several ranks", None)
    compare: str | None = _flag("folder ONE with the record of a step of your own program on one process: print how MANY differs from it")
    peer: str | None = _flag(
        "compare another project's step on several ranks with its step on one: transformers, deepspeed, torch, torchtitan, megatron_core"
    )
    model: str | None = _flag(
        "with --peer: comma-separated names of the project's models; with transformers, the name others stands for all further families"
    )
    ep: int | None = _flag("with --peer: ranks of expert parallelism; if none of --ep, --tp and --fsdp is given, each is 2")
    tp: int | None = _flag("with --peer: ranks of tensor parallelism")
    fsdp: int | None = _flag("with --peer: ranks of FSDP, each with its own samples")
    pin_routing: bool = _flag(
        "with --peer: replay the choices of experts of the single process; in your own program: record(..., pin=ONE)", False
    )
    nproc: int | None = _flag("test layouts of up to N processes, 2 by default")
    json: Path | None = _flag("also write the table as JSON")
    device: str | None = _flag("cuda or cpu: start the processes on this device as moe train does; without it, fork them on the CPU")
    kinds: str = _flag(
        "comma-separated parts of the test: data (engines, precisions), expert (routers, dispatchers), tensor (tp), sequence (sp), "
        "pipeline (schedules), hybrid (all together, with --nproc 8)",
        "data,expert,tensor,sequence,pipeline,hybrid",
    )
    only: str | None = _flag("only layouts with this text in their name")
    recipe: str | None = _flag(
        "test your own recipe instead, at a small size, with the methods and plugins that it names; runs the plugins' code"
    )
    types: bool = _flag(
        "check instead, without a reference run, that values are replicated, varying or partial over ranks as the layout requires",
        False,
    )
    draws: int | None = _flag("test N random tiny recipes of up to --nproc processes instead")
    seed: str | None = _flag("seed of --draws, 0 by default: the same seed gives the same recipes")
    timeout_s: float | None = _flag("time limit in seconds for a layout of up to 4 processes, 120 by default; a busy machine needs more")
    go_on: bool = _flag("continue an interrupted run: keep the rows of the --json file that passed, and run the others", False)
    debug_collectives: bool = _flag("before each collective, compare its arguments over the ranks: an error instead of a hang", False)


@dataclasses.dataclass(frozen=True)
class Generate:
    """Continue a text with a trained model."""

    run_dir: str = _word("a run's folder, such as runs/switch_tiny")
    prompt: str | None = _flag("the text to continue")
    prompt_file: Path | None = _flag('file of prompts, one a line; in a .jsonl file one {"prompt": TEXT} a line')
    chat: bool = _flag("write each prompt as a user's message, by the model's chat template", False)
    tokens: int | None = _flag("maximum number of tokens to add; a separator token ends a text earlier")
    samples: int | None = _flag("number of continuations of each prompt")
    temperature: float | None = _flag("divides the logits before sampling; 0 always takes the most likely token")
    top_k: int | None = _flag("sample from the K most likely tokens only")
    top_p: float | None = _flag("sample from the smallest set of most likely tokens with total probability P")
    seed: int | None = _flag("seed of the sampling")
    step: int | None = _flag("step of the checkpoint; the newest if not given")
    json: Path | None = _flag("also write the texts as JSON")


@dataclasses.dataclass(frozen=True)
class Eval:
    """Evaluate a trained model on the run's validation text or another (--data.path): loss, bits per byte, expert load, dropped choices."""

    run_dir: str = _word("a run's folder, such as runs/switch_tiny")
    sequences: int | None = _flag("number of sequences, spread evenly over the text, 512 by default; 0: all")
    step: int | None = _flag("step of the checkpoint; the newest if not given")
    json: Path | None = _flag("also write the figures as JSON")


@dataclasses.dataclass(frozen=True)
class Report:
    """Draw a run's curves, expert load, dropped choices and memory: PNG files and one HTML page. Or compare two runs."""

    run_dir: str = _word("a run's folder, such as runs/switch_tiny")
    other: str | None = _word("another run's folder, to compare the two", None)
    json: Path | None = _flag("also write the list of files as JSON")


@dataclasses.dataclass(frozen=True)
class Bench:
    """Run a measurement."""

    name: str = _word("name of the measurement")
    steps: int | None = _flag("number of training steps, for measurements that train")
    seeds: int | None = _flag("number of repetitions, each with another seed")
    out: Path | None = _flag("for measurements that train: folder for their runs")
    nproc: int | None = _flag("number of processes, for measurements that run on several")
    peers: str | None = _flag("other systems to compare with: all, none, or comma-separated names")
    only: str | None = _flag("only rows that contain this text, such as bf16 or E64; or only these parts of the measurement")
    kinds: str | None = _flag("comma-separated kinds of data parallelism, such as ddp,zero2+cpu, or schedules of pipelines, such as 1f1b")
    full: bool = _flag("the full measurement, as docs/benchmarks report it; by default fewer and smaller cases", False)
    rounds: int | None = _flag("how often each case is timed or tried; timed cases take turns")
    json: Path | None = _flag("also write the table as JSON")


@dataclasses.dataclass(frozen=True)
class Plan:
    """Choose how to train a recipe on a cluster by predicted memory and time, and say why other plans were not chosen. Needs no device."""

    recipe: str | None = _word("a name (see: moe recipes) or a YAML file; required without --calibrate", None)
    calibrate: bool = _flag("measure this machine instead, and write a cluster file: --out F.yaml, or the user's machine.yaml", False)
    nproc: int | None = _flag("with --calibrate: measure collectives of up to N processes, by default the number of cores")
    nccl: Path | None = _flag(
        "with --calibrate: measure nothing; put the results of NCCL-tests, from the outputs in this folder, into --cluster"
    )
    runs: Path | None = _flag("with --calibrate: measure nothing, and fit --cluster to the steps of the finished runs in this folder")
    cluster: str | None = _flag(
        "a shipped cluster, such as h100-8, h100-2 (part of a node), h100-8x4 (4 nodes), or a YAML file; required with a recipe"
    )
    top: int = _flag("number of plans to print", 10)
    exhaustive: bool = _flag("try every engine, schedule and recomputation with all degrees, not only with the fastest degrees", False)
    as_is: bool = _flag("predict only the recipe as it is written, even if it does not fit", False)
    compare: str | None = _flag("compare the recipe with this other recipe, both as they are written, by part of time and memory")
    search: Literal["enumerate", "alpa", "flexflow", "mesh-tf", "gspmd"] = _flag(
        "enumerate: try all plans; others: search on the graph of the recipe's operators, as in the paper of that name", "enumerate"
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
    others: tuple[str, ...] = _word("further schedules, drawn below the first in the same unit of time", ())
    recipe: str | None = _flag("a name (see: moe recipes) or a YAML file; times and memory are then computed from its model")
    stages: int | None = _flag("number of pipeline ranks; 4 by default, or the recipe's degrees.pp")
    microbatches: int | None = _flag("number of micro-batches in a batch; 8 by default, or the recipe's")
    chunks: int | None = _flag("stages on each rank, if the schedule allows a choice; 2 by default")
    batches: int | None = _flag("number of batches in a row; 1 by default, 2 for two_bw")
    vertical_sync: Literal["on", "off"] | None = _flag("for pipedream: every stage uses the first stage's weight version; off by default")
    pipelines: int | None = _flag("for chimera: number of pipelines, half of them in each direction; 2 by default")
    placement: Literal["line", "loop", "v"] | None = _flag(
        "for search: one stage on each rank (line, the default), --chunks stages as in interleaved (loop), or two stages as in zb_v (v)"
    )
    memory: float | None = _flag("for search: limit of a rank's stored activations, in micro-batches of all its layers; none by default")
    tflops: float | None = _flag("with --recipe: TFLOP/s of a rank; 140 by default, an A100 in 16 bits")
    link_gb_s: float | None = _flag("with --recipe: GB/s between two ranks, each way; 25 by default (200 Gbit/s)")
    forward_time: str | None = _flag("forward time of a micro-batch on a rank, 1 by default; or one for each stage, comma-separated")
    backward_time: str | None = _flag("backward time, in the same form; 2 by default")
    weight_share: float | None = _flag("share of the backward time for weight gradients, if the schedule splits it; 0.5 by default")
    transfer_time: float | None = _flag("time of a message from a rank to the next; 0 by default")
    overlap: Literal["on", "off"] | None = _flag("whether ranks compute while they send; on by default")
    out: Path | None = _flag("also write .png, .csv (the actions), .txt, or .json (a trace for chrome://tracing or Perfetto)")
    json: Path | None = _flag("also write the table as JSON")


@dataclasses.dataclass(frozen=True)
class Energy:
    """Plan GPU clocks for all actions of a pipeline step, and print the saved energy. An action gets a lower clock if its rank would
    otherwise wait after it (EnvPipe)."""

    name: str | None = _word("a schedule or a CSV file of actions; 1f1b by default, with forward passes moved earlier", None)
    profile: Path | None = _flag(
        "JSON file: seconds and joules of each stage's forward and backward pass at each clock; default: a power model"
    )
    recipe: str | None = _flag("a name (see: moe recipes) or a YAML file; times are then computed from its model")
    stages: int | None = _flag("number of pipeline ranks; 4 by default, or the recipe's or the profile's")
    microbatches: int | None = _flag("number of micro-batches in a batch; 8 by default, or the recipe's")
    chunks: int | None = _flag("stages on each rank, if the schedule allows a choice; 2 by default")
    slowdown: float | None = _flag("share by which the step may take longer, such as 0.01; 0 by default")
    ahead: int | None = _flag(
        "for 1f1b: largest number of forward passes moved earlier on a rank (each takes memory); by default, as many as help"
    )
    forward_time: str | None = _flag("forward seconds at full clock, 0.01 by default; or one for each stage, comma-separated")
    backward_time: str | None = _flag("backward seconds, in the same form; 0.02 by default")
    transfer_time: float | None = _flag("seconds of a message from a rank to the next; 0 by default")
    tflops: float | None = _flag("with --recipe: TFLOP/s of a rank at full clock; 140 by default")
    link_gb_s: float | None = _flag("with --recipe: GB/s between two ranks, each way; 25 by default")
    apply: bool = _flag(
        "test the plan's clocks on this machine's GPUs, one a rank: set them for --steps steps without computing, then restore; needs root",
        False,
    )
    steps: int | None = _flag("with --apply: number of steps; 1 by default")
    out: Path | None = _flag("also write the plan as .json, or a picture as .png")
    json: Path | None = _flag("also write the table as JSON")


@dataclasses.dataclass(frozen=True)
class Convert:
    """Convert a checkpoint to another model: dense layers to experts, or experts to fewer experts or to dense layers. Or convert a model of
    Hugging Face's transformers to a run (hf:PATH RUN) and back (RUN hf:PATH)."""

    from_run: str = _word("a run's folder, or one checkpoint in it; or hf:PATH, a folder with config.json and *.safetensors")
    to_run: str = _word("folder of the new run, which moe train continues; or hf:PATH, a new folder for transformers")
    to: str | None = _flag("recipe of the new model: a name (see: moe recipes) or a YAML file; required without hf:PATH")
    method: Literal["copy", "granular", "noise", "drop", "merge", "prune"] | None = _flag(
        "dense to experts: copy (default), granular, noise, drop; to fewer experts: merge, prune"
    )
    share: float | None = _flag(
        "for noise: share of the weights that get noise; for drop: share of the hidden units drawn anew; 0.5 by default"
    )
    scale: float | None = _flag("for noise: its size in standard deviations of each matrix; 0.01 by default")
    weights: Literal["uniform", "load"] | None = _flag("for merge: how experts are weighted in the average; uniform by default")
    load: Path | None = _flag(
        "for prune, or merge by load: run folder, metrics.jsonl or JSON file with experts' loads; default: the source run's"
    )
    moments: Literal["fresh", "copy"] | None = _flag("copy: also convert the optimizer states; fresh (the default): start with new ones")
    approximate: bool = _flag(
        "accept a router with gates that do not sum to a constant, although outputs then differ from the source's", False
    )
    check: bool = _flag("run both models on random tokens and print the largest difference", False)
    dtype: Literal["fp32", "bf16", "fp16"] | None = _flag(
        "for RUN hf:PATH: dtype of the written weights; by default the dtype of the original files, or the run's"
    )
    adapters: bool = _flag("for RUN hf:PATH: write the run's LoRA adapters alone, for PEFT", False)
    without_mtp: bool = _flag("for hf:PATH RUN: leave out the files' layers for multi-token prediction", False)
    json: Path | None = _flag("also write the report as JSON")


@dataclasses.dataclass(frozen=True)
class HashTable:
    """Write a table for router.hash_table: experts for each token id, so that all experts get about equally many training tokens."""

    recipe: str = _word("a name (see: moe recipes) or a YAML file; its text, vocabulary, experts and choices are used")
    out: Path = _word("a new file, *.json")


@dataclasses.dataclass(frozen=True)
class Show:
    """Print a recipe merged with its parents, each value with its origin. Or print how its parameters are sharded, on one rank (--plan)."""

    recipe: str | None = _word("a name (see: moe recipes) or a YAML file; required without --keys", None)
    keys: str | None = _flag("print the keys of a section instead (model, model.rope, ... or all), each with its choices and meaning")
    plan: bool = _flag("print each parameter instead: path, style of sharding, full shape, and the shape and bytes of its shard", False)
    nproc: int | None = _flag("with --plan: number of processes, 1 by default")
    rank: int | None = _flag("with --plan: rank whose shards are printed, 0 by default")
    json: Path | None = _flag("also write keys, values and origins, or the plan's rows, as JSON")


@dataclasses.dataclass(frozen=True)
class Rehearse:
    """Run one rank of a larger run here without its GPUs: build the model, take steps, save. Print devices, shapes, memory, collectives."""

    recipe: str = _word("a name (see: moe recipes) or a YAML file")
    world: int | None = _flag("number of ranks of the run; required")
    rank: str | None = _flag("rank to rehearse, 0 by default; all: every rank, and compare the order of their messages")
    device: str | None = _flag("cpu (default), or cuda: rehearse the GPU code without a GPU")
    json: Path | None = _flag("also write the table as JSON")


@dataclasses.dataclass(frozen=True)
class Recipes:
    """List the recipes by name, each with its number of parameters and the number that one token uses."""


@dataclasses.dataclass(frozen=True)
class Doctor:
    """Check this machine: versions, devices, speed, communication, ports, disk, compilers. Or say what is wrong with a run's router or loss
    (RUN_DIR), or why a run hung (--trace)."""

    run_dir: str | None = _word("the folder of a run; its records are examined instead of this machine", None)
    trace: Path | None = _flag("read a folder of torch's flight recorder traces instead, and name the ranks that the others waited for")
    json: Path | None = _flag("also write the table as JSON")


_KINDS = (Train, Verify, Generate, Eval, Report, Bench, Plan, Simulate, Energy, Convert, HashTable, Show, Rehearse, Recipes, Doctor)
VERBS: dict[str, type] = {re.sub("(?<=[a-z])(?=[A-Z])", "-", kind.__name__).lower(): kind for kind in _KINDS}
