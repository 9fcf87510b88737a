"""Random operators that return what does not depend on how many numbers are drawn.

A batch and its parts draw different numbers. Inside ``ConstantRandom`` dropout keeps everything,
and a draw of any size is one number throughout, so that only the mathematics can differ.
"""

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from daf.torch_compat.operator_mode import DispatchMode, OperatorMode

_DROPOUT = torch.ops.aten.native_dropout.default
_LOW = 1e-3  # of the range
_GOLDEN = 0.6180339887498949  # multiples of it spread evenly, so that loops over draws end


class ConstantRandom(DispatchMode):
    """Every random operator's result is one number.

    ``dtypes``: of tensors that operators gave; ``has_drawn``: a random operator ran;
    ``has_filled``: one that draws numbers ran. ``is_low``: they are near their least.
    """

    def __init__(self, *, is_low: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes: set[torch.dtype] = set()
        self.has_drawn = self.has_filled = False
        self._draws, self._is_low = 0, is_low

    def in_backward(self) -> OperatorMode:
        """Return a mode for a backward pass, where only what Python calls draws.

        That is what checkpoints run again. Operators of autograd's own draw nothing; looking at
        each of them would take as long as a small pass itself.
        """

        def run(function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
            with self:
                return function(*args, **kwargs)

        return OperatorMode(run)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator; PyTorch calls this."""
        # Thousands of operators in a pass of a deep model: each line here is a part of its time.
        if kwargs and "dropout_p" in kwargs:
            self.has_drawn = self.has_drawn or bool(kwargs["dropout_p"])
            kwargs = {**kwargs, "dropout_p": 0.0}
        if func is _DROPOUT:  # most models draw by this alone: nothing is drawn in vain
            self.has_drawn = True
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        found = func(*args, **kwargs) if kwargs else func(*args)
        if (constant := _constant(func)) is not None:
            self._draws += 1
            self.has_drawn = self.has_filled = True
            at = 0.5 + self._draws * _GOLDEN
            found = constant(found, _LOW * (at % 1.0) if self._is_low else at, args)
        if isinstance(found, Tensor):
            self.dtypes.add(found.dtype)
        return found


# Fills an operator's result; ``at`` changes from draw to draw, ``args`` are the operator's.
Constant = Callable[[Any, float, tuple[Any, ...]], Any]


def _between(found: Tensor, at: float, args: tuple[Any, ...]) -> Tensor:
    """Fill for ``uniform_(low=0, high=1)``."""
    low = args[1] if len(args) > 1 else 0.0
    high = args[2] if len(args) > 2 else 1.0
    return found.fill_(low + (high - low) * (at % 1.0))


def _middle(found: Tensor, _at: float, args: tuple[Any, ...]) -> Tensor:
    bounds = [each for each in args if isinstance(each, int)][:2]
    low, high = bounds if len(bounds) == 2 else (0, *bounds)[:2] if bounds else (0, 2)
    return found.fill_((low + high) // 2)


_CONSTANTS: Mapping[str, Constant] = MappingProxyType(
    {
        **dict.fromkeys(("rand", "rand_like"), lambda found, at, _: found.fill_(at % 1.0)),
        "uniform_": _between,
        **dict.fromkeys(
            ("randn", "randn_like", "normal", "normal_", "exponential_"),
            lambda found, at, _: found.fill_(0.5 + at % 1.0),
        ),
        **dict.fromkeys(
            ("bernoulli", "bernoulli_", "cauchy_", "log_normal_", "geometric_", "poisson"),
            lambda found, at, _: found.fill_(at > _LOW),
        ),
        "randperm": lambda found, _at, _: found.copy_(found.sort().values.roll(1)),
        **dict.fromkeys(("randint", "randint_like", "random_"), _middle),
        "multinomial": lambda found, _, args: found.copy_(args[0].topk(found.shape[-1]).indices),
    }
)


@cache
def _constant(function: Any) -> Constant | None:
    """Return what fills the results of an operator, if it is a random one."""
    return _CONSTANTS.get(function.overloadpacket.__name__)
