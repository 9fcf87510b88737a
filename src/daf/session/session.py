"""One training step inside a byte budget: profile, plan, execute, adapt.

``Session`` measures a few small steps and plans. It runs and measures the first full-size step
under the tightest plan, then goes on with the fastest plan that fits.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from daf.budget.request import Budget, Scope
from daf.core.errors import BudgetError, ClosedSessionError, OptionError
from daf.core.plan import Plan
from daf.core.step_report import StepReport
from daf.core.units import parse_optional_bytes
from daf.memory.owners import owners
from daf.offload.spill import SpillOptions
from daf.planning.policies import strategy_named
from daf.pool.store import PoolOptions
from daf.profiling.model_memory import parameter_bytes
from daf.sensitivity.result import Sensitivity
from daf.session import arguments
from daf.session.parts import SessionReadings, make_parts
from daf.session.warm_start import WarmStart
from daf.step.batch_cut import BatchDim
from daf.step.context import StepContext
from daf.step.dry_run import build_lazy
from daf.step.evaluation import Evaluation
from daf.step.gradient_release import ReleaseMode
from daf.step.microbatch import LossFunction, check_loss
from daf.step.splitting import Split, Splitting, proof_key
from daf.torch_compat import compiler
from daf.torch_compat.operator_mode import modes_restored
from daf.torch_compat.out_of_memory import out_of_memory

# A session's arguments that say nothing of how its steps are planned, and those that are folders.
_OF_THIS = frozenset(
    ["self", "__class__", "model", "optimizer", "budget", "seed", "baseline_bytes", "cache"]
)
_PLACES = frozenset({"rollback"})


class Session(SessionReadings):
    """Trains a model within a byte budget.

    The budget bounds the whole process for a model on the CPU; on a GPU, what PyTorch reserves
    there (``memory.device``). Peaks are measured in that memory.

    Args:
        model: any ``nn.Module`` on one device.
        optimizer: any ``torch.optim.Optimizer`` over the model's parameters.
        budget: most bytes held, baseline included: an int or ``"700MB"``; a fraction of the machine
            as 0.5 or ``"50%"``; ``"auto"`` for what the machine can spare; or a function that
            returns one of these, called every 20 ms. None trains without a limit.
            ``session.budget`` may be set at any moment, from any thread. Tighter limits of the
            system (memory cgroups, free memory, ulimits) come first and are followed.
        bits: the same at every site (1 … 8, ``"exact"``, ``"plain"``). None lets the planner
            choose, and means ``"plain"`` without a budget.
        fused: without a budget, fuse normalisations with what follows them, GELU and SiLU, and
            chunk large convolutions and linear layers, wherever a first step proves that the same
            (``compress``). Under a budget the planner fuses where that pays.
        policy: how the planner chooses under a budget: ``"optimal"`` (default), or for comparison
            ``"sage"``, ``"checkpoint"``, ``"checkpoint-static"``, ``"accumulate"``, ``"reduce"``,
            ``"quantize"``, ``"daf"``, ``"daf-channels"`` (``planning.policies``).
        tolerance: most variance that codes may add to the gradient, relative to the batch's own (0:
            exact treatments only). None: a seventh, or as much as the budget takes. Until the two
            are measured, two bits everywhere are assumed to add a seventh.
        seed: int in [0, 2**64), the seed of the codes' random rotations.
        baseline_bytes: bytes of the process before the model existed; by default the resident size
            now, less the model.
        allow_batchnorm_split: permit micro-batches although batch statistics then change.
        split: "auto" cuts a batch only where a few examples have shown that the parts' losses and
            gradients add up to the whole's; False never cuts; True takes your word in place of that
            proof; a ``BatchSplit`` cuts batches of your own. ``split_refusal`` says why not.
        batch_dim: the dimension that runs over examples, the same in every tensor that has one, or
            one (None: not cut) for each field of the batch. None: the first, where that is clear.
        operators: "auto" fuses and chunks operators where that pays and was proven the same;
            "pytorch" runs PyTorch's own, always.
        pool_bytes: most bytes of codes, in the process and on each GPU, as bytes or ``"200MB"``;
            None: no cap of their own. Below what codes need, planes of ``rotated`` codes are
            evicted, least important first, down to one bit; reports say how much. A ``PoolOptions``
            (``daf.pool.store``) evicts whole activations, or grows by fixed steps. The attribute
            may be set at any moment, from any thread.
        release_gradients: step each parameter inside backward as its gradient completes, and free
            the gradient (``grad`` is None afterwards), with the same result bit for bit. Where
            something needs gradients later, True raises, and ``"auto"`` keeps them;
            ``release_refusal`` says why. The first update commits the step: refused memory then
            leads to eviction and at last to an overrun, not to a retry.
        spill: where tensors whose treatment is *spill* go (to disk), and how many bytes.
        sensitivity: True: measure what each site's code adds to the gradient, and plan by that,
            after the first plan and then whenever 2 % of the training time allows. False: never. Or
            what an earlier run of this model found.
        rollback: on divergence under codes (losses that are inf, NaN, or repeatedly far above the
            usual ones), return once to the last good state with wider codes; the second time is an
            error. ``StepReport.rolled_back_to`` reports it. The state is written to this file
            (True: a temporary one) every 100 steps.
        scope: "process" bounds this process. "tree" bounds its child processes with it (the workers
            of a data loader, say): what only they hold is subtracted as it grows. They themselves
            are never limited.
        cache: begin with what an earlier session of the same job measured, and keep what this one
            does, in ``$DAF_CACHE`` (by default in the user's caches; empty: nowhere). Other code,
            sizes, options or versions are another job; how batches are cut is always proven anew.
        host_bytes: for a model on a GPU, most bytes of pinned host memory for codes, as bytes or
            ``"4GB"``; None: none. Codes leave the GPU beside the computation, packed there or by
            the CPU as measured rates say, and return before backward needs them. Under a budget the
            planner sends what pays, without one all codes go.

    Raises:
        ReleaseRefusedError: ``release_gradients`` is True, and the optimizer or model forbid it.
        UnitError: the budget, ``pool_bytes`` or ``host_bytes`` cannot be read.
        PoolFullError: ``pool_bytes`` was given, and the system grants no addresses.
        PlatformError: a budget for a model on several devices, or on one whose memory cannot be
            bounded; ``host_bytes`` for a model on the CPU.
        UnknownNameError: no policy has the name ``policy``, or these ``bits``.
        OptionError: no module, no optimizer; ``bits`` and ``policy`` together; ``fused`` under a
            budget; ``host_bytes`` where nothing would be sent; another argument's wrong value.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        budget: Budget,
        *,
        bits: int | str | None = None,
        fused: bool = False,
        policy: str | None = None,
        tolerance: float | None = None,
        seed: int = 0,
        baseline_bytes: int | None = None,
        allow_batchnorm_split: bool = False,
        split: Split = "auto",
        batch_dim: BatchDim = None,
        operators: arguments.Operators = "auto",
        pool_bytes: PoolOptions | str | int | None = None,
        release_gradients: ReleaseMode = False,
        spill: SpillOptions | None = None,
        sensitivity: Sensitivity | bool = True,
        rollback: str | Path | bool = False,
        host_bytes: str | int | None = None,
        scope: Scope = "process",
        cache: bool = True,
    ) -> None:
        given = dict(locals())
        arguments.check_trained(model, optimizer)
        arguments.check_kinds(given)
        self.model, self.optimizer = model, optimizer
        memory = arguments.asked_memory(model, budget)
        if baseline_bytes is None:
            baseline_bytes = max(0, memory.held_bytes() - parameter_bytes(model))
        self.baseline_bytes, self._seed = baseline_bytes, seed
        self._splitting = Splitting(split, batch_dim)
        self._proven_for: str | None = None
        self._is_resumed = False
        of_parts = {name: given[name] for name in given.keys() - _OF_THIS - {"split", "batch_dim"}}
        of_parts["baseline_bytes"] = self.baseline_bytes
        parts = make_parts(model, optimizer, budget, memory, **of_parts)
        super().__init__(parts)
        options = {name: given[name] for name in sorted(given.keys() - _OF_THIS - _PLACES)}
        plans, noise = self._plan_controller, self._noise
        known = (model, optimizer, memory, plans, noise, self._splitting, options)
        self._warm_start = WarmStart(*known, is_wanted=cache)
        self._evaluation = Evaluation(model, self._splitting, parts.keeper)
        self._is_closed = False
        parts.end_with(self)
        if budget is not None:
            parts.keeper.drop_code()  # of loading
        memory.reset_peak()

    def __enter__(self) -> "Session":
        self._refuse_if_closed()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Undo what was set in the process (see ``settings``), and stop watching limits.

        Waits for another thread's step; none can follow. One that is collected undoes the same.
        """
        try:
            with owners.turn:
                self._warm_start.keep()
        finally:
            self._is_closed = True
            self._parts.close()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Wait for other threads' sessions; leave PyTorch's modes as found, if interrupted too."""
        # Raises ClosedSessionError if the session was closed.
        with owners.turn, modes_restored():
            self._refuse_if_closed()
            try:
                with self._keeper.turn():
                    yield
            except BudgetError as error:
                found = out_of_memory(error, self._keeper.memory_name)
                if self._budget_controller.is_anothers:
                    found.add_note(
                        "daf: another session of this process has this budget, which bounds both; "
                        "close it, or raise its budget too"
                    )
                raise found from error.__cause__

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise ClosedSessionError(
                "asked a session to go on after it was closed; make another over the same model "
                "and optimizer, with load_state_dict(old.state_dict()) to keep its plan"
            )

    @property
    def budget(self) -> Budget:
        """The budget asked for; set at any moment, from any thread, it acts at once.

        A lower budget in mid-step returns recycled memory and evicts planes before this returns.
        ``Session`` retries the step under a tighter plan if it needs more, and replans the next.

        Raises:
            UnitError: the value is no budget; the one before stays.
            ClosedSessionError, PlatformError: it was closed, or the model is elsewhere now.
            UnknownNameError: the session's ``bits`` are none that plans under a budget know.
        """
        return self._budget_controller.asked

    @budget.setter
    def budget(self, value: Budget) -> None:
        self._refuse_if_closed()
        if value is not None:
            arguments.refuse_budget_elsewhere(self.model, self._runner.counters.memory)
            strategy_named(self._plan_controller.selector.constraints.policy)
        self._budget_controller.ask(value)

    @property
    def budget_bytes(self) -> int | None:
        """The budget in force, less than asked under tighter limits; setting it sets ``budget``."""
        return self._budget_controller.budget_bytes

    @budget_bytes.setter
    def budget_bytes(self, value: int | None) -> None:
        self.budget = parse_optional_bytes(value)

    @property
    def pool_bytes(self) -> int | None:
        """The most bytes of codes; setting it acts at once."""
        return self._capture.pool_bytes

    @pool_bytes.setter
    def pool_bytes(self, value: str | int | None) -> None:
        self._capture.pool_bytes = parse_optional_bytes(value)

    @property
    def began_warm(self) -> bool:
        """True if what an earlier session of the same job measured is where this one began."""
        return self._warm_start.has_begun

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None before ``prepare``."""
        return self._plan_controller.selector.plan

    @plan.setter
    def plan(self, value: Plan | None) -> None:
        self._plan_controller.selector.settle_on(value)
        self._warm_start.stop()  # it is the user's

    def prepare(
        self, batch: Any, loss_fn: LossFunction, on_progress: Callable[[str], None] | None = None
    ) -> Plan:
        """Profile on this batch and plan; model, gradients and random states stay unchanged.

        Args:
            batch: as ``step`` takes it.
            loss_fn: as ``step`` takes it.
            on_progress: called with what is about to be measured. None: a notebook shows it.

        Raises:
            BudgetError: no plan fits; ``least_bytes`` is the least budget that would.
            ClosedSessionError: the session was closed.
        """
        with self._turn():
            return self._plan_controller.prepare(self._context(batch, loss_fn), on_progress)

    def step(
        self, batch: Any, loss_fn: LossFunction, *, max_grad_norm: float | None = None
    ) -> StepReport:
        """Train one step: the gradient of the mean loss over the batch, then the optimizer.

        A batch with more bytes than any before it is profiled and planned for anew, and so is one
        of another structure, or under another loss function. Sessions of several threads take
        turns: a loss function must not wait for another thread's step. An optimizer that asks for
        the loss anew (LBFGS, SAM) does so by ``backward``; the report is that of its first pass.

        Args:
            batch: any nest of tensors, or any object. What cannot be cut into examples runs whole.
            loss_fn: ``loss_fn(model, batch)`` returns a scalar mean loss, or ``(sum, weight)``.
            max_grad_norm: clip the gradient of all parameters to this norm before the update, as
                ``torch.nn.utils.clip_grad_norm_``; the report has the norm before.

        Raises:
            DataError: the batch is empty, or not as ``batch_dim`` says; ``loss_fn`` is no loss.
            BudgetError: the budget cannot hold the step; a ``torch.OutOfMemoryError`` too.
            ClosedSessionError: the session was closed.
            OptionError: ``max_grad_norm`` is not above 0.
            PoolFullError: ``pool_bytes`` cannot hold the codes, and no tighter plan is known.
            NonFiniteLossError: the loss is inf or NaN; parameters and buffers are untouched.
            ReleaseRefusedError: gradients must be released, and something needs them later.
            CommittedStepError: backward failed after parameters had been updated.
            DivergedError: with ``rollback``, the run diverged again, or codes cannot be wider.
        """
        norm = arguments.checked_norm(max_grad_norm)
        if not (passes := compiler.asks_anew(self.optimizer)):
            with self._turn():
                return self._run(batch, loss_fn, norm)
        reports = []

        def closure() -> float:
            self.optimizer.zero_grad()
            reports.append(self.backward(batch, loss_fn))
            self._runner.clip(norm)
            return reports[-1].loss

        if passes == "second":
            closure()
        with self._runner.refusal_told():  # the optimizer's own memory
            self.optimizer.step(closure)
        return reports[0]

    def backward(self, batch: Any, loss_fn: LossFunction) -> StepReport:
        """Add the gradient of the mean loss to ``.grad``, within the budget; update nothing.

        In place of ``loss_fn(model, batch).backward()`` in a loop that clips, scales, accumulates
        or steps several optimizers itself: gradients are the loop's own, so that it clears them.
        Every update of the model's parameters stays in the budget, whichever optimizer makes it:
        room is made before it, or ``optimizer.step()`` raises BudgetError and changes nothing. One
        that needs a closure is called with one that clears gradients and calls this. The report
        counts this call as one step. Its loss is unscaled under a ``GradScaler``.

        Args:
            batch: as ``step`` takes it.
            loss_fn: as ``step`` takes it; to accumulate over n batches, return ``loss / n``.

        Raises:
            Exception: what ``step`` raises; gradients accumulated before are as they were.
        """
        with self._turn():
            self._updates.watch()
            return self._run(batch, loss_fn, updates=False)

    def _run(
        self, batch: Any, loss_fn: LossFunction, norm: float | None = None, *, updates: bool = True
    ) -> StepReport:
        run = partial(self._runner.run, max_grad_norm=norm, updates=updates)
        return self._warm_start.step(lambda: run(self._context(batch, loss_fn)))

    def update(self, *, max_grad_norm: float | None = None) -> float | None:
        """Step the optimizer by the gradients that there are; the next ``backward`` clears them.

        Returns the norm before clipping, None without ``max_grad_norm`` (as in ``step``).

        Raises:
            BudgetError: there is no room for the update; nothing was changed.
            ClosedSessionError: the session was closed.
            OptionError: ``max_grad_norm`` is not above 0, or the optimizer needs a closure.
        """
        if compiler.asks_anew(self.optimizer):
            name = type(self.optimizer).__name__
            raise OptionError(f"asked {name} to update without the loss; try session.step")
        with self._turn():
            return self._runner.update(arguments.checked_norm(max_grad_norm))

    def evaluate(self, batch: Any, fn: LossFunction) -> Any:
        """Return ``fn(model, batch)`` without gradients, within the budget between steps.

        Where memory is refused, it runs in ever smaller parts, if a few examples have shown that
        the parts' results join to the whole's (up to rounding). The model's mode stays as it is.

        Args:
            batch: as ``step`` takes it.
            fn: ``fn(model, batch)`` returns a scalar mean, ``(sum, weight)``, or a nest of tensors
                with a row for each example. It may run several times.

        Raises:
            DataError: the batch or ``fn`` are not as ``step`` takes them.
            BudgetError: the budget does not hold the whole, or the smallest part that is proven.
            ClosedSessionError: the session was closed.
            SplitError: the parts' results do not join, as those of a few examples did.
        """
        with self._turn():
            check_loss(fn)
            build_lazy(self.model, batch, fn)
            return self._evaluation.run(batch, fn, self.budget_bytes)

    def _context(self, batch: Any, loss_fn: LossFunction) -> StepContext:
        check_loss(loss_fn)
        if self._proven_for is None or self._is_resumed:
            build_lazy(self.model, batch, loss_fn)
            key = proof_key(self.model, batch, loss_fn)
            # A run resumed with other code, or under other versions, measures and proves anew.
            if self._is_resumed and key != self._proven_for:
                self._splitting.forget()
                if self.budget_bytes is not None:
                    self._plan_controller.selector.forget()
            self._proven_for, self._is_resumed = key, False
        place = (self._splitting, self._seed, self._runner.counters.step_index)
        return self._warm_start.begin(StepContext.of(self.model, batch, loss_fn, *place))

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on as this one would have (JSON-able)."""
        counted = self._runner.counters.state_dict() | self._plan_controller.state_dict()
        rollback = self._runner.rollback.state_dict()
        return counted | {
            "noise": self._noise.state_dict(),
            "rollback": rollback,
            "seed": self._seed,
            "splitting": self._splitting.state_dict(),
            "proven_for": self._proven_for,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state_dict``; a search begins anew.

        Nothing is measured or proven again, unless the first batch, the loss's or the model's code,
        PyTorch or DAF are others than proofs were taken for.

        Raises:
            ClosedSessionError: the session was closed.
            OptionError: it is no session's state.
            ValueError: the plan's codes wait in host memory, and this session has none.
        """
        self._refuse_if_closed()
        arguments.check_state(state, ("seed", "splitting", "proven_for"))
        self._warm_start.stop()
        self._seed = state["seed"]
        self._splitting.load_state_dict(state["splitting"])
        self._proven_for = state["proven_for"]
        self._is_resumed = self._proven_for is not None
        self._runner.counters.load_state_dict(state)
        self._noise.load_state_dict(state["noise"])
        self._runner.rollback.load_state_dict(state["rollback"])
        self._plan_controller.load_state_dict(state)
