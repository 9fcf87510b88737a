"""The last linear layer and its cross-entropy as one operator: large logits never exist.

A linear layer that makes far more of each row than it was given is watched in the
first step that runs it: where nobody reads the logits but cross-entropy, through nothing
but changes of their rows (``view``, ``flatten``, slices, ``contiguous``) and ``float``, later
steps get a *stand-in*, a tensor of NaN with the right geometry and no memory. What changes its
rows changes those of the layer's input; cross-entropy then works through these in chunks
(``chunked``). Whoever else reads a stand-in is given the logits, computed then, and the
place is given up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from daf.core.errors import FusionError
from daf.core.reports import FusionReport
from daf.operators.batch_norm.pattern import METADATA, tensors_among, with_tensors
from daf.operators.chunked.cross_entropy import chunked_cross_entropy
from daf.saved_tensors.sites import SiteTracker

PATTERN = "linear + cross_entropy"
# Of fewer logits for each number given there is little to save, and of small ones as well.
LEAST_GROWTH = 4
LEAST_CLASSES = 1024
_RESHAPES = frozenset({Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten})
_UNCHANGED = frozenset({Tensor.contiguous, Tensor.float})
# Gradients are held in the logits' own type until the loss is scaled, which fp16 lacks range for.
_TYPES = (torch.float32, torch.bfloat16)
_OUTLIVED = "its result outlived a step"
_BASIC_INDEX = (int, slice, type(None), type(Ellipsis))

LinearSite = tuple[str, int]  # a module's path, and which of its calls of F.linear


class Logits(NamedTuple):
    """What a stand-in stands for: ``hidden`` [..., features] times ``weight``, plus ``bias``.

    Computed in their own type, then of ``dtype``.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    site: LinearSite
    versions: tuple[int, ...]
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the logits."""
        return (*self.hidden.shape[:-1], self.weight.shape[0])

    def present_versions(self) -> tuple[int, ...]:
        """How often the parts were changed in place by now."""
        parts = (self.hidden, self.weight, self.bias)
        return tuple(part._version for part in parts if part is not None)


class LossCall(NamedTuple):
    """The arguments of ``F.cross_entropy``, in its order."""

    input: Any
    target: Any
    weight: Any = None
    size_average: Any = None
    ignore_index: Any = -100
    reduce: Any = None
    reduction: Any = "mean"
    label_smoothing: Any = 0.0

    def is_fusible(self, shape: Sequence[int]) -> bool:
        """Is this something that works row by row, for logits of this shape?"""
        target = self.target
        return (
            self.weight is self.size_average is self.reduce is None
            and self.reduction in ("mean", "sum")
            and isinstance(target, Tensor)
            and target.dtype in (torch.int64, torch.int32)
            and len(shape) == 2
            and target.shape == tuple(shape[:1])
        )


class LossFusion:
    """What was decided for every last layer, from step to step."""

    def __init__(self) -> None:
        self._decided: dict[LinearSite, FusionReport] = {}
        self._has_seen_a_step = False

    @property
    def is_wanted(self) -> bool:
        """Is anything to be watched or left out? Seeing every operator costs each a microsecond."""
        fused = (report.pattern for report in self._decided.values())
        return not self._has_seen_a_step or any(fused)

    def note_step(self) -> None:
        """A whole step of training was watched: layers that it did not run stay as they are."""
        self._has_seen_a_step = True

    def reports(self) -> tuple[FusionReport, ...]:
        """Every layer that makes large logits."""
        return tuple(self._decided.values())

    def is_open(self, site: LinearSite) -> bool:
        """Must it still be watched?"""
        return site not in self._decided

    def waits(self, site: LinearSite) -> bool:
        """Are its logits left out?"""
        return bool(self._decided[site].pattern)

    def decide(self, site: LinearSite, reason: str) -> None:
        """It is fused from the next step on; or not, and why."""
        pattern = "" if reason else PATTERN
        self._decided[site] = FusionReport(*site, pattern, reason, "linear")


class LossFusing:
    """The stand-ins of one ``with``, and what is watched in it."""

    def __init__(self, fusion: LossFusion, tracker: SiteTracker) -> None:
        self._fusion = fusion
        self._tracker = tracker
        self._waiting: MutableMapping[Tensor, Logits] = WeakTensorKeyDictionary()
        self._watched: MutableMapping[Tensor, LinearSite] = WeakTensorKeyDictionary()
        self._objections: dict[LinearSite, str] = {}
        self._has_trained = False

    def run(
        self, operator: Callable[..., Any], arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> Any:
        """An operator's result, or a stand-in for it."""
        if operator in METADATA:
            return operator(*arguments, **keywords)
        result = self._run(operator, arguments, keywords)
        if not self._has_trained and isinstance(result, Tensor):
            with torch._C.DisableTorchFunction():  # the capture's own mode is to see no reader
                self._has_trained = result.requires_grad
        return result

    def _run(
        self, operator: Callable[..., Any], arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> Any:
        if self._waiting and any(map(self._waiting.get, tensors_among(arguments, keywords))):
            return self._read(operator, arguments, keywords)
        if operator is F.linear:
            return self._linear(arguments, keywords)
        result = operator(*arguments, **keywords)
        if self._watched:
            self._observe(operator, arguments, keywords, result)
        return result

    def finish(self) -> None:
        """The step is over: learn from it.

        Raises:
            FusionError: a stand-in is still held by somebody.
        """
        if self._has_trained:
            self._fusion.note_step()
        alive = set(self._watched.values())
        for site, reason in self._objections.items():
            self._fusion.decide(site, "its result outlives the step" if site in alive else reason)
        kept = [logits.site for logits in self._waiting.values()]
        for site in kept:
            self._fusion.decide(site, _OUTLIVED)
        if kept:
            raise FusionError(
                f"the logits of the linear layer at {kept[0][0]!r} outlive the step, as in no step "
                "before; that tensor holds NaN. "
                "Run without fused operators (fused=False), or run the step again"
            )

    # --- the layer --------------------------------------------------------------------------

    def _linear(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        given = _linear_arguments(arguments, keywords)
        if given is None or not _is_worth_it(*given):
            return F.linear(*arguments, **keywords)
        site = self._tracker.present_call("linear")
        if not self._fusion.is_open(site) and self._fusion.waits(site):
            self._tracker.next_call("linear")
            hidden, weight, bias = _as_autocast(given)
            return self._stand_in(_logits(hidden, weight, bias, site))
        result = F.linear(*arguments, **keywords)
        if self._fusion.is_open(site):
            again = site in self._objections
            self._objections[site] = "it runs several times in a step" if again else ""
            self._watched[result] = site
        return result

    def _stand_in(self, logits: Logits) -> Tensor:
        with torch._C.DisableTorchFunction():
            nothing = torch.full((), torch.nan, dtype=logits.dtype, device=logits.hidden.device)
            stand_in = nothing.expand(logits.shape)
        self._waiting[stand_in] = logits
        return stand_in

    # --- reading a stand-in -----------------------------------------------------------------

    def _read(
        self, operator: Callable[..., Any], arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> Any:
        first = arguments[0] if arguments else keywords.get("input")
        logits = self._waiting.get(first) if isinstance(first, Tensor) else None
        if logits is not None:
            _check_unchanged(logits)
            call = _loss_call(operator, arguments, keywords)
            if call is not None and call.is_fusible(logits.shape):
                return _loss_of(logits, call)
            moved = _moved(operator, logits, arguments[1:], keywords)
            if moved is not None:
                return self._stand_in(moved)
        name = getattr(operator, "__name__", str(operator))
        return operator(*self._real(arguments, name), **self._real(dict(keywords), name))

    def _real(self, value: Any, reader: str) -> Any:
        """The same with logits in the place of stand-ins."""

        def compute(tensor: Tensor) -> Tensor:
            logits = self._waiting.get(tensor)
            return tensor if logits is None else self._compute(logits, reader)

        return with_tensors(value, compute)

    def _compute(self, logits: Logits, reader: str) -> Tensor:
        _check_unchanged(logits)
        self._fusion.decide(logits.site, f"its result was also read by {reader}")
        with torch.enable_grad():
            found = F.linear(logits.hidden, logits.weight, logits.bias)
            return found.to(logits.dtype)

    # --- watching ---------------------------------------------------------------------------

    def _observe(
        self,
        operator: Callable[..., Any],
        arguments: tuple[Any, ...],
        keywords: Mapping[str, Any],
        result: Any,
    ) -> None:
        given = list(tensors_among(arguments, keywords))
        for tensor in given:
            site = self._watched.get(tensor)
            if site is None:
                continue
            call = _loss_call(operator, arguments, keywords)
            if call is not None and call.input is tensor and call.is_fusible(tensor.shape):
                continue
            moves_rows = tensor is given[0] and (
                _rows_after(operator, tensor.shape, arguments[1:], keywords) is not None
            )
            if moves_rows:
                self._watched[result] = site
            else:
                name = getattr(operator, "__name__", str(operator))
                self._objections[site] = self._objections[site] or f"its result is read by {name}"


class LossMode(TorchFunctionMode):
    """A function mode above the capture's own, which sees what becomes of logits."""

    def __init__(self, fusing: LossFusing) -> None:
        super().__init__()
        self._fusing = fusing

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operator, or let logits wait; PyTorch calls this."""
        return self._fusing.run(func, args, kwargs or {})


def _linear_arguments(
    arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[Any, Any, Any] | None:
    names = dict(zip(("input", "weight", "bias"), arguments, strict=False)) | dict(keywords)
    if not {"input", "weight"} <= names.keys() <= {"input", "weight", "bias"}:
        return None
    return names["input"], names["weight"], names.get("bias")


def _is_worth_it(hidden: Any, weight: Any, bias: Any) -> bool:
    """Does it make far more of each row, for a gradient, of what the operator can read?"""
    tensors = (hidden, weight) if bias is None else (hidden, weight, bias)
    if not all(type(each) in (Tensor, torch.nn.Parameter) for each in tensors):
        return False
    if weight.dim() != 2 or hidden.device.type not in ("cpu", "cuda"):
        return False
    classes, features = weight.shape
    return (
        _has_known_type(tensors)
        and hidden.dim() >= 2
        and classes >= max(LEAST_CLASSES, LEAST_GROWTH * features)
        and torch.is_grad_enabled()
        and any(each.requires_grad for each in tensors)
    )


def _has_known_type(tensors: Sequence[Tensor]) -> bool:
    """Will logits have one that the loss can work in?"""
    kind = tensors[0].device.type
    if torch.is_autocast_enabled(kind):
        is_cast = all(each.dtype in (torch.float32, torch.bfloat16) for each in tensors)
        return is_cast and torch.get_autocast_dtype(kind) in _TYPES
    return tensors[0].dtype in _TYPES and len({each.dtype for each in tensors}) == 1


def _as_autocast(given: tuple[Tensor, Tensor, Tensor | None]) -> Any:
    """What autocast would make of a layer's input and parameters now; later it may be off."""
    kind = given[0].device.type
    if not torch.is_autocast_enabled(kind):
        return given
    dtype = torch.get_autocast_dtype(kind)
    return tuple(None if each is None else each.to(dtype) for each in given)


def _logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    site: LinearSite,
    dtype: torch.dtype | None = None,
) -> Logits:
    logits = Logits(hidden, weight, bias, site, (), dtype or hidden.dtype)
    return logits._replace(versions=logits.present_versions())


def _check_unchanged(logits: Logits) -> None:
    if logits.present_versions() != logits.versions:
        raise FusionError(
            f"what the fused linear layer at {logits.site[0]!r} reads was changed in place before "
            "cross-entropy ran, which no step before did; run without fused operators (fused=False)"
        )


def _loss_call(
    operator: Callable[..., Any], arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> LossCall | None:
    if operator is not F.cross_entropy:
        return None
    try:
        return LossCall(*arguments, **keywords)
    except TypeError:
        return None


def _loss_of(logits: Logits, call: LossCall) -> Tensor:
    kind = logits.hidden.device.type
    widened = torch.is_autocast_enabled(kind)  # as autocast has it of a loss
    with torch.autocast(kind, enabled=False):
        loss = chunked_cross_entropy(
            logits.hidden,
            logits.weight,
            call.target,
            logits.bias,
            ignore_index=call.ignore_index,
            reduction=call.reduction,
            label_smoothing=call.label_smoothing,
        )
    return loss if widened else loss.to(logits.dtype)


def _moved(
    operator: Callable[..., Any],
    logits: Logits,
    arguments: tuple[Any, ...],
    keywords: Mapping[str, Any],
) -> Logits | None:
    """Logits whose rows an operator moves; None where it does anything else."""
    rows = _rows_after(operator, logits.shape, arguments, keywords)
    if rows is None:
        return None
    if operator is Tensor.__getitem__:
        hidden = logits.hidden[arguments[0]]
    else:
        hidden = logits.hidden.reshape(*rows, logits.hidden.shape[-1])
    dtype = torch.float32 if operator is Tensor.float else logits.dtype
    return _logits(hidden, logits.weight, logits.bias, logits.site, dtype)


def _rows_after(
    operator: Callable[..., Any],
    shape: Sequence[int],
    arguments: tuple[Any, ...],
    keywords: Mapping[str, Any],
) -> tuple[int, ...] | None:
    """The shape of the rows that an operator moves without looking into them; None: it does."""
    if operator in _UNCHANGED:
        return None if arguments or keywords else tuple(shape[:-1])
    with torch._C.DisableTorchFunction():
        if operator is Tensor.__getitem__:
            return _rows_chosen(shape, *arguments)
        if operator not in _RESHAPES:
            return None
        after = operator(torch.empty(*shape, device="meta"), *arguments, **keywords).shape
    # Elements keep their order, so rows that are as long as before are the same ones.
    return tuple(after[:-1]) if after[-1:] == shape[-1:] else None


def _rows_chosen(shape: Sequence[int], index: Any) -> tuple[int, ...] | None:
    """The same for plain indices."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(type(part) in _BASIC_INDEX for part in parts):
        return None
    # Were rows longer by one, so would those be that are chosen whole.
    lengths = (shape[-1], shape[-1] + 1)
    after = [torch.empty(*shape[:-1], last, device="meta")[index].shape for last in lengths]
    is_whole = all(each[-1:] == (last,) for each, last in zip(after, lengths, strict=True))
    return tuple(after[0][:-1]) if is_whole and after[0][:-1] == after[1][:-1] else None
