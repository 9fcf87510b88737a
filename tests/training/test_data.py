"""Data by name, and the digits."""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_digits as sklearn_digits

from daf.training.data import load_data
from daf.training.data.images import ImageData


def images(name: str, **options: int) -> ImageData:
    data = load_data(name, **options)
    assert isinstance(data, ImageData)
    return data


def test_digits_are_scikit_learn_s_all_of_them_once() -> None:
    data = images("digits")
    theirs = sklearn_digits()
    ours = np.concatenate([data.train.images, data.test.images]).reshape(-1, 64)
    labels = np.concatenate([data.train.labels, data.test.labels])
    ours_rows = np.column_stack([ours, labels])
    their_rows = np.column_stack([theirs.data, theirs.target])
    assert np.array_equal(
        ours_rows[np.lexsort(ours_rows.T)], their_rows[np.lexsort(their_rows.T)].astype(int)
    )
    assert len(data.test) == round(0.2 * 1797)


def test_digits_are_split_the_same_way_every_time() -> None:
    assert np.array_equal(images("digits").test.images, images("digits").test.images)
