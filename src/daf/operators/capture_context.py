"""What a capture does for a fused normalisation: treatment, account, recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from daf.codecs.coder import Coder
from daf.codecs.codes import MaskCode, ValueCode, Values
from daf.core.errors import CodecError
from daf.core.policy import KEEP, Method, Need, Policy, Treatment
from daf.kernels import RowMoments
from daf.kernels.normalisation import Channels, NormOutput
from daf.operators.batch_norm.function import FusedNorm, Holder, Norm, NormHeld, run_forward
from daf.operators.batch_norm.pattern import NormSite
from daf.operators.batch_norm.relu import Rectifier
from daf.saved_tensors.derivation import Derivation
from daf.saved_tensors.ledger import Ledger, Plain, Sources, Unmade
from daf.saved_tensors.observation import Save, Watcher
from daf.saved_tensors.packed_tensor import Kept, PackedTensor, SavedTensor, Stored, Term
from daf.saved_tensors.packer import check_sound, kept_holding
from daf.saved_tensors.provenance import Provenance
from daf.saved_tensors.sites import SiteRecord, SiteTracker
from daf.torch_compat.ownership import is_held_by_none_but, sole_holders

_NORM = "batch_norm"
_MASK = Treatment(Method.MASK, 1)


class Hooks(Protocol):
    """The saved-tensor hooks of one ``with``."""

    @property
    def hook(self) -> Callable[[Tensor], SavedTensor]:
        """What autograd calls for every tensor it saves."""

    def collecting(self) -> AbstractContextManager[list[SavedTensor]]:
        """Everything packed inside is the caller's to settle."""

    def is_constant(self, tensor: Tensor) -> bool:
        """Is this nothing that plain PyTorch would hold for us?"""

    def note_read(self, tensor: Tensor, held: object) -> None:
        """A constant may be read in backward for as long as ``held`` lives."""

    @property
    def watcher(self) -> Watcher | None:
        """Who is told of operators and saves."""

    @property
    def spilled_bytes(self) -> int:
        """What ever went to disk, or to wait on the host."""


class OperatorContext:
    """Runs fused normalisations for one ``with`` of a capture."""

    def __init__(
        self,
        hooks: Hooks,
        policy: Policy,
        key: int,
        coder: Coder,
        ledger: Ledger,
        sources: Sources,
        tracker: SiteTracker,
        provenance: Provenance,
    ) -> None:
        self.pack = hooks.hook
        self.hooks = hooks
        self.policy = policy
        self.key = key
        self.coder = coder
        self.ledger = ledger
        self.sources = sources
        self.tracker = tracker
        self.provenance = provenance

    def norm_site(self) -> NormSite:
        """Where the normalisation that runs now is."""
        return NormSite(*self.tracker.present_call(_NORM))

    def enter_norm(self) -> None:
        """One more of them ran there."""
        self.tracker.next_call(_NORM)

    def carry(
        self, norm: Norm, site: NormSite, addend: Tensor | None, rectifier: Rectifier | None
    ) -> Tensor:
        """Run the operator; ``rectifier`` is the ReLU function, if one comes last.

        Raises:
            CodecError: the policy asks for a treatment that is unsound here.
        """
        watcher = self.hooks.watcher
        if watcher is not None:
            watcher.moment()
        owned = is_held_by_none_but(norm)
        record = self.tracker.record(site.module, _NORM, site.call, 0)
        told, plain = self.ledger.reported_bytes, self.ledger.plain_bytes
        holder = _NormHolder(self, norm, record)
        made: list[NormHeld] = []
        most = None if rectifier is None else rectifier.most

        def run() -> Tensor:
            out, held = run_forward(norm, addend, most, holder, owned=owned)
            made.append(held)
            return out

        sole_holders()  # known before the first backward pass asks
        inputs = (norm.x, norm.weight, norm.bias)
        with self.hooks.collecting() as pending:
            result: Tensor = FusedNorm.apply(*inputs, addend, run)  # type: ignore[no-untyped-call]
        (held,), (saved,) = made, pending
        if result.data_ptr() == norm.x.data_ptr():
            self.sources.renew(result)
        if self.hooks.is_constant(norm.x):
            self.hooks.note_read(norm.x, held)
        plain_held = holder.plain
        record.plain_bytes += self.ledger.plain_bytes - plain
        if rectifier is not None:
            plain_held = (*plain_held, self._note_mask(rectifier, held, result))
        record.held_bytes += self.ledger.reported_bytes - told
        if held.mask is not None:
            record.held_bytes -= held.mask.nbytes
        function = self._learn(held, addend, rectifier, result)
        if watcher is not None and not holder.is_external:
            save = told_of(saved, norm.x, held, holder)
            is_over = result.data_ptr() == norm.x.data_ptr()
            beside = held.mask.nbytes if held.mask is not None else 0
            watcher.saved(save._replace(is_over=is_over, beside_bytes=beside, tells=function))
        saved.settle(held, plain_held)
        return result

    def _note_mask(self, rectifier: Rectifier, held: NormHeld, result: Tensor) -> Plain:
        path, call = self.tracker.next_call(rectifier.name)
        record = self.tracker.record(path, rectifier.name, call, 0)
        assert held.mask is not None
        plain = self.ledger.plain_bytes
        if rectifier.is_bounded and not rectifier.is_in_place:  # PyTorch saves its input
            plain_held = Plain(self.ledger, Unmade(result.nbytes))
        else:
            plain_held = self.sources.of(result).plain()
        record.need, record.treatment = Need.SIGN, _MASK
        record.plain_bytes += self.ledger.plain_bytes - plain
        record.held_bytes += held.mask.nbytes
        return plain_held

    def counted(self, values: Stored[Values] | Values) -> Stored[Values]:
        """The values that others derive something from."""
        return values if isinstance(values, Stored) else Stored(self.ledger, values)

    def _learn(
        self, held: NormHeld, addend: Tensor | None, rectifier: Rectifier | None, result: Tensor
    ) -> Derivation | None:
        """How others can compute the result; the function where only a kept input would tell it."""
        if not self.policy.rederive:
            return None
        values = held.values()
        term = Term(self.counted(values), held.result)
        function = None
        if rectifier is None or not rectifier.is_bounded:
            held.recipe = self.provenance.added(addend, term, held.mask)
        elif addend is None:
            bounds = 0.0, rectifier.most
            function = Derivation(lambda tensor: tensor.clamp_(*bounds))
            self.provenance.learn_function(result, function)
            if not isinstance(values, Stored):  # a code's error hides which bound was passed
                held.recipe = (term._replace(derivation=function),)
        if held.recipe is not None:
            self.provenance.learn(result, held)
        return function


class CountingHolder:
    """Holds what one normalisation needs as the policy says, and tells the ledger."""

    def __init__(
        self,
        carrier: OperatorContext,
        x: Tensor,
        beside: Sequence[Tensor],
        need: Need,
        record: SiteRecord,
    ) -> None:
        """For input ``x``; ``beside``: what plain PyTorch would save too."""
        self._carrier = carrier
        self.record = record
        self._version = x._version
        self.is_external = carrier.hooks.is_constant(x)
        parts = tuple(beside) if self.is_external else (x, *beside)
        self.sources = tuple(carrier.sources.of(part) for part in parts)
        self.plain = tuple(source.plain() for source in self.sources)
        record.need = need
        treatment = carrier.policy.treatment(need, record.site)
        check_sound(treatment.method, need, record.site)
        if treatment.method is Method.SPILL:
            raise CodecError(
                f"asked to spill what {record.site} saves, which is a fused normalisation; these "
                "keep or code it; give that site another treatment, or do not fuse"
            )
        record.treatment = KEEP if self.is_external else treatment

    def hold_input(self, x: Tensor) -> Kept | None:
        """The caller's own tensor, or what the policy keeps."""
        if self.record.treatment.method is not Method.KEEP:
            return None
        counted = () if self.is_external else (kept_holding(self.sources[0], self._ledger),)
        return Kept(x, self._version, self.record.site, counted)

    def encode(
        self,
        x: Tensor,
        channels: Channels | None,
        written: NormOutput | None,
        rows: RowMoments | None = None,
    ) -> Stored[ValueCode]:
        """Code ``channels`` of the input as the record says; ``written`` beside it, if anything."""
        record, carrier = self.record, self._carrier
        before = carrier.hooks.spilled_bytes
        code = carrier.coder.values(
            x,
            record.treatment,
            record.code_key(carrier.key),
            channels,
            weight=carrier.policy.weight(record.site),
            tag=record.name_hash,
            output=written,
            rows=rows,
        )
        record.spilled_bytes += carrier.hooks.spilled_bytes - before
        return self.stored(code)

    def new_mask(self, x: Tensor) -> MaskCode:
        """Room for a mask of a tensor, where the code goes; counted with that."""
        record, carrier = self.record, self._carrier
        before = carrier.hooks.spilled_bytes
        mask = carrier.coder.unwritten_mask(x, on_host=record.treatment.on_host)
        record.spilled_bytes += carrier.hooks.spilled_bytes - before
        return mask

    def stored(self, content: Any) -> Stored[Any]:
        """Count something that is held."""
        return Stored(self._ledger, content)

    @property
    def _ledger(self) -> Ledger:
        return self._carrier.ledger


class _NormHolder(Holder):
    """The same in the words of the operator with batch normalisation."""

    def __init__(self, carrier: OperatorContext, norm: Norm, record: SiteRecord) -> None:
        self._counting = CountingHolder(carrier, norm.x, norm.statistics, Need.NORM, record)
        self.plain = self._counting.plain
        self.record, self.sources = record, self._counting.sources
        self.is_external = self._counting.is_external

    def hold_input(self, norm: Norm) -> Kept | None:
        """The input itself, if that is to be held."""
        return self._counting.hold_input(norm.x)

    def new_mask(self, x: Tensor) -> MaskCode:
        """Room for a mask of it."""
        return self._counting.new_mask(x)

    def encode(self, norm: Norm, written: Any) -> Stored[ValueCode]:
        """Code the normalised value."""
        forward = norm.statistics.forward(norm.geometry.inner)
        return self._counting.encode(norm.x.detach(), forward, written)

    def stored(self, content: Any) -> Stored[Any]:
        """Count something that is held."""
        return self._counting.stored(content)


def told_of(
    saved: SavedTensor,
    x: Tensor,
    held: PackedTensor,
    holder: CountingHolder | _NormHolder,
) -> Save:
    """What a watcher is told of a fused operator: its input stands for itself, or its code does."""
    record = holder.record
    return Save(
        saved,
        x,
        held,
        record.site,
        record.need,
        record.treatment,
        holder.sources[:1],
        record.held_bytes,
        ms=None,
        treatable=True,
    )
