"""The plan in words and colours: saved tensors by module, with treatment and reason; the style."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from daf.core.policy import Method, Need
from daf.core.units import format_bytes
from daf.report.runs import Record, Run

_WORDS = json.loads(Path(__file__).with_name("treatments.json").read_text("utf-8"))
COLOURS: dict[Method, tuple[str, str, str]] = {  # (name, on light, on dark), as in the legend
    Method(key): (of["name"], of["light"], of["dark"]) for key, of in _WORDS["methods"].items()
}
# Of data outside the plan: (light, dark).
STYLES: dict[str, tuple[str, str]] = {name: (*shades,) for name, shades in _WORDS["styles"].items()}


@dataclass(frozen=True, slots=True)
class Cell:
    """One saved tensor; ``plain_bytes`` is 0 where it shares memory that another cell counts."""

    site: str
    method: Method
    bits: int
    plain_bytes: int
    held_bytes: int
    reason: str

    @property
    def treatment(self) -> str:
        """The treatment, such as ``rotated code, 2 bits``."""
        name = COLOURS[self.method][0]
        return f"{name}, {self.bits} bit{'s' * (self.bits > 1)}" if self.bits else name

    @property
    def sizes(self) -> str:
        """Bytes held, and bytes that plain PyTorch would hold."""
        if not self.plain_bytes:
            return "shares memory counted elsewhere"
        return f"{format_bytes(self.held_bytes)} held of {format_bytes(self.plain_bytes)}"


@dataclass(frozen=True, slots=True)
class ModuleStrip:
    """A module's saved tensors, in the order of the forward pass."""

    module: str
    cells: tuple[Cell, ...]

    @property
    def plain_bytes(self) -> int:
        """Bytes that plain PyTorch would hold."""
        return sum(cell.plain_bytes for cell in self.cells)

    @property
    def held_bytes(self) -> int:
        """Bytes that the run held."""
        return sum(cell.held_bytes for cell in self.cells)


def strips_of(run: Run) -> list[ModuleStrip]:
    """Return the plan by module, in the order of each module's first saved tensor."""
    choices = (run.plan or {}).get("choices", ())
    grouped: dict[str, list[Cell]] = {}
    for record in run.sites:
        module = str(record["site"]).partition(":")[0]
        grouped.setdefault(module, []).append(_cell(record, choices))
    return [ModuleStrip(module, tuple(cells)) for module, cells in grouped.items()]


def totals_by_method(strips: Iterable[ModuleStrip]) -> dict[Method, tuple[int, int, int]]:
    """Return (tensors, plain bytes, held bytes) of every method used, in the legend's order."""
    totals: dict[Method, tuple[int, int, int]] = {}
    cells = [cell for strip in strips for cell in strip.cells]
    for method in COLOURS:
        of_method = [cell for cell in cells if cell.method is method]
        if of_method:
            plain = sum(cell.plain_bytes for cell in of_method)
            held = sum(cell.held_bytes for cell in of_method)
            totals[method] = (len(of_method), plain, held)
    return totals


def _choice(line: str) -> tuple[set[str], str]:
    """Parse ``conv:conv2d#0[0] rotated 2, relu:relu#0[0]: why`` into (sites, why)."""
    names, _, why = line.partition(": ")
    return {name.split(" ")[0] for name in names.split(", ")}, why


def _cell(record: Record, choices: Sequence[str]) -> Cell:
    method, need, site = Method(record["method"]), Need(record["need"]), str(record["site"])
    done = _WORDS["methods"][method.value]["done"]
    reason = f"{done}; {_WORDS['needs'][need.value]}"
    if method is Method.KEEP and need is not Need.EXACT:
        reason = f"{done}: the plan asks for nothing less here"
    chosen = [why for named, why in map(_choice, choices) if site in named]
    if chosen:
        reason = f"{reason} ({'; '.join(chosen)})"
    if record.get("spilled_bytes") and method is not Method.SPILL:
        reason += f"; {format_bytes(record['spilled_bytes'])} of it wait in host memory"
    if record.get("evicted_bytes"):
        reason += f"; {format_bytes(record['evicted_bytes'])} of it were evicted under pressure"
    sizes = int(record["bits"]), int(record["plain_bytes"]), int(record["held_bytes"])
    return Cell(site, method, *sizes, reason)


INK, QUIET, RULE = "#22303c", "#6d7a86", "#dfe4e8"  # of the PNG; page.css has the page's


def style_sheet() -> str:
    """Return CSS: a variable and a class for each style, a background for each treatment."""
    classes = "".join(f".{name}{{color:var(--{name})}}" for name in STYLES)
    dark = f"{_rules(1)}.cell{{color:#12171c}}"
    return f"{_rules(0)}@media (prefers-color-scheme: dark){{{dark}}}{classes}"


def _rules(shade: int) -> str:
    variables = "".join(f"--{name}:{colours[shade]};" for name, colours in STYLES.items())
    backgrounds = "".join(
        f".cell.{method.value},.swatch.treated.{method.value}{{background:{colours[shade]}}}"
        for method, (_, *colours) in COLOURS.items()
    )
    return f":root{{{variables}}}{backgrounds}"
