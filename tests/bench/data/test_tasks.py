from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from daf_bench.data.denoising import Denoising
from daf_bench.data.text import MASK_SYMBOL, VOCABULARY, CausalLanguage, MaskedLanguage, TextData
from torch import nn

from daf.training.data import load_data
from daf.training.data.images import ImageData
from daf.training.task import Task


@pytest.fixture
def text(tmp_path: Path) -> TextData:
    (tmp_path / "t").write_bytes(np.random.default_rng(0).bytes(20_000))
    data = load_data(f"text:{tmp_path / 't'}", context=32)
    assert isinstance(data, TextData)
    return data


@pytest.fixture
def digits() -> ImageData:
    data = load_data("digits")
    assert isinstance(data, ImageData)
    return data


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


class Answers(nn.Module):
    """Gives the scores it was told to give, in an object with ``logits``."""

    def __init__(self, scores: torch.Tensor) -> None:
        super().__init__()
        self.scores = scores

    def forward(self, _: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.scores)


def test_next_bytes_are_the_targets(text: TextData) -> None:
    task = CausalLanguage(text)
    inputs, targets = task.train_batch(np.array([0, 5, task.train_examples - 1]), generator())
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert bytes(inputs[1].tolist()) == bytes(text.train[160:192])
    assert targets[1, -1].item() == text.train[192]


def test_windows_of_text_do_not_overlap_and_leave_less_than_one_over(text: TextData) -> None:
    task = CausalLanguage(text)
    covered = task.train_examples * text.context
    assert 0 < len(text.train) - covered <= text.context


def test_uniform_guessing_has_the_perplexity_of_the_vocabulary(text: TextData) -> None:
    task = CausalLanguage(text)
    batch = task.test_batch(np.arange(4))
    model = Answers(torch.zeros(4, text.context, VOCABULARY))
    total, weight = task.score(model, batch)
    assert weight == 4 * text.context
    assert task.metric(total / weight) == pytest.approx(VOCABULARY, rel=1e-5)


def test_masking_asks_for_15_percent_and_leaves_the_rest_alone(text: TextData) -> None:
    task = MaskedLanguage(text)
    everything = np.arange(task.train_examples)
    inputs, targets = task.train_batch(everything, generator())
    original = torch.from_numpy(text.train[: len(everything) * 32].astype(np.int64)).view(-1, 32)
    asked = targets != -100
    assert torch.equal(targets[asked], original[asked])
    assert torch.equal(inputs[~asked], original[~asked])
    assert asked.any(1).all()
    assert asked.float().mean().item() == pytest.approx(0.15, abs=0.01)
    masked = (inputs[asked] == MASK_SYMBOL).float().mean().item()
    kept = (inputs[asked] == original[asked]).float().mean().item()
    assert masked == pytest.approx(0.8, abs=0.02)
    assert kept == pytest.approx(0.1 + 0.1 / 256, abs=0.02)


def test_a_masked_loss_is_a_sum_with_its_weight(text: TextData) -> None:
    task = MaskedLanguage(text)
    batch = task.train_batch(np.arange(3), generator())
    result = task.loss(Answers(torch.zeros(3, 32, VOCABULARY)), batch)
    assert isinstance(result, tuple)
    total, weight = result
    assert int(weight) == int((batch[1] != -100).sum())
    assert (total / weight).item() == pytest.approx(math.log(VOCABULARY), rel=1e-5)


@pytest.mark.parametrize("size", [1, 3, 7])
@pytest.mark.parametrize("kind", ["denoise", "masked"])
def test_a_test_example_is_the_same_in_whatever_batch_it_comes(
    kind: str, size: int, digits: ImageData, text: TextData
) -> None:
    task: Task = (
        Denoising(digits, 1, torch.channels_last, False)
        if kind == "denoise"
        else MaskedLanguage(text)
    )
    whole = task.test_batch(np.arange(7))
    parts = [task.test_batch(np.arange(i, min(i + size, 7))) for i in range(0, 7, size)]
    for index in range(2):
        assert torch.equal(whole[index], torch.cat([part[index] for part in parts]))


def test_noise_has_half_the_deviation_of_the_images_and_the_target_is_clean(
    digits: ImageData,
) -> None:
    task = Denoising(digits, 1, torch.channels_last, False)
    noisy, clean = task.train_batch(np.arange(200), generator())
    assert torch.equal(clean, task.tensor(digits.train.images[:200]))
    assert (noisy - clean).std().item() == pytest.approx(0.5, abs=0.01)
    assert noisy.is_contiguous(memory_format=torch.channels_last)


def test_a_training_batch_depends_on_its_generator_alone(digits: ImageData) -> None:
    task = Denoising(digits, 1, torch.channels_last, True)
    first, _ = task.train_batch(np.arange(5), generator(1))
    torch.manual_seed(99)
    assert torch.equal(first, task.train_batch(np.arange(5), generator(1))[0])
    assert not torch.equal(first, task.train_batch(np.arange(5), generator(2))[0])
