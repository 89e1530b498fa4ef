"""Accepts `hf:DIR` instead of a recipe's name: the model that DIR/config.json describes.

moe plan hf:models/qwen --cluster h100-8        reads config.json alone
moe train hf:models/qwen --data.path texts/     also converts the tensors into RUN/base; the run starts from them
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moe.cli.run.train import begin, check_model
from moe.cli.verbs import Train
from moe.convert.huggingface import PREFIX
from parallel.errors import BadInput
from parallel.store.files import user_path


@contextmanager
def with_recipe(flags: Any, overrides: dict[str, str]) -> Iterator[Any]:
    """Yield the flags; a recipe hf:DIR is replaced by the path of a YAML file with the model's recipe. Raises BadInput for a folder that
    cannot be converted, for a name of a model on the Hugging Face hub, and with --init_from."""
    name = getattr(flags, "recipe", None)
    if not isinstance(name, str) or not name.startswith(PREFIX):
        yield flags
        return
    from moe.recipe.load import refuse_on_hub

    refuse_on_hub(name, "recipe")
    source = user_path(name.removeprefix(PREFIX), what="recipe")
    if isinstance(flags, Train) and flags.init_from is not None:
        needed, fix = "one model to start from", "remove --init_from, or give a recipe"
        raise BadInput("--init_from", got=f"{flags.init_from} with {PREFIX}{source}", needed=needed, fix=fix)
    if isinstance(flags, Train) and not flags.dry_run:
        yield _converted(flags, overrides, source)
        return
    begins = {"init_from": Path(f"{PREFIX}{source}")} if isinstance(flags, Train) else {}
    with _described(source) as path:
        yield dataclasses.replace(flags, recipe=str(path), **begins)


@contextmanager
def _described(source: Path) -> Iterator[Path]:
    """Yield a temporary recipe of the model that source/config.json describes."""
    import yaml

    from moe.convert.huggingface.config import recipe_values
    from moe.convert.huggingface.convert import config_in

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{source.resolve().name}.yaml"
        path.write_text(yaml.safe_dump(recipe_values(config_in(source))), encoding="utf-8")
        yield path


def _converted(flags: Train, overrides: dict[str, str], source: Path) -> Train:
    """Return flags for a run that starts from the model in `source`. Convert the model into RUN/base, unless the run has a checkpoint.
    Raises BadInput for a wrong recipe or data file, before tensors are read, and if the run's checkpoint comes from another model."""
    from moe.checks.advice import check_for_user
    from moe.convert.huggingface.convert import into_base
    from moe.launch.start import world_size
    from moe.recipe.load import load

    out = Path("runs") / source.resolve().name if flags.out is None else user_path(flags.out, what="--out")
    base = out / "base"

    def convert(base: Path) -> list[str]:
        with _described(source) as described:
            run, origins = load(str(described), overrides)
        check_for_user(run, world_size(flags.nproc, launcher=flags.launcher or "deepspeed", hostfile=flags.hostfile), origins)
        check_model(source, run)
        return into_base(source, base)

    then = "moe train runs/BASE/recipe.yaml --init_from runs/BASE"
    if not begin(out, convert, fresh=flags.fresh, what="recipe", said=f"{PREFIX}{source}", then=then):
        _check_same(source, base, out)
    return dataclasses.replace(flags, recipe=str(base / "recipe.yaml"), init_from=base, out=out)


def _check_same(source: Path, base: Path, out: Path) -> None:
    """Raise BadInput unless `source` has the config.json with which the run `out` began."""
    from moe.convert.huggingface.convert import config_in
    from moe.train.start.resume import KEPT

    try:
        same = config_in(source) == config_in(base / KEPT)
    except BadInput:
        same = False
    if not same:
        needed = f"the config.json of {base / KEPT}, with which the run in {out} began"
        fix = f"moe train {out / 'recipe.yaml'} --out {out} continues it; or choose another --out"
        raise BadInput("recipe", got=f"{PREFIX}{source}", needed=needed, fix=fix)
