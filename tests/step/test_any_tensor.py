"""Models of unusual tensors, modules and optimizers train in a session as they do plainly."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import daf
from daf.core.errors import DataError
from daf.step.dry_run import build_lazy
from daf.torch_compat.autograd_graph import bytes_of, is_strided, strided_parts, version_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning"),  # torch's own
    pytest.mark.filterwarnings("ignore:.*(nested tensors|Sparse CSR).*:UserWarning"),
]
STEPS = 3
Loss = Callable[[nn.Module, Any], Tensor]


def trained(
    model: nn.Module, batch: Any, loss: Loss, budget: Any, optimizer: Any = torch.optim.SGD
) -> list[Tensor]:
    """Return parameters and buffers after a few steps, in a session or (budget "plain") by hand."""
    own = optimizer([each for each in model.parameters() if each.requires_grad], lr=0.1)
    session = None if budget == "plain" else daf.Session(model, own, budget, tolerance=0)
    for _ in range(STEPS):
        if session is not None:
            session.step(batch, loss)
            continue

        def closure() -> Tensor:
            own.zero_grad()
            found = loss(model, batch)
            found.backward()
            return found

        own.step(closure)
    if session is not None:
        session.close()
    return [each.detach().clone() for each in (*model.parameters(), *model.buffers())]


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 10))


def classified(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def labelled() -> tuple[Tensor, Tensor]:
    return torch.randn(24, 32), torch.randint(0, 10, (24,))


def nested() -> tuple[nn.Module, Any, Loss]:
    rows = torch.nested.nested_tensor([torch.randn(length, 32) for length in (3, 5)])

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return torch.nested.to_padded_tensor(model(batch[0]), 0.0).square().mean()

    return network(), (rows,), loss


class Frozen(nn.Module):
    """A body and a running buffer that inference mode made and writes, before a head."""

    def __init__(self) -> None:
        super().__init__()
        with torch.inference_mode():
            self.body = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32))
        self.body.requires_grad_(False)
        self.head = network()

    def forward(self, features: Tensor) -> Tensor:
        with torch.inference_mode():
            features = self.body(features)
        return self.head(features.clone())


def inference() -> tuple[nn.Module, Any, Loss]:
    return Frozen(), labelled(), classified


def mapped() -> tuple[nn.Module, Any, Loss]:
    return network(), labelled(), lambda m, b: F.cross_entropy(torch.vmap(m)(b[0]), b[1])


def transformed() -> tuple[nn.Module, Any, Loss]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        slopes = torch.vmap(torch.func.grad(lambda each: model(each).sum()))(batch[0])
        return classified(model, batch) + slopes.square().mean()

    return network(), labelled(), loss


class Halves(nn.Module):
    """A frozen weight in two tensors inside one of a subclass."""

    def __init__(self) -> None:
        super().__init__()
        halves = TwoTensor(torch.randn(32, 32), torch.randn(32, 32))
        self.weight, self.head = nn.Parameter(halves, requires_grad=False), network()

    def forward(self, features: Tensor) -> Tensor:
        both = features @ self.weight
        return self.head(both.a - both.b)  # type: ignore[attr-defined]


def wrapped() -> tuple[nn.Module, Any, Loss]:
    return Halves(), labelled(), classified


def sparse() -> tuple[nn.Module, Any, Loss]:
    model = nn.Sequential(nn.EmbeddingBag(50, 32, sparse=True), network())
    return model, (torch.randint(0, 50, (24, 4)), torch.randint(0, 10, (24,))), classified


def compressed_rows() -> tuple[nn.Module, Any, Loss]:
    features, labels = labelled()
    return network(), (features.relu().to_sparse_csr(), labels), classified


def parameterless() -> tuple[nn.Module, Any, Loss]:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(32))

        def forward(self, features: Tensor) -> Tensor:
            return features + self.shift  # which saves nothing

    return Shifted(), labelled(), lambda m, b: m(b[0]).mean()


KINDS = [nested, inference, mapped, transformed, wrapped, sparse, compressed_rows, parameterless]


@pytest.mark.parametrize("budget", [None, "4GB"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tensor_trains_as_plainly(kind: Any, budget: str | None) -> None:
    torch.manual_seed(0)
    model, batch, loss = kind()
    plain = trained(copy.deepcopy(model), batch, loss, "plain")
    for one, other in zip(plain, trained(model, batch, loss, budget), strict=True):
        torch.testing.assert_close(other.to_dense(), one.to_dense(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("budget", [None, "4GB"])
def test_an_optimizer_with_a_closure_asks_as_often_as_plainly(budget: str | None) -> None:
    def few(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(parameters, lr=lr, max_iter=4)

    calls = []

    def counted(model: nn.Module, batch: Any) -> Tensor:
        if model.training:
            calls.append(len(batch[0]))
        return classified(model, batch)

    torch.manual_seed(0)
    model, batch = network(), labelled()
    plain = trained(copy.deepcopy(model), batch, counted, "plain", few)
    asked = len(calls)
    for one, other in zip(plain, trained(model, batch, counted, budget, few), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)
    assert len(calls) - asked >= asked > STEPS


@pytest.mark.parametrize("budget", [None, "4GB"])
def test_lazy_modules_are_built_by_one_pass_that_leaves_no_other_trace(budget: str | None) -> None:
    def late() -> nn.Module:
        return nn.Sequential(
            *(nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten()),
            *(nn.LazyLinear(16), nn.LazyLinear(10)),
        )

    batch = torch.randn(12, 3, 6, 6), torch.randint(0, 10, (12,))
    torch.manual_seed(1)
    plain = trained(late(), batch, classified, "plain")
    torch.manual_seed(1)
    model, before = late(), torch.get_rng_state()
    build_lazy(model, batch, classified)
    assert torch.equal(torch.get_rng_state(), before)
    assert not model[1].running_mean.any()  # type: ignore[index]
    assert model[1].num_batches_tracked == 0  # type: ignore[index]
    assert not any(part._forward_pre_hooks for part in model.modules())
    for one, other in zip(plain, trained(model, batch, classified, budget), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)


EMPTY = [(torch.randn(0, 32), torch.zeros(0, dtype=torch.int64)), [torch.empty(3, 0)]]
WRONG_LOSSES: list[Any] = [
    lambda m, b: classified(m, b).detach(),
    lambda m, b: classified(m, b) * (1 + 0j),
    lambda _, b: b[1].sum(),
    lambda m, b: {"loss": classified(m, b)},
    "cross_entropy",
]


@pytest.mark.parametrize("budget", [None, "4GB"])
@pytest.mark.parametrize(
    ("batch", "loss"), [*((e, classified) for e in EMPTY), *((None, each) for each in WRONG_LOSSES)]
)
def test_what_cannot_be_trained_is_one_clear_error(batch: Any, loss: Any, budget: Any) -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with daf.Session(model, optimizer, budget) as session, pytest.raises(DataError):
        session.step(labelled() if batch is None else batch, loss)
    assert all(torch.equal(before[name], each) for name, each in model.state_dict().items())


shapes = st.tuples(st.integers(1, 6), st.integers(1, 6))


@given(shapes, st.sampled_from(["dense", "coo", "csr", "nested", "wrapped", "inference", "vmap"]))
def test_a_tensor_s_parts_are_the_memory_that_it_has(shape: tuple[int, int], kind: str) -> None:
    dense = torch.ones(shape)
    found: dict[str, Callable[[], Tensor]] = {
        "dense": lambda: dense,
        "coo": dense.to_sparse,
        "csr": dense.to_sparse_csr,
        "nested": lambda: torch.nested.nested_tensor([dense, dense]),
        "wrapped": lambda: TwoTensor(dense, dense.clone()),
        "inference": lambda: in_inference(dense),
        "vmap": lambda: dense,
    }
    number = dense.numel()
    values = {"nested": 2 * number, "wrapped": 2 * number}.get(kind, number)
    if kind == "vmap":
        torch.vmap(lambda row: check(row, values, is_dense=False))(dense)
    else:
        check(found[kind](), values, is_dense=kind in ("dense", "inference"))


def in_inference(dense: Tensor) -> Tensor:
    with torch.inference_mode():
        return dense.clone()


def check(tensor: Tensor, values: int, *, is_dense: bool) -> Tensor:
    parts = strided_parts(tensor)
    floats = [part for part in parts if part.is_floating_point()]
    assert sum(part.numel() for part in floats) == values
    assert bytes_of(tensor) == sum(part.nbytes for part in parts)
    assert is_strided(tensor) == is_dense
    assert version_of(tensor) >= 0
    return tensor
