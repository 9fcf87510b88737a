"""Blocks are used again exactly when nobody can see their old content."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from daf.codecs.layout import Layout, layout_of
from daf.codecs.scratch import SMALLEST_BLOCK_BYTES, Scratch

CPU = torch.device("cpu")
ELEMENTS = SMALLEST_BLOCK_BYTES // 4


def floats(count: int) -> Layout:
    return Layout((count,), (1,), torch.float32, CPU)


def test_a_block_is_used_again_after_its_tensor_and_all_views_are_gone() -> None:
    scratch = Scratch()
    first = scratch.empty(floats(ELEMENTS))
    view = first[5:]
    storage = first.untyped_storage()
    del first
    second = scratch.empty(floats(ELEMENTS))
    assert second.untyped_storage().data_ptr() != storage.data_ptr()
    # The newer of two equal blocks is the one kept; both are alive, so neither address is stale.
    address, tail = second.data_ptr(), second[7:]
    del second, view
    assert scratch.empty(floats(ELEMENTS)).data_ptr() != address
    address = scratch.empty(floats(ELEMENTS)).data_ptr()
    assert scratch.empty(floats(ELEMENTS)).data_ptr() == address
    assert tail.data_ptr() != address


def test_a_graph_that_saves_the_tensor_keeps_its_block() -> None:
    scratch = Scratch()
    leaf = torch.ones(ELEMENTS, requires_grad=True)
    factor = scratch.empty(floats(ELEMENTS)).fill_(3.0)
    product = (leaf * factor).sum()
    del factor
    scratch.empty(floats(ELEMENTS)).fill_(-1.0)
    product.backward()
    assert leaf.grad is not None
    assert leaf.grad.eq(3.0).all()


def test_a_larger_block_serves_smaller_tensors_and_few_blocks_are_kept() -> None:
    scratch = Scratch()
    large = scratch.empty(floats(4 * ELEMENTS)).data_ptr()
    assert scratch.empty(floats(ELEMENTS)).data_ptr() == large
    assert scratch.held_bytes == 16 * ELEMENTS
    alive = [scratch.empty(floats(ELEMENTS)) for _ in range(4)]
    assert len({tensor.data_ptr() for tensor in alive}) == len(alive)
    assert scratch.held_bytes <= 16 * ELEMENTS
    scratch.release()
    assert scratch.held_bytes == 0
    assert all(tensor.fill_(1.0).sum() == ELEMENTS for tensor in alive)


def test_small_tensors_come_from_the_system() -> None:
    scratch = Scratch()
    scratch.empty(floats(ELEMENTS - 1))
    assert scratch.held_bytes == 0


@given(st.permutations([0, 1, 2, 3]), st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
def test_geometry_is_as_asked(order: list[int], dtype: torch.dtype) -> None:
    like = torch.zeros(8, 64, 32, 32, dtype=dtype).permute(order)
    made = Scratch().empty(layout_of(like))
    assert (made.shape, made.stride(), made.dtype) == (like.shape, like.stride(), dtype)
    made.fill_(1)
    assert made.sum() == like.numel()
