"""No function changes a module's variables. Counters, caches and decisions of a run belong to an object of that run.

    global NAME      NAME = ...  NAME[...] = ...  NAME.x = ...  NAME.append(...)  setattr(NAME, ...)      @cache def f(...)
    NAME: a variable of the module, of a class in it, or of an imported module or class (os.environ, deepspeed's)

Checked in the syntax trees. Variables that exist once in a process are listed below, each with its reason: variables, caches, and
settings made by a call. A listed entry that no code needs fails too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from tests.laws.test_architecture import PACKAGES, ROOT, check, python_files, tree

CHANGED = {
    "moe/launch/pdsh.py: runner.PDSHRunner": "this process is that launcher, and does nothing else",
    "moe/launch/pdsh.py: runner.DEEPSPEED_ENVIRONMENT_PATHS": "likewise",
    "moe/launch/streams.py: sys": "a process has one standard output: what nobody reads any more is dropped, whoever prints it",
    "parallel/watch/watchdog.py: _of_process": "a process has one default process group, and one that watches it",
    "moe/records/tracker.py: threading.excepthook": "TensorBoard writes in a thread of its own, whose traceback nobody else can hold back",
    "moe/parallelize/compiled.py: torch._dynamo": "torch has one limit of the sizes for which a function is compiled",
    "moe/verify/peers/transformers.py: os.environ": "transformers reads a forked rank's variables there, as from a launcher",
    "moe/verify/peers/megatron_core.py: torch.cuda": "megatron-core asks there for a device; of a process that then ends",
    "moe/verify/peers/megatron_core.py: token_dispatcher.maybe_move_tensor_to_cpu": "likewise: the original converts CUDA tensors alone",
    "moe/verify/peers/torchtitan.py: sys.modules": "Python's table of modules: torchtitan's trainer imports packages for datasets",
    "moe/verify/peers/torchtitan.py: parallel_dims.device_type": "torchtitan keeps the kind of device in a module",
    "moe/launch/ready.py: os.environ": "a forked rank gets its variables there, as from a launcher",
    "parallel/numerics/weight_gradient.py: _open": "autograd calls a product's backward without arguments of ours",
    "moe/bench/gpu/__main__.py: os.environ": "Triton reads there whether its interpreter runs, as it loads",
    "parallel/process/deterministic.py: os.environ": "cuBLAS reads its workspace there",
    "parallel/process/process.py: os.environ": "torch, DeepSpeed and what they start read the rank and the meeting place there",
    "parallel/data/deepspeed.py: os.environ": "DeepSpeed takes its device from there while it is imported",
    "parallel/data/deepspeed.py: deepspeed.ops": "DeepSpeed's own table of ops that may be compiled",
    "parallel/data/deepspeed.py: compiler.compile": "a decorator of DeepSpeed that would import Inductor; put back after an import",
    "parallel/data/deepspeed.py: OpBuilder._loaded_ops": "DeepSpeed's own table of ops that are loaded",
    "parallel/data/deepspeed.py: groups.mpu": "DeepSpeed keeps its process groups in a module",
    "parallel/data/deepspeed.py: groups._EXPERT_PARALLEL_GROUP": "likewise",
    "parallel/data/deepspeed.py: groups._EXPERT_DATA_PARALLEL_GROUP": "likewise",
    "moe/cli/run/runs.py: os.environ": "ranks that a launcher starts inherit debug mode by it",
    "moe/__init__.py: sys.modules": "Python's table of modules: `parallel` is bound to our own, whatever the user's folder holds",
    "moe/launch/launch.py: os.environ": "a rank that was started by hand with --debug-collectives is as one that inherited it",
    "moe/recipe/plugin.py: sys.path": "the working folder, last, for a module that a recipe names and no other place has",
    "parallel/process/extensions.py: os.environ": "torch reads the folder of compiled extensions there, here and in what is started",
}
CACHED = {
    "parallel/mesh/grids.py: grid": "of a kind and numbers of ranks",
    "parallel/rehearse/order.py: _call": "equal calls of rehearsed ranks, which are compared until the command ends",
    "parallel/watch/audit.py: _weights": "fixed numbers, on a device",
    "parallel/rehearse/pretended.py: _written": "of an operator's schema",
    "parallel/rehearse/work.py: _is_product": "of a kernel's source",
    "moe/data/tokenizer_file.py: _ids_of": "of a file's name, size and time of change",
    "moe/recipe/section.py: _taken": "of a class and the name of its field",
    "moe/verify/hybrid.py: covering": "of the module's tables of values",
    "moe/verify/hybrid.py: covering_few": "of the module's tables of values",
    "moe/plan/time/collective_times.py: group_of": "of a plan's degrees and a cluster",
    "moe/plan/time/stage_time.py: _passes": "seconds follow from the sizes that are its arguments",
    "moe/plan/time/stage_time.py: own_program": "of a cluster file",
    "moe/plan/time/stage_time.py: _held": "parameters follow from the sizes that are its arguments",
    "moe/plan/time/stage_time.py: _untied": "of a network alone",
    "moe/plan/time/stage_time.py: _stage": "likewise",
    "moe/plan/time/stage_time.py: _kinds": "layers of ranks follow from the sizes that are its arguments",
    "moe/plan/job/counts.py: _layer": "parameters follow from the sizes that are its arguments",
    "moe/plan/job/counts.py: _ends": "likewise",
    "moe/plan/job/of_recipe.py: _cut": "layers of stages follow from the costs that are its arguments",
    "moe/plan/job/cut.py: _lists": "likewise",
    "moe/plan/job/cut.py: _by_work": "likewise",
    "moe/plan/pipeline.py: _checked": "a schedule of these sizes; four at most",
    "moe/plan/choose/candidates.py: scheduled": "of one call of fastest_degrees: a plan with each schedule",
    "moe/plan/job/in_flight.py: fullest_ranks": "the ranks that can be fullest follow from sizes alone",
    "moe/plan/time/pipeline_time.py: _makespan": "seconds follow from the times that are its arguments",
    "moe/plan/job/in_flight.py: made": "a schedule of these sizes; four at most",
    "moe/plan/memory/memory.py: _peak": "bytes follow from the sizes that are its arguments; few, of neighboring plans",
    "moe/plan/memory/moments.py: _ranks": "bytes follow from the sizes that are its arguments; few, of neighboring plans",
    "moe/plan/memory/moments.py: _in_flight": "what a schedule of these sizes holds",
    "moe/plan/memory/stages.py: _kinds": "of a network alone",
    "moe/plan/memory/stages.py: _counted": "of a network alone",
    "moe/plan/memory/temporary.py: layer_bytes": "bytes follow from the sizes that are its arguments",
    "moe/plan/memory/temporary.py: outside_of": "elements and bytes follow from the sizes that are its arguments",
    "moe/plan/time/pipeline_time.py: _tails": "the end of an order follows from the sizes that are its arguments",
    "moe/plan/machine/device.py: _product": "likewise",
    "moe/plan/time/cost.py: ranges": "of the shipped file alone",
    "moe/plan/job/in_flight.py: in_flight": "what a schedule of these sizes holds",
    "moe/plan/job/in_flight.py: _found": "what a schedule of these sizes holds",
    "parallel/pipeline/schedules/interleaved.py: _peaks": "what interleaved stages of these sizes hold",
    "moe/plan/time/pipeline_time.py: homes_at": "ranks of stages follow from the sizes that are its arguments",
    "moe/plan/time/layer_time.py: _only": "of a network alone",
    "moe/plan/job/network.py: _getter": "of names alone",
    "moe/plan/job/network.py: _plan_with": "a plan of the settings that are its arguments",
    "moe/plan/time/layer_time.py: _layer": "seconds follow from the sizes that are its arguments",
    "moe/plan/search/strategies.py: change": "the cheapest change between two cuts, of both, the bytes and the mesh",
    "moe/plan/time/layer_time.py: head_time": "likewise",
    "moe/plan/time/layer_time.py: join_time": "likewise",
    "parallel/annotations/resharding.py: _cheapest": "the steps between two lies of a tensor follow from both, its shape and the mesh",
    "moe/convert/huggingface/tensors.py: _pattern": "of a pattern alone",
    "moe/experts/dispatch/placement.py: place_of_expert": "a function of its arguments alone",
    "moe/recipe/keys.py: known_keys": "of the classes of a recipe",
    "moe/recipe/keys.py: facts": "what a key's fields say",
    "moe/recipe/keys.py: _values_that_switch_on": "values of a type",
    "moe/recipe/idle.py: _with_reader": "the keys of the schema",
    "moe/recipe/other_tools.py: _table": "of the tables in other_names.py",
    "moe/recipe/other_tools.py: _nearest": "of the tables in other_names.py",
    "parallel/tensor/style.py: _regex": "of a pattern alone",
}
SETTINGS = {
    "signal.signal": {
        "moe/train/start/place.py": "a process has one handler for each signal; put back after training",
        "moe/launch/start.py": "likewise, while a launch lasts",
        "moe/launch/launch.py": "a rank that is leaving must get to say how it ended",
        "moe/launch/early.py": "a process has one handler for each signal, until training installs its own",
        "moe/__main__.py": "Ctrl-C must not raise an exception within an import; put back after it",
        "moe/launch/processes.py": "a rank gets a terminal's Ctrl-C though a shell ignored it for its children",
        "moe/cli/energy.py": "clocks are given back; the handler is put back",
        "moe/data/sandbox.py": "of a process that runs one chat template: Ctrl-C is for its parent",
        "moe/bench/gpu/__main__.py": "a time limit of a measurement; the handler is put back",
    },
    "torch.set_num_threads": {
        "parallel/process/process.py": "a process has one pool of threads, and ranks share the machine's cores",
        "parallel/process/fork.py": "one thread a rank",
        "moe/cli/doctor.py": "before ranks are forked, and back",
        "moe/verify/verify.py": "ranks are forked, and a forked process must not inherit a pool of threads",
        "moe/verify/random_runs.py": "likewise",
        "moe/verify/types/__init__.py": "likewise",
        "moe/verify/peer.py": "likewise",
        "moe/calibrate/calibrate.py": "likewise; and a rank that measures how much threads help",
        "moe/bench/": "likewise; what is compared gets equally many",
    },
    "warnings.filterwarnings": {
        "parallel/data/deepspeed.py": "its calls of names that torch warns of, wherever they are made",
        "parallel/data/fsdp.py": "torch's warning of a view that it handles",
    },
    ".mallopt": {"parallel/process/libc.py": "the C library has one heap for the process"},
    ".prctl": {"parallel/process/libc.py": "a rank dies with who started it"},
    "logging.disable": {
        "moe/launch/torchrun.py": "of a process that is torchrun and nothing else",
        "moe/verify/peers/torchtitan.py": "of a process that compares with torchtitan and nothing else",
    },
    "atexit.register": {"moe/records/progress.py": "a terminal's cursor must come back however the process ends"},
    "torch.use_deterministic_algorithms": {"parallel/process/deterministic.py": "torch has one such setting; put back after training"},
    "resource.setrlimit": {
        "moe/launch/environment.py": "ranks inherit the limit of open files of the process that starts them",
        "moe/data/sandbox.py": "of a process that runs one chat template",
    },
    "torch.manual_seed": {
        "moe/bench/training/step.py": "a peer draws its weights from torch's generator",
        **{
            f"moe/verify/peers/{name}.py": "likewise, in forked processes"
            for name in ("deepspeed", "megatron_core", "torch", "torchtitan", "transformers")
        },
    },
}
CHANGES = {"add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem"}
CHANGES |= {"remove", "reverse", "setdefault", "sort", "subtract", "update"}

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
IMPORTS, ASSIGNS, ASSIGNS_TO_ONE = (ast.Import, ast.ImportFrom), (ast.Assign, ast.Delete), (ast.AugAssign, ast.AnnAssign)


def changed(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, variable) for each change that a function makes to a variable of its module or to an imported one."""
    of_module = _bound(_own(module.body)) | _imported(module)
    for node in module.body:
        yield from _in(node, of_module)


def _in(node: ast.AST, outer: set[str]) -> Iterator[tuple[int, str]]:
    """Yield (line, variable) for each change in the functions of `node`. outer: variables of the module and of enclosing functions."""
    for child in [node] if isinstance(node, FUNCTIONS) else (n for n in _own([node]) if isinstance(n, FUNCTIONS)):
        body = child.body if isinstance(child.body, list) else [child.body]
        own = _own(body)
        told = {name for n in own if isinstance(n, ast.Global) for name in n.names}
        arguments = [a.arg for a in ast.walk(child.args) if isinstance(a, ast.arg)]
        seen = ((outer | _imported(*body)) - set(arguments) - (_bound(own) - told)) | told
        for n in own:
            if isinstance(n, FUNCTIONS):
                yield from _in(n, seen)
            elif isinstance(n, ast.Global):
                yield from ((n.lineno, name) for name in n.names)
            else:
                yield from (
                    (n.lineno, _short(target)) for target in _targets(n) if _root(target) in seen and not isinstance(target, ast.Name)
                )


def _own(body: Iterable[ast.AST]) -> list[Any]:
    """Return every node of a function's body. An inner function is one node; its body is left out."""
    found = list(body)
    for node in found:  # which grows
        if not isinstance(node, FUNCTIONS):
            found.extend(ast.iter_child_nodes(node))
    return found


def _bound(own: list[Any]) -> set[str]:
    """Return the names that the nodes `own` of a body bind."""
    found = {n.id for n in own if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return found | {n.name for n in own if isinstance(n, NAMED)}


def _imported(*nodes: ast.AST) -> set[str]:
    imports = (n for node in nodes for n in ast.walk(node) if isinstance(n, IMPORTS))
    return {(alias.asname or alias.name).split(".")[0] for n in imports for alias in n.names}


def _targets(node: ast.AST) -> list[ast.expr]:
    """Return the expressions to which a statement or call assigns."""
    if isinstance(node, ASSIGNS):
        return [t for target in node.targets for t in (target.elts if isinstance(target, ast.Tuple | ast.List) else [target])]
    if isinstance(node, ASSIGNS_TO_ONE):
        return [node.target]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
        return [ast.Subscript(node.func.value, ast.Constant(0))]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
        return [ast.Subscript(node.args[0], ast.Constant(0))]
    return []


def _root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _short(node: ast.expr) -> str:
    """Return the variable in a changed expression: `os.environ` for os.environ["RANK"]."""
    while isinstance(node, ast.Subscript) or (isinstance(node, ast.Attribute) and not isinstance(node.value, ast.Name)):
        node = node.value
    return ast.unparse(node)


def compare(found: dict[str, int], listed: dict[str, str], rule: str) -> None:
    """Fail with `rule` unless `found` (variable -> line) and `listed` (variable -> reason) have the same keys."""
    wrong = [f"{what} (line {line})" for what, line in found.items() if what not in listed]
    check(wrong + [f"{what}: listed, and not there" for what in listed if what not in found], rule)


def _setting(function: ast.expr) -> str:
    """Return the called function as text: `signal.signal`; only `.mallopt` if it is a method of another call's result."""
    return ast.unparse(function) if _root(function) else f".{function.attr}" if isinstance(function, ast.Attribute) else ""


def modules() -> Iterator[tuple[str, ast.Module]]:
    return ((path.relative_to(ROOT).as_posix(), tree(path)) for path in python_files(*PACKAGES))


def test_functions_change_no_name_of_a_module() -> None:
    found = {f"{file}: {what}": line for file, module in modules() for line, what in changed(module)}
    compare(found, CHANGED, "give it to an object that the run owns, or list it in CHANGED with the reason why it is the whole process's")


def test_caches_hold_nothing_of_a_run() -> None:
    found = {
        f"{file}: {node.name}": node.lineno
        for file, module in modules()
        for node in ast.walk(module)
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
        if "cache" in ast.unparse(decorator) and "cached_property" not in ast.unparse(decorator)
    }
    compare(found, CACHED, "a cached function remembers for the whole process: list it in CACHED if its result follows from its arguments")


def test_settings_of_the_process_are_listed() -> None:
    found = {
        f"{call}: {next((f for f in SETTINGS[call] if f.endswith('/') and file.startswith(f)), file)}": node.lineno
        for file, module in modules()
        for node in ast.walk(module)
        if isinstance(node, ast.Call) and (call := _setting(node.func)) in SETTINGS
    }
    listed = {f"{call}: {file}": why for call, files in SETTINGS.items() for file, why in files.items()}
    compare(found, listed, "a setting of the whole process: list it in SETTINGS with its reason")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("def f():\n    global n\n    n = 1", ["n"]),
        ("n = {}\ndef f():\n    n['a'] = 1", ["n"]),
        ("n = {}\ndef f():\n    n['a'].b += 1", ["n"]),
        ("n = []\nclass C:\n    def f(self):\n        n.append(1)", ["n"]),
        ("n = []\nclass C:\n    def f(self):\n        pass\n    def g(self):\n        n.append(1)", ["n"]),
        ("n = []\nclass C:\n    def f(self):\n        def g():\n            n.pop()\n    def h(self):\n        n.clear()", ["n", "n"]),
        ("n = []\ndef f():\n    def g():\n        n.clear()", ["n"]),
        ("n = []\nf = lambda: n.append(1)", ["n"]),
        ("class C: pass\ndef f():\n    C.x = 1", ["C.x"]),
        ("class C: pass\ndef f():\n    setattr(C, 'x', 1)", ["C"]),
        ("def f():\n    import os\n    os.environ['A'] = 'b'", ["os.environ"]),
        ("def f():\n    from a import b\n    b.c = 1", ["b.c"]),
        ("n = []\ndef f(n):\n    n.append(1)", []),
        ("n = []\ndef f():\n    n = []\n    n.append(1)", []),
        ("n = []\ndef f():\n    n = []\n    def g():\n        n.append(1)", []),
        ("n = []\nn.append(1)\nn[0] = 2", []),
        ("class C:\n    def f(self):\n        self.n = [1]\n        self.n.append(2)", []),
    ],
)
def test_changes_are_found(text: str, what: list[str]) -> None:
    assert [name for _, name in changed(ast.parse(text))] == what
