"""Repeated passes of one batch under chosen seeds, changing nothing; sketches of gradients."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from daf.capture.capture import Capture
from daf.core.errors import NonFiniteLossError
from daf.core.policy import Policy, Site
from daf.saved_tensors.sites import mix_key
from daf.step.batch_cut import BatchCut
from daf.step.microbatch import LossFunction, likely_cut, read_loss
from daf.step.state_snapshot import StateSnapshot

BUCKETS = 509  # prime, so that no stride of a weight's shape falls into the same buckets
_ROWS_AT_ONCE = 512  # with their signs within a core's second cache
_SIGN_SEED = 0x5EED
Around = Callable[[], Any]


class GradientSketcher:
    """Sketches gradients in a few hundred numbers a parameter, from which distances can be read.

    A count sketch (Charikar, Chen and Farach-Colton, ICALP 2002): every element gets a sign from a
    fixed seed and is added to one of ``buckets`` sums. The sketch is linear. Its squared length is
    an unbiased estimate of the gradient's, with a relative variance of at most 2 / ``buckets``;
    twice that where chunks are alike, which have the same signs, in other places.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], buckets: int = BUCKETS) -> None:
        self.parameters = tuple(parameters)
        self._buckets = buckets
        random = torch.Generator().manual_seed(_SIGN_SEED)
        signs = torch.randint(0, 2, ((_ROWS_AT_ONCE + 1) * buckets,), generator=random)
        self._signs = (2 * signs - 1).float()

    @torch.no_grad()
    def fold(self, index: int, gradient: Tensor) -> Tensor:
        """Return the (buckets,) float64 sketch of parameter ``index``'s gradient, by chunks."""
        dense = gradient.to_dense() if gradient.layout is not torch.strided else gradient
        real = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
        flat, sums = real.reshape(-1), torch.zeros(self._buckets, dtype=torch.float64)
        if len(flat) <= self._buckets:
            sums[: len(flat)] = flat.cpu()
            return sums
        for place, chunk in enumerate(torch.split(flat, _ROWS_AT_ONCE * self._buckets), index):
            first, flip = place % self._buckets, 1 - 2 * (mix_key(_SIGN_SEED, index, place) & 1)
            signed = chunk.cpu() * self._signs[first : first + len(chunk)]
            whole = len(signed) // self._buckets * self._buckets
            sums += flip * signed[:whole].view(-1, self._buckets).sum(0, dtype=torch.float64)
            sums[: len(signed) - whole] += flip * signed[whole:]
        return sums

    def gradient_sketch(self, loss: Tensor, elements: Tensor | None = None) -> Tensor:
        """Return (parameters, buckets) float64; holds one parameter's gradient at a time.

        ``grad`` is not touched, and hooks on accumulation do not run. ``elements``: (parameters,),
        receives how many elements have a gradient; rows of a table not looked up have none.
        """
        sketch = torch.zeros(len(self.parameters), self._buckets, dtype=torch.float64)

        def take(index: int, gradient: Tensor) -> Tensor:
            sketch[index] += self.fold(index, gradient)
            if elements is not None:
                elements[index] = gradient.count_nonzero()
            return gradient.new_zeros(()).expand(gradient.shape)  # frees the gradient itself

        with ExitStack() as hooks:
            for index, each in enumerate(self.parameters):
                hook = each.register_hook(partial(take, index))  # type: ignore[no-untyped-call]
                hooks.callback(hook.remove)
            torch.autograd.grad(loss, self.parameters, allow_unused=True)
        return sketch


def sample_variance(sketches: Sequence[Tensor]) -> Tensor:
    """Return (parameters, buckets): unbiased variance of every bucket over two or more sketches."""
    return torch.stack(list(sketches)).var(0)


@dataclass(eq=False)
class Passes:
    """Passes from the random state of ``snapshot``; they overwrite the account of ``capture``."""

    model: nn.Module
    loss_fn: LossFunction
    capture: Capture
    seed: int  # with ``step_index``, determines the codes' ordinary seeds
    step_index: int
    snapshot: StateSnapshot
    cut: BatchCut | None = None  # how batches are cut; None: the likeliest way
    buckets: int = BUCKETS  # of each parameter's sketch
    examples: int = 0  # of all passes so far

    def __post_init__(self) -> None:
        trained = {id(each): each for each in self.model.parameters() if each.requires_grad}
        self.sketcher = GradientSketcher(tuple(trained.values()), self.buckets)

    def sketch(
        self,
        batch: Any,
        policy: Policy,
        draws: Mapping[Site, int] | None = None,
        around: Around = nullcontext,
        elements: Tensor | None = None,
        later: int = 0,
    ) -> Tensor:
        """Return (parameters, buckets), the sketched gradient; raises NonFiniteLossError.

        ``later``: take all codes' seeds of so many steps later. ``elements``: (parameters,),
        receives how many elements of each have a gradient.
        """
        self.snapshot.restore_random()
        examples = (self.cut or likely_cut(batch)).size(batch)
        self.examples += examples
        index = self.step_index + later
        step = self.capture.step(policy, self.seed, index, batch=batch, draws=draws or {})
        with torch.enable_grad():
            with around(), step:
                loss = read_loss(self.loss_fn(self.model, batch), examples).mean
            if not bool(torch.isfinite(loss)):
                raise NonFiniteLossError(
                    f"asked to measure sensitivities, but the loss is {loss.item()}; measure on "
                    "a batch and parameters whose loss is finite"
                )
            return self.sketcher.gradient_sketch(loss, elements)
