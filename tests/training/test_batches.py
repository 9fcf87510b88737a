from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from daf.core.errors import DataError
from daf.training.data import load_data
from daf.training.data.images import ImageData, checked_channels, crop_and_flip, to_tensor
from daf.training.task import BatchOrder


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 3))
def test_an_epoch_takes_whole_batches_of_different_examples(
    examples: int, batch_size: int, seed: int
) -> None:
    if batch_size > examples:
        with pytest.raises(DataError, match=f"batches of {batch_size}"):
            BatchOrder(examples, batch_size, seed)
        return
    order = BatchOrder(examples, batch_size, seed)
    epoch = np.concatenate([order.indices(step) for step in range(order.steps_per_epoch)])
    assert len(set(epoch.tolist())) == len(epoch) == examples - order.left_out_per_epoch
    assert order.left_out_per_epoch < batch_size


def test_a_step_s_examples_depend_on_seed_and_step_alone() -> None:
    forward = BatchOrder(1000, 32, 5)
    backward = BatchOrder(1000, 32, 5)
    ours = [forward.indices(step) for step in range(70)]
    theirs = [backward.indices(step) for step in reversed(range(70))][::-1]
    assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert not np.array_equal(ours[0], ours[forward.steps_per_epoch])
    assert not np.array_equal(ours[0], BatchOrder(1000, 32, 6).indices(0))


def test_augmented_images_are_shifted_by_up_to_four_pixels_and_half_are_mirrored() -> None:
    generator = np.random.default_rng(3)
    images = generator.integers(1, 256, (200, 8, 8, 2), np.uint8)
    changed = crop_and_flip(images, np.random.default_rng(4))
    padded = np.pad(images, ((0, 0), (4, 4), (4, 4), (0, 0)))
    shifts, mirrored = set(), 0
    for before, after in zip(padded, changed, strict=True):
        found = [
            (top, left, flipped)
            for top in range(9)
            for left in range(9)
            for flipped in (False, True)
            if np.array_equal(
                after, before[top : top + 8, left : left + 8][:, :: -1 if flipped else 1]
            )
        ]
        assert found
        shifts.add(found[0][:2])
        mirrored += found[0][2]
    assert len(shifts) > 60  # of 81
    assert 70 < mirrored < 130


def test_pixels_are_enlarged_scaled_and_normalised() -> None:
    digits = load_data("digits")
    assert isinstance(digits, ImageData)
    stored = digits.train.images[:3]
    batch = to_tensor(digits, stored, 3, torch.channels_last)
    assert batch.shape == (3, 3, 32, 32)
    assert batch.is_contiguous(memory_format=torch.channels_last)
    for row, column in ((0, 0), (13, 21), (31, 31)):
        pixel = stored[:, row // 4, column // 4, 0]
        expected = (pixel / 16 - 0.305) / 0.376
        assert np.allclose(batch[:, 1, row, column].numpy(), expected, atol=1e-6)


def test_digits_are_close_to_mean_zero_and_deviation_one_once_normalised() -> None:
    digits = load_data("digits")
    assert isinstance(digits, ImageData)
    batch = to_tensor(digits, digits.train.images, 1, torch.contiguous_format)
    assert abs(batch.mean().item()) < 0.01
    assert abs(batch.std().item() - 1) < 0.01


def test_colour_images_are_not_squeezed_into_another_number_of_channels() -> None:
    digits = load_data("digits")
    assert isinstance(digits, ImageData)
    assert checked_channels(digits, 5) == 5
    with pytest.raises(DataError, match="reads 1 channels"):
        checked_channels(_coloured(digits), 1)


def _coloured(data: ImageData) -> ImageData:
    from dataclasses import replace

    train = replace(data.train, images=data.train.images.repeat(3, 3))
    return replace(data, train=train)
