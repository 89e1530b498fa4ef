"""`moe report`: pictures draw the values in metrics.jsonl, the page is self-contained, and unusual runs have a report too."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.records.summary import dropped_shares, summary_rows
from moe.report import compare, main, page, write_report
from moe.report.compare import evaluations, reached, scaling
from moe.report.history import History, smoothed, windows
from moe.report.plots import PLOTS
from moe.report.style import WIDE, styled
from parallel.errors import BadInput
from tests.support.fabricate import RECIPE, eval_line, run_folder, run_lines, step_line, summary

PLOT = {plot.name: plot for plot in PLOTS}
VOID = {"meta", "img", "source"}


class Page(HTMLParser):
    """Parser of HTML that fails unless all tags are closed in order, and collects links, tags and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


def page_of(folder: Path) -> Page:
    return Page(write_report(folder).read_text())


def pngs(folder: Path) -> set[str]:
    found = set((folder / "plots").glob("*.png"))
    assert all(path.read_bytes().startswith(b"\x89PNG\r\n") and path.stat().st_size > 5000 for path in found)
    return {path.stem for path in found}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Page]:
    """Make the report of a finished run with `main`, which also writes ../new/report.json. Return (run folder, parsed page)."""
    folder = run_folder(tmp_path_factory.mktemp("runs") / "switch_tiny", steps=60, eval_every=20)
    assert main(str(folder), folder.parent / "new" / "report.json") == folder / "report.html"
    return folder, Page((folder / "report.html").read_text())


# --- the HTML page ------------------------------------------------------------------------------------------------------


def test_a_finished_run_has_every_plot_in_one_page_that_needs_nothing_else(finished: tuple[Path, Page]) -> None:
    folder, page = finished
    assert pngs(folder) == set(PLOT)
    assert len(page.links) == len(PLOT) and all(link.startswith("data:image/png;base64,") for link in page.links)
    assert "script" not in page.tags and "link" not in page.tags
    assert not re.search(r"https?:|url\(|@import", (folder / "report.html").read_text())
    assert not [path for path in folder.iterdir() if path.name.endswith(".tmp")]


def test_the_page_tells_the_summary_the_evaluations_and_the_recipe(finished: tuple[Path, Page]) -> None:
    _, page = finished
    for part in ("switch_tiny", "1.7812", "2.5697", "20,412", "3.1 %", "10.6 M", "2 min 11 s", "41.0 %", "60 steps", RECIPE):
        assert part in page.text, part
    for step in (20, 40, 60):
        assert f"{eval_line(step, steps=60)['validation_loss']:.4f}" in page.text
    assert "in progress" not in page.text


def test_text_from_files_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert('x')</script>&amp;\x1b[0m"
    lines = [{"step": 1, "kind": "event", "event": evil, "path": evil, "time": 0}]
    folder = run_folder(tmp_path / "evil", lines=lines)
    (folder / "recipe.yaml").write_text(evil)
    (folder / "summary.json").write_text(json.dumps(summary() | {"recipe": evil, "sample": evil, "hardware": evil}))
    page = page_of(folder)
    assert "script" not in page.tags and page.text.count("<script>alert('x')</script>&amp;") >= 6


def test_main_writes_the_json_of_every_verb(finished: tuple[Path, Page]) -> None:
    folder, _ = finished
    found = json.loads((folder.parent / "new" / "report.json").read_text())
    assert set(found) == {"verb", "commit", "hardware", "rows", "passed", "failed"} and found["verb"] == "report" and found["failed"] == 0
    assert found["passed"] == len(found["rows"]) == len(PLOT) + 1
    assert all((folder / row["file"]).stat().st_size == row["bytes"] for row in found["rows"])


def test_a_folder_without_metrics_is_refused_and_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match="no such folder"):
        write_report("runs/nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match=r"no metrics.jsonl in it"):
        write_report("empty")
    assert not list((tmp_path / "empty").iterdir())
    run_folder(tmp_path / "runs" / "switch_tiny", lines=[])
    with pytest.raises(BadInput, match="did you mean runs/switch_tiny"):
        write_report("switch_tiny")


# --- unusual runs: dense, short, unfinished, with missing values --------------------------------------------------------


@pytest.mark.parametrize(("number", "fix"), [(errno.ENOSPC, "free space"), (errno.EACCES, "cp -r .* COPY"), (errno.EROFS, "cp -r .* COPY")])
def test_a_folder_that_cannot_be_written_is_one_line(number: int, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_folder(tmp_path, steps=3)

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number), str(tmp_path))

    monkeypatch.setattr(page, "replace_file", refuse)
    with pytest.raises(BadInput, match=f"run folder .*: got {os.strerror(number)}, .*; fix: {fix}$"):
        write_report(tmp_path)


def test_a_dense_run_has_no_expert_plots_and_loses_those_of_an_earlier_one(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "dense", steps=12, layers=())
    (folder / "plots").mkdir()
    (folder / "plots" / "expert_load.png").write_bytes(b"of another run")
    (folder / "plots" / "mine.png").write_bytes(b"\x89PNG\r\n" + bytes(5000))
    page_of(folder)
    assert pngs(folder) == {"loss", "gradient_norm", "speed_and_memory", "learning_rate", "mine"}


@pytest.mark.parametrize("steps", [0, 1])
def test_very_short_runs(tmp_path: Path, steps: int) -> None:
    folder = run_folder(tmp_path / "short", lines=run_lines(steps) if steps else [], finished=False)
    page = page_of(folder)
    assert pngs(folder) == (set(PLOT) if steps else set())
    assert ("No step has been recorded yet" in page.text) == (steps == 0)
    assert "short · run report" in page.text and "no summary.json yet" in page.text


def test_a_run_in_progress_with_a_half_written_line_and_a_summary_of_an_earlier_life(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "going", lines=run_lines(300, upto=30, layers=()))
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 31, "lo')
    page = page_of(folder)
    assert "30 steps" in page.text and "no summary.json yet" in page.text
    assert "1.7812" not in page.text  # from summary.json, which is out of date: it is of step 300


def test_nulls_and_missing_fields_leave_gaps(tmp_path: Path) -> None:
    lines = run_lines(30, eval_every=10)
    gone = [line for line in lines if line["kind"] == "train"]
    gone[4].update(loss=None, grad_norm=None, grad_norm_parts=None, nonfinite=["loss"], skipped=True)
    gone[5].update(moe=None, memory_bytes=None)
    gone[6]["moe"][0]["load"][2] = None
    gone[7]["moe"][0].update(kept=None)
    for key in ("lr", "loss_scale", "tokens_per_second"):
        del gone[8][key]
    next(line for line in lines if line["kind"] == "eval")["validation_loss"] = None
    folder = run_folder(tmp_path / "nulls", lines=lines, finished=False)
    page = page_of(folder)
    assert pngs(folder) == set(PLOT) and "not finite" in page.text and "skipped" in page.text
    only = [{"step": 1, "kind": "train", "loss": None, "moe": [{"layer": 0, "load": [None]}]}]
    page_of(run_folder(tmp_path / "only", lines=only, finished=False))
    assert pngs(tmp_path / "only") == set()


def test_many_experts_and_layers() -> None:
    history = History.of(run_lines(20, experts=64, layers=tuple(range(1, 24, 2)), fp16=True))
    with styled():
        fig = PLOT["expert_load"].draw(history)
        assert fig is not None and sum(bool(ax.get_title(loc="left")) for ax in fig.axes) == 12
        assert PLOT["dropped"].draw(history) is not None


# --- pictures draw the values in metrics.jsonl --------------------------------------------------------------------------


def axes_of(name: str, lines: list[dict[str, Any]]) -> Any:
    with styled():
        fig = PLOT[name].draw(History.of(lines))
        assert fig is not None
        return fig.axes


@pytest.mark.parametrize("name", sorted(PLOT))
def test_every_plot_has_a_title_and_labelled_axes(name: str) -> None:
    axes = axes_of(name, run_lines(40, fp16=True))
    assert any(ax.get_title(loc="left") for ax in axes) and axes[-1].get_ylabel()
    assert all(ax.get_ylabel() for ax in axes if ax.lines)
    assert any(ax.get_xlabel() == "step" for ax in axes)


def test_the_picture_of_biases_has_each_layers_largest_minus_its_least() -> None:
    lines = run_lines(8, layers=(1, 3))
    (ax,) = axes_of("selection_bias", lines)
    for line, layer in zip(ax.lines, (0, 1), strict=True):
        ranges = [each["moe"][layer]["bias_max"] - each["moe"][layer]["bias_min"] for each in lines if each["kind"] == "train"]
        np.testing.assert_allclose(line.get_ydata(), ranges)


def test_the_last_validation_loss_has_room_below_the_lowest_point() -> None:
    """Its number is written under the point if the loss falls; the axis goes on by a tenth of the curves' range, or more."""
    (ax,) = axes_of("loss", run_lines(40, layers=(1,)))
    values = np.concatenate([line.get_ydata() for line in ax.lines if len(line.get_ydata()) > 2])
    assert values.min() - ax.get_ylim()[0] > 0.09 * (values.max() - values.min())


def test_router_losses_are_drawn_with_the_ideal_and_with_weights_of_zero(tmp_path: Path) -> None:
    """A dashed line marks the balance loss of an even load, 1 a layer. The legend of a loss with weight 0 says "only measured"."""
    lines = run_lines(40, layers=(1, 3, 5))
    balance, z = axes_of("router_losses", lines)
    assert [line.get_ydata()[0] for line in balance.lines if line.get_label() == "even load"] == [3]
    assert (balance.get_ylabel(), z.get_ylabel()) == ("balance loss", "z loss")
    with styled():
        fig = PLOT["router_losses"].draw(History.of(lines, {"balance_loss": 0.01, "z_loss": 0.0}))
    said = [[text.get_text() for text in legend.get_texts()] if (legend := ax.get_legend()) else [] for ax in fig.axes]
    assert said == [["balance loss", "even load"], ["z loss (weight 0: only measured)"]] and z.get_legend() is None
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {moe_every: 2}\nrouter: {preset: mixtral}\n")
    assert page._weights(recipe) == {"balance_loss": 0.001, "z_loss": 0.0}
    recipe.write_text("router: {preset: of another version}\n")
    assert page._weights(recipe) == page._weights(tmp_path / "none") == {}


def test_drops_are_those_of_the_last_tenth_of_the_steps() -> None:
    """The summary has the dropped share of the last tenth of the steps too, because a router that still learns drops more tokens."""
    lines = [line for line in run_lines(50) if line["kind"] == "train"]
    for line in lines:
        for layer in line["moe"]:
            layer["kept"], layer["dropped"] = (50, 50) if line["step"] <= 45 else (99, 1)
    assert dropped_shares(lines) == {"dropped_share": pytest.approx(0.451), "dropped_share_last": 0.01}
    assert dict(summary_rows(dropped_shares(lines)))["dropped choices"] == "1.0 %, in the last tenth of the steps (45.1 % in all)"
    assert dropped_shares([line | {"moe": []} for line in lines]) == {"dropped_share": 0.0, "dropped_share_last": 0.0}


def test_wide_pictures_can_be_read_on_a_phone(finished: tuple[Path, Page]) -> None:
    """On narrow screens a wide picture scrolls instead of shrinking, so that its 10-point text is at least 10 pixels high."""
    (narrow,) = re.findall(r"@media \(max-width: 760px\) \{(.*?)\n\}", (finished[0] / "report.html").read_text(), flags=re.S)
    assert "overflow-x: auto" in narrow
    (pixels,) = re.findall(r"figure\.wide img \{ min-width: (\d+)px", narrow)
    assert 10 / 72 * int(pixels) / WIDE >= 10


def test_the_loss_plot_draws_the_losses() -> None:
    lines = run_lines(40, eval_every=10)
    (ax,) = axes_of("loss", lines)
    raw, _, validation = ax.lines[:3]
    assert raw.get_ydata().tolist() == [line["loss"] for line in lines if line["kind"] == "train"]
    assert validation.get_xdata().tolist() == [10, 20, 30, 40]
    assert validation.get_ydata().tolist() == [line["validation_loss"] for line in lines if line["kind"] == "eval"]


def test_the_heat_map_draws_the_loads() -> None:
    lines = run_lines(20, experts=6, layers=(1,))
    lines[3]["moe"][0]["load"] = [0.0, 0.2, 0.2, 0.2, 0.2, 0.2]
    axes = axes_of("expert_load", lines)
    drawn_ES = np.asarray(axes[0].collections[0].get_array())
    load_SE = np.array([line["moe"][0]["load"] for line in lines if line["kind"] == "train"])
    with np.errstate(divide="ignore"):
        expected_ES = np.clip(np.log2(6 * load_SE.T), -2, 2)
    assert drawn_ES[0, 3] < -2  # a value below the scale gets the color of an expert without tokens
    expected_ES[0, 3] = drawn_ES[0, 3]
    np.testing.assert_allclose(drawn_ES.reshape(6, 20), expected_ES)


def test_drawing_leaves_the_callers_matplotlib_alone(tmp_path: Path) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    compare({"a": [[eval_line(1)]]}, tmp_path / "a.png")
    assert dict(matplotlib.rcParams) == before


def test_importing_the_report_loads_nothing_heavy() -> None:
    code = "import sys, moe.report; print([m for m in ('matplotlib', 'numpy', 'torch', 'rich') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.strip() == "[]"


# --- History: lines of metrics.jsonl as arrays --------------------------------------------------------------------------


def test_history_reads_series_loads_and_drops() -> None:
    lines = run_lines(9, experts=5, layers=(2,), eval_every=4)
    history = History.of([*reversed(lines), step_line(1, steps=9, experts=5, layers=(2,)) | {"loss": 99.0}])
    train = [line for line in lines if line["kind"] == "train"]
    assert history.steps_S.tolist() == list(range(1, 10)) and history.layers == (2,)
    assert history.series_S("loss").tolist() == [99.0] + [line["loss"] for line in train[1:]]  # step 1 has two lines; the later one counts
    assert history.series_S("grad_norm_parts.expert").tolist() == [line["grad_norm_parts"]["expert"] for line in train]
    assert history.load_SE(2).shape == (9, 5)
    np.testing.assert_allclose(history.load_SE(2).mean(axis=1), 1)
    np.testing.assert_allclose(history.dropped_S(2), [line["moe"][0]["dropped"] / 8192 for line in train])
    assert history.evaluations()[0].tolist() == [4, 8, 9]


@given(st.lists(st.one_of(st.none(), st.floats(-1e3, 1e3)), min_size=1, max_size=400), st.floats(-5, 5))
@settings(max_examples=50, deadline=None)
def test_smoothing_stays_within_the_values_and_keeps_a_constant(values: list[float | None], level: float) -> None:
    values_S = np.array([math.nan if v is None else v for v in values])
    smooth_S = smoothed(values_S)
    assert smooth_S.shape == values_S.shape
    assert np.isfinite(smooth_S[np.isfinite(values_S)]).all()
    if np.isfinite(values_S).any():
        assert np.nanmin(values_S) - 1e-6 <= np.nanmin(smooth_S) and np.nanmax(smooth_S) <= np.nanmax(values_S) + 1e-6
    np.testing.assert_allclose(smoothed(np.full(len(values), level)), level, atol=1e-12)


@given(st.integers(1, 500), st.integers(1, 60))
@settings(max_examples=50, deadline=None)
def test_windows_cover_every_step_once(num_steps: int, most: int) -> None:
    steps_S = np.arange(1.0, num_steps + 1)
    means_WE, edges = windows(np.stack([steps_S, np.full(num_steps, np.nan)], axis=1), steps_S, most)
    assert len(means_WE) <= most and len(edges) == len(means_WE) + 1
    assert edges[0] == 0.5 and edges[-1] == num_steps + 0.5 and (np.diff(edges) > 0).all()
    assert np.average(means_WE[:, 0], weights=np.diff(edges)) == pytest.approx(steps_S.mean())
    assert np.isnan(means_WE[:, 1]).all()


# --- comparison of recipes over seeds -----------------------------------------------------------------------------------


def seeds(*shifts: float, steps: tuple[int, ...] = (10, 20, 30), gain: float = 0.0) -> list[list[dict[str, Any]]]:
    return [[eval_line(step, steps=30, shift=shift, gain=gain) for step in steps] for shift in shifts]


def test_comparison_uses_the_steps_that_all_seeds_have() -> None:
    steps, values = evaluations("x", [*seeds(0.0), *seeds(0.1, steps=(20, 30, 40))])
    assert steps.tolist() == [20, 30] and values.shape == (2, 2)
    np.testing.assert_allclose(values[1] - values[0], 0.1)


def test_comparison_draws_mean_range_and_difference_of_equal_seeds(tmp_path: Path) -> None:
    from moe.report.compare import _figure

    runs = {"dense": seeds(0.0, 0.2, 0.4), "switch": seeds(-0.1, 0.1, 0.3)}
    out = compare(runs, str(tmp_path / "new" / "curves.png"), baseline="dense", title="Equal FLOPs")
    assert out.read_bytes().startswith(b"\x89PNG")
    with styled():
        fig = _figure({label: evaluations(label, lines) for label, lines in runs.items()}, "dense", None, unit=" (nats per token)")
    top, below = fig.axes
    assert top.get_ylabel() == "validation loss (nats per token)"
    assert History.of(runs["dense"][0]).in_nats and not History.of([{"kind": "eval", "step": 1, "validation_loss": 0.7}]).in_nats
    np.testing.assert_allclose(np.asarray(top.lines[0].get_ydata()), evaluations("x", seeds(0.2))[1][0])  # the mean over seeds
    band = np.asarray(top.collections[0].get_paths()[0].vertices)
    last = evaluations("x", seeds(0.0, 0.4))[1][:, -1]
    np.testing.assert_allclose([band[band[:, 0] == 30, 1].min(), band[band[:, 0] == 30, 1].max()], last)
    np.testing.assert_allclose(np.asarray(below.lines[0].get_ydata()), -0.1)  # difference to the baseline, seed by seed


def test_comparison_refuses_what_cannot_be_compared(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="evaluation in common"):
        compare({"a": seeds(0.0) + seeds(0.1, steps=(5,))}, tmp_path / "x.png")
    with pytest.raises(BadInput, match="baseline"):
        compare({"a": seeds(0.0)}, tmp_path / "x.png", baseline="b")
    with pytest.raises(BadInput, match="none were given"):
        compare({}, tmp_path / "x.png")
    assert not list(tmp_path.iterdir())


# --- loss by number of experts ------------------------------------------------------------------------------------------


def falling(*losses: float) -> list[dict[str, Any]]:
    return [{"kind": "eval", "step": 100 * (i + 1), "validation_loss": loss} for i, loss in enumerate(losses)]


def test_the_step_of_equal_loss_is_interpolated_on_the_mean_over_seeds() -> None:
    curves = {
        "1": [falling(6, 4, 3), falling(4, 3, 2)],
        "2": [falling(5, 2.6, 2), falling(3, 2, 1)],
        "4": [falling(9, 8, 7)],
        "8": [falling(2, 1)],
    }
    assert reached(curves, "1", "1") == 300
    assert reached(curves, "2", "1") == pytest.approx(100 + 100 * (4 - 2.5) / (4 - 2.3))  # means 4, 2.3, 1.5; the first model ends at 2.5
    assert reached(curves, "4", "1") is None and reached(curves, "8", "1") == 100


def test_the_gain_of_more_experts_is_drawn(tmp_path: Path) -> None:
    from moe.report.compare import _gain_figure

    runs = {4: [falling(3, 2.5, 1), falling(4, 2.5, 2)], 1: [falling(4, 3, 2), falling(6, 4, 3)], 2: [falling(9, 8, 7)]}
    assert scaling(runs, tmp_path / "new" / "gain.png").read_bytes().startswith(b"\x89PNG")
    with styled():
        above, below = _gain_figure({n: evaluations(str(n), lines) for n, lines in sorted(runs.items())}).axes
    np.testing.assert_allclose(np.asarray(above.lines[0].get_xydata()), [[1, 2.5], [2, 7], [4, 1.5]])
    np.testing.assert_allclose(np.asarray(below.lines[0].get_ydata()), [1, np.nan, 300 / 200])
