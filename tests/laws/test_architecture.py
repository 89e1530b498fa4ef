"""Laws of the source tree, read from the syntax trees without importing anything.

    recipes -> moe -> parallel -> torch      imports go to the right only, without circles

A rule that has exceptions lists them here, each with its reason.
"""

from __future__ import annotations

import ast
import gc
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("moe", "parallel")
LAYERS = {"moe": {"moe", "parallel"}, "parallel": {"parallel"}}  # the packages of this project that each may import; recipes hold no code
TEXT = {".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".json", ".sh", ".cfg", ""}

READS_THE_ENVIRONMENT = {
    "parallel/process/process.py": "which rank this process is",
    "parallel/data/deepspeed.py": "DeepSpeed takes its device and its rank from there: set before it is imported",
    "moe/cli/main.py": "what torch's libraries read as they load: set, not read",
    "moe/bench/gpu/__main__.py": "torch's allocator, and without a GPU Triton's interpreter: set before they are loaded",
    "moe/cli/run/runs.py": "debug mode of collectives, for ranks that are forked: set, not read",
    "moe/verify/peers/transformers.py": "transformers reads its rank there: set, not read",
    "moe/cli/run/train.py": "whether this process is already a rank of somebody's launcher",
    "moe/cli/doctor.py": "reports what the launchers and torch would see",
    "parallel/process/deterministic.py": "cuBLAS reads its workspace there: set, not read",
    "parallel/store/lock.py": "whether the parent of these ranks holds their folder",
    "parallel/process/extensions.py": "where compiled extensions are kept",
    "moe/launch/environment.py": "what ranks inherit: cores, devices, port, torch's libraries",
    "moe/launch/launch.py": "which rank reports",
    "moe/launch/early.py": "which rank reports",
    "moe/launch/processes.py": "the marks by which a launch finds its processes",
    "moe/launch/start.py": "what the launcher inherits",
    "moe/launch/ready.py": "who started it; and it sets what its forks inherit, as a launcher does",
    "moe/launch/hosts.py": "where this program's modules are, for the other machines",
    "moe/launch/pdsh.py": "what goes along to the other machines",
    "moe/data/tokens.py": "the user's cache folder",
    "moe/verify/started.py": "what a rank without a launcher inherits, but the place in a job",
    "moe/recipe/plugin.py": "which rank says whose code runs",
    "moe/records/tracker.py": "a tracker's project, by that tracker's own variable",
}
IMPORTS_DEEPSPEED = {
    "parallel/data/deepspeed.py": "its start",
    "parallel/data/zero.py": "its engine",
    "moe/cli/doctor.py": "its version",
    "moe/launch/pdsh.py": "its launcher for several machines",
    "moe/bench/training/step.py": "a peer to measure",
    "moe/verify/peers/deepspeed.py": "a peer to verify",
    "moe/verify/yours/recorder.py": "gathers what ZeRO hides, of a program that uses it",
}
MOST_FILES = 20
ROUTED = re.compile(r"rout(er|ed|ing)|expert", re.I)
SAYS_EXPERT = {  # allowed names: of a view of the mesh, of a family of parameters, of another library's interface
    "parallel/mesh/mesh.py": {"EXPERT"},
    "parallel/tensor/style.py": {"EXPERT", "expert"},
    "parallel/data/deepspeed.py": {
        "_EXPERT_PARALLEL_GROUP",
        "_EXPERT_DATA_PARALLEL_GROUP",
        "num_experts",
        "use_data_before_expert_parallel_",
    },
}
# Modules that may not import a SLOW package: they run for `moe --help`, for a refused recipe, or before a rank sets torch's variables.
QUICK = (
    "moe",
    "moe.__main__",
    "moe.cli.main",
    "moe.checks.together",
    "moe.recipe.sections",
    "moe.recipe.load",
    "moe.launch.start",
    "moe.launch.launch",
)
SLOW = {"torch", "deepspeed", "transformers", "tokenizers", "matplotlib", "tensorboard", "triton"}


@dataclass(frozen=True)
class Import:
    """An import of `target` (a dotted module name) at `line`. early: it runs when the module is imported, not in a function."""

    target: str
    line: int
    early: bool


@cache
def sources() -> dict[str, Path]:
    """Return dotted name -> file of every module of the packages."""
    files = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


@cache
def tree(path: Path) -> ast.Module:
    """Parse a file. Garbage collections would visit each of its nodes again and again: they pause, and then leave the nodes out."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(path.read_text(encoding="utf-8"), str(path))
    finally:
        gc.freeze()
        if collects:
            gc.enable()


@cache
def imports(path: Path) -> tuple[Import, ...]:
    return tuple(_imports(tree(path), early=True))


@cache
def paths_of_imports() -> set[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return (parts of the importing file's path, parts of the imported file's path) for each import within the packages."""
    parts = {name: path.relative_to(ROOT).with_suffix("").parts for name, path in sources().items()}
    return {(parts[name], parts[i.target]) for name, path in sources().items() for i in imports(path) if i.target in parts}


def _imports(node: ast.AST, *, early: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(_module(alias.name), child.lineno, early) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.module and not child.level, "imports here are absolute: a reader sees where a name comes from"
            yield from (Import(_module(f"{child.module}.{alias.name}"), child.lineno, early) for alias in child.names)
        elif isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            yield from _imports(ast.Module(child.body, []), early=False)
            yield from _imports(ast.Module(child.orelse, []), early=early)
        else:
            yield from _imports(child, early=early and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))


def _module(dotted: str) -> str:
    """Return the module of a dotted name: moe.router.router for `moe.router.router.Routing`. Names of other packages are unchanged."""
    parts = dotted.split(".")
    if parts[0] not in PACKAGES:
        return dotted
    return next((name for n in range(len(parts), 0, -1) if (name := ".".join(parts[:n])) in sources()), dotted)


def check(wrong: list[str], rule: str) -> None:
    """Fail if there are places in `wrong`, with a message that names the rule and these places."""
    if wrong:
        pytest.fail("\n".join([rule, *wrong]), pytrace=False)


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT).as_posix()}:{line}"


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def text_files() -> list[Path]:
    """Return the text files of the repository. git is not asked, so that the laws also work in a copy without .git."""
    folders = [*PACKAGES, "recipes", "tests", "docs", ".ci"]
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*"))] + sorted(ROOT.iterdir())
    return [path for path in files if path.is_file() and path.suffix in TEXT and "__pycache__" not in path.parts]


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_go_one_way(layer: str) -> None:
    ours = {"recipes", "tests", *PACKAGES}
    wrong = [
        f"{where(path, i.line)} imports {i.target}"
        for path in python_files(layer)
        for i in imports(path)
        if (top := i.target.split(".")[0]) in ours and top not in LAYERS[layer]
    ]
    check(wrong, f"{layer} may import of this project {sorted(LAYERS[layer])} only")


def test_parallel_knows_no_routers_and_no_experts() -> None:
    """No name and no string in parallel/ mentions routers or experts, except SAYS_EXPERT. Docstrings are not checked."""
    found: dict[str, set[str]] = {}
    for path in python_files("parallel"):
        about = {id(node.value) for node in ast.walk(tree(path)) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree(path)):
            if id(node) not in about and (words := [word for word in _words(node) if ROUTED.search(word)]):
                found.setdefault(path.relative_to(ROOT).as_posix(), set()).update(words)
    assert found == SAYS_EXPERT


def _words(node: ast.AST) -> list[str]:
    """Return the names and texts of one node of a syntax tree."""
    fields = (getattr(node, name, None) for name in ("id", "attr", "arg", "name", "value"))
    return [word for word in fields if isinstance(word, str)]


def test_recipes_hold_no_code() -> None:
    files = [path for path in sorted((ROOT / "recipes").rglob("*")) if path.is_file()]
    check([where(path, 1) for path in files if path.suffix not in (".yaml", ".md")], "a shared recipe is data: anybody may load it")


def test_no_import_circles() -> None:
    """Imports inside functions, and imports for type checking, count too."""
    graph = {name: [i.target for i in imports(path) if i.target in sources()] for name, path in sources().items()}
    check([" <-> ".join(circle) for circle in circles(graph)], "modules that import each other")


@pytest.mark.parametrize("folder", sorted({"."} | {path.relative_to(ROOT).parent.as_posix() for path in python_files(*PACKAGES)}))
def test_no_circles_between_the_parts_of_a_folder(folder: str) -> None:
    """Imports between the files and subfolders of a folder form no circle. A subfolder counts as one node, with all files below it."""
    prefix = () if folder == "." else tuple(folder.split("/"))
    graph: dict[str, set[str]] = {}
    for ours, theirs in paths_of_imports():
        if ours[: len(prefix)] == theirs[: len(prefix)] == prefix and ours[len(prefix)] != theirs[len(prefix)]:
            graph.setdefault(ours[len(prefix)], set()).add(theirs[len(prefix)])
            graph.setdefault(theirs[len(prefix)], set())
    check(
        [" <-> ".join(c) for c in circles({part: list(ahead) for part, ahead in graph.items()})],
        f"parts of {folder} that import each other",
    )


@pytest.mark.parametrize("room", ["data", "experts", "kernels", "model", "nn", "report", "router"])
def test_a_whole_recipe_stays_outside_of(room: str) -> None:
    """These packages do not import the whole recipe (`Run`): they get an axis, a number or their own section as arguments."""
    wrong = [
        where(path, node.lineno)
        for path in python_files(f"moe/{room}")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ImportFrom) and node.module == "moe.recipe.sections" and "Run" in {alias.name for alias in node.names}
    ]
    check(wrong, f"moe/{room} imports Run")


def test_moe_itself_holds_its_entry_alone() -> None:
    files = sorted(path.name for path in (ROOT / "moe").glob("*.py"))
    check([f"moe/{name}" for name in files if name not in ("__init__.py", "__main__.py")], "every other file stands in a room")


def test_a_folder_holds_at_most_twenty_files() -> None:
    counts = Counter(path.parent.relative_to(ROOT).as_posix() for path in python_files(*PACKAGES))
    check(
        [f"{folder}: {number}" for folder, number in counts.items() if number > MOST_FILES], f"at most {MOST_FILES} files beside each other"
    )


def test_circles_are_found() -> None:
    assert circles({"a": ["b"], "b": ["c"], "c": ["b", "d"], "d": [], "e": ["a"]}) == [["b", "c"]]
    assert circles({"a": ["b", "c"], "b": ["c"], "c": []}) == []


def circles(graph: dict[str, list[str]]) -> list[list[str]]:
    """Return the circles: each a sorted list of modules that import each other, directly or through others."""
    reach = {name: reachable(graph, name) for name in graph}
    together = {tuple(sorted(other for other in reach[name] if name in reach[other])) for name in graph if name in reach[name]}
    return sorted(map(list, together))


def reachable(graph: dict[str, list[str]], start: str) -> set[str]:
    found: set[str] = set()
    ahead = list(graph[start])
    while ahead:
        name = ahead.pop()
        if name not in found:
            found.add(name)
            ahead += graph.get(name, [])
    return found


def test_deepspeed_is_imported_in_one_file() -> None:
    wrong = [
        f"{where(path, i.line)} imports {i.target}"
        for path in python_files(*PACKAGES)
        for i in imports(path)
        if i.target.split(".")[0] == "deepspeed" and (i.early or path.relative_to(ROOT).as_posix() not in IMPORTS_DEEPSPEED)
    ]
    check(wrong, f"deepspeed is imported inside functions of {sorted(IMPORTS_DEEPSPEED)} only: it takes seconds, and may be missing")


@pytest.mark.parametrize("start", QUICK)
def test_nothing_slow_is_imported_before_it_is_needed(start: str) -> None:
    """No module that `start` imports, directly or through others, imports a SLOW package: importing torch takes 2 seconds."""
    wrong: list[str] = []
    done: set[str] = set()
    ahead = [start]
    while ahead:
        name = ahead.pop()
        if name in done or name not in sources():
            continue
        done.add(name)
        early = [i for i in imports(sources()[name]) if i.early]
        wrong += [f"{where(sources()[name], i.line)} imports {i.target}" for i in early if i.target.split(".")[0] in SLOW]
        ahead += [i.target for i in early] + [name.rpartition(".")[0]]  # a package's __init__ runs before its modules
    check(wrong, f"reached from {start}")


def test_the_environment_is_read_where_it_is_listed() -> None:
    wrong = [
        where(path, node.lineno)
        for path in python_files(*PACKAGES)
        if path.relative_to(ROOT).as_posix() not in READS_THE_ENVIRONMENT
        for node in ast.walk(tree(path))
        if (isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv", "os.environb"))
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and {a.name for a in node.names} & {"environ", "getenv"})
    ]
    check(wrong, "pass the value in, or add the file to READS_THE_ENVIRONMENT with its reason")


def test_one_file_asks_torch_for_gpus() -> None:
    """Other files get a device from the world, an argument or a tensor, so a run that is told to use the CPU uses no GPU."""
    asks = re.compile(r"\bcuda\.(is_available|device_count)\b")
    found = [path for path in python_files(*PACKAGES) if asks.search(path.read_text())]
    assert [path.relative_to(ROOT).as_posix() for path in found] == ["parallel/process/process.py"]


def test_no_path_of_one_machine() -> None:
    homes = re.compile(r"(?<![\w.])/(home|Users)/[\w.-]+|(?<![\w.])/root/[\w.-]+|\b[A-Z]:\\\\?Users\b")
    here = [str(folder) for folder in (ROOT, Path.home()) if len(folder.parts) > 2]
    wrong = [
        where(path, number)
        for path in text_files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if homes.search(line) or any(folder in line for folder in here)
    ]
    check(wrong, "a path that exists on one machine only")


def test_every_module_says_what_it_is() -> None:
    wrong = [where(path, 1) for path in python_files(*PACKAGES, "tests") if not ast.get_docstring(tree(path))]
    check(wrong, "a file begins with its idea")


def test_links_in_the_docs_lead_somewhere() -> None:
    pages = [page for page in [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))] if page.is_file()]
    link = re.compile(r"!?\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)|(?:src|href)=\"([^\"]+)\"")
    broken = []
    for page in pages:
        text = re.sub(r"```.*?```|`[^`\n]*`", lambda code: "\n" * code.group().count("\n"), page.read_text(encoding="utf-8"), flags=re.S)
        for found in link.finditer(text):
            target, _, anchor = (found.group(1) or found.group(2)).partition("#")
            if re.match(r"[a-z][a-z0-9+.-]*:", target):
                continue
            file = (page.parent / target) if target else page
            if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
                broken.append(f"{where(page, text[: found.start()].count(chr(10)) + 1)} -> {found.group(1) or found.group(2)}")
    check(broken, "links to nothing")


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as links name them."""
    headings = re.findall(r"^#+ +(.+?) *$", re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
