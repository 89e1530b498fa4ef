"""Before any test: one thread a process, the CPU even on a machine with a GPU, no place in somebody else's job.

Ranks are forks of the test process (tests/support/ranks.py). A fork inherits locks but not threads, so torch must never have
started its thread pool here; two cores shared by four ranks are also faster with one thread each.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import resource
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

for _name in [n for n in os.environ if n.startswith(("SLURM_", "OMPI_", "TORCHELASTIC_", "MOE_LAUNCH"))]:
    del os.environ[_name]
for _name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(_name, None)
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", DS_ACCELERATOR="cpu", MPLBACKEND="agg")
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asking for GPUs must not start CUDA: forks could not use it any more

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

from tests.support.memory import return_freed_memory, use_large_pages  # noqa: E402

# Without a GPU Triton's kernels run in its interpreter. Triton decides so as it is first imported, its own library included, by
# whichever test comes first; so for the whole process, and here. Nothing else runs Triton on a CPU. With a GPU they are compiled.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

pytest_plugins = ["tests.support.times", "tests.support.alone"]

# Modules that a rank imports when it builds a model, by itself if its test's process has not done so.
IN_EVERY_RANK = (
    "deepspeed.module_inject.auto_ep_layer",
    "moe.experts.dispatch.steps",
    "moe.kernels.cpu",
    "moe.kernels.grouped",
    "numpy.ma",
    "parallel.data.fsdp",
    "parallel.data.zero3",
    "torch._dynamo",
)

torch.set_num_threads(1)
torch.set_num_interop_threads(1)
gc.set_threshold(50_000, 20, 20)  # also in forked ranks: automatic collections took 8 % of their processor time

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts `pytest &` so, and forked ranks would not hear Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A shared machine makes any single example slow, and no suite should fail by the luck of a draw: `MOE_SEARCH=1 pytest` draws anew.
settings.register_profile(
    "here", max_examples=50, deadline=None, derandomize="MOE_SEARCH" not in os.environ, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("here")
# Hypothesis would also draw the constants of all loaded modules: each process would parse 500 files, and examples would change with them.
# These names are private (Hypothesis 6.170). A version without them draws constants, which only takes longer.
with contextlib.suppress(ImportError):
    from hypothesis.internal.conjecture import providers

    if hasattr(providers, "_local_constants"):
        providers._get_local_constants = lambda: providers._local_constants


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for training runs of about a second, with a text and a cache. Runs end without slow reports (tests/support/trained.py)."""
    from tests.support import trained

    with pytest.MonkeyPatch.context() as patch:
        yield trained.home(tmp_path_factory.mktemp("home"), patch)


@pytest.fixture
def five_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of what `moe verify` takes: enough for stages that use older weights."""
    _take_steps(5, monkeypatch)


@pytest.fixture
def two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """For parts of the model: the second step reads weights and biases that the first has moved. Moments and loss scale are engines'."""
    _take_steps(2, monkeypatch)


@pytest.fixture
def three_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moments, loss scale and biases have moved, and what a step leaves has been read again, also after a skipped one."""
    _take_steps(3, monkeypatch)


def _take_steps(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also draw two runs with random rounding at first, not five: limits become narrower, and `Bound.share` draws more where needed."""
    from moe.verify import expected, layouts, twin

    monkeypatch.setattr(expected, "DRAWS", 2)
    monkeypatch.setattr(layouts, "STEPS", number)
    monkeypatch.setitem(twin.reference.__kwdefaults__, "steps", number)


@pytest.fixture(autouse=True)
def process_as_it_was(request: pytest.FixtureRequest) -> Iterator[None]:
    """Environment and signal handlers are restored after each test: a run in this process changes both for all later processes. Only a test
    with the mark gpu may use a GPU."""
    environment = dict(os.environ)
    if request.node.get_closest_marker("gpu"):
        del os.environ["DS_ACCELERATOR"]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)}
    yield
    now = dict(os.environ)
    for name in now.keys() - environment.keys() - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]
    os.environ.update(environment.items() - now.items())
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture(autouse=True, scope="module")
def few_objects_to_visit(request: pytest.FixtureRequest) -> Iterator[None]:
    """Exclude all objects that a module's tests leave from later garbage collections and from `gc.get_objects`, which visit each. Return
    memory to the system, also that of results in the module's caches. If the module has forked, mend large pages, which forks split."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    yield
    for value in vars(request.module).values():
        if hasattr(value, "cache_clear") and value.__module__ == request.module.__name__:
            value.cache_clear()
    gc.collect()
    return_freed_memory()
    gc.freeze()
    if len(request.session.items) > 500 and resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime > before:
        use_large_pages()


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Collect tests, and import their modules, without garbage collections, which would visit all modules' objects again and again."""
    gc.disable()
    try:
        import_in_turn(session.config)
        return (yield)
    finally:
        gc.enable()


def import_in_turn(config: pytest.Config) -> None:
    """Import all test modules in a worker, if it will run the whole suite. Each worker begins with another part of the list, so it later
    reads from __pycache__ the modules that others have compiled, with rewritten assertions, which takes 9 s for all of them."""
    worker = getattr(config, "workerinput", None)
    if worker is None or config.args != config.getini("testpaths"):
        return
    paths = sorted(Path(__file__).parent.rglob("test_*.py"))
    first = len(paths) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    for path in paths[first:] + paths[:first]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # the collection tells
            importlib.import_module(".".join(path.relative_to(config.rootpath).with_suffix("").parts))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that run alone are first, when no other test must end before them; then long ones, so that no worker ends with one."""
    first = ("alone", "long")
    items.sort(key=lambda item: next((place for place, name in enumerate(first) if item.get_closest_marker(name)), len(first)))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU, and torch sees none"))


@pytest.hookimpl(tryfirst=True)  # before a worker says that it is ready: the first tests run alone, also without imports of other workers
def pytest_collection_finish(session: pytest.Session) -> None:
    """Prepare this process for forks: they need not import again what it has imported, nor visit its objects in garbage collections."""
    if len(session.items) > 500:
        for name in IN_EVERY_RANK:
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    if len(session.items) > 500:
        use_large_pages()
