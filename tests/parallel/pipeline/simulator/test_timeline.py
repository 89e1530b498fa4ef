"""Text, trace and picture of a timeline show its times; `moe simulate` prints and writes them."""

from __future__ import annotations

import importlib
import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest

from moe.cli import main as cli
from parallel.pipeline.order_file import read_order
from parallel.pipeline.schedule import Op
from parallel.pipeline.schedules import SCHEDULES, make_schedule
from parallel.pipeline.simulator.draw import draw, text, trace, write_trace
from parallel.pipeline.simulator.simulate import costs, simulate


@pytest.mark.parametrize(
    ("name", "file", "p", "m"),
    [("naive", "naive", 2, 2), ("gpipe", "gpipe", 2, 3), ("1f1b", "one_f_one_b", 2, 3), ("zb_h1", "zero_bubble", 3, 4)],
)
def test_text_equals_the_drawing_in_the_schedules_module_docstring(name: str, file: str, p: int, m: int) -> None:
    drawn = (importlib.import_module(f"parallel.pipeline.schedules.{file}").__doc__ or "").splitlines()
    rows = [line.strip().partition("   ")[0] for line in drawn if line.strip().startswith("rank ")]
    assert rows == text(simulate(make_schedule(name, ranks=p, microbatches=m))).splitlines()[-len(rows) :] and rows


def test_text_names_stages_if_a_rank_has_several_and_cuts_rows_to_the_width() -> None:
    rows = text(simulate(make_schedule("chimera", ranks=2, microbatches=2)), width=33).splitlines()
    assert rows[0] == "rank 0 | 0F0 1F1 1B1 1B1 0B0 ..." and len(rows) == 2


@pytest.mark.parametrize(("forward", "backward", "columns"), [(0.5, 1.25, 4 * 2 + 4 * 5), (2, 3, 4 * 5), (1.0, 1.0371, 8)])
def test_a_column_of_text_is_the_largest_time_that_divides_all_times(forward: float, backward: float, columns: int) -> None:
    """If that is below a twelfth of the shortest time, a column is the shortest time and others are rounded."""
    row = text(simulate(make_schedule("gpipe", ranks=1, microbatches=4), costs(forward, backward)))
    assert len(row.partition("| ")[2].split()) == columns


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_trace_has_every_action_and_transfer_at_its_time(name: str, tmp_path: Path) -> None:
    timeline = simulate(make_schedule(name, ranks=4, microbatches=8), costs(summation=2), transfer_time=1)
    write_trace(timeline, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert events == json.loads(json.dumps(trace(timeline)["traceEvents"]))
    work = [e for e in events if e["ph"] == "X" and e["cat"] != "send"]
    assert len(work) == sum(map(len, timeline.schedule.orders))
    assert len([e for e in events if e["ph"] == "X" and e["cat"] == "send"]) == len(timeline.transfers)
    assert max(e["ts"] + e["dur"] for e in work) == 1000 * timeline.makespan
    for rank in range(4):
        mine = sorted((e["ts"], e["ts"] + e["dur"]) for e in work if e["tid"] == 2 * rank)
        assert all(a[1] <= b[0] for a, b in zip(mine, mine[1:], strict=False))  # events of a track do not overlap
    assert {e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"} >= {"rank 0", "rank 3", "rank 3 network"}


@pytest.mark.parametrize("name", ["chimera", "zb_v"])
def test_a_picture_has_a_bar_for_each_action(name: str, tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    from parallel.pipeline.simulator.draw import draw_on

    timeline = simulate(make_schedule(name, ranks=4, microbatches=4), costs(summation=2))
    axes = Figure().add_subplot()
    draw_on(axes, timeline, title="x")
    shown = [span for spans in timeline.spans for span in spans if span.end > span.start]
    bars = sorted((bar.get_x(), bar.get_width()) for bar in axes.patches)
    assert bars == sorted((span.start, span.end - span.start) for span in shown)
    assert axes.get_xlabel() == ""
    draw_on(axes, timeline, title="x", unit="s")
    assert axes.get_xlabel() == "time (s)"
    draw({"x": timeline}, tmp_path / "x.png", unit="s")
    assert read_size(tmp_path / "x.png")[0] > 1000
    assert any(span.action.op is Op.S for span in shown) == (name == "chimera")


@pytest.mark.parametrize("ranks", [2, 8])
def test_the_legend_does_not_cover_the_time_axis(ranks: int) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from parallel.pipeline.simulator.draw import add_legend, draw_on

    figure = Figure(figsize=(12, 1.3 + 0.42 * ranks), layout="constrained")
    FigureCanvasAgg(figure).draw()
    axes = figure.add_subplot()
    timeline = simulate(make_schedule("1f1b", ranks=ranks, microbatches=8), costs())
    draw_on(axes, timeline, title="x", unit="s")
    add_legend(figure, [timeline])
    figure.canvas.draw()
    (legend,) = figure.legends
    assert legend.get_window_extent().y1 < axes.get_tightbbox().y0


def test_labels_fit_into_their_bars_if_the_time_axis_is_longer_than_the_timeline() -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from parallel.pipeline.simulator.draw import draw_on

    figure = Figure(figsize=(12, 3), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    timeline = simulate(make_schedule("zb_v", ranks=4, microbatches=8), costs(0.5, 1))
    draw_on(axes, timeline, title="x", until=1.3 * timeline.makespan)
    figure.canvas.draw()
    scale = axes.get_window_extent().width / (1.3 * timeline.makespan)
    assert all(text.get_window_extent().width <= 0.5 * scale for text in axes.texts if text.get_text())


def read_size(png: Path) -> tuple[int, int]:
    data = png.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])  # type: ignore[return-value]


# --- the command `moe simulate` --------------------------------------------------------------------------------------


def rows_of(path: Path) -> list[dict[str, Any]]:
    value = json.loads(path.read_text())
    assert value["verb"] == "simulate" and value["failed"] == 0
    return value["rows"]  # type: ignore[no-any-return]


def test_simulate_without_a_name_shows_all_schedules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "--stages", "4", "--microbatches", "8", "--json", str(tmp_path / "all.json")]) == 0
    said = capsys.readouterr().out
    rows = {row["schedule"]: row for row in rows_of(tmp_path / "all.json")}
    assert list(rows) == list(SCHEDULES) and all(re.search(rf"^{name} ", said, flags=re.M) for name in SCHEDULES)
    bubbles = {name: row["bubble"] for name, row in rows.items()}
    assert bubbles == pytest.approx(
        {
            "naive": 3,
            "gpipe": 3 / 8,
            "pipedream": 0,
            "two_bw": 0,
            "1f1b": 3 / 8,
            "interleaved": 3 / 16,
            "chimera": 2 * 2 / (8 * 3),
            "zb_h1": 1 / 8,
            "zb_h2": 0,
            "zb_v": 0,
            "v_half": 7 / 48,
            "v_min": 11 / 48,
            "dualpipe_v": 2 * 3 / (2 * 8 * 3),
            "dualpipe": 2 / (8 * 3),
            "looped_bfs": 3 / 16,
        }
    )
    assert rows["1f1b"]["peak_activations"] == [4, 3, 2, 1] and rows["interleaved"]["peak_activations"] == [11, 9, 7, 5]
    assert {name: row["weight_versions"] for name, row in rows.items() if row["weight_versions"] > 1} == {"pipedream": 4, "two_bw": 2}
    assert rows["pipedream"]["weight_versions_by_rank"] == [4, 3, 2, 1]
    assert rows["interleaved"]["makespan"] == 8 * 3 * (1 + 3 / 16)  # a chunk takes the rank's time divided by the number of chunks
    assert rows["pipedream"]["bubble_with_ramps"] == pytest.approx(3 / 8)


def test_simulate_draws_several_schedules_in_one_unit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """interleaved has halves of a forward pass, so in its unit each action of gpipe is twice as long. A size that a schedule does not take
    is left out for it. The picture of two is about twice as high as that of one."""
    at, both = tmp_path / "both.json", tmp_path / "both.png"
    words = ["--stages", "2", "--microbatches", "2", "--chunks", "2"]
    assert cli.main(["simulate", "gpipe", "interleaved", *words, "--json", str(at), "--out", str(both)]) == 0
    said = capsys.readouterr().out
    assert "rank 0 | F0 F0 F1 F1 .. .. .. .. .. .. B0 B0 B0 B0 B1 B1 B1 B1" in said and "rank 0 | 0F0 0F1 2F0" in said
    for name in ("gpipe", "interleaved"):
        alone = ["simulate", name, *(words if name == "interleaved" else words[:4])]
        assert cli.main([*alone, "--json", str(tmp_path / "one.json"), "--out", str(tmp_path / "one.png")]) == 0
        assert rows_of(tmp_path / "one.json")[0] in rows_of(at)
    assert 1.7 < read_size(both)[1] / read_size(tmp_path / "one.png")[1] < 2.1


def test_simulate_shows_possible_schedules_and_a_reason_for_each_impossible_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "--stages", "3", "--microbatches", "5", "--json", str(tmp_path / "all.json")]) == 0
    said = capsys.readouterr().out
    assert "chimera: stages: got 3, needed an even number" in said and "dualpipe_v: microbatches: got 5" in said
    assert {row["schedule"] for row in rows_of(tmp_path / "all.json")} == set(SCHEDULES) - {"chimera", "dualpipe_v", "dualpipe"}
    assert [row["schedule"] for row in json.loads((tmp_path / "all.json").read_text())["refused"]] == ["chimera", "dualpipe_v", "dualpipe"]


def test_simulate_writes_every_output_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.png", "a.csv", "a.txt", "a.json"):
        assert (
            cli.main(["simulate", "interleaved", "--stages", "2", "--microbatches", "4", "--chunks", "3", "--out", str(tmp_path / name)])
            == 0
        )
    said = capsys.readouterr().out
    assert "interleaved: 2 ranks, 4 micro-batches · time " in said and "bubble 8.3% of ideal" in said
    assert read_order(tmp_path / "a.csv").orders == make_schedule("interleaved", ranks=2, microbatches=4, chunks=3).orders
    assert (tmp_path / "a.txt").read_text().startswith("rank 0 | 0F0 0F1 2F0") and read_size(tmp_path / "a.png")[1] > 100
    assert json.loads((tmp_path / "a.json").read_text())["traceEvents"]


def test_a_written_csv_simulates_like_its_schedule(tmp_path: Path) -> None:
    words = ["simulate", "1f1b", "--stages", "3", "--microbatches", "6"]
    assert cli.main([*words, "--out", str(tmp_path / "mine.csv"), "--json", str(tmp_path / "a.json")]) == 0
    assert cli.main(["simulate", str(tmp_path / "mine.csv"), "--json", str(tmp_path / "b.json")]) == 0
    a, b = rows_of(tmp_path / "a.json")[0], rows_of(tmp_path / "b.json")[0]
    assert b == a | {"schedule": "mine"}


def test_times_by_stage_transfer_and_overlap(tmp_path: Path) -> None:
    words = ["simulate", "gpipe", "--stages", "2", "--microbatches", "4", "--json", str(tmp_path / "a.json")]
    assert cli.main([*words, "--forward-time", "1,3", "--backward-time", "2,4.5"]) == 0
    assert rows_of(tmp_path / "a.json")[0]["makespan"] == 1 + 4 * (3 + 4.5) + 2
    assert cli.main([*words, "--transfer-time", "0.5", "--overlap", "off"]) == 0
    apart = rows_of(tmp_path / "a.json")[0]["makespan"]
    assert cli.main([*words, "--transfer-time", "0.5"]) == 0
    assert rows_of(tmp_path / "a.json")[0]["makespan"] == 12 + 3 + 2 * 0.5 < apart


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("chimaera", "schedule: got chimaera, needed one of naive"),
        ("chimera --stages 5", "stages: got 5, needed an even number for chimera"),
        ("1f1b --stages 0", "--stages: got 0, needed at least 1; fix: --stages 1"),
        ("--microbatches -1", "--microbatches: got -1, needed at least 1"),
        ("1f1b --chunks 2", "chunks: got 2, needed 1 for 1f1b"),
        (
            "1f1b --forward-time 1,2",
            "--forward_time: got 2 times, needed 1 time, or 4: one for each stage of 1f1b; fix: --forward_time 1,1,1,1",
        ),
        ("1f1b --forward-time x", "--forward_time: got x, needed a time above 0"),
        ("1f1b --backward-time 0", "--backward_time: got 0, needed a time above 0"),
        ("1f1b --transfer-time -1", "--transfer_time: got -1.0, needed at least 0"),
        ("1f1b --weight-share 2", "--weight_share: got 2.0, needed a share from 0 to 1"),
        ("1f1b gpipe --out x.csv", "--out: got --out with several schedules, needed --out FILE.png; fix: remove --out"),
        ("1f1b --out x.svg", "--out: got x.svg, needed *.png"),
        ("--out x.png", "--out: got x.png, needed one schedule to draw; fix: moe simulate 1f1b --out x.png"),
        ("none.csv", "schedule: got none.csv: No such file or directory, needed a CSV file of actions"),
        ("1f1b --vertical-sync on", "vertical_sync: got true with schedule 1f1b, needed schedule pipedream"),
        ("gpipe --pipelines 4", "pipelines: got 4 with schedule gpipe, needed schedule chimera"),
        (
            "chimera --stages 12 --microbatches 12 --pipelines 8",
            "pipelines: got 8, needed an even number that divides 12 stages: 2, 4, 6, 12; fix: set it to 6",
        ),
        ("chimera --pipelines 0", "--pipelines: got 0, needed at least 2; fix: --pipelines 2"),
        ("1f1b --tflops 100", "--tflops: got --tflops without a recipe"),
        ("1f1b --model.d_ff 64", "--model.d_ff: got --model.d_ff without a recipe"),
        ("1f1b --recipe dense_tiny --tflops 0", "--tflops: got 0.0, needed a speed above 0; fix: --tflops 140"),
        ("1f1b --recipe dense_tiny --link-gb-s -1", "--link_gb_s: got -1.0, needed a speed above 0; fix: --link_gb_s 25"),
        ("1f1b --recipe dense_tiny --forward-time 2", "--forward_time: got --forward_time with --recipe"),
        ("1f1b --recipe dense_tny", "recipe: got dense_tny"),
        ("1f1b --recipe dense_tiny --model.d_fff 3", "model.d_fff: got a key that does not exist"),
        (
            "1f1b --recipe dense_tiny --stages 9",
            "stages: got 9, needed at most one stage per layer: 4; fix: --stages 4 or --model.num_layers 9",
        ),
        (
            "zb_v --recipe dense_tiny",
            "stages: got 4 ranks with 2 stages each, needed at most one stage per layer: 4; fix: --stages 2 or --model.num_layers 8",
        ),
        ("1f1b --recipe dense_tiny --microbatches 5", "--microbatches: got 5 of a batch of 16 sequences on 1 data-parallel rank"),
        ("1f1b --out two.csv/x.png", "--out: got two.csv/x.png: {here}/two.csv is no folder, needed a file that can be written"),
        ("1f1b --out two.csv/x.csv", "--out: got two.csv/x.csv: {here}/two.csv is no folder"),
        ("1f1b --out two.csv/x.txt", "--out: got two.csv/x.txt: {here}/two.csv is no folder"),
        ("1f1b --out two.csv/x.json", "--out: got two.csv/x.json: {here}/two.csv is no folder"),
    ],
)
def test_a_wrong_argument_of_simulate_is_refused_in_one_line(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("two.csv").write_text("0F0,0B0\n")
    assert cli.main(["simulate", *words.split()]) == 2
    got = capsys.readouterr().err
    assert got.startswith(f"error: {said.replace('{here}', str(tmp_path))}") and got.count("\n") == 1


@pytest.mark.parametrize("name", ["x.png", "x.csv", "x.txt", "x.json"])
def test_simulate_creates_the_folder_of_its_output(name: str, tmp_path: Path) -> None:
    assert cli.main(["simulate", "1f1b", "--out", str(tmp_path / "new" / "one" / name)]) == 0
    assert (tmp_path / "new" / "one" / name).stat().st_size > 0


def test_simulate_refuses_sizes_for_a_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.csv").write_text("0F0,0B0\n")
    assert cli.main(["simulate", str(tmp_path / "x.csv"), "--stages", "2"]) == 2
    assert "--stages: got --stages with" in capsys.readouterr().err
