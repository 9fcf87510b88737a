"""A run's settings: one immutable value, kept in the run's folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from daf.core.errors import RunFolderError, UnknownNameError
from daf.training.task import Goal

OPTIMIZERS = ("sgd", "adamw")
MEMORY_FORMATS = ("channels_last", "contiguous")
# What a resumed run may change, because no finished step depends on it.
_MAY_CHANGE = frozenset(
    {"epochs", "max_steps", "checkpoint_every", "memory_interval_ms", "history"}
)


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """Everything that decides a run's result, and how often its memory is sampled.

    ``budget``: bytes, a fraction of the machine or ``"auto"``; None: plain training.
    ``bits``: a width, ``"exact"``, ``"plain"``; None: the planner chooses by ``policy``, within
    ``tolerance`` (see ``Session``). ``fused`` is for runs without a budget.
    ``optimizer``, ``learning_rate``, ``weight_decay``, ``augment``, ``goal``, ``image_size`` and
    ``context`` default to what is customary for the model and data.
    ``tokenizer``: folder of a model whose tokenizer splits sentences; None: byte by byte.
    ``max_steps`` defaults to all steps of ``epochs``, ``checkpoint_every`` (steps) to an epoch.
    ``pool_bytes``: cap on the codes; None: no cap of their own. ``host_bytes``: host memory for a
    GPU's codes; None: none. ``history``: record who asks for memory in one step.
    ``release_gradients``: update parameters inside backward where allowed. ``sensitivity``: file,
    or an earlier run's folder, with measurements; None: measure. ``rollback``: return a diverging
    run to its last good state, once.
    """

    model: str
    data: str = "digits"
    budget: int | float | str | None = None
    device: str = "cpu"
    batch_size: int = 128
    epochs: int = 1
    max_steps: int | None = None
    seed: int = 0
    optimizer: str | None = None
    learning_rate: float | None = None
    momentum: float = 0.9
    weight_decay: float | None = None
    memory_format: str = "channels_last"
    threads: int | None = None
    bits: int | str | None = None
    fused: bool = False
    policy: str | None = None
    tolerance: float | None = None
    allow_batchnorm_split: bool = False
    goal: Goal | None = None
    augment: bool | None = None
    image_size: int | None = None
    context: int | None = None
    tokenizer: str | None = None
    checkpoint_every: int | None = None
    memory_interval_ms: float = 50.0
    pool_bytes: int | None = None
    host_bytes: int | None = None
    history: bool = False
    release_gradients: bool = False
    sensitivity: str | None = None
    rollback: bool = True

    def as_json(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> TrainSettings:
        """Return the settings that ``as_json`` wrote.

        Raises:
            RunFolderError: a name is unknown or missing (another version wrote it).
        """
        goal = value.get("goal")
        try:
            return TrainSettings(**{**value, "goal": None if goal is None else Goal(goal)})
        except (TypeError, ValueError) as error:
            raise RunFolderError(
                f"the run's settings are not ones this version knows ({error}); "
                "resume with the version that began the run"
            ) from error

    def resumed_with(self, asked: Mapping[str, Any]) -> TrainSettings:
        """Return these settings, with the changes ``asked`` that a resumed run may make.

        Raises:
            RunFolderError: ``asked`` changes something that finished steps depend on.
        """
        for name, value in asked.items():
            found = getattr(self, name)
            if value != found and name not in _MAY_CHANGE:
                raise RunFolderError(
                    f"asked to resume with {name} = {value!r}, but the run was begun with "
                    f"{found!r}; leave it out to resume, or begin another run with another --out"
                )
        return dataclasses.replace(self, **{k: v for k, v in asked.items() if k in _MAY_CHANGE})


def checked_choice(what: str, value: str, known: tuple[str, ...]) -> str:
    """Return ``value`` if it is one of ``known``.

    Raises:
        UnknownNameError: ``value`` is not known.
    """
    if value not in known:
        raise UnknownNameError(f"unknown {what} {value!r}; known: {', '.join(known)}")
    return value
