"""Models by name, and what a factory may ask for."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from daf.core.errors import DataError, UnknownNameError
from daf.training.data import load_data
from daf.training.data.images import ImageData, input_channels
from daf.training.models import find_model
from daf.training.names import Names
from daf.training.task import Goal


def test_a_missing_module_or_factory_is_named() -> None:
    with pytest.raises(UnknownNameError, match="no module 'surely_absent'"):
        find_model("surely_absent:make")
    with pytest.raises(UnknownNameError, match=r"no factory 'Linaer'.*'Linear'"):
        find_model("torch.nn:Linaer")


def test_a_factory_that_needs_more_than_data_tell_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="needs in_features, out_features"):
        find_model("torch.nn:Linear").build({"classes": 10})


def test_a_factory_that_hides_its_arguments_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="hides its arguments"):
        find_model("collections:OrderedDict").build({})


def test_a_factory_that_returns_no_module_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="returned Counter"):
        find_model("collections:Counter").build({})


def test_grey_images_are_repeated_for_a_model_that_reads_colours() -> None:
    digits = load_data("digits")
    assert isinstance(digits, ImageData)
    model = find_model("resnet18").build(digits.facts)
    assert input_channels(model, digits.channels) == 3
    images, _ = digits.make_task(Goal.CLASSIFY, model).test_batch(np.arange(2))
    assert images.shape[1] == 3
    assert torch.equal(images[:, 0], images[:, 2])


def test_without_the_benchmarks_an_unknown_name_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("daf.training.names.entry_points", lambda **_: [])
    for find, name in ((find_model, "resnet50"), (load_data, "text:words.txt")):
        with pytest.raises(UnknownNameError, match=r"daf-bench has more.*pip install ./benchmarks"):
            find(name)


def test_a_model_that_takes_no_path_refuses_one() -> None:
    with pytest.raises(UnknownNameError, match="'resnet18:somewhere', whose factory takes no path"):
        find_model("resnet18:somewhere")


def test_a_known_model_whose_package_is_missing_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    places = {"resnet18": "surely_absent.models:make"}
    monkeypatch.setattr("daf.training.models.MODELS", Names("model", "none.such", places))
    with pytest.raises(DataError, match=r"needs the package 'surely_absent'.*pip install"):
        find_model("resnet18")


def test_a_loader_of_one_s_own_takes_its_path_and_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    (tmp_path / "own_data.py").write_text("def load(path, context=3):\n    return path, context\n")
    assert load_data("own_data:load:some:where") == (Path("some:where"), 3)
    assert load_data("own_data:load:x", context=5) == (Path("x"), 5)
    with pytest.raises(DataError, match="give own_data:load:PATH"):
        load_data("own_data:load")
    with pytest.raises(DataError, match="--image-size 7, which it does not take"):
        load_data("own_data:load:x", image_size=7)
