"""Where a graph of gradients is wanted, fused and chunked operators give PyTorch's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import at_most
from torch import Tensor, nn

from daf.capture.capture import Capture
from daf.capture.compress import compress
from daf.core.errors import SavedTensorError
from daf.core.policy import policy_for, with_chunked_operators, with_fused_operators
from daf.operators import fused_function
from daf.operators.chunked import attention as chunked_attention
from daf.operators.chunked import weight_gradient
from daf.operators.chunked.attention import attention
from daf.operators.fused_function import differentiable_gradients

WIDTH, SIZE = 16, 8


class Residual(nn.Module):
    """Convolution, normalisation, addition and ReLU."""

    def __init__(self, *, six: bool = False, affine: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.norm = nn.BatchNorm2d(WIDTH, affine=affine)
        self.relu = nn.ReLU6() if six else nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.relu(self.norm(self.conv(x)) + x)
        return found


class Attending(nn.Module):
    """Attention with dropout, its noise the same every time."""

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(5)
        q, k, v = (x.reshape(len(x), 4, -1, SIZE) * factor for factor in (1.0, 0.5, 2.0))
        found = F.scaled_dot_product_attention(q, k, v, dropout_p=0.25, is_causal=True)
        return found.reshape(x.shape)


def tanh_gelu() -> nn.Module:
    return nn.GELU(approximate="tanh")


IMAGES: dict[str, Callable[[], nn.Module]] = {
    "norm": lambda: nn.BatchNorm2d(WIDTH),
    "norm relu": lambda: nn.Sequential(nn.BatchNorm2d(WIDTH), nn.ReLU()),
    "residual": Residual,
    "residual six": lambda: Residual(six=True),
    "plain norm": lambda: Residual(affine=False),
    "convolution": lambda: nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
    "without bias": lambda: nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False),
    "rows": lambda: nn.LayerNorm(SIZE),
    "two dimensions": lambda: nn.LayerNorm([SIZE, SIZE]),
    "root mean square": lambda: nn.RMSNorm(SIZE),
    "gelu": lambda: nn.Sequential(nn.GELU(), nn.Linear(SIZE, SIZE)),
    "tanh": lambda: nn.Sequential(tanh_gelu(), nn.Linear(SIZE, SIZE)),
    "silu": lambda: nn.Sequential(nn.SiLU(), nn.Linear(SIZE, SIZE)),
    "linear": lambda: nn.Linear(SIZE, SIZE),
    "attention": Attending,
}


def penalised(model: nn.Module, x: Tensor) -> Tensor:
    """A loss with the square of its gradient by the input."""
    x = x.clone().requires_grad_()
    out = model(x).square().mean(tuple(range(1, x.dim())))
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.mean() + 100 * slope.square().sum() / len(x)


def gradients(
    model: nn.Module, x: Tensor, bits: int | str | None, *, penalty: Any = penalised
) -> dict[str, Tensor | None]:
    """Gradients of the third step, the first with a penalty, where two found what to fuse."""
    model = copy.deepcopy(model)
    if bits is None:
        penalty(model, x).backward()
        return {name: each.grad for name, each in model.named_parameters()}
    policy = with_chunked_operators(policy_for(bits), 1024, chunked=True)
    policy = with_fused_operators(policy, chunked=True)
    capture = Capture(model)
    start = copy.deepcopy(model.state_dict())
    for _ in range(2):
        with capture.step(policy, 0, 0):
            loss = model(x).square().mean()
        loss.backward()
    model.load_state_dict(start)
    model.zero_grad()
    with capture.step(policy, 0, 0):
        loss = penalty(model, x)
    loss.backward()
    return {name: each.grad for name, each in model.named_parameters()}


def model_of(kinds: list[str]) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    parts = [IMAGES[kind]() for kind in kinds]
    first, last = (nn.Conv2d(WIDTH, WIDTH, 1) for _ in "12")
    return nn.Sequential(first, *parts, last), torch.randn(12, WIDTH, SIZE, SIZE)


def assert_close(found: dict[str, Any], expected: dict[str, Any], error: float) -> None:
    for name, each in expected.items():
        whole = max(0.05, float(each.norm()))  # a bias before a normalisation has none
        assert (found[name] - each).norm() <= error * whole, name


@pytest.mark.parametrize("kind", IMAGES)
def test_a_gradient_penalty_trains_as_unfused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = model_of([kind])
    expected = gradients(model, x, None)
    asked: list[Any] = []

    def counted(run: Any, *arguments: Any) -> Any:
        asked.append(run)
        return differentiable_gradients(run, *arguments)

    for module in (fused_function, weight_gradient, chunked_attention):
        monkeypatch.setattr(module, "differentiable_gradients", counted)
    gradients(model, x, "exact")
    assert len(asked) >= 3  # the convolutions around it, and itself
    assert_close(gradients(model, x, "exact"), expected, 1e-3)
    assert_close(gradients(model, x, 8), expected, 0.2)


@given(st.lists(st.sampled_from(sorted(IMAGES)), min_size=2, max_size=4))
@settings(max_examples=at_most(60, 6), deadline=None)
def test_any_row_of_them(kinds: list[str]) -> None:
    model, x = model_of(kinds)
    assert_close(gradients(model, x, "exact"), gradients(model, x, None), 5e-3)


def test_a_graph_of_the_whole_loss_gives_products_with_its_second_derivatives() -> None:
    def product(model: nn.Module, x: Tensor) -> Tensor:
        parameters = list(model.parameters())
        loss = model(x).square().mean()
        found = torch.autograd.grad(loss, parameters, create_graph=True)
        return loss + sum((each * each.detach().sign()).sum() for each in found)

    model, x = model_of(["residual", "rows", "gelu"])
    found = gradients(model, x, "exact", penalty=product)
    assert_close(found, gradients(model, x, None, penalty=product), 2e-3)


def test_tied_weights_are_not_counted_twice() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(SIZE))

        def forward(self, x: Tensor) -> Tensor:
            return F.layer_norm(x * self.weight, (SIZE,), self.weight)

    torch.manual_seed(0)
    model, x = nn.Sequential(Tied(), Tied()), torch.randn(64, 4, SIZE)
    assert_close(gradients(model, x, "exact"), gradients(model, x, None), 1e-3)


def test_a_parameter_changed_before_is_an_error_as_in_pytorch() -> None:
    torch.manual_seed(0)
    norm, x = nn.LayerNorm(64), torch.randn(64, 64, requires_grad=True)
    with compress(norm, "exact", fused=True):
        out = norm(x * 1)
    with torch.no_grad():
        norm.weight.mul_(2)
    with pytest.raises(SavedTensorError, match="changed in place"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


def test_attention_by_itself() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(2, 1, 4, 2, dtype=torch.float64, requires_grad=True) for _ in "qkv"]
    mask = torch.rand(2, 1, 4, 4) > 0.2

    def repeated(*given_: Tensor) -> Tensor:
        torch.manual_seed(0)
        return attention(*given_, attn_mask=mask, dropout_p=0.3, chunk_bytes=64)

    assert torch.autograd.gradgradcheck(repeated, inputs)
