"""Which module calls may be replayed: each that a plan could choose is proven on a small step.

One module of each kind comes first, the largest before others, and proving ends when it has taken
as long as it may. A module that was not tried by then is judged by the others of its kind, of the
same code and options. What is not proven is not offered; the reason stays in the profile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import nn

from daf.recompute.proof import NO_ROOM, NO_TIME, ReplayProof
from daf.saved_tensors.observation import NO_CALL, Observation

# Of a plain step's time, for batches of LEAST_EXAMPLES and more; smaller ones have longer.
MOST_STEPS = 0.35
PASS_STEPS = 0.4  # besides, of a pass with all examples
MOST_STEPS_SMALL = 4.0
LEAST_EXAMPLES = 16
LEAST_MS = 1000.0  # for the quick steps of small models
_SMALL_STEP_MS = 40.0
_CALL_MS = 0.3  # noting what a call found
_NOT_TRIED = (NO_ROOM, NO_TIME)
_MOST_PASSES = 3  # of the forward pass, where inputs of all calls do not fit at once


@dataclass(frozen=True, slots=True)
class ProofLimits:
    """The room for what is held (bytes; None: enough for everything) and the time (ms)."""

    room_bytes: int | None
    most_ms: float


def most_ms(tried: int, examples: int, step_ms: float) -> float:
    """Return how long proving with ``tried`` examples may take, where a whole step takes this."""
    steps = MOST_STEPS_SMALL
    if examples >= LEAST_EXAMPLES:
        steps = MOST_STEPS + PASS_STEPS * tried / examples
    return max(LEAST_MS, step_ms * steps) if step_ms < _SMALL_STEP_MS else step_ms * steps


def prove_replays(
    model: nn.Module, observation: Observation, forward: Callable[[], object], limits: ProofLimits
) -> dict[str, str]:
    """Return why modules (by path) must not be replayed.

    ``forward`` runs the model and the loss on the examples of the observation.
    """
    kinds = {path: _kind(model.get_submodule(path)) for path in _candidates(observation)}
    firsts = {kind: path for path, kind in reversed(kinds.items())}
    wanted = [*reversed(firsts.values()), *(path for path in kinds if firsts[kinds[path]] != path)]
    most_calls = int(limits.most_ms / 2 / _CALL_MS)
    chosen = wanted[:most_calls]
    deadline_s = time.thread_time() + limits.most_ms / 1000
    refusals = dict.fromkeys(wanted[most_calls:], NO_TIME)
    for _ in range(_MOST_PASSES):
        if not chosen:
            break
        proof = ReplayProof(model, chosen, limits.room_bytes, deadline_s)
        try:
            with proof.watching():
                forward()
        except Exception as error:  # as one that differentiates, for which there is no room
            return dict.fromkeys(kinds, f"a watched step raised {type(error).__name__}: {error}")
        found = proof.run_again()
        refusals |= found
        left = [path for path in chosen if found.get(path) == NO_ROOM]
        chosen = left if len(left) < len(chosen) else []
        for path in chosen:
            del refusals[path]
    return _judged_by_kind(kinds, refusals)


def refuse_replays(observations: Sequence[Observation], refusals: Mapping[str, str]) -> None:
    """Note in the observations why modules (by path) must not be replayed."""
    for call in (call for each in observations for call in each.calls):
        if call.module in refusals:
            call.refuse(refusals[call.module])


def _judged_by_kind(kinds: Mapping[str, Hashable], found: Mapping[str, str]) -> dict[str, str]:
    """Return the refusals where modules that were not tried are judged by others of their kind."""
    proven = {kind for path, kind in kinds.items() if path not in found}
    differing = {kinds[path]: why for path, why in found.items() if why not in _NOT_TRIED}
    refusals = {}
    for path, why in found.items():
        if why not in _NOT_TRIED:
            refusals[path] = why
        elif kinds[path] in differing or kinds[path] not in proven:
            refusals[path] = differing.get(kinds[path], why)
    return refusals


def _kind(module: nn.Module) -> Hashable:
    """Return what modules share that run the same code: numbers count as something or nothing."""
    return tuple(
        (
            name,
            type(part),
            part.training,
            len(part._forward_hooks),
            *map(_option, vars(part).items()),
        )
        for name, part in module.named_modules()
    )


def _option(entry: tuple[str, Any]) -> Hashable:
    name, value = entry
    is_code = isinstance(value, (bool, str, type(None), FunctionType))
    return name, value if is_code else value != 0 if isinstance(value, float) else type(value)


def _candidates(observation: Observation) -> list[str]:
    """Return the modules that a plan could replay: large ones first, nearly whole models last.

    Those are all but the root's that save something inside and that nothing speaks against yet.
    """
    calls = observation.calls
    saving = {save.call for save in observation.saves if save.call != NO_CALL}
    for place in range(len(calls) - 1, -1, -1):  # callers come before what they call
        if place in saving and calls[place].parent != NO_CALL:
            saving.add(calls[place].parent)
    found: dict[str, float] = {}
    for place, call in enumerate(calls):
        if call.parent != NO_CALL and place in saving:
            found[call.module] = found.get(call.module, 0.0) + call.forward_ms
    refused = {call.module for call in calls if not call.replayable}
    half = max(found.values(), default=0.0) / 2
    order = sorted(found, key=lambda path: (found[path] > half, -found[path]))
    return [path for path in order if path not in refused]
