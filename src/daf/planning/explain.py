"""Why a plan: one line per choice, and the account of its peak term by term."""

from __future__ import annotations

from daf.core.profile import Profile
from daf.core.reports import FusionReport
from daf.core.units import format_bytes
from daf.planning.options import KEPT, Option, families
from daf.planning.table import Table, largest_gradient_bytes

_ONE_CODE = "one pass, and one code for all"
_TOLD_BY_INPUT = "as long as its input is kept, the layer behind holds nothing"
_GAINS = {
    "linear": "in chunks of rows, so that the logits never exist",
    "gelu": _TOLD_BY_INPUT,
    "silu": _TOLD_BY_INPUT,
}


def explain(profile: Profile, table: Table, selection: tuple[int, ...]) -> tuple[str, ...]:
    """Return lines for the micro-batch, gradients, every fusion, replay and family of sites."""
    lines = [_about_pieces(profile, table), _about_gradients(table)]
    lines += map(_about_fusion, profile.fusions)
    groups = families(profile.savings)
    peak = int(table.usage(table.amounts(list(selection))).argmax())
    row = table.row(peak)
    for column in selection:
        if column >= table.first[-1]:
            lines.append(_about_replay(table, column))
        else:
            kept = int(table.first[table.family_of[column]])
            saved = float(row[kept] - row[column])
            sites = ", ".join(str(each.site) for each in groups[table.family_of[column]])
            option = table.option(column)
            lines.append(_about_option(option, sites, saved, counts=bool(row[kept] > 0)))
    return tuple(lines)


def account_of(profile: Profile, table: Table, selection: tuple[int, ...]) -> dict[str, int]:
    """Return the terms (bytes) that add up to the computed peak, at the moment of that peak."""
    usage = table.usage(table.amounts(list(selection)))
    moment = int(usage.argmax())
    row = table.row(moment)
    saved = int(row[list(selection)].sum())
    base = int(table.base_bytes[moment])
    gradients = _gradients_at(profile, table, moment)
    known = {
        "floor": profile.floor_bytes,
        "parameters": profile.parameter_bytes,
        "gradients": gradients,
        "optimizer_state": profile.optimizer_bytes,
        "saved": saved,
    }
    between = profile.resident_bytes - profile.floor_bytes - profile.parameter_bytes
    transient = base - profile.resident_bytes - gradients - profile.optimizer_bytes
    return known | {"beside_the_model": between, "transient": transient}


def _gradients_at(profile: Profile, table: Table, moment: int) -> int:
    if table.release_gradients:
        in_backward = profile.timeline.forward <= moment < len(profile.timeline.gradient_bytes)
        return largest_gradient_bytes(profile) if in_backward else 0
    existing = profile.timeline.gradient_bytes
    if table.micro_batch < profile.batch_size or moment >= len(existing):
        return profile.gradient_bytes
    return existing[moment]


def _about_pieces(profile: Profile, table: Table) -> str:
    size = table.micro_batch
    if size == profile.batch_size:
        why = profile.split_refusal or "it fits, and pieces would take longer or no less"
        return f"the whole batch of {size} at once: {why}"
    rate = size / profile.forward_backward_ms(size)
    whole = profile.batch_size / profile.forward_backward_ms(profile.batch_size)
    return (
        f"pieces of {size} of {profile.batch_size}: {rate / whole:.0%} of the whole batch's "
        "examples a second, cheaper here than holding less of each example"
    )


def _about_gradients(table: Table) -> str:
    if table.release_gradients:
        return "gradients are released one by one: they do not fit together with what is saved"
    return "gradients are held until the update: so a step can be tried again"


def _about_fusion(fusion: FusionReport) -> str:
    if fusion.pattern:
        gain = _GAINS.get(fusion.operator, _ONE_CODE)
        return f"{fusion.module}: fused as {fusion.pattern}: {gain}"
    return f"{fusion.module}: not fused: {fusion.reason}"


def _about_replay(table: Table, column: int) -> str:
    replay = table.replays[column - int(table.first[-1])]
    return (
        f"{replay.module}: replayed, {len(replay.families)} families of sites not saved for "
        f"{replay.cost_ms:.2f} ms a piece"
    )


def _about_option(option: Option, sites: str, saved_bytes: float, *, counts: bool) -> str:
    if option.level == KEPT or not option.treatments:
        return f"{sites}: kept: it fits" if counts else f"{sites}: kept: not alive at the peak"
    names = ", ".join(f"{site} {_words(each)}" for site, each in option.treatments.items())
    if not counts:
        return f"{names}: not alive at the peak; frees bytes at another moment"
    price = f"{option.cost_ms:.2f} ms a piece"
    return f"{names}: frees {format_bytes(int(saved_bytes))} at the peak for {price}"


def _words(treatment: object) -> str:
    method = getattr(treatment, "method", None)
    bits = getattr(treatment, "bits", 0)
    where = " on the host" if getattr(treatment, "on_host", False) else ""
    return (f"{method} {bits}".strip() if bits else str(method)) + where
