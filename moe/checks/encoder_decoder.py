"""Checks of an encoder-decoder (model.kind): keys that it needs, keys that it cannot have, and keys that only it reads."""

from __future__ import annotations

from moe.recipe.sections import Run
from parallel.errors import BadInput
from parallel.fixes import Set

_HALVES = "nothing here cuts an encoder-decoder so"


def check_encoder_decoder(run: Run) -> None:
    """Refuse keys of one kind of model with the other kind. Raises BadInput for the first reason found."""
    m = run.model
    halves, spans = m.kind == "encoder_decoder", run.data.objective == "span_corruption"
    if spans and not halves:
        fix = Set("model.kind", "encoder_decoder") | Set("data.objective", "next_token")
        raise BadInput("data.objective", got="span_corruption with model.kind=decoder", needed="an encoder, which reads the text", fix=fix)
    if not halves:
        return
    if not spans:
        fix = Set("data.objective", "span_corruption")
        raise BadInput("data.objective", got="next_token with model.kind=encoder_decoder", needed="inputs beside targets", fix=fix)
    _check_model(run)
    _check_layout(run)


def _check_model(run: Run) -> None:
    m = run.model
    if m.positions != "t5":
        needed = "t5: a half's layers share one bias of relative positions"
        raise BadInput("model.positions", got=m.positions, needed=needed, fix=Set("model.positions", "t5"))
    if not 0 < m.decoder_begins < m.num_layers:
        what = "model.num_layers" if m.encoder_layers is None else "model.encoder_layers"
        got, fix = (m.num_layers, Set("it", 2, said="2 or more")) if m.encoder_layers is None else (m.encoder_layers, Set("it", None))
        needed = "at least 2, one a half" if m.encoder_layers is None else f"below model.num_layers={m.num_layers}: the others decode"
        raise BadInput(what, got=got, needed=needed, fix=fix)
    if m.spans.inputs != m.max_length:
        raise BadInput(
            "model.max_length", got=m.max_length, needed=f"at least {m.spans.inputs}, for one hidden span", fix=Set("it", m.spans.inputs)
        )
    if m.document_mask:
        needed = "false: hidden spans and sentinels separate documents"
        raise BadInput("model.document_mask", got="true with model.kind=encoder_decoder", needed=needed, fix=Set("it", False))
    if run.vocab_size < run.least_vocab_size:
        sentinels = f"{run.num_sentinels} sentinel{'s' * (run.num_sentinels != 1)}"
        needed = f"at least {run.least_vocab_size}: the tokenizer's ids, and {sentinels} behind them"
        raise BadInput("model.vocab_size", got=run.vocab_size, needed=needed, fix=Set("model.vocab_size", None))


def _check_layout(run: Run) -> None:
    d = run.degrees
    for degree in ("pp", "sp"):
        value = getattr(d, degree)
        if value != 1:
            raise BadInput(
                f"degrees.{degree}",
                got=f"{value} with model.kind=encoder_decoder",
                needed=f"1: {_HALVES}; dp, tp, ep, etp, fsdp and zero share its weights and its work",
                fix=Set(f"degrees.{degree}", 1),
            )
    if d.tp > 1 and run.tensor.kind not in ("1d", "copied"):
        needed, fix = f"1d: {_HALVES}", Set("tensor.kind", "1d")
        raise BadInput("tensor.kind", got=f"{run.tensor.kind} with model.kind=encoder_decoder", needed=needed, fix=fix)
    if d.tp > 1 and run.tensor.sequence_parallel:
        needed, fix = "false: between its halves sequences are whole", Set("tensor.sequence_parallel", False)
        raise BadInput("tensor.sequence_parallel", got="true with model.kind=encoder_decoder", needed=needed, fix=fix)
    if run.optimizer.kind == "kfac":
        needed = "adamw, muon, adafactor or sgd: a factor of a cross layer would be of two inputs"
        raise BadInput("optimizer.kind", got="kfac with model.kind=encoder_decoder", needed=needed, fix=Set("optimizer.kind", "adamw"))
