"""The plan in words and colours: saved tensors by module, with treatment and reason; the style."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from daf.core.policy import Method, Need
from daf.core.units import format_bytes
from daf.report.runs import Record, Run

COLOURS: dict[Method, tuple[str, str, str]] = {  # (name, on light, on dark), as in the legend
    Method.KEEP: ("kept", "#9aa5b1", "#748292"),
    Method.ROTATED: ("rotated code", "#2a78b8", "#5aa6e6"),
    Method.MINMAX: ("min-max code", "#0c7d7a", "#3cc2bd"),
    Method.DERIVATIVE: ("derivative code", "#8a6800", "#dcb53c"),
    Method.MASK: ("exact mask", "#357a38", "#6cc070"),
    Method.PACK: ("packed exactly", "#7a9a1f", "#b2cf4f"),
    Method.REDERIVE: ("derived", "#7d5bbe", "#ab8ce8"),
    Method.DROP: ("dropped", "#d8b4a0", "#8a6a5a"),
    Method.REPLAY: ("replayed", "#c2477f", "#ee7fb0"),
    Method.RECOMPUTE: ("recomputed", "#4b5fa8", "#8fa2ea"),
    Method.SPILL: ("spilled to disk", "#c2570c", "#f0955a"),
    Method.RANGED: ("min-max code of wide ranges", "#5a7f8f", "#8fbac9"),
    Method.REGISTERED: ("registered code", "#8f5a5a", "#c98f8f"),
}

_DONE = {
    Method.KEEP: "kept as PyTorch keeps it",
    Method.ROTATED: "a rotated code, unbiased",
    Method.MINMAX: "a min-max code with stochastic rounding",
    Method.DERIVATIVE: "the derivative's code instead of the input",
    Method.MASK: "one bit that says all that is read",
    Method.PACK: "packed without loss",
    Method.REDERIVE: "held nowhere: backward derives it from what another operator holds",
    Method.DROP: "dropped: only its shape is kept",
    Method.REPLAY: "held nowhere: the module's forward pass runs again in backward",
    Method.RECOMPUTE: "held nowhere: backward runs cheap operations again on what is kept",
    Method.SPILL: "written to disk and read back in backward",
    Method.RANGED: "a min-max code of the tensor's or each channel's range, a published baseline",
    Method.REGISTERED: "the code of a codec that was registered from outside",
}
_BECAUSE = {
    Need.LINEAR: "it enters the gradient once and linearly, so unbiased noise averages out",
    Need.NORM: "a normalisation's backward reads it twice; the error it makes is small",
    Need.PRODUCT: "it is multiplied by another activation, so it gets at least 4 bits",
    Need.SCORE: "attention's weights are computed again from it: 8 bits, or 4 as measured",
    Need.PROBABILITY: "it is a softmax's output, in which zero must stay zero",
    Need.SMOOTH: "backward reads only the derivative of a smooth activation",
    Need.SIGN: "backward reads only the side of a threshold on which each element lies",
    Need.TWO_VALUED: "it takes two values only",
    Need.INTEGER: "it holds small integers",
    Need.INPUT: "a replayed call starts from it",
    Need.SHAPE: "backward never reads its content",
    Need.EXACT: "it is too small to be worth a code, or not known to tolerate one",
}


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
    reason = f"{_DONE[method]}; {_BECAUSE[need]}"
    if method is Method.KEEP and need is not Need.EXACT:
        reason = f"{_DONE[method]}: the plan asks for nothing less here"
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

STYLES: Mapping[str, tuple[str, str]] = {  # of data outside the plan: (light, dark)
    **dict.fromkeys(("memory", "measured", "run-0"), ("#2a78b8", "#5aa6e6")),
    "budget": ("#c0392b", "#ff7b6b"),
    "predicted": ("#b26a00", "#e9a83f"),
    "floor": ("#6d7a86", "#93a1ae"),
    "term": ("#7fa6c9", "#4c7ba5"),
    "profile": ("#f3ecd9", "#2c2819"),
    "evaluate": ("#e6edf4", "#1e2a36"),
    "run-1": ("#c2570c", "#f0955a"),
    "run-2": ("#1a7f5a", "#4fc496"),
    "run-3": ("#8b3fa8", "#c98be0"),
    "run-4": ("#9a7400", "#dcb53c"),
    "run-5": ("#c2477f", "#ee7fb0"),
}


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
