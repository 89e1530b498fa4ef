"""Bad input gives one line that names the mistake and the fix, exit code 2, in under a second, before torch loads.

All cases run in one process without torch, each timed. A few run again as a user would run them, each in its own process.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.checks.sharding import check_installed
from moe.checks.together import check_run
from moe.recipe.keys import known_keys
from moe.recipe.load import load, recipe_names
from parallel.errors import BadInput

ROOT = Path(__file__).resolve().parents[2]

FILES = {
    "not_yaml.yaml": "model: {d_ff: 512\ntrain: [",
    "a_list.yaml": "- model\n- train\n",
    "no_section.yaml": "model: 3\n",
    "section_list.yaml": "model: [1, 2]\n",
    "unknown_section.yaml": "modle: {d_ff: 512}\n",
    "unknown_key.yaml": "model: {d_fff: 512}\n",
    "top_level_key.yaml": "d_ff: 512\n",
    "dotted.yaml": "extends: switch_tiny\ntrain.steps: 3\n",
    "tab.yaml": "extends: switch_tiny\ntrain:\n\tsteps: 1\n",
    "nothing.yaml": "# later\n",
    "twice.yaml": "model: {d_ff: 512, d_model: 64, d_ff: 256}\n",
    "date.yaml": "train: {seed: 2024-13-45}\n",
    "python_tag.yaml": "model: !!python/object/apply:os.system [true]\n",
    "octal.yaml": "model: {num_layers: 010}\n",
    "octal_text.yaml": "model: {num_layers: '010'}\n",
    "tiny_number.yaml": "optimizer: {eps: 1.0e-300}\n",
    "base_60.yaml": "train: {steps: 1:30}\n",
    "many_keys.yaml": "model:\n" + "".join(f"  k{i}: 1\n" for i in range(8000)),
    "deep.yaml": "model: " + "[" * 1100,
    "circle_a.yaml": "extends: circle_b\n",
    "circle_b.yaml": "extends: circle_a\n",
    "orphan.yaml": "extends: no_such_parent\n",
    "two_parents.yaml": "extends: [dense_tiny, switch_tiny]\n",
    "bool_steps.yaml": "extends: switch_tiny\ntrain: {steps: yes}\n",
    "null_steps.yaml": "extends: switch_tiny\ntrain: {steps: null}\n",
    "nested.yaml": "extends: switch_tiny\ntrain: {steps: {a: {b: {c: d}}}}\n",
    "empty.txt": "",
    "text.txt": "some text\n",
    "hosts_bad": "worker-0 slots=two\n",
    "hosts_twice": "worker-0 slots=2\nworker-0 slots=2\n",
    "hosts_empty": "# nobody\n",
    "model/config.json": "{}",
    "model/model.safetensors": "",
    "old/recipe.yaml": "extends: switch_tiny\n",
    "trained/manifest.json": "{}",
}

T = "train switch_tiny "
K = T + "--optimizer.kind kfac "
Z = T + "--sharding.kind zero --sharding.stage "
B = T + "--precision.compute bf16 --precision.casts step "
NVME = "3 --sharding.offload.optimizer nvme"
# (command line, what the line must name, what it must advise)
CASES: list[tuple[str, str, str]] = [
    # verbs, words, flags
    ("trian switch_tiny", "verb: got trian", "did you mean moe train?"),
    ("frobnicate", "verb: got frobnicate", "see: moe --help"),
    ("switch_tiny", "verb: got switch_tiny", "moe train switch_tiny"),
    ("--nproc 2", "verb: got --nproc", "see: moe --help"),
    ("train", "moe train: got no RECIPE", "moe train switch_tiny"),
    ("show", "moe show: got no RECIPE", "moe recipes"),
    ("generate", "moe generate: got no RUN_DIR", "runs/switch_tiny"),
    (T + "glam_tiny", "'glam_tiny' as one word too many", "remove it"),
    (T + "--nprocs 2", "--nprocs: got a flag", "did you mean --nproc 2?"),
    (T + "--lr 0.1", "--lr: got a flag", "did you mean --optimizer.lr 0.1?"),
    (T + "--num-experts 4", "--num-experts: got a flag", "did you mean --experts.num_experts 4?"),
    (T + "-n 2", "-n: got a flag that moe train does not have, needed one of --nproc", "moe train --help"),
    (T + "model.d_ff=512", "'model.d_ff=512' as one word too many", "did you mean --model.d_ff=512?"),
    ("verify --model.d_ff 512", "--model.d_ff: got a flag", "moe train, moe show, moe plan, moe convert"),
    ("recipes --json x", "--json: got a flag", "moe recipes --help"),
    (T + "--nproc", "--nproc: got no value", "--nproc=2"),
    ("show --keys", "--keys: got no value, needed a section of a recipe, or all", "--keys=all"),
    (T + "--nproc --fresh", "--nproc: got no value", "--nproc=2"),
    (T + "--nproc two", "--nproc: got two, needed a whole number", "--nproc 2"),
    (T + "--nproc 2.5", "--nproc: got 2.5, needed a whole number", "--nproc 2"),
    (T + "--model.num_layers 1000000000", "model.num_layers: got 1000000000", "set model.num_layers"),
    (T + "--pipeline.drain_every 100000", "pipeline.drain_every: got 100000", "set pipeline.drain_every"),
    (T + "--nproc 3000 --degrees.pp 3000", "degrees.pp: got 3000, needed at most one stage a layer", "set degrees.pp to 4 and train"),
    (T + "--pipeline.schedule 1f1bb", "pipeline.schedule: got 1f1bb", "did you mean 1f1b?"),
    (T + "--pipeline.layers [-1]", "pipeline.layers: got [-1]", "set it to null"),
    (T + "--optimizer.clip_norm 1e-300", "optimizer.clip_norm: got", "set optimizer.clip_norm to a value like 1.0"),
    (T + "--data.path= --data.source text", "data.path: got ''", "like null"),
    (T + "--data.path ~nosuchuser/x --data.source text", "data.path: got '~nosuchuser/x'", "check the spelling"),
    ("train " + "a" * 5000, "recipe: got 'aaaa", "check the spelling"),
    ("show octal.yaml", "octal.yaml, line 1: got 010, which YAML reads as another number", "correct that line"),
    ("show octal_text.yaml", "model.num_layers: got '010', needed a number without zeros before it", "set model.num_layers"),
    (T + "--model.num_layers 010", "model.num_layers: got '010', needed a number without zeros before it", "set model.num_layers"),
    (T + "--optimizer.lr 08", "optimizer.lr: got '08', needed a number without zeros before it", "set optimizer.lr"),
    ("train dense_tiny --experts.num_experts 8", "experts.num_experts: got a value in a dense model", "remove experts.num_experts"),
    (T + "--model.rope.base 1e300", "model.rope.base: got '1e300', needed a number that 32 bits hold", "set model.rope.base"),
    ("show tiny_number.yaml", "optimizer.eps: got 1e-300, needed a number that 32 bits hold", "set optimizer.eps"),
    (T + "--train.timeout_s 1e-9", "train.timeout_s: got '1e-9', needed greater than or equal to 1", "set train.timeout_s"),
    (T + "--train.sample_tokens 1000000000", "train.sample_tokens: got 1000000000", "set train.sample_tokens"),
    ("report no_such_run --json empty_folder", "--json: got empty_folder: Is a", "another path"),
    ("show switch_tiny --json text.txt/a/b.json", "text.txt is no folder", "choose another path"),
    ("rehearse switch_tiny --world 3", "train.global_batch: got 16", "set train.global_batch to 15 and train.eval_sequences to 63"),
    ("rehearse switch_tiny --world 2 --degrees.dp 4", "= 4 ranks on 2 processes", "--world 4"),
    ("show base_60.yaml", "base_60.yaml, line 1: got 1:30, which YAML reads as another number", "correct that line"),
    ("show many_keys.yaml", "model.k0: got a key that does not exist", "remove it"),
    ("show orphan.yml", "recipe: got orphan.yml", "did you mean orphan.yaml?"),
    ("show orfan", "recipe: got orfan", "did you mean orphan.yaml?"),
    ("show pipe", "recipe: got pipe, which is not a regular file", "moe recipes"),
    (T + "--nproc 0", "--nproc: got 0, needed at least 1", "--nproc 1"),
    (T + "--nproc 2 --nproc 4", "--nproc: got two values", "remove one"),
    (T + "--fresh=yes", "--fresh: got --fresh=yes", "write --fresh"),
    (T + "--allow-change model.num_head", "--allow-change model.num_head: got a key that does not exist", "model.num_heads?"),
    (T + "--allow-change", "--allow_change: got no value", "--allow_change=TEXT"),
    (T + "--launcher mpirun", "--launcher: got mpirun, needed deepspeed or torchrun", "--launcher deepspeed"),
    (T + "--out=", "--out: got nothing", "--out PATH"),
    (T + "--nproc 2 --out text.txt", "--out: got text.txt", "choose another --out"),
    (T + "--hostfile no_such_file", "--hostfile: got no_such_file", "worker-0 slots=8"),
    (T + "--hostfile hosts_bad", "hosts_bad, line 1: got worker-0 slots=two", "worker-0 slots=8"),
    (T + "--hostfile hosts_twice", "hosts_twice, line 2: got worker-0 twice", "worker-0 slots=8"),
    (T + "--hostfile hosts_empty", "hosts_empty without a host", "worker-0 slots=8"),
    (T + "--hostfile hosts_bad --launcher torchrun", "--hostfile: got --launcher torchrun", "start torchrun on every host"),
    ("generate no_such_run", "RUN_DIR: got no_such_run", "moe train switch_tiny"),
    ("generate no_such_run --temperature hot", "--temperature: got hot, needed a number", "--temperature 0.8"),
    ("generate no_such_run --temperature -1", "--temperature: got -1.0, needed at least 0", "--temperature 0"),
    ("generate no_such_run --tokens 0", "--tokens: got 0, needed at least 1", "--tokens 1"),
    ("convert", "moe convert: got no FROM_RUN", "moe convert runs/dense_tiny runs/upcycled --to glam_tiny"),
    ("convert a", "moe convert: got no TO_RUN", "--to glam_tiny"),
    ("convert a b", "FROM_RUN: got a", "moe train switch_tiny"),
    ("convert trained b", "--to: got nothing, needed the recipe of the new model", "moe convert trained hf:b"),
    ("simulate --pp 4", "--pp: got a flag that moe simulate does not have", "did you mean --stages 4?"),
    (T + "--pp 0", "--pp: got a flag", "did you mean --degrees.pp VALUE?"),
    (T + "--zero_stage 5", "--zero_stage: got a flag", "did you mean --sharding.kind zero --sharding.stage VALUE?"),
    ("show dense_tiny --degrees.pp 0", "degrees.pp: got 0, needed greater than or equal to 1", "set degrees.pp to 1"),
    ("show dense_tiny --dispatch.busiest 0.5", "dispatch.busiest: got 0.5", "set dispatch.busiest to 1"),
    ("convert a b --to glam_tin", "recipe: got glam_tin", "did you mean glam_tiny?"),
    ("convert no_such_run b --to glam_tiny", "FROM_RUN: got no_such_run", "moe train switch_tiny"),
    ("convert a b --to glam_tiny --method copi", "--method: got copi", "did you mean --method copy?"),
    ("report no_such_run", "RUN_DIR: got no_such_run", "moe train switch_tiny"),
    ("verify --nproc 0", "--nproc: got 0", "--nproc 2"),
    ("bench no-such-bench", "NAME: got no-such-bench, needed a measurement: ", "see: moe bench --help"),
    ("bench kills", "NAME: got kills, needed a measurement: ", "python -m tests.campaigns kills"),
    ("verify --draws 0", "--draws: got 0", "--draws 1"),
    ("verify --draws 1 --nproc 1", "--nproc: got 1, needed at least 2", "--nproc 2"),
    ("verify --seed 3", "--seed: got --seed without --draws", "remove --seed"),
    ("verify --types --draws 1", "--draws: got --draws with --types", "remove --draws"),
    ("verify --types --device cpu", "--device: got --device with --types", "remove --device"),
    ("verify --draws 1 --kinds data", "--kinds: got --kinds with --draws", "remove --kinds"),
    ("verify --draws 1 --go_on --json table.json", "--go_on: got --go_on with --draws", "remove --go_on"),
    ("verify --draws 1 --only x", "--only: got --only with --draws", "remove --only"),
    ("verify --draws 1 --recipe dense_tiny", "--recipe: got --recipe with --draws", "remove --recipe"),
    ("verify --draws 1 --device cpu", "--device: got --device with --draws", "remove --device"),
    ("verify --mutations", "--mutations: got a flag that moe verify does not have, needed", "python -m tests.mutations"),
    ("bench sparse-vs-dence", "NAME: got sparse-vs-dence", "did you mean sparse-vs-dense?"),
    ("bench dispatch --seeds 2", "--seeds: got --seeds for dispatch", "remove --seeds"),
    ("report", "moe report: got no RUN_DIR, needed moe report RUN_DIR [OTHER]", "moe report runs/switch_tiny"),
    ("bench sparse-vs-dense --only glam", "--only: got glam, needed one of recipes, experts", "--only experts"),
    ("bench sparse-vs-dense --steps 0", "--steps: got 0", "--steps 1"),
    ("--tyro-print-completion ksh", "--tyro-print-completion: got ksh", "--tyro-print-completion bash"),
    # an encoder-decoder
    (
        "train switch_t5_tiny --nproc 2 --degrees.sp 2",
        "model.max_length: got 256, with 58 tokens for the decoder",
        "set it to one of [262, 264]",
    ),
    (
        "train switch_t5_tiny --nproc 2 --degrees.pp 2 --pipeline.schedule two_bw --model.tied_embeddings false "
        "--optimizer.clip_norm null --pipeline.microbatches 2 --router.balance_scope sequence",
        "pipeline.schedule: got two_bw with model.kind=encoder_decoder",
        "set pipeline.schedule to",
    ),
    (
        "train switch_t5_tiny --nproc 4 --degrees.tp 4 --tensor.sequence_parallel true",
        "model.max_length: got 256, with 58 tokens for the decoder, needed a multiple of 4, and of 4 for the decoder",
        "set it to",
    ),
    ("train switch_t5_tiny --data.objective next_token", "data.objective: got next_token with", "set data.objective to span_corruption"),
    (
        "train switch_t5_tiny --model.positions rotary",
        "model.positions: got rotary with model.kind=encoder_decoder, needed t5",
        "set model.positions to t5",
    ),
    ("train switch_t5_tiny --model.encoder_layers 8", "model.encoder_layers: got 8, needed below", "set it to null"),
    ("train switch_t5_tiny --model.vocab_size 260", "model.vocab_size: got 260, needed at least 270", "set model.vocab_size to null"),
    ("train switch_t5_tiny --model.max_length 2", "model.max_length: got 2, needed at least 3", "set it to 3"),
    ("train switch_t5_tiny --model.kind decoder", "data.objective: got span_corruption with model.kind=decoder", "encoder_decoder"),
    # other systems' or older versions' names for a recipe or a run
    ("show model", "recipe: got model, a model of transformers", "hf:model"),
    ("train old", "recipe: got old, the folder of a run", "old/recipe.yaml"),
    ("generate model", "RUN_DIR: got model, a model of transformers", "moe convert hf:model runs/NAME"),
    ("eval hf:model", "RUN_DIR: got hf:model, a model of transformers", "moe convert hf:model runs/NAME"),
    ("convert model runs/new", "FROM_RUN: got model, a model of transformers, needed hf:model", "moe convert hf:model runs/new"),
    (T + "--init_from empty_folder --nproc 2", "--init_from: got empty_folder, which has no checkpoint", "--init_from runs/NAME"),
    (T + "--lora.rank 2 --nproc 2", "lora.rank: got 2 without weights to start from, needed --init_from", "--init_from runs/NAME"),
    (T + "--train.trackers [trackio] --nproc 2", "train.trackers: got trackio, which is not installed", "pip install trackio"),
    (T + "--init_from model", "--init_from: got model, a model of transformers, needed hf:model", "--init_from hf:model"),
    (
        "convert Qwen/Qwen3-30B-A3B runs/q",
        "FROM_RUN: got Qwen/Qwen3-30B-A3B, which is not here",
        "hf download Qwen/Qwen3-30B-A3B --local-dir",
    ),
    ("convert hf:Qwen/Qwen3 runs/q", "FROM_RUN: got hf:Qwen/Qwen3, which is not here", "then moe convert hf:Qwen3 runs/q"),
    (
        "train Qwen/Qwen3",
        "recipe: got Qwen/Qwen3, which is not here",
        "hf download Qwen/Qwen3 --local-dir Qwen3, then hf:Qwen3",
    ),
    ("eval Qwen/Qwen3", "RUN_DIR: got Qwen/Qwen3, which is not here", "hf download Qwen/Qwen3"),
    (
        T + "--init_from hf:gpt2",
        "--init_from: got hf:gpt2, which is not here",
        "hf download gpt2 --local-dir gpt2, then --init_from hf:gpt2",
    ),
    ("plan switch_tiny --cluster h100x8", "cluster: got h100x8", "did you mean h100-8?"),
    ("plan switch_tiny --cluster h100-16", "cluster: got h100-16", "did you mean h100-8x2?"),
    ("plan switch_tiny --cluster 8xA100", "cluster: got 8xA100", "did you mean a100-"),
    ("show --keys optimiser", "--keys: got optimiser, needed a section of a recipe: model,", "did you mean optimizer?"),
    ("show --keys model --plan", "--plan: got --plan with --keys", "remove --plan"),
    # names and contents of recipe files
    ("train switch_tinny", "recipe: got switch_tinny", "did you mean switch_tiny?"),
    ("train no/such.yaml", "recipe: got no/such.yaml, needed a YAML file, or one of dense_", "moe recipes"),
    ("show not_yaml.yaml", "recipe not_yaml.yaml, line 2", "correct that line"),
    ("show a_list.yaml", "recipe a_list.yaml: got list", "moe show switch_tiny"),
    ("show no_section.yaml", "model in no_section.yaml: got 3", "write model: {key: value}"),
    ("show section_list.yaml", "model in section_list.yaml: got [1, 2]", "write model: {key: value}"),
    ("show unknown_section.yaml", "modle: got a section that does not exist", "did you mean model?"),
    ("show unknown_key.yaml", "model.d_fff: got a key that does not exist", "did you mean model.d_ff?"),
    ("show top_level_key.yaml", "d_ff: got a section that does not exist", "did you mean model.d_ff?"),
    ("train SWITCH_TINY", "recipe: got SWITCH_TINY, needed a YAML file", "did you mean switch_tiny?"),
    ("show dotted.yaml", "train.steps in dotted.yaml: got a key outside its section", "write train: {steps: 3}"),
    ("show tab.yaml", "recipe tab.yaml, line 3: got a tab or another character that begins no value", "correct that line"),
    ("show nothing.yaml", "recipe nothing.yaml: got an empty file", "extends: dense_tiny"),
    ("show twice.yaml", "recipe twice.yaml, line 1: got d_ff twice", "correct that line"),
    ("show date.yaml", "recipe date.yaml", "correct that line"),
    ("show python_tag.yaml", "recipe python_tag.yaml, line 1", "correct that line"),
    ("show deep.yaml", "recipe deep.yaml", "correct that line"),
    ("show circle_a.yaml", "extends: got circle_a.yaml, which extends itself", "remove one `extends:`"),
    ("show orphan.yaml", "recipe: got no_such_parent", "moe recipes"),
    ("show two_parents.yaml", "extends: got ['dense_tiny', 'switch_tiny']", "extends: dense_tiny"),
    ("show bool_steps.yaml", "train.steps: got true", "like 300"),
    ("show null_steps.yaml", "train.steps: got null", "like 300"),
    ("show nested.yaml", "train.steps: got {'a': {'b': {...}}}", "like 300"),
    # K-FAC
    (T + "--optimizer.kind lion", "optimizer.kind: got 'lion', needed adamw, kfac, muon, adafactor, sgd", "optimizer.kind"),
    (T + "--optimizer.kfac.damping 0.1", "optimizer.kfac.damping: got 0.1 with optimizer.kind=adamw", "set optimizer.kind to kfac"),
    (K + "--optimizer.kfac.damping 0", "optimizer.kfac.damping: got 0", "optimizer.kfac.damping"),
    (K + "--optimizer.kfac.delay 5", "optimizer.kfac.delay: got 5, needed below optimizer.kfac.refresh_every=5", "set it to 4"),
    (K + "--sharding.kind fsdp", "optimizer.kind: got kfac with sharding.kind=fsdp", "set sharding.kind to ddp"),
    (K + "--sharding.kind zero --sharding.stage 1", "optimizer.kind: got kfac with sharding.kind=zero and stage 1", "to adamw"),
    (K + "--sharding.kind dp", "optimizer.kind: got kfac with sharding.kind=dp", "set sharding.kind to ddp"),
    (K + "--experts.rebalance_every 5", "experts.rebalance_every: got 5 with optimizer.kind=kfac", "optimizer.kfac.experts to false"),
    (K + "--tiling.ffn 2", "tiling.ffn: got 2 with optimizer.kind=kfac", "set tiling.ffn to 1"),
    # sharding and offload
    (Z + "4", "sharding.stage: got 4, needed 0, 1, 2, 3", "sharding.stage"),
    (T + "--sharding.stage 3", "sharding.stage: got 3 with sharding.kind=ddp", "set sharding.kind to zero"),
    (
        T + "--sharding.kind fsdp --sharding.engine deepspeed",
        "sharding.engine: got deepspeed with sharding.kind=fsdp",
        "remove sharding.engine",
    ),
    (Z + "2 --sharding.engine fsdp", "sharding.engine: got fsdp with sharding.stage=2", "auto"),
    (Z + "0 --sharding.engine deepspeed", "sharding.engine: got deepspeed with sharding.stage=0", "auto"),
    (Z + "1 --sharding.reshard false", "sharding.reshard: got false with sharding.kind=zero", "fsdp"),
    (Z + "1 --sharding.engine deepspeed --precision.master bf16 --precision.compute bf16", "precision.master: got bf16 with", "fp32"),
    (Z + "0 --sharding.offload.optimizer cpu", "sharding.offload.optimizer: got cpu with sharding.stage=0", "set sharding.stage to 1"),
    (
        Z + "1 --sharding.offload.optimizer nvme",
        "sharding.offload.optimizer: got nvme with sharding.stage=1",
        "set sharding.offload.optimizer to cpu",
    ),
    (Z + "2 --sharding.offload.parameters cpu", "sharding.offload.parameters: got cpu with sharding.stage=2", "set sharding.stage to 3"),
    (T + "--sharding.offload.optimizer cpu", "sharding.offload.optimizer: got cpu with sharding.kind=ddp", "set sharding.kind to zero"),
    (
        Z + "3 --sharding.engine fsdp --sharding.offload.parameters cpu",
        "sharding.offload.parameters: got cpu with sharding.engine=fsdp",
        "auto",
    ),
    (
        T + "--sharding.kind fsdp --sharding.offload.optimizer cpu --optimizer.kind muon",
        "optimizer.kind: got muon with sharding.offload.optimizer=cpu",
        "set sharding.offload.optimizer to none",
    ),
    (T + "--sharding.offload cpu", "sharding.offload: got a section without a key", "--sharding.offload.optimizer"),
    (T + "--sharding.ofload.optimizer cpu", "sharding.ofload.optimizer: got a key that does not exist", "did you mean sharding.offload"),
    (T + "--sharding.offload.optimiser cpu", "sharding.offload.optimiser: got a key", "did you mean sharding.offload.optimizer?"),
    (T + "--sharding.offload.optimizer disk", "sharding.offload.optimizer: got 'disk', needed none, cpu, nvme", "offload.optimizer"),
    (Z + "3 --sharding.offload.path empty_folder", "path: got empty_folder with", "remove sharding.offload.path"),
    (Z + NVME, "sharding.offload.path: got null", "--sharding.offload.path FOLDER"),
    (Z + NVME + " --sharding.offload.path empty_fodler", "sharding.offload.path: got empty_fodler, which is not there", "empty_folder?"),
    (Z + NVME + " --sharding.offload.path orphan.yaml", "sharding.offload.path: got orphan.yaml, which is a file", "name a folder"),
    (Z + NVME + " --sharding.offload.path /proc", "sharding.offload.path: got /proc, where nothing can be written", "name a folder"),
    # keys and types
    (T + "--modle.d_ff 512", "modle.d_ff: got a section that does not exist", "did you mean model.d_ff?"),
    (T + "--model.dff 512", "model.dff: got a key that does not exist", "did you mean model.d_ff?"),
    (T + "--moe.num-experts=4", "moe.num_experts: got a section that does not exist", "experts.num_experts"),
    (T + "--model.num_experts 4", "model.num_experts: got a key that does not exist", "did you mean"),
    (T + "--model 4", "--model: got a flag", "--model.KEY VALUE"),
    (T + "--model.d_ff.x 4", "model.d_ff.x: got a key inside a value", "set model.d_ff alone"),
    (T + "--model.d_ff", "--model.d_ff: got no value", "--model.d_ff VALUE"),
    (T + "--model.d_ff 1 --model.d-ff 2", "--model.d-ff: got two values", "remove one"),
    (T + "--model.d_ff many", "model.d_ff: got 'many', needed a valid integer", "model.d_ff"),
    (T + "--model.d_ff 0", "model.d_ff: got 0, needed greater than 0", "model.d_ff"),
    (T + "--model.d_model 1e30", "model.d_model: got '1e30'", "model.d_model"),
    (T + "--model.d_model 9999999999999999", "model.d_model: got 9999999999999999, needed at most", "model.d_model"),
    (T + "--optimizer.lr fast", "optimizer.lr: got 'fast', needed a valid number", "optimizer.lr"),
    (T + "--optimizer.lr .nan", "optimizer.lr: got NaN", "optimizer.lr"),
    (T + "--model.ffn swigloo", "model.ffn: got 'swigloo', needed relu, gelu, geglu, swiglu", "did you mean swiglu?"),
    (T + "--model.tied_embeddings perhaps", "model.tied_embeddings: got 'perhaps'", "model.tied_embeddings"),
    (T + "--router.preset top9", "router.preset: got 'top9', needed switch, switch_mtf, gshard, glam", "router.preset"),
    (T + "--train.seed -1", "train.seed: got -1", "train.seed"),
    (T + "--train.on_nan ignore", "train.on_nan: got 'ignore', needed skip, stop", "train.on_nan"),
    # pairs of values that exclude each other
    (T + "--nproc 4 --degrees.ep 3", "experts.num_experts: got 8, needed a multiple of degrees.ep=3", "set degrees.ep to one of [1, 2, 4]"),
    (T + "--nproc 2 --degrees.ep 4", "degrees.ep: got 4, needed a divisor of dp * sp * tp = 2", "set degrees.ep to one of [1, 2]"),
    (T + "--nproc 2 --degrees.ep 0", "degrees.ep: got 0", "set degrees.ep to 1"),
    (T + "--nproc 2 --degrees.dp 4", "dp 4 * pp 1 * tp 1 * sp 1 = 4 ranks on 2 processes", "--nproc 4"),
    (T + "--degrees.dp 2", "= 2 ranks on 1 process,", "--nproc 2"),
    (T + "--degrees.dp 0", "degrees.dp: got 0", "degrees.dp"),
    (T + "--nproc 4 --degrees.tp 4", "degrees.tp: got 4, needed a divisor of model.num_heads=2", "set degrees.tp to one of [1, 2]"),
    (T + "--nproc 2 --degrees.tp 2 --model.d_ff 511", "degrees.tp: got 2, needed a divisor of model.d_ff=511", "set degrees.tp to 1"),
    (
        T + "--nproc 4 --degrees.tp 4 --model.d_model 96 --model.num_heads 12 --model.num_kv_heads 6",
        "degrees.tp: got 4, needed a divisor or a multiple of model.num_kv_heads=6",
        "set degrees.tp to one of [1, 2]",
    ),
    (
        T + "--nproc 2 --degrees.tp 2 --tiling.head 200",
        "tiling.head: got 200, needed at most the vocabulary size 256 / degrees.tp=2",
        "set it to 1",
    ),
    (
        T + "--nproc 2 --degrees.tp 2 --tiling.ffn 512",
        "tiling.ffn: got 512, needed a divisor of model.d_ff / degrees.tp=2=256",
        "set it to one of [1, 2, 4, 8, 16, 32, 64, 128, 256]",
    ),
    (
        T + "--nproc 6 --degrees.tp 6 --tensor.kind 2d",
        "degrees.tp: got 6 with tensor.kind=2d, needed a square: q * q",
        "set degrees.tp to 4, and add --nproc 4",
    ),
    (T + "--nproc 6 --degrees.tp 6 --tensor.kind 3d", "degrees.tp: got 6 with tensor.kind=3d, needed a cube", "set degrees.tp to 8"),
    (
        T + "--nproc 6 --degrees.tp 6 --tensor.kind 2.5d",
        "degrees.tp: got 6 with tensor.kind=2.5d, needed depth * q * q, both at least 2",
        "set degrees.tp to 8",
    ),
    (
        T + "--nproc 8 --degrees.tp 8 --tensor.kind 2.5d --tensor.depth 4",
        "tensor.depth: got 4 with degrees.tp=8, needed degrees.tp / depth to be a square",
        "set it to 2",
    ),
    (
        T + "--train.save_mode async --sharding.kind zero --sharding.stage 3 --sharding.offload.optimizer nvme --sharding.offload.path .",
        "train.save_mode: got async with states on nvme, needed sync",
        "set train.save_mode to sync",
    ),
    (T + "--tensor.depth 2", "tensor.depth: got 2 with tensor.kind=1d, needed tensor.kind 2.5d", "remove tensor.depth"),
    (
        T + "--nproc 4 --degrees.tp 4 --tensor.kind 2d --model.d_model 96 --model.num_heads 6 --model.num_kv_heads 3",
        "degrees.tp: got 4 with tensor.kind=2d, a grid of 2 x 2, which cuts model.num_kv_heads=3 into 2, needed a grid that cuts this size",
        "set model.num_kv_heads to 2",
    ),
    (
        T + "--nproc 4 --degrees.tp 4 --tensor.kind 2d --train.global_batch 3",
        "degrees.tp: got 4 for a micro-batch of 3 sequences, needed a number of sequences that is a multiple of the 2 rows of tp's grid",
        "set train.global_batch to a multiple of 2",
    ),
    (
        "train dense_tiny --nproc 4 --degrees.tp 4 --tensor.kind 2d --train.global_batch 3",
        "degrees.tp: got 4 for a micro-batch of 3 sequences, needed a number of sequences that is a multiple of the 2 rows of tp's grid",
        "set train.global_batch to a multiple of 2",
    ),
    (T + "--nproc 2 --degrees.tp 2 --optimizer.kind kfac", "optimizer.kind: got kfac with degrees.tp=2, needed adamw", "degrees.tp to 1"),
    (
        T + "--nproc 2 --degrees.tp 2 --tensor.sequence_parallel true --model.max_length 99",
        "model.max_length: got 99, needed a multiple of degrees.tp=2 with tensor.sequence_parallel",
        "set it to 100",
    ),
    (
        T + "--tensor.sequence_parallel true",
        "tensor.sequence_parallel: got true with degrees.tp=1 and tensor.kind=1d, needed tensor.kind 1d or dtensor with degrees.tp",
        "set tensor.sequence_parallel to false",
    ),
    (
        T + "--nproc 2 --degrees.tp 2 --tensor.kind copied --tensor.overlap_chunks 2",
        "tensor.overlap_chunks: got 2 with degrees.tp=2 and tensor.kind=copied, needed tensor.kind 1d with degrees.tp above 1",
        "set tensor.overlap_chunks to 1",
    ),
    (
        T + "--nproc 2 --degrees.tp 2 --tensor.overlap_chunks 2 --tiling.ffn 2",
        "tensor.overlap_chunks: got 2 with tiling.ffn=2, needed networks without tiles",
        "set tensor.overlap_chunks to 1, or tiling.ffn to 1",
    ),
    (
        T + "--nproc 2 --degrees.tp 2 --tensor.kind dtensor --model.num_kv_heads 1",
        "degrees.tp: got 2 with tensor.kind=dtensor, needed a divisor of model.num_kv_heads=1",
        "set tensor.kind to 1d, which holds copies of heads",
    ),
    ("show switch_tiny --nproc 2", "--nproc: got 2 without --plan", "add --plan"),
    ("show switch_tiny --plan --nproc 2 --rank 2", "--rank: got 2, needed 0 to 1", "another --nproc"),
    (T + "--nproc 2 --degrees.sp 0", "degrees.sp: got 0", "set degrees.sp to 1"),
    (
        T + "--nproc 2 --degrees.sp 2 --model.max_length 30",
        "model.max_length: got 30, needed a multiple of 2 * degrees.sp = 4 for sequence.order=zigzag",
        "set it to 32",
    ),
    (
        T + "--nproc 3 --degrees.sp 3 --sequence.kind ulysses --model.max_length 30",
        "degrees.sp: got 3 ranks that exchange heads for tokens, with model.num_heads=2, needed a divisor of the number of heads",
        "set sequence.heads to 1 and sequence.kind to ring",
    ),
    (T + "--nproc 4 --degrees.sp 4 --sequence.heads 3", "sequence.heads: got 3, needed a divisor of degrees.sp=4", "to one of [1, 2]"),
    (
        T + "--nproc 2 --degrees.sp 2 --sequence.kind lightseq --sequence.order zigzag",
        "sequence.order: got zigzag with sequence.kind=lightseq, needed contiguous",
        "set sequence.order to null, or sequence.kind to ring",
    ),
    (
        T + "--nproc 2 --degrees.sp 2 --sequence.keep_attention true --recompute.kind selective",
        "sequence.keep_attention: got true with recompute.kind=selective, needed recompute.kind full",
        "set sequence.keep_attention to false, or recompute.kind to full",
    ),
    (
        T + "--nproc 2 --degrees.sp 2 --sequence.kind ulysses --sequence.heads 2",
        "sequence.heads: got 2 with sequence.kind=ulysses, needed 1",
        "set sequence.heads to 1, or sequence.kind to ring",
    ),
    (T + "--nproc 2 --degrees.sp 2 --sharding.kind dp", "sharding.kind: got dp with degrees.sp=2", "set sharding.kind to ddp"),
    (T + "--degrees.tp 0", "degrees.tp: got 0", "set degrees.tp to 1"),
    (
        T + "--nproc 4 --degrees.tp 4 --tensor.kind copied --model.max_length 3",
        "degrees.tp: got 4, needed at most the 3 tokens of a sequence on a rank of sp: each rank of tp routes at least one",
        "set degrees.tp to 1, or model.max_length to 4",
    ),
    (T + "--nproc 2 --degrees.tp 2 --tensor.kind copied --sharding.kind dp", "sharding.kind: got dp with degrees.tp=2", "ddp"),
    (
        T + "--nproc 2 --train.global_batch 5",
        "train.global_batch: got 5, needed a multiple of degrees.dp * pipeline.microbatches = 2 * 1",
        "set it to 4",
    ),
    (T + "--pipeline.microbatches 3", "train.global_batch: got", "set it to"),
    (T + "--train.eval_sequences 3 --nproc 2", "train.eval_sequences: got 3", "set it to 4"),
    (T + "--router.group 3 --train.global_batch 4", "router.group: got 3 sequences", "set router.group to one of [1, 2, 4]"),
    (T + "--router.group 0", "router.group: got 0", "set router.group to sequence"),
    (T + "--router.group pair", "router.group: got 'pair', needed sequence, rank, preset or a number", "set router.group to sequence"),
    (
        T + "--router.capacity_factor 1e-9 --router.min_capacity 0",
        "router.capacity_factor: got 1e-09 with min_capacity 0, needed 0.001 or more, or router.min_capacity above 0",
        "set router.capacity_factor to 1.0",
    ),
    (
        T + "--router.capacity_factor 0.01 --router.capacity_rounding floor --router.min_capacity 0",
        "router.capacity_factor: got 0.01, which gives each of 8 experts no slot for 256 tokens (capacity_rounding floor), needed",
        "set router.min_capacity to 1",
    ),
    (
        T + "--experts.num_experts [4,64] --router.capacity_factor 0.05 --router.capacity_rounding floor --router.min_capacity 0",
        "router.capacity_factor: got 0.05, which gives each of 64 experts no slot for 256 tokens (capacity_rounding floor), needed",
        "set router.min_capacity to 1",
    ),
    (T + "--optimizer.lr 1e30", "optimizer.lr: got '1e30', needed less than or equal to 1000", "set optimizer.lr"),
    (
        T + "--model.scales.residual 1e-30",
        "model.scales.residual: got '1e-30', needed greater than or equal to 0.000001",
        "model.scales.residual",
    ),
    (
        T + "--model.encoder_layers 1000000000000",
        "model.encoder_layers: got 1000000000000, needed less than or equal to 10000",
        "model.enc",
    ),
    (T + "--router.eval_capacity_factor -1", "router.eval_capacity_factor: got -1", "router.eval_capacity_factor"),
    (
        T + "--router.preset glam --experts.num_experts 1",
        "experts.num_experts: got 1, needed at least a token's 2 choices",
        "router.preset to switch",
    ),
    (T + "--router.preset gshard --router.num_choices 3", "router.second: got random with 3 choices, needed", "router.second to always"),
    # routers: settings that would fail, or be silently wrong
    (
        T + "--router.gates before_drop",
        "router.gates: got before_drop with one choice, needed as_is: a gate that sums to 1 is always 1",
        "num_choices",
    ),
    (T + "--router.gates after_drop", "router.gates: got after_drop with one choice", "set router.gates to as_is"),
    (T + "--router.softmax_over chosen", "router.softmax_over: got chosen with one choice", "set router.softmax_over to all"),
    (T + "--router.preset mixtral --router.score sigmoid", "router.softmax_over: got chosen with score sigmoid", "softmax_over to all"),
    (T + "--router.preset mixtral --router.gates before_drop", "router.gates: got before_drop with softmax_over chosen", "to as_is"),
    (T + "--router.second random", "router.second: got random with 1 choice, needed a top-2 preset", "router.preset to gshard"),
    (T + "--router.num_choices 9", "experts.num_experts: got 8, needed at least a token's 9 choices", "set it to 9"),
    (T + "--router.num_choices 0", "router.num_choices: got 0, needed greater than 0", "router.num_choices"),
    (T + "--router.select topk", "router.select: got 'topk'", "did you mean top_k?"),
    (
        T + "--router.select group_limited --router.expert_groups 3",
        "router.expert_groups: got 3, needed a divisor of experts.num_experts=8",
        "set router.expert_groups to one of [2, 4, 8]",
    ),
    (
        T + "--router.select group_limited --router.expert_groups 2 --router.top_groups 3",
        "router.top_groups: got 3, needed at most expert_groups=2",
        "set it to 2",
    ),
    (
        T + "--router.preset deepseek_v3",
        "router.top_groups: got 4 groups of 1 expert, needed at least 8 experts, one for each choice of a token",
        "set it to 8",
    ),
    (
        T + "--router.select hash --router.balance_weight 0 --router.bias_rate 0.1",
        "router.bias_rate: got 0.1 with select hash, needed null",
        "null",
    ),
    (T + "--router.select hash --router.balance_weight 0 --router.noise gumbel", "router.noise: got gumbel with select hash", "to none"),
    (
        T + "--router.select hash --router.balance_weight 0 --router.noise noisy_top_k",
        "router.noise: got noisy_top_k with select hash, needed none: no other noise changes the choice",
        "router.select to top_k",
    ),
    (
        T + "--router.expert_groups 2",
        "router.expert_groups: got 2 with select top_k, needed 1: only group_limited knows groups of experts",
        "router.select to group_limited",
    ),
    (T + "--router.select group_limited", "router.select: got group_limited with expert_groups 1", "router.expert_groups to 2"),
    (
        T + "--router.capacity_factor null --router.drop lowest_gate",
        "router.drop: got lowest_gate with capacity_factor null, needed position: without a capacity no choice is dropped",
        "set router.drop to position",
    ),
    (
        T + "--router.preset expert_choice --router.balance_weight 0 --router.queue tokens_first",
        "router.queue: got tokens_first with select expert_choice, needed choices_first: experts take their best tokens",
        "router.select to top_k",
    ),
    (
        T + "--router.capacity_factor null --router.balance_scope global_batch --router.group rank",
        "router.group: got rank with capacity_factor null and balance_scope global_batch, needed sequence: nothing is counted over groups",
        "router.balance_scope to sequence",
    ),
    (T + "--router.select hash", "router.balance_weight: got 0.01 with select hash, needed 0: a hash chooses", "balance_weight to 0"),
    (
        T + "--router.select sinkhorn --router.balance_weight 0 --router.importance_weight 0.1",
        "router.importance_weight: got 0.1 with select sinkhorn, needed 0: the plan already gives every expert its share",
        "importance_weight to 0",
    ),
    (
        T + "--router.preset expert_choice --router.balance_weight 0 --router.capacity_factor null",
        "router.capacity_factor: got null with select expert_choice, needed a number",
        "set router.capacity_factor to 1.0",
    ),
    (
        T + "--router.preset expert_choice --router.balance_weight 0 --router.gates after_drop",
        "router.gates: got after_drop with select expert_choice, needed as_is",
        "set router.gates to as_is",
    ),
    (
        T + "--router.preset expert_choice --router.balance_weight 0",
        "router.allow_noncausal: got false with select expert_choice, needed true: an expert chooses its tokens from the whole",
        "router.select to top_k",
    ),
    (
        T + "--router.balance_counts unbiased",
        "router.balance_counts: got unbiased with select top_k and bias_rate null, needed all",
        "set router.balance_counts to all",
    ),
    (T + "--router.drop lowest_gate", "a later token with a higher gate takes an earlier one's slot", "set router.drop to position"),
    (T + "--router.drop random", "router.allow_noncausal: got false with drop random", "set router.drop to position"),
    (T + "--router.select sinkhorn --router.balance_weight 0", "got false with select sinkhorn", "router.allow_noncausal to true"),
    (T + "--router.allow_noncausal maybe", "router.allow_noncausal: got 'maybe'", "router.allow_noncausal"),
    (T + "--router.bias_rate -1", "router.bias_rate: got -1, needed greater than or equal to 0", "router.bias_rate"),
    (
        T + "--router.capacity_rounding up",
        "router.capacity_rounding: got 'up', needed preset, ceil, floor, round",
        "router.capacity_rounding",
    ),
    ("train dense_tiny --nproc 2 --degrees.ep 2", "degrees.ep: got 2, needed 1 for a dense model", "model.moe_every to 2"),
    ("train dense_tiny --nproc 2 --degrees.etp 2", "degrees.etp: got 2, needed 1 for a dense model", "model.moe_every to 2"),
    (
        T + "--nproc 3 --degrees.etp 3 --train.global_batch 6",
        "degrees.etp: got 3, needed a divisor of the experts' d_ff=512",
        "set degrees.etp to 1 and",
    ),
    (
        T + "--nproc 4 --degrees.etp 4 --experts.d_ff 40 --experts.kernels grouped_mm --precision.compute bf16",
        "experts.kernels: got grouped_mm for a rank's d_ff 10, needed a multiple of 8 in bf16, such as 8 or 16",
        "set it to auto",
    ),
    (
        T + "--tiling.ffn 4 --experts.d_ff 40 --experts.kernels grouped_mm --precision.compute fp32",
        "experts.kernels: got grouped_mm for a tile's d_ff 10, needed a multiple of 4 in fp32, such as 8 or 12",
        "set it to auto",
    ),
    (T + "--nproc 4 --degrees.etp 2 --degrees.ep 4", "degrees.ep * degrees.etp: got 8, needed a divisor of dp * sp * tp = 4", "[1, 2]"),
    (T + "--degrees.etp 0", "degrees.etp: got 0", "set degrees.etp to 1"),
    # dispatchers
    (T + "--dispatch.kind alltoall", "dispatch.kind: got 'alltoall', needed auto, all_to_all", "did you mean all_to_all?"),
    (
        T + "--nproc 2 --dispatch.kind padded --dispatch.overlap_chunks 2",
        "dispatch.overlap_chunks: got 2 with dispatch.kind=padded, needed 1: only all_to_all sends chunks",
        "set dispatch.kind to all_to_all",
    ),
    (T + "--dispatch.kind all_gather --dispatch.overlap_chunks 2", "1: only all_to_all sends chunks", "dispatch.overlap_chunks to 1"),
    (
        T + "--nproc 2 --dispatch.overlap_chunks 3",
        "dispatch.overlap_chunks: got 3, needed a divisor of 4, the experts that a rank holds",
        "set it to one of [1, 2, 4]",
    ),
    (T + "--nproc 4 --dispatch.kind hierarchical", "dispatch.node_size: got null with dispatch.kind=hierarchical", "one of [1, 2, 4]"),
    (T + "--nproc 4 --dispatch.kind hierarchical --dispatch.node_size 3", "node_size: got 3, needed a divisor of degrees.ep=4", "[1, 2"),
    (T + "--dispatch.node_size 2", "dispatch.node_size: got 2 with dispatch.kind=auto", "dispatch.kind to hierarchical"),
    (T + "--model.moe_every 9", "model.moe_every: got 9, needed at most num_layers=4", "0 for a dense model"),
    (T + "--model.moe_layers [1,3]", "model.moe_layers: got a list, and model.moe_every=2 too", "remove model.moe_every"),
    (T + "--model.moe_every 0 --model.moe_layers [7]", "model.moe_layers: got [7]", "remove [7]"),
    (T + "--model.num_heads 3", "model.num_heads: got 3, needed a divisor of d_model=128", "set model.num_heads to one of [1, 2, 4"),
    (T + "--model.num_heads 4 --model.num_kv_heads 3", "model.num_kv_heads: got 3", "set it to one of [1, 2, 4]"),
    (T + "--model.head_size 7", "model.head_size: got 7, needed an even size", "model.positions to t5"),
    (T + "--model.vocab_size 100", "model.vocab_size: got 100, needed at least the tokenizer's 256", "null"),
    (T + "--precision.compute fp16 --precision.loss_scale none", "precision.loss_scale: got none with compute fp16", "dynamic"),
    (T + "--precision.compute bf16 --precision.loss_scale dynamic", "precision.loss_scale: got dynamic with compute bf16", "none"),
    (T + "--precision.compute fp16 --precision.master bf16 --precision.loss_scale dynamic", "precision.master: got bf16", "fp32"),
    (T + "--precision.compute fp16 --precision.loss_scale -8", "precision.loss_scale: got -8", "dynamic"),
    (T + "--precision.compute fp32 --precision.casts step", "precision.casts: got step with compute fp32 and master fp32", "use"),
    (B + "--sharding.kind fsdp", "precision.casts: got step with sharding.kind=fsdp", "ddp"),
    (B + "--sharding.kind zero --sharding.stage 1", "precision.casts: got step with sharding.kind=zero", "ddp"),
    (B + "--sharding.kind dp", "precision.casts: got step with sharding.kind=dp", "ddp"),
    (T + "--precision.compute fp8", "precision.compute: got 'fp8'", "precision.compute"),
    (T + "--data.source text", "data.path: got null, needed a path for data.source=text", "--data.path"),
    (T + "--data.source text --data.path no_such.txt", "data.path: got no_such.txt", "spelling"),
    (T + "--data.source text --data.path texd.txt", "data.path: got texd.txt", "did you mean text.txt?"),
    (T + "--data.source text --data.path empty.txt", "data.path: got empty.txt, which is empty", "holds text"),
    (T + "--data.source text --data.path empty_folder", "data.path: got empty_folder, which is empty", "holds text"),
    (T + "--data.sources a.txt", "data.sources: got 'a.txt', needed a list of {path, weight}", "write data.sources: [{path: a.txt,"),
    (T + "--data.sources [1]", "data.sources[0]: got 1", "write data.sources: [{path: a.txt,"),
    (
        T + "--optimizer.kind muon --sharding.kind zero --sharding.engine deepspeed",
        "optimizer.kind: got muon with",
        "sharding.engine to auto",
    ),
    (T + "--model.document_mask true --model.document_separator 256", "model.document_separator: got 256", "255"),
    (T + "--model.document_separator 0", "model.document_separator: got 0 with model.document_mask=false", "document_mask to true"),
    (T + "--data.tokenizer bpe --data.vocab_size 10", "data.vocab_size: got 10, needed greater than 256", "data.vocab_size"),
    (T + "--data.path gone.txt", "data.path: got gone.txt, a link to nowhere.txt, which is not there", "check the spelling"),
    (T + "--data.path pipe", "data.path: got pipe, not a regular file, needed a file or folder", "write the text into a file first"),
    (T + "--data.path https://a.b/c.txt", "data.path: got https://a.b/c.txt, needed a file or folder that exists", "download it"),
    (T + "--data.source files", "data.source: got 'files', needed python_stdlib, text, jsonl", "did you mean text?"),
    (T + "--data.source text --data.path 2024-01-01", "data.path: got 2024-01-01, needed a file or folder that exists", "spelling"),
]

RUN_ALL = """
import contextlib, io, json, sys, time
from moe.cli.main import main

results = []
for words in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    started = time.process_time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(words.split())
        except SystemExit as left:
            code = left.code
    results.append([code, out.getvalue(), err.getvalue(), time.process_time() - started])
print(json.dumps([results, sorted({"torch", "deepspeed", "matplotlib", "transformers"} & set(sys.modules))]))
"""


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")} | {"PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bad")
    for name, text in FILES.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(text)
    (path / "empty_folder").mkdir()
    os.mkfifo(path / "pipe")
    (path / "gone.txt").symlink_to("nowhere.txt")
    return path


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, list]:
    words = json.dumps([case[0] for case in CASES])
    got = subprocess.run(
        [sys.executable, "-c", RUN_ALL], input=words, capture_output=True, text=True, cwd=folder, env=environment(), timeout=120
    )
    assert got.returncode == 0, got.stderr
    found, heavy = json.loads(got.stdout)
    assert heavy == [], f"loaded before it was needed: {heavy}"
    return {case[0]: result for case, result in zip(CASES, found, strict=True)}


@pytest.mark.parametrize(("words", "what", "fix"), CASES, ids=[case[0].replace(" ", "_") for case in CASES])
def test_bad_input_is_one_line_that_names_the_fault_and_the_fix(results, words: str, what: str, fix: str) -> None:
    code, out, err, seconds = results[words]
    assert code == 2 and out == ""
    assert err.startswith("error: ") and err.endswith("\n") and len(err.splitlines()) == 1, err
    head, mark, advice = err.partition("; fix: ")
    assert mark and ", needed " in head, err
    assert what in head, err
    assert fix in advice, err
    assert seconds < 1.0


def test_no_line_lists_more_than_five_names(results) -> None:
    """A line may list more than five numbers, because each of them is a value that works."""
    long = re.compile(r"(?:[a-z][\w./*+-]*, ){5,}[a-z]")
    assert [err for _, _, err, _ in results.values() if long.search(err)] == []


def test_no_line_has_one_thing_in_the_plural(results) -> None:
    """A line says 1 head, not 1 heads: `counted` joins a number and a noun. No fix or got says `it` for a flag."""
    many = re.compile(r"(?<![\w.,/*=-])1 (?!as |is |this |less |across )[a-z-]+[^s\W]s\b|: got it\b")
    assert [err for _, _, err, _ in results.values() if many.search(err)] == []


def processor_seconds(command: list[str], folder: Path) -> tuple[float, subprocess.CompletedProcess[str]]:
    before = os.times()
    got = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=folder, env=environment(), timeout=60)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system, got


@pytest.fixture(scope="module")
def torch_takes(folder: Path) -> float:
    return processor_seconds(["-c", "import torch"], folder)[0]


@pytest.mark.parametrize(
    "words", ["trian switch_tiny", T + "--nproc 4 --degrees.ep 3", T + "--data.source text --data.path no_such.txt", "show twice.yaml"]
)
def test_the_line_comes_before_torch_could_be_imported(folder: Path, torch_takes: float, words: str) -> None:
    """The error costs less processor time than three quarters of `import torch`, which is measured on this machine just before."""
    used, got = processor_seconds(["-m", "moe", *words.split()], folder)
    assert got.returncode == 2 and len(got.stderr.splitlines()) == 1
    assert used < 0.75 * torch_takes


@settings(max_examples=150, deadline=None)
@given(key=st.sampled_from(known_keys()), text=st.text(max_size=12), recipe=st.sampled_from(recipe_names()), world=st.integers(1, 4))
def test_any_text_for_any_key_is_a_run_or_a_bad_input(key: str, text: str, recipe: str, world: int) -> None:
    try:
        check_run(load(recipe, {key: text})[0], world)
    except BadInput as bad:
        assert len(str(bad).splitlines()) <= 1 and "; fix: " in str(bad)


@pytest.mark.parametrize("stage", ["0", "1"])
def test_a_continuous_pipeline_takes_zero_of_stage_0_which_is_ddp(stage: str) -> None:
    changed = {"degrees.pp": "2", "pipeline.schedule": "pipedream", "optimizer.clip_norm": "null", "sharding.kind": "zero"}
    run = load("switch_tiny", changed | {"sharding.stage": stage})[0]
    if stage == "0":
        check_run(run, 2)
        return
    with pytest.raises(BadInput, match="sharding.kind: got zero with pipedream"):
        check_run(run, 2)


def test_a_disk_without_libaio_is_refused_only_where_it_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe with NVMe offload is valid on any machine; training it without libaio gives one line with the command that installs it."""
    monkeypatch.setattr("moe.checks.sharding.missing_for_nvme", lambda: ["libaio-dev"])
    disk = {"sharding.kind": "zero", "sharding.stage": "3", "sharding.offload.optimizer": "nvme", "sharding.offload.path": str(tmp_path)}
    run = check_run(load("switch_tiny", disk)[0], 2)
    with pytest.raises(BadInput) as refused:
        check_installed(run)
    said = str(refused.value)
    assert said.startswith("sharding.offload: got nvme without libaio-dev, needed ") and "\n" not in said
    assert said.endswith("; fix: apt-get install libaio-dev, or set sharding.offload.optimizer to cpu")


def test_a_folder_that_cannot_be_read_is_not_called_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may read every file, so the refusal is simulated
    with pytest.raises(BadInput, match=f"data.path: got {tmp_path}: Permission denied, .*; fix: chmod -R u.rX {tmp_path}"):
        check_run(load("switch_tiny", {"data.path": str(tmp_path)})[0], 1)


def test_numbers_are_read_as_a_user_writes_them() -> None:
    run, origins = load("switch_tiny", {"optimizer.lr": "1e-3", "train.steps": "7", "router.capacity_factor": "null", "data.path": "010"})
    assert (run.optimizer.lr, run.train.steps, run.router.capacity_factor, run.data.path) == (1e-3, 7, None, "010")
    assert origins["optimizer.lr"] == "command line" and origins["model.moe_every"] == "switch_tiny.yaml"
