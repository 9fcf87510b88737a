"""Budgets that fall in mid-step, at random moments, in operator families and in sessions."""

from __future__ import annotations

import copy
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import daf
from daf.core.errors import DafError
from daf.memory import RecyclingAllocator, stats
from daf.memory.process_memory import resident_bytes
from daf_bench.faults.children import Outcome, count_outcome, in_child
from daf_bench.faults.family import Step, digest, seeded
from daf_bench.faults.refusals import all_families, answered, in_threads, plain_digest

_IN_ONE_CHILD = 25  # falls; the first meets libraries that have made nothing yet
_OF_A_SESSION = 5  # falls in a child: they take seconds each, and a minute is a hang
_SESSION_SHARE = 0.04  # of the falls: a session measures and plans before the first one
_SESSION_ROOM_BYTES = 256 * 2**20
_RELATIVE_ERROR = 1e-3  # parts of a batch add up in another order

Report = Callable[[str, int, int], None]


def run_falls(count: int, seed: int, on_progress: Report = lambda *_: None) -> dict[str, int]:
    """Let a limit fall ``count`` times in mid-step; each step raises or is right, so is the next.

    Args:
        count: falls, one of 25 of them a budget's in a session, the others of the account's limit
            during an operator family's step.
        seed: of weights, data, moments and depths.
        on_progress: called with what falls next, and how many falls are done of how many.

    Returns:
        ``falls_tried``, ``crashes`` (ended by a signal), ``hangs`` (over a minute), ``wrong``
        (other bits than plain's, an error that is no ``DafError`` from a session, or a step after
        the fall that fails).
    """
    torch.set_num_threads(1)  # before anything forks
    total = dict.fromkeys(("falls_tried", "crashes", "hangs", "wrong"), 0)
    for name, falls, work in _children(count, seed):
        on_progress(name, total["falls_tried"], count)
        count_outcome(total, in_child(work), "falls_tried", falls)
    return total


def _children(count: int, seed: int) -> Iterator[tuple[str, int, Callable[[], Outcome]]]:
    """Yield a name, a number of falls, and what tries them in a child."""
    draw = random.Random(seed)
    of_sessions = int(count * _SESSION_SHARE)
    for falls in _parts(of_sessions, _OF_A_SESSION):
        yield "sessions", falls, partial(_session_falls, falls, draw.getrandbits(32))
    families = list(all_families().values())
    draw.shuffle(families)
    digests: dict[tuple[str, int], str] = {}
    for place, falls in enumerate(_parts(count - of_sessions, _IN_ONE_CHILD)):
        family, threads = families[place % len(families)], draw.choice((1, 2))
        key = family.name, threads
        if key not in digests:
            plainly = partial(in_threads, threads, partial(plain_digest, family, seed))
            digests[key] = answered(in_child(plainly), family)
        make = partial(seeded, seed, family)
        work = partial(_falls, make, falls, digests[key], draw.getrandbits(32))
        yield family.name, falls, partial(in_threads, threads, work)


def _parts(count: int, in_one: int) -> list[int]:
    return [min(in_one, count - first) for first in range(0, count, in_one)]


def _falls(make: Callable[[], Step], falls: int, expected: str, seed: int) -> Outcome:
    draw, wrong, longest_s = random.Random(seed), 0, 0.05
    step = make()
    with RecyclingAllocator() as allocator:

        def fall(depth: float) -> None:
            held_bytes = stats()["held_bytes.current"]
            allocator.limit_bytes = int(held_bytes * depth) + draw.randrange(1 << 18)

        for _ in range(falls):
            with _falling(partial(fall, draw.choice((0.0, 0.5, 0.9, 1.0))), draw, longest_s):
                results = _attempted(step)
            allocator.limit_bytes = None
            is_wrong = results is not None and digest(results) != expected
            start_s = time.perf_counter()
            is_wrong |= digest(step()) != expected
            longest_s = time.perf_counter() - start_s
            wrong += is_wrong
    return Outcome(falls, wrong)


def _attempted(step: Step) -> list[Tensor] | None:
    """Return a step's results, whose hash takes memory itself; None if it raised."""
    try:
        return list(step())
    except Exception:  # any will do: memory was refused
        return None


@contextmanager
def _falling(fall: Callable[[], None], draw: random.Random, longest_s: float) -> Iterator[None]:
    """Call ``fall`` from another thread, at a random moment of the time given."""
    wait_s = draw.random() * longest_s

    def later() -> None:
        time.sleep(wait_s)
        fall()

    thread = threading.Thread(target=later)
    thread.start()
    try:
        yield
    finally:
        thread.join()


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(48, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        rows = images.flatten(1, 2).transpose(0, 1)
        found: Tensor = self.head(self.inner(rows)[0][-1])
        return found


def _models() -> tuple[Callable[[], nn.Module], ...]:
    def convolutional() -> nn.Module:
        first = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())
        second = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.GELU(), nn.MaxPool2d(2))
        return nn.Sequential(first, second, nn.Flatten(), nn.Linear(32 * 24 * 24, 10))

    def attending() -> nn.Module:
        layer = nn.TransformerEncoderLayer(48, 4, 96, dropout=0.0, batch_first=True)
        return nn.Sequential(nn.Flatten(1, 2), layer, nn.Flatten(), nn.Linear(144 * 48, 10))

    return convolutional, _Recurrent, attending


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _session_falls(falls: int, seed: int) -> Outcome:
    """Let a session's budget fall, in steps of ever other batch sizes, and restore it."""
    draw, wrong = random.Random(seed), 0
    torch.manual_seed(seed)
    torch.set_num_threads(draw.choice((1, 2)))
    model = draw.choice(_models())()
    model(torch.randn(2, 3, 48, 48))
    ample = resident_bytes() + _SESSION_ROOM_BYTES
    optimizer = torch.optim.AdamW(model.parameters())
    longest_s, tolerance = 0.05, draw.choice((0.0, None))
    with daf.Session(model, optimizer, ample, tolerance=tolerance) as session:
        session.step(_batch(32), _loss)
        for _ in range(falls):

            def fall(depth: float = draw.random()) -> None:
                session.budget = int(session.held_bytes() * (0.2 + depth))

            step = _Judged(session, draw.randrange(8, 48), is_exact=tolerance == 0.0)
            with _falling(fall, draw, longest_s):
                step.attempt()
            session.budget = ample
            wrong += not step.is_right_or_refused
            step = _Judged(session, 32, is_exact=tolerance == 0.0)
            start_s = time.perf_counter()
            step.run()
            longest_s = time.perf_counter() - start_s
            wrong += not step.is_right
    return Outcome(falls, wrong)


def _batch(examples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(examples, 3, 48, 48), torch.randint(10, (examples,))


class _Judged:
    """A step of a session; plain PyTorch's gradient is taken before, while nothing falls."""

    def __init__(self, session: daf.Session, examples: int, *, is_exact: bool) -> None:
        self._session = session
        self._batch = _batch(examples)
        self._steps_loss: float | None = None
        self._expected: Tensor | None = None
        if is_exact:
            plain = copy.deepcopy(session.model)
            plain.zero_grad()
            _loss(plain, self._batch).backward()  # type: ignore[no-untyped-call]
            self._expected = _gradient(plain)

    def attempt(self) -> None:
        """Step, or be refused."""
        with suppress(DafError):
            self.run()

    def run(self) -> None:
        """Step."""
        self._steps_loss = self._session.step(self._batch, _loss).loss

    @property
    def is_right_or_refused(self) -> bool:
        """True if the step was refused, or was right."""
        return self._steps_loss is None or self.is_right

    @property
    def is_right(self) -> bool:
        """True if the loss is finite and, where all is exact, the gradient is plain's."""
        loss = self._steps_loss
        if loss is None or not 0.0 <= loss < 1e6:
            return False
        if self._expected is None:
            return True
        difference = (_gradient(self._session.model) - self._expected).norm()
        return float(difference / self._expected.norm()) < _RELATIVE_ERROR


def _gradient(model: nn.Module) -> Tensor:
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
