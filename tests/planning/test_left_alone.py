"""What no plan does because nothing has proven it is told, with the bytes that it would save."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from synthetic import MIB, blocks, profile, saving
from torch import Tensor, nn

from daf import BudgetError, Session
from daf.core.policy import Method, Need
from daf.core.profile import Profile
from daf.core.reports import FusionReport
from daf.memory import process_memory
from daf.planning import planner
from daf.planning.explain import left_alone
from daf.planning.options import Allowed

KEPT_OR_REPLAYED = Allowed(methods=frozenset({Method.KEEP, Method.REPLAY}))
LEAST = partial(
    planner.least_feasible_budget,
    constraints=planner.Constraints(tolerance=0.0, allowed=KEPT_OR_REPLAYED),
)


def measured(refusal: str = "") -> Profile:
    savings = [saving(n, 8, Need.EXACT, 500_000, call=1 + n // 4) for n in range(8)]
    return profile(savings, calls=blocks(8, 4), refusal=refusal)


def with_refused_replays(found: Profile, reason: str) -> Profile:
    calls = [
        replace(each, replayable=False, replay_refusal=reason) if each.parent >= 0 else each
        for each in found.calls
    ]
    return replace(found, calls=tuple(calls))


def test_nothing_is_told_where_everything_was_proven() -> None:
    assert left_alone([measured()], LEAST) == []


def test_cutting_that_was_refused_would_have_saved_the_difference() -> None:
    whole = measured("examples are coupled")
    (found,) = left_alone([whole], LEAST)
    assert (found.lever, found.modules, found.reason) == ("splitting", (), "examples are coupled")
    assert found.saved_bytes == LEAST([whole]) - LEAST([measured()])
    assert found.saved_bytes > MIB


def test_modules_that_share_a_reason_are_told_together() -> None:
    refused = with_refused_replays(measured("coupled"), "it draws elsewhere")
    _, found = left_alone([refused], LEAST)
    assert found.lever == "replay"
    assert found.modules == ("block1", "block2")
    assert found.saved_bytes == LEAST([refused]) - LEAST([measured("coupled")])
    assert found.saved_bytes > 0
    assert "it draws elsewhere" in str(found)
    assert "lower the least budget by" in str(found)


def test_places_that_are_not_fused_are_told_without_a_number() -> None:
    places = (
        FusionReport("norm", 0, "norm+relu", ""),
        FusionReport("last", 0, "", "two read its result"),
    )
    fused = replace(measured(), chunk_bytes=1, fusions=places)
    (found,) = left_alone([measured(), fused], LEAST)
    assert (found.lever, found.modules) == ("fusion", ("last:batch_norm",))
    assert (found.reason, found.saved_bytes) == ("two read its result", None)


def contrastive(model: nn.Module, batch: Tensor) -> Tensor:
    found = F.normalize(model(batch), dim=1)
    return F.cross_entropy(found @ found.T / 0.1, torch.arange(len(found)))


def test_a_session_tells_what_it_did_not_do_and_a_promise_gets_those_bytes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 32))
    batch = torch.randn(2048, 64)
    room = process_memory.resident_bytes() + 300 * MIB
    options: dict[str, Any] = {"tolerance": 0.0, "sensitivity": False}
    with Session(model, torch.optim.SGD(model.parameters(), 0.0), room, **options) as session:
        assert session.left_alone() == []
        session.step(batch, contrastive)
        (found,) = [each for each in session.left_alone() if each.lever == "splitting"]
        assert found.reason == session.split_refusal
        assert found.saved_bytes is not None
        assert found.saved_bytes > 4 * MIB
        row = next(each for each in session.explain() if each["method"] == "left alone")
        assert (row["reason"], row["saved_bytes"]) == (found.reason, found.saved_bytes)
        least = session.least_feasible_bytes()
    assert least is not None
    tight = least - found.saved_bytes // 2
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with (
        Session(model, optimizer, tight, **options) as session,
        pytest.raises(BudgetError, match="not split because"),
    ):
        session.step(batch, contrastive)
    with Session(model, optimizer, tight, split=True, **options) as session:
        assert session.step(batch, contrastive).micro_batch < len(batch)
