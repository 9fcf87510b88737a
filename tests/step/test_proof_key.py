"""Proofs are kept with what they were taken for, and taken anew for anything else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf import Session
from daf.memory import process_memory
from daf.profiling.split_proof import SplitProof
from daf.step.splitting import kind_of, proof_key


class Branching(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, width), nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(torch.tanh(self.first(x)))
        return result if x.dtype not in {torch.float16, torch.bfloat16} else result.float()


class Reading(Branching):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2.0


def mean(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def doubled(model: nn.Module, batch: Any) -> Tensor:
    return 2.0 * F.cross_entropy(model(batch[0]), batch[1])


def through(inner: Callable[..., Any]) -> Callable[..., Any]:
    return lambda model, batch: inner(model, batch)


def by_name(model: nn.Module, batch: Any) -> Tensor:
    return mean(model, batch)


class Loss:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return self.factor * mean(model, batch)


def images(size: int = 12) -> tuple[Tensor, Tensor]:
    torch.manual_seed(size)
    return torch.randn(size, 6), torch.randint(0, 5, (size,))


def test_a_key_does_not_depend_on_values_or_sizes() -> None:
    first = proof_key(Branching(), images(), mean)
    assert proof_key(Branching(), images(), mean) == first
    assert proof_key(Branching(32), images(7), mean) == first
    assert proof_key(Branching(), images(), partial(mean)) == first
    assert proof_key(Branching(), images(), Loss(1.0)) == proof_key(
        Branching(), images(), Loss(2.0)
    )


@pytest.mark.parametrize("what", ["loss", "model", "batch", "dtype", "mode", "frozen", "version"])
def test_a_key_changes_with_whatever_a_proof_depends_on(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch, loss = Branching(), images(), mean
    first = proof_key(model, batch, loss)
    if what == "mode":
        model.eval()
    if what == "frozen":
        model.first.bias.requires_grad_(False)
    if what == "version":
        monkeypatch.setattr(torch, "__version__", "2.99.0")
    x, y = batch
    others: dict[str, tuple[Any, Any, Callable[..., Any]]] = {
        "loss": (model, batch, doubled),
        "model": (Reading(), batch, loss),
        "batch": (model, [x, y], loss),
        "dtype": (model, (x.double(), y), loss),
    }
    assert proof_key(*others.get(what, (model, batch, loss))) != first


@pytest.mark.parametrize("key", [proof_key, kind_of])
def test_what_a_loss_closes_over_belongs_to_it(key: Callable[..., Any]) -> None:
    model, batch = Branching(), images()
    first = key(model, batch, through(mean))
    assert key(model, batch, through(mean)) == first
    assert key(model, batch, through(partial(mean))) == first
    assert key(model, batch, through(doubled)) != first
    assert key(model, batch, through(through(doubled))) != key(model, batch, through(through(mean)))


@pytest.mark.parametrize("key", [proof_key, kind_of])
@pytest.mark.parametrize("loss", [by_name, Loss(1.0)])
def test_what_a_loss_finds_in_its_module_belongs_to_it(
    key: Callable[..., Any], loss: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = Branching(), images()
    first = key(model, batch, loss)
    assert key(model, batch, loss) == first
    monkeypatch.setitem(globals(), "mean", doubled)
    assert key(model, batch, loss) != first


def test_a_key_is_the_same_in_another_process() -> None:
    """Whose sets have another order: its strings' hashes are of another seed."""
    source = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from tests.step.test_proof_key import Branching, images, mean, proof_key\n"
        "print(hash('a'), proof_key(Branching(), images(), mean))"
    )
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    done = subprocess.run(
        [sys.executable, "-c", source, str(Path(__file__).parents[2])],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONHASHSEED": seed},
    )
    hashed, found = done.stdout.split()
    assert int(hashed) != hash("a")
    assert found == proof_key(Branching(), images(), mean)


@pytest.mark.parametrize(("loss", "is_proven_anew"), [(mean, False), (doubled, True)])
def test_a_run_resumed_with_other_code_is_proven_anew(
    loss: Callable[..., Any], is_proven_anew: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = Branching(), images()
    budget = process_memory.resident_bytes() + 10**9
    proofs: list[Any] = []
    run = SplitProof.run
    monkeypatch.setattr(SplitProof, "run", lambda *a: proofs.append(a) or run(*a))

    def session_of() -> Session:
        return Session(model, torch.optim.SGD(model.parameters(), 0.0), budget, tolerance=0)

    with session_of() as session:
        session.step(batch, mean)
        state = session.state_dict()
    assert len(proofs) == 1
    with session_of() as session:
        session.load_state_dict(state)
        session.step(batch, loss)
        assert session.split_refusal == ""
    assert len(proofs) == (2 if is_proven_anew else 1)
