"""One step under capture: packs what autograd saves, and settles it when its operator returns."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from daf.codecs.layout import content_key
from daf.core.errors import CodecError
from daf.core.policy import DERIVED, EXACT_CODES, KEEP, RECOMPUTE, Need, Policy, Site, Treatment
from daf.recompute.holder import ReplayKeeper
from daf.recompute.recipe import RecipeMaker
from daf.recompute.replay import ReplayLog, Replays
from daf.recompute.values import ValueRecorder
from daf.saved_tensors.backward_rules import name_saves, need_of, parameter_behind
from daf.saved_tensors.ledger import Plain, Source, Unmade
from daf.saved_tensors.observation import Save, Watcher
from daf.saved_tensors.pack_request import Call, PackRequest
from daf.saved_tensors.packed_tensor import Kept, PackedTensor, SavedTensor
from daf.saved_tensors.packer import is_integer, is_treatable
from daf.saved_tensors.provenance import ADDITIONS, FOLLOWED, Operands
from daf.saved_tensors.sites import SiteRecord, mix_key
from daf.saved_tensors.state import SavedTensorState
from daf.torch_compat import autograd_graph
from daf.torch_compat.operator_mode import Arguments, Keywords
from daf.torch_compat.pytree import tensors_in_batch

_OUTSIDE_CALL = Call(None, (), {}, None, None)
_CUSTOM = "autograd.Function"
# Shares of what plain PyTorch has saved so far: a smaller tensor's bytes are not worth looking it
# up; so many of them, together, are.
_LEAST, _MOST_LEFT = 0.002, 0.03
_NOISY = ("dropout", "attention", "lstm", "gru", "rnn")


def _weakly(pack: Callable[[Tensor], SavedTensor]) -> Callable[[Tensor], SavedTensor]:
    """Return a weak hook: the graph keeps hooks, a strong one the model, while a result lives."""
    reference = weakref.WeakMethod(pack)

    def hook(tensor: Tensor) -> SavedTensor:
        alive = reference()
        assert alive is not None  # hooks are called only inside the ``with`` that holds it
        return alive(tensor)

    return hook


class SavedTensorHooks:
    """One ``with`` of a capture: packs what is saved and settles it when its operator returns.

    CodecError: the policy both fuses operators and replays modules.
    """

    def __init__(
        self,
        model: nn.Module,
        state: SavedTensorState,
        replay_log: ReplayLog,
        policy: Policy,
        key_parts: tuple[int, ...],
        watcher: Watcher | None = None,
    ) -> None:
        self.watcher, self._state = watcher, state
        if policy.fused and policy.replayed:
            raise CodecError(
                f"policy {policy.name!r} asks for fused operators and for replayed calls; a fused "
                "one may wait beyond the end of a call, so ask for one of the two"
            )
        self._policy = policy
        self.key = mix_key(*key_parts)
        keeper = ReplayKeeper(state, self._hold, self.is_constant)
        self.replays = Replays(model, policy.replayed, keeper, replay_log)
        self.recorder = ValueRecorder() if policy.records_values else None
        self._recipes: RecipeMaker | None = None
        if self.recorder is not None:
            self._recipes = RecipeMaker(self.recorder, state, self.is_constant, watcher is None)
        self._left_bytes = 0
        self._pending: list[SavedTensor] | None = None  # None: no operator is running
        self._unsettled: list[SavedTensor] = []  # of what runs or just returned
        self.hook = _weakly(self.pack)

    def pack(self, tensor: Tensor) -> SavedTensor:
        """The hook that autograd calls for every tensor it saves."""
        with autograd_graph.without_torch_function():
            if self.replays.is_running:
                return self.replays.pack(tensor)
            saved = SavedTensor(tensor)
            self._unsettled.append(saved)
            if self._pending is not None:
                self._pending.append(saved)
            else:
                self._settle([saved], _CUSTOM, _OUTSIDE_CALL)
                self.note_settled()
            return saved

    @property
    def is_replaying(self) -> bool:
        """True while a replayed call runs, for the first time or again."""
        return self.replays.is_running

    def run(self, function: Callable[..., Any], arguments: Arguments, keywords: Keywords) -> Any:
        """Run an operator, and settle what it saved when it returns."""
        operands = self._begin(function, arguments)
        first_sequence_number = autograd_graph.sequence_number()
        with self.collecting() as pending:
            result = function(*arguments, **keywords)
        if pending:
            name_saves(result, first_sequence_number)
            call = Call(function, arguments, keywords, result, operands)
            self._settle(pending, getattr(function, "__name__", type(function).__name__), call)
            self.note_settled()
        elif operands is not None and function in ADDITIONS and not keywords:
            self._state.provenance.learn_sum(arguments, result, operands)
        return result

    def _begin(self, operator: Callable[..., Any], arguments: Arguments) -> Operands | None:
        if self.watcher is not None and self._pending is None:
            self.watcher.moment()
        if self.replays.is_running:
            self.replays.note_operator(operator)
        elif operator in FOLLOWED and self._policy.rederive:
            return self._state.provenance.operands(arguments)
        return None

    @contextmanager
    def collecting(self) -> Iterator[list[SavedTensor]]:
        """Collect everything packed inside, for the caller to settle; drop it on an error."""
        outer, self._pending = self._pending, []
        collected = self._pending
        try:
            yield collected
        except BaseException:
            for saved in collected:
                saved.drop()
            raise
        finally:
            self._pending = outer

    def note_settled(self) -> None:
        """Note that what was packed until now is settled, unless an operator is running."""
        if self._pending is None:
            self._unsettled.clear()

    def close(self) -> None:
        """Drop what an interrupt left unsettled, wherever it came: outputs hold their own graph."""
        if self.watcher is not None and self.recorder is not None:
            self.watcher.recorded(self.recorder.own_ms)
        for saved in self._unsettled:
            saved.drop()

    def _settle(self, pending: list[SavedTensor], operator: str, call: Call) -> None:
        if self.recorder is not None:
            self.recorder.is_paused = True
        try:
            needs = [self._need(saved, operator, call) for saved in pending]
            path, count = self._state.tracker.next_call(operator)
            for place, (saved, need) in enumerate(zip(pending, needs, strict=True)):
                assert saved.tensor is not None
                if self.is_constant(saved.tensor):
                    kept = Kept(saved.tensor, saved.version, Site(path, operator, count, place))
                    self._state.parameter_reads.note(saved.tensor, kept)
                    saved.settle(kept, self._plain(saved, ()))
                else:
                    record = self._state.tracker.record(path, operator, count, place)
                    self._settle_one(saved, need, record, call)
            self._state.evictions.collect()
        finally:
            if self.recorder is not None:
                self.recorder.is_paused = False
            for saved in pending:
                saved.drop()  # which settling has done, unless it raised

    def _need(self, saved: SavedTensor, operator: str, call: Call) -> Need:
        tensor = saved.tensor
        assert tensor is not None
        need = need_of(saved, self.is_constant, operator)
        if need is Need.EXACT and is_integer(tensor):
            return Need.INTEGER
        if need is Need.LINEAR and _may_be_noise(saved, tensor, operator, call):
            return Need.TWO_VALUED
        if _is_factor(saved) and self._state.sources.of(tensor).knows(_factor(saved)):
            return Need.PRODUCT  # of another call: by one code the two errors would multiply
        return need

    def _settle_one(self, saved: SavedTensor, need: Need, record: SiteRecord, call: Call) -> None:
        tensor = saved.tensor
        assert tensor is not None
        record.need = need
        ledger = self._state.ledger
        sources = self._state.sources.of_parts(tensor)
        held_before = ledger.reported_bytes
        with ledger.counted_at(record):
            plain = self._plain(saved, sources)
            start_s = 0.0 if self.watcher is None else self.watcher.now_s()
            held, record.treatment = self._hold(saved, need, record, sources, call)
        if self.watcher is not None:
            ms, held_bytes = 1000.0 * (self.watcher.now_s() - start_s), ledger.reported_bytes
            what = (record.site, need, record.treatment, sources, held_bytes - held_before, ms)
            save = Save(saved, tensor, held, *what, is_treatable(tensor))
            if need in DERIVED:
                function = self._state.provenance.function_of(tensor, saved.version)
                save = save._replace(derived_by=function)
            self.watcher.saved(save)
        if _is_factor(saved):
            sources[0].remember(_factor(saved), held)
        saved.settle(held, plain)

    def _plain(self, saved: SavedTensor, sources: tuple[Source, ...]) -> tuple[Plain, ...]:
        if saved.unmade_bytes is None:
            return tuple(source.plain() for source in sources)
        return (Plain(self._state.ledger, Unmade(saved.unmade_bytes, sources)),)

    def _hold(
        self,
        saved: SavedTensor,
        need: Need,
        record: SiteRecord,
        sources: tuple[Source, ...],
        call: Call = _OUTSIDE_CALL,
    ) -> tuple[PackedTensor, Treatment]:
        tensor, site = saved.tensor, record.site
        assert tensor is not None
        treatment = self._policy.treatment(need, record.site)
        if not is_treatable(tensor):
            return self._state.packer.keep(tensor, saved.version, site, sources), KEEP
        recipes = self._recipes
        if recipes and need is Need.SIGN:
            recipes.note_sign(tensor, site)
        if self._is_recomputed(need, site, treatment, sources[0]):
            again = recipes and recipes.recomputed(tensor, saved.version, need, site)
            if again:
                return again, RECOMPUTE
            treatment = KEEP if treatment == RECOMPUTE else treatment
        key = record.code_key(self.key)
        weight, tag = self._policy.weight(site), record.name_hash
        source, rederive = sources[0], self._policy.rederive
        job = PackRequest(
            saved, tensor, need, treatment, source, call, site, key, weight, tag, rederive
        )
        held, treated = self._state.packer.treat(job)
        if recipes and treated == EXACT_CODES.get(need):
            recipes.note_code(tensor, held)
        return held, treated

    def _is_recomputed(self, need: Need, site: Site, treatment: Treatment, source: Source) -> bool:
        """True if recipes are asked for; for signs where another reader's was in the last pass."""
        reader = self._state.sign_readers.pop(site, None) if need is Need.SIGN else None
        if reader is not None and self.watcher is None:
            treatment = self._policy.treatment(*reader)
        if not self._policy.recomputes:
            return treatment == RECOMPUTE
        return treatment == KEEP and (self.watcher is not None or not self._is_left(source.nbytes))

    def _is_left(self, nbytes: int) -> bool:
        plain_bytes = self._state.ledger.plain_peak_bytes
        is_small = nbytes < _LEAST * plain_bytes and self._left_bytes < _MOST_LEFT * plain_bytes
        self._left_bytes += nbytes if is_small else 0
        return is_small

    def is_constant(self, tensor: Tensor) -> bool:
        """True if this is a parameter, a buffer, the caller's, or a view or cast copy of one."""
        if not autograd_graph.is_strided(tensor):
            parts = autograd_graph.strided_parts(tensor)
            return bool(parts) and all(map(self._state.sources.is_external, parts))
        if self._state.sources.is_external(tensor):
            return True
        leaf = parameter_behind(tensor)
        return leaf is not None and leaf is not tensor and self.is_constant(leaf)


def _is_factor(saved: SavedTensor) -> bool:
    """True if this is a factor of a product by elements, which codes may hold."""
    node, tensor = saved.node, saved.tensor
    is_product = node is not None and node.name() == "MulBackward0"
    return is_product and tensor is not None and is_treatable(tensor)


def _factor(saved: SavedTensor) -> tuple[Any, ...]:
    assert saved.tensor is not None
    return "factor", *content_key(saved.tensor, saved.version)


def _may_be_noise(saved: SavedTensor, tensor: Tensor, operator: str, call: Call) -> bool:
    if tensor.requires_grad or saved.node is None or saved.node.name() != "MulBackward0":
        return False
    is_noisy = any(word in operator for word in _NOISY)
    return is_noisy and all(tensor is not each for each in tensors_in_batch(call.arguments))
