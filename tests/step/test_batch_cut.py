"""Cuts find the dimension of examples, keep the batch's structure and cover all of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from daf.core.errors import DataError
from daf.step.batch_cut import WHOLE, BatchCut, BatchSplit, possible_cuts


def dims(batch: Any, batch_dim: Any = None) -> list[tuple[int | None, ...]]:
    return [cut.dims for cut in possible_cuts(batch, batch_dim)]


def labels(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.int64)


def test_what_most_tensors_share_is_cut() -> None:
    table = torch.zeros(9, 2)
    assert dims((labels(6), table, torch.zeros(6, 2), 3))[0] == (0, None, 0)
    assert dims({"a": torch.zeros(6, 2), "b": torch.zeros(()), "c": None})[0] == (0, None)


def test_vectors_of_that_length_by_chance_are_left_whole_in_second_place() -> None:
    batch = (torch.zeros(5, 3), labels(5), torch.ones(5), torch.ones(5, 5))
    assert dims(batch) == [(0, 0, 0, 0), (0, 0, None, 0), (None, 0, None, 0)]


@pytest.mark.parametrize(
    "batch",
    [
        ["a", "b"],
        torch.zeros(()),
        torch.zeros(1, 3),
        {"rows": torch.eye(3).to_sparse()},
        torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
    ],
    ids=("words", "number", "one", "sparse", "nested"),
)
def test_what_has_no_dimension_to_cut_is_one_example(batch: Any) -> None:
    assert dims(batch) == []
    assert WHOLE.size(batch) == 1
    assert WHOLE.parts(batch, 1) == [batch]


def test_the_user_names_dimensions() -> None:
    batch = (torch.zeros(7, 4, 2), labels(4), torch.zeros(7, 7))
    assert dims(batch, 1) == [(1, 0, None)]
    assert dims(batch, (1, 0, None)) == [(1, 0, None)]
    assert dims({"x": batch[0], "y": batch[1]}, {"y": 0, "x": 1}) == [(1, 0)]
    with pytest.raises(DataError, match="along dimension 3"):
        dims(batch, 3)
    with pytest.raises(DataError, match=r"batch_dim=\(1, 0\)"):
        dims(batch, (1, 0))


@given(
    size=st.integers(1, 40),
    micro_batch=st.integers(1, 45),
    least=st.integers(1, 3),
    dim=st.integers(0, 1),
)
def test_parts_cover_the_batch_in_order_and_none_is_too_small(
    size: int, micro_batch: int, least: int, dim: int
) -> None:
    micro_batch = max(micro_batch, least)
    rows = torch.arange(size).reshape((size, 1) if dim == 0 else (1, size))
    cut = BatchCut((dim,), least=least)
    parts = cut.parts(rows, micro_batch)
    assert torch.equal(torch.cat(parts, dim), rows)
    sizes = [cut.size(part) for part in parts]
    assert min(sizes) >= min(least, size)
    assert max(sizes) <= micro_batch + (least - 1) or size < 2 * least
    if size % micro_batch == 0 or size % micro_batch >= least:
        assert sizes[:-1] == [micro_batch] * (len(sizes) - 1)


def test_picked_examples_are_copies_along_every_dimension() -> None:
    batch = (torch.arange(12).reshape(2, 6), torch.arange(6), torch.ones(3))
    picked = BatchCut((1, 0, None)).pick(batch, [0, 4, 5])
    assert picked[0].tolist() == [[0, 4, 5], [6, 10, 11]]
    assert picked[1].tolist() == [0, 4, 5]
    assert picked[2] is batch[2]


def test_a_cut_of_ones_own_is_asked_for_everything() -> None:
    cut = BatchCut(own=BatchSplit(len, lambda batch, start, stop: batch[start:stop]))
    batch = ["a", "b", "c"]
    assert cut.size(batch) == 3
    assert cut.parts(batch, 2) == [["a", "b"], ["c"]]
    assert cut.pick(batch, [0, 2]) == ["a", "b"]


def test_telling_examples_have_other_masks_and_a_common_class() -> None:
    """Proofs on a few examples must see what seldom occurs: padding, and two of one class."""
    mask = torch.ones(60, 7, dtype=torch.bool)
    mask[33, 2:] = False
    batch = {"x": torch.randn(60, 7), "labels": torch.arange(60) % 30, "mask": mask}
    first, second, third, last = BatchCut((0, 0, 0)).telling(batch, 4)
    assert first == 33  # it may count nothing, so that the last is like another
    assert len({first, second, third, last}) == 4
    assert batch["labels"][second] == batch["labels"][last]
    assert BatchCut((0, 0, 0)).telling(batch, 60) == [*range(60)]
