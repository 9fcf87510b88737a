"""Which module calls may be replayed: each that a plan could choose is proven on a small step.

One module of each kind comes first, the largest before others, and proving ends when it has taken
as long as it may. A module that was not tried by then is judged by the others of its kind, of the
same code and options. What is not proven is not offered; the reason stays in the profile.
"""

import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import nn

from daf.recompute.proof import NO_ROOM, NO_TIME, ReplayProof
from daf.saved_tensors.observation import NO_CALL, ModuleCall, Observation

# Of a plain step's time, for batches of LEAST_EXAMPLES and more; smaller ones have longer.
MOST_STEPS = 0.1
PASS_STEPS = 0.4  # besides, of a pass with all examples
GRACE = 2.5  # times as long for the first module of each kind
MOST_STEPS_SMALL = 4.0
LEAST_EXAMPLES = 16
LEAST_MS = 1000.0  # for the quick steps of small models
_SMALL_STEP_MS = 40.0
_CALL_MS = 0.3  # noting what a call found
_NOT_TRIED = (NO_ROOM, NO_TIME)


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
    """Return why modules (by path) must not be replayed; ``forward`` runs model and loss again."""
    parts, nearly_whole = _candidates(observation)
    known: dict[nn.Module, tuple[Any, ...]] = {}
    kinds = {path: _kind(model.get_submodule(path), known) for path in (*parts, *nearly_whole)}
    firsts = [*{kinds[path]: path for path in reversed(parts)}.values()][::-1]
    trials = _Trials(model, forward, limits, dict.fromkeys(kinds, NO_TIME))
    left, tried = firsts, len(kinds) + 1
    while left and len(left) < tried:
        tried = len(left)
        left = trials.run(left, GRACE)
    taken_ms = _forward_ms(observation.calls)
    rest = [path for path in kinds if path not in set(firsts)]
    trials.run(trials.in_time({path: taken_ms[path] for path in rest}), 1.0)
    return _judged_by_kind(kinds, trials.refusals)


@dataclass(eq=False)
class _Trials:
    """Proofs of some modules each, and the refusals so far."""

    _model: nn.Module
    _forward: Callable[[], object]
    _limits: ProofLimits
    refusals: dict[str, str]
    _pass_ms: float = 0.0  # of the last watched forward pass

    def __post_init__(self) -> None:
        self._start_s = time.thread_time()

    def run(self, paths: Sequence[str], grace: float) -> list[str]:
        """Prove modules until ``grace`` times the limit has passed; return those without room."""
        if not paths:
            return []
        deadline_s = self._start_s + grace * self._limits.most_ms / 1000
        proof = ReplayProof(self._model, paths, self._limits.room_bytes, deadline_s)
        start_s = time.thread_time()
        try:
            with proof.watching():
                self._forward()
        except Exception as error:  # as one that differentiates, for which there is no room
            reason = f"a watched step raised {type(error).__name__}: {error}"
            self.refusals |= dict.fromkeys(paths, reason)
            return []
        self._pass_ms = 1000 * (time.thread_time() - start_s)
        found = proof.run_again()
        for path in paths:
            self.refusals.pop(path, None)
        self.refusals |= found
        return [path for path in paths if found.get(path) == NO_ROOM]

    def in_time(self, taken_ms: Mapping[str, float]) -> list[str]:
        """Return those of the modules whose second runs end within the limit, after one more pass.

        ``taken_ms``: by path, of a module's calls in a pass.
        """
        left_ms = self._limits.most_ms - 1000 * (time.thread_time() - self._start_s) - self._pass_ms
        found = []
        for path, each_ms in taken_ms.items():
            if each_ms + 2 * _CALL_MS <= left_ms:
                left_ms -= each_ms + 2 * _CALL_MS
                found.append(path)
        return found


def refuse_replays(observations: Sequence[Observation], refusals: Mapping[str, str]) -> None:
    """Note in the observations why modules (by path) must not be replayed."""
    for call in (call for each in observations for call in each.calls):
        if call.module in refusals:
            call.refuse(refusals[call.module])


def _judged_by_kind(kinds: Mapping[str, Hashable], found: Mapping[str, str]) -> dict[str, str]:
    proven = {kind for path, kind in kinds.items() if path not in found}
    differing = {kinds[path]: why for path, why in found.items() if why not in _NOT_TRIED}
    refusals = {}
    for path, why in found.items():
        if why not in _NOT_TRIED:
            refusals[path] = why
        elif kinds[path] in differing or kinds[path] not in proven:
            refusals[path] = differing.get(kinds[path], why)
    return refusals


def _kind(module: nn.Module, known: dict[nn.Module, tuple[Any, ...]]) -> Hashable:
    """Return what modules share that run the same code: numbers count as something or nothing."""
    # ``known``: the same of single modules, those that are found here included.
    for part in module.modules():
        if part not in known:
            options = map(_option, vars(part).items())
            known[part] = (type(part), part.training, len(part._forward_hooks), *options)
    return tuple((name, known[part]) for name, part in module.named_modules())


def _option(entry: tuple[str, Any]) -> Hashable:
    name, value = entry
    is_code = isinstance(value, (bool, str, type(None), FunctionType))
    return name, value if is_code else value != 0 if isinstance(value, float) else type(value)


def _candidates(observation: Observation) -> tuple[list[str], list[str]]:
    """Return the modules that a plan could replay, large ones first; nearly whole models apart."""
    # Those are all but the root's that save something inside and that nothing speaks against yet.
    # Replay of nearly a whole model holds as much again in backward.
    calls = observation.calls
    saving = {save.call for save in observation.saves if save.call != NO_CALL}
    for place in range(len(calls) - 1, -1, -1):  # callers come before what they call
        if place in saving and calls[place].parent != NO_CALL:
            saving.add(calls[place].parent)
    inside = (call for place, call in enumerate(calls) if place in saving)
    found = _forward_ms(call for call in inside if call.parent != NO_CALL)
    refused = {call.module for call in calls if not call.replayable}
    half = sum(call.forward_ms for call in calls if call.parent == NO_CALL) / 2
    order = sorted(found.keys() - refused, key=lambda path: (-found[path], path))
    parts = [path for path in order if found[path] <= half]
    return parts, [path for path in order if found[path] > half]


def _forward_ms(calls: Iterable[ModuleCall]) -> dict[str, float]:
    found: dict[str, float] = {}
    for call in calls:
        found[call.module] = found.get(call.module, 0.0) + call.forward_ms
    return found
