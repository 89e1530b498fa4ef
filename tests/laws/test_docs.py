"""Laws of the docs: recipes.md has every key with its default; named keys, commands, flags and files exist; counts equal the code's;
the README's Python runs. tests/laws/test_architecture.py checks links.
"""

from __future__ import annotations

import importlib
import inspect
import io
import json
import os
import re
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from moe.checks.advice import check_for_user
from moe.cli import main as cli
from moe.cli.flags import read_words
from moe.cli.run.runs import arguments_of_main, bench_file, bench_names
from moe.cli.simulate import simulated
from moe.cli.verbs import RECIPE_VERBS, VERBS
from moe.convert.huggingface.families import FAMILIES
from moe.launch import exit_codes
from moe.plan.memory.stack import OURS_ON_CPU
from moe.recipe.keys import flat, known_keys
from moe.recipe.load import load
from moe.recipe.overrides import take_overrides
from moe.recipe.presets import PRESETS
from moe.recipe.sections import Run
from parallel.pipeline.schedules import SCHEDULES
from tests.campaigns import faults
from tests.mutations import run
from tests.mutations.every import MUTATIONS
from tests.planner import planner
from tests.support import trained
from tests.support.command import measurements
from tests.support.ranks import run_on_ranks

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EACH_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
OF_TODAY = pytest.mark.parametrize("page", [p for p in PAGES if p.name != "log.md"], ids=lambda page: page.relative_to(ROOT).as_posix())
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", flags=re.S | re.M)
NUMBERS = ["ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"]
README_BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.S | re.M)


def test_recipes_page_has_every_key_with_its_default() -> None:
    rows = re.findall(r"^\| `([\w.]+\.\w+)` \| `([^`]*)` \|", (ROOT / "docs/use/recipes.md").read_text(encoding="utf-8"), flags=re.M)
    assert tuple(key for key, _ in rows) == known_keys()
    assert {key: json.loads(text) for key, text in rows} == flat(Run())


def test_errors_by_table_are_those_that_the_planner_has() -> None:
    """Pages say "A to B % ... by table" for the planner's smallest and largest mean error over published tables. A and B must be the
    values in planner-tables.json, for time or for memory."""
    rows = json.loads((ROOT / "docs/benchmarks/planner-tables.json").read_text(encoding="utf-8"))["rows"]
    time, memory = [row["time"]["mean"] for row in rows if row["time"]], [row["memory_error_median"] for row in rows if row["memory_rows"]]
    true = {tuple(f"{100 * end:.1f}" for end in (min(of), max(of))) for of in (time, memory)}
    said = {page.name: re.findall(r"([\d.]+) to ([\d.]+) % [^.;|]*by table", page.read_text(encoding="utf-8")) for page in PAGES}
    assert {name: ends for name, ends in said.items() if set(ends) - true} == {}


def test_cli_page_has_every_exit_code() -> None:
    rows = re.findall(r"^\| (\d+) \|", (ROOT / "docs/use/cli.md").read_text(encoding="utf-8"), flags=re.M)
    assert sorted(map(int, rows)) == sorted(code for code in vars(exit_codes).values() if isinstance(code, int))


def test_recipes_page_names_every_recipe() -> None:
    page = (ROOT / "docs/use/recipes.md").read_text(encoding="utf-8")
    names = sorted(path.relative_to(ROOT / "recipes").with_suffix("").as_posix() for path in (ROOT / "recipes").rglob("*.yaml"))
    assert [name for name in names if f"`{name}`" not in page] == []


@EACH_PAGE
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(r"`((?:moe|parallel|recipes|tests|docs)/[\w/.-]*)`", page.read_text(encoding="utf-8"))
    assert sorted({name for name in named if not (ROOT / name).exists()}) == []


def in_backticks(page: Path) -> list[str]:
    return re.findall(r"`([^`]+)`", FENCE.sub("", page.read_text(encoding="utf-8")))


def commands(page: Path) -> Iterator[tuple[str, str]]:
    """Yield (verb, rest of the line) of each command `moe VERB ...` on a page, except those whose shown output is an error."""
    lines = [text for text in in_backticks(page) if text != OURS_ON_CPU.name]
    for language, block in FENCE.findall(page.read_text(encoding="utf-8")):
        if language != "python":
            lines += re.findall(r"^(.*moe .*)$(?!\n *error:)", block.replace("\\\n", " "), flags=re.M)
    for line in lines:
        yield from re.findall(r"(?:^|\$ |; |&& |=\S+ )moe ([a-z][a-z-]*)((?:(?! # | \| | && |;).)*)", line)


@OF_TODAY
def test_keys_that_a_page_names_exist(page: Path) -> None:
    """Each dotted name that begins with a section of the recipe, such as `train.steps`, is a key or a group of keys."""
    keys = known_keys()
    there = {key.rsplit(".", n)[0] for key in keys for n in range(key.count("."))}
    dotted = re.compile(rf"(?<![\w./-])(?:--)?((?:{'|'.join(Run.model_fields)})(?:\.\w+)+)(?![\w./(-])")
    named = {key for text in in_backticks(page) for key in dotted.findall(text)}
    assert sorted(key for key in named - there if not re.search(r"\.(py|bin|json)$", key)) == []


@OF_TODAY
def test_commands_that_a_page_names_exist(page: Path) -> None:
    """All verbs, bench names and flags in the page's `moe` commands exist; a flag can also be a recipe's key."""
    keys, wrong = known_keys(), []
    for verb, words in commands(page):
        if verb not in VERBS:
            wrong.append(f"moe {verb}")
            continue
        flags = {field.name for field in fields(VERBS[verb]) if not field.metadata["word"]} | {"help"}
        if verb == "bench" and (name := re.match(r" +([a-z][\w-]*)", words)):
            if name[1] not in bench_names():
                wrong.append(f"moe bench {name[1]}")
                continue
            flags = {*arguments_of_main(bench_file(name[1])), "help"}
        for flag in re.findall(r"(?<![\w-])--([A-Za-z][\w.-]*)", words):
            known = flag.replace("-", "_").rstrip(".")
            if known not in flags and not (verb in RECIPE_VERBS and (known in keys or known.lower() == "section.key")):
                wrong.append(f"moe {verb}{words[:20]} ... --{flag}")
    assert sorted(set(wrong)) == []


@OF_TODAY
def test_measurements_of_the_tests_that_a_page_names_exist(page: Path) -> None:
    """Folder, name and flags of commands such as `python -m tests.counted comm --nproc 2` exist."""
    mains = {"campaigns": faults.main, "mutations": run.main, "planner": planner.main}
    wrong = []
    for folder, words in re.findall(r"python -m tests\.(\w+)((?: +[\w.,/+:-]+)*)", page.read_text(encoding="utf-8")):
        first, *_ = words.split() or [""]
        if folder in mains and first != "steps":
            takes = {*inspect.signature(mains[folder]).parameters}
            known = {"campaigns": set(faults.KINDS), "planner": set(get_args(planner.Part)), "mutations": set()}[folder]
        elif first.replace("-", "_") in {name.replace("-", "_") for name in measurements(ROOT / "tests" / folder)}:
            takes, known = set(arguments_of_main(ROOT / "tests" / folder / f"{first.replace('-', '_')}.py")), {first}
        else:
            takes, known = set(), set()
        wrong += [f"{folder} {first}"] if first and not first.startswith("-") and first not in known else []
        wrong += [f"{folder} {first} --{flag}" for flag in re.findall(r"--(\w+)", words) if flag not in {*takes, "help"}]
    assert wrong == []


@OF_TODAY
def test_tests_that_a_page_names_exist(page: Path) -> None:
    """Checks names without a folder, such as `test_mesh.py`. Names with a folder are checked with all other files."""
    there = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert sorted({name for text in in_backticks(page) for name in re.findall(r"(?<![\w/])test_\w+\.py", text)} - there) == []


@OF_TODAY
def test_counts_that_a_page_claims_are_those_of_the_code(page: Path) -> None:
    counts = {
        "pipeline schedules|schedules, from": len(SCHEDULES),
        "faults, most of which|faults into the running code|faults found and named": len(MUTATIONS),
        "presets|published routers": len(PRESETS),
        "families": len(FAMILIES),
    }
    text = re.sub(r"\s+", " ", page.read_text(encoding="utf-8"))
    for claim, count in counts.items():
        said = re.findall(rf"\b(\d+|{'|'.join(NUMBERS)}) (?:{claim})\b", text, flags=re.I)
        assert [n for n in said if (int(n) if n.isdecimal() else NUMBERS.index(n.lower()) + 10) != count] == [], f"{claim}: {count}"


def test_the_architecture_page_names_every_file_in_its_folder() -> None:
    """The tree on the page lists every file under its folder, and no file that does not exist. Files of moe/bench/ may be missing."""
    tree = (ROOT / "docs/inside/architecture.md").read_text(encoding="utf-8").partition("## The tree")[2].partition("\n## ")[0]
    parts = dict(re.findall(r"^([\w/]+)/ +(.*?)(?=^\S|\Z)", tree, flags=re.M | re.S))
    files = [path.relative_to(ROOT) for package in ("moe", "parallel") for path in (ROOT / package).rglob("*.py")]
    missing = [
        path.as_posix()
        for path in files
        if not path.name.startswith("__") and path.name not in re.findall(r"\w+\.py", parts.get(path.parent.as_posix(), ""))
    ]
    assert sorted(path for path in missing if not path.startswith("moe/bench/")) == []
    named = {f"{folder}/{name}" for folder, text in parts.items() for name in re.findall(r"\b\w+\.py", text)}
    there = {path.as_posix() for path in files}
    assert sorted(path for path in named if path.startswith(("moe/", "parallel/")) and path not in there) == []


@EACH_PAGE
def test_python_on_a_page_is_python(page: Path) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.S | re.M):
        compile(block, page.name, "exec")


def test_python_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each block has names of its own. Without a sample and a report, which took two thirds of the time and have tests of their own.
    tests/moe/test_public_face.py imports `moe` in a new process."""
    trained.home(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    assert len(README_BLOCKS) > 1
    for block in README_BLOCKS:
        exec(block, {"__name__": "__main__"})
        assert capsys.readouterr().out.strip()


def test_every_picture_has_a_function_that_draws_it_and_a_page_that_shows_it() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs/pictures").glob("*.py"))
    drawn = set(re.findall(r"^def (\w+)\(\) -> Axes:", text, flags=re.M))
    files = {path.stem for path in (ROOT / "docs/pictures").glob("*.png")}
    shown = {name for page in PAGES for name in re.findall(r"pictures/(\w+)\.png\)", page.read_text(encoding="utf-8"))}
    assert files == drawn == shown


def test_the_picture_of_schedules_says_what_the_command_prints(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each subplot's title is a line that `moe simulate` prints for that schedule. The legend does not cover the plots."""
    monkeypatch.syspath_prepend(str(ROOT / "docs/pictures"))
    figure = importlib.import_module("draw").pipelines().figure
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    for title in titles:
        assert cli.main(["simulate", title.partition(":")[0]]) == 0
        assert title in capsys.readouterr().out.splitlines()
    assert len(titles) == 6 and len(figure.legends) == 1
    figure.canvas.draw()
    top = figure.legends[0].get_window_extent().y1
    assert all(axes.get_tightbbox().y0 > top for axes in figure.axes)
    importlib.import_module("matplotlib.pyplot").close(figure)


def test_the_afternoons_commands_are_accepted_and_its_table_is_what_the_simulator_says() -> None:
    """The recipes load and pass the checks for their numbers of ranks. Time, bubble and micro-batches in flight are the simulator's."""
    page = ROOT / "docs/use/afternoon.md"
    started = 0
    for verb, words in commands(page):
        rest, overrides = take_overrides(words.split())
        flags = read_words(verb, VERBS[verb], rest)
        if verb in ("train", "rehearse"):
            check_for_user(load(flags.recipe, overrides)[0], flags.nproc or 1 if verb == "train" else flags.world, {})
            started += 1
    assert started > 8
    rows = re.findall(r"^\| `(\w+)`[^|]*\| (\d+) \| ([\d.]+) % \| (\d+) \|$", page.read_text(encoding="utf-8"), flags=re.M)
    names = ["gpipe", "1f1b", "zb_h1", "chimera"]
    true = [simulated(name, stages=4, microbatches=8)[0] for name in names]
    assert rows == [
        (name, f"{row['makespan']:g}", f"{100 * row['bubble']:.1f}", str(row["peak_activations"][0]))
        for name, row in zip(names, true, strict=True)
    ]


@pytest.mark.long
def test_the_pages_are_a_site_in_which_no_link_leads_nowhere(tmp_path: Path) -> None:
    """Sphinx builds the site as `make docs` does, without a warning. So links work, and Sphinx can read every page and docstring. Most
    pages have Sphinx's plainest theme here, because the site's theme writes the contents of the whole site into each."""
    build = pytest.importorskip("sphinx.cmd.build", reason="the extra `docs` is not installed")

    def built(rank: int, words: list[str]) -> tuple[int, str]:
        """Do as `python -m sphinx` would, in a fork, which has imported most of what the pages of modules document."""
        os.chdir(ROOT)
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as said:
            return build.main(words), said.getvalue()

    words = ["-q", "-W", "--keep-going", "-b", "html", "-c", "docs/site", "-d", str(tmp_path / "read")]
    for more in (["-D", "html_theme=basic", "docs", str(tmp_path)], ["docs", str(tmp_path), "docs/index.md", "docs/site/api.rst"]):
        assert run_on_ranks(built, 1, [*words, *more], timeout_s=300) == [(0, "")]
    written = (path for path in (ROOT / "docs").rglob("*") if path.suffix in (".md", ".ipynb"))
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in written}
    assert all((tmp_path / page).is_file() for page in pages)
    front = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "furo" in front
    assert all(
        f'href="{page.as_posix()}"' in front for page in pages if page.name != "index.html"
    )  # the start page's contents link to every page
    reference = (tmp_path / "site/api.html").read_text(encoding="utf-8")
    assert "moe.train.loop.trainer." in reference
    assert not re.search("Alias for field number|Define the computation performed", reference), "docstrings of Python and torch"
