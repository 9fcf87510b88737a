"""From settings to a model, its data and a session.

The order keeps the floor honest (design, section 1): load code and data, run one operation of each
kind, read the floor, and only then build the model.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from daf.core.errors import OptionError, PlatformError, UnknownNameError
from daf.memory import process_memory
from daf.memory.device_memory import DeviceMemory
from daf.memory.domain import memory_on
from daf.pool.store import PoolOptions
from daf.session.session import Session
from daf.torch_compat import compiler
from daf.torch_compat.pytree import map_nest
from daf.training.data import load_data
from daf.training.low_rank import load_peft, with_low_rank
from daf.training.models import find_model
from daf.training.run_folder import read_sensitivity
from daf.training.settings import MEMORY_FORMATS, OPTIMIZERS, TrainSettings, checked_choice
from daf.training.task import Batch, BatchOrder, Goal, Indices, Task, settle_goal

_LEARNING_RATES = {"sgd": 0.05, "adamw": 3e-4}
# What a session takes as it is, by the same name.
_OF_SESSION = """
bits fused policy tolerance seed allow_batchnorm_split split operators host_bytes cache
"""
_WEIGHT_DECAYS = {"sgd": 5e-4, "adamw": 0.01}


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """Everything a run trains with; the caller closes ``session``."""

    settings: TrainSettings
    goal: Goal
    optimizer_name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    task: Task
    order: BatchOrder
    session: Session
    device: torch.device
    left_out: tuple[str, ...]  # data that could not be read, with the reasons

    def train_batch(self, step: int) -> Batch:
        """Return the batch of a step, the same in every process."""
        generator = np.random.default_rng([self.settings.seed, 1 + step])
        return self._there(self.task.train_batch(self.order.indices(step), generator))

    def test_batch(self, indices: Indices) -> Batch:
        """Return the batch of these test examples."""
        return self._there(self.task.test_batch(indices))

    def _there(self, batch: Batch) -> Batch:
        there: Batch = map_nest(Tensor, lambda each: each.to(self.device), batch)
        return there

    def test_indices(self, size: int) -> Iterator[Indices]:
        """Yield all test examples in order, ``size`` at a time."""
        for start in range(0, self.task.test_examples, size):
            yield np.arange(start, min(start + size, self.task.test_examples), dtype=np.int64)


def make_job(settings: TrainSettings, good_state: Path | None = None) -> TrainingJob:
    """Load code and data, read the floor, then build.

    ``good_state``: file for the last good state; None: a diverging run is not rolled back.

    Raises:
        UnknownNameError: a model, data set, optimizer or memory format is not known.
        OptionError: a policy or tolerance is asked for without a budget, which plans nothing.
        PlatformError: the device is not available.
        DataError: the data are missing, damaged, or do not fit the model.
    """
    device = checked_device(settings.device)
    plans = settings.tolerance is not None or (settings.policy and settings.bits is None)
    if settings.budget is None and plans:
        asked = f"policy={settings.policy!r} and tolerance={settings.tolerance!r}"
        raise OptionError(f"asked for {asked} without a budget, so nothing is planned; give one")
    checked_choice("optimizer", settings.optimizer or OPTIMIZERS[0], OPTIMIZERS)
    checked_choice("memory format", settings.memory_format, MEMORY_FORMATS)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    memory_on(device).reset_peak()
    recipe = find_model(settings.model)
    data = load_data(
        settings.data,
        image_size=settings.image_size,
        context=settings.context,
        tokenizer=settings.tokenizer,
        leave_out_unreadable=settings.leave_out_unreadable,
    )
    goal = settle_goal(settings.model, settings.goal or recipe.goal, data)
    optimizer_name = settings.optimizer or ("sgd" if goal.reads_images else "adamw")
    if settings.lora is not None:
        load_peft()
    known = read_sensitivity(Path(settings.sensitivity)) if settings.sensitivity else True
    baseline_bytes = _baseline_bytes(device)

    torch.manual_seed(settings.seed)
    np.random.seed(settings.seed % 2**32)
    random.seed(settings.seed)
    model = recipe.build(data.facts)
    if settings.lora is not None:
        model = with_low_rank(model, settings.lora)
    channels_last = settings.memory_format == "channels_last" and goal.reads_images
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    if not any(map(is_lazy, model.parameters())):  # which have no format yet
        model.to(memory_format=memory_format)  # type: ignore[call-overload]
    task = data.make_task(goal, model, memory_format=memory_format, augment=settings.augment)
    model.to(device)
    compiler.keep_out()
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = make_optimizer(optimizer_name, trained, settings)
    order = BatchOrder(task.train_examples, settings.batch_size, settings.seed)
    session = Session(
        model,
        optimizer,
        settings.budget,
        baseline_bytes=baseline_bytes,
        release_gradients="auto" if settings.release_gradients else False,
        sensitivity=known,
        rollback=good_state if settings.rollback and good_state is not None else False,
        pool_bytes=pool_options(settings),
        **{name: getattr(settings, name) for name in _OF_SESSION.split()},
    )
    session.include_loading()
    left_out = getattr(data, "left_out", ())  # by users' own data sets, None
    return TrainingJob(
        settings, goal, optimizer_name, model, optimizer, task, order, session, device, left_out
    )


def pool_options(settings: TrainSettings) -> PoolOptions:
    """Return the pool that a run's codes lie in."""
    return PoolOptions(settings.pool_bytes, settings.pool_evicts, settings.pool_growth_bytes)


def checked_device(name: str) -> torch.device:
    """Return the device after computing on it; raises UnknownNameError or PlatformError."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UnknownNameError(
            f"unknown device {name!r}; known: cpu, cuda, cuda:1 and so on"
        ) from error
    if device.type == "cpu":
        return device
    try:
        DeviceMemory(device)
        return torch.ones(1, device=device).device  # with its index
    except (AssertionError, RuntimeError) as error:
        raise PlatformError(f"asked to train on {name}; found: {error}; try cpu") from error


def make_optimizer(
    name: str, parameters: list[nn.Parameter], settings: TrainSettings
) -> torch.optim.Optimizer:
    """Return the optimizer ``name`` with the settings' numbers, or its customary ones."""
    rate = settings.learning_rate
    rate = _LEARNING_RATES[name] if rate is None else rate
    decay = settings.weight_decay
    decay = _WEIGHT_DECAYS[name] if decay is None else decay
    if name == "sgd":
        return torch.optim.SGD(parameters, rate, momentum=settings.momentum, weight_decay=decay)
    return torch.optim.AdamW(parameters, rate, weight_decay=decay)


def _baseline_bytes(device: torch.device) -> int:
    process_memory.drop_code()  # what only loading has run
    process_memory.warm_up(device)
    memory = memory_on(device)
    if isinstance(memory, DeviceMemory):
        memory.release_cached()  # as the session does
    return memory.held_bytes()
