"""The report's page in a real browser: what is drawn, in which colours, and the keyboard's way."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from daf_bench.peers.page import peers_page

from daf.core.notebook import card, facts, memory_bar, parts_of
from daf.report.page import page
from daf.report.runs import read_runs

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="there is no chromium here; scripts/browser installs it"
)
COLOUR = "element => getComputedStyle(element).backgroundColor"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        # Without its sandbox it also runs as root and in containers; the pages are our own.
        launched = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def opened(browser: Any, make_run: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Open a report of one run or two; no console message, error or request may come of it."""
    contexts, complaints = [], []

    def open_page(runs: int = 1, width: int = 1200, scheme: str = "light") -> Any:
        folders = [make_run(f"run-{width}-{scheme}-{index}") for index in range(runs)]
        file = tmp_path / f"{width}-{scheme}.html"
        file.write_text(page(read_runs(folders)), encoding="utf-8")
        context = browser.new_context(
            viewport={"width": width, "height": 800}, color_scheme=scheme, offline=True
        )
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("requestfailed", lambda asked: complaints.append(asked.url))
        tab.goto(file.as_uri())
        return tab

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


def test_everything_is_drawn(opened: Callable[..., Any]) -> None:
    tab = opened()
    assert tab.title() == "resnet18 on cifar10 stayed 50 MB below its budget of 600 MB"
    assert tab.locator("h1").count() == 1
    assert tab.locator(".tiles li b").all_inner_texts() == [
        *("550 MB", "560 MB", "1/10.0", "200 ms", "1.5000", "61.5")
    ]
    assert tab.locator(".waterfall .bar").count() == 10
    assert tab.locator(".strip").count() == 4
    assert tab.locator(".cell").count() == 5
    assert tab.locator("figure.chart").count() == 4  # memory, moments, loss, throughput
    assert tab.locator(".chart").first.locator("line.level").count() == 4
    assert tab.locator(".chart").first.locator("rect.shade").count() == 2
    assert tab.locator(".level-names .budget").inner_text() == "budget 600 MB"


def test_shapes_have_the_sizes_of_their_numbers(opened: Callable[..., Any]) -> None:
    tab = opened()

    def width_of(selector: str) -> float:
        return float(tab.locator(selector).first.bounding_box()["width"])

    floor, measured = width_of(".bar.floor"), width_of(".bar.measured")
    assert measured / floor == pytest.approx(550 / 300, rel=0.02)
    box = tab.locator(".plot").first.bounding_box()
    line = tab.locator(".chart .level.budget").first.bounding_box()
    top_mb = 600 + 0.08 * (600 - 300)  # a margin above the highest level
    assert (line["y"] - box["y"]) / box["height"] == pytest.approx(1 - 600 / top_mb, abs=0.01)
    assert width_of(".cell.rotated") > 20 * width_of(".cell.keep")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_treatments_and_paper_differ_in_colour(opened: Callable[..., Any], scheme: str) -> None:
    tab = opened(scheme=scheme)
    methods = ("rotated", "keep", "mask", "rederive")
    cells = [tab.locator(f".cell.{method}").first.evaluate(COLOUR) for method in methods]
    assert len(set(cells)) == 4
    legend = [tab.locator(f".swatch.{method}").first.evaluate(COLOUR) for method in methods]
    assert cells == legend
    paper = tab.locator("body").evaluate(COLOUR)
    brightness = sum(int(part) for part in paper[4:-1].split(", "))
    assert brightness > 600 if scheme == "light" else brightness < 120
    limit = tab.locator(".limit").first
    red = {"light": "rgb(192, 57, 43)", "dark": "rgb(255, 123, 107)"}[scheme]
    assert limit.evaluate("element => getComputedStyle(element).borderLeftColor") == red


@pytest.mark.parametrize("width", [360, 1200])
def test_a_notebook_s_card_fits_its_cell(browser: Any, tmp_path: Path, width: int) -> None:
    sizes = {"floor": 300_000_000, "parameters": 44_000_000, "saved": 200_000_000}
    names = {"a module of a long name, and much said of why it is replayed": "kept " * 30}
    bar = memory_bar(parts_of(sizes), 600_000_000)
    file = tmp_path / "cell.html"
    file.write_text(card("ResNet within 600 MB", bar, facts(names)), encoding="utf-8")
    tab = browser.new_page(viewport={"width": width, "height": 800})
    tab.goto(file.as_uri())
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    whole = tab.locator("[role=img]").bounding_box()
    pieces = [each.bounding_box() for each in tab.locator("[role=img] > span").all()]
    shares = [each["width"] / whole["width"] for each in pieces[:-1]]
    assert shares == pytest.approx([1 / 2, 44 / 600, 1 / 3], abs=0.01)
    end = whole["x"] + whole["width"]
    assert pieces[-1]["x"] + pieces[-1]["width"] == pytest.approx(end, abs=1)  # the budget
    tab.close()


def contrast(tab: Any, selector: str) -> float:
    """The ratio of WCAG 2.2 between an element's ink and the nearest painted paper beneath it."""
    return float(
        tab.locator(selector).first.evaluate(
            """element => {
              const parts = colour => colour.match(/[\\d.]+/g).map(Number);
              const light = colour => {
                const [r, g, b] = parts(colour).slice(0, 3).map(v => {
                  v /= 255;
                  return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
                });
                return 0.2126 * r + 0.7152 * g + 0.0722 * b;
              };
              let under = element;
              while (parts(getComputedStyle(under).backgroundColor)[3] === 0)
                under = under.parentElement;
              const ink = light(getComputedStyle(element).color);
              const paper = light(getComputedStyle(under).backgroundColor);
              return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
            }"""
        )
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(opened: Callable[..., Any], scheme: str) -> None:
    tab = opened(scheme=scheme)
    words = ("h1", ".facts", ".tiles span", ".y-ticks span", ".strip .sizes", ".readout")
    on_colour = (".cell.rotated", ".cell.mask", ".level-names .budget", ".level-names .predicted")
    for selector in (*words, *on_colour):
        assert contrast(tab, selector) >= 4.2, selector


@pytest.mark.parametrize("width", [360, 1200])
def test_the_page_never_scrolls_sideways(opened: Callable[..., Any], width: int) -> None:
    tab = opened(runs=2, width=width)
    for summary in tab.locator("summary").all():
        summary.click()  # the tables inside scroll by themselves
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    outside = tab.evaluate(
        """() => [...document.querySelectorAll('h1, h2, .tiles, figure, .legend, .detail')]
              .filter(e => e.getBoundingClientRect().right > innerWidth + 1).length"""
    )
    assert outside == 0


def test_the_keyboard_reaches_everything_in_order(opened: Callable[..., Any]) -> None:
    tab = opened()
    reached = []
    for _ in range(8):
        tab.keyboard.press("Tab")
        reached.append(tab.evaluate("(e => e.classList[0] || e.tagName)(document.activeElement)"))
    assert reached == ["skip", "chart", "chart", "cell", "SUMMARY", "SUMMARY", "chart", "chart"]


def test_arrow_keys_read_the_plan_aloud(opened: Callable[..., Any]) -> None:
    tab = opened()
    detail = tab.locator(".detail")
    assert "Point at a cell" in detail.inner_text()
    tab.locator(".cell").first.focus()
    assert "conv:conv2d#0[0] – rotated code, 2 bits" in detail.inner_text()
    assert "once and linearly" in detail.inner_text()
    tab.keyboard.press("ArrowRight")
    assert "norm:batch_norm#0[0] – rotated code, 3 bits" in detail.inner_text()
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowDown")  # the row below is shorter: its last cell
    assert "relu:relu#0[0] – exact mask, 1 bit" in detail.inner_text()
    tab.keyboard.press("End")
    assert "head:linear#0[0]" in detail.inner_text()
    assert "shares memory" in detail.inner_text()
    assert tab.locator(".cell[tabindex='0']").count() == 1


def test_the_mouse_reads_the_plan_too(opened: Callable[..., Any]) -> None:
    tab = opened()
    tab.locator(".cell.mask").hover()
    assert "backward reads only the side of a threshold" in tab.locator(".detail").inner_text()


def test_a_chart_tells_its_values_to_mouse_and_keys(opened: Callable[..., Any]) -> None:
    tab = opened()
    chart = tab.locator("figure.chart").first
    chart.scroll_into_view_if_needed()
    box = chart.locator(".plot").bounding_box()
    tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + 40)
    assert chart.locator(".readout").inner_text() == "seconds 2.5: 425"
    tab.keyboard.press("Tab")
    tab.keyboard.press("Tab")
    tab.keyboard.press("Home")
    assert chart.locator(".readout").inner_text() == "seconds 0: 300"
    tab.keyboard.press("End")
    assert chart.locator(".readout").inner_text() == "seconds 5: 550"


def test_several_runs_are_compared_first(opened: Callable[..., Any]) -> None:
    tab = opened(runs=2)
    assert tab.locator("tbody").first.locator("tr").count() == 2
    assert tab.locator("section[aria-label='Comparison'] .findings li").count() == 1
    lines = tab.locator("section[aria-label='Comparison'] figure").first.locator("path.line")
    strokes = {line.evaluate("e => getComputedStyle(e).stroke") for line in lines.all()}
    assert len(strokes) == 2
    assert tab.locator("section").count() == 3
    assert tab.locator("h2").count() == 2


def contestant(name: str, kind: str, peak: float, step: float) -> dict[str, Any]:
    """A row of a side-by-side on a plain run of 100 MB above its floor."""
    row = {"workload": "w1", "contestant": name, "kind": kind, "percent": None}
    row |= {"same_mathematics": True, "floor_bytes": 0, "peak_bytes": int(100e6 * peak)}
    row |= {"peak_ratio": peak, "steady_peak_ratio": peak, "step_ratio": step, "step_ms": step}
    row |= {"predicted_peak_bytes": None, "saved_bytes_peak": None, "gradient_error": None}
    return row | {"examples_per_s": 1.0, "loss": 1.0}


@pytest.mark.parametrize("width", [390, 1200])
def test_a_side_by_side_says_who_wins_and_fits(browser: Any, tmp_path: Path, width: int) -> None:
    rows = [contestant("plain", "peer", 1.0, 1.0), contestant("A", "peer", 0.25, 1.1)]
    rows += [contestant("DAF, 2 bits", "daf", 0.5, 1.5)]
    rows += [{"workload": "w1", "contestant": "B", "kind": "peer", "failed": "it was killed"}]
    file = tmp_path / "peers.html"
    file.write_text(peers_page(rows, {"w1_daf_peak_ratio": 0.5}, ["w1; two steps"]), "utf-8")
    context = browser.new_context(viewport={"width": width, "height": 800}, offline=True)
    tab = context.new_page()
    tab.goto(file.as_uri())
    wins = tab.locator("section[aria-label='Where a peer wins'] li").all_inner_texts()
    assert wins == [
        "w1: “A” (1.10 × plain's step, 0.25 × its peak) beats “DAF, 2 bits” (1.50 × plain's step, "
        "0.50 × its peak)."
    ]
    bars = tab.locator("section[aria-label='w1'] figure").first.locator(".bar")
    widths = [bar.bounding_box()["width"] for bar in bars.all()]
    assert widths[1] / widths[0] == pytest.approx(0.25, rel=0.05)
    assert widths[2] / widths[0] == pytest.approx(0.5, rel=0.05)
    assert tab.get_by_text("B did not run: it was killed.").count() == 1
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    context.close()
