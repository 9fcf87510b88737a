"""Less than one bit per element: means of neighbours, coded (ALAM's averaging, re-implemented).

After Woo, Lee and Jeon, "ALAM: Averaged Low-Precision Activation", ICLR 2024: a tensor is
cut into groups of neighbours in memory order, and only their means are coded. Whatever
differs inside a group is lost, the same way every time: unlike a code's own, that
error does not average out over steps. A baseline for comparison; no plan chooses it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from daf.codecs.codes import ValueCode
from daf.codecs.layout import in_memory_order, is_dense
from daf.codecs.registry import register_codec
from daf.core.code_errors import relative_error
from daf.core.errors import CodecError
from daf.core.policy import Method, Treatment
from daf.pool.store import Store


class AveragedCode:
    """Means of ``group`` neighbours as a value code: ``bits / group`` bits per element."""

    __slots__ = ("code", "count", "group")
    in_store = True

    def __init__(
        self, store: Store, tensor: Tensor, group: int, treatment: Treatment, key: int
    ) -> None:
        """Encode a dense tensor of CPU floats; a last, incomplete group has a mean of its own.

        Args:
            store: where the planes go.
            tensor: dense.
            group: neighbours in memory that are averaged, at least 2.
            treatment: *rotated* or *minmax*, and the width, of the means.
            key: 64-bit seed.

        Raises:
            CodecError: ``group`` is below 2, the tensor not dense, or the treatment no value code.
        """
        if group < 2 or not is_dense(tensor):
            raise CodecError(
                f"asked to average groups of {group} of a tensor with strides {tensor.stride()}; "
                "give groups of at least 2 and a tensor without gaps"
            )
        self.count = tensor.numel()
        self.group = group
        self.code = ValueCode(store, _means(in_memory_order(tensor), group), treatment, key)

    @property
    def nbytes(self) -> int:
        """Bytes of the means' planes and headers."""
        return self.code.nbytes

    def decode(self, out: Tensor) -> None:
        """Write every group's mean to all its elements, into a dense tensor of the coded count.

        Raises:
            CodecError: ``out`` has another number of elements.
        """
        if out.numel() != self.count:
            raise CodecError(
                f"asked to decode {self.count} elements into a tensor of {out.numel()}; "
                "give one of the coded shape"
            )
        means = torch.empty(self.code.count, dtype=torch.float32)
        self.code.decode(means)
        flat = means.repeat_interleave(self.group)[: self.count]
        in_memory_order(out).copy_(flat)


def averaged(bits: int, group: int) -> Treatment:
    """Means of ``group`` neighbours in ``bits``-bit min-max codes, by a codec registered here."""

    def encode(store: Store, tensor: Tensor, treatment: Treatment, key: int) -> AveragedCode | None:
        means = Treatment(Method.MINMAX, treatment.bits)
        return AveragedCode(store, tensor, group, means, key) if tensor.is_cpu else None

    name = f"averaged by {group}"
    register_codec(name, encode)
    return Treatment(Method.REGISTERED, bits, codec=name)


def averaged_error(within: float, treatment: Treatment) -> float:
    """Relative mean-square error of averaging and coding, for a measured share ``within``.

    Args:
        within: the share of a tensor's energy beside its blocks' means that lies within groups;
            ``1 - 1 / group`` for elements that have nothing to do with each other.
        treatment: of the means.
    """
    if not 0.0 <= within <= 1.0:
        raise CodecError(f"asked for a share of {within} of the energy; give one from 0 to 1")
    return within + (1.0 - within) * relative_error(treatment)


def energy_within_groups(tensor: Tensor, group: int) -> float:
    """Squared deviation of a dense tensor's elements from the means of their groups."""
    flat = in_memory_order(tensor).double()
    spread = flat - _means(flat, group).repeat_interleave(group)[: flat.numel()]
    return float(spread.square().sum())


def _means(flat: Tensor, group: int) -> Tensor:
    whole = flat.numel() // group * group
    means = flat[:whole].view(-1, group).mean(1)
    rest = flat[whole:]
    return torch.cat([means, rest.mean()[None]]) if rest.numel() else means
