"""Files of docs/use/cluster/: their syntax, fields that SLURM, Docker, Kubeflow and SkyPilot know, and commands of this project."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from moe.checks.advice import check_for_user
from moe.cli.flags import read_words
from moe.cli.verbs import VERBS
from moe.launch import exit_codes
from moe.launch.arguments import parse
from moe.recipe.load import load
from moe.recipe.overrides import take_overrides

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs/use/cluster"
PAGE = (ROOT / "docs/use/cluster.md").read_text(encoding="utf-8")
SBATCH = (FOLDER / "job.sbatch").read_text(encoding="utf-8")
# options of `man sbatch`, and instructions of the Dockerfile reference, that the files may use
OPTIONS = {"job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time", "signal", "requeue", "open-mode", "output"}
INSTRUCTIONS = {"ARG", "FROM", "RUN", "ENV", "COPY", "WORKDIR", "CMD"}
# field -> fields below it, or the type of its value. A name that ends in ! is required. From trainer.kubeflow.org/v1alpha1 (TrainJobSpec,
# TrainingRuntimeSpec), jobset.x-k8s.io/v1alpha2 and SkyPilot's YAML reference.
META = {"name!": str, "labels": dict}
RESOURCES = {"requests": dict, "limits": dict}
TRAINER = {"numNodes": int, "image": str, "command": list, "args": list, "env": list, "resourcesPerNode": RESOURCES}
JOB_SET = {"failurePolicy": {"maxRestarts": int}, "replicatedJobs!": list}
SCHEMAS: dict[str, Any] = {
    "TrainJob": {
        "apiVersion!": str,
        "kind!": str,
        "metadata!": META,
        "spec!": {"runtimeRef!": {"apiGroup": str, "kind": str, "name!": str}, "trainer": TRAINER},
    },
    "TrainingRuntime": {
        "apiVersion!": str,
        "kind!": str,
        "metadata!": META,
        "spec!": {"mlPolicy": {"numNodes": int, "torch": {"numProcPerNode": (int, str)}}, "template!": {"spec!": JOB_SET}},
    },
}
POD = {"restartPolicy": str, "terminationGracePeriodSeconds": int, "containers!": list, "volumes": list}
REPLICATED = {"name!": str, "template!": {"metadata": {"labels": dict}, "spec!": {"backoffLimit": int, "template!": {"spec!": POD}}}}
SKY = {
    "name": str,
    "num_nodes": int,
    "workdir": str,
    "resources": {"infra": str, "accelerators": str},
    "volumes": dict,
    "setup": str,
    "run!": str,
}


def faults(value: Any, schema: Any, at: str = "") -> list[str]:
    """Return a line for each field that is unknown, missing or of a wrong type."""
    if not isinstance(schema, Mapping):
        return [] if isinstance(value, schema) else [f"{at}: {value!r}"]
    if not isinstance(value, dict):
        return [f"{at}: {value!r} is no mapping"]
    known = {name.rstrip("!"): below for name, below in schema.items()}
    found = [f"{at}.{name[:-1]}: missing" for name in schema if name.endswith("!") and name[:-1] not in value]
    found += [f"{at}.{name}: unknown" for name in value.keys() - known.keys()]
    return found + [line for name in value.keys() & known.keys() for line in faults(value[name], known[name], f"{at}.{name}")]


def check_rank(words: list[str]) -> None:
    """Parse the arguments of a rank, load its recipe and check it for two nodes of 8 GPUs. Raises BadInput."""
    given = parse(words)
    check_for_user(load(given.recipe, given.overrides)[0], 16, {})
    assert given.out is not None


def test_schema_finds_faults() -> None:
    schema = {"a!": {"b": int}, "c": str}
    assert faults({"a": {"b": 1}, "c": "x"}, schema) == []
    assert sorted(faults({"a": {"b": "1", "d": 2}}, schema)) == [".a.b: '1'", ".a.d: unknown"]
    assert faults({"c": "x"}, schema) == [".a: missing"] and faults([], schema) == [": [] is no mapping"]


def test_the_batch_script_is_bash_with_known_options_and_requeues_what_was_stopped() -> None:
    subprocess.run(["bash", "-n", str(FOLDER / "job.sbatch")], check=True)
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", SBATCH, flags=re.M))
    assert options.keys() == OPTIONS and len(re.findall("^#SBATCH", SBATCH, flags=re.M)) == len(OPTIONS)
    assert re.fullmatch(r"\d+:\d\d:\d\d", options["time"]) and re.fullmatch(r"TERM@\d+", options["signal"])
    assert options["ntasks-per-node"] == options["gpus-per-node"]  # a rank for each GPU
    assert f"[ $code -eq {exit_codes.STOPPED} ]; then" in SBATCH and "scontrol requeue" in SBATCH.split(f"-eq {exit_codes.STOPPED}")[1]
    named = re.findall(r"sbatch job\.sbatch (\w[^`\n]+)", SBATCH + PAGE)
    assert len(named) == 2
    for words in named:
        check_rank(words.split())


def test_the_dockerfile_has_its_stages_and_installs_extras_that_exist() -> None:
    text = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    assert {line.split()[0] for line in lines} == INSTRUCTIONS
    assert re.findall(r"^FROM \S+ AS (\w+)$", text, flags=re.M) == ["cpu", "cuda"]
    assert set(re.findall(r"^FROM \$\{(\w+)\}", text, flags=re.M)) == set(re.findall(r"^ARG (\w+)=\S+$", text, flags=re.M))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert set(re.findall(r"/opt/moe-parallel\[(\w+)\]", text)) == {"gpu"} <= extras.keys()
    moe = [json.loads(words) for words in re.findall(r"^CMD (.+)$", text, flags=re.M)] + [
        re.findall(r" moe:cuda (moe .+)$", text, flags=re.M)[0].split()
    ]
    assert len(moe) == 3
    for program, verb, *words in moe:
        rest, _ = take_overrides(words)
        assert program == "moe" and isinstance(read_words(verb, VERBS[verb], rest), VERBS[verb])


def test_an_image_leaves_out_what_git_ignores() -> None:
    """Otherwise `COPY .` would put runs, and an environment of gigabytes, into the image."""
    left_out = {name: (ROOT / name).read_text(encoding="utf-8").splitlines() for name in (".gitignore", ".dockerignore")}
    ignored = {line.rstrip("/") for line in left_out[".gitignore"] if line and not line.startswith("#")}
    assert "runs" in ignored and {line.removeprefix("**/") for line in left_out[".dockerignore"] if line[0] != "#"} == ignored | {".git"}


def test_kubeflows_objects_have_known_fields_and_belong_together() -> None:
    runtime, job = yaml.safe_load_all((FOLDER / "trainjob.yaml").read_text(encoding="utf-8"))
    for one in (runtime, job):
        assert one["apiVersion"] == "trainer.kubeflow.org/v1alpha1" and faults(one, SCHEMAS[one["kind"]]) == []
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert faults(replicated, REPLICATED) == []
    pod = replicated["template"]["spec"]["template"]["spec"]
    mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]} and mounts["shm"] == "/dev/shm"
    assert job["spec"]["runtimeRef"] == {"apiGroup": "trainer.kubeflow.org", "kind": runtime["kind"], "name": runtime["metadata"]["name"]}
    assert job["spec"]["trainer"]["command"] == ["torchrun", "-m", "moe.launch.launch"]
    check_rank(job["spec"]["trainer"]["args"])


def test_skypilots_task_has_known_fields_and_runs_ranks() -> None:
    task = yaml.safe_load((FOLDER / "skypilot.yaml").read_text(encoding="utf-8"))
    assert faults(task, SKY) == []
    for script in (task["setup"], task["run"]):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    words = shlex.split(task["run"].replace("\\\n", " "))
    at = words.index("moe.launch.launch")
    known = ["--nnodes", "--nproc_per_node", "--node_rank", "--master_addr", "--master_port"]
    assert words[1:at:2] == [*known, "-m"]
    check_rank(words[at + 1 :])
    assert words[-1].startswith(next(iter(task["volumes"])))


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_the_page_names_every_file(path: Path) -> None:
    assert f"(cluster/{path.name})" in PAGE
