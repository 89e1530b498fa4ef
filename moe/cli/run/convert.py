"""moe convert: between runs, and between runs and folders of transformers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from moe.cli.run.call import call, run_dir, text
from moe.cli.verbs import Convert
from parallel.errors import BadInput


def convert(flags: Convert, overrides: dict[str, str]) -> int:
    from moe.convert.checks import settings_of
    from moe.recipe.load import ON_HUB, download_of, of_transformers, recipe_names, recipe_path

    if (hub := download_of(flags.from_run)) is not None:
        fix = f"{hub[0]}, then moe convert {hub[1]} {flags.to_run}"
        raise BadInput("FROM_RUN", got=f"{flags.from_run}{ON_HUB}", needed="a folder of this machine", fix=fix)
    if any(word.startswith("hf:") for word in (flags.from_run, flags.to_run)):
        return _convert_huggingface(flags, overrides)
    if of_transformers(Path(flags.from_run)):
        word = f"hf:{flags.from_run}"
        got, fix = f"{flags.from_run}, a model of transformers", f"moe convert {word} {flags.to_run}"
        raise BadInput("FROM_RUN", got=got, needed=word, fix=fix)
    if flags.dtype is not None:
        raise BadInput("--dtype", got=flags.dtype, needed="--dtype with RUN hf:PATH only", fix="remove --dtype")
    if flags.to is None:
        raise BadInput("--to", got="nothing", needed="the recipe of the new model", fix=f"--to {recipe_names()[-1]}")
    recipe_path(flags.to)
    source = run_dir(flags.from_run, "checkpoints", also="manifest.json", what="FROM_RUN")
    given = {name: getattr(flags, name) for name in ("method", "share", "scale", "weights", "moments") if getattr(flags, name) is not None}
    settings = settings_of(given, approximate=flags.approximate)
    return call(
        "moe.convert.convert",
        source,
        flags.to_run,
        recipe=flags.to,
        overrides=overrides,
        settings=settings,
        load=text(flags.load),
        check=flags.check,
        json=text(flags.json),
    )


def _convert_huggingface(flags: Convert, overrides: dict[str, str]) -> int:
    """Convert a folder of transformers into a run (hf:PATH RUN), or a run into such a folder (RUN hf:PATH)."""
    into = flags.to_run.startswith("hf:")
    if into and flags.from_run.startswith("hf:"):
        raise BadInput("FROM_RUN", got="hf: on both sides", needed="a run on one", fix="moe convert hf:PATH runs/NAME")
    for field in dataclasses.fields(flags):
        if field.name not in ("from_run", "to_run", "json", *(("dtype",) if into else ())) and getattr(flags, field.name) != field.default:
            needed = "no flags but --json and --dtype" if into else "no flags but --json, and recipe keys of training"
            raise BadInput(
                f"--{field.name}", got=f"it with {'RUN hf:PATH' if into else 'hf:PATH RUN'}", needed=needed, fix=f"remove --{field.name}"
            )
    if into and overrides:
        key = next(iter(overrides))
        raise BadInput(
            f"--{key}", got="it with RUN hf:PATH", needed="no recipe values: the run's own recipe is used", fix=f"remove --{key}"
        )
    source = run_dir(flags.from_run, "checkpoints", also="manifest.json", what="FROM_RUN") if into else flags.from_run
    return call("moe.convert.huggingface.convert", source, flags.to_run, overrides=overrides, dtype=flags.dtype, json=text(flags.json))
