"""`train.compile`: a compiled model has the losses and gradients of the plain one."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe.model.transformer import Transformer
from moe.nn.context import Context
from moe.nn.linear import Norm
from moe.nn.vocabulary import PADDING
from moe.parallelize.compiled import Compiled, compile_between_products
from moe.recipe.load import build_run
from parallel.errors import BadInput

# B batch, L length

MODEL = {"num_layers": 2, "d_model": 24, "num_heads": 3, "d_ff": 40, "ffn": "swiglu", "max_length": 16, "moe_every": 2}
EXPERTS = {"num_experts": 4, "d_ff": 20}
HEADERS = Path(sysconfig.get_path("include"), "Python.h").exists()


def _model(**sections: Any) -> Transformer:
    run = build_run({"model": MODEL, "experts": EXPERTS, "router": {"jitter": 0.0}} | sections)
    return Transformer(run.model, run.experts, run.router, vocab_size=37, seed=5)


def _tokens() -> tuple[Tensor, Tensor]:
    tokens_BL = torch.randint(37, (3, 17), generator=torch.Generator().manual_seed(2))
    targets_BL = tokens_BL[:, 1:].clone()
    targets_BL[1, 4:] = PADDING
    return tokens_BL[:, :-1], targets_BL


def _trained(model: Transformer) -> tuple[Tensor, dict[str, Tensor]]:
    tokens_BL, targets_BL = _tokens()
    model.train()
    loss = model(tokens_BL, Context.of(tokens_BL), targets_BL).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.packages
@pytest.mark.skipif(not HEADERS, reason="torch's compiler needs Python's headers (Debian, Ubuntu: apt install python3-dev)")
def test_a_compiled_model_gives_the_losses_and_gradients_of_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norm, activation and loss are compiled for one size only, because each further size takes a second more."""
    from torch._inductor import config

    monkeypatch.setattr(config.cpp, "vec_isa_ok", True)  # otherwise it tests all instruction sets, which takes as long as the rest
    plain, compiled = _model(), _model()
    compile_between_products(compiled)
    loss, gradients = _trained(plain)
    got_loss, got = _trained(compiled)
    torch.testing.assert_close(got_loss, loss, rtol=1e-6, atol=0)
    assert got.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-5, atol=1e-6 * float(gradient.abs().max()), msg=name)
    slots = [module.normed for module in compiled.modules() if isinstance(module, Norm)]
    assert len(set(map(id, slots))) == 1 and isinstance(slots[0], Compiled)
    assert "_fast" in vars(slots[0]) and isinstance(compiled.cross_entropy, Compiled) and "_fast" in vars(compiled.cross_entropy)


def test_without_gradients_nothing_is_compiled() -> None:
    """In evaluation and generation, lengths change, and each new length would be compiled."""
    plain, compiled = _model(), _model()
    compile_between_products(compiled)
    compiled.cross_entropy = Compiled(lambda *_: pytest.fail("the compiler was asked"))
    tokens_BL, _ = _tokens()
    with torch.no_grad():
        want, got = plain.eval()(tokens_BL).logits_BLV, compiled.eval()(tokens_BL).logits_BLV
    assert torch.equal(want, got)
    assert all("_fast" not in vars(module.normed) for module in compiled.modules() if isinstance(module, Norm))  # type: ignore[union-attr]


def test_a_machine_that_cannot_compile_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config
    from torch._inductor.utils import fresh_cache

    monkeypatch.setattr(config.cpp, "cxx", (None, "no-such-compiler"))
    x = torch.ones(3, 5, requires_grad=True)
    with fresh_cache(), pytest.raises(BadInput, match=r"train.compile: got true, but: .*; fix: set train.compile to false") as caught:
        Compiled(lambda x: x.exp() * 3 + 1)(x)
    assert "\n" not in str(caught.value)
