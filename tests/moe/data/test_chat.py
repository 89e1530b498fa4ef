"""Chats: text and ids are those of transformers' apply_chat_template, only the assistant's are predicted, other forms are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe.data import open_data
from moe.data.chat import read_chats
from moe.data.chat_template import ChatTemplate
from moe.data.tokenizer import Bytes, Given
from moe.recipe.load import build_run
from moe.recipe.shapes import PADDING
from parallel.errors import BadInput

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
# templates of ten published forms of chats, written for these tests; {G} and {/G}: where {% generation %} may begin and end
TEMPLATES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{G}{{ m.content }}<|im_end|>{/G}{% else %}"
    "{{ m.content }}<|im_end|>{% endif %}\n\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "llama2": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %}{G} {{ m.content }} {{ eos_token }}{/G}"
    "{% else %}<<SYS>>{{ m.content }}<</SYS>>{% endif %}{% endfor %}",
    "llama3": "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}<|end|>\n\n{% if m.role == 'assistant' %}{G}"
    "{{ m.content | trim }}<|eot|>{/G}{% else %}{{ m.content | trim }}<|eot|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}",
    "gemma": "{{ bos_token }}{% for m in messages %}<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% if m.role == 'assistant' %}{G}{{ m.content | trim }}<end>\n{/G}{% else %}{{ m.content | trim }}<end>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<turn>model\n{% endif %}",
    "zephyr": "{%- for m in messages %}<|{{ m['role'] }}|>\n{% if m['role'] == 'assistant' %}{G}{{ m['content'] + eos_token }}{/G}"
    "{% else %}{{ m['content'] + eos_token }}{% endif %}\n{%- endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "phi": "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>\n{G}{{ m.content }}<|end|>{/G}\n{% else %}<|{{ m.role }}|>\n"
    "{{ m.content }}<|end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% else %}{% endif %}",
    "deepseek": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}User: {{ m.content }}\n\n{% elif m.role == 'assistant' %}"
    "Assistant:{G} {{ m.content }}{{ eos_token }}{/G}{% else %}{{ m.content }}\n\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}",
    "mistral": "{%- set ns = namespace(first=true) %}{{- bos_token }}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{{- '[INST]' + m.content + '[/INST]' }}{%- elif m.role == 'assistant' %}{G}{{- m.content | trim + eos_token }}{/G}"
    "{%- elif not loop.first %}{{- raise_exception('a system message comes first') }}{%- else %}{{- m.content + '\n' }}{%- endif %}"
    "{%- endfor %}",
    "tools": "{% if tools %}# Tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}{% for m in messages %}"
    "[{{ m.role }}]{% if m.role == 'assistant' %}{G}{% if m.tool_calls %}{% for c in m.tool_calls %}<call>{{ c.function.name }} "
    "{{ c.function.arguments | tojson(indent=1) }}</call>{% endfor %}{% else %}{{ m.content }}{% endif %}[/]{/G}{% else %}"
    "{{ m.content }}[/]{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "harmony": "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}{G}<|channel|>{{ m.channel | default('final') }}"
    "<|message|>{{ m.content }}<|return|>{/G}{% else %}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
}
CALL = {"type": "function", "function": {"name": "sum", "arguments": {"a": 3, "text": "<ü&>"}}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": " What is 3 + 4? "},
    {"role": "assistant", "content": "Seven, naïvely ☃."},
    {"role": "user", "content": "And 10 - 8?"},
    {"role": "assistant", "content": "Two. "},
]
TOOLS = [{"type": "function", "function": {"name": "sum", "description": "adds <two> numbers"}}]


def marked(name: str) -> str:
    return TEMPLATES[name].replace("{G}", "{% generation %}").replace("{/G}", "{% endgeneration %}")


def unmarked(name: str) -> str:
    return TEMPLATES[name].replace("{G}", "").replace("{/G}", "")


def messages_of(name: str) -> tuple[list[dict[str, Any]], Any]:
    if name != "tools":
        return MESSAGES, None
    return [*MESSAGES[:2], {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "7"}, *MESSAGES[2:]], TOOLS


@pytest.fixture(scope="module")
def library() -> Any:
    """A byte-level BPE of the library with a few merges over these texts, so that tokens have several characters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=["</s>", "<s>", "<|im_end|>"])
    made.train_from_iterator([*TEMPLATES.values(), json.dumps(MESSAGES)], trainer)
    return made


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_and_the_assistants_tokens_are_those_of_transformers(name: str, library: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install moe-parallel[hf]")
    messages, tools = messages_of(name)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=library, **TOKENS)
    want = theirs.apply_chat_template(
        messages, tools=tools, chat_template=marked(name), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    chat = {"template": marked(name), "tokens": TOKENS}
    tokenizer = Given(json.loads(library.to_str()), 0, chat)
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": messages} | ({"tools": tools} if tools else {})) + "\n")
    said: list[str] = []
    sample = read_chats(str(tmp_path / "a.jsonl"), tokenizer, None, max_length=1000, log=said.append)[0]
    assert sample["input_ids"].tolist() == want["input_ids"]
    mask = [int(label != PADDING) for label in sample["labels"]]
    assert mask == want["assistant_masks"] and 0 < sum(mask) < len(mask)
    assert said[0].endswith(f": 1 chat, {len(mask)} tokens, {sum(mask)} of them predicted")
    prompt = theirs.apply_chat_template(messages[:2], chat_template=unmarked(name), tokenize=False, add_generation_prompt=True)
    assert ChatTemplate(unmarked(name), tuple(TOKENS.items())).render(messages[:2], prompt=True) == prompt


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name not in ("chatml", "phi", "zephyr")])
def test_without_generation_tags_the_predicted_text_is_what_follows_the_prompt(name: str) -> None:
    """For templates that end a message with its assistant's text, the parts are the marked ones."""
    messages, tools = messages_of(name)
    by_tags = ChatTemplate(marked(name), tuple(TOKENS.items())).marked(messages, tools=tools)
    assert ChatTemplate(unmarked(name), tuple(TOKENS.items())).marked(messages, tools=tools) == by_tags
    assert len(by_tags[1]) == sum(message["role"] == "assistant" for message in messages)


def samples(tmp_path: Path, *rows: Any, template: str | None = "chatml", max_length: int = 200, log: Any = print) -> list[tuple[str, str]]:
    """Return (text, predicted text) of each sample of these rows, read as bytes."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = None
    if template is not None:
        file = str(tmp_path / "t.jinja")
        Path(file).write_text(marked(template))
    found = read_chats(str(tmp_path / "rows.jsonl"), Bytes(), file, max_length=max_length, log=log)
    shown = [(sample["input_ids"], sample["labels"]) for sample in (found[i] for i in range(len(found)))]
    return [(Bytes().decode(ids), Bytes().decode(labels[labels != PADDING])) for ids, labels in shown]


def test_every_form_of_a_chat(tmp_path: Path) -> None:
    user, assistant = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello é"}
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello é<|im_end|>\n"
    share = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello é"}]
    rows = [{"messages": [user, assistant]}, {"conversations": share}, {"prompt": [user], "completion": [assistant]}]
    assert samples(tmp_path, *rows) == [(text, "Hello é<|im_end|>")] * 3
    assert samples(tmp_path, {"prompt": "1 + 1 =", "completion": " 2"}, template=None) == [("1 + 1 = 2\0", " 2\0")]
    # what the assistant said in the prompt of a completion is not predicted
    assert [shown for _, shown in samples(tmp_path, {"prompt": [user, assistant, user], "completion": [assistant]})] == [
        "Hello é<|im_end|>"
    ]


def test_long_chats_are_cut_and_chats_without_a_predicted_token_left_out(tmp_path: Path) -> None:
    user, said = {"role": "user", "content": "Hi" * 40}, list[str]()
    short, long = {"role": "assistant", "content": "yes"}, {"role": "assistant", "content": "y" * 90}
    found = samples(tmp_path, {"messages": [user, long]}, {"messages": [user]}, {"messages": [short]}, max_length=150, log=said.append)
    assert [len(text) for text, _ in found] == [151, 36] and set(found[0][1]) == {"y"}
    assert "2 chats, 187 tokens" in said[0] and "1 chat cut to model.max_length, 1 chat left out without a predicted token" in said[0]


@pytest.mark.parametrize(
    ("line", "template", "said"),
    [
        ("{", "chatml", "rows.jsonl, line 2: got no JSON"),
        ("[1]", "chatml", "line 2: got a list, needed one object"),
        ('{"text": "a"}', "chatml", "line 2: got an object with text, needed messages, or prompt and completion, or conversations"),
        ('{"messages": "a"}', "chatml", "line 2: got no list of messages"),
        ('{"messages": [{"content": "a"}]}', "chatml", "line 2: got a message with content, needed role and content"),
        (
            '{"prompt": "a", "completion": ["b"]}',
            "chatml",
            "line 2: got no list of messages, needed a list of objects with role and content",
        ),
        ('{"messages": [{"role": "user", "content": "a"}]}', None, "data.chat_template: got null, needed a template"),
        ('{"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "a"}]}', "mistral", "a system message comes first"),
    ],
)
def test_another_form_is_one_line_that_names_its_line(line: str, template: str | None, said: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' + line + "\n")
    file = None if template is None else str(tmp_path / "t.jinja")
    if template is not None:
        (tmp_path / "t.jinja").write_text(marked(template))
    with pytest.raises(BadInput) as bad:
        read_chats(str(tmp_path / "rows.jsonl"), Bytes(), file, max_length=99, log=print)
    assert said in str(bad.value) and "\n" not in str(bad.value)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{% for m in messages %}{{ m.content }}", "chat template: got line 1: "),
        ("{{ messages.append(1) }}x", "got SecurityError"),
        ("{{ ''.__class__.__mro__ }}", "got SecurityError"),
        (
            "{% for m in messages %}{{ loop.length }}{{ m.content }}{% endfor %}",
            "a template that writes message 2 otherwise if others follow",
        ),
    ],
)
def test_a_template_that_cannot_be_used_is_one_line(source: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        ChatTemplate(source).marked(MESSAGES)


def test_a_recipe_opens_chats_with_the_models_own_template(library: Any, tmp_path: Path) -> None:
    """data.source chat: the tokenizer's description holds the template; a twentieth of the chats is held out; a row is padded."""
    rows = [{"messages": [MESSAGES[1] | {"content": f"{n}?"}, MESSAGES[2] | {"content": f"{n}!"}]} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = Given(json.loads(library.to_str()), 0, {"template": marked("llama3"), "tokens": TOKENS})
    data = build_run({"data": {"source": "chat", "path": str(tmp_path / "rows.jsonl")}}).data
    opened = open_data(data, max_length=99, vocab_size=400, seed=3, tokenizer=tokenizer.describe(), log=lambda line: None)
    assert opened.tokenizer.describe() == tokenizer.describe() and opened.validation.windows.num_windows == 2
    row = opened.validation.windows.read(np.array([1]))[0]
    assert len(row) == 100 and row[-1] == PADDING
    predicted = row[row >= 0]
    assert tokenizer.decode(predicted) == "39!<|eot|>"
    other = open_data(data, max_length=98, vocab_size=400, seed=3, tokenizer=tokenizer.describe(), log=lambda line: None)
    assert other.key != opened.key


def test_a_converted_model_brings_its_template(library: Any, tmp_path: Path) -> None:
    """From tokenizer_config.json, as a text or as the default of several, or from chat_template.jinja, which counts more."""
    from moe.convert.huggingface.tokenizer import read_tokenizer

    library.save(str(tmp_path / "tokenizer.json"))
    about = TOKENS | {"bos_token": {"content": "<s>"}, "pad_token": None, "chat_template": [{"name": "default", "template": "one"}]}
    run = build_run({"model": {"vocab_size": 400}})

    def described() -> Any:
        return read_tokenizer(tmp_path, {"eos_token_id": 0}, run)[0].get("chat")

    assert described() is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    assert described() == {"template": "one", "tokens": TOKENS}
    (tmp_path / "chat_template.jinja").write_text("two")
    assert described() == {"template": "two", "tokens": TOKENS}
