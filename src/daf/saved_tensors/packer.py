"""Carrying out a treatment: a saved tensor and a method in, what is held instead out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from daf.codecs import ranges
from daf.codecs.coder import Coder
from daf.codecs.codes import IntegerCode, Values
from daf.codecs.layout import content_key, in_memory_order, is_dense, layout_of, overlaps
from daf.codecs.ranged import WHOLE, Cut, grid_of
from daf.codecs.scratch import Scratch
from daf.core.code_format import Predicate
from daf.core.errors import CodecError
from daf.core.policy import KEEP, Method, Need, Site, Treatment
from daf.kernels.backend import is_codable
from daf.kernels.devices import can_code_on, is_read_freely, is_recorded
from daf.kernels.normalisation import Channels
from daf.offload.spill import SpillRecord, SpillStore
from daf.saved_tensors.activation_codes import smooth_code
from daf.saved_tensors.backward_rules import saved_in, sign_rule
from daf.saved_tensors.dropout import Dropping
from daf.saved_tensors.ledger import Holding, Ledger, Source
from daf.saved_tensors.max_pool import WindowPlaces, windows_of
from daf.saved_tensors.norm_inputs import normalisation_of
from daf.saved_tensors.pack_request import PackRequest, is_result, result_made_by
from daf.saved_tensors.packed_tensor import (
    Decoded,
    Derivative,
    Kept,
    NormInput,
    PackedTensor,
    Ranged,
    Rederived,
    SavedTensor,
    Shape,
    Spilled,
    Stored,
    Term,
    TwoValues,
)
from daf.saved_tensors.provenance import Provenance

_PART_ELEMENTS = 1 << 18
SMALL_BYTES = 4096  # smaller tensors are kept: their codes' headers and our objects cost as much
_REDERIVED = Treatment(Method.REDERIVE)
_INTEGERS = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_VALUE_METHODS = frozenset(
    {Method.KEEP, Method.ROTATED, Method.MINMAX, Method.RANGED, Method.REGISTERED}
)
# Whose saved tensors have their channels second, as PyTorch's convolutions and normalisations of
# images do; all others have them last.
_CHANNELS_SECOND = ("Convolution", "BatchNorm", "GroupNorm")
_EVERYWHERE = frozenset({Method.SPILL})  # every bit comes back
SOUND: Mapping[Need, frozenset[Method]] = {
    Need.LINEAR: _VALUE_METHODS | {Method.REDERIVE},
    Need.NORM: _VALUE_METHODS,
    Need.PRODUCT: _VALUE_METHODS,
    Need.SCORE: _VALUE_METHODS,
    Need.PROBABILITY: _VALUE_METHODS,
    Need.SMOOTH: frozenset({Method.KEEP, Method.DERIVATIVE}),
    Need.SIGN: frozenset({Method.KEEP, Method.MASK}),
    Need.TWO_VALUED: frozenset({Method.KEEP, Method.MASK}),
    Need.INTEGER: frozenset({Method.KEEP, Method.PACK}),
    Need.INPUT: _VALUE_METHODS,
    Need.SHAPE: frozenset({Method.KEEP, Method.DROP}),
    Need.EXACT: frozenset({Method.KEEP}),
}


def is_treatable(tensor: Tensor) -> bool:
    """Can anything but keeping be done? (A plain strided tensor that is not small, where there
    are kernels for it.)
    """
    return (
        tensor.layout is torch.strided
        and tensor.nbytes >= SMALL_BYTES
        and can_code_on(tensor.device)
        and type(tensor) in (Tensor, torch.nn.Parameter)
        and not tensor.is_complex()
        and not tensor.is_quantized
        and not tensor.is_neg()
    )


def is_integer(tensor: Tensor) -> bool:
    """Is this a tensor of booleans or integers that can be packed?"""
    return tensor.dtype in _INTEGERS


def check_sound(method: Method, need: Need, site: Site) -> None:
    """Does what a method leaves of a tensor satisfy the need?

    Raises:
        CodecError: it does not.
    """
    allowed = SOUND[need] | _EVERYWHERE
    if method not in allowed:
        raise CodecError(
            f"asked for {method} at {site}, whose backward needs {need}; "
            f"sound there: {', '.join(sorted(allowed))}"
        )


def kept_holding(source: Source, ledger: Ledger) -> Holding:
    """Stands for a storage that is kept as it is; one for all who keep it."""
    holding = source.recall("kept", Holding)
    if holding is None:
        holding = Holding(ledger, source.nbytes)
        source.remember("kept", holding)
    return holding


class Packer:
    """Turns saved tensors into what is held instead, sharing whatever is already held."""

    def __init__(
        self, coder: Coder, spill: SpillStore, ledger: Ledger, provenance: Provenance
    ) -> None:
        self._coder = coder
        self._spill = spill
        self._ledger = ledger
        self._provenance = provenance
        self._dropping = Dropping(provenance, ledger)

    def treat(self, job: PackRequest, *, rederive: bool) -> tuple[PackedTensor, Treatment]:
        """What to hold, and the treatment that it really is.

        Raises:
            CodecError: the treatment is unsound for the tensor's need.
        """
        method = job.treatment.method
        check_sound(method, job.need, job.site)
        held = self._try(job, rederive) if method is not Method.KEEP else None
        if held is None:
            return self.keep(job.tensor, job.saved.version, job.site, (job.source,)), KEEP
        return held, _REDERIVED if _is_borrowed(held, job.treatment) else job.treatment

    def keep(
        self, tensor: Tensor, version: int, site: Site, sources: tuple[Source, ...]
    ) -> PackedTensor:
        """Hold the tensor itself; each storage it consists of is counted once."""
        holdings = tuple(kept_holding(source, self._ledger) for source in sources)
        return Kept(tensor, version, site, holdings)

    def _try(self, job: PackRequest, rederive: bool) -> PackedTensor | None:
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
            return self._sign(job, rederive)
        if job.need is Need.TWO_VALUED:
            return self._two_values(job, rederive)
        if job.treatment.method is Method.REDERIVE:
            return self._rederived(job) if rederive else None
        if job.need is Need.SMOOTH:
            return self._derivative(job)
        return self._values(job, rederive)

    # --- lossless ---------------------------------------------------------------------------

    def _spilled(self, job: PackRequest) -> PackedTensor | None:
        if not is_read_freely(job.tensor) or job.source.recall("kept", Holding) is not None:
            return None  # on a device, or the storage stays alive anyway
        key = ("spilled", job.saved.version)
        record = job.source.recall(key, SpillRecord)
        if record is None:
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
        key = ("integers", *_content_key(job))
        code = job.source.recall(key, Stored)
        if code is None:
            packed = self._packed(job.tensor, job.treatment.on_host)
            if packed is None:
                return None
            code = Stored(self._ledger, packed)
            job.source.remember(key, code)
        return Decoded(code, layout_of(job.tensor))

    def _packed(self, tensor: Tensor, on_host: bool) -> IntegerCode | None:
        if tensor.dtype is torch.bool:
            return self._coder.integers(tensor, 1, 0, on_host=on_host)
        if not is_read_freely(tensor):
            return None  # their range is known on the device alone
        signed = tensor.view(torch.int8) if tensor.dtype is torch.uint8 else tensor
        low, high = map(int, ranges.bounds(signed))
        bits = max(1, (high - low).bit_length())
        if bits >= 8 * tensor.element_size():
            return None
        return self._coder.integers(tensor, bits, low, on_host=on_host)

    def _window_places(self, job: PackRequest) -> PackedTensor | None:
        pooled = saved_in(job.saved.node, "self")
        if pooled is None:
            return None
        windows = windows_of(job.saved.node, _shape_of(pooled))
        places = windows.offsets(job.tensor)
        on_host = job.treatment.on_host
        packed = self._coder.integers(places, windows.bits, 0, on_host=on_host)
        code = Stored(self._ledger, packed)
        return WindowPlaces(code, layout_of(job.tensor), windows)

    def _sign(self, job: PackRequest, rederive: bool) -> PackedTensor | None:
        rule = sign_rule(job.saved.node, job.tensor.dtype)
        if rule is None or not is_dense(job.tensor):
            return None
        key = ("mask", rule.predicate, rule.low, rule.high, *_content_key(job))
        mask = job.source.recall(key, Stored)
        if mask is None:
            options = {"on_host": job.treatment.on_host}
            code = self._coder.mask(job.tensor, rule.predicate, rule.low, rule.high, **options)
            mask = Stored(self._ledger, code)
            job.source.remember(key, mask)
        held = TwoValues(mask, layout_of(job.tensor), rule.off_value, rule.on_value)
        if rederive and job.call.operands is not None and job.saved.slot == "result":
            self._learn_relu(job, held)
        return held

    def _learn_relu(self, job: PackRequest, held: TwoValues) -> None:
        assert job.call.operands is not None
        if job.tensor.stride() != job.call.operands.stride:
            return
        held.recipe = self._provenance.masked(job.saved.node, job.call.operands, held.mask)
        if held.recipe is not None:
            self._provenance.learn(job.tensor, held)

    def _two_values(self, job: PackRequest, rederive: bool) -> PackedTensor | None:
        """Dropout's noise, if it really takes two values."""
        if not is_dense(job.tensor) or not is_read_freely(job.tensor):
            return None
        low, high = ranges.bounds(job.tensor)
        if not low < high or not _has_only(job.tensor, low, high):
            return None
        code = self._coder.mask(job.tensor, Predicate.ABOVE, low, on_host=job.treatment.on_host)
        layout = layout_of(job.tensor)
        held = TwoValues(Stored(self._ledger, code), layout, low, high)
        if rederive and low == 0.0:
            self._dropping.learn(job, held, high)
        return held

    # --- lossy ------------------------------------------------------------------------------

    def _derivative(self, job: PackRequest) -> PackedTensor | None:
        table = smooth_code(job.saved.node, job.treatment.bits)
        if table is None:
            return None
        dense = _dense(job.tensor)
        bits, on_host = job.treatment.bits, job.treatment.on_host
        code = self._coder.intervals(dense, bits, table.borders, on_host=on_host)
        if code is None:
            return None
        stored = Stored(self._ledger, code)
        return Derivative(stored, layout_of(dense), table.representatives)

    def _values(self, job: PackRequest, rederive: bool) -> PackedTensor | None:
        held: PackedTensor | None
        if job.treatment.method is Method.REGISTERED:
            return self._registered(job)
        if job.treatment.method is Method.RANGED:
            return self._ranged(job)
        if job.need is Need.NORM and is_dense(job.tensor):
            held = self._normalised(job, rederive)
        else:
            held = self._rederived(job) if rederive else None
        if held is not None:
            return held
        dense = _dense(job.tensor)
        key = (job.treatment, *_content_key(job))
        code = job.source.recall(key, Stored)
        if code is None:
            code = self._value_code(job, dense)
            job.source.remember(key, code)
        held = Rederived((Term(code),), layout_of(dense))
        if rederive and dense is job.tensor:
            self._learn_coded(job, held)
        return held

    def _learn_coded(self, job: PackRequest, held: Rederived) -> None:
        if job.saved.slot == "result":
            self._provenance.learn_made(job.saved.node, job.saved.version, held)
        elif not is_result(job):
            self._provenance.learn(job.tensor, held)

    def _registered(self, job: PackRequest) -> PackedTensor | None:
        dense = _dense(job.tensor)
        key = (job.treatment, *_content_key(job))
        code = job.source.recall(key, Stored)
        if code is None:
            made = self._coder.registered(dense, job.treatment, job.key)
            if made is None:
                return None
            code = Stored(self._ledger, made)
            job.source.remember(key, code)
        return Decoded(code, layout_of(dense))

    def _ranged(self, job: PackRequest) -> PackedTensor:
        dense, bits = _dense(job.tensor), job.treatment.bits
        cut = Cut.along(dense, _channel_dimension(job)) if job.treatment.by_channel else WHOLE
        key = (job.treatment, cut, *_content_key(job))
        found = job.source.recall(key, Ranged)
        if found is not None:
            return Ranged(found.code, found.from_steps, layout_of(dense))
        grid = grid_of(*ranges.ours().channel_ends(dense, cut), bits, cut.inner)
        on_host = job.treatment.on_host
        code = self._coder.steps(dense, bits, job.key, grid.to_steps, on_host=on_host)
        stored = Stored(self._ledger, code), Stored(self._ledger, grid.from_steps)
        held = Ranged(*stored, layout_of(dense))
        job.source.remember(key, held)
        return held

    def _rederived(self, job: PackRequest) -> PackedTensor | None:
        """From codes held anyway, if they are at least as wide as the plan asks for here."""
        recipe = self._provenance.recipe(job.tensor, job.saved.version)
        if recipe is None or not is_dense(job.tensor):
            return None
        if any(term.code.content.treatment.bits < job.treatment.bits for term in recipe):
            return None
        if recipe[0].derivation is not None:
            recipe[0].derivation.note_reader()
        return Rederived(recipe, layout_of(job.tensor))

    def _normalised(self, job: PackRequest, rederive: bool) -> PackedTensor | None:
        node = job.saved.node
        call = job.call
        done = normalisation_of(node, job.tensor, call.operator, call.arguments, call.keywords)
        if done is None:
            return None
        code = self._value_code(job, job.tensor, done.forward())
        held = NormInput(code, layout_of(job.tensor), done.mean, done.inverse_deviation, done.inner)
        result = result_made_by(node, call) if rederive else None
        if result is not None and result.stride() == job.tensor.stride():
            channels = Stored(self._ledger, done.result) if done.result is not None else None
            if channels is not None or done.plain:
                held.recipe = (Term(code, channels),)
                self._provenance.learn(result, held)
        return held

    def _value_code(
        self, job: PackRequest, tensor: Tensor, channels: Channels | None = None
    ) -> Stored[Values]:
        code = self._coder.values(
            tensor, job.treatment, job.key, channels, weight=job.weight, tag=job.tag
        )
        return Stored(self._ledger, code)


def _is_borrowed(held: PackedTensor, treatment: Treatment) -> bool:
    """Does this hold only codes that others made, in another way than was asked for here?"""
    if not isinstance(held, Rederived):
        return False
    if len(held.recipe) > 1 or held.recipe[0][1:] != (None, None, None):
        return True
    made = held.recipe[0].code.content.treatment
    return (made.method, made.bits) != (treatment.method, treatment.bits)


def _has_only(tensor: Tensor, low: float, high: float) -> bool:
    """Has a dense tensor these two values alone? Looked at a part at a time."""
    parts = torch.split(in_memory_order(tensor), _PART_ELEMENTS)
    return all(bool(((part == low) | (part == high)).all()) for part in parts)


def _channel_dimension(job: PackRequest) -> int:
    name = job.saved.node.name()
    return 1 if any(part in name for part in _CHANNELS_SECOND) else -1


def _content_key(job: PackRequest) -> tuple[Any, ...]:
    return content_key(job.tensor, job.saved.version)


def _dense(tensor: Tensor) -> Tensor:
    """The tensor, or where there are gaps in its memory a copy without them, in the same order."""
    return tensor if is_dense(tensor) else tensor.detach().clone()


def _shape_of(saved: SavedTensor) -> tuple[int, ...]:
    if saved.tensor is not None:
        return tuple(saved.tensor.shape)
    return tuple(saved.restore(Scratch()).shape)
