"""Dense and Mixture-of-Experts Transformers, trained in parallel from one recipe.

    from moe import load, train

    run, origins = load("switch_tiny", {"train.steps": "5"})
    summary = train(run, origins=origins)

    load           reads a recipe by name or path, with overrides   moe/recipe/load.py
    train          trains a recipe, or resumes from a checkpoint    moe/train/loop/trainer.py
    script         runs your own script as a training run           moe/launch/launch.py
    verify         compares parallel layouts with one process       moe/verify/verify.py
    open           loads a trained run: model, tokenizer, recipe    moe/train/use/opened.py
    Transformer    the model; works without process groups          moe/model/transformer.py
    MoELayer       one MoE layer, for your own model                moe/experts/layer.py
    Context        positions, seed, documents of a forward pass     moe/nn/context.py
    RoutingRecord  expert choices of a forward pass, for replay     moe/nn/routing_record.py
    Callback       your own code after steps, evaluations, saves    moe/train/parts/callbacks.py

Each name is imported when it is first used, so `import moe` is fast and does not load torch.
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
    from moe.train.use.opened import open as open
    from moe.verify.verify import main as verify

__version__ = "0.1.0"
__all__ = ["Callback", "Context", "MoELayer", "RoutingRecord", "Transformer", "__version__", "load", "open", "script", "train", "verify"]

_HOME = {  # public name -> module that defines it
    "Callback": "moe.train.parts.callbacks",
    "Context": "moe.nn.context",
    "MoELayer": "moe.experts.layer",
    "RoutingRecord": "moe.nn.routing_record",
    "Transformer": "moe.model.transformer",
    "load": "moe.recipe.load",
    "open": "moe.train.use.opened",
    "script": "moe.launch.launch",
}
_CALLED = ("train", "verify")  # packages that can be called like functions: `from moe import train; train(run)`


def _own_parallel() -> None:
    """Import `parallel` from the folder next to `moe`. Otherwise Python would prefer a `parallel.py` in the user's working folder."""
    root = Path(__file__).resolve().parents[1]
    if "parallel" not in sys.modules:
        spec = PathFinder.find_spec("parallel", [str(root)])
        if spec is not None and spec.loader is not None:
            sys.modules["parallel"] = module = module_from_spec(spec)
            spec.loader.exec_module(module)
    elif Path(getattr(sys.modules["parallel"], "__file__", None) or ".").resolve().parent != root / "parallel":
        raise ImportError(f"moe needs its own package `parallel`, but {sys.modules['parallel']} was imported before it: rename that module")


_own_parallel()


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name in _CALLED:
        return import_module(f"moe.{name}")
    raise AttributeError(f"module 'moe' has no attribute {name!r}: it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
