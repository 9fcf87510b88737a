"""The design's workloads by name (section 9), each as model, optimizer, data, batch and loss.

Reading the data and importing the model's code comes before building the model, because the floor
is measured between the two.

| name | model | batch | optimizer |
|---|---|---|---|
| w1 | ResNet-18 for 32² images | 128 images | SGD with momentum |
| w2a, w2b, w2c | ResNet-50, DenseNet-121, MobileNet-v2 | 16 images of 224² | SGD with momentum |
| w3 | BERT-small, naming a sentence's sentiment | 64 sentences of 128 words | AdamW |
| w4 | GPT-2's shape, 6 layers 384 wide, LoRA on attention | 8 windows of 512 tokens | AdamW |
| w5 | U-Net, cleaning an image of noise | one image of 512² | SGD with momentum |
| w6 | ResNet-20, spoken digits of one speaker | 32 pictures of 32² | SGD with momentum |
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from daf.core.errors import UnknownNameError
from daf_bench.workloads.images import ImageShape, load_images, load_speaker
from daf_bench.workloads.sources import Sources
from daf_bench.workloads.texts import load_decoder, load_encoder
from daf_bench.workloads.trainable import Loaded, Trainable


@dataclass(frozen=True, slots=True)
class Workload:
    """``load`` reads data and code, at full size or small enough for a test of seconds."""

    name: str
    title: str
    load: Callable[[Sources, bool], Loaded]


def _images(name: str, title: str, full: ImageShape, small: ImageShape) -> Workload:
    return Workload(
        name, title, lambda sources, is_small: load_images(sources, small if is_small else full)
    )


_ALL = (
    _images(
        "w1",
        "ResNet-18, CIFAR",
        ImageShape("resnet18", 128, "BasicBlock"),
        ImageShape("resnet18", 2, "BasicBlock"),
    ),
    _images(
        "w2a",
        "ResNet-50, 224²",
        ImageShape("resnet50", 16, "Bottleneck", 224),
        ImageShape("resnet50", 4, "Bottleneck", 32),
    ),
    _images(
        "w2b",
        "DenseNet-121, 224²",
        ImageShape("densenet121", 16, "DenseLayer", 224),
        ImageShape("densenet121", 4, "DenseLayer", 32),
    ),
    _images(
        "w2c",
        "MobileNet-v2, 224²",
        ImageShape("mobilenet_v2", 16, "InvertedResidual", 224),
        ImageShape("mobilenet_v2", 4, "InvertedResidual", 32),
    ),
    Workload("w3", "BERT-small, sentences", load_encoder),
    Workload("w4", "GPT-2 with LoRA", load_decoder),
    _images(
        "w5",
        "U-Net, one 512² image",
        ImageShape("unet", 1, "DoubleConv", 512),
        ImageShape("unet", 1, "DoubleConv", 64),
    ),
    Workload(
        "w6",
        "ResNet-20, a new speaker",
        lambda sources, is_small: load_speaker(
            sources, ImageShape("resnet20", 8 if is_small else 32, "ThinBlock", 32)
        ),
    ),
)
WORKLOADS: Mapping[str, Workload] = {workload.name: workload for workload in _ALL}


def find_workload(name: str) -> Workload:
    """The workload called ``name``, in whatever case.

    Raises:
        UnknownNameError: there is none.
    """
    if name.lower() in WORKLOADS:
        return WORKLOADS[name.lower()]
    near = difflib.get_close_matches(name.lower(), WORKLOADS, 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UnknownNameError(f"unknown workload {name!r}; {hint}Known: {', '.join(WORKLOADS)}")


def built_workload(name: str, folder: str | None, *, is_small: bool) -> Trainable:
    """The workload called ``name``, ready to train, with the data in ``folder`` if there is one.

    Raises:
        UnknownNameError: there is none.
    """
    sources = Sources(None if folder is None else Path(folder))
    return find_workload(name).load(sources, is_small).build()


def named_workloads(names: str) -> tuple[str, ...]:
    """The names in a list such as ``"W1,w3"``, as they are written here.

    Raises:
        UnknownNameError: there is no such workload.
    """
    return tuple(find_workload(name.strip()).name for name in names.split(","))
