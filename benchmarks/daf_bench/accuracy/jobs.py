"""Which tasks ``daf bench accuracy`` knows, by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from daf.core.errors import UnknownNameError
from daf_bench.accuracy.gradient_bias import NETWORKS, BiasTask
from daf_bench.accuracy.personalisation import BudgetTask
from daf_bench.accuracy.run import POLICIES, QUICK, QUICK_POLICIES, AccuracyJob, Task
from daf_bench.accuracy.sub_bit import BelowTask
from daf_bench.accuracy.tasks import (
    AccuracyTask,
    Effort,
    generation_task,
    image_task,
    keyword_task,
    personalisation_task,
    sentence_task,
)

_SPOKEN = "spoken_digits_8k_1s.npz"
_GLUE_FOLDERS = {"sst2": "SST-2", "mrpc": "MRPC", "stsb": "STS-B"}


def _sentences(kind: str, *, lora: bool) -> Callable[[Path], AccuracyTask]:
    return lambda folder: sentence_task(kind, folder / "glue" / _GLUE_FOLDERS[kind], lora=lora)


def _image(model: str, folder: Path, *, epochs: int = 30) -> AccuracyTask:
    file = folder / "cifar10_10k_2k.npz"
    return image_task(model, f"cifar10:{file}" if file.exists() else "digits", epochs=epochs)


def _bias(network: str, folder: Path) -> BiasTask:
    del folder
    return BiasTask(network)


def _below(folder: Path) -> BelowTask:
    sentences = {
        f"minilm-sst2-{'lora' if lora else 'full'}": _sentences("sst2", lora=lora)(folder)
        for lora in (False, True)
    }
    networks = {name: _image(name, folder) for name in ("resnet20", "resnet18")}
    return BelowTask({**networks, "keywords": keyword_task(folder / _SPOKEN), **sentences})


_TASKS: Mapping[str, Callable[[Path], Task]] = {
    "resnet20": partial(_image, "resnet20"),
    # Forty times the parameters learn the same images in fewer passes, each of which takes longer.
    "resnet18": partial(_image, "resnet18", epochs=12),
    **{
        f"minilm-{kind}-{'lora' if lora else 'full'}": _sentences(kind, lora=lora)
        for kind in _GLUE_FOLDERS
        for lora in (False, True)
    },
    "gpt2-e2e-lora": lambda folder: generation_task(folder / "e2e"),
    "keywords": lambda folder: keyword_task(folder / _SPOKEN),
    "personalisation": lambda folder: personalisation_task(folder / _SPOKEN),
    "personalisation-budget": lambda folder: BudgetTask(folder / _SPOKEN),
    **{f"bias-{each}": partial(_bias, each) for each in NETWORKS},
    "below-one-bit": _below,
}
TASK_NAMES = tuple(_TASKS)
_QUICK_TASKS = (
    "resnet20",
    "personalisation",
    "personalisation-budget",
    *(f"bias-{each}" for each in NETWORKS),
)


def make_job(
    tasks: str | None,
    policies: str | None,
    seeds: int,
    folder: Path | None,
    *,
    quick: bool,
    first_seed: int = 0,
    steps_share: float = 1.0,
) -> AccuracyJob:
    """From a command line's words: names with commas between them.

    Seeds are ``seeds`` of them from ``first_seed`` on, so that a long job can be run in parts;
    ``steps_share`` of every task's steps are trained, under a schedule of that length.

    Raises:
        UnknownNameError: no such task.
    """
    place = folder or Path(os.environ.get("DAF_SHARED_DATA", "../shared/data"))
    names = _names(tasks, _QUICK_TASKS if quick else TASK_NAMES)
    unknown = [name for name in names if name not in _TASKS]
    if unknown:
        raise UnknownNameError(f"unknown task {unknown[0]!r}; known: {', '.join(TASK_NAMES)}")
    return AccuracyJob(
        [_TASKS[name](place) for name in names],
        _names(policies, QUICK_POLICIES if quick else POLICIES),
        range(first_seed, first_seed + seeds),
        QUICK if quick else Effort(steps_share),
    )


def _names(text: str | None, otherwise: tuple[str, ...]) -> tuple[str, ...]:
    if text is None:
        return otherwise
    return tuple(name.strip() for name in text.split(",") if name.strip())
