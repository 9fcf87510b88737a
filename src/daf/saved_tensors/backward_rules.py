"""What each operator's backward needs of the tensors it saves, read from ``derivatives.yaml``.

A node's name and the slot's name identify the formula. What is not listed is *exact*.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from daf.core.code_format import Predicate
from daf.core.policy import Need
from daf.saved_tensors.packed_tensor import SavedTensor, saves_read_by
from daf.torch_compat.autograd_graph import raw_saved, saved_value, sequence_number_of

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

_OF_ACTIVATIONS = frozenset({"scaled_dot_product_attention"})  # products of activations alone
_ATTENTION = dict.fromkeys(("query", "key", "value", "output", "out"), Need.PRODUCT)

# PyTorch's own, cuDNN's and MIOpen's: ``result1`` is the mean, ``result2`` the inverse deviation.
BATCH_NORMS = ("NativeBatchNormBackward0", "CudnnBatchNormBackward0", "MiopenBatchNormBackward0")


def _same(nodes: str, **slots: Need) -> dict[str, Mapping[str, Need]]:
    """Return the same slots for several nodes, named without ``Backward0``."""
    return {f"{node}Backward0": slots for node in nodes.split()}


NEEDS: Mapping[str, Mapping[str, Need]] = {
    **{
        name: {slot: Need.PRODUCT for slot in slots if slot != "weight"}
        for name, slots in PRODUCT_SLOTS.items()
    },
    **_same("Convolution ConvolutionOverrideable", input=Need.LINEAR),
    **_same("ConvTbc", self=Need.LINEAR),
    **_same("Mul", self=Need.LINEAR, other=Need.LINEAR),
    **_same("Pow", self=Need.LINEAR),  # exponents 2 and 3 only: see need_of
    **{name: {"input": Need.NORM} for name in BATCH_NORMS},
    **_same("NativeLayerNorm NativeGroupNorm FusedRmsNorm", input=Need.NORM),
    **_same("Relu", result=Need.SIGN),
    **_same("Threshold Hardtanh LeakyRelu", self=Need.SIGN),
    "ThresholdBackward1": {"result": Need.SIGN},
    "HardtanhBackward1": {"result": Need.SIGN},
    "LeakyReluBackward1": {"result": Need.SIGN},
    **_same("Gelu Silu Mish Softplus Elu Celu Hardswish", self=Need.SMOOTH),
    **_same("Sigmoid Tanh", result=Need.SMOOTH),
    **_same("Softmax SafeSoftmax", result=Need.PROBABILITY),
    **_same("MaxPool2DWithIndices MaxPool3DWithIndices", self=Need.SHAPE, result1=Need.INTEGER),
    **_same("AdaptiveMaxPool2D AdaptiveMaxPool3D", self=Need.SHAPE),
    **_same("FractionalMaxPool2D FractionalMaxPool3D", self=Need.SHAPE),
    **_same("AvgPool2D AvgPool3D AdaptiveAvgPool2D AdaptiveAvgPool3D", self=Need.SHAPE),
    **_same("ReflectionPad1D ReflectionPad2D ReflectionPad3D", self=Need.SHAPE),
    **_same("ReplicationPad1D ReplicationPad2D ReplicationPad3D", self=Need.SHAPE),
    **_same("Gather NllLoss NllLoss2D", self=Need.SHAPE),
    "ScaledDotProductFlashAttentionForCpuBackward0": _ATTENTION,
    "ScaledDotProductFlashAttentionBackward0": _ATTENTION,
    "ScaledDotProductEfficientAttentionBackward0": _ATTENTION,
    "ScaledDotProductCudnnAttentionBackward0": _ATTENTION,
}

# Nodes whose result is the same memory in another shape.
ALIASES = frozenset(
    {
        *("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "AliasBackward0"),
        *("TransposeBackward0", "PermuteBackward0", "TBackward0"),
        *("SqueezeBackward0", "SqueezeBackward1", "UnsqueezeBackward0"),
    }
)
_COPIES = ALIASES | {"ToCopyBackward0", "ExpandBackward0"}
ACCUMULATE = "torch::autograd::AccumulateGrad"


def tensors_in(result: Any) -> Iterable[Tensor]:
    """Return the tensors that an operator returned: itself one, or a tuple or list of some."""
    if isinstance(result, Tensor):
        return (result,)
    if isinstance(result, (tuple, list)):
        return tuple(item for item in result if isinstance(item, Tensor))
    return ()


def saved_in(node: Any, slot: str) -> SavedTensor | None:
    """Return what the pack hook gave for one slot of a node, if the slot is filled so."""
    if (raw := raw_saved(node, slot)) is None:
        return None
    if not shows_packed_data(raw):
        return next(iter(saves_read_by(lambda: saved_value(node, slot))), None)
    data = raw.data
    return data if isinstance(data, SavedTensor) else None


def shows_packed_data(raw: Any) -> bool:
    """True if autograd's raw saved tensor shows what pack returned (not in every version)."""
    return hasattr(raw, "data")


def name_saves(result: Any, first_sequence_number: int) -> None:
    """Name the saves of the operator that made ``result`` and the nodes from this number on."""
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
    """Name the saves of an autograd function of DAF's own by its ``daf_needs``, in their order."""
    # Where it computes otherwise than PyTorch, ``daf_plain_bytes`` of its context are what PyTorch
    # would have made and saved in place of each; None: the same tensor.
    if (needs := getattr(getattr(node, "_forward_cls", None), "daf_needs", None)) is None:
        return
    plain = getattr(node, "daf_plain_bytes", (None,) * len(needs))
    found = saves_read_by(lambda: node.saved_tensors)
    for saved, need, unmade_bytes in zip(found, needs, plain, strict=True):
        saved.node, saved.slot, saved.need, saved.unmade_bytes = node, "", need, unmade_bytes


def need_of(saved: SavedTensor, is_constant: Callable[[Tensor], bool], operator: str = "") -> Need:
    """Return the need of a named save, which depends on its operator's other tensors.

    ``is_constant`` is True of parameters and their copies; ``operator`` names the torch function.
    """
    node, need = saved.node, saved.need
    if node is None:
        return need
    name = node.name()
    if need is Need.PRODUCT and name in PRODUCT_SLOTS:
        return _product_need(saved, PRODUCT_SLOTS[name], is_constant, operator)
    if name == "PowBackward0":
        return {2: Need.LINEAR, 3: Need.PRODUCT}.get(saved_value(node, "exponent"), Need.EXACT)
    return Need.LINEAR if name in BATCH_NORMS and not saved_value(node, "training") else need


def _product_need(
    saved: SavedTensor, slots: tuple[str, str], is_constant: Callable[[Tensor], bool], operator: str
) -> Need:
    """Return *linear* beside a constant; *exact* for a constant second factor (a weight's copy)."""
    # Attention's second factors are coded: keys, values of frozen layers before a trained one.
    assert saved.tensor is not None
    is_weight = saved.slot == slots[1] and not saved.tensor.requires_grad
    if is_weight and operator not in _OF_ACTIVATIONS:
        return Need.EXACT
    other = saved_in(saved.node, slots[0] if saved.slot == slots[1] else slots[1])
    if other is None or other.tensor is None or is_constant(other.tensor):
        return Need.LINEAR
    return Need.PRODUCT


def parameter_behind(tensor: Tensor) -> Tensor | None:
    """Return the leaf of which ``tensor`` is a view or a cast copy, as autocast makes; or None."""
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


def sign_rule(node: Any, dtype: torch.dtype) -> SignRule | None:
    """Return the rule for a node with a slot of need *sign*; None if none is sound in ``dtype``."""
    name = node.name()
    if name == "ReluBackward0":
        return SignRule(Predicate.INSIDE, 0.0, math.nan, 0.0, 1.0)
    if name.startswith("LeakyRelu"):
        return SignRule(Predicate.ABOVE, 0.0, math.nan, -1.0, 1.0)
    if name.startswith("Threshold"):
        bound = float(saved_value(node, "threshold"))
        above = bound + 1.0 + abs(bound)
        return SignRule(Predicate.INSIDE, bound, math.nan, _below(bound), above)
    low, high = float(saved_value(node, "min_val")), float(saved_value(node, "max_val"))
    if not low < high or math.isinf(low) or math.isinf(high):
        return None
    middle = float(torch.tensor(0.5 * (low + high), dtype=dtype))
    if not low < middle < high:
        return None
    return SignRule(Predicate.INSIDE, low, high, _below(low), middle)


def _below(bound: float) -> float:
    """Return a value below ``bound`` in every float type."""
    return bound - 1.0 - abs(bound)
