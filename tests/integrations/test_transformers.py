"""A budgeted ``Trainer`` trains as it does by itself, and keeps within its budget."""

from __future__ import annotations

import copy
import gc
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from thoroughness import at_most
from torch import Tensor, nn

pytest.importorskip("transformers", reason="the adapter is to Hugging Face's Trainer")
pytest.importorskip("accelerate", reason="Hugging Face's Trainer needs it")

from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from daf.core.errors import BudgetError, ClosedSessionError, HostError
from daf.core.units import format_bytes
from daf.integrations.transformers import BudgetedTrainer, budgeted
from daf.memory import glibc, process_memory
from daf.memory.owners import owners
from daf.memory.process_limit import CODE_BYTES
from daf.profiling.split_proof import SplitProof

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*"),
]
WORDS, LENGTH, ROWS = 200, 64, 16
STEPS = at_most(20, 5)
ROOM_BYTES = 45_000_000
Row = dict[str, Tensor]
Budget = Callable[[int], int]
Same = Callable[[nn.Module, nn.Module], None]


def classifier() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=WORDS, intermediate_size=2048, **sizes, **quiet)
    return BertForSequenceClassification(config)


def decoder() -> nn.Module:
    torch.manual_seed(0)
    quiet = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": LENGTH, "n_inner": 2048}
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, **sizes, **quiet))


def sentences(count: int = 128) -> list[Row]:
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(0, WORDS, (count, LENGTH), generator=generator)
    return [
        {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row[0] % 2}
        for row in words
    ]


def texts(count: int = 128) -> list[Row]:
    """Between 8 and all of each text's labels count: no two batches have as many."""
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(8, LENGTH, (count,), generator=generator).tolist()
    rows = sentences(count)
    for row, length in zip(rows, lengths, strict=True):
        row["labels"] = row["input_ids"].clone()
        row["labels"][length:] = -100
    return rows


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": ROWS,
        "gradient_accumulation_steps": 4,
        "max_grad_norm": 0.5,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 4,
        "learning_rate": 1e-3,
        "max_steps": STEPS,
        "logging_steps": 5,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(str(folder), **{**defaults, **options})


def losses(trainer: Trainer) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


LONG = pytest.mark.thorough  # as scripts/hosts is


@pytest.mark.parametrize(
    ("make", "data"), [(classifier, sentences), pytest.param(decoder, texts, marks=LONG)]
)
def test_steps_are_the_host_s_own(
    make: Callable[[], nn.Module],
    data: Callable[[], list[Row]],
    tmp_path: Path,
    budget: Budget,
    same_weights: Same,
) -> None:
    """Accumulation of 4, clipping, a schedule; labels that do not count; batches in parts."""
    plain = Trainer(make(), arguments(tmp_path), train_dataset=data())
    plain.train()
    bound = budget(ROOM_BYTES)
    ours = budgeted(Trainer(make(), arguments(tmp_path), train_dataset=data()), bound, tolerance=0)
    ours.train()
    same_weights(ours.model, plain.model)
    assert losses(ours) == pytest.approx(losses(plain), rel=1e-4)
    assert ours.daf_report.micro_batch < ROWS
    assert ours.daf_session.split_refusal == ""
    logged = [row for row in ours.state.log_history if "daf_micro_batch" in row][-1]
    assert 0 < logged["daf_peak_bytes"] <= bound == logged["daf_budget_bytes"]
    assert logged["daf_micro_batch"] == ours.daf_report.micro_batch
    assert {"daf_predicted_peak_bytes", "daf_evicted_bytes"} <= set(logged)


def bfloat16_runs(folder: str) -> dict[str, Any]:
    """Return how far training moves weights, how far apart both runs end, and their losses."""
    options = arguments(Path(folder), bf16=True, optim="sgd", learning_rate=0.1)
    begun = classifier()
    plain = Trainer(copy.deepcopy(begun), options, train_dataset=sentences())
    plain.train()
    ours = Trainer(copy.deepcopy(begun), options, train_dataset=sentences())
    gc.collect()
    glibc.return_free_memory()  # what plain training left, by 20 MB more or less, is no room
    process_memory.drop_code()  # nor is code, which a session gives back
    bound = process_memory.resident_bytes() + CODE_BYTES + 5 * ROOM_BYTES // 4
    budgeted(ours, bound, tolerance=0).train()

    def distance(one: nn.Module, other: nn.Module) -> float:
        pairs = zip(one.parameters(), other.parameters(), strict=True)
        return sum((a - b).square().sum().item() for a, b in pairs) ** 0.5

    apart, moved = distance(ours.model, plain.model), distance(plain.model, begun)
    return {"apart": apart, "moved": moved, "losses": [losses(ours), losses(plain)]}


@LONG
def test_bfloat16_is_the_host_s_own(tmp_path: Path) -> None:
    """Within what reordered sums in bfloat16 move weights, as a share of what training does.

    In a process of its own, since oneDNN keeps each kernel that it compiles for bfloat16.
    """
    source = (
        "import json, sys; sys.path[:0] = sys.argv[2:]\n"
        "from test_transformers import bfloat16_runs\n"
        "print(json.dumps(bfloat16_runs(sys.argv[1])))"
    )
    folders = Path(__file__).parent, Path(__file__).parents[1] / "helpers"
    command = [sys.executable, "-c", source, str(tmp_path), *map(str, folders)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    found = json.loads(ran.stdout.splitlines()[-1])
    assert 0 < found["apart"] < 0.02 * found["moved"]
    ours, plain = found["losses"]
    assert ours == pytest.approx(plain, rel=1e-2)


class Weighted(Trainer):
    """Its loss is its own, and reads more than the model's."""

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        weights = torch.tensor([1.0, 3.0])
        loss = nn.functional.cross_entropy(outputs.logits, labels, weight=weights)
        return (loss, outputs) if return_outputs else loss


class WeightedWithin(BudgetedTrainer):
    """The same, below the mixin."""

    compute_loss = Weighted.compute_loss


@pytest.mark.thorough
def test_an_override_of_compute_loss_keeps_working(
    tmp_path: Path, budget: Budget, same_weights: Same
) -> None:
    few = {"max_steps": 5, "gradient_accumulation_steps": 2}
    plain = Weighted(classifier(), arguments(tmp_path, **few), train_dataset=sentences())
    plain.train()
    ours = Weighted(classifier(), arguments(tmp_path, **few), train_dataset=sentences())
    budgeted(ours, budget(ROOM_BYTES), tolerance=0).train()
    same_weights(ours.model, plain.model)
    assert ours.daf_report.micro_batch < ROWS
    assert type(ours).__name__ == "Weighted"
    bound = budget(ROOM_BYTES)
    within = WeightedWithin(
        classifier(),
        arguments(tmp_path, **few),
        train_dataset=sentences(),
        budget=bound,
        session_options={"tolerance": 0},
    )
    within.train()
    same_weights(within.model, plain.model)
    assert within.daf_session.peak_bytes <= bound


@pytest.mark.thorough
def test_a_loss_function_and_smoothed_labels_keep_working(
    tmp_path: Path, budget: Budget, same_weights: Same
) -> None:
    """The host's smoother takes labels out of the batch."""
    few = {"max_steps": 4, "label_smoothing_factor": 0.1}
    plain = Trainer(classifier(), arguments(tmp_path, **few), train_dataset=sentences())
    plain.train()
    ours = Trainer(classifier(), arguments(tmp_path, **few), train_dataset=sentences())
    budgeted(ours, budget(ROOM_BYTES), tolerance=0).train()
    same_weights(ours.model, plain.model)


def test_evaluation_is_the_host_s_own(tmp_path: Path, budget: Budget) -> None:
    options = {"max_steps": 4, "gradient_accumulation_steps": 2}
    options |= {"eval_strategy": "steps", "eval_steps": 2}

    def trainer() -> Trainer:
        data = {"train_dataset": sentences(), "eval_dataset": sentences(32)}
        return Trainer(classifier(), arguments(tmp_path, **options), **data)

    plain = trainer()
    plain.train()
    ours = budgeted(trainer(), budget(ROOM_BYTES), tolerance=0)
    ours.train()
    found, expected = (
        [row["eval_loss"] for row in each.state.log_history if "eval_loss" in row]
        for each in (ours, plain)
    )
    assert len(found) == 2
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.thorough
def test_a_run_resumed_with_another_loss_is_proven_anew(
    tmp_path: Path, budget: Budget, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    proofs: list[Any] = []
    run = SplitProof.run
    monkeypatch.setattr(SplitProof, "run", lambda *a: proofs.append(a) or run(*a))
    counts = []
    for kind, start in ((Trainer, None), (Trainer, "checkpoint-2"), (Weighted, "checkpoint-2")):
        own = tmp_path / ("first" if kind is Trainer else "second")
        trainer = kind(classifier(), arguments(own, **saving), train_dataset=sentences())
        place = None if start is None else str(tmp_path / "first" / start)
        budgeted(trainer, budget(ROOM_BYTES), tolerance=0).train(resume_from_checkpoint=place)
        counts.append(len(proofs))
    first, again, other = counts
    assert 0 < first == again < other


@LONG
def test_a_run_resumed_in_the_middle_ends_as_one_that_was_not(
    tmp_path: Path, budget: Budget, same_weights: Same, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = {"save_strategy": "steps", "save_steps": 4, "max_steps": 8}

    def trainer() -> Trainer:
        return Trainer(decoder(), arguments(tmp_path, **saving), train_dataset=texts())

    plain = trainer()
    plain.train()
    whole = budgeted(trainer(), budget(ROOM_BYTES), tolerance=0)
    whole.train()
    same_weights(whole.model, plain.model)
    folder = tmp_path / "checkpoint-4"
    saved = json.loads((folder / "trainer_state.json").read_text())["stateful_callbacks"]
    kept = saved["SessionState"]["attributes"]["saved"]
    assert kept["step_index"] == 16  # four batches to a step
    ours = budgeted(trainer(), budget(ROOM_BYTES), tolerance=0)
    ours.train(resume_from_checkpoint=str(folder))
    same_weights(ours.model, plain.model)
    assert ours.daf_session.state_dict()["step_index"] == 32
    assert ours.daf_session.proof_ms == 0  # what was proven is known


def test_a_plain_checkpoint_is_resumed_within_a_budget(
    tmp_path: Path, budget: Budget, same_weights: Same
) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    saving |= {"gradient_accumulation_steps": 2}
    plain = Trainer(classifier(), arguments(tmp_path, **saving), train_dataset=sentences())
    plain.train()
    ours = Trainer(classifier(), arguments(tmp_path, **saving), train_dataset=sentences())
    budgeted(ours, budget(ROOM_BYTES), tolerance=0)
    ours.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    same_weights(ours.model, plain.model)


def test_a_budget_that_cannot_hold_names_the_least_and_leaves_the_process_as_found(
    tmp_path: Path, budget: Budget
) -> None:
    trainer = Trainer(classifier(), arguments(tmp_path), train_dataset=sentences())
    before = {name: each.clone() for name, each in trainer.model.named_parameters()}
    budgeted(trainer, budget(1_000_000))
    with pytest.raises(BudgetError) as found:
        trainer.train()
    assert isinstance(found.value, torch.OutOfMemoryError)
    assert (found.value.least_bytes or 0) > trainer.daf_session.budget_bytes
    for name, each in trainer.model.named_parameters():
        torch.testing.assert_close(each, before[name], rtol=0, atol=0)
    assert_left_as_found(trainer)


def assert_left_as_found(trainer: Trainer) -> None:
    """The session is closed, nothing is set in the process, and the host has its methods back."""
    assert trainer.daf_session.settings == []
    assert not owners.living()
    with pytest.raises(ClosedSessionError):
        trainer.daf_session.update()
    assert "compute_loss" not in vars(trainer)
    assert "backward" not in vars(trainer.accelerator)


def test_the_session_ends_with_the_training(tmp_path: Path, budget: Budget) -> None:
    class Looks(TrainerCallback):
        settings: list[str] = []  # noqa: RUF012

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.settings = trainer.daf_session.settings

    looks = Looks()
    options = arguments(tmp_path, max_steps=2)
    trainer = Trainer(classifier(), options, train_dataset=sentences(), callbacks=[looks])
    budgeted(trainer, budget(ROOM_BYTES)).train()
    assert looks.settings != []
    assert_left_as_found(trainer)
    trainer.train()  # another training is another session
    assert_left_as_found(trainer)


@LONG
def test_the_batch_size_finder_recognises_a_refusal(
    tmp_path: Path, budget: Budget, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = arguments(
        tmp_path, auto_find_batch_size=True, per_device_train_batch_size=128, max_steps=2
    )
    trainer = Trainer(classifier(), options, train_dataset=sentences())
    budgeted(trainer, budget(ROOM_BYTES), tolerance=0, split=False).train()
    assert trainer._train_batch_size < 128
    assert trainer.state.global_step == 2


@pytest.mark.thorough
def test_activation_checkpointing_is_left_to_the_session(
    tmp_path: Path, budget: Budget, caplog: pytest.LogCaptureFixture, same_weights: Same
) -> None:
    seen = []

    class Looks(TrainerCallback):
        def on_step_end(self, args: Any, *_: Any, model: nn.Module, **__: Any) -> None:
            asks = args.gradient_checkpointing
            seen.append(asks or any(vars(e).get("gradient_checkpointing") for e in model.modules()))

    options = arguments(tmp_path, max_steps=2, gradient_checkpointing=True)
    plain = Trainer(decoder(), options, train_dataset=texts())
    plain.train()
    model = decoder()
    trainer = Trainer(model, options, train_dataset=texts(), callbacks=[Looks()])
    with caplog.at_level(logging.WARNING, logger="daf"):
        budgeted(trainer, budget(ROOM_BYTES), tolerance=0).train()
    assert seen == [False, False]
    assert "activation checkpointing is off" in caplog.text
    assert options.gradient_checkpointing
    same_weights(model, plain.model)


def test_memory_stands_beside_the_budget_at_the_host_s_bar(
    tmp_path: Path, budget: Budget, capsys: pytest.CaptureFixture[str]
) -> None:
    few = {"max_steps": 2, "gradient_accumulation_steps": 2}
    options = arguments(tmp_path, **few, disable_tqdm=False)
    trainer = Trainer(classifier(), options, train_dataset=sentences())
    bound = budget(ROOM_BYTES)
    budgeted(trainer, bound).train()
    assert f"of {format_bytes(bound)}" in capsys.readouterr().err


class Adds(Trainer):
    def training_step(self, model: nn.Module, inputs: Any, *args: Any) -> Tensor:
        loss = self.compute_loss(model, inputs)
        self.accelerator.backward(loss + 1.0)
        return loss.detach()


class Own(Trainer):
    def training_step(self, model: nn.Module, inputs: Any, *args: Any) -> Tensor:
        loss: Tensor = model(**inputs).loss
        self.accelerator.backward(loss)
        return loss.detach()


class Twice(Trainer):
    def training_step(self, model: nn.Module, inputs: Any, *args: Any) -> Tensor:
        loss: Tensor = self.compute_loss(model, inputs) + self.compute_loss(model, inputs)
        self.accelerator.backward(loss)
        return loss.detach()


class Outputs(Trainer):
    def training_step(self, model: nn.Module, inputs: Any, *args: Any) -> Tensor:
        loss, _ = self.compute_loss(model, inputs, return_outputs=True)
        self.accelerator.backward(loss)
        return loss.detach()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Adds, "more than the host's own loss"),
        (Own, "did not come from the host's own loss"),
        (Twice, "a second loss before"),
        (Outputs, "outputs"),
    ],
)
def test_a_step_of_another_making_is_refused(
    kind: type[Trainer], message: str, tmp_path: Path
) -> None:
    trainer = kind(classifier(), arguments(tmp_path), train_dataset=sentences())
    with pytest.raises(HostError, match=message):
        budgeted(trainer, None).train()
    assert_left_as_found(trainer)


def test_several_processes_are_refused(tmp_path: Path) -> None:
    trainer = Trainer(classifier(), arguments(tmp_path), train_dataset=sentences())
    trainer.args._n_gpu = 2
    with pytest.raises(HostError, match="2 GPUs"):
        budgeted(trainer, "1GB")
