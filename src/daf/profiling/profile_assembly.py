"""Turns observed small steps into the parts of a Profile: pure, and the same for any model.

Two steps of different sizes have the same moments, saves and calls, so that every number becomes a
line in the batch. Where they differ (data-dependent control flow), the larger one is scaled.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from daf.core.policy import KEEP, SMALL_BYTES, Method, Need, Reading, Site
from daf.core.profile import Affine, CallProfile, Profile, Recipe, Saving, Timeline, decoded_bytes
from daf.saved_tensors.observation import Observation, ObservedTensor

_NOT_CODED = (Need.EXACT, Need.INPUT)
# Of a saved tensor: what is known as it was observed, in merged moments, and by examples.
_SAME = ("site", "need", "storage", "content", "call", "parents", "reading", "teller")
_MOMENTS = ("saved", "dies", "read", "released")
_SIZES = ("storage_bytes", "elements", "tensor_bytes", "beside_bytes")


class MicroBatchParts(NamedTuple):
    """The parts of a Profile that observed steps give."""

    savings: tuple[Saving, ...]
    calls: tuple[CallProfile, ...]
    timeline: Timeline


def build(observations: Sequence[Observation]) -> MicroBatchParts:
    """Return the parts of a Profile from steps of growing size under one policy of codes."""
    alike = [each for each in observations if _shape(each) == _shape(observations[-1])]
    moments = _Moments(alike[-1])
    return MicroBatchParts(
        _savings(alike, moments), _calls(alike, moments), _timeline(alike, moments)
    )


def with_recipes(profile: Profile, recomputing: Observation) -> Profile:
    """Return a profile with the recipes of a step that recomputed what it could."""
    kept = {each.storage: each.site for each in recomputing.saves if each.treatment == KEEP}
    found = {each.site: _recipe(each, kept, recomputing.examples) for each in recomputing.saves}
    savings = tuple(replace(each, recipe=found.get(each.site)) for each in profile.savings)
    return replace(profile, savings=savings, recording_ms=recomputing.recording_ms)


def _recipe(saved: ObservedTensor, kept: Mapping[int, Site], examples: int) -> Recipe | None:
    if saved.recipe is None:
        return None

    def line(value: float) -> Affine:
        return Affine.through([(examples, value)])

    leaves = saved.recipe.leaves
    return Recipe(
        frozenset(kept[number] for number in leaves if number in kept),
        tuple((number, line(size)) for number, size in leaves.items() if number not in kept),
        line(saved.recipe.copied_bytes),
        line(saved.recipe.alive_bytes),
        line(saved.read_ms),
    )


def _shape(observation: Observation) -> tuple[object, ...]:
    saves = [
        (each.site, each.storage, each.content, each.saved, each.read) for each in observation.saves
    ]
    calls = [(each.module, each.parent, each.first_moment) for each in observation.calls]
    return len(observation.peak_bytes), observation.forward, tuple(saves), tuple(calls)


class _Moments:
    """Observed moments, merged where nothing begins or ends between them."""

    def __init__(self, observation: Observation) -> None:
        count = len(observation.peak_bytes)
        begins = {0, observation.forward}
        for save in observation.saves:
            begins |= {save.saved, save.dies, save.read, save.released + 1}
        for call in observation.calls:
            begins |= {call.first_moment, call.last_moment + 1}
        changes = zip(pairwise(observation.gradient_bytes), range(1, count), strict=False)
        begins |= {moment for (before, after), moment in changes if before != after}
        self.begins = sorted(moment for moment in begins if 0 <= moment < count)
        marks = [moment in begins for moment in range(count + 1)]
        self._number = [total - 1 for total in accumulate(map(int, marks))]
        self.count = len(self.begins)
        self.forward = self._number[observation.forward] if observation.forward < count else count
        self._ends = [*self.begins[1:], count]

    def number(self, moment: int) -> int:
        """Return the number among the merged moments."""
        return self.count if moment >= len(self._number) - 1 else self._number[max(0, moment)]

    def highest(self, values: Sequence[float]) -> list[float]:
        """Return the highest value within each merged moment."""
        return [
            max(values[first:last]) for first, last in zip(self.begins, self._ends, strict=True)
        ]


def _savings(observations: Sequence[Observation], moments: _Moments) -> tuple[Saving, ...]:
    found = [
        _saving([(each.examples, each.saves[index]) for each in observations], moments)
        for index in range(len(observations[-1].saves))
    ]
    # Integers saved again hold nothing more: their bits were counted the first time.
    packed = {each.content: each.packed_bits for each in found if each.packed_bits}
    return tuple(replace(each, packed_bits=packed.get(each.content, 0.0)) for each in found)


def _saving(points: list[tuple[int, ObservedTensor]], moments: _Moments) -> Saving:
    found = points[-1][1]
    small = found.tensor_bytes < SMALL_BYTES and found.need not in _NOT_CODED
    packed = found.treatment.method is Method.PACK and found.elements > 0
    known: dict[str, Any] = {name: getattr(found, name) for name in _SAME}
    known |= {name: moments.number(getattr(found, name)) for name in _MOMENTS}
    for name in _SIZES:
        known[name] = Affine.through((n, getattr(each, name)) for n, each in points)
    packed_bits = 8.0 * found.held_bytes / found.elements if packed else 0.0
    return Saving(**known, treatable=found.treatable or small, packed_bits=packed_bits)


def _calls(observations: Sequence[Observation], moments: _Moments) -> tuple[CallProfile, ...]:
    found = []
    for index, call in enumerate(observations[-1].calls):
        points = [(each.examples, each.calls[index]) for each in observations]
        inputs = tuple(
            (storage, Affine.through((n, each.inputs[place][1]) for n, each in points))
            for place, (storage, _) in enumerate(call.inputs)
        )
        found.append(
            CallProfile(
                module=call.module,
                parent=call.parent,
                forward_ms=Affine.through((n, each.forward_ms) for n, each in points),
                first_forward=moments.number(call.first_moment),
                last_forward=moments.number(call.last_moment),
                inputs=inputs,
                output_bytes=Affine.through((n, each.output_bytes) for n, each in points),
                replayable=all(each.replayable for _, each in points),
                operators=call.operators,
                replay_refusal=next((c.replay_refusal for _, c in points if c.replay_refusal), ""),
            )
        )
    return tuple(found)


def _timeline(observations: Sequence[Observation], moments: _Moments) -> Timeline:
    rows = [(each.examples, moments.highest(transient(each))) for each in observations]
    lines = tuple(
        Affine.through((examples, values[moment]) for examples, values in rows)
        for moment in range(moments.count)
    )
    gradients = observations[-1].gradient_bytes
    return Timeline(lines, tuple(gradients[moment] for moment in moments.begins), moments.forward)


def transient(observation: Observation) -> list[float]:
    """Return per moment the bytes alive beside gradients, autograd's tensors, and decoded ones."""
    count = len(observation.peak_bytes)
    change = [0] * (count + 2)
    for first, last, nbytes in _spans(observation):
        if first <= last and first < count:
            change[first] += nbytes
            change[last + 1] -= nbytes
    held = list(accumulate(change))
    rows = zip(observation.peak_bytes, observation.gradient_bytes, held, strict=False)
    return [float(max(0, peak - gradients - saved)) for peak, gradients, saved in rows]


def _observed_decoded_bytes(save: ObservedTensor, observation: Observation) -> float:
    """Return the bytes decoded at once: part of a fused activation's input, all of PyTorch's."""
    if save.reading is Reading.APART:
        return min(save.tensor_bytes, observation.part_bytes)
    part_bytes = min(4 * save.elements, observation.norm_part_bytes)
    return decoded_bytes(save.reading, save.tensor_bytes, observation.chunk_bytes, part_bytes)


def _spans(observation: Observation) -> list[tuple[int, int, int]]:
    """Return (first moment, last, bytes) of what autograd kept, and of what was decoded for it."""
    found = []
    last: dict[int, ObservedTensor] = {}
    for save in observation.saves:
        if save.treatment != KEEP:
            decoded = _observed_decoded_bytes(save, observation)
            found.append((save.read, save.released, int(decoded)))
        elif save.storage not in last or last[save.storage].released < save.released:
            last[save.storage] = save
    found += [(each.dies, each.released, each.storage_bytes) for each in last.values()]
    return found
