"""Hugging Face's ``Trainer``, and what inherits from it (TRL's trainers), within a budget.

The trainer's own ``training_step`` runs as ever, once for each batch. The loss that it asks for is
computed, and its gradient added to ``.grad``, by ``session.backward``.
"""

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from daf.budget.request import Budget
from daf.core.errors import HostError
from daf.core.replaced import replaced
from daf.core.step_report import StepReport
from daf.core.units import format_bytes
from daf.integrations.preferences import IN_PAIRS, are_preferences
from daf.session.session import Session
from daf.torch_compat.pytree import tensors_in_batch

_CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")
_logger = logging.getLogger("daf")
Compute = Callable[[nn.Module, Any], Any]


class PendingLoss:
    """The stand-in of one loss at a time, computed only when the host asks for its gradient.

    Hosts compute a loss, divide or scale it, and call backward on the result. A stand-in of value 1
    goes through the same steps; its derivative says what they multiply the loss by.
    """

    def __init__(self) -> None:
        self._stand_in: Tensor | None = None
        self._compute: Compute | None = None
        self._batch: Any = None

    def ask(self, batch: Any, compute: Compute, device: torch.device) -> Tensor:
        """Return a stand-in for ``compute(model, batch)``: a float32 scalar on ``device``.

        HostError: the loss before has no gradient yet.
        """
        if self._stand_in is not None:
            raise HostError(
                "asked for a second loss before the backward pass of the first; within a budget "
                "each loss of a step needs a backward pass of its own: return their sum"
            )
        self._stand_in = torch.ones((), device=device, requires_grad=True)
        self._compute, self._batch = compute, batch
        return self._stand_in

    def take(self, loss: Tensor) -> tuple[Any, Compute]:
        """Return the batch, and what computes the loss for which ``loss`` stands.

        HostError: ``loss`` is not what was asked for, times a number.
        """
        stand_in, compute, batch = self._stand_in, self._compute, self._batch
        self.forget()
        if stand_in is None or compute is None:
            raise HostError(
                "asked for the gradient of a loss that did not come from the host's own loss "
                "function, so that its memory is in no plan; compute it there"
            )
        (slope,) = torch.autograd.grad(loss, stand_in, allow_unused=True)
        if slope is None or not torch.equal(slope, loss.detach()):
            raise HostError(
                "asked for the gradient of more than the host's own loss times a number; add other "
                "terms inside the loss function, which is what runs within the budget"
            )
        factor = float(slope)
        return batch, lambda model, part: compute(model, part) * factor

    def forget(self) -> None:
        """Drop a loss whose gradient nobody asked for."""
        self._stand_in = self._compute = self._batch = None


def gauge(report: StepReport) -> str:
    """Return a step's peak beside its budget, as a bar in one line of text."""
    peak = format_bytes(report.peak_bytes)
    if report.budget_bytes is None:
        return peak
    full = min(10, round(10 * report.peak_bytes / report.budget_bytes))
    return f"{'▰' * full}{'▱' * (10 - full)} {peak} of {format_bytes(report.budget_bytes)}"


def budgeted(trainer: Trainer, budget: Budget, **options: Any) -> Trainer:
    """Return the trainer itself, which from now on trains within ``budget``.

    Args:
        trainer: any ``Trainer``; overrides of its methods keep working.
        budget: as ``daf.Session`` takes it.
        options: others of ``daf.Session``, such as ``tolerance=0``.

    Raises:
        HostError: it trains in several processes or on several GPUs.
    """
    kind = type(trainer)
    if not issubclass(kind, BudgetedTrainer):
        same = {"__doc__": kind.__doc__, "__module__": kind.__module__}
        trainer.__class__ = type(kind.__name__, (BudgetedTrainer, kind), same)
    trainer.bound(budget, options)
    return trainer


class BudgetedTrainer(Trainer):  # type: ignore[misc]
    """A ``Trainer`` within a budget; a mixin before any other: ``(BudgetedTrainer, SFTTrainer)``.

    ``daf_session``: the session of the training in progress, or of the last one; None before.
    ``daf_report``: of the last batch.

    Args:
        budget: as ``daf.Session`` takes it; None: no limit.
        session_options: others of ``daf.Session``, by name.
        args: those of the trainer; ``kwargs`` too.

    Raises:
        HostError: it trains in several processes or on several GPUs.
    """

    daf_session: Session | None = None
    daf_report: StepReport | None = None

    def __init__(
        self,
        *args: Any,
        budget: Budget = None,
        session_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.bound(budget, session_options or {})

    def bound(self, budget: Budget, options: Mapping[str, Any]) -> None:
        """Use this budget, and ``options`` of ``daf.Session``, from the next ``train`` on.

        HostError: it trains in several processes or on several GPUs.
        """
        kind = self.accelerator.distributed_type.value
        if kind != "NO" or self.args.n_gpu > 1:
            raise HostError(
                f"asked for a budget for one process on one device; found {self.args.n_gpu} GPUs "
                f"and the distributed type {kind}; set CUDA_VISIBLE_DEVICES to one, and start "
                "without a launcher"
            )
        self._daf_budget, self._daf_options = budget, dict(options)
        self._daf_pending = PendingLoss()
        if not any(isinstance(each, SessionState) for each in self.callback_handler.callbacks):
            self.add_callback(SessionState())

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the host does; the session ends with it, whatever it raises."""
        self.daf_session = self.daf_report = None
        try:
            with self._without_checkpointing():
                return super().train(*args, **kwargs)
        finally:
            self._end_session()

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """Run the host's own step, whose backward pass is the session's."""
        self._daf_pending.forget()
        compute = partial(self._loss_later, self.compute_loss)
        backward = partial(self._backward, self._open_session())
        with replaced(self, compute_loss=compute), replaced(self.accelerator, backward=backward):
            found: Tensor = super().training_step(model, *args, **kwargs)
        return found

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log bytes and micro-batches beside what the host logs."""
        session, report = self.daf_session, self.daf_report
        if session is not None and report is not None:
            logs["daf_peak_bytes"] = session.peak_bytes
            logs["daf_budget_bytes"] = session.budget_bytes or 0
            logs["daf_predicted_peak_bytes"] = session.predicted_peak_bytes or 0
            logs["daf_evicted_bytes"] = session.evicted_bytes
            logs["daf_micro_batch"] = report.micro_batch
        super().log(logs, *args, **kwargs)

    def _loss_later(self, compute_loss: Any, model: nn.Module, inputs: Any, **kwargs: Any) -> Any:
        if kwargs.get("return_outputs"):
            raise HostError(
                "asked compute_loss for a step's outputs, which are not kept within a budget; "
                "read them inside compute_loss"
            )

        def compute(_: nn.Module, part: Any) -> Any:
            with self.compute_loss_context_manager():
                return compute_loss(model, copy.copy(part), **kwargs)  # which may take labels out

        return self._daf_pending.ask(inputs, compute, self.args.device)

    def _backward(self, session: Session, loss: Tensor, **kwargs: Any) -> None:
        if kwargs:
            raise HostError(f"asked for a backward pass with {kwargs}, which needs another's loop")
        batch, compute = self._daf_pending.take(loss)
        share = self.accelerator.gradient_accumulation_steps
        rows: list[int] = []  # of each part; the last ones count

        def loss_fn(model: nn.Module, part: Any) -> Any:  # names self, whose counts are restored
            rows.append(next((len(e) for e in tensors_in_batch(part) if e.dim()), 1))
            found, scaler = compute(model, part) / share, self.accelerator.scaler
            return found if scaler is None else scaler.scale(found)

        if self.compute_loss_func is not None:  # a proof holds for this loss only
            loss_fn.__wrapped__ = self.compute_loss_func  # type: ignore[attr-defined]
        before = {name: len(values) for name, values in self._metrics_so_far().items()}
        self.daf_report = session.backward(batch, loss_fn)
        for name, values in self._metrics_so_far().items():
            if added := values[before.get(name, 0) :]:  # one of each part
                counts = rows[-len(added) :] if len(added) <= len(rows) else [1] * len(added)
                total = sum(each * n for each, n in zip(added, counts, strict=True))
                values[before.get(name, 0) :] = [total / sum(counts)]
        with torch.no_grad():
            loss.fill_(self.daf_report.loss * share)  # the host returns and logs it
        self._show(self.daf_report)

    def _metrics_so_far(self) -> dict[str, list[Any]]:
        """Return TRL's lists of metrics, to which each loss adds."""
        found = getattr(self, "_metrics", {}).get("train", {})
        return {name: each for name, each in found.items() if isinstance(each, list)}

    def _end_session(self) -> None:
        if self.daf_session is not None:
            self.daf_session.close()

    def _open_session(self) -> Session:
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)
        session = self.daf_session
        if session is not None and session.optimizer is optimizer:
            return session
        self._end_session()
        model = self.accelerator.unwrap_model(self.model)
        pairs = {"split": IN_PAIRS} if are_preferences(self) else {}
        options = pairs | self._daf_options
        session = self.daf_session = Session(model, optimizer, self._daf_budget, **options)
        SessionState.adopt(self, session)
        return session

    def _show(self, report: StepReport) -> None:
        for each in self.callback_handler.callbacks:
            if (bar := getattr(each, "training_bar", None)) is not None:
                bar.set_postfix_str(gauge(report), refresh=False)

    @contextmanager
    def _without_checkpointing(self) -> Iterator[None]:
        """Leave recomputation to the session: two that replay the same calls pay twice."""
        asked = [name for name in _CHECKPOINTING if getattr(self.args, name, False)]
        parts = [each for each in self.model.modules() if getattr(each, _CHECKPOINTING[1], False)]
        if asked or parts:
            _logger.warning("daf: activation checkpointing is off; the plan says what is replayed")
        with ExitStack() as stack:
            stack.enter_context(replaced(self.args, **dict.fromkeys(asked, False)))
            for each in parts:
                stack.enter_context(replaced(each, gradient_checkpointing=False))
            yield


class SessionState(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Keeps the session's state in each checkpoint's ``trainer_state.json``."""

    session: Session | None = None
    saved: Mapping[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        """Return what ``Trainer`` saves; it calls this."""
        saved = self.saved if self.session is None else self.session.state_dict()
        return {"args": {}, "attributes": {"saved": saved}}

    @staticmethod
    def adopt(trainer: Trainer, session: Session) -> None:
        """Save this session's state from now on; begin it as the resumed checkpoint's ended."""
        name, known = SessionState.__name__, trainer.state.stateful_callbacks
        # A plain checkpoint has none.
        found = known.setdefault(name, {"args": {}, "attributes": {}})
        if (saved := found["attributes"].get("saved")) is not None:
            session.load_state_dict(saved)
        for each in trainer.callback_handler.callbacks:
            if isinstance(each, SessionState):
                each.session = session
