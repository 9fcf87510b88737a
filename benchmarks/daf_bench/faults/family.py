"""One step of an operator family, made anew wherever memory is refused to it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Step = Callable[[], Iterable[Tensor]]


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of operator: ``make`` prepares, and returns what runs one whole step.

    A step runs forward and backward, keeps nothing, and returns what it computed: the same bits
    every time.
    """

    name: str
    make: Callable[[], Step]


def seeded(seed: int, family: Family) -> Step:
    """Return a family's step with weights and data of this seed."""
    torch.manual_seed(seed)
    return family.make()


def digest(results: Iterable[Tensor]) -> str:
    """Return a hash of every bit, the tensors' shapes included."""
    found = hashlib.sha256()
    for each in results:
        whole = each.detach().to_dense() if each.layout is not torch.strided else each.detach()
        found.update(str((whole.dtype, tuple(whole.shape))).encode())
        flat = whole.contiguous().flatten()
        found.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    return found.hexdigest()


def gradients_of(output: Tensor, leaves: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Return the output, and the gradient of the mean of its squares by each leaf."""
    loss = output.abs().square().mean()
    return output, *torch.autograd.grad(
        loss, list(leaves), allow_unused=True, materialize_grads=True
    )


def of_module(
    make: Callable[[], nn.Module],
    *shape: int,
    output: Callable[[object], Tensor] = lambda found: found,  # type: ignore[assignment, return-value]
    dtype: torch.dtype = torch.float32,
) -> Callable[[], Step]:
    """Return a family of one module over one random input."""

    def prepare() -> Step:
        module = make().to(dtype)
        given = torch.randn(shape).to(dtype).requires_grad_()
        leaves = [given, *module.parameters()]

        def step() -> Iterable[Tensor]:
            torch.manual_seed(1)
            _forget_statistics(module)
            return gradients_of(output(module(given)), leaves)

        return step

    return prepare


def of_function(
    compute: Callable[..., Tensor], *shapes: tuple[int, ...], scale: float = 1.0
) -> Callable[[], Step]:
    """Return a family of one function over random inputs, each of which has a gradient."""

    def prepare() -> Step:
        given = [(scale * torch.randn(shape)).requires_grad_() for shape in shapes]

        def step() -> Iterable[Tensor]:
            torch.manual_seed(1)
            return gradients_of(compute(*given), given)

        return step

    return prepare


def _forget_statistics(module: nn.Module) -> None:
    for each in module.modules():
        if isinstance(each, nn.modules.batchnorm._NormBase):
            each.reset_running_stats()
