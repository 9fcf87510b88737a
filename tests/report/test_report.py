"""``daf report``'s parts without a browser: what is read, what is said, what is drawn."""

from __future__ import annotations

import json
import os
import random
import re
import zlib
from collections.abc import Callable
from html import escape
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from daf.cli import app
from daf.core.errors import RunFolderError
from daf.core.markup import Markup, element
from daf.core.policy import Method
from daf.files.folder_lock import held_folder
from daf.files.records import read_json, read_lines, write_json, write_lines
from daf.report.comparison import COLUMNS, findings, row
from daf.report.page import page
from daf.report.picture import draw
from daf.report.run_charts import charts_of, moments_chart, waterfall
from daf.report.runs import Run, read_run, read_runs
from daf.report.scale import thinned, ticks
from daf.report.terminal import show_report, spark
from daf.report.treatments import COLOURS, STYLES, strips_of, totals_by_method

MB = 10**6


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_are_round_within_the_range_and_few(low: float, width: float) -> None:
    high = low + width
    if not high > low + 1e-6 * abs(low):
        return
    found = ticks(low, high)
    slack = 1e-6 * (high - low) + 1e-11 * abs(high)
    assert 1 <= len(found) <= 11
    assert all(low - slack <= each <= high + slack for each in found)
    assert found == sorted(found)


def test_ticks_of_a_known_range() -> None:
    assert ticks(0, 600) == [0, 200, 400, 600]
    assert ticks(2.33, 2.97) == [2.4, 2.6, 2.8]
    assert ticks(3, 3) == [3]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=400), st.integers(1, 50))
def test_thinning_by_max_keeps_the_peak_and_the_end(values: list[float], most: int) -> None:
    points = list(enumerate(values))
    kept = thinned(points, max, most)
    assert len(kept) == min(most, len(points))
    assert max(y for _, y in kept) == max(values)
    assert kept[-1][0] == points[-1][0]


def test_markup_escapes_text_and_leaves_markup() -> None:
    inner = element("b", "<&>")
    assert inner == "<b>&lt;&amp;&gt;</b>"
    made = element("p", inner, "<x>", class_="a b", data_site='"q"', hidden="", title=None)
    assert made == (
        '<p class="a b" data-site="&quot;q&quot;" hidden><b>&lt;&amp;&gt;</b>&lt;x&gt;</p>'
    )
    assert isinstance(made, Markup)


def test_a_run_is_read_with_its_ratios(make_run: Any) -> None:
    run = read_run(make_run())
    assert run.above_floor_bytes == 250 * MB
    assert run.prediction_error == pytest.approx(10 / 250)
    assert run.saved_ratio == 10
    assert len(run.steps) == 40
    assert run.sites[0]["site"] == "conv:conv2d#0[0]"


def test_what_is_no_finished_run_is_refused_with_a_way_out(make_run: Any, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"holds no run: neither summary\.json.*--out"):
        read_run(tmp_path)
    run = make_run()
    with pytest.raises(RunFolderError, match="twice"):
        read_runs([run, tmp_path / "." / "run"])


def text_of(*runs: Run) -> str:
    shown = StringIO()
    show_report(runs, Console(file=shown, width=200, markup=False, emoji=False))
    return shown.getvalue()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda run: (run / "summary.json").unlink(), "summary.json is missing"),
        (lambda run: (run / "memory.jsonl").write_text(""), "memory.jsonl is missing or empty"),
        (lambda run: (run / "plan.json").write_text("[]"), "plan.json cannot be read: it holds a"),
        (
            lambda run: (run / "metrics.jsonl").write_bytes(
                (run / "metrics.jsonl").read_bytes()[:-5]
            ),
            "metrics.jsonl: 1 damaged lines are left out",
        ),
        (
            lambda run: (run / "summary.json").write_text(
                (run / "summary.json").read_text().replace("550", "450")
            ),
            "summary.json cannot be read: it does not have its checksum",
        ),
    ],
)
def test_a_damaged_run_shows_what_there_is_and_says_what_is_not(
    make_run: Any, damage: Callable[[Path], Any], words: str
) -> None:
    folder = make_run()
    write_json(folder / "run.json", {"model": "resnet18", "data": "digits"})
    damage(folder)
    run = read_run(folder)
    whole = read_run(make_run("whole"))
    for shown in (text_of(run), text_of(whole, run), page([run]), page([whole, run])):
        assert words in shown
    assert whole.problems == ()


def test_a_run_that_goes_on_is_summarised_from_its_logs(make_run: Any) -> None:
    folder = make_run()
    (folder / "summary.json").unlink()
    write_json(folder / "run.json", {"model": "resnet18", "data": "digits", "batch_size": 8})
    with held_folder(folder):
        run = read_run(folder)
    assert any(
        f"(process {os.getpid()}) is training in its folder" in each for each in run.problems
    )
    assert run.summary["steps"] == 40
    assert run.summary["peak_bytes"] == 550 * MB  # the largest sample
    assert run.summary["floor_bytes"] == 300 * MB  # the plan's
    assert run.summary["loss"] == pytest.approx(sum(2.5 - i / 40 for i in range(1, 41)) / 40)
    assert "steps 40" in page([run])


def test_a_log_that_was_changed_since_the_summary_is_told(make_run: Any) -> None:
    folder = make_run()
    content = (folder / "metrics.jsonl").read_bytes()
    logs = {"metrics.jsonl": [len(content), zlib.crc32(content)]}
    write_json(folder / "summary.json", dict(read_run(folder).summary) | {"logs": logs})
    assert read_run(folder).problems == ()
    lines = content.splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(b"".join([lines[1], lines[0], *lines[2:]]))
    (problem,) = read_run(folder).problems
    assert problem == "metrics.jsonl has lost or changed lines from before the summary"
    (folder / "metrics.jsonl").write_bytes(b"".join([*lines, lines[-1]]))
    assert "metrics.jsonl has lines from after the summary" in read_run(folder).problems


def test_whatever_lines_are_left_of_the_logs_are_shown(make_run: Any) -> None:
    """Damage takes any of them; marks of phases without samples, or samples without marks."""
    folder = make_run()
    draw = random.Random(0)
    logs = {path: list(read_lines(path)) for path in sorted(folder.glob("*.jsonl"))}
    records = {path: path.read_bytes() for path in sorted(folder.glob("*.json"))}
    for _ in range(60):
        for path, lines in logs.items():
            share = draw.choice((0.0, 0.05, 0.5, 1.0))
            kind = draw.choice(("mark", "resident_bytes", ""))
            kept = [line for line in lines if draw.random() < share]
            write_lines(path, [line for line in kept if kind in line] or lines[:1])
        for path, content in records.items():
            path.write_bytes(content if draw.random() < 0.7 else b"{")
        run = read_run(folder)
        assert all(problem in page([run]) for problem in map(escape, run.problems))
        assert text_of(run)


def test_names_with_markup_are_shown_as_they_are(make_run: Any, tmp_path: Path) -> None:
    name = "[/red]<b>$x$:smile:"
    runs = [read_run(make_run(each, model=name)) for each in ("[bold]<i>", "other")]
    for run in runs:
        assert f"{name} on cifar10" in text_of(run)
    assert "[bold]<i>" in text_of(*runs)
    written = page(runs)
    assert escape(name) in written
    assert name not in written
    draw(charts_of(runs), tmp_path / "a.png")
    draw(charts_of(runs[:1]), tmp_path / "b.png")


def test_the_waterfall_stands_on_itself_and_ends_in_the_peaks(make_run: Any) -> None:
    bars = waterfall(read_run(make_run()))
    assert [bar.nbytes // MB for bar in bars] == [300, 40, 40, 40, 20, 10, 90, 20, 560, 550]
    terms = [bar for bar in bars if bar.kind in ("floor", "term")]
    for lower, upper in pairwise(terms):
        assert upper.start_bytes == lower.end_bytes
    assert terms[-1].end_bytes == bars[-2].end_bytes == 560 * MB


def test_what_is_held_for_backward_is_drawn_moment_by_moment(make_run: Any) -> None:
    folder = make_run()
    (chart,) = moments_chart(read_run(folder))
    drawn = {each.name: [y for _, y in each.points] for each in chart.series}
    assert drawn == {
        "plain PyTorch": [50.0, 90.0, 90.0, 40.0],
        "this plan": [20.0, 30.0, 60.0, 20.0],
        "of it computed again": [0.0, 0.0, 40.0, 0.0],
    }
    assert [(each.name, each.start, each.end) for each in chart.shades] == [
        *(("forward", 0, 2), ("backward", 2, 4))
    ]
    assert chart.title in page([read_run(folder)])
    write_json(folder / "plan.json", read_json(folder / "plan.json") | {"saved_by_moment": {}})
    assert moments_chart(read_run(folder)) == []  # a plan that no budget made


def test_a_plain_run_has_a_waterfall_of_floor_and_peak(make_run: Any) -> None:
    folder = make_run(budget_bytes=None, predicted_peak_bytes=None)
    plan = read_json(folder / "plan.json")
    write_json(folder / "plan.json", plan | {"account": None})
    assert [bar.kind for bar in waterfall(read_run(folder))] == ["floor", "measured"]


def test_the_plan_is_told_by_module_with_its_reasons(make_run: Any) -> None:
    strips = strips_of(read_run(make_run()))
    assert [(strip.module, len(strip.cells)) for strip in strips] == [
        *(("conv", 1), ("norm", 2), ("relu", 1), ("head", 1))
    ]
    conv, norm = strips[0].cells[0], strips[1].cells[0]
    assert conv.treatment == "rotated code, 2 bits"
    assert conv.sizes == "6.00 MB held of 96.0 MB"
    assert "once and linearly" in conv.reason
    assert "frees 90 MB at the peak" in conv.reason  # the planner's own line for this site
    assert "frees" not in norm.reason
    assert strips[1].cells[1].reason.endswith("(kept: not alive at the peak)")
    assert strips[3].cells[0].sizes == "shares memory counted elsewhere"
    totals = totals_by_method(strips)
    assert totals[Method.ROTATED] == (2, 192 * MB, 15 * MB)
    assert list(totals) == [Method.KEEP, Method.ROTATED, Method.MASK, Method.REDERIVE]


def test_every_treatment_has_a_name_and_colours_of_its_own() -> None:
    assert set(COLOURS) == set(Method)
    for shade in (1, 2):
        assert len({colours[shade] for colours in COLOURS.values()}) == len(Method)
    for shade in (0, 1):
        assert len({STYLES[f"run-{index}"][shade] for index in range(6)}) == 6


def test_what_was_given_up_is_told_at_its_site(make_run: Any) -> None:
    folder = make_run()
    rows = list(read_lines(folder / "sites.jsonl"))
    rows[0]["evicted_bytes"] = 2 * MB
    write_lines(folder / "sites.jsonl", rows)
    cell = strips_of(read_run(folder))[0].cells[0]
    assert cell.reason.endswith("2.00 MB of it were evicted under pressure")


def test_findings_tell_who_lost_and_what_makes_runs_incomparable(make_run: Any) -> None:
    ours = read_run(make_run("ours"))
    worse = read_run(make_run("worse", peak_bytes=800 * MB, step_ms_median=300.0))
    assert findings([ours, worse]) == [
        "worse peaked at 2.00 × the memory above the floor of ours and took 1.50 × the time a "
        "step, and so lost on both."
    ]
    other = read_run(make_run("other", seed=1, batch_size=32))
    assert findings([ours, other])[-1] == (
        "other and ours differ in batch size, seed: compare with care."
    )
    shorter = read_run(make_run("shorter", steps=20))
    assert "their losses are not comparable" in findings([ours, shorter])[-1]


def test_a_row_has_a_cell_for_every_column_also_without_figures(make_run: Any) -> None:
    empty = {"budget_bytes": None, "predicted_peak_bytes": None, "step_ms_median": None}
    empty |= {"examples_per_s": None, "loss": None, "metric": None, "policy": None}
    run = read_run(make_run(**empty))
    cells = dict(zip(COLUMNS, row(run.name, run.summary), strict=True))
    assert [name for name, text in cells.items() if text == "–"] == [
        *("budget", "predicted", "step", "examples/s", "loss", "test")
    ]


def test_the_page_is_one_file_that_asks_nothing_of_a_network(make_run: Any) -> None:
    text = page([read_run(make_run())])
    assert re.findall(r'(?:src|href)="(?!data:|#)[^"]*"', text) == []
    assert not re.search(r"https?://|@import|url\(", text)


def test_hostile_names_are_text_and_stay_inside_their_script(make_run: Any) -> None:
    name = "</script><script>alert(1)</script>"
    folder = make_run(model=name)
    text = page([read_run(folder, name), read_run(folder, "b")])
    assert "<script>alert" not in text


def with_noise(folder: Path) -> Path:
    """Every tenth step knows what codes add (0.25 and falling) beside the batch's own (2.0)."""
    lines = list(read_lines(folder / "metrics.jsonl"))
    for line in lines:
        known = line["step"] % 10 == 0
        line["added_variance"] = 2.5 / line["step"] if known else None
        line["batch_variance"] = 2.0 if known else None
    write_lines(folder / "metrics.jsonl", lines)
    return folder


def test_noise_of_codes_is_drawn_beside_the_batch_s_own(make_run: Any, tmp_path: Path) -> None:
    folder = make_run()
    assert "Gradient noise" not in page([read_run(folder)])
    draw(charts_of([read_run(folder)]), tmp_path / "without.png")
    run = read_run(with_noise(folder))
    text = page([run])
    assert text.count('class="chart"') == 5
    assert "Gradient noise: what codes add, beside the batch&#x27;s own" in text
    assert "[10.0,0.25],[20.0,0.125]" in text
    assert "[10.0,2.0],[20.0,2.0]" in text
    assert "<b>0.031</b>" in text  # 2.5 / 40 of 2.0, at the end
    draw(charts_of([run]), tmp_path / "with.png")
    assert (tmp_path / "with.png").read_bytes() != (tmp_path / "without.png").read_bytes()
    console = Console(width=100, file=StringIO())
    show_report([run], console)
    told = console.file.getvalue()
    assert "noise of codes" in told
    assert "0.031 of the batch's own noise at the end" in told


def test_without_records_of_the_plan_the_page_says_so(make_run: Any) -> None:
    folder = make_run()
    for file in ("plan.json", "sites.jsonl"):
        (folder / file).unlink()
    text = page([read_run(folder)])
    assert "holds no whole sites.jsonl" in text
    assert 'class="strips"' not in text


def test_sparks_rise_with_their_values() -> None:
    assert spark([0, 1, 2, 3, 4, 5, 6, 7], 0, 7) == "▁▂▃▄▅▆▇█"
    assert spark([5, 5], 5, 5) == "▁▁"


def test_the_text_has_the_account_the_plan_and_the_comparison(make_run: Any) -> None:
    console = Console(width=110, file=StringIO())
    show_report(read_runs([make_run("one"), make_run("two", peak_bytes=500 * MB)]), console)
    text = console.file.getvalue()
    assert "two peaked at 0.80 × the memory above the floor of one" in text
    assert text.count("margin for what is not foreseen") == 2
    assert "one: resnet18 on cifar10 stayed 50 MB below its budget of 600 MB" in text
    blocks = re.search(r"every saved tensor: (█+)", text)
    assert blocks is not None
    assert len(blocks.group(1)) == 5
    assert re.search(r"█\s+exact mask\s+1 tensors\s+96.0 MB → 3.00 MB", text)


def colours_of(path: Path) -> set[tuple[int, ...]]:
    pixels = np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3)
    return {tuple(pixel) for pixel in np.unique(pixels, axis=0).tolist()}


def test_the_picture_has_every_treatment_and_the_budget_in_it(
    make_run: Any, tmp_path: Path
) -> None:
    draw(charts_of([read_run(make_run())]), tmp_path / "one.png")
    found = colours_of(tmp_path / "one.png")
    for colour in ((0xC0, 0x39, 0x2B), (0x35, 0x7A, 0x38), (0xB2, 0x6A, 0x00), (0x7F, 0xA6, 0xC9)):
        assert colour in found


def test_the_picture_of_two_runs_has_a_colour_for_each(make_run: Any, tmp_path: Path) -> None:
    runs = read_runs([make_run("one"), make_run("two")])
    draw(charts_of(runs), tmp_path / "two.png")
    assert {(0x2A, 0x78, 0xB8), (0xC2, 0x57, 0x0C)} <= colours_of(tmp_path / "two.png")


def test_the_command_writes_page_and_picture(make_run: Any, tmp_path: Path) -> None:
    run = make_run()
    ran = CliRunner().invoke(app, ["report", str(run), "--png", str(tmp_path / "a.png")])
    assert ran.exit_code == 0, ran.output
    assert (run / "report.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "measured peak" in ran.output


def test_a_program_gets_the_comparison_as_json(make_run: Any) -> None:
    one, two = make_run("one"), make_run("two", peak_bytes=500 * MB)
    ran = CliRunner().invoke(app, ["report", str(one), str(two), "--json"])
    told = json.loads(ran.stdout)
    assert [run["name"] for run in told["runs"]] == ["one", "two"]
    assert told["runs"][1]["peak_bytes"] == 500 * MB
    assert told["findings"][0].startswith("two peaked at 0.80 ×")
    assert told["page"] == str(one / "report.html")
    assert told["picture"] is None


def test_the_command_refuses_what_it_cannot_do(make_run: Any, tmp_path: Path) -> None:
    run = make_run()
    text_only = CliRunner().invoke(app, ["report", str(run), "--text"])
    assert text_only.exit_code == 0
    assert not (run / "report.html").exists()
    both = CliRunner().invoke(app, ["report", str(run), "--text", "--html", "x.html"])
    assert both.exit_code == 2
    nowhere = CliRunner().invoke(app, ["report", str(run), "--html", str(tmp_path / "no" / "a")])
    assert nowhere.exit_code == 2
    assert "name another --html" in nowhere.stderr
    drawn = CliRunner().invoke(app, ["report", str(run), "--png", str(tmp_path / "no" / "a.png")])
    assert drawn.exit_code == 2
    assert "name another --png" in drawn.stderr
