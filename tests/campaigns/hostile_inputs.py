"""The inputs of tests/campaigns/hostile.py: the name of each, the files that it makes, and the command that gets it.

Each payload would create the file CANARY if it were executed. In a page, its markup must appear escaped.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CANARY = "executed"
MARKUP = "<script>alert|<img src=x"
HTML = "<script>alert(1)</script><img src=x onerror=alert(1)>"
CODES = "\x1b]0;taken\x07\x1b[2J\x9b31m\u202e"
SHELL = f"$(touch {CANARY});touch {CANARY};`touch {CANARY}`|touch {CANARY}"
GIB = 2**30


@dataclass(frozen=True)
class Input:
    """One input. `words`: the command's arguments. `make`: writes the input's files into a folder. `runs`: True if the command must
    succeed, False if it must refuse, None if both are harmless. `run`: the folder must have a trained run, `run`. `terminal`: output goes
    to a terminal. `times`: multiple of the usual time limit. `bytes`: limit of memory."""

    kind: str
    name: str
    words: tuple[str, ...]
    make: Callable[[Path], object]
    runs: bool | None = False
    run: bool = False
    terminal: bool = False
    times: float = 1.0
    bytes: int = GIB


class _Executes:
    """A pickle that runs a command when it is loaded."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {CANARY}",)


def inputs(*, full: bool = False) -> list[Input]:
    """Return all inputs. `full`: large files have their full size, otherwise a sixteenth of it."""
    part = 1 if full else 16
    return [*_recipes(part), *_words(), *_links(), *_texts(part), *_tables(), *_folders(part), *_huggingface(part), *_others(part)]


def _text(name: str, text: str | bytes) -> Callable[[Path], object]:
    """Return a function that writes the file `name` into a folder."""
    content = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text

    def make(place: Path) -> None:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content)

    return make


def _none(_: Path) -> None:
    return None


def _repeated(name: str, chunk: bytes, size: int, before: bytes = b"", after: bytes = b"") -> Callable[[Path], object]:
    """Return a function that writes a file of about `size` bytes into a folder: before, the chunk repeated, after."""

    def make(place: Path) -> None:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        with (place / name).open("wb") as file:
            file.write(before)
            for _ in range(max(1, size // (len(chunk) << 10))):
                file.write(chunk * (1 << 10))
            file.write(after)

    return make


def _fifo(name: str) -> Callable[[Path], object]:
    def make(place: Path) -> None:
        (place / name).unlink(missing_ok=True)
        os.mkfifo(place / name)

    return make


def _link(name: str, to: str) -> Callable[[Path], object]:
    def make(place: Path) -> None:
        (place / name).unlink(missing_ok=True)
        (place / name).symlink_to(to)

    return make


def _bomb(leaf: str, levels: int = 40) -> str:
    """Return YAML whose anchors expand to 9 to the power of `levels` values."""
    lines = [f"a0: &a0 {leaf}"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join(lines) + "\n"


def _recipes(part: int) -> list[Input]:
    show, train = ("show", "r.yaml"), ("train", "r.yaml", "--out", "out")
    kind = "recipes: tags, bombs, sizes, depth, bytes"
    tags = ("!!python/object/apply:os.system ['touch executed']", "!!python/name:os.system", "!!python/module:os", "!!binary x", "!x y")
    texts = {f"the tag {tag.split()[0]}": f"model: {{d_ff: {tag}}}\n" for tag in tags}
    texts |= {
        "an object of Python as a whole": f"!!python/object/apply:subprocess.call [['touch', '{CANARY}']]\n",
        "aliases that grow, as sections": _bomb("x"),
        "aliases that grow, as a section's value": f"model: &m\n  d_ff: {_flow_bomb()}\n",
        "aliases that grow, as a section": f"model: {_flow_bomb()}\n",
        "aliases that grow, as a parent": f"extends: {_flow_bomb()}\n",
        "aliases that grow, as a key": f"? {_flow_bomb()}\n: 1\n",
        "an alias of itself": "model: &a {d_ff: *a}\n",
        "a list of itself": "model: {d_ff: &a [*a]}\n",
        "lists in lists": "model: {d_ff: " + "[" * 100_000 + "]" * 100_000 + "}\n",
        "mappings in mappings": "model: " + "{a: " * 50_000 + "1" + "}" * 50_000 + "\n",
        "merged keys in circles": "model: &a\n  <<: *a\n  d_ff: 3\n",
        "a number of 100,000 digits": f"train: {{steps: {'9' * 100_000}}}\n",
        "a key of 1,000,000 letters": f"model: {{{'k' * 1_000_000}: 1}}\n",
        "terminal codes": f"model: {{d_ff: {json.dumps(CODES)}}}\n",
        "terminal codes as a key": f"model: {{{json.dumps(CODES)}: 1}}\n",
        "terminal codes as a path": f"data: {{path: {json.dumps('text' + CODES)}}}\n",
        "a zero byte in a path": 'extends: tiny\ndata: {path: "text\\0.txt"}\n',
        "terminal codes as a section": f"{json.dumps(CODES)}: 1\n",
        "half a surrogate": 'model: {d_ff: "\\ud800"}\n',
        "a parent of 5,000 letters": f"extends: {'a' * 5000}\n",
        "a parent with a zero byte": 'extends: "a\\0b"\n',
        "a parent that is a device": "extends: /dev/zero\n",
    }
    found = [Input(kind, name, show, _text("r.yaml", text), runs=None if "zero byte in" in name else False) for name, text in texts.items()]
    size = 100 * 2**20 // part
    found += [
        Input(kind, "bytes that are no UTF-8", show, _text("r.yaml", b"model: {d_ff: \xff\xfe\x80}\n")),
        Input(kind, "UTF-16", show, _text("r.yaml", "model: {d_ff: 3}\n".encode("utf-16"))),
        Input(kind, "zero bytes", show, _text("r.yaml", bytes(5000))),
        Input(kind, "100 MB of keys", show, _repeated("r.yaml", b"k: 1\n", size), times=2),
        Input(kind, "100 MB in one line", show, _repeated("r.yaml", b"x", size, b"model: {d_ff: ", b"}")),
        Input(
            kind,
            "60 MB of aliases",
            show,
            _repeated("r.yaml", b"*a,", 60 * 2**20 // part, b"model: {d_ff: [&a 1,", b"]}"),
            times=3,
            bytes=8 * GIB,
        ),
    ]
    named = {
        f"r{CODES}.yaml": "terminal codes",
        f"{HTML.replace('/', '')}.yaml": "HTML",
        "r\nmodel: {d_ff: 1}.yaml": "a line end",
        f"{SHELL}.yaml": "words of a shell",
        "[red]r.yaml": "rich's markup",
        "[bold]r[link=x].yaml": "more of rich's markup",
        "-r.yaml": "a dash",
    }
    kind = "names of recipes and runs: HTML, shell, terminal codes"
    for name, what in named.items():
        copied = _copied(name)
        found.append(Input(kind, f"a recipe's name with {what}", ("show", f"./{name}"), copied, runs=None))
        found.append(Input(kind, f"a run of a recipe whose name has {what}", ("train", f"./{name}"), copied, runs=None))
        found.append(Input(kind, f"--out with {what}", ("train", "tiny.yaml", f"--out=./{name}"), _none, runs=None))
    found.append(Input(kind, "--out through a circle of links", ("train", "tiny.yaml", "--out", "loop/x"), _link("loop", "loop")))
    found.append(Input(kind, "--out that is a circle of links", ("train", "tiny.yaml", "--out", "loop"), _link("loop", "loop")))
    found.append(Input(kind, "a recipe whose text has HTML", train, _text("r.yaml", f"# {HTML}\nextends: tiny\n"), runs=True))
    return found


def _flow_bomb(levels: int = 30) -> str:
    """Return one YAML value whose anchors expand to 9 to the power of `levels` numbers."""
    text = "&a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]"
    for level in range(1, levels):
        text = f"&a{level} [{text}{f', *a{level - 1}' * 8}]"
    return text


def _copied(name: str) -> Callable[[Path], object]:
    return lambda place: (place / name).write_bytes((place / "tiny.yaml").read_bytes())


def _words() -> list[Input]:
    kind = "words of the command: codes, lengths, no UTF-8"
    words: dict[str, tuple[str, ...]] = {
        "terminal codes as a verb": (CODES,),
        "terminal codes as a flag": ("train", "switch_tiny", f"--{CODES}"),
        "terminal codes as a recipe": ("show", CODES),
        "terminal codes as a value": ("show", "switch_tiny", "--model.d_ff", CODES),
        "terminal codes as a key": ("show", "switch_tiny", f"--model.{CODES}", "1"),
        "bytes that are no UTF-8 as a recipe": ("show", "\udcff\udcfe"),
        "bytes that are no UTF-8 as --out": ("train", "tiny.yaml", "--out", "\udcff"),
        "a run's folder of 5,000 letters": ("report", "a" * 5000),
        "a run's folder of 5,000 letters, to generate": ("generate", "a" * 5000),
        "--out of 5,000 letters": ("train", "tiny.yaml", "--out", "a" * 5000),
        "--trace of 5,000 letters": ("doctor", "--trace", "a" * 5000),
        "a cluster of 5,000 letters": ("plan", "switch_tiny", "--cluster", f"{'a' * 5000}.yaml"),
        "--json that is a folder": ("show", "switch_tiny", "--json", "."),
        "--hostfile of 5,000 letters": ("train", "tiny.yaml", "--hostfile", "a" * 5000),
        "aliases that grow, as a value": ("show", "switch_tiny", "--model.d_ff", _flow_bomb()),
        "a tag, as a value": ("show", "switch_tiny", "--model.d_ff", f"!!python/object/apply:os.system ['touch {CANARY}']"),
        "100,000 brackets, as a value": ("show", "switch_tiny", "--model.d_ff", "[" * 100_000),
        "a number of 100,000 digits, as a value": ("show", "switch_tiny", "--model.d_ff", "9" * 100_000),
        "a number of 100,000 digits, as --nproc": ("train", "switch_tiny", "--nproc", "9" * 100_000),
        "a trillion processes": ("train", "switch_tiny", "--nproc", "1000000000000"),
    }
    return [Input(kind, name, given, _none) for name, given in words.items()]


_PLACES = {
    "recipe": ("show", "./x.yaml"),
    "text": ("train", "tiny.yaml", "--data.path", "x.txt"),
    "lines": ("train", "tiny.yaml", "--data.path", "x.jsonl"),
    "packed lines": ("train", "tiny.yaml", "--data.path", "x.jsonl.gz"),
    "table": ("train", "tiny.yaml", "--data.path", "x.parquet"),
    "ids": ("train", "tiny.yaml", "--data.tokenizer", "ids", "--data.vocab_size", "9", "--data.path", "x.bin"),
    "index of ids": ("train", "tiny.yaml", "--data.tokenizer", "ids", "--data.vocab_size", "9", "--data.path", "x.idx"),
    "hostfile": ("train", "tiny.yaml", "--hostfile", "x"),
    "cluster": ("plan", "switch_tiny", "--cluster", "x.yaml"),
    "order": ("simulate", "x.csv"),
    "trace": ("doctor", "--trace", "x_folder"),
    "prompts": ("generate", "run", "--prompt_file", "x"),
    "counts of experts": ("convert", "run", "to", "--to", "tiny.yaml", "--load", "x"),
    "config.json": ("convert", "hf:x_folder", "to"),
    "metrics": ("report", "run"),
    "summary": ("report", "run"),
    "recipe of a run": ("report", "run"),
}
_FILES = {
    "trace": "x_folder/_dump_0", "config.json": "x_folder/config.json", "metrics": "run/metrics.jsonl", "summary": "run/summary.json",
    "recipe of a run": "run/recipe.yaml",
}  # fmt: skip


def _links() -> list[Input]:
    found = []
    for what, words in _PLACES.items():
        name = _FILES.get(what, next((word.removeprefix("./") for word in words if word.removeprefix("./").startswith("x")), "x"))
        makes = {
            "a pipe": _fifo(name),
            "a link to /dev/zero": _link(name, "/dev/zero"),
            "a link to itself": _link(name, Path(name).name),
        }
        for how, make in makes.items():
            beside = _text("x.bin", bytes(100)) if what == "index of ids" else _none
            runs = None if name.startswith("run/") else False
            found.append(
                Input(f"{how} instead of a file", f"{what}: {how}", words, _both(_folder("x_folder"), beside, make), runs, "run" in words)
            )
    return found


def _folder(name: str) -> Callable[[Path], object]:
    return lambda place: (place / name).mkdir(exist_ok=True)


def _both(*makes: Callable[[Path], object]) -> Callable[[Path], object]:
    def make(place: Path) -> None:
        for each in makes:
            each(place)

    return make


def _texts(part: int) -> list[Input]:
    kind = "texts: lines, bombs, bytes, names"

    def train(path: str, *more: str) -> tuple[str, ...]:
        return ("train", "tiny.yaml", "--out", "out", "--data.path", path, *more)

    line = json.dumps({"text": "a line of a text " * 20}) + "\n"
    large = GIB // part
    deep = '{"text": ' + "[" * 200_000 + "]" * 200_000 + "}\n"
    packed = gzip.compress(bytes(64 << 20), 9)
    found = [
        Input(
            kind,
            "1 GiB in one line of JSONL",
            train("x.jsonl"),
            _repeated("x.jsonl", b"x", large, b'{"text": "', b'"}\n'),
            None,
            times=6,
            bytes=6 * large + GIB,
        ),
        Input(kind, "1 GiB in one line of text", train("x.txt"), _repeated("x.txt", b"word ", large), None, times=9, bytes=6 * large + GIB),
        Input(kind, "deep JSON in a line", train("x.jsonl"), _text("x.jsonl", line * 20 + deep)),
        Input(
            kind,
            "a number of 100,000 digits in a line",
            train("x.jsonl"),
            _text("x.jsonl", line * 20 + '{"text": ' + "9" * 100_000 + "}\n"),
        ),
        Input(kind, "a gzip bomb as a text", train("x.txt.gz"), _text("x.txt.gz", packed * (16 if part == 1 else 6))),
        Input(kind, "a gzip bomb as lines", train("x.jsonl.gz"), _text("x.jsonl.gz", packed * (16 if part == 1 else 6))),
        Input(kind, "gzip in gzip", train("x.txt.gz"), _text("x.txt.gz", gzip.compress(packed)), None),
        Input(kind, "a Zstandard bomb as lines", train("x.jsonl.zst"), _zst("x.jsonl.zst"), times=4),
        Input(kind, "bytes that are no UTF-8", train("x.txt"), _text("x.txt", b"\xff\xfe\xfd" * 1000)),
        Input(kind, "bytes that are no UTF-8 in a line", train("x.jsonl"), _text("x.jsonl", line.encode() * 20 + b'{"text": "\xff"}\n')),
        Input(
            kind, "half surrogates in lines", train("x.jsonl"), _text("x.jsonl", '{"text": "a\\ud800b \\udfff"}\n' * 200 + line * 20), True
        ),
        Input(kind, "terminal codes in a text", train("x.txt"), _text("x.txt", (CODES.replace("\x9b", "") + "\n") * 300), True),
        Input(kind, "HTML in a text, whose sample a report shows", train("x.txt"), _text("x.txt", (HTML + "\n") * 300), True),
        Input(
            kind,
            "HTML as a key of lines",
            train("x.jsonl", "--data.text_key", HTML),
            _text(
                "x.jsonl",
                json.dumps({HTML: "word " * 50}) + "\n" + "\n".join(json.dumps({HTML: f"{n} word " * 50}) for n in range(20)) + "\n",
            ),
            True,
        ),
        Input(kind, "terminal codes as a key of lines", train("x.jsonl"), _text("x.jsonl", json.dumps({CODES: "word"}) + "\n")),
        Input(
            kind,
            "names of files with codes, HTML, no UTF-8",
            train("x"),
            _both(
                _folder("x"),
                *(
                    _text(f"x/{n}{name}", "some words\n" * 50)
                    for n, name in enumerate((CODES, HTML.replace("/", ""), SHELL.replace("/", ""), "\udcff", "\n", "[/]", f"a.{CODES}"))
                ),
            ),
            True,
        ),
        Input(
            kind,
            "a folder of links in circles",
            train("x"),
            _both(_folder("x"), _link("x/a", "."), _link("x/b", "../x"), _link("x/c", "c"), _text("x/t.txt", "some words\n" * 300)),
            True,
        ),
        Input(
            kind,
            "links out of the folder, to devices",
            train("x"),
            _both(_folder("x"), _link("x/a", "/dev/zero"), _link("x/b", "/dev/random"), _text("x/t.txt", "some words\n" * 300)),
            True,
        ),
        Input(
            kind,
            "a pipe and a socket in the folder",
            train("x"),
            _both(_folder("x"), _fifo("x/p"), _text("x/t.txt", "some words\n" * 300)),
            True,
        ),
        Input(
            kind,
            "a saved dataset whose state names files outside",
            train("x"),
            _both(_text("x/state.json", json.dumps({"_data_files": [{"filename": "/etc/passwd"}]})), _text("x/dataset_info.json", "{}")),
        ),
        Input(
            kind,
            "a saved dataset whose state is deep",
            train("x"),
            _both(_text("x/state.json", "[" * 200_000), _text("x/dataset_info.json", "{}")),
        ),
        Input(
            kind,
            "a saved dataset whose state is a pipe",
            train("x"),
            _both(_folder("x"), _fifo("x/state.json"), _text("x/dataset_info.json", "{}"), _text("x/t.txt", "some words\n" * 300)),
            None,
        ),
    ]
    return found


def _zst(name: str) -> Callable[[Path], object]:
    def make(place: Path) -> None:
        import zstandard

        packer = zstandard.ZstdCompressor(level=3).compressobj()
        with (place / name).open("wb") as file:
            for _ in range(512):
                file.write(packer.compress(bytes(1 << 20)))
            file.write(packer.flush())

    return make


def _tables() -> list[Input]:
    """Return inputs that are Parquet and Arrow files of text with changed bytes. The command may accept a file that is still readable."""
    kind = "tables: Parquet and Arrow with bytes changed"
    found = []
    for ending in ("parquet", "arrow"):
        for number in range(30):
            words = ("train", "tiny.yaml", "--out", "out", "--data.path", f"x.{ending}")
            found.append(Input(kind, f"{ending}, change {number}", words, _table(f"x.{ending}", number), None))
    return found


def _table(name: str, number: int) -> Callable[[Path], object]:
    def make(place: Path) -> None:
        import random
        from importlib import import_module

        pyarrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
        table = pyarrow.table({"text": [f"some words of row {n} " * 9 for n in range(40)]})
        if name.endswith(".parquet"):
            parquet.write_table(table, place / name)
        else:
            with pyarrow.ipc.new_file(place / name, table.schema) as writer:
                writer.write_table(table, max_chunksize=7)
        raw, rng = bytearray((place / name).read_bytes()), random.Random(f"{name} {number}")
        for _ in range(1 + number % 4):
            at = rng.randrange(len(raw))
            at = at if number % 2 else rng.choice([at % 400, len(raw) - 1 - at % 900])  # near an end: sizes, offsets
            raw[at] = rng.choice([0, 255, 127, 128, raw[at] ^ (1 << rng.randrange(8))])
        (place / name).write_bytes(raw)

    return make


def _folders(part: int) -> list[Input]:
    kind = "folders of runs: pickles, pages, records"
    pickled = pickle.dumps(_Executes())
    step = {"kind": "train", "step": 1, "loss": 3.0, "time": 1.0, "tokens": 10}

    def records(*lines: Any) -> Callable[[Path], object]:
        return _text("run/metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))

    def summary(**values: Any) -> Callable[[Path], object]:
        return lambda place: (place / "run/summary.json").write_text(
            json.dumps(json.loads((place / "run/summary.json").read_text()) | values)
        )

    report, resume = ("report", "run"), ("train", "tiny.yaml", "--out", "run", "--train.steps", "3")
    beside = [
        _text(f"run/checkpoints/step-2/{name}", pickled)
        for name in ("data.pkl", "model.pt", "pytorch_model.bin", ".metadata", "__0_0.distcp")
    ]
    changes: dict[str, tuple[tuple[str, ...], Callable[[Path], object], bool | None]] = {
        "pickles beside a checkpoint's files, trained on": (resume, _both(*beside), None),
        "pickles beside a checkpoint's files, generated from": (("generate", "run", "--tokens", "2"), _both(*beside), None),
        "a pickle as the newest checkpoint": (resume, _text("run/checkpoints/step-9", pickled), None),
        "a folder of pickles as the newest checkpoint": (resume, _text("run/checkpoints/step-9/manifest.json", pickled), None),
        "a pickle as the tensors": (resume, _text("run/checkpoints/step-2/rank-00000.safetensors", pickled), None),
        "records of HTML": (report, records(step, {**step, "step": 2, "kind": "event", "event": HTML, HTML: HTML}), True),
        "a summary of HTML": (
            report,
            summary(recipe=HTML, sample=HTML, commit=HTML, hardware=HTML, device=HTML, title=HTML, status=HTML),
            True,
        ),
        "a summary of terminal codes": (report, summary(recipe=CODES, sample=CODES, commit=CODES, hardware=CODES), True),
        "a recipe of HTML": (report, _text("run/recipe.yaml", f"# {HTML}\n"), True),
        "records of other types": (
            report,
            records(step, {**step, "step": 2, "loss": "x", "moe": 5, "grad_norm_parts": 7, "tokens": []}),
            None,
        ),
        "records of lists": (report, records(step, [1], 5), False),
        "records of layers that are none": (report, records({**step, "moe": [{"layer": HTML, "load": "x"}, 3, None]}), None),
        "records of numbers without end": (report, records({**step, "loss": 10**400, "step": 10**30}), None),
        "records that are deep": (report, _text("run/metrics.jsonl", json.dumps(step) + "\n" + "[" * 200_000 + "\n{}\n"), False),
        "a summary that is deep": (report, _text("run/summary.json", "[" * 200_000), False),
        "a summary of other types": (
            report,
            summary(steps="x", seconds="y", tokens=[], parameters={}, loss=HTML, hardware={"a": HTML}),
            None,
        ),
        "events of other types": (
            report,
            records(step, {**step, "kind": "event", "event": [1, {"a": CODES}]}, {**step, "kind": "eval", "validation_loss": HTML}),
            None,
        ),
        "records of two runs compared": (
            ("report", "run", "run2"),
            _both(lambda p: (p / "run").rename(p / "run2"), _text("run/metrics.jsonl", json.dumps({**step, "loss": "x", "moe": 1}) + "\n")),
            None,
        ),
    }
    found = [Input(kind, name, words, make, runs, run=True) for name, (words, make, runs) in changes.items()]
    found += [
        Input(
            kind, "a manifest of 100 MB of brackets", resume, _manifest(b"[" * 100, 100 * 2**20 // part), None, True, times=2, bytes=2 * GIB
        ),
        Input(kind, "a manifest of deep JSON", resume, _manifest(b"[", 200_000), None, True),
        Input(kind, "a prompt of terminal codes", ("generate", "run", "--tokens", "9", "--prompt", CODES), _none, True, True, True),
        Input(
            kind,
            "prompts of terminal codes",
            ("generate", "run", "--tokens", "9", "--prompt_file", "p"),
            _text("p", f"{CODES}\na\n"),
            True,
            True,
            True,
        ),
    ]
    return found


def _manifest(chunk: bytes, size: int) -> Callable[[Path], object]:
    """Return a function that adds a checkpoint with a manifest of `size` bytes, the chunk repeated, and its correct hash."""

    def make(place: Path) -> None:
        import hashlib

        folder = place / "run/checkpoints/step-9"
        folder.mkdir()
        raw = chunk * max(1, size // len(chunk))
        (folder / "manifest.json").write_bytes(raw)
        (folder / "manifest.sha256").write_text(f"{hashlib.sha256(raw).hexdigest()}  manifest.json\n")

    return make


def _huggingface(part: int) -> list[Input]:
    kind = "folders of transformers"
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 16,
        "max_position_embeddings": 16,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    }
    words = ("convert", "hf:x", "to")
    llama: dict[str, Any] = {"model_type": "llama", "torch_dtype": "float32"}

    def folder(*, header: Any = None, raw: bytes | None = None, tokenizer: Any = None, **changed: Any) -> Callable[[Path], object]:
        def make(place: Path) -> None:
            (place / "x").mkdir(exist_ok=True)
            (place / "x/config.json").write_text(json.dumps({**config, **llama, **changed}))
            if raw is not None:
                (place / "x/model.safetensors").write_bytes(raw)
            elif header is not None:
                text = header if isinstance(header, bytes) else json.dumps(header).encode()
                (place / "x/model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
            else:
                _model(place / "x/model.safetensors", config)
            if tokenizer is not None:
                (place / "x/tokenizer.json").write_text(tokenizer if isinstance(tokenizer, str) else json.dumps(tokenizer))

        return make

    bpe: dict[str, Any] = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [], "byte_fallback": True}}
    token = {"id": 2**32 - 2, "content": "z", "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    grows = {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaa"}] * 12}
    slow = {"type": "Split", "pattern": {"Regex": "(a|a|aa|a+)+$"}, "behavior": "Isolated", "invert": False}
    cases: dict[str, tuple[Callable[[Path], object], bool | None]] = {
        "code to be run (auto_map, trust_remote_code)": (
            _both(folder(auto_map={"AutoModel": "evil.M"}, trust_remote_code=True), _text("x/evil.py", f"open('{CANARY}','w')")),
            None,
        ),
        "pickles instead of tensors": (
            _both(folder(), lambda p: (p / "x/model.safetensors").unlink(), _text("x/pytorch_model.bin", pickle.dumps(_Executes()))),
            False,
        ),
        "a pickle called safetensors": (folder(raw=pickle.dumps(_Executes())), False),
        "a billion layers": (folder(num_hidden_layers=10**9), False),
        "a vocabulary of 2^60": (folder(vocab_size=2**60), False),
        "a hidden size of 2^60": (folder(hidden_size=2**60), False),
        "sizes below 0": (folder(hidden_size=-8), False),
        "a config of 100,000 lists": (folder(layer_types=[["full_attention"]] * 100_000), False),
        "codes and HTML as a model_type": (folder(model_type=CODES + HTML), False),
        "codes as an activation": (folder(hidden_act=CODES), False),
        "a deep config.json": (_both(folder(), _text("x/config.json", '{"a":' * 200_000)), False),
        "a header of 2^62 bytes": (folder(raw=struct.pack("<Q", 2**62) + b"{}"), False),
        "a deep header": (folder(header=b'{"a":' * 200_000), False),
        "a header that is a list": (folder(header=[1, 2]), False),
        "a header that is a text": (folder(header="x"), False),
        "a header of codes": (folder(header={CODES: {"dtype": "F32", "shape": [1], "data_offsets": [0, 0]}}), False),
        "a tensor of negative size": (
            folder(header={"model.norm.weight": {"dtype": "F32", "shape": [-8], "data_offsets": [0, -32]}}),
            False,
        ),
        "a tensor's name with a path": (folder(header={"../../executed": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}), False),
        "a header of many tensors": (
            folder(
                header=b"{"
                + b",".join(b'"t%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % n for n in range(1_600_000 // part))
                + b"}"
            ),
            False,
        ),
        "an index that names files outside": (
            _both(
                folder(),
                _text("x/model.safetensors.index.json", json.dumps({"weight_map": {"a": "../../../etc/passwd", "b": "/dev/zero"}})),
            ),
            None,
        ),
        "a tokenizer with an id of 2^32": (folder(tokenizer={**bpe, "added_tokens": [token]}), None),
        "a tokenizer that lets texts grow": (folder(tokenizer={**bpe, "normalizer": grows}), None),
        "a deep tokenizer": (folder(tokenizer='{"model":' * 200_000), None),
        "a tokenizer of other types": (folder(tokenizer={"model": 5, "added_tokens": 7}), None),
        "added tokens of other types": (folder(tokenizer={**bpe, "added_tokens": [3]}), None),
        "a tokenizer of 50 MB": (
            folder(tokenizer={"model": {**bpe["model"], "vocab": {f"t{n}": n for n in range(3_000_000 // part)}}}),
            None,
        ),
    }
    found = [Input(kind, name, words, make, runs, times=2, bytes=2 * GIB) for name, (make, runs) in cases.items()]
    given: dict[str, dict[str, Any]] = {"grows with every a": {"normalizer": grows}, "searches without end": {"pre_tokenizer": slow}}
    for name, changed in given.items():
        found.append(
            Input(
                kind,
                f"a run whose tokenizer {name}",
                ("generate", "run", "--tokens", "2", "--prompt", "a" * 4000 + "b"),
                _given_tokenizer(bpe, changed),
                None,
                run=True,
            )
        )
    return found


def _model(path: Path, config: dict[str, Any]) -> None:
    import torch
    from safetensors.torch import save_file

    d, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    layer = "model.layers.0."
    shapes: dict[str, tuple[int, ...]] = {f"{layer}self_attn.{n}_proj.weight": (d, d) for n in "qkvo"}
    shapes |= {f"{layer}mlp.gate_proj.weight": (f, d), f"{layer}mlp.up_proj.weight": (f, d), f"{layer}mlp.down_proj.weight": (d, f)}
    shapes |= {f"{layer}{n}_layernorm.weight": (d,) for n in ("input", "post_attention")}
    shapes |= {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    save_file({name: torch.ones(shape) for name, shape in shapes.items()}, path)


def _given_tokenizer(model: dict[str, Any], changed: dict[str, Any]) -> Callable[[Path], object]:
    """Return a function that puts this tokenizer into the checkpoint of a run, and computes its hashes again."""

    def make(place: Path) -> None:
        from tests.campaigns.damage import sign

        path = place / "run/checkpoints/step-2"
        manifest = json.loads((path / "manifest.json").read_text())
        manifest["state"]["tokenizer"] = {"kind": "given", "vocab_size": 2, "separator": 1, "model": {**model, **changed}}
        (path / "manifest.json").write_text(json.dumps(manifest))
        sign(path)

    return make


def _zeros(told: Any) -> Any:
    if isinstance(told, dict):
        return {key: _zeros(value) for key, value in told.items()}
    return told if isinstance(told, str | list) else 0


def _others(part: int) -> list[Input]:
    kind = "hostfiles, clusters, orders, traces"

    def hosts(text: str) -> Callable[[Path], object]:
        return _text("hosts", text)

    two = ("train", "tiny.yaml", "--out", "out", "--hostfile", "hosts")
    cluster = ("plan", "switch_tiny", "--cluster", "x.yaml")
    simulate, trace = ("simulate", "x.csv"), ("doctor", "--trace", "x")
    no_links = {"bus_gb_s": {}, "latency_us": 0, "hop_us": 0, "pair_gb_s": 0}
    billion = {"0": {"name": "0", "desc": "d", "ranks": [0, 10**9]}}
    coded: dict[str, Any] = {"pg_config": {"0": {"name": CODES, "desc": CODES, "ranks": "[0, 1]"}}}
    entry = {"process_group": [CODES, CODES], "profiling_name": CODES, "collective_seq_id": 1, "state": "started"}
    coded["entries"] = [{**entry, "input_sizes": [], "input_dtypes": []}]
    shared: Any = ("x",)
    for _ in range(40):
        shared = (shared, shared)
    endless = {"0": {"name": shared, "desc": shared, "ranks": shared}}
    good: dict[str, Any] = {"pg_config": {"0": {"name": "0", "desc": "d", "ranks": "[0, 1]"}}, "entries": []}
    cases: dict[str, tuple[tuple[str, ...], Callable[[Path], object], bool | None]] = {
        "a host with words of a shell": (two, hosts(f"$(touch${{IFS}}{CANARY}) slots=1\nb slots=1\n"), False),
        "a host with a semicolon": (two, hosts(f"a;touch${{IFS}}{CANARY} slots=1\nb slots=1\n"), False),
        "a host that is an option of ssh": (two, hosts(f"-oProxyCommand=touch${{IFS}}{CANARY} slots=1\nb slots=1\n"), False),
        "a host with terminal codes": (two, hosts(f"{CODES} slots=1\n"), False),
        "a trillion slots": (two, hosts("localhost slots=1000000000000\n"), False),
        "slots of 5,000 digits": (two, hosts(f"localhost slots={'9' * 5000}\n"), False),
        "a hostfile that is no UTF-8": (two, _text("hosts", b"\xff\xfe slots=2\n"), False),
        "a hostfile of 100 MB": (two, _repeated("hosts", b"a slots=1\n", 100 * 2**20 // part), False),
        "a cluster with a tag": (cluster, _text("x.yaml", f"device: !!python/object/apply:os.system ['touch {CANARY}']\n"), False),
        "a cluster of aliases that grow": (cluster, _text("x.yaml", f"device: {_flow_bomb()}\ninside: {{}}\n"), False),
        "a cluster of aliases that grow, as a key": (cluster, _text("x.yaml", f"device: {{name: {_flow_bomb()}}}\ninside: {{}}\n"), False),
        "a deep cluster": (cluster, _text("x.yaml", "device: " + "[" * 100_000), False),
        "a cluster that is no UTF-8": (cluster, _text("x.yaml", b"device: \xff\n"), False),
        "a cluster of 100 MB": (cluster, _repeated("x.yaml", b"k: 1\n", 100 * 2**20 // part), False),
        "a cluster of codes": (cluster, _cluster(name=CODES), None),
        "a cluster of a trillion nodes": (cluster, _cluster(nodes=10**12), None),
        "a cluster of numbers below 0": (cluster, _cluster(devices_per_node=-8, nodes=-1), False),
        "a cluster of zeros": (cluster, _cluster(zeros=True), None),
        "a cluster of no numbers": (cluster, _cluster(devices_per_node=float("nan"), host_gb_s=float("inf")), False),
        "a cluster whose links take no time": (cluster, _cluster(inside=no_links), False),
        "a stage of 2^60": (simulate, _text("x.csv", f"0F0,{2**60}F0,0B0\n"), False),
        "a micro-batch of 2^60": (simulate, _text("x.csv", f"0F{2**60},0B{2**60}\n"), False),
        "a version of 2^60": (simulate, _text("x.csv", f"0F0@{2**60},0B0\n"), False),
        "a stage of 5,000 digits": (simulate, _text("x.csv", f"{'9' * 5000}F0,0B0\n"), False),
        "terminal codes as an action": (simulate, _text("x.csv", f"0F0,{CODES}\n"), False),
        "a million actions": (simulate, _text("x.csv", ",".join(["0F0"] * (1_600_000 // part))), False),
        "quotes without an end": (simulate, _text("x.csv", '"' + "0F0," * 400_000), False),
        "a CSV of zero bytes": (simulate, _text("x.csv", bytes(10_000)), False),
        "a trace that runs a command": (trace, _text("x/_dump_0", pickle.dumps(_Executes())), False),
        "a trace with a persistent id": (trace, _text("x/_dump_0", b"\x80\x02U\x01xQ."), False),
        "a trace with an extension": (trace, _text("x/_dump_0", b"\x80\x02\x82\x01."), False),
        "a trace whose keys take for ever to hash": (trace, _text("x/_dump_0", b"\x80\x02}U\x01x" + b"2\x86" * 40 + b"K\x01s."), False),
        "a trace whose values have no end": (trace, _text("x/_dump_0", pickle.dumps({**good, "pg_config": shared}, protocol=2)), False),
        "a trace whose ranks have no end": (trace, _text("x/_dump_0", pickle.dumps({**good, "pg_config": endless}, protocol=2)), False),
        "a trace with a frame of 2^62": (trace, _text("x/_dump_0", b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"."), False),
        "a trace with a text of 2^62": (trace, _text("x/_dump_0", b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"."), False),
        "a deep trace of JSON": (trace, _text("x/_dump_0", '{"a":' * 200_000), False),
        "a trace of codes and HTML": (trace, _text("x/_dump_0", json.dumps(coded)), None),
        "a trace of a billion ranks": (trace, _text("x/_dump_0", json.dumps({**good, "pg_config": billion})), None),
        "a trace of a rank of 200 digits": (trace, _text(f"x/_dump_{'9' * 200}", json.dumps(good)), None),
    }  # fmt: skip
    return [Input(kind, name, words, make, runs) for name, (words, make, runs) in cases.items()]


def _cluster(**changed: Any) -> Callable[[Path], object]:
    from moe.plan.machine.cluster import FOLDER

    def make(place: Path) -> None:
        told = yaml.safe_load((FOLDER / "a100-80-8.yaml").read_text())
        name = dict(changed).get("name")
        if name is not None:
            told["device"]["name"] = name
            told["sources"] = [name]
        if changed.pop("zeros", False):
            told = _zeros(told)
        (place / "x.yaml").write_text(yaml.safe_dump({**told, **changed}, allow_unicode=True))

    return make
