"""The measuring data, where they lie on this machine; tests that need them skip otherwise."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_BESIDE_THE_CHECKOUT = Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture
def shared_data() -> Path:
    folder = Path(os.environ.get("DAF_SHARED_DATA", _BESIDE_THE_CHECKOUT))
    if not folder.is_dir():
        pytest.skip(f"needs the measuring data; {folder} is absent (name it in DAF_SHARED_DATA)")
    return folder
