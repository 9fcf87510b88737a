"""Workloads on images: the zoo's models, with images at the size that they are known for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from daf.training.data import load_data
from daf.training.models import find_model
from daf.training.task import DataSet, settle_goal
from daf_bench.data.spoken import load_new_speaker
from daf_bench.workloads.sources import Sources
from daf_bench.workloads.trainable import Loaded, Trains, momentum


@dataclass(frozen=True, slots=True)
class ImageShape:
    """A model of the zoo, images a batch, and pixels per side (None: the data's own)."""

    model: str
    batch_size: int
    block: str
    pixels: int | None = None


def load_images(sources: Sources, shape: ImageShape) -> Loaded:
    """Read the images and import the model's code."""
    return _loaded(load_data(sources.images, image_size=shape.pixels), shape)


def load_speaker(sources: Sources, shape: ImageShape) -> Loaded:
    """A keyword network on the clips of one speaker, as pictures of their sound.

    Its weights are random, as costs no less than those that other speakers taught.
    """
    clips = sources.spoken
    data = load_new_speaker(clips) if clips else load_data("digits", image_size=shape.pixels)
    return _loaded(data, shape)


def _loaded(data: DataSet, shape: ImageShape) -> Loaded:
    """Channels-last, as is fastest on processors."""
    recipe = find_model(shape.model)
    goal = settle_goal(shape.model, recipe.goal, data)

    def make_model() -> nn.Module:
        model = recipe.build(data.facts)
        return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    def task_of(model: nn.Module) -> Trains:
        return data.make_task(goal, model)

    return Loaded(shape.batch_size, shape.block, make_model, task_of, momentum)
