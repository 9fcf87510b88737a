"""Random operators draw one number, whatever the size; dropout keeps everything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from daf.profiling.constant_random import ConstantRandom

DRAWS: dict[str, Callable[[int], Tensor]] = {
    "rand": lambda size: torch.rand(size, 3),
    "randn": lambda size: torch.randn(size, 3),
    "randn_like": lambda size: torch.randn_like(torch.zeros(size, 3)),
    "uniform_": lambda size: torch.empty(size).uniform_(-2.0, -1.0),
    "normal": lambda size: torch.normal(torch.zeros(size), 1.0),
    "randint": lambda size: torch.randint(9, (size,)),
    "randint from": lambda size: torch.randint(5, 9, (size,)),
    "random_": lambda size: torch.empty(size, dtype=torch.int64).random_(5, 9),
    "multinomial": lambda size: torch.multinomial(torch.tensor([[0.1, 0.9]] * size), 1),
    "gumbel": lambda size: F.gumbel_softmax(torch.ones(size, 3)),
    "dropout": lambda size: F.dropout(torch.ones(size, 3), 0.3),
    "alpha_dropout": lambda size: F.alpha_dropout(torch.ones(size, 3), 0.3),
    "bernoulli": lambda size: torch.bernoulli(torch.full((size,), 0.4)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_of_any_size_agree_and_are_the_same_in_every_pass(name: str) -> None:
    found = []
    for size in (7, 2, 7):
        with ConstantRandom():
            found.append(DRAWS[name](size))
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[0][:2], found[1])
    assert all(torch.equal(row, found[0][0]) for row in found[0])


def test_draws_stay_within_their_bounds_and_differ_from_one_another() -> None:
    with ConstantRandom():
        first, second = torch.rand(()), torch.rand(())
        assert 0 <= first < 1
        assert first != second
        assert -2 <= DRAWS["uniform_"](2)[0] <= -1
        assert 5 <= DRAWS["randint from"](2)[0] < 9
        assert 5 <= DRAWS["random_"](2)[0] < 9
        assert 0 < DRAWS["randint"](2)[0] < 9
        assert DRAWS["multinomial"](2).tolist() == [[1], [1]]
        assert torch.equal(F.dropout(torch.ones(4), 0.5), torch.full((4,), 2.0))


def test_a_recurrent_layers_dropout_is_left_out_and_types_are_noted() -> None:
    layer = nn.GRU(4, 4, num_layers=2, dropout=0.9)
    x = torch.randn(5, 2, 4)
    with ConstantRandom() as random:
        once, again = layer(x)[0], layer(x)[0]
        x.bfloat16() + 1
    assert torch.equal(once, again)
    assert random.dtypes >= {torch.float32, torch.bfloat16}


def test_in_backward_only_what_checkpoints_call_again_is_seen() -> None:
    weight = torch.ones(4, requires_grad=True)

    def drawn(x: Tensor) -> Tensor:
        return x * weight * torch.rand_like(x) + F.dropout(x, 0.5)

    draws, random = [], ConstantRandom()
    with random:
        loss = checkpoint(drawn, torch.ones(4), use_reentrant=False).sum()
    seen = ConstantRandom.__torch_dispatch__

    def noted(mode: ConstantRandom, func: Any, *rest: Any) -> Any:
        draws.append(func.overloadpacket.__name__)
        return seen(mode, func, *rest)

    with pytest.MonkeyPatch.context() as patch, random.in_backward():
        patch.setattr(ConstantRandom, "__torch_dispatch__", noted)
        loss.backward()
    assert "rand_like" in draws
    assert "expand" not in draws  # autograd's own, of the sum
    assert weight.grad is not None
    assert len(weight.grad.unique()) == 1
