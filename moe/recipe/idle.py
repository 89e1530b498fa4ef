"""Values that a user writes and nothing reads: keys of experts in a dense model, of text with token ids, of AdamW with another optimizer,
or a warm-up longer than the run.

    default < parent < the recipe's own file < command line        each value's origin, as a level

A value is refused if its level is at least the level of the setting that makes it idle: `--router.jitter 0.1` with a dense recipe. A
value of a lower level stays, because the nearer setting turned it off on purpose: `moe train switch_tiny --model.moe_every 0`. A file's
value that equals the default stays, too. On the command line it is refused: `moe train dense_tiny --experts.num_experts 8` would not
give a model with 8 experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from moe.recipe.plugin import is_plugin
from moe.recipe.sections import Data, Run
from parallel.errors import BadInput
from parallel.fixes import Remove, Set
from parallel.store.files import user_path

COMMAND_LINE = "command line"
_Said = Callable[[str, object, object], bool]
_SPARSE = ("experts", "router", "dispatch")


def check_read(run: Run, origins: Mapping[str, str], *, file: str) -> None:
    """Refuse values of the recipe `file` or the command line that have no effect. Raises BadInput for the first such key.

    A file with nearly every key was written by a run, which writes all its keys, wanted or not. Its values have the level of a parent.
    """
    left = sum(origin == "default" for origin in origins.values()) < len(origins) / 5
    level = {file: 1 if left else 2, COMMAND_LINE: 3, "default": 0}

    def nearness(key: str) -> int:
        return level.get(origins.get(key, "default"), 1)

    def said(key: str, value: object, default: object) -> bool:
        return value != default or nearness(key) == level[COMMAND_LINE]

    _check_sparse(run, nearness, said)
    _check_optimizer(run, nearness, said)
    _check_ids(run.data, nearness, said)
    steps, warmup = run.train.steps, run.optimizer.warmup_steps
    if warmup > steps and nearness("optimizer.warmup_steps") >= max(2, nearness("train.steps")):
        raise BadInput(
            "optimizer.warmup_steps",
            got=f"{warmup} with train.steps={steps}",
            needed="at most the steps: the learning rate would never be reached",
            fix=Set("optimizer.warmup_steps", steps // 10) | Set("train.steps", 10 * warmup),
        )


def _check_optimizer(run: Run, nearness: Callable[[str], int], said: _Said) -> None:
    """Refuse keys of the optimizer that its kind, its step or its schedule leaves unread."""
    o = run.optimizer
    adamw = "adamw, kfac or muon, which alone read it"
    rows = [(key, "kind", o.kind in ("sgd", "adafactor") or o.is_own, adamw) for key in ("beta1", "beta2", "eps")]
    rows += [
        (
            "min_lr_share",
            "schedule",
            o.schedule in ("inverse_sqrt", "constant") or is_plugin(o.schedule),
            "cosine, wsd or linear, which end at that share",
        )
    ]
    for key, decides, idle, needed in rows:
        value = getattr(o, key)
        if not idle or not said(f"optimizer.{key}", value, type(o).model_fields[key].default):
            continue
        if nearness(f"optimizer.{key}") >= max(2, nearness(f"optimizer.{decides}")):
            got = f"{value} with optimizer.{decides}={getattr(o, decides)}"
            raise BadInput(f"optimizer.{key}", got=got, needed=f"optimizer.{decides} {needed}", fix=Remove(f"optimizer.{key}"))


def _check_sparse(run: Run, nearness: Callable[[str], int], said: _Said) -> None:
    """Refuse keys of experts if no layer has any."""
    if run.model.layers_with_experts() or run.model.moe_every:  # moe_every above the number of layers is another mistake
        return
    dense = max(2, nearness("model.moe_every"), nearness("model.moe_layers"))
    idle = [
        f"{name}.{key}"
        for name in _SPARSE
        for key, field in type(getattr(run, name)).model_fields.items()
        if nearness(f"{name}.{key}") >= dense and said(f"{name}.{key}", getattr(getattr(run, name), key), field.default)
    ]
    if idle:
        raise BadInput(
            idle[0],
            got="a value" + (f", and {len(idle) - 1} more of experts," if len(idle) > 1 else "") + " in a dense model",
            needed="layers with experts, which alone read it",
            fix=Remove(idle[0]) if len(idle) == 1 else Set("model.moe_every", 2) | "remove them",
        )


def _check_ids(data: Data, nearness: Callable[[str], int], said: _Said) -> None:
    """Refuse keys of text if the data are token ids, and validation_share if the folders hold validation files."""
    paths = [source.path for source in data.sources] or ([] if data.path is None else [data.path])
    if data.tokenizer != "ids" or not paths:
        return
    for number, source in enumerate(data.sources):
        if source.text_key is not None:
            key, got = f"data.sources[{number}].text_key", f"{source.text_key} with token ids"
            raise BadInput(key, got=got, needed="text, which alone reads it", fix=Remove(key))
    ids = max(2, nearness("data.tokenizer"))
    idle = {"source": ("text", ids), "text_key": ("text", ids)}
    if all(user_path(path, what="data.path").is_dir() for path in paths):
        idle["validation_share"] = ("ids without a val.bin", max(ids, nearness("data.path"), nearness("data.sources")))
    for key, (reader, decided) in idle.items():
        value = getattr(data, key)
        if nearness(f"data.{key}") >= decided and said(f"data.{key}", value, Data.model_fields[key].default):
            raise BadInput(
                f"data.{key}", got=f"{value} with token ids", needed=f"{reader}, which alone reads it", fix=Remove(f"data.{key}")
            )
