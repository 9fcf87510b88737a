"""TRL's trainers within a budget: supervised, by preferences, and of rewards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("trl", reason="the extra `hosts` has it")
pytest.importorskip("datasets", reason="TRL needs it")

from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    Trainer,
)
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

import daf
from daf.integrations.preferences import IN_PAIRS
from daf.integrations.transformers import budgeted

pytestmark = pytest.mark.filterwarnings("ignore::Warning")
WORDS, LENGTH, ROWS = 200, 64, 8
Budget = Callable[[int], int]
Same = Callable[[nn.Module, nn.Module], None]


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"[PAD]": 0, "[EOS]": 1, "[UNK]": 2, **{f"w{i}": i for i in range(3, WORDS)}}
    made = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    names = {"pad_token": "[PAD]", "eos_token": "[EOS]", "unk_token": "[UNK]"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


def config() -> LlamaConfig:
    sizes = {"hidden_size": 64, "intermediate_size": 1024, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    return LlamaConfig(vocab_size=WORDS, num_labels=1, **sizes, **heads, **ends)


def sentence(generator: torch.Generator, least: int = 16) -> str:
    length = int(torch.randint(least, LENGTH - 2, (), generator=generator))
    return " ".join(f"w{i}" for i in torch.randint(3, WORDS, (length,), generator=generator))


def rows(*fields: str, count: int = 64) -> Dataset:
    generator = torch.Generator().manual_seed(3)
    return Dataset.from_dict({name: [sentence(generator) for _ in range(count)] for name in fields})


def options(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": ROWS,
        "gradient_accumulation_steps": 2,
        "max_steps": 20,
        "learning_rate": 1e-3,
        "max_grad_norm": 0.5,
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def supervised(folder: Path) -> Trainer:
    torch.manual_seed(0)
    return SFTTrainer(
        LlamaForCausalLM(config()),
        args=SFTConfig(max_length=LENGTH, **options(folder)),
        train_dataset=rows("text"),
        processing_class=tokenizer(),
    )


def preferred(folder: Path) -> Trainer:
    torch.manual_seed(0)
    return DPOTrainer(
        LlamaForCausalLM(config()),
        ref_model=LlamaForCausalLM(config()),
        args=DPOConfig(max_length=LENGTH, **options(folder)),
        train_dataset=rows("prompt", "chosen", "rejected"),
        processing_class=tokenizer(),
    )


def rewarded(folder: Path) -> Trainer:
    torch.manual_seed(0)
    return RewardTrainer(
        LlamaForSequenceClassification(config()),
        args=RewardConfig(max_length=LENGTH, **options(folder)),
        train_dataset=rows("chosen", "rejected"),
        processing_class=tokenizer(),
    )


def logged(trainer: Trainer, name: str) -> list[float]:
    return [row[name] for row in trainer.state.log_history if name in row]


TRAININGS = [
    pytest.param(
        *(supervised, "num_tokens", 100_000_000), id="supervised", marks=pytest.mark.thorough
    ),
    pytest.param(preferred, "rewards/margins", 100_000_000, id="preferred"),
    pytest.param(rewarded, "margin", 100_000_000, id="rewarded", marks=pytest.mark.thorough),
]


@pytest.mark.parametrize("steps", [4, pytest.param(20, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(("make", "metric", "room_bytes"), TRAININGS)
def test_steps_are_the_host_s_own(
    make: Callable[[Path], Trainer],
    metric: str,
    room_bytes: int,
    steps: int,
    tmp_path: Path,
    budget: Budget,
    same_weights: Same,
) -> None:
    """Its metrics too, which each loss adds to: what measures is not counted."""
    plain = make(tmp_path)
    plain.args.max_steps = steps
    plain.train()
    bound = budget(room_bytes)
    ours = budgeted(make(tmp_path), bound, tolerance=0)
    ours.args.max_steps = steps
    ours.train()
    same_weights(ours.model, plain.model)
    assert logged(ours, "loss") == pytest.approx(logged(plain, "loss"), rel=1e-3, abs=1e-4)
    assert logged(ours, metric) == pytest.approx(logged(plain, metric), rel=1e-2, abs=1e-3)
    assert ours.daf_session.peak_bytes <= bound
    assert ours.daf_session.split_refusal == ""


@pytest.mark.usefixtures("whole_batches_are_fastest")
def test_metrics_of_parts_are_those_of_the_batch(tmp_path: Path, budget: Budget) -> None:
    """Memory runs short in mid-run: some batches are whole, those after it are cut in two."""
    plain = rewarded(tmp_path)
    plain.args.max_steps = 8
    plain.train()
    ours = rewarded(tmp_path)
    ours.args.max_steps = 8
    compute_loss, counts = ours.compute_loss, {"now": 0}

    def bursting(*given: Any, **named: Any) -> torch.Tensor:
        found: torch.Tensor = compute_loss(*given, **named)
        if len(ours._metrics["train"].get("margin", ())) == 3 and ours.state.global_step == 3:
            counts["now"] += 1
            if counts["now"] == 1:
                torch.empty(10**9).fill_(1.0)
        return found

    ours.compute_loss = bursting
    budgeted(ours, budget(200_000_000), tolerance=0).train()
    sizes = [row["daf_micro_batch"] for row in ours.state.log_history if "daf_micro_batch" in row]
    assert counts["now"] > 1
    assert sizes[0] > sizes[-1]
    assert logged(ours, "loss") == pytest.approx(logged(plain, "loss"), rel=1e-3, abs=1e-4)
    for metric in ("margin", "mean_reward", "accuracy"):
        assert logged(ours, metric) == pytest.approx(logged(plain, metric), rel=1e-2, abs=1e-3)


def test_pairs_are_cut_with_what_belongs_to_them() -> None:
    rows = torch.arange(8)
    batch = {"input_ids": rows, "ref_chosen_logps": rows[:4].float(), "names": "of all"}
    batch["scale"] = torch.tensor(2.0)
    assert IN_PAIRS.count(batch) == 4
    part = IN_PAIRS.take(batch, 1, 3)
    assert part["input_ids"].tolist() == [1, 2, 5, 6]
    assert part["ref_chosen_logps"].tolist() == [1, 2]
    assert part["names"] == "of all"
    assert part["scale"] == 2.0


@pytest.mark.parametrize("name", ["input_ids", "chosen_input_ids"])
def test_batches_of_another_kind_stay_whole(name: str) -> None:
    batch = {name: torch.arange(8), "pixel_values": torch.arange(13)}
    assert IN_PAIRS.count(batch) == 1
    assert IN_PAIRS.take(batch, 0, 1)["pixel_values"].tolist() == [*range(13)]


def test_a_split_of_the_user_s_is_used(tmp_path: Path, budget: Budget) -> None:
    """Of one example each: nothing to cut."""
    whole = daf.BatchSplit(lambda _: 1, lambda batch, *_: batch)
    ours = budgeted(preferred(tmp_path), budget(400_000_000), tolerance=0, split=whole)
    ours.args.max_steps = 1
    ours.train()
    assert ours.daf_report.micro_batch == 1
