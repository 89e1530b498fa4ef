"""`moe convert hf:PATH runs/NAME` and `moe convert runs/NAME hf:PATH`: a folder of transformers as a run, and a run as such a folder.

    config.json       <->  recipe              config.py: what the recipe cannot say is refused, by the key
    *.safetensors     <->  checkpoints/step-0  tensors.py: name by name, one tensor in memory at a time
    tokenizer.json    <->  its tokenizer       moe/data/tokenizer.py

All names and shapes are compared before anything is written. A folder is written under another name and renamed when it is whole, so
nothing half-converted stays. The dtype of the tensors stays as it is, so there and back is exact to the bit.
"""

from __future__ import annotations

import json as json_text
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from moe.checks.together import check_together
from moe.convert.convert import find
from moe.convert.huggingface.config import config_of, family_of, recipe_values
from moe.convert.huggingface.encoder_decoder import of_kind
from moe.convert.huggingface.families import FAMILIES
from moe.convert.huggingface.tensors import Source, by_key, write, written
from moe.data.tokenizer import Bpe, Bytes, Given, Ids
from moe.data.tokenizer import load as load_tokenizer
from moe.launch import exit_codes
from moe.model.names import global_name
from moe.model.transformer import Transformer
from moe.parallelize.plan import lay_out
from moe.recipe.changes import Change, function_changes, keys_of
from moe.recipe.load import build_run, load, resolved_yaml
from moe.recipe.sections import Run
from moe.records.results import write_json
from moe.train.adapters import whole
from moe.train.state import EXTRA, Counters
from parallel import checkpoint
from parallel.checkpoint import Piece
from parallel.errors import BadInput
from parallel.files import read_text, user_path
from parallel.mesh import Degrees, Mesh
from parallel.precision import LossScale

PREFIX = "hf:"
KEPT = "huggingface"  # a folder of the run: what came with the tensors and is no part of them
_BESIDE = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model",
           "vocab.json", "merges.txt", "added_tokens.json", "chat_template.jinja")  # fmt: skip
Shapes = dict[str, tuple[int, ...]]


def shapes_of(run: Run) -> Shapes:
    """Of every tensor that a checkpoint of the run has, by its name there."""
    with torch.device("meta"):
        layouts = lay_out(Transformer(run.model, run.experts, run.router, vocab_size=run.vocab_size))
    found: Shapes = {}
    for name, layout in layouts.items():
        if layout.unstack is None:
            found[global_name(name)] = layout.shape
        else:
            found |= {layout.unstack.format(i): layout.shape[1:] for i in range(layout.shape[0])}
    return found


def biases_of(run: Run) -> Shapes:
    """Of every selection bias of a router, which is no parameter."""
    sparse = run.model.layers_with_experts() if run.router.spec.bias_rate is not None else ()
    return {f"layers.{layer}.router.bias": (run.experts.of_layer(nth),) for nth, layer in enumerate(sparse)}


@contextmanager
def _whole(out: Path, what: str) -> Iterator[Path]:
    """A folder to write into, which gets its name when all is there and vanishes otherwise."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BadInput(what, got=f"{out}, which holds something", needed="a new folder", fix="choose another, or remove it")
    part, made = out.with_name(f".{out.name}.partial-{os.getpid()}"), False
    try:
        part.mkdir(parents=True)
        made = True
        yield part
        if out.is_dir():
            out.rmdir()
        part.rename(out)
    except OSError as error:
        fix = "free disk space, or choose another place"
        raise BadInput(what, got=f"{out}: {error.strerror or error}", needed="a folder that can be written", fix=fix) from None
    finally:
        if made:  # never a folder that was there
            shutil.rmtree(part, ignore_errors=True)


# --- hf:PATH to a run ---------------------------------------------------------------------------------------------------------


def to_run(source: Path, out: Path, *, overrides: Mapping[str, str]) -> list[str]:
    """Write the run; returns what there is to say of it. Raises BadInput, with nothing written."""
    config = _config(source)
    values = recipe_values(config)
    length = overrides.get("model.max_length", values["model"]["max_length"])  # a longer sequence has more sentinels
    tokenizer, said = _tokenizer(source, config, build_run(values | {"model": values["model"] | {"max_length": length}}))
    bytes_alone = tokenizer["kind"] == Bytes.name
    values["data"] = values.get("data", {}) | (
        {"tokenizer": "bytes"} if bytes_alone else {"tokenizer": "bpe", "vocab_size": max(257, tokenizer["vocab_size"])}
    )
    family, files = family_of(config), Source(source)
    with _whole(out, "TO_RUN") as part:
        run, origins = _recipe(part / "config.yaml", values, overrides)
        shapes, biases = shapes_of(run), biases_of(run)
        files.check(family, shapes | biases, tied=run.model.tied_embeddings)
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
        (part / KEPT).mkdir()
        for name in _BESIDE:
            if (source / name).is_file():
                shutil.copyfile(source / name, part / KEPT / name)
    longest = config.get("max_position_embeddings", run.model.max_length)
    if "model.max_length" not in overrides and run.model.max_length < longest:
        said.append(f"model.max_length is {run.model.max_length} of {longest}: --model.max_length changes that")
    for key in ("num_nextn_predict_layers", "num_mtp_layers"):
        if config.get(key):
            said.append(f"{key} is {config[key]}: what predicts further tokens does not come along; it changes no text")
    verb = "eval" if run.model.kind == "encoder_decoder" else "generate"
    return [f"{family.architecture}: {source} -> {out}, {len(shapes)} tensors", *said, f"go on with: moe {verb} {out}"]


def begin_from(source: Path, base: Path, *, recipe: str, overrides: Mapping[str, Any]) -> list[str]:
    """The run that another begins with (`--init_from hf:PATH`), made in its folder; what there is to say of it.

    One that an earlier start made there is made again. Raises BadInput, before a tensor is read, where the recipe is of another model.
    """
    run = load(recipe, overrides)[0]
    differs = _differences(run, shapes_of(run), _config(source))
    if differs:
        first = differs[0]
        got = f"{first.key} {first.before}" if isinstance(first, Change) else first
        needed = f"the model of {source}" + (f", with {first.key} {first.after}" if isinstance(first, Change) else "")
        fix = f"moe convert {PREFIX}{source} runs/BASE writes its recipe, runs/BASE/recipe.yaml; then --init_from runs/BASE"
        raise BadInput(f"--init_from {PREFIX}{source}", got=got, needed=needed, fix=fix)
    if (base / KEPT).is_dir() and (base / "checkpoints").is_dir():
        shutil.rmtree(base)
    return to_run(source, base, overrides={})[:-1]


def _config(source: Path) -> dict[str, Any]:
    try:
        config = json_text.loads(read_text(source / "config.json"))
        if not isinstance(config, dict):
            raise ValueError("no object")
    except (OSError, ValueError, RecursionError) as error:
        needed = "a folder that transformers' save_pretrained wrote"
        raise BadInput("hf:PATH", got=f"{source / 'config.json'}: {error}", needed=needed, fix="check the path") from None
    return config


def _recipe(path: Path, values: dict[str, dict[str, Any]], overrides: Mapping[str, str]) -> tuple[Run, dict[str, str]]:
    """The recipe of these values, whose origin is the name of this file, with what the command line says of how it is trained."""
    fixed = [key for key in overrides if key in (*keys_of("shape"), *keys_of("function"), *keys_of("name"))]
    if fixed:
        raise BadInput(f"--{fixed[0]}", got="a key that config.json decides", needed="keys of training", fix=f"remove --{fixed[0]}")
    build_run(values)
    path.write_text(yaml.safe_dump(values))
    run, origins = load(str(path), dict(overrides))
    path.unlink()
    check_together(run.resolve(1))
    return run, origins


def _tokenizer(source: Path, config: dict[str, Any], run: Run) -> tuple[dict[str, Any], list[str]]:
    """The description of the model's tokenizer, or of plain bytes where it cannot be used, and what is to be said of that."""
    room = run.vocab_size - run.num_sentinels
    held = f"a vocabulary of {run.vocab_size}{f', of which sentinels take {run.num_sentinels}' if run.num_sentinels else ''}"
    try:
        if not (source / "tokenizer.json").is_file():
            raise BadInput("tokenizer.json", got="no such file", needed="", fix="")
        content = json_text.loads(read_text(source / "tokenizer.json"))
        known = (content.get("model") or {}).get("vocab") or () if isinstance(content, dict) else ()
        if len(known) > room:  # before the library sorts millions
            raise BadInput("tokenizer.json", got=f"{len(known)} ids for {held}", needed="", fix="")
        content = _without_sentinels(content, run)
        if _is_bytes(content, _ends(source, config)):
            return Bytes().describe(), []
        made = Given.read(content, _ends(source, config))
        if made.vocab_size > room:
            raise BadInput("tokenizer.json", got=f"{made.vocab_size} ids for {held}", needed="", fix="")
        return made.describe(), _other_sentinels(content, run)
    except (BadInput, OSError, ValueError, RecursionError, TypeError, AttributeError) as error:
        why = error.got if isinstance(error, BadInput) else error
        line = f"tokenizer.json is not used ({why}): texts are read as bytes, which this model does not know as ids"
        return Bytes().describe(), [line]


def _is_bytes(tokenizer: dict[str, Any], ends: int | None) -> bool:
    """Whether it is what a run of plain bytes is written with."""
    plain = Bytes.for_others()
    return ends == Bytes.separator and all(tokenizer.get(part) == plain[part] for part in ("model", "normalizer", "pre_tokenizer"))


def _sentinels(run: Run) -> dict[int, str]:
    """Their ids, in order, and what transformers calls them."""
    return {run.vocab_size - 1 - n: f"<extra_id_{n}>" for n in reversed(range(run.num_sentinels))}


def _with_sentinels(tokenizer: dict[str, Any], run: Run, separator: int, ends: str) -> dict[str, Any]:
    """A tokenizer.json of this run's, for an encoder: it also has the sentinels, and ends a text as training does."""
    form = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": i, "content": spelled} | form for i, spelled in _sentinels(run).items()]
    text, end = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": ends, "type_id": 0}}
    both = [text, end, {"Sequence": {"id": "B", "type_id": 0}}, end]
    special = {ends: {"id": ends, "ids": [separator], "tokens": [ends]}}
    template: dict[str, Any] = {"type": "TemplateProcessing", "single": [text, end], "pair": both, "special_tokens": special}
    frame = {} if tokenizer.get("post_processor") else {"post_processor": template}
    return tokenizer | {"added_tokens": [*(tokenizer.get("added_tokens") or ()), *added]} | frame


def _without_sentinels(tokenizer: dict[str, Any], run: Run) -> dict[str, Any]:
    """What it has beside the sentinels, where their ids are those of this run: texts do not hold them."""
    added, ours = tokenizer.get("added_tokens") or (), _sentinels(run)
    return tokenizer | {"added_tokens": [token for token in added if ours.get(token.get("id")) != token.get("content")]}


def _other_sentinels(tokenizer: dict[str, Any], run: Run) -> list[str]:
    """A line where the ids that hide spans here are not those that the tokenizer has for that, as with a vocabulary that is padded."""
    added = tokenizer.get("added_tokens") or ()
    theirs = next((token.get("id") for token in added if token.get("content") == "<extra_id_0>"), None)
    last = run.vocab_size - 1
    if not run.num_sentinels or theirs in (None, last):
        return []
    return [
        f"<extra_id_0> is {theirs} to the tokenizer and {last}, the vocabulary's last id, here: spans are hidden by other ids than before"
    ]


def _ends(source: Path, config: dict[str, Any]) -> int | None:
    """The id that ends a text: of config.json, or of generation_config.json."""
    for found in (config, _loaded(source / "generation_config.json")):
        ends = found.get("eos_token_id")
        ends = ends[0] if isinstance(ends, list) and ends else ends
        if isinstance(ends, int):
            return ends
    return None


def _loaded(path: Path) -> dict[str, Any]:
    try:
        found = json_text.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


# --- a run to hf:PATH ---------------------------------------------------------------------------------------------------------


def from_run(source: Path, out: Path) -> list[str]:
    """Write the folder; returns what there is to say of it. Raises BadInput, with nothing written."""
    path = find(source)
    reader = whole(path)
    run, biases = build_run(reader.state["recipe"]), reader.names(EXTRA)
    shapes = reader.names() | biases
    kept = path.parent.parent / KEPT
    config = _same_config(run, shapes, _loaded(kept / "config.json"), ends=reader.state["tokenizer"].get("separator"))
    family = family_of(config)
    kinds = {name: EXTRA if name in biases else "weight" for name in shapes}
    entries = {name: reader.region(name, kinds[name], tuple(slice(0, 1) for _ in shape)) for name, shape in shapes.items()}
    dtype = next(iter(entries.values())).dtype
    config["dtype"] = str(dtype).removeprefix("torch.")
    config.pop("torch_dtype", None)

    def read(name: str) -> Tensor:
        return reader.region(name, kinds[name], tuple(slice(0, size) for size in shapes[name]))

    together = by_key(shapes, family)
    tensors = ((key, written(names, family, shapes, read)) for key, names in together.items())
    sizes = [sum(entries[name].element_size() * torch.Size(shapes[name]).numel() for name in names) for names in together.values()]

    with _whole(out, "TO_HF") as part:
        for name in _BESIDE:
            if (kept / name).is_file():
                shutil.copyfile(kept / name, part / name)
        said = _write_tokenizer(part, reader.state["tokenizer"], came=(kept / "config.json").is_file(), run=run)
        (part / "config.json").write_text(json_text.dumps(config, indent=2, sort_keys=True) + "\n")
        write(part, tensors, sizes)
    return [f"{family.architecture}: {path} -> {out}, {len(shapes)} tensors in {config['dtype']}", *said]


def _same_config(run: Run, shapes: Shapes, kept: dict[str, Any], *, ends: int | None) -> dict[str, Any]:
    """The config.json that says this model: the one it came with, or the first that a family makes. Raises BadInput where none does."""
    nearest: list[Change | str] | None = None
    for config in ([kept] if kept else []) + [config_of(run, kind, ends=ends) for kind in of_kind(run)]:
        try:
            differs = _differences(run, shapes, config)
        except BadInput:  # this family has no such model at all, so another is nearer
            continue
        if not differs:
            return config
        nearest = differs if nearest is None or len(differs) < len(nearest) else nearest
    first = (nearest or ["a model that none has"])[0]
    got = f"{first.key} {first.before}" if isinstance(first, Change) else first
    needed = f"{first.key} {first.after}, or what another family says" if isinstance(first, Change) else "one that a family has"
    raise BadInput("FROM_RUN", got=got, needed=needed, fix=f"families: {', '.join(FAMILIES)}; see docs/use/huggingface.md")


def _differences(run: Run, shapes: Shapes, config: dict[str, Any]) -> list[Change | str]:
    """What the model of a config.json has that the run's has not, or the other way round. Raises BadInput for a config that says none."""
    other = build_run(recipe_values(config))
    theirs = shapes_of(other) | biases_of(other)
    training = ("data.", "router.bias_rate")  # whether there is a bias, its shape says
    found: list[Change | str] = [change for change in function_changes(run, other) if not change.key.startswith(training)]
    return found + [f"parameter {name}" for name in sorted(shapes.keys() | theirs.keys()) if shapes.get(name) != theirs.get(name)]


def _write_tokenizer(part: Path, described: dict[str, Any], *, came: bool, run: Run) -> list[str]:
    """`came`: from files of transformers; then bytes are what texts were read as because its tokenizer could not be used."""
    tokenizer = load_tokenizer(described)
    if isinstance(tokenizer, Ids) or (came and isinstance(tokenizer, Bytes)):
        reads = "ids" if isinstance(tokenizer, Ids) else "plain bytes"
        return [] if (part / "tokenizer.json").is_file() else [f"no tokenizer.json: this run reads {reads}"]
    assert isinstance(tokenizer, Bytes | Bpe | Given)
    if not (part / "tokenizer.json").is_file():
        model = tokenizer.for_others() if isinstance(tokenizer, Bytes) else described["model"]
        ends = tokenizer.token_bytes[tokenizer.separator].decode()
        if run.num_sentinels and tokenizer.vocab_size + run.num_sentinels == run.vocab_size:  # the library numbers what is added on and on
            model = _with_sentinels(model, run, tokenizer.separator, ends)
        (part / "tokenizer.json").write_text(json_text.dumps(model, ensure_ascii=False) + "\n")
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": ends, "clean_up_tokenization_spaces": False}
        (part / "tokenizer_config.json").write_text(json_text.dumps(about, indent=2) + "\n")
    return []


def main(source: str, to: str, *, overrides: dict[str, str], json: str | None = None) -> int:
    """One of the two ways, by which word begins with hf:."""
    if source.startswith(PREFIX):
        said = to_run(user_path(source.removeprefix(PREFIX), what="hf:PATH"), Path(to), overrides=overrides)
    else:
        said = from_run(Path(source), user_path(to.removeprefix(PREFIX), what="hf:PATH"))
    print("\n".join(said))
    if json:
        write_json(json, verb="convert", rows=[{"said": line} for line in said], source=source, to=to)
    return exit_codes.DONE
