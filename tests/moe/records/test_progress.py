"""The live display shows all numbers at every width without wrapping, and its failures never stop training."""

from __future__ import annotations

import io
import math
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from moe.records import heat
from moe.records.panel import MAX_POINTS, State, panel, plain_step, sparkline, worst
from moe.records.progress import Progress, ending
from moe.records.summary import clock, count, duration, percent, printable, size, summary_rows
from tests.support.fabricate import eval_line, run_folder, run_lines, step_line, summary

LOADS = st.lists(st.floats(0, 1, allow_subnormal=False), min_size=1, max_size=200)


def terminal(width: int = 80, height: int = 40) -> Console:
    return Console(width=width, height=height, force_terminal=True, color_system="truecolor", file=io.StringIO(), _environ={})


def log(encoding: str = "utf-8") -> tuple[Console, io.BytesIO]:
    raw = io.BytesIO()
    return Console(file=io.TextIOWrapper(raw, encoding=encoding), width=80, _environ={}), raw


def shown(state: State, width: int = 80, height: int = 40) -> list[str]:
    """Return the panel as lines of text."""
    console = terminal(width, height)
    rows = console.render_lines(panel(state, width=width, height=height), pad=False)
    return ["".join(segment.text for segment in row) for row in rows]


def state_at(step: int = 142, steps: int = 300, **options: Any) -> State:
    state = State(steps=steps, recipe="switch_tiny", world=2, lines=("2 CPU cores",))
    for n in range(max(1, step - 30), step + 1):
        state.add(step_line(n, steps=steps, **options))
    state.evaluation = eval_line(100)
    return state


# --- the heat row -------------------------------------------------------------------------------------------------------


def test_a_fair_share_is_half_high_a_double_one_full_and_a_dead_one_a_dot() -> None:
    assert heat.row([0.25] * 4) == "▄▄▄▄"
    assert heat.row([0.0, 0.001, 0.499, 0.5]) == "·▁██"
    assert heat.row([0.0] * 3) == "···" and heat.row([]) == ""
    assert heat.row([None, 0.5, 0.5]) == "?▄▄"
    assert heat.color(1.0) == "#969696" and heat.color(0.0) == heat.color(0.2) and heat.color(9.0) == heat.color(4.0)


@given(LOADS, st.integers(1, 80))
def test_a_row_has_a_cell_per_expert_or_equal_bins(load: list[float], cells: int) -> None:
    text = heat.row(load, cells=cells)
    assert len(text) <= cells and (len(text) == len(load) or len(load) > cells)


@given(LOADS)
def test_higher_load_never_draws_lower(load: list[float]) -> None:
    heights = [heat.BLOCKS.index(heat.cell(value)) for value in sorted(heat.relative(load))]
    assert heights == sorted(heights)


@given(LOADS.filter(lambda load: sum(load) > 1e-6))
def test_imbalance_lies_between_uniform_and_collapse(load: list[float]) -> None:
    assert 1 - 1e-9 <= heat.imbalance(load) <= len(load) + 1e-9


# --- the panel ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [50, 80, 132])
@pytest.mark.parametrize(("experts", "layers"), [(8, (1, 3)), (64, (1, 3, 5)), (128, tuple(range(1, 48, 2))), (8, ())])
def test_the_panel_fits_the_terminal(width: int, experts: int, layers: tuple[int, ...]) -> None:
    for fp16 in (False, True):
        rows = shown(state_at(experts=experts, layers=layers, fp16=fp16), width=width, height=24)
        assert {len(row) for row in rows} == {width} and len(rows) <= 24
        assert all(
            row[0] + row[-1] in ("╭╮", "││", "╰╯") for row in rows
        )  # each row begins and ends with the border: none is wrapped or cut


def test_the_panel_shows_every_number() -> None:
    state = state_at(120, fp16=True)
    line, text = state.step, "\n".join(shown(state))
    for part in (
        f"{line['loss']:.4f}",
        f"{line['balance_loss']:.4f}",
        f"{line['tokens_per_second']:,.0f}",
        f"{100 * line['dropped_share']:.1f} %",
        f"{line['lr']:.2e}",
        "582 MiB",
        "120/300",
        "1:12 left",
        "16,384 · 3 steps skipped",
        f"{state.evaluation['validation_loss']:.4f}",
        "2 processes",
        "2 CPU cores",
    ):
        assert part in text, part
    for layer in line["moe"]:
        row = next(row for row in shown(state) if f"L{layer['layer']} " in row)
        assert f"{heat.imbalance(layer['load']):.2f}" in row and row.count("▁") + row.count("▄") + row.count("▅") > 7


def test_skipped_steps_are_shown_with_their_reason() -> None:
    """Without a loss scale the reason is gradients that are not finite; with a dynamic scale it is an overflow."""
    state = state_at(20)
    state.add(state.step | {"skipped": True, "skipped_total": 20})
    for text in ("\n".join(shown(state)), plain_step(state)):
        assert "20 steps, this one too: gradients that were not finite" in text and "loss scale" not in text
    rows = dict(summary_rows({"skipped": 20, "recipe_values": {"precision": {"loss_scale": "none"}}}))
    assert rows["skipped steps"] == "20: gradients that were not finite"
    scaled = dict(summary_rows({"skipped": 2, "recipe_values": {"precision": {"loss_scale": "dynamic"}}}))
    assert scaled["skipped steps"].startswith("2: gradients overflowed") and "skipped steps" not in dict(summary_rows({"skipped": 0}))


def test_the_end_says_a_rising_loss_in_a_line_of_its_own() -> None:
    console = terminal(200)
    console.print(ending(state_at(120), summary() | {"alarms": ["the loss ended at 7"]}, None))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert printed.count("the loss ended at 7") == 1


def test_64_experts_have_64_cells_on_80_columns() -> None:
    state = state_at(20, experts=64)
    rows = [row for row in shown(state) if "│ L" in row]
    assert len(rows) == 2
    for row, layer in zip(rows, state.step["moe"], strict=True):
        assert heat.row(layer["load"]) in row


def test_cells_are_colored_by_load() -> None:
    state = State(steps=2, recipe="r")
    state.add(step_line(1) | {"moe": [{"layer": 0, "load": [0.0, 0.1, 0.9], "kept": 3, "dropped": 1}]})
    rows = terminal().render_lines(panel(state, width=80, height=40), pad=False)
    colors = [s.style.color.name for row in rows for s in row if s.style and s.style.color and s.style.color.name.startswith("#")]
    assert {heat.color(0.0), heat.color(0.3), heat.color(2.7)} <= set(colors)


def test_a_dense_run_speaks_of_no_experts() -> None:
    state = state_at(layers=())
    for text in ("\n".join(shown(state)), plain_step(state)):
        assert "expert" not in text and "balance" not in text and "dropped" not in text


def test_missing_numbers_are_dashes() -> None:
    state = State(steps=5, recipe="r")
    assert "–" in "\n".join(shown(state)) and "–" in plain_step(state)  # before the first step
    state.add({"step": 1, "loss": None, "grad_norm": math.nan, "moe": [{"layer": 0, "load": [None, None], "kept": None, "dropped": None}]})
    assert "??" in "\n".join(shown(state)) and "loss –" in plain_step(state)


def test_where_not_all_layers_fit_the_least_even_are_shown() -> None:
    layers = [{"layer": n, "load": [0.5 + 0.05 * n, 0.5 - 0.05 * n]} for n in (3, 1, 9, 5)]
    assert [layer["layer"] for layer in worst(layers, 2)] == [9, 5]
    assert worst(layers, 4) == layers


def test_time_left_ignores_one_slow_step() -> None:
    state = State(steps=100, recipe="r")
    for step, seconds in enumerate([60.0, 0.5, 0.5, 0.5], start=1):
        state.add({"step": step, "step_seconds": seconds})
    assert state.seconds_left == 0.5 * 96


def test_a_long_run_keeps_a_short_curve() -> None:
    state = State(steps=10**6, recipe="r")
    for step in range(1, 5 * MAX_POINTS):
        state.add({"step": step, "loss": float(step)})
    assert len(state.losses) <= MAX_POINTS
    assert state.losses == sorted(state.losses) and state.losses[0] < 10 and state.losses[-1] > 5 * MAX_POINTS - 20


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(1, 90))
@settings(max_examples=50)
def test_a_sparkline_spans_its_range(values: list[float], cells: int) -> None:
    text = sparkline(values, cells=cells)
    assert len(text) == min(cells, len(values)) and set(text) <= set(heat.BLOCKS[1:])


# --- plain lines, for logs ----------------------------------------------------------------------------------------------


def plain_run(lines: list[dict[str, Any]], steps: int, encoding: str = "utf-8") -> list[str]:
    console, raw = log(encoding)
    progress = Progress(State(steps, recipe="switch_tiny", world=2, lines=("ep 2",)), console=console)
    for line in lines:
        if line["kind"] == "train":
            progress.step(line)
        elif line["kind"] == "eval":
            progress.evaluation(line)
        else:
            progress.note(f"saved {line['path']}")
    progress.close()
    return raw.getvalue().decode(encoding).splitlines()


def test_plain_lines_come_first_last_every_fiftieth_and_every_five_seconds() -> None:
    lines = [line | {"time": 1e9 + 0.1 * line["step"]} for line in run_lines(123, eval_every=60)]
    printed = [row.split("/")[0] for row in plain_run(lines, 123) if row.startswith("step ")]
    assert printed == [f"step {n}" for n in (1, 50, 100, 123)]
    slow = [line | {"time": 1e9 + 2.0 * line["step"]} for line in run_lines(10, eval_every=60)]
    printed = [row.split("/")[0] for row in plain_run(slow, 10) if row.startswith("step ")]
    assert printed == [f"step {n}" for n in (1, 4, 7, 10)]


def test_plain_lines_carry_every_number_on_one_line() -> None:
    rows = plain_run(run_lines(100, fp16=True), 100)
    assert rows[:2] == ["switch_tiny · 2 processes", "ep 2"]
    assert sum(row.startswith("validation loss") for row in rows) == 2 and "saved checkpoints/step-100" in rows
    line = step_line(100, steps=100, fp16=True)
    last = next(row for row in rows if row.startswith("step 100/100"))
    for part in (
        f"loss {line['loss']:.4f}",
        f"balance {line['balance_loss']:.4f}",
        "tokens/s",
        "dropped",
        "grad norm",
        "router",
        "loss scale 16,384",
    ):
        assert part in last, part
    for layer in line["moe"]:
        assert f"L{layer['layer']} |{heat.row(layer['load'])}| {heat.imbalance(layer['load']):.2f}" in last


def test_a_run_that_stops_early_still_shows_its_last_step() -> None:
    rows = plain_run(run_lines(300, upto=7), 300)
    assert [row.split("/")[0] for row in rows if row.startswith("step ")] == ["step 1", "step 7"]


def test_a_stream_without_unicode_gets_ascii() -> None:
    rows = plain_run(run_lines(100), 100, encoding="ascii")
    assert any("|" + heat.row(step_line(100, steps=100)["moe"][0]["load"], ramp=heat.ASCII) + "|" in row for row in rows)
    assert "?" not in "".join(rows)


# --- the table at the end of a run --------------------------------------------------------------------------------------


def test_the_end_shows_numbers_sample_and_files(tmp_path: Path) -> None:
    out = run_folder(tmp_path / "switch_tiny", steps=30)
    (out / "plots").mkdir()
    (out / "plots" / "loss.png").write_bytes(b"x")
    console = Console(width=100, record=True, file=io.StringIO(), _environ={})
    console.print(ending(State(30, "switch_tiny"), summary() | {"sample": "evil \x1b[2J <b>markup</b> [red]x[/red]"}, out))
    text = console.export_text()
    for part in ("1.7812", "2.5697", "20,412", "41.0 %", "3.1 %", "582 MiB", "10.6 M, 3.28 M active", "2 min 11 s"):
        assert part in text, part
    for part in ("metrics.jsonl", "recipe.yaml", "summary.json", "plots/", "1 item", "<b>markup</b> [red]x[/red]"):
        assert part in text, part
    assert "\x1b" not in text and "checkpoints/" not in text  # the run has no checkpoints folder, so none is listed


def test_summary_rows_leave_out_what_is_unknown() -> None:
    assert summary_rows({}) == [] and summary_rows({"validation_loss": None, "hardware": {"cpu": None}}) == []
    rows = dict(summary_rows(summary() | {"mfu": 0.5, "parameters_active": 10_621_184, "hardware": {"cpu": "x", "gpus": 2}}))
    assert rows["model FLOPs utilization (MFU)"] == "50.0 %" and rows["parameters"] == "10.6 M" and rows["hardware"] == "cpu x, gpus 2"
    dense = summary() | {"dropped_share": 0.0, "parameters_active": summary()["parameters_total"]}
    assert "dropped choices" in dict(summary_rows(summary())) and "dropped choices" not in dict(summary_rows(dense))


def test_numbers_read_well() -> None:
    assert [size(n) for n in (0, 1023, 5.1e8, 3 * 2**30, None)] == ["0 B", "1023 B", "486 MiB", "3.00 GiB", "–"]
    assert [count(n) for n in (999, 1234, 12_345_678, 7.2e11, math.nan)] == ["999", "1.23 k", "12.3 M", "720 G", "–"]
    assert [duration(n) for n in (0.42, 42, 131.2, 3900, None)] == ["0.4 s", "42 s", "2 min 11 s", "1 h 05 min", "–"]
    assert [clock(n) for n in (69, 7507, -3, None)] == ["1:09", "2:05:07", "0:00", "–"]
    assert percent(0.0123) == "1.2 %" and percent(True) == "–"
    assert printable("a\tb\n\x07é\ud800") == "a\tb\n\ufffdé\ufffd"


# --- a failing display never stops training -----------------------------------------------------------------------------


def run_through(progress: Progress) -> None:
    progress.step(step_line(1))
    progress.evaluation(eval_line(1))
    progress.note("note")
    progress.close(summary())
    progress.close()


class Failing(io.StringIO):
    """A stream whose first `after` writes succeed; later ones raise `error`."""

    def __init__(self, error: BaseException, after: int = 0) -> None:
        super().__init__()
        self.error, self.left = error, after

    def write(self, text: str) -> int:
        self.left -= 1
        if self.left < 0:
            raise self.error
        return super().write(text)


def leave(_: Console) -> None:
    raise SystemExit(1)


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(5, "Input/output error"), ValueError("closed file")])
@pytest.mark.parametrize("kind", ["live", "plain"])
@pytest.mark.parametrize("after", [0, 3])
def test_a_broken_stream_costs_the_display_and_no_more(
    error: Exception, kind: Any, after: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Console, "on_broken_pipe", leave)  # rich's own method would also replace this process's stdout
    console = Console(file=Failing(error, after), force_terminal=kind == "live", width=80, height=30, _environ={})
    run_through(Progress(State(3, recipe="r"), kind=kind, console=console))
    assert 1 <= capsys.readouterr().err.count("training continues") <= 2


def test_a_live_panel_that_cannot_be_drawn_says_so_in_its_place() -> None:
    console = terminal()
    progress = Progress(State(3, recipe="r"), console=console)
    progress.step({"step": 1, "moe": [{"layer": 0, "load": ["not a number"]}]})
    progress.close()
    assert "the display failed" in console.file.getvalue()  # type: ignore[attr-defined]


def test_bad_lines_do_not_stop_plain_output(capsys: pytest.CaptureFixture[str]) -> None:
    console, _ = log()
    progress = Progress(State(3, recipe="r"), console=console)
    progress.step(step_line(1))
    progress.step({"step": "two", "time": 1.0})
    run_through(progress)
    assert capsys.readouterr().err.count("training continues") == 1


def test_a_terminal_gets_a_panel_and_its_cursor_back() -> None:
    console = terminal()
    with closing(Progress(State(3, recipe="switch_tiny"), console=console)) as progress:
        for step in (1, 2):
            progress.step(step_line(step))
        progress.note("saved")
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "switch_tiny" in text and "saved" in text and "load of 8 experts" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_other_ranks_show_nothing() -> None:
    console = terminal()
    run_through(Progress(State(3, recipe="r"), kind="none", console=console))
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]
