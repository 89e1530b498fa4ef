"""Chats: text and ids are those of transformers' apply_chat_template, only the assistant's are predicted, other forms are refused."""

from __future__ import annotations

import gzip
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe.convert.huggingface.tokenizer import read_tokenizer, write_tokenizer
from moe.data import open_data, sandbox
from moe.data.chat import ChatFiles, InChats, template_of, with_template
from moe.data.chat_template import ChatTemplate
from moe.data.chats import Chats, open_chats
from moe.data.tokenizer import Bytes, Given, load
from moe.recipe.load import build_run
from moe.recipe.shapes import PADDING
from moe.train.use.generate import _until_separators
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


def answered(template: ChatTemplate, messages: list[dict[str, Any]], tools: Any = None) -> list[tuple[str, list[tuple[int, int]]]]:
    numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    return template.answered(messages, numbers, tools=tools)


def given(library: Any, chat: dict[str, Any], separator: int = 0) -> Given:
    made = Given(json.loads(library.to_str()), separator)
    made.chat = chat
    return made


def messages_of(name: str) -> tuple[list[dict[str, Any]], Any]:
    if name != "tools":
        return MESSAGES, None
    return [*MESSAGES[:2], {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "7"}, *MESSAGES[2:]], TOOLS


def read(path: str, tokenizer: Any, *, max_length: int, log: Any = print, field: str | None = None) -> Chats:
    return open_chats(ChatFiles(path, field), tokenizer, max_length=max_length, cache=Path(path).parent / "cache", log=log)


def sample(chats: Chats, number: int) -> tuple[Any, Any]:
    """Return a chat's ids, and its labels: PADDING for an id that is not predicted."""
    marks = chats.ids(number)
    return np.where(marks < 0, -101 - marks, marks), np.where(marks < 0, PADDING, marks)


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
    tokenizer = given(library, chat)
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": messages} | ({"tools": tools} if tools else {})) + "\n")
    said: list[str] = []
    ids, labels = sample(read(str(tmp_path / "a.jsonl"), tokenizer, max_length=1000, log=said.append), 0)
    assert ids.tolist() == want["input_ids"]
    mask = [int(label != PADDING) for label in labels]
    assert mask == want["assistant_masks"] and 0 < sum(mask) < len(mask)
    assert said[1].endswith(f": 1 chat, {len(mask)} tokens, {sum(mask)} of them predicted; the longest chat has {len(mask)} tokens")
    prompt = theirs.apply_chat_template(messages[:2], chat_template=unmarked(name), tokenize=False, add_generation_prompt=True)
    assert ChatTemplate(unmarked(name), tuple(TOKENS.items())).render(messages[:2], prompt=True) == prompt


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name not in ("chatml", "phi", "zephyr")])
def test_without_generation_tags_the_predicted_text_is_what_follows_the_prompt(name: str) -> None:
    """For templates that end a message with its assistant's text, the parts are the marked ones."""
    messages, tools = messages_of(name)
    by_tags = ChatTemplate(marked(name), tuple(TOKENS.items())).marked(messages, tools=tools)
    assert answered(ChatTemplate(unmarked(name), tuple(TOKENS.items())), messages, tools) == [by_tags]
    assert len(by_tags[1]) == sum(message["role"] == "assistant" for message in messages)


def samples(tmp_path: Path, *rows: Any, template: str | None = "chatml", max_length: int = 200, log: Any = print) -> list[tuple[str, str]]:
    """Return (text, predicted text) of each sample of these rows, read as bytes."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = None
    if template is not None:
        file = str(tmp_path / "t.jinja")
        Path(file).write_text(marked(template))
    found = read(str(tmp_path / "rows.jsonl"), with_template(Bytes(), file), max_length=max_length, log=log)
    shown = [sample(found, i) for i in range(len(found))]
    return [(Bytes().decode(ids), Bytes().decode(labels[labels != PADDING])) for ids, labels in shown]


def test_every_form_of_a_chat(tmp_path: Path) -> None:
    user, assistant = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello é"}
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello é<|im_end|>\0"  # ends with the separator of bytes
    share = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello é"}]
    rows = [{"messages": [user, assistant]}, {"conversations": share}, {"prompt": [user], "completion": [assistant]}]
    assert samples(tmp_path, *rows) == [(text, "Hello é<|im_end|>\0")] * 3
    assert samples(tmp_path, {"prompt": "1 + 1 =", "completion": " 2"}, template=None) == [("1 + 1 = 2\0", " 2\0")]
    # what the assistant said in the prompt of a completion is not predicted
    assert [shown for _, shown in samples(tmp_path, {"prompt": [user, assistant, user], "completion": [assistant]})] == [
        "Hello é<|im_end|>\0"
    ]


@pytest.mark.parametrize("prompt", [{"prompt": MESSAGES[:4]}, {}, {"prompt": MESSAGES[3]["content"]}])
def test_pairs_of_messages_are_two_chats_with_one_prompt(prompt: dict[str, Any], tmp_path: Path) -> None:
    """The prompt may also be missing, or be the last question as a text: then both answers repeat its messages."""
    answers = ([{"role": "assistant", "content": "Two."}], [{"role": "assistant", "content": "Three."}])
    chats = [{"prompt": MESSAGES[:4], "completion": answer} for answer in answers]
    first = [] if isinstance(prompt.get("prompt"), list) else MESSAGES[:4]
    pair = prompt | {"chosen": [*first, *answers[0]], "rejected": [*first, *answers[1]]}
    assert samples(tmp_path, pair, max_length=801) == samples(tmp_path, *chats, max_length=400)


def test_content_parts_are_joined_and_an_answer_of_weight_0_is_not_predicted(tmp_path: Path) -> None:
    """OpenAI's files: a content as parts equals the joined text, and only answers of weight 1 are predicted."""
    user, parts = {"role": "user", "content": "Hi"}, [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    first, second = {"role": "assistant", "content": "No"}, {"role": "assistant", "content": "Hello"}
    whole = {"messages": [user, first, user, second]}
    ((text, both),) = samples(tmp_path, whole)
    assert samples(tmp_path, {"messages": [user, first, user, second | {"content": parts}]}) == [(text, both)]
    assert samples(tmp_path, {"messages": [user, first | {"weight": 1}, user, second | {"weight": 1}]}) == [(text, both)]
    assert samples(tmp_path, {"messages": [user, first | {"weight": 0}, user, second]}) == [(text, both.removeprefix("No<|im_end|>"))]
    with pytest.raises(BadInput, match="no chat that has a predicted token"):
        samples(tmp_path, {"messages": [user, first | {"weight": 0}]})


def test_long_chats_are_cut_and_chats_without_a_predicted_token_left_out(tmp_path: Path) -> None:
    user, said = {"role": "user", "content": "Hi" * 40}, list[str]()
    short, long = {"role": "assistant", "content": "yes"}, {"role": "assistant", "content": "y" * 90}
    found = samples(tmp_path, {"messages": [user, long]}, {"messages": [user]}, {"messages": [short]}, max_length=150, log=said.append)
    assert [len(text) for text, _ in found] == [151, 36] and set(found[0][1]) == {"y"}
    assert "2 chats, 187 tokens" in said[1] and "1 chat cut to model.max_length, 1 chat left out without a predicted token" in said[1]


@pytest.mark.parametrize("pair", [False, True])
def test_a_length_that_cuts_every_answer_is_named_with_the_least_that_does_not(pair: bool, tmp_path: Path) -> None:
    user, answer = {"role": "user", "content": "Hi" * 40}, [{"role": "assistant", "content": "yes"}]
    chat = {"prompt": [user], "chosen": answer, "rejected": answer} if pair else {"messages": [user, *answer]}
    with pytest.raises(BadInput, match="^model.max_length: got 20, which cuts each chat of .* before its answer") as refused:
        samples(tmp_path, chat, max_length=20)
    least = int(re.search(r"at least (\d+)", str(refused.value))[1])  # type: ignore[index]
    assert samples(tmp_path, chat, max_length=least)
    with pytest.raises(BadInput, match=f"at least {least}"):
        samples(tmp_path, chat, max_length=least - 1)


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
        ('{"messages": null, "prompt": null}', "chatml", "line 2: got an object with nothing"),
        ('{"messages": [{"role": "user"}]}', "chatml", "line 2: got a message of user whose content is missing, needed a text"),
        ('{"messages": [{"role": "user", "content": 3, "tool_calls": [{}]}]}', "chatml", "whose content has the type int, needed a text"),
        ('{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "chatml", "whose content has the type list, needed a text"),
        ('{"messages": [{"role": "user", "content": "a", "weight": 0.5}]}', "chatml", "got a message of weight 0.5, needed weight 1, or 0"),
        (
            '{"messages": [{"role": "assistant", "content": "a", "loss": 0}]}',
            "chatml",
            "got a message with loss, needed weight 1, or 0",
        ),
        ('{"messages": [{"role": "user", "content": [{"image_url": "a"}]}]}', "chatml", "whose content has the type list, needed a text"),
        ('{"messages": [{"role": "user", "content": "a"}], "tools": {}}', "chatml", "got tools of another form, needed null or a list"),
        ('{"messages": [{"role": "user", "content": "a"}], "tools": ["a"]}', "chatml", "got tools of another form, needed null or a list"),
        ('{"conversations": [{"from": "bing", "value": "a"}]}', "chatml", "line 2: got from 'bing', needed one of human, gpt, "),
        ('{"conversations": [{"from": ["human"], "value": "a"}]}', "chatml", "line 2: got from ['human'], needed one of human, gpt, "),
        ('{"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "a"}]}', "mistral", "a system message comes first"),
    ],
)
def test_another_form_is_one_line_that_names_its_line(line: str, template: str | None, said: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' + line + "\n")
    file = None if template is None else str(tmp_path / "t.jinja")
    if template is not None:
        (tmp_path / "t.jinja").write_text(marked(template))
    with pytest.raises(BadInput) as bad:
        tokenizer = load({"kind": "bytes", "chat": {"tokens": TOKENS}})
        read(str(tmp_path / "rows.jsonl"), with_template(tokenizer, file), max_length=99, log=print)
    assert said in str(bad.value) and "\n" not in str(bad.value)


MEND, OTHER = "correct it, or give another data.chat_template", "give messages that the template takes, or another data.chat_template"
NO_TEXT = f"needed a template that turns the messages into text; fix: {OTHER}"


NESTED = "{%% set ns = namespace(a='ab') %%}{%% for i in range(60) %%}{%% set ns.a = (ns.a %s) %%}{%% endfor %%}"  # grows by doubling


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "\n{% for m %}",
            f"line 2: TemplateSyntaxError: expected token 'in', got 'end of statement block', needed a Jinja template; fix: {MEND}",
        ),
        ("{% set a = 1 %}{{ 1 if }}", None),
        ("{% break %}", None),
        ("{{ messages.append(1) }}x", None),
        ("{{ ''.__class__.__mro__ }}", None),
        ("{{ 1 // 0 }}", f"ZeroDivisionError: integer division or modulo by zero, {NO_TEXT}"),
        ("{{ 'a'.split('')[0] }}", f"ValueError: empty separator, {NO_TEXT}"),
        ("{{ [].pop() }}{{ '{0}'.format() }}", None),
        ("{{ 'é'.encode('other') }}", f"LookupError: unknown encoding: other, {NO_TEXT}"),
        ("{{ bos_token }}", f"TemplateError: bos_token is written, but the tokenizer has none, {NO_TEXT}"),
        ("{{ 'a' * 1000000000000 }}", f"more than 2 GiB of memory for one text, {NO_TEXT}"),
        (NESTED % "~ ns.a" + "{{ ns.a }}", f"more than 2 GiB of memory for one text, {NO_TEXT}"),
        (
            "{% for a in range(9999) %}{{ 'abcdefgh' * 9999 }}{% endfor %}",
            f"TemplateError: a text of more than 67108864 characters, {NO_TEXT}",
        ),
        (
            "{% for m in messages %}{{ loop.length }}{{ m.content }}{% endfor %}",
            "the template renders message 2 differently from its generation prompt, needed a template that marks the text to train on; "
            "fix: give a template with {% generation %} around the assistant's text: --data.chat_template FILE.jinja",
        ),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}:{% endif %}",
            "the template renders message 2 differently from its generation prompt, needed a template that marks the text to train on; "
            "fix: give a template with {% generation %} around the assistant's text: --data.chat_template FILE.jinja",
        ),
    ],
)
def test_a_template_that_cannot_be_used_is_one_line(source: str, said: str | None) -> None:
    """Also one that raises another Python error, or would work without end."""
    with pytest.raises(BadInput) as bad:
        answered(ChatTemplate(source), MESSAGES)
    text = str(bad.value)
    assert text.startswith("chat template: got ") and "\n" not in text
    assert text == f"chat template: got {said}" if said else "; fix: " in text


@pytest.mark.parametrize(
    "source",
    [
        "{% macro twice(n) %}{{ twice(n - 1) ~ twice(n - 1) if n }}{% endmacro %}{{ twice(99) }}",
        NESTED % ", ns.a" + "{% set b = ns.a %}" + NESTED % ", ns.a" + "{{ ns.a == b }}",
    ],
)
def test_a_template_without_end_is_one_line(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls, and one operation that Python cannot interrupt."""
    monkeypatch.setattr(sandbox, "CPU_SECONDS", 1)
    template = ChatTemplate(source)
    for _ in range(2):  # a later text is refused too
        with pytest.raises(BadInput, match="chat template: got more than 1 s of work for one text, needed a template that turns ") as bad:
            template.render(MESSAGES)
        assert "\n" not in str(bad.value)


def test_threads_get_their_own_texts() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    contents = [str(number) for number in range(200)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda content: template.render([{"role": "user", "content": content}]), contents)) == contents


def test_templates_compute_as_without_limits() -> None:
    """Loops keep their variables, and short products, absent tokens that are only tested, and dates are allowed."""
    source = (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}{{ loop.previtem.role if loop.index0 }}"
        "{% endfor %}{{ '-' * 3 }}{{ 2 ** 5 }}{% if bos_token is defined or bos_token %}!{% endif %}{{ bos_token | default('x') }}"
        "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}{{ strftime_now('%d %b %Y') }}"
    )
    assert ChatTemplate(source, date=datetime(2024, 2, 3)).render(MESSAGES[:2]) == "1/2,2/2system---32xa103 Feb 2024"


def test_the_separator_of_bytes_follows_the_last_answer(tmp_path: Path) -> None:
    """What follows an answer is not read, because no template can write this separator."""
    rows = [{"messages": MESSAGES}, {"messages": [*MESSAGES, MESSAGES[1]]}]
    first, second = samples(tmp_path, *rows, max_length=999)
    assert first == second and first[0].endswith("assistant\nTwo. <|im_end|>\0")
    assert first[1] == "Seven, naïvely ☃.<|im_end|>Two. <|im_end|>\0"


def test_the_prompt_of_a_completion_must_begin_the_text(tmp_path: Path) -> None:
    row = {"prompt": MESSAGES[:2], "completion": MESSAGES[2:3]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    source = "{{ messages | length }}{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    tokenizer = load({"kind": "bytes", "chat": {"template": source}})
    with pytest.raises(BadInput, match="line 1, chat template: got the template renders a prompt differently when its completion follows"):
        read(str(tmp_path / "rows.jsonl"), tokenizer, max_length=999, log=print)


def test_an_answer_without_a_question_does_not_predict_its_header() -> None:
    ((text, spans),) = answered(ChatTemplate(unmarked("llama3"), tuple(TOKENS.items())), MESSAGES[2:3])
    assert [text[start:end] for start, end in spans] == ["Seven, naïvely ☃.<|eot|>"]


def test_the_key_is_the_samples_and_the_date_is_the_files(tmp_path: Path) -> None:
    """A template that writes the date gives the same ids at any time, and others after the file has changed."""
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"messages": MESSAGES}))
    keys = []
    for source, time in (("{{ strftime_now('%Y') }}", 10**9), ("2001", 10**9), ("{{ strftime_now('%Y') }}", 0)):
        os.utime(file, (time, time))
        tokenizer = load({"kind": "bytes", "chat": {"template": source + marked("chatml")}})
        keys.append(read(str(file), tokenizer, max_length=999, log=lambda line: None).key)
    assert keys[0] == keys[1] != keys[2]


def test_chats_and_plain_texts_begin_as_in_generation(library: Any, tmp_path: Path) -> None:
    """With a tokenizer that begins texts with BOS: a chat has it only from its template, a plain text has it as from --prompt."""
    from tokenizers.processors import TemplateProcessing

    framed = type(library).from_str(library.to_str())
    framed.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", framed.token_to_id("<s>"))])
    tokenizer = given(framed, {"template": unmarked("chatml")})
    rows = [{"messages": MESSAGES[1:3]}, {"prompt": "1 + 1 =", "completion": " 2"}, {"prompt": "", "completion": "12"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chats = read(str(tmp_path / "rows.jsonl"), tokenizer, max_length=999, log=print)
    template = template_of(tokenizer)
    assert template is not None
    prompts = [InChats(tokenizer).beginning(template.render(MESSAGES[1:2], prompt=True)), *map(tokenizer.beginning, ("1 + 1 =", ""))]
    assert [ids[0] == framed.token_to_id("<s>") for ids in prompts] == [False, True, True]
    for number, prompt in enumerate(prompts):
        ids, labels = sample(chats, number)
        assert ids[: len(prompt)].tolist() == prompt and set(labels[: len(prompt)]) == {PADDING} and PADDING not in labels[len(prompt) :]


def test_a_chat_ends_at_every_end_of_the_model(library: Any) -> None:
    end = library.token_to_id("<|im_end|>")
    tokenizer = load(given(library, {"tokens": {"eos_token": "<|im_end|>"}, "ends": [0, 7]}).describe())
    assert InChats(tokenizer).ends == {0, 7, end} and tokenizer.ends == {0}
    steps = iter([[9], [end], [9]])
    assert _until_separators(steps, 1, InChats(tokenizer), None) == [([9], True)] and next(steps) == [9]


def test_a_file_of_a_template_stays_with_the_tokenizer(library: Any, tmp_path: Path) -> None:
    """Its text replaces the model's own templates, and tokens and ends stay; `moe convert RUN hf:PATH` writes it."""
    (tmp_path / "t.jinja").write_text("mine")
    before = given(library, {"template": "theirs", "tool_use": "tools", "tokens": TOKENS, "ends": [0, 1]})
    described = with_template(before, str(tmp_path / "t.jinja")).describe()
    assert load(described).chat == {"template": "mine", "tokens": TOKENS, "ends": [0, 1]}
    run = build_run({"model": {"vocab_size": 400}})
    for name in ("new", "came"):
        (tmp_path / name).mkdir()
    (tmp_path / "came/tokenizer_config.json").write_text('{"chat_template": "theirs"}')
    write_tokenizer(tmp_path / "new", described, came=False, run=run)
    write_tokenizer(tmp_path / "came", described, came=True, run=run)
    assert [(tmp_path / name / "chat_template.jinja").read_text() for name in ("new", "came")] == ["mine"] * 2


def test_a_new_model_cannot_have_a_bpe_of_chats(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    data = build_run({"data": {"source": "chat", "path": str(tmp_path / "rows.jsonl"), "tokenizer": "bpe"}}).data
    with pytest.raises(BadInput, match=r"data.tokenizer: got bpe with data.source=chat, needed bytes for a new model.*--init_from") as bad:
        open_data(data, max_length=9, vocab_size=4096, seed=3)
    assert "\n" not in str(bad.value)


def test_chats_with_tools_take_the_template_for_tools(tmp_path: Path) -> None:
    chat = {"template": marked("chatml"), "tool_use": "TOOLS" + marked("chatml")}
    rows = [{"messages": MESSAGES}, {"messages": MESSAGES, "tools": TOOLS}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chats = read(str(tmp_path / "rows.jsonl"), load({"kind": "bytes", "chat": chat}), max_length=999, log=print)
    plain, tools = (Bytes().decode(sample(chats, number)[0]) for number in range(2))
    assert tools == "TOOLS" + plain


def test_rows_of_tables_and_files_of_a_folder_are_the_chats_of_the_lines(tmp_path: Path) -> None:
    """Rows of Parquet and of Arrow have every field of every message, null where JSON has none; a folder's files follow by name."""
    arrow = pytest.importorskip("pyarrow", reason="pip install pyarrow")
    from pyarrow import ipc, parquet

    answers = ({"role": "assistant", "tool_calls": [CALL]}, {"role": "assistant", "content": "Sev\u00e9n"})
    rows: list[Any] = [
        {"messages": [MESSAGES[1], answer], "source": "x", "tools": TOOLS if n else None} for n, answer in enumerate(answers)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = arrow.Table.from_pylist([*rows, {"messages": None, "source": "x", "tools": None}]).slice(0, 2)
    (tmp_path / "folder/.cache").mkdir(parents=True)
    (tmp_path / "folder/.cache/b.jsonl").write_text("no chat")
    parquet.write_table(table, str(tmp_path / "folder/b.parquet"))
    with ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    tokenizer = load({"kind": "bytes", "chat": {"template": marked("tools"), "tokens": TOKENS}})
    said: list[str] = []

    def found(path: str) -> list[tuple[str, str]]:
        chats = read(str(tmp_path / path), tokenizer, max_length=999, log=said.append)
        parts = [sample(chats, i) for i in range(len(chats))]
        return [(Bytes().decode(ids), Bytes().decode(labels[labels != PADDING])) for ids, labels in parts]

    want = found("a.jsonl")
    assert len(want) == 2 and "<call>sum" in want[0][1] and want[1][1].startswith("Sev\u00e9n") and "adds <two>" in want[1][0]
    assert found("a.arrow") == want == found("folder/b.parquet") == found("folder")
    (tmp_path / "folder/a.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    assert found("folder") == [*want, *want] and any("(a.jsonl.gz, b.parquet), once" in line for line in said)
    (tmp_path / "folder/a.jsonl.gz").rename(tmp_path / "folder/test-0.jsonl.gz")
    parquet.write_table(table, str(tmp_path / "folder/train-0.parquet"))
    with pytest.raises(BadInput, match="files of test and train, needed files of one split; fix: set it to .*-0"):
        found("folder")
    parquet.write_table(arrow.table({"messages": ["a"]}), str(tmp_path / "b.parquet"))
    with pytest.raises(BadInput, match="b.parquet, row 1: got no list of messages"):
        found("b.parquet")


def test_a_recipe_opens_chats_with_the_models_own_template(library: Any, tmp_path: Path) -> None:
    """data.source chat: the tokenizer's description holds the template; a twentieth of the chats is held out; a row is padded."""
    rows = [{"messages": [MESSAGES[1] | {"content": f"{n}?"}, MESSAGES[2] | {"content": f"{n}!"}]} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = given(library, {"template": marked("llama3"), "tokens": TOKENS})
    data = build_run({"data": {"source": "chat", "path": str(tmp_path / "rows.jsonl")}}).data
    opened = open_data(data, max_length=99, vocab_size=400, seed=3, tokenizer=tokenizer.describe(), log=lambda line: None)
    assert opened.tokenizer.describe() == tokenizer.describe() and opened.validation.windows.num_windows == 2
    row = opened.validation.windows.read(np.array([1]))[0]
    assert len(row) == 100 and row[-1] == PADDING
    predicted = row[row >= 0]
    assert tokenizer.decode(predicted) == "39!<|eot|>"
    other = open_data(data, max_length=98, vocab_size=400, seed=3, tokenizer=tokenizer.describe(), log=lambda line: None)
    assert other.key != opened.key


def test_chats_that_are_read_as_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": MESSAGES}) + "\n")
    with pytest.raises(BadInput, match="line 1: got an object with messages, needed the key text; fix: set data.source to chat"):
        open_data(build_run({"data": {"path": str(tmp_path / "rows.jsonl")}}).data, max_length=9, vocab_size=256, seed=3, cache=tmp_path)


def test_a_converted_model_brings_its_template(library: Any, tmp_path: Path) -> None:
    """From tokenizer_config.json, as a text or as several, from chat_template.json, or from chat_template.jinja, which counts most. Special
    tokens and all ids that end texts come without a template too, and a file that cannot be decoded is left out."""
    library.save(str(tmp_path / "tokenizer.json"))
    about = TOKENS | {"bos_token": {"content": "<s>"}, "pad_token": None}
    templates = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}, {"name": "rag", "template": "three"}]
    run = build_run({"model": {"vocab_size": 400}})

    def described() -> Any:
        made, said = read_tokenizer(tmp_path, {"eos_token_id": 0}, run)
        assert made["kind"] == "given" and load(made).describe() == made
        return made.get("chat"), said

    assert described() == (None, [])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    assert described() == ({"tokens": TOKENS}, [])
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0, 9999]}')
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about | {"chat_template": templates}))
    rest = {"tool_use": "two", "tokens": TOKENS, "ends": [0, 2]}
    assert described() == ({"template": "one"} | rest, [])
    (tmp_path / "chat_template.json").write_text('{"chat_template": "four"}')
    assert described() == ({"template": "four"} | rest, [])
    (tmp_path / "chat_template.jinja").write_text("five")
    assert described() == ({"template": "five"} | rest, [])
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    chat, (line,) = described()
    assert chat == {"template": "four"} | rest and line.startswith("chat_template.jinja is not used ('utf-8' codec")
