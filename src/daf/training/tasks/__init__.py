"""Tasks by a model's goal and its data."""

from __future__ import annotations

import torch
from torch import nn

from daf.core.errors import DataError
from daf.training.data.contents import ImageData, TextData
from daf.training.data.tokens import SentenceData
from daf.training.models import Goal
from daf.training.tasks.images import Classification, Denoising
from daf.training.tasks.sentences import sentence_task
from daf.training.tasks.task import Task
from daf.training.tasks.text import CausalLanguage, MaskedLanguage

_IMAGE_GOALS = (Goal.CLASSIFY, Goal.DENOISE)


AnyData = ImageData | TextData | SentenceData


def settle_goal(model_name: str, goal: Goal | None, data: AnyData) -> Goal:
    """Return ``goal``, or the customary one of ``model_name`` and ``data``.

    Raises:
        DataError: the model reads images and the data are text, or the reverse.
    """
    has_images = isinstance(data, ImageData)
    if isinstance(data, SentenceData) or goal is Goal.JUDGE:
        return _sentence_goal(model_name, goal, data)
    if goal is None:
        return Goal.CLASSIFY if has_images else Goal.CAUSAL
    if (goal in _IMAGE_GOALS) != has_images:
        wanted = "images: try digits or cifar10:FILE.npz"
        if not goal_reads_images(goal):
            wanted = "text: try text:FILE"
        held = "images" if has_images else "text"
        raise DataError(
            f"model {model_name!r} with the goal {goal.value!r} reads {wanted} "
            f"({data.name!r} holds {held})"
        )
    return goal


def _sentence_goal(model_name: str, goal: Goal | None, data: AnyData) -> Goal:
    if not isinstance(data, SentenceData):
        raise DataError(
            f"model {model_name!r} judges sentences: try sst2:FOLDER, mrpc:FOLDER or stsb:FOLDER "
            f"({data.name!r} holds none)"
        )
    fitting = Goal.CAUSAL if data.generates else Goal.JUDGE
    if goal not in (None, fitting):
        wanted = "text: try text:FILE" if goal not in _IMAGE_GOALS else "images: try digits"
        raise DataError(
            f"model {model_name!r} with the goal {goal} reads {wanted} "
            f"({data.name!r} holds sentences, for the goal {fitting})"
        )
    return fitting


def goal_reads_images(goal: Goal) -> bool:
    """True if a model with this goal reads images rather than text."""
    return goal in _IMAGE_GOALS


def make_task(
    goal: Goal,
    data: AnyData,
    model: nn.Module,
    *,
    memory_format: torch.memory_format = torch.channels_last,
    augment: bool | None = None,
) -> Task:
    """Return the task of ``goal``, as ``settle_goal`` returned it, on ``data``.

    Image batches have ``memory_format`` and the channels of the model's first convolution.
    ``augment``: crop and flip training images; None: as customary for the data.

    Raises:
        DataError: the model cannot read images with this many channels.
    """
    if isinstance(data, SentenceData):
        return sentence_task(data)
    if isinstance(data, TextData):
        return MaskedLanguage(data) if goal is Goal.MASKED else CausalLanguage(data)
    kind = Denoising if goal is Goal.DENOISE else Classification
    return kind(
        data,
        input_channels(model, data.channels),
        memory_format,
        augment=data.augment if augment is None else augment,
    )


def input_channels(model: nn.Module, otherwise: int) -> int:
    """Return the channels of the model's first convolution; ``otherwise`` if it has none."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            return module.in_channels
    return otherwise
