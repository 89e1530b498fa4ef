"""Dense and Mixture-of-Experts Transformers, trained in parallel from one recipe.

    from moe import load, train

    run, origins = load("switch_tiny", {"train.steps": "5"})
    summary = train(run, origins=origins)

    load           a recipe by name or path, with overrides        moe/recipe/load.py
    train          the whole loop; resumes where it stopped        moe/train/loop/trainer.py
    script         a script of your own, ended as a run is         moe/launch/launch.py
    verify         every layout against one process                moe/verify/verify.py
    Transformer    the model, alone: no process group is needed    moe/model/transformer.py
    MoELayer       one MoE layer, for a model of your own          moe/experts/layer.py
    Context        where the tokens of a pass stand                moe/nn/context.py
    RoutingRecord  experts that one pass chose, for another        moe/nn/routing_record.py
    Callback       your own code after steps, evaluations, saves   moe/train/parts/callbacks.py

Each is imported when it is first used, so that `import moe` takes no time and loads no torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe.experts.layer import MoELayer as MoELayer
    from moe.launch.launch import script as script
    from moe.model.transformer import Transformer as Transformer
    from moe.nn.context import Context as Context
    from moe.nn.routing_record import RoutingRecord as RoutingRecord
    from moe.recipe.load import load as load
    from moe.train.loop.trainer import train as train
    from moe.train.parts.callbacks import Callback as Callback
    from moe.verify.verify import main as verify

__version__ = "0.1.0"
__all__ = ["Callback", "Context", "MoELayer", "RoutingRecord", "Transformer", "__version__", "load", "script", "train", "verify"]

_HOME = {
    "Callback": "moe.train.parts.callbacks",
    "Context": "moe.nn.context",
    "MoELayer": "moe.experts.layer",
    "RoutingRecord": "moe.nn.routing_record",
    "Transformer": "moe.model.transformer",
    "load": "moe.recipe.load",
    "script": "moe.launch.launch",
}
_CALLED = ("train", "verify")  # packages of this name: each can be called, and then does what its name says


def _own_parallel() -> None:
    """Make `parallel` the folder beside this one: a `parallel.py` where the user works would stand for it otherwise."""
    beside = Path(__file__).resolve().parents[1]
    if "parallel" not in sys.modules:
        spec = PathFinder.find_spec("parallel", [str(beside)])
        if spec is not None and spec.loader is not None:
            sys.modules["parallel"] = module = module_from_spec(spec)
            spec.loader.exec_module(module)
    elif Path(getattr(sys.modules["parallel"], "__file__", None) or ".").resolve().parent != beside / "parallel":
        raise ImportError(f"moe needs its own package `parallel`, but {sys.modules['parallel']} was imported before it: rename that one")


_own_parallel()


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name in _CALLED:
        return import_module(f"moe.{name}")
    raise AttributeError(f"module 'moe' has no attribute {name!r}: it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
