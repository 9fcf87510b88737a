"""What every ``Trainer`` of Hugging Face is told."""

from __future__ import annotations

from typing import Any

from daf_bench.hosts.setting import ACCUMULATED, LEARNING_RATE, MOST_NORM, Given


def options(given: Given) -> dict[str, Any]:
    """Return the arguments by name; nothing is logged or saved."""
    return {
        "output_dir": given.output,
        "per_device_train_batch_size": given.batch_size,
        "gradient_accumulation_steps": ACCUMULATED,
        "max_steps": given.updates,
        "learning_rate": LEARNING_RATE,
        "max_grad_norm": MOST_NORM,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
