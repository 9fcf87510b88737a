"""How replayed calls hold tensors: in the same ledger, store and sites as all saved tensors."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from daf.core.policy import Method, Need, Site, Treatment
from daf.recompute.call_state import HeldInput
from daf.saved_tensors.ledger import Holding, Source
from daf.saved_tensors.packed_tensor import Kept, PackedTensor, SavedTensor
from daf.saved_tensors.packer import is_integer
from daf.saved_tensors.sites import SiteRecord
from daf.saved_tensors.state import SavedTensorState
from daf.torch_compat.autograd_graph import strided_parts, version_of

# Holds a saved tensor as the policy says.
Hold = Callable[[SavedTensor, Need, SiteRecord, tuple[Source, ...]], tuple[PackedTensor, Treatment]]
_REPLAY = Treatment(Method.REPLAY)
_EXACT = frozenset({Method.KEEP, Method.PACK, Method.SPILL})


class ReplayKeeper:
    """Holds and counts tensors for the replayed calls of one entered capture."""

    def __init__(
        self, state: SavedTensorState, hold: Hold, is_constant: Callable[[Tensor], bool]
    ) -> None:
        self.scratch = state.scratch
        self._state, self._hold = state, hold
        self._is_constant = is_constant

    def keep_constant(self, tensor: Tensor, site: Site) -> PackedTensor | None:
        """Hold a parameter, buffer or tensor of the caller; None for others, autocast's copies."""
        parts = strided_parts(tensor)
        if parts and all(map(self._state.sources.is_external, parts)):
            kept = Kept(tensor, version_of(tensor), site)
            self._state.parameter_reads.note(tensor, kept)
            return kept
        return None

    def note_reader(self, module: nn.Module, reader: object) -> None:
        """Note that ``reader`` may read every parameter of the module, as long as it lives."""
        for parameter in module.parameters():
            if not is_lazy(parameter):
                self._state.parameter_reads.note(parameter, reader)

    def hold_input(self, tensor: Tensor, site: Site) -> HeldInput:
        """Hold an input by the policy."""
        record = self._state.tracker.record(site.module, site.operator, site.call, site.save)
        record.need = Need.INTEGER if is_integer(tensor) else Need.INPUT
        sources = self._state.sources.of_parts(tensor)
        saved = SavedTensor(tensor)
        try:
            with self._state.ledger.counted_at(record):
                held, record.treatment = self._hold(saved, record.need, record, sources)
        finally:
            saved.drop()
        return HeldInput(held, sources, record.treatment.method in _EXACT)

    def hold_rebuilt(self, tensor: Tensor, site: Site) -> tuple[PackedTensor, Any]:
        """Hold a rebuilt tensor, as it is, until backward has read it."""
        sources = self._state.sources.of_parts(tensor)
        return self._state.packer.keep(tensor, version_of(tensor), site, sources), sources

    def note_save(self, tensor: Tensor, path: str) -> Any:
        """Count what plain PyTorch would hold, for as long as the returned object lives."""
        if self._is_constant(tensor):
            return ()
        record = self._state.tracker.record(path, "replay", 0, 0)
        record.need, record.treatment = Need.EXACT, _REPLAY
        with self._state.ledger.counted_at(record):
            return tuple(source.plain() for source in self._state.sources.of_parts(tensor))

    def count(self, nbytes: int) -> Holding:
        """Count bytes held besides tensors."""
        return Holding(self._state.ledger, nbytes)

    def rebuilding(self) -> AbstractContextManager[None]:
        """Run a call again inside: its operators are at no site."""
        return self._state.tracker.at_the_top()
