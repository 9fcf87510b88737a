"""Every save of a second run is compared with the first one's: what differs is an error that names
the module, before any parameter changed; what is equal is none."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import at_most
from torch import Tensor, nn

from daf.capture.capture import Capture
from daf.core.errors import CommittedStepError, SavedTensorError
from daf.core.plan import Plan
from daf.core.policy import Method, Need, Policy, Treatment, plain_policy
from daf.pool.store import PlainStore
from daf.recompute.fingerprint import WHOLE_BYTES, Fingerprint, _added_there
from daf.session.session import Session

pytestmark = pytest.mark.smoke

WIDTH = 64
ROWS = 96
GENERATOR = torch.Generator()
NUMPY = np.random.default_rng(3)
PYTHON = random.Random(3)
CACHE: dict[str, Any] = {"calls": 0, "keys": []}


def replaying(*paths: str, policy: Policy | None = None) -> Policy:
    return replace(policy or plain_policy(), replayed=frozenset(paths))


def dropped(x: Tensor, share: float) -> Tensor:
    return x * (torch.rand(x.shape, generator=GENERATOR) >= share)


def one_row_zeroed(x: Tensor) -> Tensor:
    keep = torch.ones(len(x), 1)
    keep[PYTHON.randrange(len(x))] = 0
    return x * keep


def one_column_zeroed(x: Tensor) -> Tensor:
    keep = torch.ones(x.shape[1])
    keep[int(NUMPY.integers(x.shape[1]))] = 0
    return x * keep


def counted(x: Tensor) -> Tensor:
    CACHE["calls"] += 1
    return x / CACHE["calls"]


def cached(x: Tensor) -> Tensor:
    CACHE["keys"].append(1 + x.detach().mean())
    return x + torch.stack(CACHE["keys"]).sum()


# All draw or remember where a replay does not look.
FICKLE: dict[str, Callable[[Tensor], Tensor]] = {
    "factor": lambda x: x * torch.rand((), generator=GENERATOR).item(),
    "Python's": lambda x: x * PYTHON.random(),
    "NumPy's": lambda x: x + NUMPY.random(),
    "dropout": lambda x: dropped(x, 0.1),
    "rare dropout": lambda x: dropped(x, 0.01),
    "shuffled rows": lambda x: x[torch.randperm(len(x), generator=GENERATOR)],
    "rolled columns": lambda x: x.roll(1 + int(PYTHON.random() * (x.shape[1] - 1)), 1),
    "one row": one_row_zeroed,
    "one column": one_column_zeroed,
    "layer drop": lambda x: x.exp() if PYTHON.random() < 0.5 else x.sin(),
    "time": lambda x: x * (time.perf_counter() % 1),
    "counter": counted,
    "cache": cached,
}


class Fickle(nn.Module):
    """Does one of these before a linear layer, whose save shows it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = FICKLE[self.kind](x)
        return torch.tanh(self.layer(x))


@pytest.fixture(autouse=True)
def others_seeded() -> None:
    GENERATOR.manual_seed(3)
    PYTHON.seed(3)  # which layers "layer drop" takes: not the same one twice
    CACHE.update(calls=0, keys=[])


@pytest.mark.parametrize("kind", sorted(FICKLE))
@pytest.mark.parametrize("nested", [False, True])
def test_what_does_not_repeat_itself_is_an_error_that_names_it(kind: str, nested: bool) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(Fickle(kind)), nn.Tanh())
    capture = Capture(model, PlainStore())
    with capture.step(replaying("1", "1.0") if nested else replaying("1"), 0, 0):
        loss = model(torch.randn(ROWS, WIDTH)).square().sum()
    with pytest.raises(SavedTensorError, match="replaying '1"):
        loss.backward()


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize("released", [False, True])
def test_no_parameter_changed_before_the_error(released: bool) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Fickle("factor"), nn.Linear(WIDTH, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = torch.randn(ROWS, WIDTH), torch.randint(8, (ROWS,))
    with Session(model, optimizer, None, release_gradients=released) as session:
        session.plan = Plan(replaying("1"), ROWS, 0, False)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with pytest.raises(CommittedStepError if released else SavedTensorError) as caught:
            session.step(batch, cross_entropy)
    error = caught.value.__cause__ if released else caught.value
    assert "replaying '1' saved other values" in str(error)
    unchanged = [torch.equal(p, then) for p, then in zip(model.parameters(), before, strict=True)]
    assert all(unchanged[:4])
    assert all(unchanged) != released, "only the layer behind may have been stepped"


def test_a_coded_input_differs_and_is_no_error() -> None:
    treatment = Treatment(Method.ROTATED, 2)
    policy = replace(plain_policy(), by_need={Need.INPUT: treatment}, replayed=frozenset({"1"}))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh()))
    capture = Capture(model, PlainStore())
    with capture.step(policy, 0, 0):
        loss = model(torch.randn(ROWS, WIDTH)).square().sum()
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


SHAPES = st.lists(st.integers(1, 40), min_size=1, max_size=4).filter(
    lambda shape: torch.Size(shape).numel() < 60_000
)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool)


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same values in another layout."""
    if layout == "permuted":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided":
        return tensor.repeat_interleave(2, -1)[..., ::2]
    return tensor.contiguous()


@given(SHAPES, st.sampled_from(DTYPES), st.sampled_from(["", "permuted", "strided"]), st.data())
@settings(max_examples=at_most(400, 60), deadline=None)
def test_equal_tensors_have_equal_fingerprints(
    shape: list[int], dtype: torch.dtype, layout: str, data: Any
) -> None:
    place = data.draw(st.integers(0, 500))
    tensor = torch.randn(shape).mul(9).to(dtype)
    if dtype.is_floating_point:
        tensor[tensor > 20] = torch.nan
    tensor = laid_out(tensor, layout)
    again = laid_out(tensor.clone(), layout)
    for one, other in (
        (Fingerprint.sampled(tensor, place), Fingerprint.sampled(again, place)),
        (Fingerprint.whole(tensor), Fingerprint.whole(again)),
    ):
        assert one.content is not None
        assert not one.differs(other)


@given(SHAPES, st.sampled_from(["", "permuted", "strided"]), st.data())
@settings(max_examples=at_most(400, 60), deadline=None)
def test_a_whole_fingerprint_sees_any_bit_and_a_sample_any_factor(
    shape: list[int], layout: str, data: Any
) -> None:
    tensor = laid_out(torch.rand(shape) + 1, layout)
    changed = tensor.clone()
    place = data.draw(st.integers(0, tensor.numel() - 1))
    changed[tuple(np.unravel_index(place, tensor.shape))] += 1e-6
    whole = [Fingerprint.whole(each) for each in (tensor, changed)]
    assert whole[0].differs(whole[1])
    for index in range(3):
        first = Fingerprint.sampled(tensor, index)
        assert first.differs(Fingerprint.sampled(laid_out(tensor * 1.5, layout), index))
        if tensor.nbytes <= WHOLE_BYTES:
            assert first.differs(Fingerprint.sampled(laid_out(changed, layout), index))


@pytest.mark.parametrize("kind", ["sparse", "conjugate", "meta", "workspace"])
def test_what_cannot_be_compared_never_differs(kind: str) -> None:
    made = {
        "sparse": lambda: torch.eye(3).to_sparse(),
        "conjugate": lambda: torch.randn(3, dtype=torch.complex64).conj(),
        "meta": lambda: torch.empty(3, device="meta"),
        "workspace": lambda: torch.randint(255, (5000,), dtype=torch.uint8),
    }[kind]
    assert not Fingerprint.sampled(made(), 0).differs(Fingerprint.sampled(made(), 0))


@given(st.integers(0, 3 * 4096 + 700), st.sampled_from([torch.int16, torch.int32, torch.int64]))
def test_sums_taken_on_a_device_see_any_element(place: int, dtype: torch.dtype) -> None:
    bits = torch.arange(3 * 4096 + 701, dtype=dtype)
    changed = bits.clone()
    changed[place] ^= 1
    one, other = _added_there(bits), _added_there(changed)
    assert not torch.equal(one, other)
    assert torch.equal(one, _added_there(bits.clone()))
