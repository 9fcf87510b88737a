"""The parent's handle on one host's process."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from daf_bench.harness.cgroup import LimitedGroup
from daf_bench.harness.subprocess_channel import Child
from daf_bench.hosts.setting import Setting

QUIET = MappingProxyType(
    {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "PYTHONWARNINGS": "ignore",
    }
)


class Contestant(Child):
    """One host, alone or within a budget; see ``hosts.gate`` for what it answers.

    ``group``: the memory cgroup that its process is born into.
    """

    def __init__(self, setting: Setting, group: LimitedGroup | None = None) -> None:
        alone = "alone" if setting.budget_bytes is None else "within a budget"
        super().__init__(
            "daf_bench.hosts.process",
            asdict(setting),
            f"{setting.host} {alone}",
            environment=os.environ | QUIET,
            group=group,
        )

    def update(self) -> dict[str, Any]:
        """Run one update: ``ms`` and ``peak_bytes``, or ``raised``, a refusal."""
        return self.ask("update")

    def facts(self) -> dict[str, Any]:
        """``floor_bytes`` and ``peak_bytes`` so far, and the session's plan."""
        return self.ask("facts")

    def write_weights(self, path: Path) -> None:
        """Write every parameter as float32, one after the other."""
        self.ask("weights", path)

    def finish(self) -> dict[str, Any]:
        """Let the host end, after its last update: ``finished`` and facts, or ``raised``."""
        return self.ask("finish")
