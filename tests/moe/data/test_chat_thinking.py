"""Chats whose template changes earlier answers when later messages follow, as Qwen3's drops their thinking: each sample is what the model
reads and writes at inference.

References: transformers' apply_chat_template renders and encodes the messages before each answer, and those with it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe.data import open_data
from moe.data.chats import Chats, sequences_of
from moe.data.order import TrainSet
from moe.data.tokenizer import Bytes
from moe.recipe.load import build_run
from moe.recipe.shapes import PADDING
from parallel.errors import BadInput
from tests.moe.data.test_chat import given, library, read, sample
from tests.support import trained

assert library  # the fixture
# written for these tests: thinking stays in the answers after the last question; the last answer always has it, be it empty
THINKS = (
    "{%- if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{%- set ns = namespace(asked=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{%- for m in messages %}{% set content = m.content or '' %}{% set thought = m.reasoning_content or '' %}"
    "{%- if '</think>' in content %}{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{- '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{G}"
    "{%- if loop.index0 > ns.asked and (loop.last or thought) %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}"
    "{{- content }}{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + '</call>' }}{% endfor %}{{ '<|im_end|>' }}{/G}"
    "{%- else %}{{ content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN = THINKS.replace("{G}", "").replace("{/G}", "")
CALL = [{"type": "function", "function": {"name": "sum", "arguments": {"a": 3}}}]
TOOLS = [{"type": "function", "function": {"name": "sum", "description": "adds"}}]
SYSTEM, FIRST, SECOND, THIRD = (
    {"role": role, "content": content}
    for role, content in (("system", "Be brief."), ("user", "3 + 4?"), ("user", "And 10 - 8?"), ("user", "Naïve ☃?"))
)
SEVEN = {"role": "assistant", "content": "<think>\nfour more\n</think>\n\nSeven."}
TWO = {"role": "assistant", "content": "Two.", "reasoning_content": "ten less eight"}
YES = {"role": "assistant", "content": "Yes, naïve."}
CALLS = {"role": "assistant", "tool_calls": CALL}
RESULT = {"role": "tool", "content": "7"}
CHAT = [SYSTEM, FIRST, SEVEN, SECOND, TWO, THIRD, YES]
# a row, and the answers' numbers in each sample that it gives
ROWS: dict[str, tuple[dict[str, Any], list[list[int]]]] = {
    "turns": ({"messages": CHAT}, [[2], [4], [6]]),
    "one answer": ({"messages": CHAT[:3]}, [[2]]),
    "a question last": ({"messages": CHAT[:6]}, [[2], [4]]),
    "weight 0": ({"messages": [*CHAT[:2], SEVEN | {"weight": 0}, *CHAT[3:]]}, [[4], [6]]),
    "the last alone": ({"prompt": CHAT[:6], "completion": CHAT[6:]}, [[6]]),
    "a completion of two": ({"prompt": CHAT[:4], "completion": CHAT[4:]}, [[4], [6]]),
    "a call with thinking": ({"messages": [FIRST, CALLS | {"reasoning_content": "use it"}, RESULT, TWO], "tools": TOOLS}, [[1, 3]]),
    "a call without": ({"messages": [FIRST, CALLS, RESULT, TWO], "tools": TOOLS}, [[1], [3]]),
    "calls in turns": (
        {"messages": [FIRST, TWO | CALLS, RESULT, SEVEN, SECOND, TWO | CALLS, RESULT, RESULT, TWO], "tools": TOOLS},
        [[1, 3], [5, 8]],
    ),
}


def write(folder: Path, rows: list[dict[str, Any]]) -> str:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "rows.jsonl")


def bytes_with(template: str) -> Any:
    made = Bytes()
    made.chat = {"template": template}
    return made


@pytest.mark.parametrize("name", ROWS)
def test_samples_are_what_the_model_reads_and_writes_at_inference(name: str, library: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install moe-parallel[hf]")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=library)
    row, numbers = ROWS[name]
    messages = row.get("messages") or [*row["prompt"], *row["completion"]]

    def encoded(count: int, *, prompt: bool) -> list[int]:
        options = {"chat_template": PLAIN, "tools": row.get("tools"), "add_generation_prompt": prompt}
        return list(theirs.apply_chat_template(messages[:count], tokenize=True, return_dict=False, **options))

    want = []
    for answers in numbers:
        ids = encoded(answers[-1] + 1, prompt=False)
        labels = [PADDING] * len(ids)
        for number in answers:
            read_first, end = encoded(number, prompt=True), encoded(number + 1, prompt=False)
            assert ids[: len(read_first)] == read_first and ids[: len(end)] == end
            labels[len(read_first) : len(end)] = ids[len(read_first) : len(end)]
        want.append((ids, labels))
    chats = read(write(tmp_path, [row]), given(library, {"template": PLAIN}), max_length=1000, log=lambda line: None)
    assert [tuple(part.tolist() for part in sample(chats, n)) for n in range(len(chats))] == want
    assert chats.encoded.chats.tolist() == [0, len(want)]


def test_chats_that_no_template_changes_are_one_sample(tmp_path: Path) -> None:
    """With generation tags, a chat is its text as a whole; without, if later messages change nothing. The run's key is a hash of these
    samples alone, as it was before chats could be several samples."""
    tagged = THINKS.replace("{G}", "{% generation %}").replace("{/G}", "{% endgeneration %}")
    simple = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    path = write(tmp_path, [{"messages": CHAT}, {"messages": CHAT[:4]}])
    for template, text in ((tagged, "Seven.<|im_end|>Two.<|im_end|><think>\n\n</think>\n\nYes, naïve.<|im_end|>\0"), (simple, None)):
        said: list[str] = []
        chats = read(path, bytes_with(template), max_length=1000, log=said.append)
        assert len(chats) == 2 and len(said) == 2 and said[1].startswith(f"data: {path}: 2 chats, ")
        labels = sample(chats, 0)[1]
        assert text is None or Bytes().decode(labels[labels != PADDING]) == text
        encoded = chats.encoded
        stored = b"".join(part.tobytes() for part in (encoded.starts, encoded.ids_N, encoded.predicted_N))
        assert chats.key == hashlib.sha256(b"chats 1000" + stored).hexdigest()[:24]


def test_one_line_says_how_many_samples_and_what_they_cost(tmp_path: Path) -> None:
    """At each start, also when the chats come from the cache."""
    path = write(tmp_path, [{"messages": CHAT}, {"messages": CHAT[:3]}, {"messages": CHAT[:5]}])
    for _ in range(2):
        said: list[str] = []
        chats = read(path, bytes_with(PLAIN), max_length=1000, log=said.append)
        sizes = np.diff(chats.encoded.starts).tolist()
        assert chats.encoded.chats.tolist() == [0, 3, 4, 6]
        several = [sizes[:3], sizes[4:]]
        tokens, longest = sum(map(sum, several)), sum(map(max, several))
        assert said[-2].startswith(f"data: {path}: 6 samples of 3 chats, {sum(sizes):,} tokens, ")
        assert said[-1] == (
            f"data: {path}: the chat template changes answers when later messages follow: 2 chats became 5 samples ({tokens:,} tokens, "
            f"{tokens / longest:.1f} times those of each chat's longest sample), each up to an answer as the model writes it"
        )


def test_a_sample_that_is_too_long_is_cut_or_left_out_alone(tmp_path: Path) -> None:
    path, lengths = write(tmp_path, [{"messages": CHAT}]), []
    whole = read(path, bytes_with(PLAIN), max_length=1000, log=lambda line: None)
    lengths = np.diff(whole.encoded.starts).tolist()
    for room, kept, about in (
        (lengths[2] - 1, [lengths[0], lengths[1], lengths[2] - 1], ", 1 sample cut to model.max_length; the longest sample"),
        (lengths[1], lengths[:2], ", 1 sample cut to model.max_length, 1 sample left out without a predicted token; the longest sample"),
    ):
        said: list[str] = []
        chats = read(path, bytes_with(PLAIN), max_length=room - 1, log=said.append)
        assert np.diff(chats.encoded.starts).tolist() == kept and about in said[-2]
        assert f"1 chat became {len(kept)} samples ({sum(kept)} tokens" in said[-1]
        for number, length in enumerate(kept):
            assert sample(chats, number)[0].tolist() == sample(whole, number)[0][:length].tolist()
    first = int((sample(whole, 0)[1] != PADDING).argmax())
    with pytest.raises(BadInput, match=f"^model.max_length: got 5, which cuts .* needed at least {first}; "):
        read(path, bytes_with(PLAIN), max_length=5, log=lambda line: None)


def test_a_pair_has_one_predicted_answer(tmp_path: Path) -> None:
    other = [TWO | {"content": "Three."}]
    row = {"prompt": CHAT[:4], "chosen": [TWO], "rejected": other}
    rows = [{"prompt": CHAT[:4], "completion": answer} for answer in ([TWO], other)]
    found: list[Chats] = []
    for count, some in ((401, [row]), (200, rows)):
        found.append(read(write(tmp_path, some), bytes_with(PLAIN), max_length=count, log=lambda line: None))
    assert found[0].encoded.pairs and [sample(found[0], n)[1].tolist() for n in (0, 1)] == [sample(found[1], n)[1].tolist() for n in (0, 1)]
    for chosen, weight in (([TWO, THIRD, YES], 1), ([TWO | {"weight": 0}, THIRD, YES], 0)):
        path = write(tmp_path, [row | {"chosen": chosen}])
        if weight:
            with pytest.raises(
                BadInput, match="line 1: got a pair with 2 assistant's messages, of which the chat template changes earlier"
            ):
                read(path, bytes_with(PLAIN), max_length=800, log=lambda line: None)
        else:
            assert len(read(path, bytes_with(PLAIN), max_length=800, log=lambda line: None)) == 2


def chats_of(counts: list[int]) -> list[dict[str, Any]]:
    """Return a chat with each of these numbers of answers. Each message spells the chat's number."""
    asked, said = {"role": "user"}, {"role": "assistant", "reasoning_content": "so"}
    turns = [
        [message | {"content": f"#{number};"} for _ in range(count) for message in (asked, said)] for number, count in enumerate(counts)
    ]
    return [{"messages": messages} for messages in turns]


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("share", [0.01, 0.3, 0.99])
def test_samples_of_one_chat_are_on_one_side_of_the_held_out_split(share: float, packing: bool, tmp_path: Path) -> None:
    counts = [1, 4, 2, 5, 1, 1, 3, 6, 2, 4]
    chats = read(write(tmp_path, chats_of(counts)), bytes_with(PLAIN), max_length=600, log=lambda line: None)
    train, held = sequences_of(chats, max_length=600, validation_share=share, packing=packing)
    texts = [Bytes().decode(sample(chats, n)[0]) for n in range(len(chats))]
    sides = [{int(texts[n].split("#")[1].split(";")[0]) for n in side.members} for side in (train, held)]
    last = max(1, min(9, round(10 * share)))
    assert sides == [set(range(10 - last)), set(range(10 - last, 10))]
    assert sorted([*train.members, *held.members]) == list(range(sum(counts)))
    assert packing or train.num_windows == sum(counts[: 10 - last])


def test_sources_have_samples_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(PLAIN)
    sources = []
    for name, count in (("a", 3), ("b", 1)):
        (tmp_path / name).mkdir()
        sources.append({"path": write(tmp_path / name, chats_of([count] * 10)), "weight": 1})
    values = {"source": "chat", "sources": sources, "chat_template": str(tmp_path / "t.jinja"), "validation_share": 0.2}
    said: list[str] = []
    sizes = {"max_length": 300, "vocab_size": 256, "seed": 1}
    mixed = open_data(build_run({"data": values}).data, **sizes, cache=tmp_path, log=said.append)
    assert [part.num_windows for part in mixed.train.parts] == [24, 8]  # type: ignore[union-attr]
    assert [part.windows.num_windows for part in mixed.validation.parts] == [6, 2]  # type: ignore[union-attr]
    assert sum("10 chats became 30 samples" in line for line in said) == 1


def test_a_run_trains_on_the_samples_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch is all samples of the training chats. A run in two parts has the losses of one in one part, bit for bit."""
    home = trained.home(tmp_path, monkeypatch)
    (home / "t.jinja").write_text(PLAIN)
    path = write(home, chats_of([1, 4, 2, 3, 5, 1, 2, 2]))
    data = {"source": "chat", "path": path, "chat_template": str(home / "t.jinja"), "packing": False, "validation_share": 0.25}
    values: dict[str, dict[str, Any]] = {"data": data, "model": {"max_length": 400}}
    run = trained.recipe(home, **values, train={"epochs": 1, "global_batch": 4, "save_every": 2})
    (summary,) = trained.train(run, tmp_path / "whole")
    opened = open_data(run.data, max_length=400, vocab_size=run.vocab_size, seed=run.train.seed)
    assert isinstance(opened.train, TrainSet) and opened.train.num_windows == 16 and summary["steps"] == 4
    stopped = trained.recipe(home, **values, train={"steps": 2, "global_batch": 4, "save_every": 2})
    trained.train(stopped, tmp_path / "run")
    trained.train(run, tmp_path / "run")
    assert trained.losses(tmp_path / "run") == trained.losses(tmp_path / "whole") and len(trained.losses(tmp_path / "run")) == 4
    sequences = opened.train.sequences(np.arange(16))[:, :-1]
    assert sum(line["tokens"] for line in trained.lines(tmp_path / "whole")) == (sequences != PADDING).sum()


def test_the_key_tells_which_samples_are_of_one_chat(tmp_path: Path) -> None:
    """A resumed run finds by the key that its text has changed. The same samples as chats of their own are held out otherwise."""
    messages = CHAT[1:]
    parts = [{"prompt": messages[:number], "completion": messages[number : number + 1]} for number in (1, 3, 5)]
    one, several = (read(write(tmp_path, rows), bytes_with(PLAIN), max_length=600) for rows in ([{"messages": messages}], parts))
    assert one.encoded.ids_N.tolist() == several.encoded.ids_N.tolist() and one.encoded.starts.tolist() == several.encoded.starts.tolist()
    assert one.key != several.key
