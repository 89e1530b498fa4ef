"""The built wheel, installed into an empty folder: documented commands find their recipes, and errors name pages that exist."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN = """
import contextlib, io, json, shlex, sys
from moe.cli.main import main

found = {}
for words in json.load(sys.stdin):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = main(shlex.split(words))
        except SystemExit as left:
            code = left.code
    found[words] = [code, said.getvalue()]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the site-packages folder of an installation from the wheel, built from a copy: setuptools writes next to the sources."""
    pytest.importorskip("setuptools", "77", reason="a wheel is built by setuptools 77 or newer")
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("__pycache__", "*.json", "*.png", "log.md")
    for name in ("moe", "parallel", "recipes", "docs"):
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source" / name)
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder), str(folder / "source")]
    subprocess.run(build, check=True, capture_output=True, timeout=200)
    (wheel,) = folder.glob("*.whl")
    install = [*pip, "install", "--no-deps", "--no-index", "--no-compile", "--ignore-installed", "--prefix", str(folder / "prefix")]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True, timeout=200)
    (found,) = (folder / "prefix").rglob("site-packages")
    return found


def test_documented_commands_run_from_the_wheel(site: Path, tmp_path: Path) -> None:
    """These commands succeed: `moe recipes`, `moe show` for each recipe that a page names, each documented `moe plan ... --as-is`, and
    `moe simulate` with several schedules."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    published = sorted(set(re.findall(r"\bpublished/[a-z0-9]+(?:_[a-z0-9]+)+\b", text)))
    priced = re.findall(r"^(?:\$ )?moe (plan published/\S+ --cluster \S+ --as-is)(?= *(?:#.*)?$)", text, flags=re.M)
    assert len(published) > 3 and priced
    several = re.findall(r"^moe (simulate gpipe 1f1b .*)$", text, flags=re.M)
    assert several
    commands = [
        "recipes",
        *(words.partition(" #")[0] for words in several),
        *(f"show {name}" for name in ["switch_tiny", *published]),
        *sorted(set(priced)),
    ]
    wrong = {words: said for words, (code, said) in in_wheel(site, tmp_path, RUN, json.dumps(commands)).items() if code}
    assert wrong == {}


def test_a_run_is_trained_used_and_written_from_the_wheel(site: Path, tmp_path: Path) -> None:
    """The README's verbs for a run, one after another, with a tiny Mixtral."""
    sizes = "--model.num_layers 1 --model.d_model 32 --model.num_heads 2 --model.d_ff 48 --model.max_length 16 --experts.num_experts 4"
    mixtral = "--model.ffn swiglu --model.norm rmsnorm --model.moe_every 1 --model.tied_embeddings false --router.preset mixtral"
    less = "--train.global_batch 2 --train.eval_sequences 2 --train.sample_tokens 0 --train.measure_speed false --optimizer.warmup_steps 0"
    (tmp_path / "a.txt").write_text("one two three four " * 99)
    train = f"train switch_tiny --data.path a.txt {sizes} {mixtral} {less} --train.steps 2"
    commands = [
        f"{train} --out runs/a",
        f"{train} --out runs/b --init_from runs/a",
        "generate runs/a --prompt one --tokens 2",
        "eval runs/a",
        "report runs/a runs/b",
        "doctor runs/a",
        "convert runs/a hf:mixtral",
        "convert hf:mixtral runs/back",
        f"rehearse switch_tiny --world 2 {sizes} {mixtral} --train.global_batch 2",
    ]
    wrong = {words: said for words, (code, said) in in_wheel(site, tmp_path, RUN, json.dumps(commands)).items() if code}
    assert wrong == {} and (tmp_path / "runs/a/report.html").is_file() and (tmp_path / "mixtral/model.safetensors").is_file()


def test_measurements_run_from_the_wheel(site: Path, tmp_path: Path) -> None:
    """A row of `moe verify`, a plan of clocks, a layer of `moe bench` and a calibration, small; all measurements are imported."""
    smaller = """
import importlib
from moe.bench.layers import dispatch, layers
from moe.calibrate import calibrate, kernels, own_step
from moe.cli.run.runs import bench_file, bench_names

for name in bench_names():
    importlib.import_module(f"moe.bench.{bench_file(name).parent.name}.{bench_file(name).stem}")
dispatch.SHAPES["cpu"] = (layers.Shape(64, 16, 32, 4, 2),)
kernels.SECONDS, kernels.PRODUCTS, kernels.STREAM_BYTES = 0.01, ((64, 32, 32), (256, 128, 64)), 2**20
calibrate.SIZES, calibrate.SHARDED = (4096, 65536), (1, 32, 64, 2, 32, 8)
calibrate.STEPS = ((1, 32, 64, 2, 32, 2), (2, 64, 128, 2, 48, 4), (1, 96, 256, 2, 64, 4))
own_step.STEPS, own_step.WARM_UP = 2, 1
"""
    commands = [
        "energy --stages 2 --microbatches 2",
        "plan --calibrate --nproc 1 --out machine.yaml",  # before torch computes here: it forks ranks
        "verify --kinds data --only 'switch dp1 ep1 m1 ddp fp32' --nproc 1",
        "bench dispatch --only 'fp32 balanced' --peers none --rounds 1 --json layer.json",
    ]
    wrong = {words: said for words, (code, said) in in_wheel(site, tmp_path, smaller + RUN, json.dumps(commands)).items() if code}
    assert wrong == {} and (tmp_path / "layer.json").is_file() and (tmp_path / "machine.yaml").is_file()


def test_the_command_of_the_wheel_starts(site: Path, tmp_path: Path) -> None:
    (command,) = site.parents[2].glob("bin/moe")
    ran = subprocess.run(
        [sys.executable, str(command), "--version"], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(site)}, capture_output=True
    )
    assert ran.returncode == 0 and ran.stdout.startswith(b"moe-parallel "), ran.stderr


def test_errors_of_an_installed_package_name_pages_that_are_there(site: Path, tmp_path: Path) -> None:
    code = """
import json, sys
from parallel.errors import BadInput
print(json.dumps([str(BadInput("a", got=1, needed="2", fix=f"see: {page}")) for page in json.load(sys.stdin)]))
"""
    # in code, not in docstrings: a name of a page before the end of a string
    texts = [path.read_text("utf-8") for part in ("moe", "parallel") for path in (ROOT / part).rglob("*.py")]
    pages = {page for text in texts for page in re.findall(r"""(docs/\w+/\w+\.(?:md|py))["')]""", text)}
    assert len(pages) > 5 and "docs/use/dpo.py" in pages
    listed = sorted(pages)
    for page, said in zip(listed, in_wheel(site, tmp_path, code, json.dumps(listed)), strict=True):
        assert Path(said.rpartition(" ")[2]).read_text(encoding="utf-8") == (ROOT / page).read_text(encoding="utf-8")


def in_wheel(site: Path, folder: Path, code: str, given: str) -> Any:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PYTHONPATH": str(site)}
    ran = subprocess.run(
        [sys.executable, "-P", "-c", code], input=given, cwd=folder, env=environment, capture_output=True, text=True, timeout=200
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)
