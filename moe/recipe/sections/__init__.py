"""The sections of a recipe: small, frozen, one per concern (no torch here).

    Run = model + experts + router + degrees + sharding + ... + train
    check_run(run, world)  refuses valid values that do not fit together (moe/checks/together.py): one line, what, got, needed, fix

`Run` is also the library's entry: `train(Run(...))` never reads argv. moe/recipe/load.py reads YAML and flags into a Run.
"""

from moe.recipe.section import Section
from moe.recipe.sections.experts import Dispatch, Experts, Router
from moe.recipe.sections.layout import Offload, Parallel, Pipeline, Precision, Recompute, Sequence, Sharding, Tensor, Tiling
from moe.recipe.sections.model import Latent, Model, Rope, Scales, Swiglu
from moe.recipe.sections.run import Run
from moe.recipe.sections.training import Data, Lora, Optimizer, Train

__all__ = [
    "Data", "Dispatch", "Experts", "Latent", "Lora", "Model", "Offload", "Optimizer", "Parallel", "Pipeline", "Precision", "Recompute",
    "Rope", "Router", "Run", "Scales", "Section", "Sequence", "Sharding", "Swiglu", "Tensor", "Tiling", "Train",
]  # fmt: skip
