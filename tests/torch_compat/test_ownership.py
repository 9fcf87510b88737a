"""Memory is written over exactly where nobody else holds it, and nothing computed changes by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import set_eval_frame

from daf.capture.capture import Capture
from daf.capture.compress import compress
from daf.core.policy import policy_for, with_fused_operators
from daf.operators.chunked import weight_gradient
from daf.torch_compat.ownership import is_held_by_none_but, sole_holders

pytestmark = pytest.mark.smoke

KEEPERS: dict[str, Callable[[Tensor], Any]] = {
    "the tensor": lambda x: x,
    "a view": lambda x: x[0],
    "a detached one": lambda x: x.detach(),
    "its storage": lambda x: x.untyped_storage(),
    "numpy": lambda x: x.detach().numpy(),
}


def test_holders_are_told_apart() -> None:
    leaf = torch.ones(3, requires_grad=True)
    assert is_held_by_none_but((leaf * 2,))
    for keep in KEEPERS.values():
        group = (leaf * 2,)
        kept = keep(group[0])
        assert not is_held_by_none_but(group)
        del kept
        assert is_held_by_none_but(group)


class Saver(nn.Module):
    """A normalisation whose input another operator saves too, and which then goes out of sight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(8, 8, 3, padding=1) for _ in "12")
        self.norm = nn.BatchNorm2d(8)
        self.factor = nn.Parameter(torch.randn(8, 12, 12))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        beside = y * self.factor
        y = self.norm(y)
        return self.second(F.relu(y)) + beside


def train(make: Callable[[], nn.Module], bits: int | str, keep: Any) -> dict[str, Any]:
    """Two steps, the second one fused; ``keep`` makes of the norm's input what somebody holds."""
    torch.manual_seed(0)
    model = make()
    torch.manual_seed(1)
    x = torch.randn(6, 8, 12, 12)
    norm = next(part for part in model.modules() if isinstance(part, nn.BatchNorm2d))
    seen: dict[str, Any] = {}

    def before(_norm: nn.Module, inputs: tuple[Tensor]) -> None:
        seen["input"] = inputs[0].data_ptr()
        seen["kept"] = keep(inputs[0]) if keep else None
        seen["copy"] = inputs[0].detach().clone()

    norm.register_forward_pre_hook(before)
    relu_outputs: list[int] = []
    second = [part for part in model.modules() if isinstance(part, nn.Conv2d)][-1]
    second.register_forward_pre_hook(lambda _, inputs: relu_outputs.append(inputs[0].data_ptr()))
    capture, policy = Capture(model), with_fused_operators(policy_for(bits))
    for _ in range(2):
        model.zero_grad()
        with capture.step(policy, 0, 0):
            loss = model(x).square().mean()
        plain_bytes = capture.stats.plain_bytes
        loss.backward()
    assert [bool(report.pattern) for report in capture.fusions()] == [True]
    assert capture.stats.plain_bytes == capture.stats.held_bytes == 0
    return {
        "over": relu_outputs[-1] == seen["input"],
        "seen": seen,
        "loss": loss.detach(),
        "plain_bytes": plain_bytes,
        "gradients": [parameter.grad for parameter in model.parameters()],
    }


def sequence() -> nn.Module:
    convolutions = (nn.Conv2d(8, 8, 3, padding=1) for _ in "12")
    return nn.Sequential(next(convolutions), nn.BatchNorm2d(8), nn.ReLU(), next(convolutions))


@pytest.mark.parametrize("make", [sequence, Saver])
@pytest.mark.parametrize("keeper", KEEPERS)
def test_the_input_is_written_over_only_where_nobody_holds_it(make: Any, keeper: str) -> None:
    """And what is computed, held and counted is the same, bit for bit."""
    alone, kept = train(make, 2, None), train(make, 2, KEEPERS[keeper])
    assert alone["over"]
    assert not kept["over"]
    if keeper == "the tensor":
        assert torch.equal(kept["seen"]["kept"], kept["seen"]["copy"])
    assert torch.equal(alone["loss"], kept["loss"])
    assert alone["plain_bytes"] == kept["plain_bytes"]
    for one, other in zip(alone["gradients"], kept["gradients"], strict=True):
        assert torch.equal(one, other)


def test_an_input_that_backward_needs_is_left_alone() -> None:
    found = train(sequence, "exact", None)
    assert not found["over"]


class _Spy(torch.autograd.Function):
    """Notes where its gradient lies; ``keep`` holds it beyond the node."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, notes: list[Any], keep: bool) -> Tensor:
        ctx.notes, ctx.keep = notes, keep
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        passed = gradient.clone()
        ctx.notes.append((passed.data_ptr(), passed.clone(), passed if ctx.keep else None))
        return passed, None, None


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("channels", "keep"), [(8, False), (8, True), (6, False)])
def test_a_convolution_s_gradient_is_written_over_its_result_s(
    channels: int, keep: bool, layout: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_gradient, "CHUNK_BYTES", 3000)
    torch.manual_seed(2)
    conv = nn.Conv2d(8, channels, 3, padding=1).to(memory_format=layout)
    x = torch.randn(9, 8, 12, 12).to(memory_format=layout).requires_grad_()
    behind: list[Any] = []
    before: list[int] = []
    with compress(conv, 2, chunked=True):
        y = x * 1
        y.register_hook(lambda gradient: before.append(gradient.data_ptr()))
        out = _Spy.apply(conv(y), behind, keep)
    (out * torch.randn_like(out)).sum().backward()
    ((place, given, kept),) = behind
    assert (before[0] == place) == (channels == 8 and not keep)
    if keep:
        assert torch.equal(kept, given)
    expected = torch.autograd.grad(conv(x), x, given)[0]
    torch.testing.assert_close(x.grad, expected, rtol=1e-4, atol=1e-5)


def test_holders_are_told_apart_while_frames_are_watched() -> None:
    """Compiled code runs under Dynamo's frame evaluation, which holds the arguments of calls."""
    leaf = torch.ones(3, requires_grad=True)
    before = sole_holders(), is_held_by_none_but((leaf * 2,))
    sole_holders.cache_clear()
    set_eval_frame(False)  # as inside a compiled call: run what is compiled, compile nothing
    try:
        watched = sole_holders(), is_held_by_none_but((leaf * 2,))
    finally:
        set_eval_frame(None)
    assert before == watched == (sole_holders(), True)
