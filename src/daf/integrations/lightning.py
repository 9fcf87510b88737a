"""Lightning within a budget: a strategy for one device, with automatic optimization.

The module's ``training_step`` is the session's loss function. Lightning asks for the loss first,
clears gradients, then asks for the backward pass: the gradient that the session made is kept
meanwhile. Accumulation, clipping, precision, schedules and counters stay Lightning's.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from daf.budget.request import Budget
from daf.core.errors import HostError
from daf.core.replaced import replaced
from daf.core.step_report import StepReport
from daf.session.session import Session
from daf.torch_compat.pytree import tensors_in_batch

_STATE = "daf"  # its key in checkpoints


class DafStrategy(SingleDeviceStrategy):  # type: ignore[misc]
    """Trains on one device within a budget: ``Trainer(strategy=DafStrategy("4GB"))``.

    ``Trainer(strategy="daf")`` has the budget "auto", once this file was imported. ``session``: of
    the training in progress, or of the last one. ``report``: of the last batch.

    Args:
        budget: as ``daf.Session`` takes it.
        device: what the model is on.
        accelerator: Lightning's; so are ``checkpoint_io`` and ``precision_plugin``.
        options: others of ``daf.Session``, such as ``tolerance=0``.
    """

    strategy_name = "daf"

    def __init__(
        self,
        budget: Budget = "auto",
        *,
        device: str | torch.device = "cpu",
        accelerator: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(device, accelerator, checkpoint_io, precision_plugin)
        self.budget, self.options = budget, options
        self.session: Session | None = None
        self.report: StepReport | None = None
        self._resumed: dict[str, Any] | None = None
        self._kept: list[tuple[nn.Parameter, Tensor]] = []

    def setup(self, trainer: Any) -> None:
        """Refuse what does not go through the strategy; Lightning calls this before it trains.

        HostError: the module optimizes manually, or has a backward pass of its own.
        """
        super().setup(trainer)
        module = self.lightning_module
        assert module is not None
        if not module.automatic_optimization or is_overridden("backward", module):
            raise HostError(
                f"asked for a budget for {type(module).__name__}, whose backward pass is its own; "
                "leave that to Lightning (automatic_optimization, no backward()), or call "
                "session.backward in a loop of your own"
            )
        self.session = self.report = None

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's loss, whose gradient the session made.

        HostError: the batch is an iterator, or there is more to return than a loss of parts.
        """
        batch, rest = args[0], args[1:]
        if isinstance(batch, Iterator):
            raise HostError("asked for a step over an iterator, which can be read once only")
        module, trainer = self.lightning_module, self.lightning_module.trainer
        session, logs = self._open_session(), _Logs(batch)
        scaler = getattr(self.precision_plugin, "scaler", None)
        share = trainer.accumulate_grad_batches
        step = super().training_step

        def loss_fn(_: nn.Module, part: Any) -> Any:
            logs.begin(part, is_measuring=session.is_measuring)
            with replaced(module, log=logs.note):
                found = step(part, *rest, **kwargs)
            loss = logs.returned(found) / share
            return loss if scaler is None else scaler.scale(loss)

        index = trainer.fit_loop.epoch_loop.batch_idx
        if index % share == 0:  # Lightning clears these after the loss: the session needs the room
            module.optimizer_zero_grad(trainer.current_epoch, index, self.optimizers[0])
        self.report = session.backward(batch, loss_fn)
        self._keep()
        logs.write(module)
        module.log("daf_peak_bytes", float(session.peak_bytes), batch_size=1)
        loss = torch.tensor(self.report.loss * share, device=self.root_device, requires_grad=True)
        return {**logs.beside_the_loss(), "loss": loss}

    def backward(self, closure_loss: Tensor, *_: Any, **__: Any) -> Tensor:
        """Give parameters the gradient that the session made, between Lightning's hooks."""
        module = self.lightning_module
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        for parameter, gradient in self._kept:
            parameter.grad = gradient
        self._kept = []
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Make the gradient first: room for the update is made when the optimizer begins.

        HostError: the optimizer asks for the gradient several times.
        """
        found = [closure()]

        def once() -> Any:
            if not found:
                raise HostError(
                    f"asked for the gradient again within a step of {type(optimizer).__name__}; "
                    "a budget holds one gradient a step: take another optimizer"
                )
            return found.pop()

        return super().optimizer_step(optimizer, once, model, **kwargs)

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save the session's state with the rest."""
        if self.session is not None:
            checkpoint[_STATE] = self.session.state_dict()
        super().save_checkpoint(checkpoint, *args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint; the next session goes on from its state."""
        found: dict[str, Any] = super().load_checkpoint(*args, **kwargs)
        self._resumed = found.get(_STATE)
        return found

    def teardown(self) -> None:
        """End the session with the training."""
        if self.session is not None:
            self.session.close()
        super().teardown()

    def _open_session(self) -> Session:
        if self.session is None:
            self.session = Session(
                self.lightning_module, self.optimizers[0], self.budget, **self.options
            )
            if self._resumed is not None:
                self.session.load_state_dict(self._resumed)
        return self.session

    def _keep(self) -> None:
        """Take gradients out of the way of Lightning's ``zero_grad``."""
        parameters = self.lightning_module.parameters()
        self._kept = [(each, each.grad) for each in parameters if each.grad is not None]
        for parameter, _ in self._kept:
            parameter.grad = None


class _Logs:
    """What a module logged in the parts of one batch: scalars become means over examples."""

    def __init__(self, batch: Any) -> None:
        self._start = self._place(batch)
        self._calls: dict[str, list[tuple[float, Any, tuple[Any, ...], dict[str, Any]]]] = {}
        self._extras: list[dict[str, Any]] = []
        self._examples, self._is_measuring = 1.0, False

    def begin(self, part: Any, *, is_measuring: bool) -> None:
        """Begin a part; one that starts where the batch does begins all of it again."""
        first = next(iter(tensors_in_batch(part)), None)
        self._is_measuring = is_measuring
        self._examples = float(first.shape[0]) if first is not None and first.dim() else 1.0
        if not is_measuring and self._place(part) == self._start:
            self._calls, self._extras = {}, []

    def note(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Stand in for ``LightningModule.log``."""
        if not self._is_measuring:
            value = value.detach() if isinstance(value, Tensor) else value
            self._calls.setdefault(name, []).append((self._examples, value, args, kwargs))

    def returned(self, found: Any) -> Tensor:
        """Return the loss that ``training_step`` returned, and keep the rest; HostError: none."""
        loss = found.get("loss") if isinstance(found, Mapping) else found
        if not isinstance(loss, Tensor):
            raise HostError(
                f"asked training_step for a loss; it returned {type(found).__name__} without one, "
                "and a step cannot be skipped within a budget: return a loss of 0"
            )
        if not self._is_measuring:
            extras = found.items() if isinstance(found, Mapping) else ()
            self._extras.append({name: each for name, each in extras if name != "loss"})
        return loss

    def write(self, module: Any) -> None:
        """Log it, where Lightning expects that."""
        for name, calls in self._calls.items():
            _, value, args, kwargs = calls[-1]
            if len(calls) > 1:
                with suppress(TypeError):  # a metric object gathers by itself
                    total = sum(examples * each for examples, each, *_ in calls)
                    value = total / sum(examples for examples, *_ in calls)
            module.log(name, value, *args, **kwargs)

    def beside_the_loss(self) -> dict[str, Any]:
        """Return what the batch's step returned beside its loss; HostError if only parts ran."""
        if len(self._extras) > 1 and any(self._extras):
            raise HostError(
                f"asked training_step for {sorted(self._extras[0])} beside the loss; found those "
                "of micro-batches, which cannot be joined: log them, or give split=False"
            )
        return self._extras[0] if self._extras else {}

    @staticmethod
    def _place(batch: Any) -> int | None:
        first = next(iter(tensors_in_batch(batch)), None)
        return None if first is None else first.data_ptr()


StrategyRegistry.register(DafStrategy.strategy_name, DafStrategy, DafStrategy.__doc__ or "")
