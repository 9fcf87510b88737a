"""Replay reads a module's own tensors again: still the same ones, or the step is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from exactness import same_bits
from torch import Tensor, nn

from daf.capture.capture import Capture
from daf.core.errors import SavedTensorError, UnknownNameError
from daf.core.policy import plain_policy

pytestmark = pytest.mark.smoke

WIDTH = 16
Loss = Callable[[nn.Module], Tensor]


class Scaled(nn.Module):
    """A parameter and a buffer, neither of which autograd saves."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x) + self.shift)


def rows() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(4, WIDTH)


def model_with(module: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), module)


def gradients(
    make: Callable[[], nn.Module], loss_of: Loss, *paths: str
) -> tuple[list[Tensor | None], tuple[tuple[str, int], ...]]:
    torch.manual_seed(0)
    model = model_with(make())
    capture = Capture(model)
    with capture.step(replace(plain_policy(), replayed=frozenset(paths)), 0, 0):
        loss = loss_of(model)
    loss.backward()
    return [parameter.grad for parameter in model.parameters()], capture.replays


def assert_exact(make: Callable[[], nn.Module], loss_of: Loss) -> None:
    plain, _ = gradients(make, loss_of)
    replayed, replays = gradients(make, loss_of, "1")
    assert replays
    for one, other in zip(plain, replayed, strict=True):
        assert one is other is None or same_bits(one, other)


# --- restored -----------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen_first", [True, False])
def test_what_was_frozen_is_so_again(frozen_first: bool) -> None:
    """Otherwise other tensors would be saved, and handles stand for the wrong ones."""

    def make() -> nn.Module:
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        return module.requires_grad_(not frozen_first)

    seen = []

    def loss_of(model: nn.Module) -> Tensor:
        loss = model(rows()).square().sum()
        model[1].requires_grad_(frozen_first)
        seen.append(model)
        return loss

    assert_exact(make, loss_of)
    for model in seen:
        assert all(p.requires_grad is frozen_first for p in model[1].parameters())


def test_a_buffer_that_every_call_makes_anew() -> None:
    class Positions(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            self.register_buffer("places", torch.arange(WIDTH) / WIDTH, persistent=False)
            return super().forward(x * self.places)

    assert_exact(Positions, lambda model: model[1](model[1](model(rows()))).sum())


@pytest.mark.parametrize("inplace", [True, False])
def test_a_save_that_its_operator_fills_afterwards(inplace: bool) -> None:
    """RReLU's noise is saved before it is drawn; stopping right there would leave it undefined."""

    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.rrelu(x * 1, training=True, inplace=inplace)

    assert_exact(Noisy, lambda model: model(rows()).square().sum())


def test_a_function_transform_inside_a_call() -> None:
    """Its own saves refuse hooks, the second run's too."""

    class Slopes(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            slopes = torch.vmap(torch.func.grad(lambda each: each.square().tanh().sum()))
            return super().forward(x + slopes(x))

    assert_exact(Slopes, lambda model: model(rows()).square().sum())


# --- refused ------------------------------------------------------------------------------------


def with_other_parameters(model: nn.Module) -> Tensor:
    doubled = {name: 2 * parameter for name, parameter in model.named_parameters()}
    return torch.func.functional_call(model, doubled, (rows(),)).sum()


def with_other_memory(model: nn.Module) -> Tensor:
    loss = model(rows()).sum()
    model[1].layer.weight.data = 2 * model[1].layer.weight.data
    return loss


def with_another_buffer(model: nn.Module) -> Tensor:
    loss = model(rows()).sum()
    model[1].shift = torch.zeros(())
    return loss


def with_a_changed_buffer(model: nn.Module) -> Tensor:
    loss = model(rows()).sum()
    model[1].shift.zero_()
    return loss


@pytest.mark.parametrize(
    ("loss_of", "reason"),
    [
        (with_other_parameters, "parameter 'layer.weight' was replaced"),
        (with_other_memory, "parameter 'layer.weight' was replaced"),
        (with_another_buffer, "buffer 'shift' was replaced"),
        (with_a_changed_buffer, "buffer 'shift' has been modified"),
    ],
)
def test_other_tensors_than_in_the_first_pass_are_refused(loss_of: Loss, reason: str) -> None:
    gradients(Scaled, loss_of)  # plain PyTorch allows it: nothing of it was saved
    with pytest.raises(SavedTensorError, match=f"asked to replay '1', but its {reason}"):
        gradients(Scaled, loss_of, "1")


def weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))


def test_a_weight_that_a_hook_sets_anew_is_refused() -> None:
    def three_calls(model: nn.Module) -> Tensor:
        return model[1](model[1](model(rows()))).sum()

    assert_exact(weight_norm, lambda model: model(rows()).square().sum())
    assert_exact(lambda: nn.Sequential(weight_norm()), three_calls)
    with pytest.raises(SavedTensorError, match="attribute 'weight' was replaced"):
        gradients(weight_norm, three_calls, "1")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # from torch 2.14 on
def test_a_scripted_module_is_refused() -> None:
    model = model_with(torch.jit.script(nn.Tanh()))
    policy = replace(plain_policy(), replayed=frozenset({"1"}))
    with (
        pytest.raises(UnknownNameError, match="whose calls cannot be seen"),
        Capture(model).step(policy, 0, 0),
    ):
        pass
