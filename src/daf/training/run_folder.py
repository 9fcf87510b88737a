"""A run's folder: settings, metrics, memory, weights, checkpoint, summary.

=====================  ==========================================================
``run.json``           the settings that the run began with
``metrics.jsonl``      one line a step
``memory.jsonl``       the process's resident (a GPU's reserved) bytes over time, and marks
``checkpoint/``        ``state.safetensors``: all that ``--resume`` needs
``model.safetensors``  the weights alone
``summary.json``       the run in numbers
``plan.json``          the plan at the end: policy, reasons, the account of its peak
``sensitivity.json``   what each site's code adds to the gradient, for other runs of the model
``sites.jsonl``        one line for every tensor saved in the last step, with its treatment
``memory.png``         ``memory.jsonl`` as a picture, where Matplotlib is installed
``history.pickle``     who asked for memory in one step, if recorded, for pytorch.org/memory_viz
=====================  ==========================================================
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from torch import nn

from daf.core.errors import DataError, RunFolderError
from daf.files.atomic import read_lines, replacing, write_error, write_json, write_lines
from daf.files.tensor_file import write_tensors
from daf.sensitivity.result import Sensitivity
from daf.training.settings import TrainSettings

_SENSITIVITY = "sensitivity.json"


class RunFolder:
    """The files of one run, by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings = path / "run.json"
        self.metrics = path / "metrics.jsonl"
        self.memory = path / "memory.jsonl"
        self.checkpoint = path / "checkpoint" / "state.safetensors"
        self.weights = path / "model.safetensors"
        self.summary = path / "summary.json"
        self.history = path / "history.pickle"
        self.plan = path / "plan.json"
        self.sites = path / "sites.jsonl"
        self.sensitivity = path / _SENSITIVITY
        self.good_state = self.checkpoint.with_name("good.safetensors")

    def claim(self) -> None:
        """Make the folder; raises RunFolderError if it cannot be made or holds any file."""
        if self.checkpoint.exists() or self.settings.exists():
            raise RunFolderError(
                f"{self.path} already holds a run; --resume continues it, or name another --out"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            occupied = any(self.path.iterdir())
        except OSError as error:
            raise RunFolderError(
                f"cannot make the folder {self.path}: {error.strerror}; name another --out"
            ) from error
        if occupied:
            raise RunFolderError(
                f"{self.path} is not empty and holds no run; name another --out, or empty it"
            )

    def give_up(self) -> None:
        """Remove the folder if a claimed run left nothing in it."""
        if self.path.is_dir() and not any(self.path.iterdir()):
            self.path.rmdir()

    def begin(self, settings: TrainSettings) -> None:
        """Write the settings of a run before its first step."""
        try:
            self.checkpoint.parent.mkdir(exist_ok=True)
        except OSError as error:
            raise write_error(self.checkpoint.parent, error) from error
        write_json(self.settings, asdict(settings))

    def read_settings(self) -> TrainSettings:
        """Return the run's first settings; raises RunFolderError if missing or damaged."""
        if not self.settings.exists():
            raise RunFolderError(
                f"asked to resume {self.path}, but it holds no run; begin one without --resume"
            )
        try:
            value = json.loads(self.settings.read_text())
        except (OSError, ValueError) as error:
            raise RunFolderError(f"cannot read {self.settings}: {error}") from error
        return TrainSettings.from_json(value)

    def write_weights(self, model: nn.Module) -> None:
        """Write ``model.safetensors``, atomically."""
        with replacing(self.weights) as file:
            write_tensors(file, model.state_dict(), {"format": "pt"})

    def keep_metrics_until(self, step: int) -> None:
        """Drop the lines after ``step``, which a crashed or rolled back run left."""
        write_lines(
            self.metrics, [line for line in read_lines(self.metrics) if int(line["step"]) <= step]
        )


def read_sensitivity(path: Path) -> Sensitivity:
    """Read a measurement from a run's folder or a file; raises DataError if missing or damaged."""
    file = path / _SENSITIVITY if path.is_dir() else path
    try:
        value = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"asked for the sensitivities in {file}: {error}; name the folder of a run under a "
            "budget that coded something, or leave it out, so that they are measured"
        ) from error
    return Sensitivity.from_dict(value)
