"""Why a plan: one line per choice, the account of its peak term by term, and what no plan does."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate

from daf.core.errors import BudgetError
from daf.core.policy import Treatment
from daf.core.profile import Profile
from daf.core.reports import FusionReport, LeverRefusal
from daf.core.units import format_bytes
from daf.planning.options import KEPT, Option
from daf.planning.table import Selection, Table, gradients_by_moment

_ONE_CODE = "one pass, and one code for all"
_BY_INPUT = "as long as its input is kept, the layer behind holds nothing"
_GAINS = {
    "linear": "in chunks of rows, so that the logits never exist",
    "gelu": _BY_INPUT,
    "silu": _BY_INPUT,
}


def explain(table: Table, selection: Selection) -> tuple[str, ...]:
    """Return lines for the micro-batch, gradients, every fusion, replay and family of sites."""
    gradients = (
        "gradients are released one by one: they do not fit together with what is saved"
        if table.release_gradients
        else "gradients are held until the update: so a step can be tried again"
    )
    lines = [_about_micro_batch(table), gradients, *map(_about_fusion, table.profile.fusions)]
    row = table.row(int(table.usage_of(selection).argmax()))
    for column in selection:
        if column < table.first[-1]:
            family = table.family_of[column]
            kept = int(table.first[family])
            saved = float(row[kept] - row[column])
            sites = ", ".join(str(each.site) for each in table.families[family])
            option = table.option(column)
            lines.append(_about_option(option, sites, saved, counts=bool(row[kept] > 0)))
    lines += [
        f"{replay.module}: replayed, {len(replay.families)} families of sites not saved for "
        f"{replay.cost_ms:.2f} ms a micro-batch"
        for replay in table.replays_in(selection)
    ]
    return tuple(lines)


def account_of(table: Table, selection: Selection) -> dict[str, int]:
    """Return the terms (bytes) that add up to the computed peak, at the moment of that peak."""
    profile, moment = table.profile, int(table.usage_of(selection).argmax())
    saved = int(table.row(moment)[list(selection)].sum())
    base = int(table.base_bytes[moment])
    by_moment = gradients_by_moment(profile, table.micro_batch, table.release_gradients)
    gradients = int(by_moment[moment])
    return {
        "floor": profile.floor_bytes,
        "parameters": profile.parameter_bytes,
        "gradients": gradients,
        "optimizer_state": profile.optimizer_bytes,
        "saved": saved,
        "beside_the_model": profile.resident_bytes - profile.floor_bytes - profile.parameter_bytes,
        "transient": base - profile.resident_bytes - gradients - profile.optimizer_bytes,
    }


def left_alone(
    profiles: Sequence[Profile], least: Callable[[Sequence[Profile]], int]
) -> list[LeverRefusal]:
    """Return what no plan does because nothing has proven it, and the bytes that it would save.

    ``least`` returns the least budget of these profiles, PyTorch's own operators' first.
    """

    def saved_bytes(change: Callable[[Profile], Profile]) -> int | None:
        with suppress(BudgetError):
            return max(0, least(profiles) - least([change(each) for each in profiles]))
        return None

    found, own = [], profiles[0]
    if own.split_refusal:
        bytes_cut = saved_bytes(lambda each: replace(each, split_refusal=""))
        found.append(LeverRefusal("splitting", (), own.split_refusal, bytes_cut))
    by_reason: dict[str, list[str]] = defaultdict(list)
    for module, reason in own.replay_refusals.items():
        callers = accumulate(module.split(".")[:-1], "{}.{}".format)
        if not any(own.replay_refusals.get(caller) == reason for caller in callers):
            by_reason[reason].append(module)
    for reason, modules in by_reason.items():
        bytes_replayed = saved_bytes(partial(_replaying, reason))
        found.append(LeverRefusal("replay", tuple(modules), reason, bytes_replayed))
    for fusion in profiles[-1].fusions:
        if not fusion.pattern:
            place = (f"{fusion.module}:{fusion.operator}",)
            found.append(LeverRefusal("fusion", place, fusion.reason, None))
    return found


def _replaying(reason: str, profile: Profile) -> Profile:
    """Return the profile as if calls refused for this reason could be replayed."""
    allowed = (
        replace(call, replayable=call.replayable or call.replay_refusal == reason)
        for call in profile.calls
    )
    return replace(profile, calls=tuple(allowed))


def _about_micro_batch(table: Table) -> str:
    profile, size = table.profile, table.micro_batch
    if size == profile.batch_size:
        why = profile.split_refusal or "it fits, and micro-batches would take longer or no less"
        return f"the whole batch of {size} at once: {why}"
    rate = size / profile.forward_backward_ms(size)
    whole = profile.batch_size / profile.forward_backward_ms(profile.batch_size)
    return (
        f"micro-batches of {size} of {profile.batch_size}: {rate / whole:.0%} of the whole batch's "
        "examples a second, cheaper here than holding less of each example"
    )


def _about_fusion(fusion: FusionReport) -> str:
    if fusion.pattern:
        gain = _GAINS.get(fusion.operator, _ONE_CODE)
        return f"{fusion.module}: fused as {fusion.pattern}: {gain}"
    return f"{fusion.module}: not fused: {fusion.reason}"


def _about_option(option: Option, sites: str, saved_bytes: float, *, counts: bool) -> str:
    if option.level == KEPT or not option.treatments:
        return f"{sites}: kept: it fits" if counts else f"{sites}: kept: not alive at the peak"
    names = ", ".join(f"{site} {_words(each)}" for site, each in option.treatments.items())
    if not counts:
        return f"{names}: not alive at the peak; frees bytes at another moment"
    price = f"{option.cost_ms:.2f} ms a micro-batch"
    return f"{names}: frees {format_bytes(int(saved_bytes))} at the peak for {price}"


def _words(treatment: Treatment) -> str:
    where = " on the host" if treatment.on_host else ""
    return (f"{treatment.method} {treatment.bits}" if treatment.bits else treatment.method) + where
