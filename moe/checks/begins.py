"""Checks that a new run has the initial weights that it needs, before torch is imported and ranks are started."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from moe.recipe.sections import Data, Run
from parallel.errors import BadInput, did_you_mean, some
from parallel.store.files import named_encoding


def has_checkpoint(folder: Path) -> bool:
    """Return whether a run's folder has a checkpoint. The ranks check later whether it is complete."""
    return any((folder / "checkpoints").glob("step-*/manifest.json"))


def another_run(named: Path, holds: str = "checkpoints", *, otherwise: str = "train first: moe train switch_tiny") -> str:
    """Return the fix for an error about `named`, which is not a run's folder. It suggests the run that contains `named`, or runs in it,
    next to it or in runs/. holds: name of a file or subfolder that the folder of a run contains. otherwise: the fix if no run is found."""
    near = next((str(parent) for parent in named.absolute().parents[:2] if (parent / holds).exists()), None)
    found: list[str] = []
    for folder in () if near else (named, named.parent, Path("runs")):
        with contextlib.suppress(OSError):
            found = sorted(str(path) for path in folder.iterdir() if (path / holds).exists())
        if found:
            near = None if folder == named else did_you_mean(str(named), found) or did_you_mean(f"runs/{named}", found)
            break
    if near:
        return f"did you mean {near}?"
    return f"one of {some(found, rest=f'ls {Path(found[0]).parent}')}" if found else otherwise


def check_begins(run: Run, out: Path, *, fresh: bool, source: Path | None) -> None:
    """Check a new run in folder `out`. Raise BadInput if `source` (--init_from) has no checkpoint, if --fresh would set that checkpoint
    aside, or if the run's chats need a template that neither recipe nor source has. A run without a source must not train LoRA adapters,
    and its tokenizer.json must exist."""
    check_stays(out, fresh=fresh, source=source)
    if not fresh and has_checkpoint(out):  # the run resumes with the weights of its own checkpoint
        return
    if source is None and run.lora.rank:
        raise no_base(run.lora.rank)
    if source is None and run.data.tokenizer_file is not None:
        from moe.data.tokenizer_file import check_file

        check_file(run.data.tokenizer_file)
    if source is not None and not (source / "manifest.json").is_file() and not has_checkpoint(source):
        raise no_checkpoint(source)
    if run.data.source == "chat" and not (source and _has_template(source)):
        check_data(run.data, None, vocab_size=run.vocab_size)


def _has_template(source: Path) -> bool:
    """Return whether a run or checkpoint has a chat template. Also return True if it cannot be read: the ranks then raise the error."""
    files = [source / "manifest.json", *source.glob("checkpoints/step-*/manifest.json")]
    try:
        described = json.loads(next(file for file in files if file.is_file()).read_bytes())["state"]["tokenizer"]
        return "template" in (described.get("chat") or {})
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return True


def check_data(data: Data, chat: dict[str, Any] | None, *, vocab_size: int) -> None:
    """Read the first samples of the recipe's files. Raise BadInput if a chat, a JSONL line, a table or a file of ids is malformed, and if
    chats need a template that is missing. chat: value of `Tokenizer.chat` of the model that the run begins with; None: it has no template.
    vocab_size: the model's."""
    from moe.data.chat import ChatFiles, check_first, messages_field
    from moe.data.corpus import check_first_documents
    from moe.data.ids import check_ids

    for one, text_key_set_by in data.each():
        if one.path is None or not Path(one.path).expanduser().exists():  # check_run refuses a path that is missing
            continue
        if one.source == "chat":
            files = ChatFiles(one.path, messages_field(one.text_key), named_encoding(one.encoding))
            check_first(files, chat, one.chat_template, vocab_size=vocab_size, only_ids=one.tokenizer == "ids")
        elif one.tokenizer == "ids":
            check_ids(one)
        elif not one.is_own:
            check_first_documents(one, text_key_set_by=text_key_set_by)


def check_stays(out: Path, *, fresh: bool, source: Path | None) -> None:
    """Raise BadInput if --fresh is given and --init_from (`source`) names a run or checkpoint in the run's folder `out`: --fresh would set
    aside the checkpoint to be read. RUN/base, a converted model, is not set aside."""
    if fresh and source is not None and (out.resolve() == source.resolve() or (out / "checkpoints").resolve() in source.resolve().parents):
        needed, fix = "another run's folder: --fresh sets this one's checkpoints aside", "choose another --out, without --fresh"
        raise BadInput("--init_from", got=source, needed=needed, fix=fix)


def no_base(rank: int) -> BadInput:
    """Return the error for a new run with LoRA (lora.rank `rank`) that loads no weights to freeze."""
    needed = "--init_from, the run or checkpoint whose weights are frozen"
    return BadInput("lora.rank", got=f"{rank} without weights to start from", needed=needed, fix="--init_from runs/NAME")


def no_checkpoint(source: Path) -> BadInput:
    """Return the error for a folder of --init_from without a checkpoint."""
    needed, otherwise = "a run that saved one, or a checkpoint's folder", "--init_from runs/NAME, or runs/NAME/checkpoints/step-N"
    fix = another_run(source, otherwise=otherwise)
    return BadInput("--init_from", got=f"{source}, which has no checkpoint", needed=needed, fix=fix)
