"""The sections of a recipe; a whole recipe is a `Run`. moe/recipe/load.py reads a Run from YAML and flags. `check_run`
(moe/checks/together.py) refuses values that do not work together. In Python, `train(Run(...))` trains a recipe without a command line.
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
