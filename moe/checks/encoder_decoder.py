"""Checks of an encoder-decoder (model.kind): keys that it needs, keys that it cannot have, and keys that only it reads."""

from __future__ import annotations

from moe.checks.clash import check_others, clash
from moe.recipe.sections import Run
from parallel.errors import BadInput
from parallel.fixes import Set

_UNCUT = "an encoder-decoder is not cut in this way"


def check_encoder_decoder(run: Run) -> None:
    """Refuse keys of one kind of model with the other kind. Raises BadInput for the first reason found."""
    has_encoder, spans = run.model.kind == "encoder_decoder", run.data.objective == "span_corruption"
    if spans and not has_encoder:
        fix = Set("model.kind", "encoder_decoder") | Set("data.objective", "next_token")
        raise BadInput("data.objective", got="span_corruption with model.kind=decoder", needed="an encoder, which reads the text", fix=fix)
    if has_encoder and not spans:
        raise clash(run, "data.objective", "model.kind", "span_corruption", needed="inputs that are separate from the targets")
    if has_encoder:
        _check_model(run)
        _check_layout(run)


def _check_model(run: Run) -> None:
    m = run.model
    if m.positions != "t5":
        needed = "t5: all layers of the encoder, or of the decoder, share one bias of relative positions"
        raise BadInput("model.positions", got=m.positions, needed=needed, fix=Set("model.positions", "t5"))
    if not 0 < m.decoder_begins < m.num_layers:
        what = "model.num_layers" if m.encoder_layers is None else "model.encoder_layers"
        got, fix = (m.num_layers, Set("it", 2, said="2 or more")) if m.encoder_layers is None else (m.encoder_layers, Set("it", None))
        needed = "at least 2, one a half" if m.encoder_layers is None else f"below model.num_layers={m.num_layers}: the others decode"
        raise BadInput(what, got=got, needed=needed, fix=fix)
    if m.spans.inputs != m.max_length:
        needed = f"at least {m.spans.inputs}, for one hidden span"
        raise BadInput("model.max_length", got=m.max_length, needed=needed, fix=Set("it", m.spans.inputs))
    if m.document_mask:
        raise clash(run, "model.document_mask", "model.kind", False, "hidden spans and sentinels separate documents")
    if run.vocab_size < run.least_vocab_size:
        sentinels = f"{run.num_sentinels} sentinel{'s' * (run.num_sentinels != 1)}"
        needed = f"at least {run.least_vocab_size}: the tokenizer's ids, and {sentinels} after them"
        raise BadInput("model.vocab_size", got=run.vocab_size, needed=needed, fix=Set("model.vocab_size", None))


def _check_layout(run: Run) -> None:
    whole = f"{_UNCUT}; dp, tp, ep, etp, fsdp and zero share its weights and its work"
    check_others(run, "model.kind", {"degrees.pp": (1, whole), "degrees.sp": (1, whole)})
    if run.degrees.tp > 1 and run.tensor.kind not in ("1d", "copied"):
        raise clash(run, "tensor.kind", "model.kind", "1d", _UNCUT)
    if run.degrees.tp > 1 and run.tensor.sequence_parallel:
        raise clash(run, "tensor.sequence_parallel", "model.kind", False, "between encoder and decoder sequences are whole")
    if run.optimizer.kind == "kfac":
        needed = "adamw, muon, adafactor or sgd: in cross-attention a K-FAC factor would belong to two inputs"
        raise clash(run, "optimizer.kind", "model.kind", "adamw", needed=needed)
