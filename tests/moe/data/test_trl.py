"""Predicted tokens are those of TRL's SFTTrainer on the same samples: TRL itself if it is installed, and always what it gave when recorded.

python -m tests.moe.data.test_trl        records again, with the installed TRL, into trl_masks.json
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe.recipe.shapes import PADDING
from tests.moe.data.test_chat import MESSAGES, TEMPLATES, TOKENS, given, marked, messages_of, read, sample, unmarked

RECORD = Path(__file__).with_name("trl_masks.json")
SINGLE = {"prompt": MESSAGES[:2], "completion": MESSAGES[2:3]}


def cases() -> dict[str, tuple[dict[str, Any], str | None, bool]]:
    """Name -> (row, template, TRL's assistant_only_loss). Rows of prompt and completion have TRL's completion_only_loss."""
    found: dict[str, tuple[dict[str, Any], str | None, bool]] = {}
    for name in TEMPLATES:
        messages, tools = messages_of(name)
        extra = {"tools": tools} if tools else {}
        found[f"{name}, messages"] = ({"messages": messages} | extra, marked(name), True)
        found[f"{name}, completion of several turns"] = ({"prompt": messages[:-2], "completion": messages[-2:]} | extra, marked(name), True)
        found[f"{name}, completion"] = (SINGLE, unmarked(name), False)
    found["conversations"] = (
        {"conversations": [{"from": "user", "value": "Hi"}, {"from": "assistant", "value": "Hello é"}]}, marked("chatml"), True
    )  # fmt: skip
    for number, (prompt, completion) in enumerate((("1 + 1 =", " 2"), ("What is an", "d? ☃"), ("é", "naïvely"))):
        found[f"text {number}"] = ({"prompt": prompt, "completion": completion}, None, False)
    return found


class OneRow:
    """A dataset of one row, as far as TRL reads one. (Dataset of the library `datasets` adds empty fields to messages.)"""

    def __init__(self, row: dict[str, Any]) -> None:
        self.row, self.column_names = row, list(row)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield self.row

    def map(self, function: Any, *, fn_kwargs: Any = None, remove_columns: Any = None, **_: Any) -> OneRow:
        gone = [remove_columns] if isinstance(remove_columns, str) else remove_columns or []
        return OneRow({name: x for name, x in (self.row | function(dict(self.row), **fn_kwargs or {})).items() if name not in gone})


def by_trl(row: dict[str, Any], template: str | None, assistant_only: bool, tokenizer: Any) -> list[list[int]]:
    """Return [ids, labels] that SFTTrainer prepares of a row. It reads of itself only what is given here."""
    from trl.trainer.sft_trainer import SFTTrainer

    theirs = SimpleNamespace(chat_template=template, completion_only_loss="prompt" in row, _tokenizer=tokenizer)
    arguments = SimpleNamespace(
        dataset_num_proc=None, dataset_text_field="text", assistant_only_loss=assistant_only, max_length=None, packing=False,
        truncation_mode="keep_start", use_liger_kernel=False, shuffle_dataset=False, eval_packing=None, dataset_kwargs=None,
    )  # fmt: skip
    made = SFTTrainer._prepare_dataset(theirs, OneRow(row), tokenizer, arguments, False, None, "train").row
    return [list(made["input_ids"]), list(made["labels"])]


def library_of(text: str) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_str(text)


def tokenizer_of(library: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=library, **TOKENS)


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORD.read_text())
    return found


@pytest.mark.parametrize("name", cases())
def test_predicted_tokens_are_those_that_trl_gave(name: str, recorded: dict[str, Any], tmp_path: Path) -> None:
    row, template, _ = cases()[name]
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    chat = {"tokens": TOKENS} | ({} if template is None else {"template": template})
    tokenizer = given(library_of(recorded["tokenizer"]), chat)
    ids, labels = sample(read(str(tmp_path / "a.jsonl"), tokenizer, max_length=1000, log=lambda line: None), 0)
    assert [ids.tolist(), labels.tolist()] == recorded["cases"][name]
    assert 0 < (labels != PADDING).sum() < len(labels)


def test_the_record_is_what_trl_gives(recorded: dict[str, Any]) -> None:
    trl = pytest.importorskip("trl", reason=f"pip install trl=={recorded['trl']}")
    if trl.__version__ != recorded["trl"]:
        pytest.skip(f"recorded with trl {recorded['trl']}, installed is {trl.__version__}")
    tokenizer = tokenizer_of(library_of(recorded["tokenizer"]))
    assert {name: by_trl(*case, tokenizer) for name, case in cases().items()} == recorded["cases"]


def main() -> None:
    import trl

    from tests.moe.data import test_chat

    library = test_chat.library.__wrapped__()  # type: ignore[attr-defined]
    found = {name: by_trl(*case, tokenizer_of(library)) for name, case in cases().items()}
    RECORD.write_text(json.dumps({"trl": trl.__version__, "tokenizer": library.to_str(), "cases": found}) + "\n")


if __name__ == "__main__":
    main()
