"""`moe convert hf:PATH runs/NAME` and `moe convert runs/NAME hf:PATH`: converts between a folder of transformers and a run.

    config.json       <->  recipe              config.py; unsupported keys are refused by name
    *.safetensors     <->  checkpoints/step-0  tensors.py; one tensor in memory at a time
    tokenizer.json    <->  the run's tokenizer tokenizer.py
    chat template ... <->  RUN/huggingface/    other files of the model, copied unchanged (_COPIED)

All names and shapes are compared before anything is written. A folder is written under a temporary name and renamed when it is complete,
so a failed conversion leaves nothing behind. Exported tensors get their original dtype again, so a round trip is bitwise exact.
"""

from __future__ import annotations

import json as json_text
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from moe.checks.together import check_together
from moe.convert.convert import by_global_name, find
from moe.convert.huggingface import PREFIX
from moe.convert.huggingface.adapters import write_adapters
from moe.convert.huggingface.config import config_of, family_of, recipe_values
from moe.convert.huggingface.families import FAMILIES, kind_of
from moe.convert.huggingface.tensors import Source, by_key, shape_of, write, written
from moe.convert.huggingface.tokenizer import read_tokenizer, write_tokenizer
from moe.data.tokenizer import Bytes
from moe.data.tokenizer_file import loaded
from moe.launch import exit_codes
from moe.model.transformer import Transformer
from moe.parallelize.plan import lay_out
from moe.recipe.changes import Change, function_changes
from moe.recipe.keys import keys_of
from moe.recipe.load import build_run, load, resolved_yaml
from moe.recipe.sections import Run
from moe.records.results import write_json
from moe.train.start.place import unused_name
from moe.train.start.restore import Merged, whole
from moe.train.start.resume import KEPT, kept
from moe.train.start.state import EXTRA, Counters
from parallel.errors import BadInput, counted, some
from parallel.mesh.mesh import Degrees, Mesh
from parallel.numerics.precision import DTYPES, LossScale
from parallel.store import checkpoint
from parallel.store.checkpoint import Piece
from parallel.store.files import read_text, reason, user_path

ORIGINAL_DTYPES = "dtypes.json"  # file in the folder KEPT: dtypes of the tensors in the imported model's files
_COPIED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "*.model",
               "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json", "chat_template.json", "*.jinja",
               "additional_chat_templates/*.jinja", "LICENSE*", "NOTICE*", "README*.md")  # fmt: skip
# file with a model's card; file to which the imported model's card is renamed if the exported model was trained further
CARD, OLD_CARD = "README.md", "README.base.md"
MOST_FURTHER = 64  # largest accepted number of layers for multi-token prediction; published models have one
Shapes = dict[str, tuple[int, ...]]


def shapes_of(run: Run) -> Shapes:
    """Return name -> shape of all parameters in a checkpoint of the run."""
    with torch.device("meta"):
        model = Transformer(run.model, run.experts, run.router, vocab_size=run.vocab_size)
    return {name: tuple(tensor.shape) for name, tensor in by_global_name(model, lay_out(model)).items()}


def biases_of(run: Run) -> Shapes:
    """Return name -> shape of the routers' selection biases in a checkpoint of the run. They are buffers, not parameters."""
    sparse = run.model.layers_with_experts() if run.router.bias_rate is not None else ()
    return {f"layers.{layer}.router.bias": (run.experts.of_layer(nth),) for nth, layer in enumerate(sparse)}


@contextmanager
def _whole(out: Path, what: str, *, earlier: bool = False) -> Iterator[Path]:
    """Yield a temporary folder. When the context exits, it is renamed to `out`; after an error, it is removed. `what`: the argument that
    names `out`, for errors. `earlier`: `out` has an earlier conversion, which is replaced."""
    if not earlier and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BadInput(what, got=f"{out}, which is not empty", needed="a new folder", fix="choose another folder")
    part, made = out.with_name(f".{out.name}.partial-{os.getpid()}"), False
    try:
        part.mkdir(parents=True)
        made = True
        yield part
        if earlier:
            _replace(out, part)
        else:
            if out.is_dir():
                out.rmdir()
            part.rename(out)
    except OSError as error:
        fix = "free disk space, or choose another place"
        raise BadInput(what, got=f"{out}: {error.strerror or error}", needed="a folder that can be written", fix=fix) from None
    finally:
        if made:  # never remove a folder that existed before
            shutil.rmtree(part, ignore_errors=True)


def _replace(base: Path, part: Path) -> None:
    """Replace the folder `base` by `part`, and remove the old folder. The old folder is renamed instead if its weights differ from those of
    `part` and the run has checkpoints, because these may be adapters that need the old weights."""
    aside, manifest = unused_name(base), "checkpoints/step-0/manifest.json"
    needed = any(base.parent.glob("checkpoints*/step-*/manifest.json")) and not (
        (base / manifest).is_file() and (base / manifest).read_bytes() == (part / manifest).read_bytes()
    )
    base.rename(aside)
    part.rename(base)
    if not needed:
        shutil.rmtree(aside)


def to_run(source: Path, out: Path, *, overrides: Mapping[str, str], without_mtp: bool = False, earlier: bool = False) -> list[str]:
    """Convert the transformers folder `source` to the run `out`. Return lines to print. Raises BadInput before the run's folder exists.
    `overrides`: recipe keys that the user sets, with their values. `without_mtp`: leave out layers for multi-token prediction, which
    transformers does not load either. `earlier`: `out` has an earlier conversion, which is replaced when the new one is complete."""
    config = config_in(source)
    values = recipe_values(config)
    length = overrides.get("model.max_length", values["model"]["max_length"])  # decides the number of sentinel tokens
    tokenizer, said = read_tokenizer(source, config, build_run(values | {"model": values["model"] | {"max_length": length}}))
    read_as = {"tokenizer": "bpe", "vocab_size": max(257, tokenizer["vocab_size"])}
    values["data"] = values.get("data", {}) | ({"tokenizer": "bytes"} if tokenizer["kind"] == Bytes.name else read_as)
    family, files = family_of(config), Source(source, config.get("quantization_config"))
    further = [f"model.layers.{config['num_hidden_layers'] + depth}." for depth in range(_further_layers(config))]
    if without_mtp and not any(key.startswith(tuple(further)) for key in files.files):
        got, needed = f"{source} without layers for multi-token prediction", "a model with such layers"
        raise BadInput("--without_mtp", got=got, needed=needed, fix="leave out --without_mtp")
    with _whole(out, "TO_RUN", earlier=earlier) as part:
        run, origins = _recipe(part / "config.yaml", values, overrides)
        shapes, biases = shapes_of(run), biases_of(run)
        files.check(family, shapes | biases, tied=run.model.tied_embeddings, further=tuple(further), without_further=without_mtp)
        kinds = dict.fromkeys(shapes, "weight") | dict.fromkeys(biases, EXTRA)
        held = ((kinds[name], Piece(name, shape, (0,) * len(shape), files.tensor(name))) for name, shape in (shapes | biases).items())
        state = {
            "counters": vars(Counters()),
            "loss_scale": LossScale.of(run.precision.loss_scale).state(),
            "recipe": run.resolve(1).model_dump(mode="json"),
            "tokenizer": tokenizer,
            "data": "",
        }
        checkpoint.save(part / "checkpoints", 0, held, state=state, world=Mesh.of(Degrees()).axis("world"), keep=1)
        (part / "recipe.yaml").write_text(resolved_yaml(run, origins))
        _take_along(source, part / KEPT)
        (part / KEPT / ORIGINAL_DTYPES).write_text(json_text.dumps(files.dtypes()) + "\n")
    longest = config.get("max_position_embeddings", run.model.max_length)
    if "model.max_length" not in overrides and run.model.max_length < longest:
        said.append(f"model.max_length is {run.model.max_length} of {longest}: --model.max_length changes that")
    if _further_layers(config):
        said.append(f"{counted(len(further), 'layer')} for multi-token prediction not converted; the main model uses none")
    if quantization := config.get("quantization_config"):
        said.append(f"weights in {quantization['quant_method']} were decoded to bf16")
    verb = "eval" if run.model.kind == "encoder_decoder" else "generate"
    return [f"{family.architecture}: {source} -> {out}, {len(shapes)} tensors", *said, f"continue with: moe {verb} {out}"]


def _further_layers(config: Mapping[str, Any]) -> int:
    """Return the number of layers for multi-token prediction. In the files they come after the main model's layers."""
    counts = {key: config.get(key) or 0 for key in ("num_nextn_predict_layers", "num_mtp_layers")}
    for key, count in counts.items():
        if type(count) is not int or not 0 <= count <= MOST_FURTHER:
            fix = "take the config.json that belongs to the files"
            raise BadInput(f"config.json: {key}", got=count, needed=f"a number from 0 to {MOST_FURTHER}", fix=fix)
    return max(counts.values())


def begin_from(source: Path, base: Path, *, recipe: str, overrides: Mapping[str, Any]) -> list[str]:
    """Convert the folder `source`, given as `--init_from hf:PATH`, to the run `base`. A run of `recipe` then starts from the weights of
    `base`. Return lines to print. An earlier conversion in `base` is replaced. Raises BadInput, before a tensor is read, if the recipe
    describes another model."""
    run = load(recipe, overrides)[0]
    differs = _differences(run, shapes_of(run) | biases_of(run), config_in(source))
    if differs:
        first = differs[0]
        got = f"{first.key} {first.before}" if isinstance(first, Change) else first
        needed = f"the model of {source}" + (f", with {first.key} {first.after}" if isinstance(first, Change) else "")
        fix = f"moe convert {PREFIX}{source} runs/BASE writes its recipe, runs/BASE/recipe.yaml; then --init_from runs/BASE"
        raise BadInput(f"--init_from {PREFIX}{source}", got=got, needed=needed, fix=fix)
    return into_base(source, base)


def into_base(source: Path, base: Path) -> list[str]:
    """Convert the transformers folder `source` to the run `base`, from whose weights a new run starts. Return lines to print. A
    conversion that `base` already contains is replaced; if checkpoints of a run may need the old one, it is kept as `base`.before-N."""
    earlier = (base / KEPT).is_dir() and (base / "checkpoints").is_dir()
    return to_run(source, base, overrides={}, earlier=earlier)[:-1]


def config_in(source: Path) -> dict[str, Any]:
    """Return the contents of config.json in a transformers folder. Raises BadInput if it cannot be read."""
    try:
        config = json_text.loads(read_text(source / "config.json"))
        if not isinstance(config, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        needed = "a folder that transformers' save_pretrained wrote"
        fix = f"{source} is a run: leave hf: out" if (source / "checkpoints").is_dir() else "check the path"
        raise BadInput("hf:PATH", got=f"{source / 'config.json'}: {reason(error)}", needed=needed, fix=fix) from None
    return config


def _recipe(path: Path, values: dict[str, dict[str, Any]], overrides: Mapping[str, str]) -> tuple[Run, dict[str, str]]:
    """Return (the recipe of `values` with `overrides`, key -> origin of its value). Raises BadInput if an override changes the model.
    `values`: section -> key -> value. `path`: path of a temporary file; its name becomes the origin of `values`."""
    fixed = [key for key in overrides if key in (*keys_of("shape"), *keys_of("function"), *keys_of("name"))]
    if fixed:
        raise BadInput(
            f"--{fixed[0]}", got="a key that config.json decides", needed="keys that only affect training", fix=f"remove --{fixed[0]}"
        )
    build_run(values)
    path.write_text(yaml.safe_dump(values))
    run, origins = load(str(path), dict(overrides))
    path.unlink()
    check_together(run.resolve(1))
    return run, origins


def _take_along(source: Path, into: Path) -> None:
    """Copy files other than tensors, such as a tokenizer and a license, from the model's folder `source` into the folder `into`."""
    into.mkdir(exist_ok=True)
    for path in sorted({path for pattern in _COPIED for path in source.glob(pattern) if path.is_file()}):
        target = into / path.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)


def from_run(source: Path, out: Path, *, dtype: str | None = None) -> list[str]:
    """Convert the run `source` to a transformers folder `out`. Return lines to print. Raises BadInput before the folder exists. `dtype`:
    dtype of the written weights, a key of DTYPES (parallel/numerics/precision.py); None: that of the files from which the model was
    imported, or of the run's checkpoint if no such files are known."""
    path = find(source)
    reader = whole(path)
    run, biases = build_run(reader.state["recipe"]), reader.names(EXTRA)
    shapes = reader.names() | biases
    came = kept(path)
    config = _same_config(run, shapes, loaded(came / "config.json"), ends=reader.state["tokenizer"].get("separator"))
    family = family_of(config)
    kinds = {name: EXTRA if name in biases else "weight" for name in shapes}
    own = {name: reader.region(name, kinds[name], tuple(slice(0, 1) for _ in shape)).dtype for name, shape in shapes.items()}
    trained = reader.state["counters"]["step"] > 0
    dtypes = _dtypes(own, kinds, came, asked=dtype, trained=trained)
    config["dtype"] = _name(Counter(dtypes.values()).most_common(1)[0][0])
    # these keys would be wrong: the written weights are not quantized, and are for transformers' own code
    for key in ("torch_dtype", "quantization_config", "auto_map"):
        config.pop(key, None)
    config["model_type"] = kind_of(config)

    def read(name: str) -> Tensor:
        found = reader.region(name, kinds[name], tuple(slice(0, size) for size in shapes[name])).to(dtypes[name])
        if not found.isfinite().all():
            got = f"{name}, with numbers that {_name(dtypes[name])} cannot represent"
            raise BadInput("--dtype", got=got, needed="a dtype with more exponent bits", fix="--dtype bf16 or --dtype fp32")
        return found

    together = by_key(shapes, family)
    forms = {key: (dtypes[names[0]], shape_of(names, family, shapes)) for key, names in together.items()}

    with _whole(out, "TO_HF") as part:
        _take_along(came, part)
        said = write_tokenizer(part, reader.state["tokenizer"], came=(came / "config.json").is_file(), run=run)
        if trained and (part / CARD).is_file():
            (part / CARD).replace(part / OLD_CARD)
            said.append(f"{OLD_CARD} is the card of the model before this training: write your own {CARD}")
        (part / "config.json").write_text(json_text.dumps(config, indent=2, sort_keys=True) + "\n")
        write(part, forms, lambda key: written(together[key], family, shapes, read))
    if dtype is None and any(own[name].itemsize > dtypes[name].itemsize for name in own):
        said.append(f"rounded to {config['dtype']}, the model's original dtype: --dtype fp32 writes the trained weights exactly")
    return [f"{family.architecture}: {path} -> {out}, {len(shapes)} tensors in {config['dtype']}", *said]


def adapters_of(source: Path, out: Path) -> list[str]:
    """Write the LoRA adapters of the run `source`, without the base model, to a folder `out` for PEFT. Return lines to print. Raises
    BadInput before the folder exists."""
    path = find(source)
    reader = whole(path)
    if not isinstance(reader, Merged):
        raise BadInput("--adapters", got=f"{path}, with all weights", needed="a run with lora.rank", fix="leave out --adapters")
    run, lora = build_run(reader.state["recipe"]), build_run(reader.adapters.state["recipe"]).lora
    shapes, ends = reader.names() | reader.names(EXTRA), reader.state["tokenizer"].get("separator")
    config = _same_config(run, shapes, loaded(kept(path) / "config.json"), ends=ends)
    family = family_of(config)
    with _whole(out, "TO_HF") as part:
        count = write_adapters(part, reader, lora, family, base=config.get("_name_or_path"))
    return [f"{family.architecture}: adapters of {path} -> {out}, {counted(count, 'tensor')}; PEFT loads them onto their base"]


def _dtypes(own: dict[str, torch.dtype], kinds: dict[str, str], came: Path, *, asked: str | None, trained: bool) -> dict[str, torch.dtype]:
    """Return name -> dtype in which a tensor is written. With `asked`: this dtype for weights, the checkpoint's for others. Without it: the
    dtype in the imported model's files, or the checkpoint's if these do not say. `own`: name -> dtype in the checkpoint. `kinds`:
    name -> "weight", or EXTRA for a router's selection bias. `came`: folder with the files kept from the imported model.
    `trained`: whether the run has trained the model."""
    if asked is not None:
        return {name: DTYPES[asked] if kinds[name] == "weight" else dtype for name, dtype in own.items()}
    named = {_name(dtype): dtype for dtype in DTYPES.values()}
    config, said = loaded(came / "config.json"), loaded(came / ORIGINAL_DTYPES)
    # without dtypes.json (earlier versions), a trained run gets the dtype in config.json; an untrained one still has its original dtypes
    of_config = (config.get("dtype") or config.get("torch_dtype")) if trained else None
    most = said.get("most") or of_config
    default = {name: most if kinds[name] == "weight" else None for name in own}
    by_name = default | (said.get("others") or {})
    return {name: named.get(str(by_name[name]), dtype) for name, dtype in own.items()}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _same_config(run: Run, shapes: Shapes, kept: dict[str, Any], *, ends: int | None) -> dict[str, Any]:
    """Return `kept`, the imported config.json, if it still describes the run's model. Otherwise return a new config.json of the first
    family that can describe the model. Raises BadInput if no family can. `ends`: id of the token that ends a text."""
    nearest: list[Change | str] | None = None
    ids = {key: kept[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in kept}
    fitting = [kind for kind, family in FAMILIES.items() if family.halves == (run.model.kind == "encoder_decoder")]
    for config in ([kept] if kept else []) + [config_of(run, kind, ends=ends) | ids for kind in fitting]:
        try:
            differs = _differences(run, shapes, config)
        except BadInput:  # the family does not support the run's values
            continue
        if not differs:
            return _as_long(run, shapes, config, kept)
        nearest = differs if nearest is None or len(differs) < len(nearest) else nearest
    first = (nearest or ["a model of no known family"])[0]
    got = f"{first.key} {first.before}" if isinstance(first, Change) else first
    needed = f"{first.key} {first.after}, or a model of another family" if isinstance(first, Change) else "a model of a known family"
    raise BadInput("FROM_RUN", got=got, needed=needed, fix=f"use one of the families: {some(FAMILIES, rest='docs/use/huggingface.md')}")


def _as_long(run: Run, shapes: Shapes, config: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
    """Return `config` with max_position_embeddings raised to the largest of its value in `config`, its value in `kept` and the run's
    max_length. Return it unchanged if that would change what the model computes."""
    key = "max_position_embeddings"
    lengths = [config.get(key), kept.get(key), run.model.max_length]
    longest = config | {key: max(length for length in lengths if isinstance(length, int))}
    return longest if key in config and not _differences(run, shapes, longest) else config


def _differences(run: Run, shapes: Shapes, config: dict[str, Any]) -> list[Change | str]:
    """Return the differences between the run's model and the model of a config.json: changed keys, and `parameter NAME` for different
    shapes. Raises BadInput for an unsupported config.json."""
    other = build_run(recipe_values(config))
    theirs = shapes_of(other) | biases_of(other)
    training = ("data.", "router.bias_rate")  # not compared: config.json has no data, and the shapes show whether there is a bias
    found: list[Change | str] = [change for change in function_changes(run, other) if not change.key.startswith(training)]
    return found + [f"parameter {name}" for name in sorted(shapes.keys() | theirs.keys()) if shapes.get(name) != theirs.get(name)]


def main(
    source: str,
    to: str,
    *,
    overrides: dict[str, str],
    dtype: str | None = None,
    adapters: bool = False,
    without_mtp: bool = False,
    json: str | None = None,
) -> int:
    """Convert the transformers folder `source` (hf:PATH) to the run `to`, or the run `source` to the folder `to` (hf:PATH). Print a
    report. adapters: write only a run's LoRA adapters. json: file for the report. `to_run` and `from_run` explain the other arguments."""
    if source.startswith(PREFIX):
        folder = user_path(source.removeprefix(PREFIX), what="hf:PATH")
        said = to_run(folder, Path(to), overrides=overrides, without_mtp=without_mtp)
    else:
        folder = user_path(to.removeprefix(PREFIX), what="hf:PATH")
        said = adapters_of(Path(source), folder) if adapters else from_run(Path(source), folder, dtype=dtype)
    print("\n".join(said))
    if json:
        write_json(json, verb="convert", rows=[{"said": line} for line in said], source=source, to=to)
    return exit_codes.DONE
