"""What each operator's backward needs of the tensors it saves: a table, read from derivatives.

Autograd nodes are the authority: a node's name and the name of the slot say
exactly which formula of PyTorch's ``derivatives.yaml`` will read the tensor.
What is not listed is *exact*.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from daf.core.code_format import Predicate
from daf.core.policy import Need
from daf.saved_tensors.packed_tensor import SavedTensor, saves_read_by
from daf.torch_compat.autograd_nodes import raw_saved, saved_value, sequence_number_of

# Slots of matrix products: (one side, other side). Their need depends on the other side.
PRODUCT_SLOTS: Mapping[str, tuple[str, str]] = {
    "MmBackward0": ("self", "mat2"),
    "AddmmBackward0": ("mat1", "mat2"),
    "BmmBackward0": ("self", "mat2"),
    "BaddbmmBackward0": ("batch1", "batch2"),
    "AddbmmBackward0": ("batch1", "batch2"),
    "MvBackward0": ("self", "vec"),
    "AddmvBackward0": ("mat", "vec"),
    "LinearBackward0": ("input", "weight"),
    "MkldnnLinearBackward0": ("self", "weight"),
}

_INPUT = {"input": Need.LINEAR}
_NORM = {"input": Need.NORM}
_SELF_SHAPE = {"self": Need.SHAPE}
_SELF_SMOOTH = {"self": Need.SMOOTH}
# Whose products have activations on both sides, whether gradients flow to these or not.
_OF_ACTIVATIONS = frozenset({"scaled_dot_product_attention"})
_ATTENTION = dict.fromkeys(("query", "key", "value", "output", "out"), Need.PRODUCT)

# PyTorch's own, cuDNN's and MIOpen's: ``result1`` is the mean, ``result2`` the inverse deviation.
BATCH_NORMS = ("NativeBatchNormBackward0", "CudnnBatchNormBackward0", "MiopenBatchNormBackward0")

NEEDS: Mapping[str, Mapping[str, Need]] = {
    **{
        name: {slot: Need.PRODUCT for slot in slots if slot != "weight"}
        for name, slots in PRODUCT_SLOTS.items()
    },
    "ConvolutionBackward0": _INPUT,
    "ConvolutionOverrideableBackward0": _INPUT,
    "ConvTbcBackward0": {"self": Need.LINEAR},
    "MulBackward0": {"self": Need.LINEAR, "other": Need.LINEAR},
    "PowBackward0": {"self": Need.LINEAR},  # exponents 2 and 3 only: see need_of
    **dict.fromkeys(BATCH_NORMS, _NORM),
    "NativeLayerNormBackward0": _NORM,
    "NativeGroupNormBackward0": _NORM,
    "FusedRmsNormBackward0": _NORM,
    "ReluBackward0": {"result": Need.SIGN},
    "ThresholdBackward0": {"self": Need.SIGN},
    "ThresholdBackward1": {"result": Need.SIGN},
    "HardtanhBackward0": {"self": Need.SIGN},
    "HardtanhBackward1": {"result": Need.SIGN},
    "LeakyReluBackward0": {"self": Need.SIGN},
    "LeakyReluBackward1": {"result": Need.SIGN},
    "GeluBackward0": _SELF_SMOOTH,
    "SiluBackward0": _SELF_SMOOTH,
    "MishBackward0": _SELF_SMOOTH,
    "SoftplusBackward0": _SELF_SMOOTH,
    "EluBackward0": _SELF_SMOOTH,
    "CeluBackward0": _SELF_SMOOTH,
    "HardswishBackward0": _SELF_SMOOTH,
    "SigmoidBackward0": {"result": Need.SMOOTH},
    "TanhBackward0": {"result": Need.SMOOTH},
    "SoftmaxBackward0": {"result": Need.PROBABILITY},
    "SafeSoftmaxBackward0": {"result": Need.PROBABILITY},
    "MaxPool2DWithIndicesBackward0": {"self": Need.SHAPE, "result1": Need.INTEGER},
    "MaxPool3DWithIndicesBackward0": {"self": Need.SHAPE, "result1": Need.INTEGER},
    "AdaptiveMaxPool2DBackward0": _SELF_SHAPE,
    "AdaptiveMaxPool3DBackward0": _SELF_SHAPE,
    "FractionalMaxPool2DBackward0": _SELF_SHAPE,
    "FractionalMaxPool3DBackward0": _SELF_SHAPE,
    "AvgPool2DBackward0": _SELF_SHAPE,
    "AvgPool3DBackward0": _SELF_SHAPE,
    "AdaptiveAvgPool2DBackward0": _SELF_SHAPE,
    "AdaptiveAvgPool3DBackward0": _SELF_SHAPE,
    "ReflectionPad1DBackward0": _SELF_SHAPE,
    "ReflectionPad2DBackward0": _SELF_SHAPE,
    "ReflectionPad3DBackward0": _SELF_SHAPE,
    "ReplicationPad1DBackward0": _SELF_SHAPE,
    "ReplicationPad2DBackward0": _SELF_SHAPE,
    "ReplicationPad3DBackward0": _SELF_SHAPE,
    "GatherBackward0": _SELF_SHAPE,
    "NllLossBackward0": _SELF_SHAPE,
    "NllLoss2DBackward0": _SELF_SHAPE,
    "ScaledDotProductFlashAttentionForCpuBackward0": _ATTENTION,
    "ScaledDotProductFlashAttentionBackward0": _ATTENTION,
    "ScaledDotProductEfficientAttentionBackward0": _ATTENTION,
    "ScaledDotProductCudnnAttentionBackward0": _ATTENTION,
}

# Nodes whose result is the same memory in another shape.
ALIASES = frozenset(
    {
        "ViewBackward0",
        "UnsafeViewBackward0",
        "ReshapeAliasBackward0",
        "TransposeBackward0",
        "PermuteBackward0",
        "TBackward0",
        "SqueezeBackward0",
        "SqueezeBackward1",
        "UnsqueezeBackward0",
        "AliasBackward0",
    }
)
_COPIES = ALIASES | {"ToCopyBackward0", "ExpandBackward0"}
ACCUMULATE = "torch::autograd::AccumulateGrad"


def tensors_in(result: Any) -> Iterable[Tensor]:
    """The tensors that an operator returned: itself one, or a tuple or list of some."""
    if isinstance(result, Tensor):
        return (result,)
    if isinstance(result, (tuple, list)):
        return tuple(item for item in result if isinstance(item, Tensor))
    return ()


def saved_in(node: Any, slot: str) -> SavedTensor | None:
    """What our pack gave for one slot of a node, if the slot is filled and ours."""
    raw = raw_saved(node, slot)
    if raw is None:
        return None
    if not shows_packed_data(raw):
        return next(iter(saves_read_by(lambda: saved_value(node, slot))), None)
    data = raw.data
    return data if isinstance(data, SavedTensor) else None


def shows_packed_data(raw: Any) -> bool:
    """Can autograd's raw saved tensor be asked what pack returned? (Not in every version.)"""
    return hasattr(raw, "data")


def name_saves(result: Any, first_sequence_number: int) -> None:
    """Tell every save of the operator that returned ``result`` its node, slot and need.

    Walks the nodes that the operator created, which are those numbered from
    ``first_sequence_number`` on.
    """
    todo = [tensor.grad_fn for tensor in tensors_in(result) if tensor.grad_fn is not None]
    seen: set[Any] = set()
    while todo:
        node = todo.pop()
        if node in seen or sequence_number_of(node) < first_sequence_number:
            continue
        seen.add(node)
        for slot, need in NEEDS.get(node.name(), {}).items():
            saved = saved_in(node, slot)
            if saved is not None and saved.tensor is not None:
                saved.node, saved.slot, saved.need = node, slot, need
        _name_custom(node)
        todo.extend(below for below, _ in node.next_functions if below is not None)


def _name_custom(node: Any) -> None:
    """The same for an autograd function of our own, which says it for its saves in their order.

    Where it computes otherwise than PyTorch, ``daf_plain_bytes`` of its context tell what PyTorch
    would have made and saved in the place of each; None: the same tensor.
    """
    needs = getattr(getattr(node, "_forward_cls", None), "daf_needs", None)
    if needs is None:
        return
    plain = getattr(node, "daf_plain_bytes", (None,) * len(needs))
    found = saves_read_by(lambda: node.saved_tensors)
    for saved, need, unmade_bytes in zip(found, needs, plain, strict=True):
        saved.node, saved.slot, saved.need, saved.unmade_bytes = node, "", need, unmade_bytes


def need_of(saved: SavedTensor, is_constant: Callable[[Tensor], bool], operator: str = "") -> Need:
    """The need of a named save, once what its operator's other tensors are is known.

    ``is_constant`` tells parameters and their copies from activations; ``operator`` is the torch
    function that saves.
    """
    node, need = saved.node, saved.need
    if node is None:
        return need
    name = node.name()
    if need is Need.PRODUCT and name in PRODUCT_SLOTS:
        return _product_need(saved, PRODUCT_SLOTS[name], is_constant, operator)
    if name == "PowBackward0":
        return {2: Need.LINEAR, 3: Need.PRODUCT}.get(saved_value(node, "exponent"), Need.EXACT)
    if name in BATCH_NORMS and not saved_value(node, "training"):
        return Need.LINEAR
    return need


def _product_need(
    saved: SavedTensor, slots: tuple[str, str], is_constant: Callable[[Tensor], bool], operator: str
) -> Need:
    """Linear beside a constant; a constant second factor (a frozen weight's copy) is left alone.

    Not so attention's: keys and values of frozen layers before the first trained one.
    """
    assert saved.tensor is not None
    is_weight = saved.slot == slots[1] and not saved.tensor.requires_grad
    if is_weight and operator not in _OF_ACTIVATIONS:
        return Need.EXACT
    other = saved_in(saved.node, slots[0] if saved.slot == slots[1] else slots[1])
    if other is None or other.tensor is None or is_constant(other.tensor):
        return Need.LINEAR
    return Need.PRODUCT


def parameter_behind(tensor: Tensor) -> Tensor | None:
    """The leaf of which ``tensor`` is a view or a cast copy, such as autocast makes; or None."""
    node: Any = tensor.grad_fn
    while node is not None and node.name() in _COPIES:
        node = node.next_functions[0][0]
    if node is not None and node.name() == ACCUMULATE:
        leaf: Tensor = node.variable
        return leaf
    return None


class SignRule(NamedTuple):
    """How to keep one bit of a tensor, and values that PyTorch's backward reads the same way."""

    predicate: Predicate
    low: float
    high: float
    off_value: float
    on_value: float


_NO_BOUND = math.nan


def sign_rule(node: Any, dtype: torch.dtype) -> SignRule | None:
    """The rule for a node with a slot of need *sign*; None where none is sound in ``dtype``."""
    name = node.name()
    if name == "ReluBackward0":
        return SignRule(Predicate.INSIDE, 0.0, _NO_BOUND, 0.0, 1.0)
    if name.startswith("LeakyRelu"):
        return SignRule(Predicate.ABOVE, 0.0, _NO_BOUND, -1.0, 1.0)
    if name.startswith("Threshold"):
        bound = float(saved_value(node, "threshold"))
        return SignRule(Predicate.INSIDE, bound, _NO_BOUND, _below(bound), _above(bound))
    low, high = float(saved_value(node, "min_val")), float(saved_value(node, "max_val"))
    if not low < high or math.isinf(low) or math.isinf(high):
        return None
    middle = float(torch.tensor(0.5 * (low + high), dtype=dtype))
    if not low < middle < high:
        return None
    return SignRule(Predicate.INSIDE, low, high, _below(low), middle)


def _below(bound: float) -> float:
    """Safely below ``bound`` in every float type."""
    return bound - 1.0 - abs(bound)


def _above(bound: float) -> float:
    return bound + 1.0 + abs(bound)
