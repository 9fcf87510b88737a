"""What notebooks show: bars to scale, sizes in words, names as they are."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daf.core.notebook import Part, card, facts, memory_bar, parts_of, progress_shown
from daf.core.plan import Plan
from daf.core.policy import exact_policy
from daf.core.reports import CaptureStats
from daf.core.step_report import StepReport
from daf.core.units import format_bytes

WIDTH = re.compile(r"width:([\d.]+)%")
MARK = re.compile(r"left:calc\(([\d.]+)% - 2px\)")
SIZES = st.integers(1, 10**12)


@given(st.lists(SIZES, min_size=1, max_size=12), st.none() | SIZES)
def test_parts_and_budget_are_on_one_scale(sizes: list[int], budget_bytes: int | None) -> None:
    shown = memory_bar([Part(f"part {i}", size) for i, size in enumerate(sizes)], budget_bytes)
    whole = max(sum(sizes), budget_bytes or 0)
    widths = [float(each) for each in WIDTH.findall(shown)]
    assert widths == pytest.approx([100 * size / whole for size in sizes], abs=1e-3)
    marks = [float(each) for each in MARK.findall(shown)]
    assert marks == pytest.approx([100 * budget_bytes / whole] if budget_bytes else [], abs=1e-3)
    assert all(f"part {i} {format_bytes(size)}" in shown for i, size in enumerate(sizes))


def test_names_with_markup_are_shown_as_they_are() -> None:
    shown = card("<b>", memory_bar([Part("<i>", 1)]), facts({"<u>": "<s>", "absent": None}))
    assert not re.search(r"<[bius]>", shown)
    assert all(f"&lt;{name}&gt;" in shown for name in "bius")
    assert "absent" not in shown


def test_a_plan_shows_its_account_without_the_sum() -> None:
    account = {"floor": 300_000_000, "saved": 50_000_000, "gradients": 0}
    plan = Plan(
        exact_policy(),
        32,
        350_000_000,
        choices=("fc <1>: kept",),
        account=MappingProxyType(account | {"predicted_peak": 350_000_000}),
    )
    assert parts_of(plan.account) == [
        Part("floor: Python, libraries, data", 300_000_000),
        Part("saved for backward", 50_000_000),
    ]
    shown = plan._repr_html_()
    assert sum(map(float, WIDTH.findall(shown))) == pytest.approx(100, abs=0.01)
    assert "fc &lt;1&gt;: kept" in shown
    assert "350 MB" in shown
    assert "<li>" not in replace(plan, choices=())._repr_html_()


def test_a_step_shows_its_peak_within_the_budget() -> None:
    report = StepReport(1.25, 12.5, 400_000_000, 100_000_000, 8, budget_bytes=500_000_000)
    shown = report._repr_html_()
    assert [float(each) for each in WIDTH.findall(shown)] == [60.0, 20.0]
    assert "1.25" in shown
    assert "12.5 ms" in shown
    assert "over the budget" not in shown
    assert "over the budget" in replace(report, overrun_bytes=5)._repr_html_()
    assert "overdrafts" not in shown
    assert "overdrafts" in replace(report, overdraft_bytes=5)._repr_html_()


def test_saved_bytes_are_shown_beside_plain_pytorch_s() -> None:
    shown = CaptureStats(0, 400_000_000, 0, 100_000_000, sites=7)._repr_html_()
    assert [float(each) for each in WIDTH.findall(shown)] == [25.0, 75.0]
    assert "4.00" in shown


class Cell:
    """Records what a kernel's cell would show."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def __call__(self, data: dict[str, str], *, raw: bool, display_id: bool) -> Any:
        assert raw
        assert display_id
        self.shown.append(data["text/plain"])
        return SimpleNamespace(update=lambda data, **_: self.shown.append(data["text/plain"]))


def test_progress_shows_in_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell()
    kernel = SimpleNamespace(
        get_ipython=lambda: SimpleNamespace(kernel=1), display=SimpleNamespace(display=cell)
    )
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    with progress_shown() as say:
        say("times")
    assert cell.shown == ["DAF begins to measure", "DAF measures times", "DAF has measured"]


def test_progress_is_silent_on_a_terminal_of_ipython_and_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = Cell()
    terminal = SimpleNamespace(
        get_ipython=lambda: SimpleNamespace(), display=SimpleNamespace(display=cell)
    )
    for found in (terminal, None):
        monkeypatch.setitem(sys.modules, "IPython", found)
        with progress_shown() as say:
            say("times")
    assert cell.shown == []
    assert capsys.readouterr().out == ""
