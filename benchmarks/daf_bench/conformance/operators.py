"""PyTorch's operator database: each differentiable operator inside a small network.

The operator's own sample tensors are parameters. A linear layer, a normalisation and a GELU make a
gate for each example of the batch, which scales the operator's input, so that what lies before the
operator gets its gradient through it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from daf_bench.conformance.case import Case, NotApplicableError, Work

EXAMPLES, FEATURES, WIDTH = 5, 32, 208
SAMPLES, MOST_SAMPLES_SEEN, MOST_ELEMENTS = 2, 24, 4096


def operator_cases() -> list[Case]:
    """Return a case for every operator that float32 can be differentiated through on the CPU.

    Raises:
        ImportError: the database's own dependencies are not installed.
    """
    from torch.testing._internal.common_methods_invocations import op_db

    found = {
        f"operators/{info.formatted_name}": info
        for info in op_db
        if info.supports_autograd and torch.float32 in info.supported_backward_dtypes("cpu")
    }
    return [Case(name, partial(_build, info)) for name, info in found.items()]


def _build(info: Any) -> Work:
    samples = list(_samples(info))
    if not samples:
        raise NotApplicableError("no small sample gives a differentiable float32 output")
    model = GatedOperator(info, samples)
    return Work(model, torch.randn(EXAMPLES, FEATURES), lambda model, batch: model(batch).mean())


def _samples(info: Any) -> Iterator[Any]:
    """Yield a few small samples that can be differentiated, of different kinds."""
    drawn = info.sample_inputs("cpu", torch.float32, requires_grad=True)
    seen = [each for each in islice(drawn, MOST_SAMPLES_SEEN) if _is_usable(info, each)]
    step = max(1, len(seen) // SAMPLES)
    yield from seen[::step][:SAMPLES]


def _is_usable(info: Any, sample: Any) -> bool:
    tensors = [t for t in _pytree.tree_leaves(sample.input) if isinstance(t, Tensor)]
    if not tensors or not any(t.is_floating_point() and t.numel() for t in tensors):
        return False
    if any(t.numel() > MOST_ELEMENTS for t in tensors):
        return False
    try:
        found = info.op(sample.input, *sample.args, **sample.kwargs)
        outputs = differentiable(sample.output_process_fn_grad(found))
    except Exception:
        return False
    leaves = _pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    is_owning = any(map(_is_owned, leaves))
    return is_owning and bool(outputs) and all(e.numel() and e.isfinite().all() for e in outputs)


def differentiable(nest: Any) -> list[Tensor]:
    """Return the tensors in a nest of outputs that a gradient goes through, dense and real."""
    leaves = [t for t in _pytree.tree_leaves(nest) if isinstance(t, Tensor) and t.requires_grad]
    leaves = [t if t.layout in (torch.strided, torch.jagged) else t.to_dense() for t in leaves]
    return [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in leaves]


def weighted(outputs: list[Tensor]) -> Tensor:
    """Return a mean of all outputs' elements in which no two weigh the same."""
    parts = [
        (each * torch.linspace(0.5, 1.5, each.numel(), dtype=each.dtype).view(each.shape)).mean()
        for each in outputs
        if each.numel()
    ]
    return torch.stack([part.to(torch.float32) for part in parts]).sum()


class OperatorCall(nn.Module):
    """One operator on one sample, whose tensors are parameters; ``gate`` scales its input."""

    def __init__(self, info: Any, sample: Any) -> None:
        super().__init__()
        self._info, self._finish = info, sample.output_process_fn_grad
        nest = (sample.input, sample.args, sample.kwargs)
        leaves, self._spec = _pytree.tree_flatten(nest)
        self.owned = nn.ParameterList(
            nn.Parameter(leaf.detach().clone()) for leaf in leaves if _is_owned(leaf)
        )
        self._places = [place for place, leaf in enumerate(leaves) if _is_owned(leaf)]
        self._leaves = [None if _is_owned(leaf) else _detached(leaf) for leaf in leaves]
        inputs = len(_pytree.tree_leaves(sample.input))  # else a sparse one, which is a constant
        self._scaled = [each for each in self._places if each < inputs] or self._places

    def forward(self, gate: Tensor) -> Tensor:
        """Return a scalar of the operator's outputs."""
        leaves = list(self._leaves)
        for place, parameter in zip(self._places, self.owned, strict=True):
            leaves[place] = parameter * gate if place in self._scaled else parameter
        values, args, kwargs = _pytree.tree_unflatten(leaves, self._spec)
        return weighted(differentiable(self._finish(self._info.op(values, *args, **kwargs))))


def _is_owned(leaf: Any) -> bool:
    is_trained = isinstance(leaf, Tensor) and leaf.requires_grad
    return is_trained and leaf.layout is torch.strided


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


class GatedOperator(nn.Module):
    """Examples [N, features] to one number each, through the operator's samples."""

    def __init__(self, info: Any, samples: list[Any]) -> None:
        super().__init__()
        self.calls = nn.ModuleList(OperatorCall(info, sample) for sample in samples)
        self.before = nn.Sequential(
            nn.Linear(FEATURES, WIDTH),
            nn.LayerNorm(WIDTH),
            nn.GELU(),
            nn.Linear(WIDTH, len(samples)),
        )

    def forward(self, examples: Tensor) -> Tensor:
        """Return one number for each example [N]."""
        gates = 1.0 - 0.1 * torch.sigmoid(self.before(examples))
        return torch.stack(
            [
                torch.stack([call(gate) for call, gate in zip(self.calls, row, strict=True)]).sum()
                for row in gates
            ]
        )
