"""Faults in pipelines: wrong weight versions, wrong gradients of micro-batches, tied embeddings, gradient norms, auxiliary losses."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from moe.verify.cases import Case
from moe.verify.kinds import cases
from tests.mutations.mutation import Edit, Mutation


def _case(model: str, schedule: str, *, world: int = 2, pp: int = 2) -> Case:
    """Return the case of `moe verify` with these properties, DDP and fp32, without recomputation."""
    wanted = (model, "ddp", world, pp, schedule, "fp32", "none")
    return next(
        c for c in cases(world, kinds=("pipeline",)) if (c.model, c.kind, c.world, c.pp, c.schedule, c.precision, c.recompute) == wanted
    )


def _newest(real: Any) -> Any:
    return lambda self, version: nullcontext()


def _only_parameters(real: Any) -> Any:
    """Versions of a stage do not have the selection biases of its routers."""
    return lambda self, tensors, order, stage: real(self, [t for t in tensors if isinstance(t, Parameter)], order, stage)


def _embedding_left_out(real: Any) -> Any:
    def wrong(self: Any, names: Iterable[str]) -> None:
        real(self, [name for name in names if not name.startswith("embedding")])

    return wrong


def _of_one_stage(real: Any) -> Any:
    def wrong(squares: Tensor, *, families: tuple[str, ...], world: Any) -> Any:
        return real(squares, families=families, world=replace(world, ranks=(world.ranks[world.index],), index=0, group=None))

    return wrong


def _raw_sum(real: Any) -> Any:
    """The backward pass starts from the sum of the tokens' losses; only the reported loss is their mean."""

    def wrong(self: Any, stage: int, microbatch: int, x: Tensor | None) -> Tensor:
        output: Tensor = real(self, stage, microbatch, x)
        tokens = self.passes[microbatch].inputs_BL.numel() * len(self.passes)
        return output * tokens if output.ndim == 0 else output

    return wrong


def _scaled_each_time(real: Any) -> Any:
    """Gradients accumulated so far are divided by 2 after every micro-batch."""

    def wrong(self: Any, output: Any, gradient: Tensor | None) -> None:
        real(self, output, gradient)
        for parameter in self.executor.model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(2)

    return wrong


def _cleared_each_time(real: Any) -> Any:
    def wrong(self: Any, output: Any, gradient: Tensor | None) -> None:
        for parameter in self.executor.model.parameters():
            parameter.grad = None
        real(self, output, gradient)

    return wrong


def _passed_on(real: Any) -> Any:
    return lambda x, loss, *, scale: x


def _replicas_forgotten(real: Any) -> Any:
    """The data-parallel ranks of the last stage do not reduce their gradients."""

    def wrong(self: Any) -> None:
        if self.mesh.axis("pp").index + 1 < self.mesh.axis("pp").size:
            real(self)

    return wrong


_STAGED = "moe.train.parts.executor:_Stages"

MUTATIONS = (
    Mutation(
        "weights_not_stashed",
        "A backward pass uses weights that were updated after its forward pass",
        "PipeDream, arXiv 1806.03377, section 3.3",
        "pipeline",
        _case("gshard", "pipedream", world=4, pp=4),
        (Edit("parallel.pipeline.weights:Versions.reading", _newest),),
    ),
    Mutation(
        "one_version_of_two",
        "Micro-batches use the newest weights instead of the version at the beginning of their batch",
        "PipeDream-2BW, arXiv 2006.09503, section 3.1",
        "pipeline",
        _case("dense", "two_bw"),
        (Edit("parallel.pipeline.weights:Versions.reading", _newest),),
    ),
    Mutation(
        "tied_embedding_summed_once",
        "The gradients of a tied embedding and head are not summed over the two stages",
        "NVIDIA/Megatron-LM#844",
        "pipeline",
        _case("gshard", "1f1b"),
        (Edit("parallel.pipeline.runtime:StageReplicas._start", _embedding_left_out),),
    ),
    Mutation(
        "norm_of_one_stage",
        "Each stage clips by the norm of its own parameters",
        "pytorch/torchtitan#596",
        "pipeline",
        _case("dense", "1f1b"),
        (Edit("parallel.numerics.clip:norms_of", _of_one_stage),),
    ),
    Mutation(
        "backward_from_the_raw_sum",
        "With stages, backward runs from the summed loss of the tokens; only the reported loss is divided",
        "pytorch/torchtitan#2972",
        "pipeline",
        _case("dense", "1f1b"),
        (Edit(f"{_STAGED}.forward", _raw_sum),),
    ),
    Mutation(
        "accumulated_gradients_scaled_again",
        "Accumulated gradients are divided again with every further micro-batch",
        "pytorch/torchtitan#1733",
        "pipeline",
        _case("dense", "1f1b"),
        (Edit(f"{_STAGED}.backward", _scaled_each_time),),
    ),
    Mutation(
        "stage_started_anew_each_microbatch",
        "A stage clears its gradients between micro-batches; the loss looks correct",
        "NVIDIA-NeMo/Automodel#3530",
        "pipeline",
        _case("dense", "gpipe"),
        (Edit(f"{_STAGED}.backward", _cleared_each_time),),
    ),
    Mutation(
        "auxiliary_loss_ignored_by_stages",
        "In a pipeline stage the layer returns its output without the auxiliary loss",
        "deepspeedai/Megatron-DeepSpeed#151",
        "pipeline",
        _case("deepseek", "1f1b"),
        (Edit("moe.experts.layer:join", _passed_on),),
    ),
    Mutation(
        "replicas_of_a_stage_not_summed",
        "With data and pipeline parallelism, the ranks of one stage never synchronize their gradients",
        "huggingface/picotron#5",
        "pipeline",
        _case("dense", "1f1b", world=4),
        (Edit("parallel.data.buckets:SummedEarly.reduce", _replicas_forgotten),),
    ),
    Mutation(
        "biases_not_stashed",
        "Micro-batches use the newest selection biases instead of those of their version",
        "no public report known to us; reasoned from PipeDream-2BW, arXiv 2006.09503, section 3.1",
        "pipeline",
        _case("deepseek", "two_bw"),
        (Edit("parallel.pipeline.weights:Versions.__init__", _only_parameters),),
    ),
)
