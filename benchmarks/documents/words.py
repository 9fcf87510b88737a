"""What the tables share: where things lie, and who measured what on which machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MB = 1e6


def measured_by(result: dict[str, Any], name: str) -> str:
    """Which command, on what, on which machine."""
    machine = result["machine"]
    return (
        f"Measured by `daf bench {name} --json` ({result['notes'][0]}; {machine['processor']}, "
        f"{machine['cores']} cores, torch {machine['torch']}):"
    )


def picture(name: str, words: str) -> list[str]:
    """A link to a picture beside the documents, if it was drawn."""
    exists = (ROOT / "docs" / f"{name}.png").exists()
    return [f"![{words}]({name}.png)", ""] if exists else []
