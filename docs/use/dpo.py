"""Direct preference optimisation (DPO, arXiv 2305.18290), a loss for `train.loss`. Copy this file into the folder in which you train.

    python dpo.py runs/base pairs.jsonl                    writes reference.json, from the model to begin with
    python dpo.py margins runs/preferred other.jsonl       prints how far a run prefers the chosen answers
    moe train runs/base/recipe.yaml --init_from runs/base --out runs/preferred \\
        --data.source chat --data.path pairs.jsonl --train.loss dpo:dpo --optimizer.lr 1e-6

    loss of a pair = -log sigmoid(BETA * (log p(chosen) - log p(rejected) - reference))      p: of all tokens of the answer
    reference      = log p(chosen) - log p(rejected) by runs/base
"""

import hashlib
import json
import sys
from functools import cache
from pathlib import Path

import torch.nn.functional as F

import moe
from moe.data import ValidationSet, open_data
from moe.nn.own_loss import OwnLoss
from moe.recipe.sections import Data
from moe.train.use.evaluate import evaluate
from parallel.errors import BadInput

BETA = 0.1
REFERENCE = Path("reference.json")


def preference(predictions):
    """Return how much more likely each chosen answer is than the rejected one, in nats [B]."""
    of_chosen = predictions.chat_BL == 0
    return (predictions.logp_BL * of_chosen).sum(1) - (predictions.logp_BL * ~of_chosen).sum(1)


def dpo(predictions):
    known, names = read(REFERENCE) if REFERENCE.exists() else {}, names_of(predictions)
    if unknown := [name for name in names if name not in known]:
        got, needed = f"no reference for {len(unknown)} pairs", "one for each, by the same tokenizer and model.max_length"
        raise BadInput(str(REFERENCE), got=got, needed=needed, fix="python dpo.py RUN_TO_BEGIN_WITH PAIRS.jsonl")
    margin_B = preference(predictions)
    return -F.logsigmoid(BETA * (margin_B - margin_B.new_tensor([known[name] for name in names])))


def without_reference(predictions):
    """DPO with a reference of 0, also for pairs that are in no file: for moe verify --recipe."""
    return -F.logsigmoid(BETA * preference(predictions))


@cache
def read(path):
    return json.loads(path.read_text())


def names_of(predictions):
    """Return a hash of each pair's tokens, which is its name in reference.json."""
    rows = zip(predictions.read_BL.cpu().numpy(), predictions.next_BL.cpu().numpy(), strict=True)
    return [hashlib.sha256(read.tobytes() + following.tobytes()).hexdigest()[:24] for read, following in rows]


found = {}  # name of a pair -> its reference


def note(predictions):
    margin_B = preference(predictions)
    found.update(zip(names_of(predictions), margin_B.tolist(), strict=True))
    return -margin_B


def margins(run, pairs):
    """Return by how many nats the run prefers each pair's chosen answer: a dict by the pair's name."""
    base = moe.open(run)
    sizes = {"max_length": base.recipe.model.max_length, "vocab_size": base.recipe.vocab_size, "seed": 0}
    data = open_data(Data(source="chat", path=pairs), **sizes, tokenizer=base.tokenizer.describe())
    if not data.has_pairs:
        raise BadInput(pairs, got="single chats", needed="pairs: lines with chosen and rejected", fix="give another file")
    found.clear()
    base.model.own_loss = OwnLoss(f"{__name__}:note")
    evaluate(base.model, [ValidationSet(data.train.windows, None), data.validation], sequences=0)
    return dict(found)


def show(run, pairs):
    margin = list(margins(run, pairs).values())
    share, mean = sum(nats > 0 for nats in margin) / len(margin), sum(margin) / len(margin)
    print(f"{run} prefers the chosen answer in {share:.0%} of {len(margin)} pairs, by {mean:.2f} nats on average")


def main(run, pairs):
    if REFERENCE.exists():
        needed = "no such file yet: a run may train with it, and its reference must not change"
        raise BadInput(str(REFERENCE), got="a file that is there already", needed=needed, fix="rename it, or work in another folder")
    reference = margins(run, pairs)
    REFERENCE.write_text(json.dumps(reference))
    print(f"{len(reference)} pairs in {REFERENCE}")


if __name__ == "__main__":
    does, words = (show, sys.argv[2:]) if sys.argv[1:2] == ["margins"] else (main, sys.argv[1:])
    if len(words) != 2:
        sys.exit("usage: python dpo.py [margins] RUN PAIRS.jsonl")
    moe.script(lambda: does(*words))
