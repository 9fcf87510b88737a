"""The published models: their sizes, and that all of them learns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from daf_bench.data.folder import IMAGENET_NORMALISATION
from daf_bench.models.resnet_cifar import ThinBlock

from daf.core.errors import DataError, UnknownNameError
from daf.training.data import load_data
from daf.training.data.images import ImageData
from daf.training.models import MODELS, find_model
from daf.training.task import Goal, settle_goal


def parameter_count(name: str, **facts: int) -> int:
    with torch.device("meta"):
        model = find_model(name).build(facts)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "classes", "published"),
    [
        ("resnet18", 10, 11_173_962),
        ("resnet20", 10, 269_722),
        ("resnet50", 1000, 25_557_032),
        ("densenet121", 1000, 7_978_856),
        ("mobilenet_v2", 1000, 3_504_872),
    ],
)
def test_classifiers_have_the_published_number_of_parameters(
    name: str, classes: int, published: int
) -> None:
    assert parameter_count(name, classes=classes) == published


def test_gpt2_differs_from_the_published_one_only_in_its_vocabulary_and_context() -> None:
    published = parameter_count("gpt2", vocabulary=50_257, context=1024)
    assert published == 124_439_808  # Radford et al. 2019 as transformers counts it, tied head


@pytest.mark.parametrize(
    "name", [name for name in MODELS.all() if find_model(name).goal is Goal.CLASSIFY]
)
def test_every_part_of_a_classifier_learns(name: str) -> None:
    torch.manual_seed(0)
    model = find_model(name).build({"classes": 4, "channels": 3, "image_size": 32})
    scores = model(torch.randn(2, 3, 64, 64))
    F.cross_entropy(scores, torch.tensor([1, 3])).backward()
    idle = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert scores.shape == (2, 4)
    assert idle == []


def test_unet_gives_back_an_image_of_the_same_size_and_every_part_learns() -> None:
    torch.manual_seed(0)
    model = find_model("unet").build({"classes": 9, "channels": 1, "image_size": 32})
    image = torch.randn(1, 1, 48, 32)
    result = model(image)
    result.square().mean().backward()
    idle = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert result.shape == image.shape
    assert idle == []


def test_a_pixel_s_largest_effect_through_unet_is_at_full_resolution() -> None:
    torch.manual_seed(0)
    model = find_model("unet").build({"channels": 1}).eval()
    image = torch.zeros(1, 1, 32, 32)
    touched = image.clone()
    touched[0, 0, 5, 9] = 1.0
    with torch.no_grad():
        change = (model(touched) - model(image)).abs()[0, 0]
    row, column = divmod(int(change.argmax()), 32)
    assert max(abs(row - 5), abs(column - 9)) <= 4  # four 3x3 convolutions through the upper skip


def test_option_a_shortcut_takes_every_other_pixel_and_adds_zero_channels() -> None:
    block = ThinBlock(2, 6, stride=2).eval()
    torch.nn.init.zeros_(block.conv2.weight)
    x = torch.rand(1, 2, 4, 4)
    with torch.no_grad():
        y = block(x)
    assert torch.equal(y[:, 2:4], x[:, :, ::2, ::2])
    assert not y[:, :2].any()
    assert not y[:, 4:].any()


@pytest.mark.shared_data
@pytest.mark.thorough
def test_resnet20_reaches_its_published_accuracy_with_its_published_weights(
    shared_data: Path,
) -> None:
    data = load_data(f"cifar10:{shared_data / 'cifar10_10k_2k.npz'}")
    assert isinstance(data, ImageData)
    data = replace(data, normalisation=IMAGENET_NORMALISATION)  # as its authors trained it
    model = find_model("resnet20").build(data.facts).eval()
    with np.load(shared_data / "pretrained" / "resnet20_cifar10.npz") as weights:
        state = {name: torch.from_numpy(weights[name]) for name in weights}
    model.load_state_dict(state)
    task = data.make_task(Goal.CLASSIFY, model)
    with torch.no_grad():
        parts = [
            task.score(model, task.test_batch(np.arange(start, start + 250)))
            for start in range(0, 2000, 250)
        ]
    assert sum(right for right, _ in parts) / 2000 > 91.0


@pytest.mark.parametrize(
    ("asked", "meant"), [("resnet19", "resnet18"), ("ResNet-50", "resnet50"), ("gpt-2", "gpt2")]
)
def test_an_unknown_model_is_answered_with_the_nearest_known_one(asked: str, meant: str) -> None:
    with pytest.raises(UnknownNameError, match=f"unknown model '{asked}'.*'{meant}'"):
        find_model(asked)


def test_a_model_for_text_refuses_images_and_says_what_it_reads() -> None:
    digits = load_data("digits")
    with pytest.raises(DataError, match=r"'gpt2' has the goal 'causal'.*serves classify"):
        settle_goal("gpt2", Goal.CAUSAL, digits)
