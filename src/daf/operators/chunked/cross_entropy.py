"""``F.cross_entropy(F.linear(hidden, weight), target)`` without the logits, in chunks of rows."""

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from daf.core.errors import DataError, DoubleBackwardError
from daf.kernels.devices import is_read_freely
from daf.operators.fused_function import differentiable_gradients, unchanged, versioned
from daf.torch_compat.autograd_graph import is_transforming, keeps_graph, without_torch_function

Reduction = Literal["mean", "sum"]
# Products of fewer rows read the weight too often: of 4,096 rows of 384 numbers and 50,257 classes,
# chunks of 31 took 3.6 s forward and backward, of 128 2.6, of 256 2.3; the whole logits 3.4.
_LEAST_ROWS = 128


class RowLoss(NamedTuple):
    """What ``F.cross_entropy`` is asked for, by the names of its arguments."""

    ignore_index: int = -100
    reduction: Reduction = "mean"
    label_smoothing: float = 0.0


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    chunk_rows: int | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    twice: bool = False,
) -> Tensor:
    """Cross-entropy of ``hidden @ weight.T + bias`` against ``target``, without the whole logits.

    Equal to PyTorch's two operators up to the order of sums; logits are normalised in float32 at
    least. Like them it follows autocast. Beside the gradients (one the size of each input that
    requires one) it takes one chunk of logits, ``chunk_rows * classes`` elements of float32 or
    float64, and for half types the chunk once more in that type.

    Args:
        hidden: (..., features) floating point.
        weight: (classes, features), of hidden's dtype unless autocast is on.
        target: (...) integer class indices, or ``ignore_index``.
        bias: (classes,) or None.
        chunk_rows: rows of logits that exist at once; None: so many that they take no more
            than ``hidden`` does, and 128 at least.
        ignore_index: rows with this target count for nothing.
        reduction: "mean" over the rows that count (NaN if none does), or "sum".
        label_smoothing: 0 to 1, the share of the target that is spread over all classes.
        twice: hold the inputs too, so that gradients can be differentiated themselves, by way of
            the whole logits.

    Returns:
        A scalar of float32, or float64 where the inputs are.

    Raises:
        DataError: shapes, dtypes, settings or (on the processor; a GPU looks by itself) targets
            that do not fit together.
        DoubleBackwardError: in backward with ``create_graph=True``, unless ``twice``.
    """
    rows, targets = hidden.flatten(0, -2), target.flatten()
    _check(hidden, weight, target, bias)
    _check_settings(chunk_rows, reduction, label_smoothing)
    rows, weight, bias = as_autocast((rows, weight, bias))
    _check_dtypes(rows, weight, bias)
    if is_read_freely(targets):
        _check_targets(targets, weight.shape[0], ignore_index)
    settings = _Settings(
        # By default the chunk's logits are no larger than all rows of hidden (Liger's rule).
        chunk_rows or max(_LEAST_ROWS, rows.numel() // weight.shape[0]),
        RowLoss(ignore_index, reduction, label_smoothing),
        with_gradients=torch.is_grad_enabled(),
        twice=twice,
    )
    total: Tensor = _SummedCrossEntropy.apply(rows, weight, bias, targets, settings)  # type: ignore[no-untyped-call]
    return total


class _Settings(NamedTuple):
    chunk_rows: int
    loss: RowLoss
    with_gradients: bool  # inside a Function's forward grad mode is always off
    twice: bool


class _Gradients(NamedTuple):
    """Accumulators of the scaled sum's gradients; None where none is needed."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @property
    def wanted(self) -> bool:
        return any(each is not None for each in self)


class _SummedCrossEntropy(torch.autograd.Function):
    reads_only_what_it_saved = True  # see parameter_reads

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        settings: _Settings,
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        ignore_index, reduction, smoothing = settings.loss
        counted = target != ignore_index
        scale = scale_of(counted, reduction, wide)
        needs = [settings.with_gradients and need for need in ctx.needs_input_grad]
        gradients = _Gradients(
            torch.empty_like(hidden) if needs[0] else None,
            torch.zeros_like(weight, dtype=wide) if needs[1] else None,
            torch.zeros_like(bias, dtype=wide) if bias is not None and needs[2] else None,
        )
        # NaN as PyTorch's mean over no row; the gradients are zero there too.
        step = scale.nan_to_num()
        total = hidden.new_zeros((), dtype=wide)
        # One chunk of logits, used again for every chunk.
        scratch = hidden.new_empty((min(settings.chunk_rows, len(hidden)), weight.shape[0]))
        # To whoever watches operators this is one, however many chunks there are.
        with without_torch_function():
            for start in range(0, len(hidden), settings.chunk_rows):
                chunk = slice(start, start + settings.chunk_rows)
                logits = _logits(hidden[chunk], weight, bias, scratch)
                total += loss_to_softmax(logits, target[chunk], counted[chunk], smoothing)
                if gradients.wanted:
                    softmax_to_gradient(logits, target[chunk], counted[chunk], smoothing, step)
                    _gather(gradients, logits, hidden, weight, chunk)
        _keep(ctx, gradients, (hidden, weight, bias))
        if settings.twice:
            ctx.inputs = versioned((hidden, weight, bias))
            ctx.target, ctx.loss = target, settings.loss
        return total * scale

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> Any:
        if torch.is_grad_enabled():
            return (*_differentiable(ctx, incoming), None, None)
        kept = list(ctx.saved_tensors)
        if keeps_graph() or is_transforming(incoming):
            kept = [each * incoming.to(each.dtype) for each in kept]
        else:  # they are nobody else's from here on, so that no second copy is ever made
            ctx.maybe_clear_saved_tensors()
            for each in kept:
                each.mul_(incoming.to(each.dtype))
        found = [kept.pop(0) if wanted else None for wanted in ctx.wanted]
        return (*found, None, None)


def _differentiable(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
    if not hasattr(ctx, "inputs"):
        raise DoubleBackwardError(
            "asked for a graph of chunked_cross_entropy's gradient (create_graph=True); it has "
            "no second derivative; give twice=True, or use F.cross_entropy(F.linear(...), ...)"
        )

    def run(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        logits = F.linear(hidden, weight, bias).to(incoming.dtype)
        return F.cross_entropy(logits, ctx.target, **ctx.loss._asdict())

    with without_torch_function():
        return differentiable_gradients(
            run, unchanged(ctx.inputs), ctx.needs_input_grad[:3], incoming
        )


def _keep(ctx: Any, gradients: _Gradients, inputs: tuple[Tensor | None, ...]) -> None:
    ctx.wanted = [each is not None for each in gradients]
    pairs = zip(gradients, inputs, strict=True)
    ctx.save_for_backward(
        *(each.to(like.dtype) for each, like in pairs if each is not None and like is not None)
    )


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, scratch: Tensor) -> Tensor:
    """Return a chunk's logits, in float32 at least: ``scratch`` itself, or a wider copy."""
    logits = torch.mm(hidden, weight.t(), out=scratch[: len(hidden)])
    if bias is not None:
        logits += bias
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def loss_to_softmax(logits: Tensor, target: Tensor, counted: Tensor, smoothing: float) -> Tensor:
    """Return the sum of the losses of rows that count; leave the softmax in ``logits``."""
    logits -= logits.amax(1, keepdim=True)
    place = torch.where(counted, target, 0)[:, None]
    aimed = (1 - smoothing) * logits.gather(1, place).squeeze(1)
    if smoothing:
        aimed += smoothing * logits.mean(1)
    sums = logits.exp_().sum(1)
    logits /= sums[:, None]
    return torch.where(counted, sums.log() - aimed, 0).sum()


def softmax_to_gradient(
    softmax: Tensor, target: Tensor, counted: Tensor, smoothing: float, scale: Tensor
) -> None:
    """Turn the softmax into the gradient of the scaled loss by the logits, in place."""
    if smoothing:
        softmax -= smoothing / softmax.shape[1]
    place = torch.where(counted, target, 0)[:, None]
    softmax.scatter_add_(1, place, torch.full_like(place, smoothing - 1, dtype=softmax.dtype))
    softmax *= scale
    softmax.masked_fill_(~counted[:, None], 0)


def _gather(
    gradients: _Gradients, slope: Tensor, hidden: Tensor, weight: Tensor, chunk: slice
) -> None:
    narrow = slope.to(hidden.dtype)
    if gradients.hidden is not None:
        torch.mm(narrow, weight, out=gradients.hidden[chunk])
    if gradients.weight is not None:
        if narrow.dtype == gradients.weight.dtype:
            gradients.weight.addmm_(narrow.t(), hidden[chunk])
        else:
            gradients.weight.add_(narrow.t() @ hidden[chunk])
    if gradients.bias is not None:
        gradients.bias.add_(slope.sum(0))


def scale_of(counted: Tensor, reduction: Reduction, dtype: torch.dtype) -> Tensor:
    """Return the factor of the sum, on its device: nothing waits for the number of rows."""
    if reduction == "sum":
        return torch.ones((), dtype=dtype, device=counted.device)
    count = counted.sum()
    return torch.where(count > 0, count.to(dtype).reciprocal(), torch.nan)


def as_autocast(layer: tuple[Tensor, Tensor, Tensor | None]) -> Any:
    """Return a linear layer's input, weight and bias as autocast would cast them now."""
    kind = layer[0].device.type
    if not torch.is_autocast_enabled(kind):
        return layer
    dtype = torch.get_autocast_dtype(kind)
    return tuple(None if each is None else each.to(dtype) for each in layer)


def _check(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> None:
    fits = (
        weight.dim() == 2
        and hidden.dim() >= 2
        and hidden.shape[-1] == weight.shape[1]
        and hidden.shape[:-1] == target.shape
        and (bias is None or bias.shape == weight.shape[:1])
    )
    if not fits:
        raise DataError(
            "expected hidden (..., features), weight (classes, features), target (...) and bias "
            f"(classes,); found {list(hidden.shape)}, {list(weight.shape)}, {list(target.shape)} "
            f"and {None if bias is None else list(bias.shape)}"
        )
    if not hidden.is_floating_point() or target.dtype not in (torch.int64, torch.int32):
        raise DataError(
            f"expected floating point hidden and class indices (int64 or int32) as target; found "
            f"{hidden.dtype} and {target.dtype}"
        )


def _check_dtypes(*tensors: Tensor | None) -> None:
    dtypes = {each.dtype for each in tensors if each is not None}
    if len(dtypes) > 1:
        raise DataError(
            f"hidden, weight and bias must have one dtype, found {sorted(map(str, dtypes))}; cast "
            "them, or use autocast"
        )


def _check_settings(chunk_rows: int | None, reduction: str, label_smoothing: float) -> None:
    if chunk_rows is not None and chunk_rows < 1:
        raise DataError(f"chunk_rows must be 1 or more, found {chunk_rows}")
    if reduction not in ("mean", "sum"):
        raise DataError(f"reduction must be 'mean' or 'sum', found {reduction!r}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise DataError(f"label_smoothing must be between 0 and 1, found {label_smoothing}")


def _check_targets(target: Tensor, classes: int, ignore_index: int) -> None:
    wrong = (target != ignore_index) & ((target < 0) | (target >= classes))
    if wrong.any():
        raise DataError(
            f"target {int(target[wrong][0])} is out of bounds; classes are 0 to {classes - 1}, and "
            f"{ignore_index} to leave a row out"
        )
