"""The packer: a saved tensor and a treatment in, what is held instead out."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from daf.codecs import ranges
from daf.codecs.coder import Coder
from daf.codecs.codes import ElementsCode, ValueCode
from daf.codecs.layout import in_memory_order, is_dense, layout_of, overlaps
from daf.codecs.ranged import WHOLE, Cut, grid_of
from daf.codecs.scratch import Scratch
from daf.core.errors import CodecError
from daf.core.policy import KEEP, SMALL_BYTES, SOUND, Method, Need, Site, Treatment, is_sound
from daf.kernels import Codec
from daf.kernels.backend import is_codable
from daf.kernels.devices import can_code_on, is_read_freely, is_recorded
from daf.kernels.normalisation import Channels, ElementCode
from daf.offload.spill import SpillRecord, SpillStore
from daf.saved_tensors.activation_codes import smooth_code
from daf.saved_tensors.backward_rules import saved_in, sign_rule
from daf.saved_tensors.dropout import Dropping
from daf.saved_tensors.ledger import Holding, Ledger, Source
from daf.saved_tensors.max_pool import WindowPlaces, windows_of
from daf.saved_tensors.norm_inputs import NormInput, normalisation_of
from daf.saved_tensors.pack_request import PackRequest
from daf.saved_tensors.packed_tensor import (
    Decoded,
    Kept,
    PackedTensor,
    Rederived,
    Shape,
    Spilled,
    Stored,
    Term,
)
from daf.saved_tensors.provenance import Provenance
from daf.torch_compat.autograd_graph import is_strided, is_transforming

_PART_ELEMENTS = 1 << 18
_REDERIVED = Treatment(Method.REDERIVE)
_INTEGERS = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
# Whose saved tensors have their channels second, as images' do; all others have them last.
_CHANNELS_SECOND = ("Convolution", "BatchNorm", "GroupNorm")


def is_treatable(tensor: Tensor) -> bool:
    """True if this is a plain strided tensor, not small, where kernels exist and no torch.func."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or not is_strided(tensor):
        return False
    is_odd = tensor.is_complex() or tensor.is_quantized or tensor.is_neg() or is_transforming()
    return not is_odd and tensor.nbytes >= SMALL_BYTES and can_code_on(tensor.device)


def is_integer(tensor: Tensor) -> bool:
    """True if this is a tensor of booleans or integers that can be packed."""
    return tensor.dtype in _INTEGERS


def check_sound(method: Method, need: Need, site: Site) -> None:
    """Raise CodecError unless what a method leaves of a tensor satisfies the need."""
    if not is_sound(method, need):
        allowed = ", ".join(sorted(SOUND[need] | {Method.SPILL}))
        raise CodecError(
            f"asked for {method} at {site}, whose backward needs {need}; sound there: {allowed}"
        )


def kept_holding(source: Source, ledger: Ledger) -> Holding:
    """Return what counts a storage that is kept; one for all tensors that keep it."""
    if (holding := source.recall("kept", Holding)) is None:
        holding = Holding(ledger, source.nbytes)
        source.remember("kept", holding)
    return holding


class Packer:
    """Packs saved tensors, sharing whatever is already held."""

    def __init__(
        self, coder: Coder, spill: SpillStore, ledger: Ledger, provenance: Provenance
    ) -> None:
        self._coder, self._spill = coder, spill
        self._ledger, self._provenance = ledger, provenance
        self._dropping = Dropping(provenance, ledger)

    def treat(self, job: PackRequest) -> tuple[PackedTensor, Treatment]:
        """Return what to hold, and the treatment that it really is; CodecError if unsound."""
        method = job.treatment.method
        check_sound(method, job.need, job.site)
        held = self._try(job) if method is not Method.KEEP else None
        if held is None:
            return self.keep(job.tensor, job.saved.version, job.site, (job.source,)), KEEP
        return held, _REDERIVED if _is_borrowed(held, job.treatment) else job.treatment

    def keep(
        self, tensor: Tensor, version: int, site: Site, sources: tuple[Source, ...]
    ) -> PackedTensor:
        """Hold the tensor itself; each storage it consists of is counted once."""
        holdings = tuple(kept_holding(source, self._ledger) for source in sources)
        kept = Kept(tensor, version, site, holdings)
        if len(sources) == 1:
            sources[0].remember("kept by", kept)
        return kept

    def _try(self, job: PackRequest) -> PackedTensor | None:
        if job.tensor._version != job.saved.version:
            return None  # changed in place within its operator: keeping reports it in backward
        if is_recorded(job.tensor):
            return None
        if job.treatment.method is Method.SPILL:
            return self._spilled(job)
        if job.need is Need.SHAPE:
            return Shape(layout_of(job.tensor)) if is_dense(job.tensor) else None
        if job.source.recall("kept", Holding) is not None and job.need is not Need.NORM:
            return None  # the storage stays alive anyway
        if job.need is Need.INTEGER:
            return self._pack(job)
        if not is_codable(job.tensor.dtype) or overlaps(job.tensor):
            return None
        if job.need is Need.SIGN:
            return self._sign(job)
        if job.need is Need.TWO_VALUED:
            return self._two_values(job)
        if job.treatment.method is Method.REDERIVE:
            return self._rederived(job)
        return self._derivative(job) if job.need is Need.SMOOTH else self._values(job)

    def _shared(
        self, job: PackRequest, kind: tuple[Any, ...], make: Callable[[], Any]
    ) -> Stored[Any] | None:
        """Return the code of this kind held of the same content, else ``make`` one, or None."""
        key = (*kind, *job.content_key)
        stored = job.source.recall(key, Stored)
        if stored is None and (code := make()) is not None:
            stored = Stored(self._ledger, code)
            job.source.remember(key, stored)
        return stored

    def _spilled(self, job: PackRequest) -> PackedTensor | None:
        if not is_read_freely(job.tensor) or job.source.recall("kept", Holding) is not None:
            return None  # on a device, or the storage stays alive anyway
        key = ("spilled", job.saved.version)
        if (record := job.source.recall(key, SpillRecord)) is None:
            record = self._spill.put(job.tensor, str(job.site), self._ledger.note_held)
            if record is None:
                return None
            job.source.remember(key, record)
        return Spilled(self._spill, record, job.tensor, self._ledger)

    def _pack(self, job: PackRequest) -> PackedTensor | None:
        if not is_dense(job.tensor):
            return None
        if job.saved.slot == "result1" and "MaxPool" in job.saved.node.name():
            return self._window_places(job)
        code = self._shared(job, ("integers",), lambda: self._packed(job))
        return None if code is None else Decoded(code, layout_of(job.tensor))

    def _elements(
        self, job: PackRequest, tensor: Tensor, bits: int, code: ElementCode, **options: Any
    ) -> ElementsCode | None:
        return self._coder.elements(tensor, bits, code, on_host=job.treatment.on_host, **options)

    def _packed(self, job: PackRequest) -> ElementsCode | None:
        tensor = job.tensor
        if tensor.dtype is torch.bool:
            return self._elements(job, tensor, 1, ElementCode(Codec.INTEGERS))
        if not is_read_freely(tensor):
            return None  # their range is known on the device alone
        signed = tensor.view(torch.int8) if tensor.dtype is torch.uint8 else tensor
        low, high = map(int, ranges.bounds(signed))
        bits = max(1, (high - low).bit_length())
        if bits >= 8 * tensor.element_size():
            return None
        return self._elements(job, tensor, bits, ElementCode(Codec.INTEGERS, base=low))

    def _window_places(self, job: PackRequest) -> PackedTensor | None:
        if (pooled := saved_in(job.saved.node, "self")) is None:
            return None
        windows = windows_of(job.saved.node, pooled.restore(Scratch()).shape)
        places = windows.offsets(job.tensor)
        packed = self._elements(job, places, windows.bits, ElementCode(Codec.INTEGERS))
        assert packed is not None
        return WindowPlaces(Stored(self._ledger, packed), layout_of(job.tensor), windows)

    def _sign(self, job: PackRequest) -> PackedTensor | None:
        rule = sign_rule(job.saved.node, job.tensor.dtype)
        if rule is None or not is_dense(job.tensor):
            return None
        code = ElementCode(Codec.MASK, predicate=rule.predicate, low=rule.low, high=rule.high)
        key = (Codec.MASK, rule.predicate, rule.low, rule.high)
        mask = self._shared(job, key, lambda: self._elements(job, job.tensor, 1, code))
        assert mask is not None
        held = Decoded(mask, layout_of(job.tensor), low=rule.off_value, high=rule.on_value)
        operands = job.call.operands
        if job.rederive and operands is not None and job.saved.slot == "result":
            if job.tensor.stride() == operands.stride:
                held.recipe = self._provenance.masked(job.saved.node, operands, mask)
            if held.recipe is not None:
                self._provenance.learn(job.tensor, held)
        return held

    def _two_values(self, job: PackRequest) -> PackedTensor | None:
        """Hold dropout's noise as a mask, if it really takes two values."""
        if not is_dense(job.tensor) or not is_read_freely(job.tensor):
            return None
        low, high = ranges.bounds(job.tensor)
        parts = torch.split(in_memory_order(job.tensor), _PART_ELEMENTS)
        if not (low < high and all(((each == low) | (each == high)).all() for each in parts)):
            return None
        code = self._elements(job, job.tensor, 1, ElementCode(Codec.MASK, low=low))
        assert code is not None
        held = Decoded(Stored(self._ledger, code), layout_of(job.tensor), low=low, high=high)
        if job.rederive and low == 0.0:
            self._dropping.learn(job, held, high)
        return held

    def _derivative(self, job: PackRequest) -> PackedTensor | None:
        if (table := smooth_code(job.saved.node, job.treatment.bits)) is None:
            return None
        dense = _dense(job.tensor)
        slopes = ElementCode(Codec.DERIVATIVE, key=job.key, table=table.lines)
        if (code := self._elements(job, dense, job.treatment.bits, slopes)) is None:
            return None
        return Decoded(Stored(self._ledger, code), layout_of(dense), table=table.representatives)

    def _values(self, job: PackRequest) -> PackedTensor | None:
        if job.treatment.method is Method.REGISTERED:
            return self._registered(job)
        if job.treatment.method is Method.RANGED:
            return self._ranged(job)
        if job.need is Need.NORM and is_dense(job.tensor):
            derived = self._normalised(job)
        else:
            derived = self._rederived(job)
        if derived is not None:
            return derived
        dense = _dense(job.tensor)
        code = self._shared(job, (job.treatment,), lambda: self._value_code(job, dense))
        if code is None:
            return None
        held = Rederived((Term(code),), layout_of(dense))
        if job.rederive and dense is job.tensor:
            if job.saved.slot == "result":
                self._provenance.learn_made(job.saved.node, job.saved.version, held)
            elif not job.is_result:
                self._provenance.learn(job.tensor, held)
        return held

    def _registered(self, job: PackRequest) -> PackedTensor | None:
        dense, treatment = _dense(job.tensor), job.treatment
        code = self._shared(
            job, (treatment,), lambda: self._coder.registered(dense, treatment, job.key)
        )
        return None if code is None else Decoded(code, layout_of(dense))

    def _ranged(self, job: PackRequest) -> PackedTensor | None:
        dense, bits = _dense(job.tensor), job.treatment.bits
        name = job.saved.node.name()
        dimension = 1 if any(part in name for part in _CHANNELS_SECOND) else -1
        cut = Cut.along(dense, dimension) if job.treatment.by_channel else WHOLE
        key = (job.treatment, cut, *job.content_key)
        if (found := job.source.recall(key, Decoded)) is not None:
            return Decoded(found.code, layout_of(dense), **found.arguments)
        low, high = ranges.ours().channel_ends(dense, cut)
        if is_read_freely(dense) and not (high - low).isfinite().all():
            return None
        grid = grid_of(low, high, bits, cut.inner)
        steps = ElementCode(Codec.STEPS, grid.to_steps, job.key)
        code = self._elements(job, dense, bits, steps, weight=job.weight, tag=job.tag)
        assert code is not None
        from_steps = Stored(self._ledger, grid.from_steps)
        held = Decoded(Stored(self._ledger, code), layout_of(dense), channels=from_steps)
        job.source.remember(key, held)
        return held

    def _rederived(self, job: PackRequest) -> PackedTensor | None:
        """Derive from codes held anyway, if they are at least as wide as the plan asks for here."""
        recipe = None
        if job.rederive and is_dense(job.tensor):
            recipe = self._provenance.recipe(job.tensor, job.saved.version)
        if recipe is None:
            return None
        if any(term.code.content.treatment.bits < job.treatment.bits for term in recipe):
            return None
        if recipe[0].derivation is not None:
            recipe[0].derivation.note_reader()
        return Rederived(recipe, layout_of(job.tensor))

    def _normalised(self, job: PackRequest) -> PackedTensor | None:
        if (done := normalisation_of(job)) is None:
            return None
        forward = done.statistics.forward(done.inner)
        if (made := self._value_code(job, job.tensor, forward)) is None:
            return None
        code = Stored(self._ledger, made)
        held = NormInput(code, layout_of(job.tensor), done)
        result = job.node_result if job.rederive else None
        if result is not None and result.stride() == job.tensor.stride():
            channels = Stored(self._ledger, done.result) if done.result is not None else None
            if channels is not None or done.plain:
                held.recipe = (Term(code, channels),)
                self._provenance.learn(result, held)
        return held

    def _value_code(
        self, job: PackRequest, tensor: Tensor, channels: Channels | None = None
    ) -> ValueCode | None:
        """Encode; None if a value is not finite, which would spoil others of its block."""
        options = {"weight": job.weight, "tag": job.tag}
        code = self._coder.values(tensor, job.treatment, job.key, channels, **options)
        return code if code.is_finite else None


def _is_borrowed(held: PackedTensor, treatment: Treatment) -> bool:
    """True if this holds only codes of other sites, or of another treatment."""
    if not isinstance(held, Rederived):
        return False
    if len(held.recipe) > 1 or held.recipe[0][1:] != (None, None, None):
        return True
    made = held.recipe[0].code.content.treatment
    return (made.method, made.bits) != (treatment.method, treatment.bits)


def _dense(tensor: Tensor) -> Tensor:
    return tensor if is_dense(tensor) else tensor.detach().clone()
