"""The `moe` command: quick to start, every verb described, recipe values anywhere on the line, exit codes as documented."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import io
import json
import os
import re
import resource
import select
import shutil
import subprocess
import sys
import types
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe import __version__
from moe.cli import doctor, verbs
from moe.cli import main as cli
from moe.cli.flags import read_words
from moe.cli.help import SHELLS, about
from moe.cli.run import runs
from moe.launch import launch, start
from moe.launch.arguments import Arguments, parse
from moe.recipe.keys import flat, known_keys
from moe.recipe.load import RECIPES, load, published_names, recipe_names
from moe.recipe.overrides import take_overrides
from moe.recipe.sections import Run
from parallel.errors import BadInput

ROOT = Path(__file__).resolve().parents[3]
HEAVY = ("torch", "deepspeed", "matplotlib", "transformers", "tokenizers", "tensorboard")


def moe(*words: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT)} | env
    return subprocess.run([sys.executable, "-m", "moe", *words], capture_output=True, text=True, cwd=cwd, env=env, timeout=120)


# --- help and completion ---------------------------------------------------------------------------------------------


def test_help_takes_at_most_ten_times_an_empty_program_and_loads_nothing_heavy() -> None:
    """Ten times is 0.2 s where `python -c pass` takes 0.02 s. Processor time, smallest of three: other load slows both."""

    def seconds(*words: str) -> float:
        used = []
        for _ in range(3):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, *words], capture_output=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            used.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        return min(used)

    said = moe("--help").stdout
    assert all(verb in said for verb in verbs.VERBS)
    assert seconds("-m", "moe", "--help") < 10 * seconds("-c", "pass")
    loaded = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "moe", "--help"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    modules = {line.rpartition("|")[2].strip() for line in loaded.stderr.splitlines()}
    assert "moe.cli.main" in modules and not modules & {*HEAVY, "pydantic", "tyro", "moe.recipe.sections"}


@pytest.mark.parametrize("verb", verbs.VERBS)
def test_help_of_a_verb_lists_its_flags(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([verb, "--help"]) == 0
    said = capsys.readouterr().out
    for name in verbs.VERBS[verb].__dataclass_fields__:
        assert f"--{name}" in said or name.upper() in said
    assert ("--section.key VALUE" in " ".join(said.split())) == (verb in verbs.RECIPE_VERBS)
    assert max(map(len, said.splitlines())) <= 100, "a verb's description is wrapped too"


def test_help_has_no_gap_where_a_docstring_begins_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Help texts of verbs, whose docstrings have line breaks, contain no two spaces in a row."""
    assert cli.main(["--help"]) == 0
    assert "of Hugging Face's transformers" in " ".join(line.strip() for line in capsys.readouterr().out.splitlines())
    for kind in verbs.VERBS.values():
        assert "  " not in about(kind, []).strip(), kind


def test_no_word_is_a_question_for_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    said = capsys.readouterr().out
    assert "usage: moe" in said and "moe --version" in said


@cache
def completion(shell: str) -> str:
    """Return the script that `moe --tyro-print-completion SHELL` prints. Making it takes seconds."""
    with contextlib.redirect_stdout(io.StringIO()) as script:
        assert cli.main(["--tyro-print-completion", shell]) == 0
    return script.getvalue()


def test_bash_completes_verbs_dotted_keys_and_choices(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash here")
    (tmp_path / "moe.bash").write_text(completion("bash"))
    ask = 'source moe.bash; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _tyro_moe; echo "${COMPREPLY[@]}"'

    def complete(*words: str) -> set[str]:
        env = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        return set(subprocess.run([bash, "-c", ask, "bash", *words], capture_output=True, text=True, cwd=tmp_path, env=env).stdout.split())

    assert complete("moe", "rec") == {"recipes"}
    assert complete("moe", "train", "switch_") == {name for name in recipe_names() if name.startswith("switch_")}
    assert complete("moe", "train", "switch_tiny", "--model.tied_embeddings", "") == {"true", "false"}
    assert complete("moe", "train", "switch_tiny", "--degrees.e") == {"--degrees.ep", "--degrees.etp"}
    assert complete("moe", "train", "switch_tiny", "--router.preset", "g") == {"gshard", "glam", "gpt_oss"}


def test_nothing_is_completed_that_is_refused() -> None:
    """Every flag and choice in bash's completion script is accepted by `read_words`; the scripts of other shells have the same table."""
    tables = []
    for shell in SHELLS:
        (line,) = [line for line in completion(shell).splitlines() if "COMPLETION_SPEC = {" in line]
        text = line[line.index("{") :]
        if shell == "fish":
            text = text.replace("\\$", "$").replace('\\"', '"').replace("\\\\", "\\")
        tables.append(ast.literal_eval(text)["subcommands"])
    offered = tables[0]
    assert all(known(table) == known(offered) for table in tables) and set(offered) == set(verbs.VERBS)
    for verb, spec in offered.items():
        words = [option["flags"][-1] for option in spec["options"] if not option["flags"][-1].startswith("-")]
        names = [*recipe_names(), *published_names()]
        assert words == (names if verb in ("train", "show", "plan", "rehearse") else cli.bench_names() if verb == "bench" else [])
        needed = ["dense_tiny", "to"][: sum(f.default is dataclasses.MISSING for f in dataclasses.fields(verbs.VERBS[verb]))]
        for option in spec["options"]:
            flag = option["flags"][-1]
            if not flag.startswith("--") or flag == "--help":
                continue
            for value in option.get("choices") or ([None] if option["type"] == "flag" else ["1"]):
                given = flag if value is None else f"{flag}={value}"
                if "." not in flag:
                    assert read_words(verb, verbs.VERBS[verb], [*needed, given])
                elif option.get("choices") and verb == "train":
                    load("switch_tiny", take_overrides([given])[1])
                else:
                    assert flag[2:] in known_keys()


def known(table: dict[str, Any]) -> dict[str, Any]:
    """Return verb -> its completions, with sorted choices, because tyro's order differs from shell to shell."""
    return {verb: [(o["flags"], o["type"], sorted(o.get("choices") or [])) for o in spec["options"]] for verb, spec in table.items()}


@pytest.mark.parametrize("word", ["--version", "-V"])
def test_version(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([word]) == 0
    assert capsys.readouterr().out == f"moe-parallel {__version__}\n"


def test_rows_come_into_a_pipe_as_they_are_made() -> None:
    """A printed row is readable from a pipe (`moe verify | tee log`) immediately: the verb here prints a row, then waits for input."""
    program = (
        "import sys; from moe.cli import main; main.FUNCTIONS['recipes'] = lambda *_: print('row') or len(input()); main.main(['recipes'])"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            assert select.select([process.stdout], [], [], 20)[0], "nothing came while the verb still ran"
            assert process.stdout.readline() == "row\n"
        finally:
            process.stdin.close()


# --- words of the command line ---------------------------------------------------------------------------------------


def test_recipe_values_may_stand_anywhere_in_any_spelling() -> None:
    words = ["--model.d-ff", "64", "switch_tiny", "--fresh", "--optimizer.lr=1e-3", "--train.seed", "-1", "--nproc", "2"]
    rest, overrides = take_overrides(words)
    assert rest == ["switch_tiny", "--fresh", "--nproc", "2"]
    assert overrides == {"model.d_ff": "64", "optimizer.lr": "1e-3", "train.seed": "-1"}


PATHS = st.none() | st.just(Path("a folder/=b"))


@settings(max_examples=60)
@given(
    st.builds(
        Arguments,
        recipe=st.just("recipe.yaml"),
        overrides=st.dictionaries(st.sampled_from(known_keys()), st.text(), max_size=5),
        out=PATHS,
        from_step=st.none() | st.integers(0, 2**31 - 1),
        allow_changes=st.lists(st.sampled_from(known_keys())).map(tuple),
        init_from=PATHS,
        cluster=st.none() | st.just("h100-8x4"),
        profile=st.booleans(),
    )
)
def test_what_the_parent_sends_is_what_a_rank_reads(given: Arguments) -> None:
    assert parse(given.words()) == given
    assert parse(["recipe.yaml", "--local_rank", "3", "--out", "a", "--init_from", "b", "--local-rank=3"]) == Arguments(
        "recipe.yaml", out=Path("a"), init_from=Path("b")
    )


@pytest.mark.parametrize("read", [lambda words: cli.main(["train", *words]), launch.main])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--from_step", "4", "--fresh"], "--from_step: got 4 with --fresh"),
        (["--from_step", "-4"], "--from_step: got -4"),
        (["--from_step", "x"], "--from_step: got x"),
        (["--nproc", "2", "--from_step", "-4"], "--from_step: got -4"),
        (["--nproc", "2", "--from_step", "4", "--fresh"], "--from_step: got 4 with --fresh"),
    ],
)
def test_a_step_that_cannot_be_meant_is_refused(
    read: Any, words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if read is launch.main and "--nproc" in words:
        return
    assert read(["switch_tiny", *words]) == 2
    assert capsys.readouterr().err.replace("from-step", "from_step").startswith(f"error: {said}, needed") and not list(tmp_path.iterdir())


def test_words_become_the_dataclass_of_a_verb() -> None:
    words = ["runs/x", "--temperature", "0.5", "--prompt=- a --b", "--tokens=7"]
    assert read_words("generate", verbs.Generate, words) == verbs.Generate("runs/x", prompt="- a --b", tokens=7, temperature=0.5)
    words = ["--nproc", "2", "r", "--fresh", "--launcher", "torchrun", "--out", "a=b", "--allow-change", "k", "--allow_change=l"]
    expected = verbs.Train("r", nproc=2, fresh=True, launcher="torchrun", out=Path("a=b"), allow_change=("k", "l"))
    assert read_words("train", verbs.Train, words) == expected


def test_one_process_trains_here_and_several_through_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    here: list[list[str]] = []
    launched: list[tuple[Any, ...]] = []
    monkeypatch.setattr(launch, "main", lambda words: here.append(list(words)) or 75)
    monkeypatch.setattr(start, "start", lambda given, **flags: launched.append((given, flags)) or 1)
    for name in ("RANK", "SLURM_NTASKS", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)

    assert cli.main(["train", "switch_tiny", "--train.steps", "3", "--out", "o", "--fresh"]) == 75
    assert here == [["switch_tiny", "--train.steps=3", "--out", "o", "--fresh"]] and not launched
    assert cli.main(["train", "switch_tiny", "--nproc", "2", "--degrees.ep=2"]) == 1
    assert cli.main(["train", "switch_tiny", "--launcher", "torchrun"]) == 1
    assert cli.main(["train", "switch_tiny", "--nproc", "2", "--debug-collectives"]) == 1
    allowed = ["model.num_heads", "router.gates"]
    words = ["--allow-change", allowed[0], "--allow-change=router.gates"]  # the only flag that may be repeated
    assert cli.main(["train", "switch_tiny", *words]) == 75
    assert here.pop() == ["switch_tiny", *(f"--allow-change={key}" for key in allowed)]
    assert list(parse(["switch_tiny", *words]).allow_changes) == allowed
    assert cli.main(["train", "switch_tiny", "--nproc", "2", *words]) == 1
    assert list(launched.pop()[0].allow_changes) == allowed
    flags = {"nproc": 2, "launcher": "deepspeed", "hostfile": None, "grace_s": 600.0, "restarts": 0, "smaller": []}
    assert launched == [
        (Arguments("switch_tiny", {"degrees.ep": "2"}), flags),
        (Arguments("switch_tiny"), flags | {"nproc": None, "launcher": "torchrun"}),
        (Arguments("switch_tiny", debug_collectives=True), flags),
    ]


def test_a_rank_of_another_launcher_is_checked_against_that_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "main", lambda words: 0)
    words = ["train", "switch_tiny", "--degrees.dp", "2", "--degrees.ep", "2"]
    monkeypatch.delenv("RANK", raising=False)
    assert cli.main(words) == 2
    monkeypatch.setenv("RANK", "0")
    assert cli.main(words) == 0


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Replace the modules that the verbs call. Return a list of the calls: (name, positional arguments, keyword arguments)."""
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def module(name: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(main=lambda *words, **flags: calls.append((name, words, flags)))

    monkeypatch.setattr("importlib.import_module", module)
    return calls


def test_verbs_hand_over_only_what_was_given(called: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/a/checkpoints").mkdir(parents=True)
    (tmp_path / "runs/a/metrics.jsonl").touch()
    (tmp_path / "bench/layers").mkdir(parents=True)
    (tmp_path / "bench/layers/how_fast.py").write_text("import torch\ndef main(*, steps: int = 3, json=None):\n    return 0\n")
    monkeypatch.setattr(runs, "BENCHES", tmp_path / "bench")
    assert cli.main(["generate", "runs/a", "--tokens", "5"]) == 0
    assert cli.main(["report", "runs/a"]) == 0
    kinds = "data,expert,tensor,sequence,pipeline,hybrid"
    asked = {
        "nproc": None,
        "json": "f.json",
        "only": "ep 2",
        "kinds": kinds,
        "timeout_s": None,
        "go_on": False,
        "recipe": None,
        "device": None,
    }
    assert cli.main(["verify", "--only", "ep 2", "--json", "f.json"]) == 0
    assert cli.main(["bench", "how-fast", "--steps", "4"]) == 0
    assert called == [
        ("moe.train.use.generate", ("runs/a",), {"chat": False, "tokens": 5}),
        ("moe.report", ("runs/a",), {"json": None}),
        ("moe.verify.verify", (), asked),
        ("moe.bench.layers.how_fast", (), {"steps": 4}),
    ]


def test_a_place_for_results_that_cannot_be_written_is_refused_before_the_work(
    called: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path, tmp_path / "file/x.json"):
        assert cli.main(["verify", "--json", str(place)]) == 2 and called == []
        assert re.fullmatch(r"error: --json: got .*; fix: choose another path\n", capsys.readouterr().err)
    assert cli.main(["verify", "--json", str(tmp_path / "new/x.json")]) == 0 and not (tmp_path / "new").exists()


def test_rows_that_there_are_not_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "--only", "no such row"]) == 2
    assert re.fullmatch(r'error: --only: got no such row, needed .*; fix: --only ".*"\n', capsys.readouterr().err)


@pytest.mark.parametrize(("verb", "fix"), [("simulate", "--stages 512 --microbatches 1024"), ("energy", "--stages 32 --microbatches 64")])
def test_an_order_that_nobody_would_wait_for_is_refused(verb: str, fix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([verb, "1f1b", "--stages", "100000", "--microbatches", "100000"]) == 2
    assert re.fullmatch(rf"error: --microbatches: got .*; fix: {fix}\n", capsys.readouterr().err)


def test_a_flag_that_a_measurement_does_not_take_is_refused_by_name(
    called: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "layers").mkdir()
    (tmp_path / "layers/how_fast.py").write_text(
        '"""How fast.\n\nHow it is timed.\n"""\ndef main(*, steps: int = 3, json=None):\n    return 0\n'
    )
    monkeypatch.setattr(runs, "BENCHES", tmp_path)
    assert cli.main(["bench", "how-fast", "--seeds", "4"]) == 2 and not called
    assert "--seeds: got --seeds for how-fast, needed a flag of how-fast: --steps, --json" in capsys.readouterr().err
    assert cli.main(["bench", "--help"]) == 0 and re.search(r"\n  how-fast  How fast\.\n$", capsys.readouterr().out)
    assert cli.main(["bench", "how-fast", "--help"]) == 0 and not called
    said = capsys.readouterr().out
    assert "How it is timed." in said and re.search(r"\n  --steps  .*\(default: 3\)\n  --json   [^(]*\n$", said) and "--seeds" not in said


def test_a_measurement_that_moved_to_a_checkout_is_there() -> None:
    """For a measurement that moved to the tests, the fix is a command whose module or folder exists."""
    for module, names in runs.MOVED.items():
        for name in names.split():
            place = RECIPES.parent / module.replace(".", "/") / name.replace("-", "_")
            assert place.with_suffix(".py").exists() or place.is_dir(), f"{module} {name}"
            assert name not in runs.bench_names()


def test_a_run_folder_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/switch_tiny/checkpoints").mkdir(parents=True)
    assert cli.main(["generate", "switch_tiny"]) == 2
    assert "did you mean runs/switch_tiny?" in capsys.readouterr().err


def test_interrupting_is_not_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.FUNCTIONS, "recipes", interrupted)
    assert cli.main(["recipes"]) == 130


def test_a_closed_pipe_is_not_an_error() -> None:
    command = f"set -o pipefail; '{sys.executable}' -m moe show switch_tiny | true"
    got = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert got.stderr == "" and got.returncode == 0


# --- doctor ----------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(180)
def test_a_full_disk_for_the_output_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        got = subprocess.run(
            [sys.executable, "-m", "moe", "show", "switch_tiny"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    line = "error: output: got No space left on device, needed a disk with room for it; fix: free space\n"
    assert (got.returncode, got.stderr) == (2, line)


def test_a_working_folder_that_was_removed_is_one_line(tmp_path: Path) -> None:
    code = (
        "import os, sys; from moe.cli.main import main; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone'); sys.exit(main(['doctor']))"
    )
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    line = "error: working folder: got one that was removed, needed a folder that exists; fix: cd to another one\n"
    assert (got.returncode, got.stdout, got.stderr) == (2, "", line)


def test_doctor_tries_what_training_needs(tmp_path: Path) -> None:
    path = tmp_path / "doctor.json"
    got = moe("doctor", "--json", str(path), cwd=tmp_path)
    value = json.loads(path.read_text())
    assert got.returncode == (1 if value["failed"] else 0), got.stdout + got.stderr
    rows = {row["check"]: row for row in value["rows"]}
    for check in (
        "torch",
        "deepspeed",
        "gloo all-to-all, 2 ranks",
        "matrix products",
        "free port",
        "runs/",
        "TORCH_EXTENSIONS_DIR",
        "offload to nvme",
    ):
        assert rows[check]["state"] in ("ok", "note"), rows[check]
        assert check in got.stdout


def test_doctor_fails_where_something_needed_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for check in ("_deepspeed", "_exchange", "_speed"):  # replaced, because they are slow and another test runs them
        monkeypatch.setattr(doctor, check, lambda: [])
    monkeypatch.setattr(doctor, "NEEDED", {"torch": "999", "no-such-package": "1"})
    monkeypatch.setattr(doctor, "OPTIONAL", ("nor-this",))
    assert doctor.main(verbs.Doctor(), {}) == 1
    said = capsys.readouterr().out
    assert "pip install 'torch>=999'" in said and "pip install no-such-package" in said and "2 of" in said


def test_doctor_names_what_offload_to_a_disk_lacks_and_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(doctor, "missing_for_nvme", lambda: ["libaio-dev", "ninja-build"])
    (row,) = doctor._nvme()
    assert (row.value, row.state) == ("no libaio-dev or ninja-build found", "note")
    assert row.fix == "only for sharding.offload to nvme: apt-get install libaio-dev ninja-build"
    monkeypatch.setattr(doctor, "missing_for_nvme", lambda: [])
    assert "the first run compiles async_io, which takes a minute or two" in doctor._nvme()[0].value
    (tmp_path / "async_io").mkdir()
    (tmp_path / "async_io" / "async_io.so").touch()
    assert doctor._nvme()[0].value == "ready"


def test_a_check_that_breaks_is_a_row_not_a_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for check in ("_deepspeed", "_exchange", "_speed"):
        monkeypatch.setattr(doctor, check, lambda: [])

    def _port() -> list[doctor.Row]:
        raise OSError("no network at all")

    monkeypatch.setattr(doctor, "_port", _port)
    assert doctor.main(verbs.Doctor(), {}) == 1
    assert "OSError: no network at all" in capsys.readouterr().out


def test_bad_input_is_a_value_error_for_library_callers() -> None:
    with pytest.raises(ValueError, match="recipe: got nope"):
        load("nope")
    assert issubclass(BadInput, ValueError)


def test_show_prints_the_keys_of_a_section_with_their_choices(capsys: pytest.CaptureFixture[str]) -> None:
    """`moe show --keys SECTION` prints each key with its default, and with a recipe with the recipe's value."""
    assert cli.main(["show", "--keys", "all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    told = dict(line.split(": ", 1) for line in lines if not line.startswith(" "))
    assert {key: json.loads(value) for key, value in told.items()} == flat(Run())
    assert cli.main(["show", "--keys", "model.rope", "switch_tiny", "--model.rope.base", "7"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "model.rope.base: 7.0" and "    one of none, linear, ntk, dynamic, llama3, yarn" in lines
    assert all(line.startswith(("model.rope.", "    ")) for line in lines)
