"""Under a hard limit of the budget the plain host is killed, and the budgeted one finishes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the host is its Trainer")
pytest.importorskip("accelerate", reason="Hugging Face's Trainer needs it")

from daf_bench.harness import cgroup

WORKS, REASON = cgroup.can_limit()
SHARE = 0.45  # of plain's peak above the floor

SCRIPT = '''
"""One Trainer, its budget (bytes) the first argument: 0 for none. Prints what it took."""

import json
import sys
import warnings

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from daf.integrations.transformers import budgeted
from daf.memory import process_memory

warnings.simplefilter("ignore")
torch.set_num_threads(1)
budget = int(sys.argv[1])
rows = torch.randint(0, 200, (256, 128), generator=torch.Generator().manual_seed(1))
data = [{"input_ids": row, "labels": row[0] % 2} for row in rows]
process_memory.warm_up(torch.device("cpu"))
floor = process_memory.resident_bytes()
process_memory.reset_peak()
torch.manual_seed(0)
sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
config = BertConfig(vocab_size=200, intermediate_size=1024, **sizes, **quiet)
options = {"per_device_train_batch_size": 128, "max_steps": 4, "logging_steps": 1}
still = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
arguments = TrainingArguments(sys.argv[2], **options, **still, dataloader_pin_memory=False)
trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=data)
if budget:
    budgeted(trainer, budget, tolerance=0)
trainer.train()
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
print(json.dumps({"floor": floor, "peak": process_memory.peak_bytes(), "losses": losses}))
'''


@pytest.mark.thorough
@pytest.mark.skipif(not WORKS, reason=REASON)
def test_a_trainer_finishes_where_the_plain_one_is_killed(tmp_path: Path) -> None:
    """The limit is the floor and 45 % of what the plain Trainer took above it; its losses stay."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    def command(budget_bytes: int) -> list[str]:
        return [sys.executable, str(script), str(budget_bytes), str(tmp_path / "out")]

    def told(ran: Any) -> Any:
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout.splitlines()[-1])

    with cgroup.limited_group(8 * 10**9) as group:
        plain = told(group.run(command(0)))
    limit_bytes = int(plain["floor"] + SHARE * (plain["peak"] - plain["floor"]))
    with cgroup.limited_group(limit_bytes) as group:
        ours = told(group.run(command(limit_bytes)))
        killed = group.run(command(0))
    assert killed.returncode == cgroup.KILLED_BY_SYSTEM
    assert ours["peak"] <= limit_bytes
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-3)
