"""A run's folder: settings, metrics, memory, weights, checkpoint, summary."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from daf.core.errors import DamagedFileError, DataError, RunFolderError
from daf.files.atomic import PRIVATE, remove_temporaries, replacing, write_error
from daf.files.checkpoint import load_model, read_checkpoint, write_checkpoint
from daf.files.folder_lock import LOCK_NAME, held_folder
from daf.files.records import Extent, begins_with, cut_log, end_of, read_json, write_json
from daf.files.tensor_file import write_tensors
from daf.sensitivity.result import Sensitivity
from daf.training.low_rank import write_adapter
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
        self.previous = self.checkpoint.with_name("previous.safetensors")
        self.weights = path / "model.safetensors"
        self.summary = path / "summary.json"
        self.history = path / "history.pickle"
        self.plan = path / "plan.json"
        self.sites = path / "sites.jsonl"
        self.sensitivity = path / _SENSITIVITY
        self.good_state = self.checkpoint.with_name("good.safetensors")

    @contextmanager
    def held(self, *, resumes: bool) -> Iterator[None]:
        """Hold the folder, made unless this run ``resumes``; one that stays empty is removed.

        RunFolderError: another process holds it, it cannot be made, or a new run's holds a file.
        """
        try:
            if not resumes:
                self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunFolderError(
                f"cannot make the folder {self.path}: {error.strerror}; name another --out"
            ) from error
        try:
            with held_folder(self.path):
                self._make_ready() if resumes else self._refuse_if_occupied()
                yield
        finally:
            with suppress(OSError):
                self.path.rmdir()

    def _make_ready(self) -> None:
        if self.checkpoint.parent.is_symlink():
            raise RunFolderError(f"{self.checkpoint.parent} is a link; put the folder in its place")
        for folder in (self.path, self.checkpoint.parent):
            remove_temporaries(folder)

    def _refuse_if_occupied(self) -> None:
        if self.checkpoint.exists() or self.settings.exists():
            raise RunFolderError(
                f"{self.path} already holds a run; --resume continues it, or name another --out"
            )
        if {each.name for each in self.path.iterdir()} - {LOCK_NAME}:
            raise RunFolderError(
                f"{self.path} is not empty and holds no run; name another --out, or empty it"
            )

    def begin(self, settings: TrainSettings) -> None:
        """Write the settings of a run before its first step."""
        try:
            self.checkpoint.parent.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise write_error(self.checkpoint.parent, error) from error
        write_json(self.settings, asdict(settings))

    def read_settings(self) -> TrainSettings:
        """Return the run's first settings.

        DamagedFileError: they cannot be read. RunFolderError: there are none, or another version's.
        """
        if not self.settings.exists():
            raise RunFolderError(
                f"asked to resume {self.path}, but it holds no run; begin one without --resume"
            )
        try:
            value = read_json(self.settings)
        except (OSError, ValueError) as error:
            raise DamagedFileError(f"cannot read {self.settings}: {error}") from error
        return TrainSettings.from_json(value)

    def write_weights(self, model: nn.Module) -> None:
        """Write ``model.safetensors``, atomically; of ``--lora``, what is trained by itself too."""
        with replacing(self.weights, mode=PRIVATE) as file:
            write_tensors(file, model.state_dict(), {"format": "pt"})
        if hasattr(model, "peft_config"):
            write_adapter(model, self.path / "adapter")

    def write_state(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> None:
        """Write a checkpoint and keep the one before; raises as ``write_checkpoint``."""
        write_checkpoint(self.checkpoint, model, optimizer, state, kept=self.previous)

    def read_state(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[dict[str, Any], str]:
        """Restore the last whole checkpoint; return its state, and what was wrong with the newest.

        A damaged newest one is put aside. Raises DamagedFileError if none is whole, RunFolderError
        if it is of another model or version.
        """
        try:
            return read_checkpoint(self.checkpoint, model, optimizer), ""
        except DamagedFileError as damage:
            try:
                state = read_checkpoint(self.previous, model, optimizer)
            except DamagedFileError as earlier:
                raise DamagedFileError(f"{damage}; and {earlier}: begin another run") from damage
            if self.checkpoint.exists():
                self.checkpoint.replace(self.checkpoint.with_name("damaged.safetensors"))
            return state, f"{damage}; going on from the checkpoint before it"

    def read_weights(self, model: nn.Module) -> int:
        """Restore the model of the last whole checkpoint; return its step. Raises as it."""
        try:
            return load_model(self.checkpoint, model)
        except DamagedFileError:
            return load_model(self.previous, model)

    def evaluated_steps(self) -> set[int]:
        """Return the steps after which the summary has evaluations; none if it cannot be read."""
        with suppress(OSError, ValueError, LookupError, TypeError):
            return {each["step"] for each in read_json(self.summary)["evaluations"]}
        return set()

    def keep_metrics_until(self, step: int) -> None:
        """Drop the lines after ``step``, which a rolled back run left."""
        if self.metrics.exists():
            cut_log(self.metrics, end_of(self.metrics, lambda line: int(line["step"]) <= step))

    def cut_logs(self, extents: Mapping[str, Extent]) -> list[str]:
        """Cut each log to its whole lines within its extent; return sentences on changed ones.

        Raises RunFolderError if a log cannot be written.
        """
        changed = []
        for path in (self.metrics, self.memory):
            if not begins_with(path, extents[path.name]):
                changed.append(f"{path} has lost or changed lines from before the checkpoint")
            cut_log(path, extents[path.name][0])
        return changed


def read_sensitivity(path: Path) -> Sensitivity:
    """Read a measurement from a run's folder or a file; raises DataError if missing or damaged."""
    file = path / _SENSITIVITY if path.is_dir() else path
    try:
        value = read_json(file, _SENSITIVITY)
    except (OSError, ValueError) as error:
        raise DataError(
            f"asked for the sensitivities in {file}: {error}; name the folder of a run under a "
            "budget that coded something, or leave it out, so that they are measured"
        ) from error
    return Sensitivity.from_dict(value)
