"""Judging exactness: the same forward and backward, plain and captured, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from daf.capture.compress import compress
from daf.core.policy import Policy
from daf.core.reports import SiteReport
from daf.torch_compat.pytree import tensors_in_batch

Case = Callable[[], tuple[nn.Module, tuple[Any, ...]]]


class Outcome(NamedTuple):
    """Everything that a step computed: outputs, gradients of inputs and parameters, buffers."""

    tensors: dict[str, Tensor]
    sites: tuple[SiteReport, ...]


class Behind(nn.Module):
    """A module behind copies of its inputs, which are activations and not the caller's own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Any) -> Any:
        return self.inner(*(t.clone() if isinstance(t, Tensor) else t for t in inputs))


How = int | str | Policy | None


def outcome(case: Case, how: How, dtype: torch.dtype = torch.float32) -> Outcome:
    """One forward and backward under bits or a policy; None: plain PyTorch."""
    torch.manual_seed(3)
    module, inputs = case()
    module = Behind(module).to(dtype).train()
    inputs = _require_gradients(inputs, dtype)
    if how is None:
        outputs = _outputs(module(*inputs))
        _backward(outputs)
        return Outcome(_everything(module, inputs, outputs), ())
    policy = how if isinstance(how, Policy) else None
    capture = compress(module, 2 if isinstance(how, Policy) else how, policy=policy)
    with capture:
        outputs = _outputs(module(*inputs))
    _backward(outputs)
    assert capture.stats.plain_bytes == 0, "something outlived backward"
    assert capture.stats.held_bytes == 0, "something outlived backward"
    assert capture.stats.spilled_bytes == 0, "something outlived backward"
    return Outcome(_everything(module, inputs, outputs), capture.sites())


def assert_exact(case: Case, dtype: torch.dtype = torch.float32, how: How = "exact") -> Outcome:
    """Captured with lossless treatments only, everything equals plain PyTorch's, bit for bit."""
    plain, exact = outcome(case, None, dtype), outcome(case, how, dtype)
    differing = _differing(plain, exact)
    if differing:
        again = _differing(plain, outcome(case, None, dtype))
        assert not again, f"plain PyTorch does not repeat itself, so nothing can be judged: {again}"
    assert differing == []
    return exact


def _differing(first: Outcome, second: Outcome) -> list[str]:
    assert first.tensors.keys() == second.tensors.keys()
    pairs = ((name, first.tensors[name], second.tensors[name]) for name in first.tensors)
    return [name for name, one, other in pairs if not same_bits(one, other)]


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Equal shape, stride and bits; NaN equals NaN."""
    if first.layout is not torch.strided:
        return bool(torch.equal(first.to_dense(), second.to_dense()))
    return (
        first.stride() == second.stride()
        and first.dtype == second.dtype
        and torch.equal(torch.isnan(first), torch.isnan(second))
        and torch.equal(torch.nan_to_num(first), torch.nan_to_num(second))
        and torch.equal(torch.signbit(first.real), torch.signbit(second.real))
    )


def _require_gradients(inputs: Any, dtype: torch.dtype) -> Any:
    """Leaves that want gradients, so that nothing is skipped for want of one."""

    def ready(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.to(dtype).detach().requires_grad_(value.requires_grad)
        if isinstance(value, tuple):
            return tuple(map(ready, value))
        return value

    return ready(inputs)


def _outputs(result: Any) -> list[Tensor]:
    tensors = (tensor for tensor in tensors_in_batch(result))
    return [t for t in tensors if t.requires_grad and (t.is_floating_point() or t.is_complex())]


def _backward(outputs: list[Tensor]) -> None:
    gradients = [torch.randn_like(tensor.detach()) for tensor in outputs]
    torch.autograd.backward(outputs, gradients)


def _everything(module: nn.Module, inputs: Any, outputs: list[Tensor]) -> dict[str, Tensor]:
    return dict(_named(module, inputs, outputs))


def _named(module: nn.Module, inputs: Any, outputs: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
    for place, tensor in enumerate(outputs):
        yield f"output {place}", tensor.detach()
    for place, tensor in enumerate(tensors_in_batch(inputs)):
        if tensor.grad is not None:
            yield f"gradient of input {place}", tensor.grad
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            yield f"gradient of {name}", parameter.grad
    for name, buffer in module.named_buffers():
        yield f"buffer {name}", buffer
