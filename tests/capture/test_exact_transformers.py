"""``bits="exact"`` on architectures of the transformers library, built from tiny configurations."""

from __future__ import annotations

import pytest
from exactness import assert_exact
from transformer_cases import CASES

pytestmark = [
    pytest.mark.usefixtures("code_everything"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_plain_bit_for_bit(name: str) -> None:
    reports = assert_exact(CASES[name]).sites
    assert len(reports) > 5
