"""Faults in the update: weight decay, clipping, optimizer steps, learning rates, and updates of the routers' selection biases."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe.verify.cases import Case
from parallel.mesh.mesh import Axis
from tests.mutations.mutation import Edit, Mutation


def _also(*words: str) -> Any:
    """Apply weight decay also to every parameter with one of these words in its name."""

    def make(real: Any) -> Any:
        def wrong(self: Any, parameters: Any) -> Any:
            more = replace(self, decays=lambda name, parameter: self.decays(name, parameter) or any(word in name for word in words))
            return real(more, parameters)

        return wrong

    return make


def _into_the_gradient(real: Any) -> Any:
    """Weight decay is added to the gradient (L2 regularization), so that Adam scales it."""

    def wrong(self: Any, groups: Any, wholes: Any = None) -> Any:
        optimizer = real(self, groups, wholes)

        def before(*_: Any) -> None:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    if p.grad is not None and group["weight_decay"]:
                        p.grad.add_(p.data, alpha=group["weight_decay"])
                        p.data.div_(1 - group["lr"] * group["weight_decay"])

        optimizer.register_step_pre_hook(before)
        return optimizer

    return wrong


def _experts_not_clipped(real: Any) -> Any:
    def wrong(self: Any, lr: float, *, factor: float = 1.0) -> None:
        held = [p.grad for name, p in self.parameters.items() if ".experts." not in name and p.grad is not None]
        torch._foreach_mul_(held, factor)
        real(self, lr)

    return wrong


def _experts_not_stepped(real: Any) -> Any:
    """The optimizer does not have this rank's experts."""

    def wrong(self: Any, parameters: Any) -> Any:
        return real(self, [(name, p) for name, p in parameters if ".experts." not in name])

    return wrong


def _first_group_alone(real: Any) -> Any:
    """Only the first parameter group gets the new learning rate; the others get half of their old one."""

    def wrong(self: Any, lr: float, **how: Any) -> None:
        rates = [group["lr"] or lr for group in self.optimizer.param_groups]
        first = self.optimizer.param_groups[0]

        def keep(*_: Any) -> None:
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = lr if group is first else rate / 2

        handle = self.optimizer.register_step_pre_hook(keep)
        try:
            real(self, lr, **how)
        finally:
            handle.remove()

    return wrong


def _without_correction(real: Any) -> Any:
    """Adam starts with step count 1000, so it makes no bias correction."""

    def wrong(self: Any, lr: float, **how: Any) -> None:
        for state in self.optimizer.state.values():
            state["step"].add_(0.0)
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if not self.optimizer.state.get(p):
                    self.optimizer.state[p] = {
                        "step": torch.tensor(1000.0),
                        "exp_avg": torch.zeros_like(p),
                        "exp_avg_sq": torch.zeros_like(p),
                    }
        real(self, lr, **how)

    return wrong


def _of_this_rank(real: Any) -> Any:
    """The selection bias is updated with the load of this rank alone."""

    def wrong(model: Any, load: dict[int, Tensor]) -> None:
        from moe.model.transformer import moe_layers

        mine = {layer.layer: getattr(layer, "seen_load", load[layer.layer]) for layer in moe_layers(model)}
        real(model, mine)

    return wrong


def _own_load(real: Any) -> Any:
    """The step's numbers have the load of this tp rank's tokens alone."""
    return lambda model: Axis("tp")


def _notes_load(real: Any) -> Any:
    def wrong(self: Any, x_BLD: Tensor, context: Any) -> Any:
        out, report = real(self, x_BLD, context)
        self.seen_load = report.load_E
        return out, report

    return wrong


def _each_microbatch(real: Any) -> Any:
    """The selection bias is updated after every micro-batch, so micro-batches of one step are routed with different biases."""

    def wrong(self: Any, x_BLD: Tensor, context: Any) -> Any:
        out, report = real(self, x_BLD, context)
        if self.training and self.router.bias_E is not None and torch.is_grad_enabled():
            mean = report.load_E.double().mean()
            self.router.bias_E += self.router.spec.bias_rate * torch.sign(mean - report.load_E).float()
        return out, report

    return wrong


_GROUPS = "parallel.data.engine:Rule.groups"


def _to_the_limit(real: Any) -> Any:
    """Gradients with a norm below the limit are scaled up to it."""
    return lambda norm, limit: 1.0 if limit is None else limit / norm


def _of_shards(real: Any) -> Any:
    return lambda x, dims, *, cuts, counts=None: real(x, dims, cuts=(), counts=counts)


def _shards_alone(real: Any) -> Any:
    return lambda self, groups, *, rule, wholes: real(self, groups, rule=rule, wholes={})


def _factors_of_experts_alone(real: Any) -> Any:
    """The sums from which factors of experts are computed stay those of this rank's tokens."""

    def wrong(self: Any) -> None:
        total = self._total
        self._total = lambda sums: total({key: tensor for key, tensor in sums.items() if ".experts." not in key[1]})
        try:
            real(self)
        finally:
            del self._total

    return wrong


def _weights_exchanged(real: Any) -> Any:
    return lambda running_EWW, sums_EWW, *, ema: real(running_EWW, sums_EWW, ema=1 - ema)


def _scale_left(real: Any) -> Any:
    """The scale by which AdamW divides gradients stays set until another step sets it."""

    @contextmanager
    def wrong(lr: float, factor: float, optimizer: Any, **tensors: Any) -> Iterator[None]:
        with real(lr, factor, optimizer, **tensors):
            yield
            scale = getattr(optimizer, "grad_scale", None)
        optimizer.grad_scale = scale

    return wrong


def _rate_of_adamw(real: Any) -> Any:
    return lambda momentum, scale, lr_factor, *rest: real(momentum, scale, 1.0, *rest)


_DENSE = Case("dense", "ddp", 1, 1, 1, "fp32")
_SWITCH = Case("switch", "ddp", 1, 1, 1, "fp32")
_DEEPSEEK_2 = Case("deepseek", "ddp", 2, 1, 1, "fp32")

MUTATIONS = (
    Mutation(
        "norms_decay",
        "Weight decay applies to the gains of norms, as if they were matrices",
        "ServiceNow/Fast-LLM#542",
        "data",
        _DENSE,
        (Edit(_GROUPS, _also("norm.weight")),),
    ),
    Mutation(
        "everything_decays",
        "Weight decay applies to all parameters, including position biases",
        "dingo-actual/om#12",
        "data",
        Case("gshard", "ddp", 1, 1, 1, "fp32"),
        (Edit(_GROUPS, _also("")),),
    ),
    Mutation(
        "routers_decay",
        "Weight decay applies to the router, which the recipe excludes",
        "no public report known to us; reasoned from marin-community/marin#8833, a recipe that decays them on purpose",
        "data",
        _SWITCH,
        (Edit(_GROUPS, _also(".router.")),),
    ),
    Mutation(
        "decay_in_the_gradient",
        "Weight decay is added to the gradient and scaled by Adam",
        "Loshchilov and Hutter, arXiv 1711.05101; huggingface/transformers#188",
        "data",
        _DENSE,
        (Edit("parallel.data.engine:AdamW.build", _into_the_gradient),),
    ),
    Mutation(
        "experts_left_out_of_clipping",
        "Experts are not clipped",
        "laekov/fastmoe#29",
        "data",
        _SWITCH,
        (Edit("parallel.data.stepped:Stepped.step", _experts_not_clipped),),
    ),
    Mutation(
        "experts_frozen",
        "The optimizer holds experts that were later replaced by this rank's, so the rank's experts are never updated",
        "deepspeedai/DeepSpeed#8377",
        "data",
        _SWITCH,
        (Edit(_GROUPS, _experts_not_stepped),),
    ),
    Mutation(
        "rate_of_one_group",
        "A new learning rate reaches only some parameter groups",
        "deepspeedai/DeepSpeedExamples#756",
        "data",
        _DENSE,
        (Edit("parallel.data.stepped:Stepped.step", _first_group_alone),),
    ),
    Mutation(
        "no_bias_correction",
        "Adam's step count is larger than the number of updates, so the bias correction of young moments is missing",
        "deepspeedai/DeepSpeed#1823",
        "data",
        _DENSE,
        (Edit("parallel.data.stepped:Stepped.step", _without_correction),),
    ),
    Mutation(
        "bias_by_local_load",
        "The selection bias moves by the load of one rank",
        "pytorch/torchtitan#1114",
        "data",
        _DEEPSEEK_2,
        (Edit("moe.train.loop.step:move_biases", _of_this_rank), Edit("moe.experts.layer:MoELayer.forward", _notes_load)),
    ),
    Mutation(
        "bias_by_load_of_a_tp_rank",
        "The load that moves the selection bias is summed over dp, but not over the tp ranks that share the tokens",
        "pytorch/torchtitan#4154",
        "data",
        Case("deepseek", "ddp", 2, 1, 3, "fp32", tp=2),
        (Edit("moe.train.loop.step:divided_over", _own_load),),
    ),
    Mutation(
        "bias_each_microbatch",
        "The selection bias moves after each micro-batch",
        "pytorch/torchtitan#1304",
        "data",
        Case("deepseek", "ddp", 1, 1, 3, "fp32"),
        (Edit("moe.experts.layer:MoELayer.forward", _each_microbatch),),
    ),
    Mutation(
        "small_norms_scaled_up",
        "Gradients with a norm below the limit are scaled up to it",
        "no public report known to us; reasoned from Pascanu et al., arXiv 1211.05063, algorithm 1",
        "data",
        Case("mixer", "ddp", 2, 1, 3, "fp32"),
        (Edit("moe.train.loop.step:clip_factor", _to_the_limit),),
    ),
    Mutation(
        "adafactor_means_of_shards",
        "Adafactor's means over rows, columns and matrices are those of this rank's shard",
        "no public report known to us; reasoned from pytorch/pytorch#109581",
        "data",
        Case("adafactor", "fsdp", 2, 2, 1, "fp32"),
        (Edit("parallel.optim.adafactor:_mean", _of_shards),),
    ),
    Mutation(
        "muon_of_shards",
        "Muon makes each rank's shard of a matrix orthogonal instead of the matrix",
        "no public report known to us; reasoned from mlc-ai/pith-train#58, which gathers the matrices",
        "tensor",
        Case("muon", "ddp", 2, 2, 1, "fp32", tp=2, tensor="1d"),
        (Edit("parallel.optim.muon:MuonOptimizer.__init__", _shards_alone),),
    ),
    Mutation(
        "factors_of_copied_experts_not_summed",
        "K-FAC's factors of an expert with several copies are computed from the tokens of one copy",
        "no public report known to us; reasoned from PipeFisher, arXiv 2211.14133, which all-reduces factors",
        "data",
        Case("kfac", "ddp", 2, 1, 1, "fp32"),
        (Edit("parallel.kfac.kfac:Kfac._reduce_sums", _factors_of_experts_alone),),
    ),
    Mutation(
        "weights_of_old_and_new_factors_exchanged",
        "K-FAC gives its running factors the weight 1 - ema and the new ones ema",
        "no public report known to us; reasoned from Martens and Grosse, arXiv 1503.05671, section 5, whose factors change slowly",
        "data",
        Case("kfac_t5", "ddp", 1, 1, 3, "fp32"),
        (Edit("parallel.kfac.kfac:averaged", _weights_exchanged),),
    ),
    Mutation(
        "clipping_left_to_the_next_step",
        "The factor of a clipped step stays in the optimizer, and scales the gradients of a next step that is not clipped",
        "no public report known to us; reasoned from pytorch/pytorch: GradScaler, which deletes the optimizer's scale after a step",
        "data",
        Case("clipped", "ddp", 1, 1, 1, "fp32", padded=True),
        (Edit("parallel.data.stepped:at_rate", _scale_left),),
    ),
    Mutation(
        "muon_at_the_rate_of_adamw",
        "Muon's own factor on the learning rate is not read",
        "no public report known to us; reasoned from KellerJordan/Muon: MuonWithAuxAdam, whose two methods have a rate each",
        "data",
        Case("muon", "fsdp", 2, 2, 1, "fp32"),
        (Edit("moe.parallelize.engines:Muon", _rate_of_adamw),),
    ),
)
