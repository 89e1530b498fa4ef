"""Verbs on a run that exists, and on this toolkit: verify, generate, eval, report, doctor."""

from __future__ import annotations

import dataclasses
import importlib
import os
from pathlib import Path

from moe.cli.run.call import call, run_dir, text
from moe.cli.verbs import Doctor, Eval, Generate, Report, Verify
from moe.launch import exit_codes
from parallel.errors import BadInput


def verify(flags: Verify, _: dict[str, str]) -> int:
    if flags.nproc < 1:
        raise BadInput("--nproc", got=flags.nproc, needed="at least 1 process", fix="--nproc 2")
    if flags.timeout_s is not None and not 0 < flags.timeout_s < float("inf"):
        raise BadInput("--timeout_s", got=flags.timeout_s, needed="seconds, more than 0", fix="--timeout_s 600")
    if flags.debug_collectives:
        from parallel.mesh.debug_collectives import DEBUG

        os.environ[DEBUG] = "20"  # seconds; ranks are forked from this process, so they inherit it
    if flags.recipe is not None and flags.kinds != Verify.kinds:
        raise BadInput(
            "--kinds", got=f"{flags.kinds} with --recipe", needed="no --kinds: the recipe decides which methods run", fix="remove --kinds"
        )
    return call(
        "moe.verify.verify",
        nproc=flags.nproc,
        json=text(flags.json),
        only=flags.only,
        kinds=flags.kinds,
        timeout_s=flags.timeout_s,
        go_on=flags.go_on,
        recipe=flags.recipe,
    )


def generate(flags: Generate, _: dict[str, str]) -> int:
    given = {name: value for name, value in dataclasses.asdict(flags).items() if value is not None}
    given |= {name: str(given[name]) for name in ("prompt_file", "json") if name in given}
    for name, low in (("tokens", 1), ("samples", 1), ("temperature", 0), ("top_k", 1), ("seed", 0), ("step", 0)):
        if name in given and given[name] < low:
            raise BadInput(f"--{name}", got=given[name], needed=f"at least {low}", fix=f"--{name} {low}")
    return call("moe.train.use.generate", run_dir(given.pop("run_dir"), "checkpoints"), **given)


def evaluate(flags: Eval, overrides: dict[str, str]) -> int:
    given = {name: value for name in ("sequences", "step") if (value := getattr(flags, name)) is not None}
    for name, value in given.items():
        if value < 0:
            raise BadInput(f"--{name}", got=value, needed="at least 0", fix=f"--{name} 0")
    return call("moe.train.use.evaluate", run_dir(flags.run_dir, "checkpoints"), overrides=overrides, json=text(flags.json), **given)


def report(flags: Report, _: dict[str, str]) -> int:
    if flags.other is not None:
        if flags.json is not None:
            raise BadInput("--json", got="it with two runs", needed="one run: --json lists the files of its report", fix="remove --json")
        first, second = (Path(run_dir(folder, "metrics.jsonl")) for folder in (flags.run_dir, flags.other))
        print(f"picture: {importlib.import_module('moe.report.compare').beside(first, second)}")
        return exit_codes.DONE
    page = importlib.import_module("moe.report").main(run_dir(flags.run_dir, "metrics.jsonl"), json=text(flags.json))
    print(f"report: {page}")
    return exit_codes.DONE


def doctor(flags: Doctor, _: dict[str, str]) -> int:
    if flags.trace is not None:
        return call("moe.cli.trace", str(flags.trace), json=text(flags.json))
    return call("moe.cli.doctor", json=text(flags.json))
