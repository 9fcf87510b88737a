"""Things known of tensors go with them, and are told of no other tensor."""

from __future__ import annotations

import gc

import torch

from daf.execution.by_tensor import ByTensor


def test_what_is_known_dies_with_the_tensor_and_equal_ones_are_others() -> None:
    known: ByTensor[str] = ByTensor()
    first, second = torch.ones(3), torch.ones(3)
    known[first], known[second] = "first", "second"
    assert (known.get(first), known.get(second), known.get(torch.ones(3))) == (
        *("first", "second"),
        None,
    )
    assert known.get(first.view(3)) is None  # another tensor on the same memory
    del first
    gc.collect()
    assert known.values() == ["second"]
    assert len(known) == 1


def test_what_is_known_last_counts_and_outlives_what_was_known_before() -> None:
    known: ByTensor[str] = ByTensor()
    tensor = torch.ones(3)
    for word in ("before", "now"):
        known[tensor] = word
    gc.collect()
    assert known.get(tensor) == "now"
    assert len(known) == 1


def test_at_the_address_of_a_dead_tensor_nothing_is_known() -> None:
    known: ByTensor[int] = ByTensor()
    for index in range(200):  # addresses come again
        tensor = torch.ones(3)
        assert known.get(tensor) is None
        known[tensor] = index
        assert known.get(tensor) == index
        del tensor
        assert len(known) == 0
