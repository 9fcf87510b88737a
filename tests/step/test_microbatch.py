"""Batches of any structure are cut by clear rules; gradients of micro-batches join exactly."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from daf.core.errors import DataError
from daf.step import microbatch
from daf.torch_compat.pytree import tensors_in_batch

pytestmark = pytest.mark.smoke


class Named(NamedTuple):
    images: Tensor
    scale: float


@dataclasses.dataclass
class Holder:
    tokens: Tensor
    name: str


@given(size=st.integers(1, 17), micro_batch=st.integers(1, 20))
def test_micro_batches_cover_the_batch_in_order(size: int, micro_batch: int) -> None:
    batch = {"x": torch.arange(size), "y": [torch.arange(size) * 2, torch.zeros(())]}
    parts = microbatch.likely_cut(batch).parts(batch, micro_batch)
    assert torch.equal(torch.cat([part["x"] for part in parts]), batch["x"])
    assert torch.equal(torch.cat([part["y"][0] for part in parts]), batch["y"][0])
    sizes = [microbatch.likely_cut(part).size(part) for part in parts[:-1]]
    assert sizes == [micro_batch] * (len(parts) - 1)
    assert all(part["y"][1] is batch["y"][1] for part in parts)


@pytest.mark.parametrize(
    "batch",
    [
        Named(torch.arange(6), 0.5),
        Holder(torch.arange(6), "text"),
        OrderedDict(a=torch.arange(6), b=3),
        (torch.arange(6), None),
        [torch.arange(6)],
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_structure_is_kept_and_tensors_are_views(batch: Any) -> None:
    part = microbatch.likely_cut(batch).take(batch, 2, 5)
    assert type(part) is type(batch)
    (cut,) = tensors_in_batch(part)
    (whole,) = tensors_in_batch(batch)
    assert cut.tolist() == [2, 3, 4]
    assert cut.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def test_what_does_not_share_the_dimension_of_most_is_not_cut() -> None:
    table = torch.zeros(9, 2)
    batch = (torch.arange(6), torch.arange(6), table)
    part = microbatch.likely_cut(batch).take(batch, 0, 2)
    assert part[2] is table


@pytest.mark.parametrize("batch", [{"a": 1}, ["words"], object(), torch.zeros(())])
def test_a_batch_without_a_tensor_to_cut_counts_as_one_example(batch: Any) -> None:
    cut = microbatch.likely_cut(batch)
    assert cut.size(batch) == 1
    assert cut.parts(batch, 1) == [batch]


@pytest.mark.parametrize("result", [torch.zeros(3), 0.5, (1.0, 2.0, 3.0), None])
def test_a_loss_that_is_no_scalar_is_an_error(result: Any) -> None:
    with pytest.raises(DataError, match="must return a scalar tensor"):
        microbatch.read_loss(result, 4)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "weight",
    [
        torch.tensor(1001),
        torch.tensor([0.7]),
        torch.tensor(1 / 3, dtype=torch.float64),
        torch.tensor(True),
        torch.tensor(3.0, requires_grad=True),
    ],
)
def test_a_weight_that_is_a_tensor_divides_as_its_number_does(
    kind: torch.dtype, weight: Tensor
) -> None:
    """Of the total's type, bit for bit, and no part of the graph."""
    totals = [torch.full((), 123.456, dtype=kind, requires_grad=True) for _ in range(2)]
    found, plain = (
        microbatch.read_loss((total, given), 4).mean
        for total, given in zip(totals, (weight, weight.item()), strict=True)
    )
    found.backward()
    plain.backward()
    assert found.dtype is kind
    assert torch.equal(found, plain)
    assert torch.equal(totals[0].grad, totals[1].grad)
    assert weight.grad is None


def test_a_weight_is_what_it_was_when_the_loss_was_read() -> None:
    weight = torch.tensor(4.0)
    loss = microbatch.read_loss((torch.tensor(8.0, requires_grad=True), weight), 4)
    weight.zero_()
    assert loss.mean == 2.0


def test_batch_statistics_refuse_to_be_split_and_say_where() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert "BatchNorm1d '1'" in microbatch.split_refusal(model)
    model.eval()
    assert microbatch.split_refusal(model) == ""
    assert microbatch.split_refusal(nn.Sequential(nn.LayerNorm(4), nn.GroupNorm(2, 4))) == ""
    untracked = nn.BatchNorm1d(4, track_running_stats=False).eval()
    assert "BatchNorm1d" in microbatch.split_refusal(untracked)


def test_scaling_leaves_missing_gradients_alone() -> None:
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    first.grad = torch.full((2,), 6.0)
    microbatch.scale_gradients([first, second], 0.5)
    assert first.grad.tolist() == [3.0, 3.0]
    assert second.grad is None


def test_a_weight_that_parameters_lead_to_is_refused() -> None:
    """Its part of the gradient would be lost without a word."""
    confidence = torch.rand(4, requires_grad=True).sigmoid()
    losses = torch.rand(4, requires_grad=True)
    with pytest.raises(DataError, match=r"parameters lead to.*return the mean, sum / weight"):
        microbatch.read_loss(((confidence * losses).sum(), confidence.sum()), 4)
    weighed = (confidence.detach() * losses).sum()
    assert microbatch.read_loss((weighed, confidence.sum().detach()), 4).is_sum
