"""`train.compile`: torch's compiler (Inductor) fuses each group of operations between matrix products into one kernel.

    x -> norm -> [q, k, v] -> turn -> [attention] -> [out] -> + -> norm -> [w1, w3] -> activation -> [w2] -> + ... [head] -> loss
         ====                                                 ====                     ==========                            ====

Each underlined function becomes one forward and one backward kernel. Products and attention, in brackets, are not compiled, because
collectives, hooks of FSDP and ZeRO, and deferred gradients are attached to them. Also not compiled: rotary positions (turn), experts, norms
of sharded channels, and a loss in tiles or chunks. Forward passes without gradients are not compiled either: their sequence lengths change.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from moe.kernels.activation import activate
from moe.model.transformer import Transformer
from moe.nn.linear import FeedForward, Norm, normed, normed_in_fp32
from moe.nn.vocabulary import cross_entropy
from parallel.errors import BadInput
from parallel.fixes import Set

_SIZES = 64  # largest number of combinations of sizes and dtypes for which a function is compiled; torch's default is 8


class Compiled:
    """A function of tensors, which is compiled for each new size of its arguments. Without gradients, the plain function is called.
    A call raises BadInput if this machine cannot compile.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.plain = function

    def __call__(self, *args: Any, **settings: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return self.plain(*args, **settings)
        try:
            return self._fast(*args, **settings)
        except torch._dynamo.exc.TorchDynamoException as error:
            why = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
            needed = "a C++ compiler with Python's headers on a CPU, triton on a GPU, and a folder for temporary files"
            raise BadInput("train.compile", got=f"true, but: {why}", needed=needed, fix=Set("train.compile", False)) from error

    @cached_property
    def _fast(self) -> Callable[..., Tensor]:
        torch._dynamo.config.recompile_limit = max(_SIZES, torch._dynamo.config.recompile_limit)
        # compile in this process: for these few kernels, a pool of compiler processes would take more memory and time
        return torch.compile(self.plain, dynamic=False, fullgraph=True, options={"compile_threads": 1})


def compile_between_products(model: Transformer) -> None:
    norm, activation = Compiled(normed_in_fp32), Compiled(activate)
    for module in model.modules():
        if isinstance(module, Norm) and module.normed is normed:
            module.normed = norm
        elif isinstance(module, FeedForward):
            module.activate = activation
    model.cross_entropy = Compiled(cross_entropy)
