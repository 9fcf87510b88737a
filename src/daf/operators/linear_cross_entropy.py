"""The last linear layer and its cross-entropy as one operator, without the whole logits."""

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from daf.core.replaced import replaced
from daf.operators.chunked.cross_entropy import RowLoss, as_autocast, chunked_cross_entropy
from daf.operators.chunked.logits_cross_entropy import logits_cross_entropy
from daf.operators.eligibility import is_forward_mode
from daf.operators.fusion_table import CallSite
from daf.operators.operator_context import OperatorContext
from daf.operators.protocol import FusedOperator, OperatorCall
from daf.operators.stand_ins import Deferred
from daf.torch_compat.autograd_graph import sequence_number, without_torch_function
from daf.torch_compat.pytree import tensors_in_batch

PATTERN = "linear + cross_entropy"
# Of fewer logits for each number given there is little to save, and of small ones as well.
LEAST_GROWTH = 4
LEAST_CLASSES = 1024
_RESHAPES = frozenset({Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten})
_UNCHANGED = frozenset({Tensor.contiguous, Tensor.float})
# Gradients are held in the logits' own type until the loss is scaled, which fp16 lacks range for.
_TYPES = (torch.float32, torch.bfloat16)
_BASIC_INDEX = (int, slice, type(None), type(Ellipsis))
_LINEAR = "linear"


class Logits(NamedTuple):
    """``hidden`` (..., features) times ``weight``, plus ``bias``, then cast to ``dtype``."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The logits' shape."""
        return (*self.hidden.shape[:-1], self.weight.shape[0])

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors that they are computed from."""
        return tuple(part for part in self[:3] if part is not None)


class _LinearCall(NamedTuple):
    """The arguments of ``F.linear``, in its order."""

    input: Any
    weight: Any
    bias: Any = None


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

    @property
    def asked(self) -> RowLoss:
        """What is asked for of each row."""
        return RowLoss(self.ignore_index, self.reduction, self.label_smoothing)

    def is_fusible(self, shape: Sequence[int]) -> bool:
        """True if the loss works row by row, for logits of this shape."""
        target = self.target
        return (
            self.weight is self.size_average is self.reduce is None
            and self.reduction in ("mean", "sum")
            and isinstance(target, Tensor)
            and target.dtype in (torch.int64, torch.int32)
            and len(shape) == 2
            and target.shape == tuple(shape[:1])
        )


class LinearCrossEntropy(FusedOperator):
    """A linear layer whose logits only cross-entropy reads, and that cross-entropy."""

    name = "linear_cross_entropy"
    functions = frozenset({F.linear})

    def __init__(self) -> None:
        super().__init__()
        self._has_seen_a_step = False  # of training: layers that it did not run stay as they are

    def begin(self, context: OperatorContext) -> None:
        super().begin(context)
        self._is_active = not self._has_seen_a_step or self.table.defers
        self._watched: MutableMapping[Tensor, CallSite] = WeakTensorKeyDictionary()
        self._objections: dict[CallSite, str] = {}
        self._observed: CallSite | None = None
        self._first_node = sequence_number()

    def replacement(self, call: OperatorCall) -> Callable[[], Any] | None:
        """Return a stand-in, where only cross-entropy read the logits in the step watched."""
        self._observed = None
        layer = call.read(_LinearCall) if self._is_active else None
        if layer is None or not _is_worth_it(*layer):
            return None
        site = self.context.site(_LINEAR)
        if self.table.is_deferred(site):
            self.context.state.tracker.next_call(_LINEAR)
            hidden, weight, bias = as_autocast(layer)  # later it may be off
            return partial(self._defer, site, Logits(hidden, weight, bias, hidden.dtype))
        if self.table.is_open(site):
            self._observed = site
        return None

    def observe(self, call: OperatorCall, result: Any) -> None:
        if self._watched:
            self._note_readers(call, result)
        if call.function is F.linear and self._observed is not None:
            reason = "it runs several times in a step" if self._observed in self._objections else ""
            self._objections[self._observed] = reason
            self._watched[result] = self._observed

    def _note_readers(self, call: OperatorCall, result: Any) -> None:
        tensors = list(tensors_in_batch((call.arguments, call.keywords)))
        for tensor in tensors:
            if (site := self._watched.get(tensor)) is None:
                continue
            loss = _loss_call(call)
            if loss is not None and loss.input is tensor and loss.is_fusible(tensor.shape):
                continue
            if tensor is tensors[0] and _rows_after(call, tensor.shape) is not None:
                self._watched[result] = site
            else:
                reason = self._objections[site]
                self._objections[site] = reason or f"its result is read by {call.name}"

    def finish(self) -> None:
        if sequence_number() != self._first_node:
            self._has_seen_a_step = True
        alive = set(self._watched.values())
        for site, objection in self._objections.items():
            reason = "its result outlives the step" if site in alive else objection
            self.table.decide(site, "" if reason else PATTERN, reason, deferred=not reason)

    @contextmanager
    def _seen_by_others(self) -> Iterator[None]:
        """Let operators inside be observed like the model's own, but not replaced here."""
        with replaced(self, _is_active=False), self.context.seen:
            yield

    def _defer(self, site: CallSite, logits: Logits) -> Tensor:
        deferred = Deferred(self, site, "linear layer", logits, logits.parts)
        return self.context.stand_ins.make(deferred, logits.shape, logits.hidden, logits.dtype)

    def follow(self, call: OperatorCall) -> Tensor | None:
        """Return the loss, or the stand-in of the same logits in other rows."""
        first = call.arguments[0] if call.arguments else call.keywords.get("input")
        deferred = self.context.stand_ins.find(first)
        if deferred is None or deferred.operator is not self:
            return None
        deferred.check_unchanged("cross-entropy")
        logits: Logits = deferred.parts
        loss = _loss_call(call)
        with self._seen_by_others():
            if loss is not None and loss.is_fusible(logits.shape):
                return _loss_of(logits, loss, twice=not self.context.can_run_again)
            moved = _moved(call, logits)
        return None if moved is None else self._defer(deferred.site, moved)

    def compute(self, deferred: Deferred) -> Tensor:
        """Return the logits."""
        deferred.check_unchanged("cross-entropy")
        logits: Logits = deferred.parts
        with self._seen_by_others():
            return F.linear(logits.hidden, logits.weight, logits.bias).to(logits.dtype)


def _is_worth_it(hidden: Any, weight: Any, bias: Any) -> bool:
    """True if a layer of known tensors, with a gradient, makes far more of each row."""
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
        and not is_forward_mode()
        and any(each.requires_grad for each in tensors)
    )


def _has_known_type(tensors: Sequence[Tensor]) -> bool:
    """True if the logits' dtype is one that the loss works in."""
    kind = tensors[0].device.type
    if torch.is_autocast_enabled(kind):
        is_cast = all(each.dtype in (torch.float32, torch.bfloat16) for each in tensors)
        return is_cast and torch.get_autocast_dtype(kind) in _TYPES
    return tensors[0].dtype in _TYPES and len({each.dtype for each in tensors}) == 1


def _loss_call(call: OperatorCall) -> LossCall | None:
    return call.read(LossCall) if call.function is F.cross_entropy else None


def are_logits(output: Tensor) -> bool:
    """True of rows of so many classes that a loss of them may be worth another operator."""
    return output.dim() >= 2 and output.shape[-1] >= LEAST_CLASSES and output.dtype in _TYPES


def logits_loss(call: OperatorCall) -> Tensor | None:
    """Return a cross-entropy's result by ``logits_cross_entropy``; None where that cannot serve."""
    loss = _loss_call(call)
    if loss is None or type(loss.input) is not Tensor or not are_logits(loss.input):
        return None
    logits = loss.input
    has_gradient = torch.is_grad_enabled() and logits.requires_grad and not is_forward_mode()
    if not has_gradient or not loss.is_fusible(logits.shape):
        return None
    found = logits_cross_entropy(logits, loss.target, loss.asked)
    return found if torch.is_autocast_enabled(logits.device.type) else found.to(logits.dtype)


def _loss_of(logits: Logits, call: LossCall, *, twice: bool) -> Tensor:
    hidden, weight, bias, dtype = logits
    widened = torch.is_autocast_enabled(hidden.device.type)  # as autocast has it of a loss
    asked = call.asked._asdict()
    with torch.autocast(hidden.device.type, enabled=False):
        loss = chunked_cross_entropy(hidden, weight, call.target, bias, **asked, twice=twice)
    return loss if widened else loss.to(dtype)


def _moved(call: OperatorCall, logits: Logits) -> Logits | None:
    """Return the logits whose rows an operator moves; None where it does anything else."""
    if (rows := _rows_after(call, logits.shape)) is None:
        return None
    if call.function is Tensor.__getitem__:
        hidden = logits.hidden[call.arguments[1]]
    else:
        hidden = logits.hidden.reshape(*rows, logits.hidden.shape[-1])
    dtype = torch.float32 if call.function is Tensor.float else logits.dtype
    return logits._replace(hidden=hidden, dtype=dtype)


def _rows_after(call: OperatorCall, shape: Sequence[int]) -> tuple[int, ...] | None:
    """Return the shape of the rows that an operator moves; None where it looks into them."""
    if not call.arguments:
        return None
    operator, arguments, keywords = call.function, call.arguments[1:], call.keywords
    if operator in _UNCHANGED:
        return None if arguments or keywords else tuple(shape[:-1])
    with without_torch_function():
        if operator is Tensor.__getitem__:
            return _rows_chosen(shape, *arguments)
        if operator not in _RESHAPES:
            return None
        after = operator(torch.empty(*shape, device="meta"), *arguments, **keywords).shape
    # Elements keep their order, so rows that are as long as before are the same ones.
    return tuple(after[:-1]) if after[-1:] == shape[-1:] else None


def _rows_chosen(shape: Sequence[int], index: Any) -> tuple[int, ...] | None:
    parts = index if isinstance(index, tuple) else (index,)
    if not all(type(part) in _BASIC_INDEX for part in parts):
        return None
    # Were rows longer by one, so would those be that are chosen whole.
    lengths = (shape[-1], shape[-1] + 1)
    after = [torch.empty(*shape[:-1], last, device="meta")[index].shape for last in lengths]
    is_whole = all(each[-1:] == (last,) for each, last in zip(after, lengths, strict=True))
    return tuple(after[0][:-1]) if is_whole and after[0][:-1] == after[1][:-1] else None
