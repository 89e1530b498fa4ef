"""`moe generate`: continues texts with a trained model, with a key-value cache if the model allows one (decode.py)."""

from __future__ import annotations

import codecs
import json as json_text
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from moe.data import Tokenizer
from moe.data.chat import InChats, template_of
from moe.data.span_corruption import WithSentinels, strange
from moe.model.transformer import Output, Transformer
from moe.recipe.shapes import START
from moe.records.results import write_json
from moe.records.summary import printable
from moe.train.use import opened
from moe.train.use.decode import Cached, Reads, Recomputed, Sampling, Written, can_cache, continued, for_continuing
from parallel.errors import BadInput, counted
from parallel.store.files import read_text, reason


@dataclass(frozen=True)
class Continued:
    """Continuation number `sample` of `prompt`. ids, text: the new tokens up to, but without, the first id that ends a text. ended: whether
    such an id was generated."""

    prompt: str
    sample: int
    ids: list[int]
    text: str
    ended: bool


def sample(
    model: Callable[[Tensor], Output],
    tokenizer: Tokenizer,
    *,
    prompt: str,
    num_tokens: int,
    max_length: int,
    temperature: float = 0.8,
    seed: int = 0,
    device: torch.device | None = None,
) -> str:
    """Return the prompt and `num_tokens` more tokens as text. model: maps tokens [1, max_length] to an Output with logits. If it is
    sharded, all ranks must call `sample`."""
    ids = tokenizer.beginning(prompt)
    steps = continued(
        Recomputed(model, max_length),
        [ids],
        num_tokens=num_tokens,
        max_length=max_length,
        vocab_size=tokenizer.vocab_size,
        sampling=Sampling(temperature),
        seeds=[seed],
        device=device,
    )
    return tokenizer.decode(ids + [token for (token,) in steps])


def generate(
    model: Transformer,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    num_tokens: int = 200,
    samples: int = 1,
    sampling: Sampling | None = None,
    seed: int = 0,
    max_batch: int = 64,
    heard: Callable[[str], None] | None = None,
) -> list[Continued]:
    """Return `samples` continuations of each prompt, in order. Sample n is drawn with seed + n, so it does not depend on the number of
    samples or prompts. Prompts of equal length are continued together, at most `max_batch` texts at once. heard: if there is only one text,
    called with each new piece of it; a piece never ends inside a character. In an encoder-decoder the encoder reads the prompt; sentinels
    are written <extra_id_0>, ..."""
    for_continuing(model)
    m, halves = model.config, model.config.kind == "encoder_decoder"
    if halves:
        tokenizer = WithSentinels(tokenizer, vocab_size=model.vocab_size, num_sentinels=m.spans.num_spans)
    asked = [(_read(model, tokenizer.beginning(prompt)), prompt, n) for prompt in prompts for n in range(samples)]
    found: dict[int, Continued] = {}
    listens = heard if len(asked) == 1 else None
    for group in _groups([min(len(ids), m.max_length + halves) for ids, _, _ in asked], max_batch):
        length = len(asked[group[0]][0])
        steps = continued(
            _reads(model, length, num_tokens),
            [asked[i][0] for i in group],
            num_tokens=num_tokens,
            max_length=length + num_tokens if halves else m.max_length,
            vocab_size=tokenizer.vocab_size,
            sampling=sampling or Sampling(),
            seeds=[seed + asked[i][2] for i in group],
            device=next(model.parameters()).device,
        )
        for i, (ids, ended) in zip(group, _until_separators(steps, len(group), tokenizer, listens), strict=True):
            found[i] = Continued(asked[i][1], asked[i][2], ids, tokenizer.decode(ids), ended)
    return [found[i] for i in range(len(asked))]


def _read(model: Transformer, ids: list[int]) -> tuple[int, ...]:
    """Return the tokens that the model gets before the first new one: the prompt's. In an encoder-decoder these are the prompt's last
    max_length tokens, for the encoder, and START, for the decoder."""
    m = model.config
    return (*ids[-m.max_length :], START) if m.kind == "encoder_decoder" else tuple(ids)


def _reads(model: Transformer, length: int, num_tokens: int) -> Reads:
    """Return the fastest `Reads` (a function that computes the next token's logits) that supports the model. length: tokens of a text at
    the beginning. num_tokens: tokens that are added to it."""
    if model.config.kind == "encoder_decoder":
        return Cached(model, source=length - 1, max_length=1 + num_tokens) if can_cache(model) else Written(model, length - 1)
    return Cached(model) if can_cache(model) else Recomputed(model, model.config.max_length)


def _groups(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Split the indices of texts into groups. All texts of a group have the same length, and a group has at most `most` texts."""
    length_of = lengths.__getitem__
    for same in (list(group) for _, group in groupby(sorted(range(len(lengths)), key=length_of), key=length_of)):
        yield from (same[first : first + most] for first in range(0, len(same), most))


def _until_separators(
    steps: Iterator[list[int]], count: int, tokenizer: Tokenizer, heard: Callable[[str], None] | None
) -> list[tuple[list[int], bool]]:
    """Return (tokens before the first id in `tokenizer.ends`, whether such an id was generated) for each of `count` texts. steps: yields
    lists with the next token of every text. heard: called with pieces of the text, if there is only one text."""
    texts: list[list[int]] = [[] for _ in range(count)]
    ended = [False] * count
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for chosen in steps:
        for i, token in enumerate(chosen):
            ended[i] |= token in tokenizer.ends
            if not ended[i]:
                texts[i].append(token)
                if heard is not None:
                    heard(decoder.decode(tokenizer.token_bytes[token]))
        if all(ended):
            break
    if heard is not None:
        heard(decoder.decode(b"", final=True))
    return list(zip(texts, ended, strict=True))


def main(
    run_dir: str,
    *,
    prompt: str | None = None,
    prompt_file: str | None = None,
    chat: bool = False,
    tokens: int = 200,
    samples: int = 1,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    step: int | None = None,
    json: str | None = None,
) -> None:
    """Run `moe generate`: print the continuations (a single one piece by piece, as it is generated), then the tokens per second on
    stderr."""
    for what, value in (("--tokens", tokens), ("--samples", samples)):
        if value < 1:
            raise BadInput(what, got=value, needed="at least 1", fix=f"try {what} {200 if what == '--tokens' else 1}")
    if chat and prompt is None and prompt_file is None:
        raise BadInput("--chat", got="no message", needed="the user's message", fix="--prompt TEXT or --prompt_file FILE")
    if prompt is not None and prompt_file is not None:
        raise BadInput("--prompt_file", got="--prompt as well", needed="one of the two", fix="remove --prompt")
    sampling = Sampling(temperature, top_k, top_p)
    run = opened.open(run_dir, step=step)
    model, tokenizer = run.model, run.tokenizer
    halves = model.config.kind == "encoder_decoder"
    usual = "def <extra_id_0>(self):" if halves else "def "
    prompts = [usual if prompt is None else prompt] if prompt_file is None else _prompts(prompt_file)
    if chat:
        prompts, tokenizer = as_messages(prompts, tokenizer), InChats(tokenizer)
    if halves and (other := strange(prompts, model.config.spans.num_spans)) is not None:
        count = model.config.spans.num_spans
        there = "<extra_id_0>" if count == 1 else f"<extra_id_0> to <extra_id_{count - 1}>"
        print(f"{other} is no sentinel of this model, which has {there}: it is read as text", file=sys.stderr)
    longest, read = max(len(tokenizer.beginning(prompt)) for prompt in prompts), model.config.max_length
    if longest > read:
        print(f"a prompt has {counted(longest, 'token')}, and the model reads the last {read} (model.max_length)", file=sys.stderr)
    one = len(prompts) * samples == 1
    between = "\n" if halves else ""  # a decoder's text does not continue the encoder's, so it begins on a new line
    if one:
        _say(prompts[0] + between)
    started = time.perf_counter()
    found = generate(model, tokenizer, prompts, num_tokens=tokens, samples=samples, sampling=sampling, seed=seed, heard=_say)
    seconds = time.perf_counter() - started
    _say("\n" if one else "".join(f"--- {n // samples + 1}.{f.sample + 1}\n{f.prompt}{between}{f.text}\n" for n, f in enumerate(found)))
    made = sum(len(f.ids) for f in found)
    print(f"{counted(made, 'token')} of {counted(len(found), 'text')} in {seconds:.2f} s: {made / seconds:.0f} a second", file=sys.stderr)
    if json:
        rows = [{"prompt": f.prompt, "sample": f.sample, "text": f.text, "tokens": len(f.ids), "ended": f.ended} for f in found]
        write_json(json, verb="generate", rows=rows, step=run.step, seconds=seconds)


def as_messages(prompts: list[str], tokenizer: Tokenizer) -> list[str]:
    """Return the text of a chat for each prompt: the prompt as the user's message, up to the beginning of the assistant's answer."""
    template = template_of(tokenizer)
    if template is None:
        fix = "write the prompt in the form of the training text, without --chat"
        raise BadInput("--chat", got="a model without a chat template", needed="a model with one", fix=fix)
    return [template.render([{"role": "user", "content": prompt}], prompt=True) for prompt in prompts]


def _prompts(path: str) -> list[str]:
    """Return the prompts in a file, one a line; in a .jsonl file, the "prompt" of each line."""
    try:
        lines = [line for line in read_text(path).splitlines() if line.strip()]
    except (OSError, UnicodeError) as error:
        needed = "a text file in UTF-8, one prompt a line"
        raise BadInput(
            "--prompt_file", got=f"{path} ({reason(error)})", needed=needed, fix="check the path, or use --prompt TEXT"
        ) from None
    if not lines:
        raise BadInput("--prompt_file", got=f"{path} without a line", needed="one prompt a line", fix="write one, or use --prompt TEXT")
    if not path.endswith(".jsonl"):
        return lines
    found = []
    for number, line in enumerate(lines, 1):
        try:
            value = json_text.loads(line)["prompt"]
        except (ValueError, TypeError, KeyError, RecursionError):
            value = None
        if not isinstance(value, str):
            got = f'line {number} that is no {{"prompt": TEXT}}'
            raise BadInput("--prompt_file", got=got, needed='one {"prompt": TEXT} a line', fix="give a .txt file with one prompt a line")
        found.append(value)
    return found


def _say(text: str) -> None:
    """Print text. On a terminal, control characters are replaced, because they could change the terminal's settings."""
    print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)
