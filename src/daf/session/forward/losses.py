"""What reads a model's outputs in a loop that keeps its loss.

While small passes are measured nobody has seen the loss: a stand-in holds what a cross-entropy
does. Inside ``with``, ``F.cross_entropy`` of many classes runs as ``logits_cross_entropy``.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf.core.replaced import replaced
from daf.operators.chunked.cross_entropy import RowLoss
from daf.operators.chunked.logits_cross_entropy import logits_cross_entropy
from daf.operators.linear_cross_entropy import are_logits, logits_loss
from daf.operators.protocol import OperatorCall
from daf.torch_compat.autograd_graph import pack_hook
from daf.torch_compat.compiler import eagerly
from daf.torch_compat.operator_mode import Arguments, Keywords, OperatorMode
from daf.torch_compat.pytree import tensors_inside

# PyTorch's cross-entropy holds this many tensors of the logits' size more.
PLAIN_COPIES = 2


class Losses:
    """The losses of one loop: ``stand_in`` for one that was not seen, and those inside ``with``."""

    def __init__(self) -> None:
        self._mode = OperatorMode(self._run)
        self._is_known = False
        self._logits_bytes: float | None = None  # of one example; None: nothing was measured

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Look for losses inside, unless the model is known to make no logits."""
        if self._logits_bytes == 0:
            yield
            return
        with replaced(_thread, inside=(*_thread.inside, self)), eagerly(), self._mode:
            yield

    def unmet_bytes(self, examples: int) -> int:
        """Return, once, what another loss than the stand-in holds more of so many examples."""
        if self._is_known or not self._logits_bytes:
            return 0
        self._is_known = True
        return int(PLAIN_COPIES * self._logits_bytes * examples)

    def stand_in(self, model: nn.Module, batch: Any) -> Tensor:
        """Return a loss of outputs with gradients, as if logits; ``batch``: arguments, keywords."""
        arguments, keywords = batch
        outputs = tensors_inside(model(*arguments, **keywords))
        trained = [each for each in outputs if each.requires_grad and each.is_floating_point()]
        self._logits_bytes = self._logits_bytes or 0
        return torch.stack([self._read(each).float() for each in trained]).sum()

    def _read(self, output: Tensor) -> Tensor:
        if output.dim() == 0:
            return output
        if self not in _thread.inside or not are_logits(output):
            found: Tensor = _Mean.apply(output)  # type: ignore[no-untyped-call]
            return found
        self._logits_bytes = max(self._logits_bytes or 0, output.nbytes / len(output))
        rows = output.flatten(0, -2)
        return logits_cross_entropy(rows, rows.new_zeros(len(rows), dtype=torch.int64), RowLoss())

    def _run(self, function: Callable[..., Any], arguments: Arguments, keywords: Keywords) -> Any:
        if function is not F.cross_entropy or pack_hook() is not None:  # somebody else saves for it
            return function(*arguments, **keywords)
        if (found := logits_loss(OperatorCall(function, arguments, keywords))) is None:
            return function(*arguments, **keywords)
        for each in _thread.inside:  # whoever's logits they are
            each._is_known = True
        return found


class _Thread(threading.local):
    inside: tuple[Losses, ...] = ()  # those whose modes are on


_thread = _Thread()


class _Mean(torch.autograd.Function):
    """A mean that holds what a cross-entropy does: its input once more, and two gradients."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        ctx.held = output.detach().clone()
        return output.float().mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        held = torch.zeros_like(ctx.held)
        return held.add(gradients[0] / max(1, held.numel()))
