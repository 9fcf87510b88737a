"""Passes that keep all are captured once in sixteen, and whenever something differs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn

from daf.capture.capture import Capture
from daf.capture.known_passes import COUNTED_EVERY, KnownPasses
from daf.core.policy import exact_policy, plain_policy

PLAIN = plain_policy()
UNCOMPILED: Any = SimpleNamespace(attributes={})


def known_passes() -> KnownPasses:
    return KnownPasses(Capture(nn.Linear(2, 2)))


def test_one_pass_in_sixty_four_is_captured() -> None:
    passes = known_passes()
    found = [passes.begin(PLAIN, UNCOMPILED, index, "batch") for index in range(150)]
    assert [index for index, known in enumerate(found) if not known] == [0, 64, 128]
    assert COUNTED_EVERY == 64


def test_another_batch_or_a_part_of_one_is_captured() -> None:
    passes = known_passes()
    asked = ["batch", "batch", "other", "other", "batch", None, None, "batch", "batch"]
    found = [passes.begin(PLAIN, UNCOMPILED, 1, what) for what in asked]
    assert found == [False, True, False, True, False, False, False, False, True]


def test_passes_of_plans_that_do_anything_are_captured() -> None:
    passes = known_passes()
    compiled: Any = SimpleNamespace(attributes={"part": "forward"})
    assert not any(passes.begin(exact_policy(), UNCOMPILED, 1, "batch") for _ in range(3))
    assert not any(passes.begin(PLAIN, compiled, 1, "batch") for _ in range(3))
    assert not passes.begin(PLAIN, UNCOMPILED, 1, "batch")
    assert passes.begin(PLAIN, UNCOMPILED, 1, "batch")
