from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from daf.core.errors import DataError
from daf.training.data import load_data
from daf.training.data.images import Classification, ImageData
from daf.training.task import MOST_CLASSES, Tally, scores_of


@pytest.fixture
def digits() -> ImageData:
    data = load_data("digits")
    assert isinstance(data, ImageData)
    return data


class Answers(nn.Module):
    """Gives the scores it was told to give, in an object with ``logits``."""

    def __init__(self, scores: torch.Tensor) -> None:
        super().__init__()
        self.scores = scores

    def forward(self, _: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.scores)


def test_accuracy_is_counted_in_score_and_in_the_live_tally(digits: ImageData) -> None:
    task = Classification(digits, 1, torch.channels_last, False)
    images, labels = task.test_batch(np.arange(8))
    right = torch.nn.functional.one_hot(labels, 10).float()
    right[:2] = right[:2].roll(1, 1)  # two of eight are wrong
    assert task.score(Answers(right), (images, labels)) == (600.0, 8.0)
    task.loss(Answers(right), (images, labels))
    assert task.tally.take_percent() == 75.0
    assert task.tally.take_percent() is None


def test_only_rows_that_are_asked_for_count_and_none_of_very_many_classes() -> None:
    tally = Tally()
    scores = torch.eye(4)
    tally.add(scores, torch.tensor([0, 1, 0, 0]), torch.tensor([True, True, True, False]))
    assert tally.take_percent() == pytest.approx(200 / 3)
    tally.add(torch.eye(MOST_CLASSES + 1)[:4], torch.arange(4))
    assert tally.take_percent() is None
    tally.add(torch.eye(MOST_CLASSES)[:4], torch.arange(4))
    assert tally.take_percent() == 100.0


def test_an_output_without_scores_is_refused() -> None:
    with pytest.raises(DataError, match="found dict"):
        scores_of({})
