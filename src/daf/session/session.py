"""One training step inside a byte budget: profile, plan, execute, adapt.

``Session`` measures a few small steps, lets the planner choose, runs the first
full-size step under the tightest plan, measures that, and goes on with the
fastest plan that fits. ``factory`` builds its parts, and ``StepRunner`` runs a step.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from daf import budget as governor
from daf.core.plan import Plan
from daf.core.step_report import StepReport
from daf.core.units import parse_optional_bytes
from daf.offload.spill import SpillOptions
from daf.profiling.model_memory import parameter_bytes
from daf.sensitivity.result import Sensitivity
from daf.session.arguments import asked_memory, refuse_budget_elsewhere
from daf.session.factory import make_parts
from daf.session.readings import SessionReadings
from daf.step.context import StepContext
from daf.step.gradient_release import ReleaseMode
from daf.step.microbatch import LossFunction


class Session(SessionReadings):
    """Trains a model within a budget of bytes.

    For a model on the processor the budget bounds the whole process; for one on a GPU, what
    PyTorch reserves there (``memory.device``). Peaks are measured in that memory.

    Args:
        model: any ``nn.Module`` on one device.
        optimizer: any ``torch.optim.Optimizer`` over its parameters.
        budget: the most that may be held, baseline included: bytes as ``"700MB"`` or an int, a
            fraction of the machine as 0.5 or ``"50%"``, ``"auto"`` for what the machine can
            spare, or a function that returns one of these and is called every 20 ms; None
            trains without a limit. ``session.budget`` may be set at any moment, in mid-step
            and from another thread too. Tighter limits of the system (memory cgroups, free
            memory, ulimits) come first and are followed while it trains.
        bits: the same at every site (1 … 8, ``"exact"``, ``"plain"``); None lets the
            planner choose. Without a budget None means ``"plain"``.
        fused: without a budget, run normalisations with what follows them, GELU and SiLU as
            operators that read their code directly, and large convolutions and linear layers
            in chunks, wherever a first step shows that to be the same (``compress``). Under a
            budget the planner fuses where that pays.
        policy: how the planner chooses under a budget: ``"optimal"`` (the default), or to compare
            with it ``"sage"``, ``"checkpoint"``, ``"accumulate"``, ``"reduce"``, ``"quantize"``
            (``planning.policies``).
        tolerance: the most variance that codes may add to the gradient, relative to the
            batch's own (0: only what is exact). None: a seventh, and where that cannot hold
            the budget, as much as it takes. Until the two were measured, two bits
            everywhere are taken to add a seventh.
        seed: int in [0, 2**64), names the run in the codes' random rotations.
        baseline_bytes: the process before the model existed; by default the
            resident size now, less the model.
        allow_batchnorm_split: permit micro-batches although batch statistics then change.
        pool_bytes: the most that codes may hold, in the process and on each GPU, as bytes or
            ``"200MB"``; None: no cap of their own. Below what they need, planes of ``rotated``
            codes are evicted, the least important first, down to one bit; reports say how much.
            The attribute may be changed at any moment, in mid-step and from another thread too.
        release_gradients: step each parameter inside backward, as its gradient completes, and
            free the gradient (``grad`` is None afterwards): the same result, bit for bit. True
            raises where something needs the gradients later; ``"auto"`` then leaves it, and
            ``release_refusal`` says why. The first update commits the step: refused memory is
            no longer answered by a retry but by evicting codes and, at last, by an overrun.
        spill: where tensors go whose treatment is *spill* (to disk), and how much of them.
        sensitivity: measure what each site's code adds to the gradient, and plan by that
            (True: after the first plan, then whenever 2 % of the training time has been
            earned); False never does. Or what an earlier run of this model found.
        rollback: when the losses say that the run diverges under its codes (inf, NaN, or far above
            the usual ones again and again), go back to the last good state with wider codes,
            once; the second time is an error. ``StepReport.rolled_back_to`` reports it. The state
            is written to this file every 100 steps (True: to a temporary one).
        host_bytes: for a model on a GPU, how much pinned host memory its codes may wait in, as
            bytes or ``"4GB"``: they leave the GPU beside the computation, packed there or by the
            processor as measured rates say, and come back before backward wants them. Under a
            budget the planner sends what pays, without one all codes go. None: none.

    Raises:
        ReleaseRefusedError: ``release_gradients`` is True, and the optimizer or model forbid it.
        UnitError: the budget or the pool's bytes cannot be read.
        PoolFullError: ``pool_bytes`` was given, and the system grants no addresses.
        PlatformError: a budget was given for a model on several devices, or on one whose memory
            cannot be bounded; ``host_bytes`` for a model on the processor.
        UnknownNameError: ``policy`` names none.
        ValueError: ``bits`` names no policy, or both were given; a negative tolerance;
            ``fused`` together with a budget; ``host_bytes`` with what would send nothing there.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        budget: governor.Budget,
        *,
        bits: int | str | None = None,
        fused: bool = False,
        policy: str | None = None,
        tolerance: float | None = None,
        seed: int = 0,
        baseline_bytes: int | None = None,
        allow_batchnorm_split: bool = False,
        pool_bytes: str | int | None = None,
        release_gradients: ReleaseMode = False,
        spill: SpillOptions | None = None,
        sensitivity: Sensitivity | bool = True,
        rollback: Path | bool = False,
        host_bytes: str | int | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        memory = asked_memory(model, budget)
        self.baseline_bytes = baseline_bytes or max(0, memory.held_bytes() - parameter_bytes(model))
        self._seed = seed
        parts = make_parts(
            model,
            optimizer,
            budget,
            memory,
            bits=bits,
            fused=fused,
            policy=policy,
            tolerance=tolerance,
            baseline_bytes=self.baseline_bytes,
            allow_batchnorm_split=allow_batchnorm_split,
            pool_bytes=pool_bytes,
            release_gradients=release_gradients,
            spill=spill,
            sensitivity=sensitivity,
            rollback=rollback,
            host_bytes=host_bytes,
        )
        super().__init__(parts)
        memory.reset_peak()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Undo what was set in the process (see ``settings``), and watch no limits any more."""
        self._plan_controller.selector.give_up_search()
        self._budget_controller.close()
        self._keeper.close()
        self._runner.rollback.close()

    @property
    def budget(self) -> governor.Budget:
        """What was asked; set it at any moment, from any thread: it acts at once.

        A lower budget in mid-step: recycled memory goes back and the pool evicts planes before
        this returns; the step finishes, or is tried again under a tighter plan if it needs more.
        The next step is planned anew.

        Raises:
            UnitError: it is no budget; the one before stays.
            PlatformError: the model is where this session bounds nothing.
        """
        return self._budget_controller.asked

    @budget.setter
    def budget(self, value: governor.Budget) -> None:
        if value is not None:
            refuse_budget_elsewhere(self.model, self._runner.counters.memory)
        self._budget_controller.ask(value)

    @property
    def budget_bytes(self) -> int | None:
        """The budget in force now: what was asked, or less where a limit of the system is tighter.

        Setting it is setting ``budget``.
        """
        return self._budget_controller.budget_bytes

    @budget_bytes.setter
    def budget_bytes(self, value: int | None) -> None:
        self.budget = value

    @property
    def pool_bytes(self) -> int | None:
        """The most that codes may hold; setting it acts at once."""
        return self._capture.pool_bytes

    @pool_bytes.setter
    def pool_bytes(self, value: str | int | None) -> None:
        self._capture.pool_bytes = parse_optional_bytes(value)

    @property
    def plan(self) -> Plan | None:
        """What training goes on with; None before ``prepare``."""
        return self._plan_controller.selector.plan

    @plan.setter
    def plan(self, value: Plan | None) -> None:
        self._plan_controller.selector.settle_on(value)

    def prepare(
        self,
        batch: Any,
        loss_fn: LossFunction,
        on_progress: Callable[[str], None] = lambda _: None,
    ) -> Plan:
        """Profile on this batch and plan; the model, its gradients and random states stay as found.

        Args:
            batch: any nest of tensors whose first dimension is the batch's.
            loss_fn: as ``step`` takes it.
            on_progress: called with what is measured, as its turn comes.

        Raises:
            BudgetError: no plan fits; ``least_bytes`` is the least budget that would.
        """
        return self._plan_controller.prepare(self._context(batch, loss_fn), on_progress)

    def step(self, batch: Any, loss_fn: LossFunction) -> StepReport:
        """One training step: gradient of the mean loss over the batch, then the optimizer.

        A batch with more bytes than any before it is profiled and planned for anew.

        Args:
            batch: any nest of tensors whose first dimension is the batch's.
            loss_fn: ``loss_fn(model, batch)`` returns a scalar mean loss, or ``(sum, weight)``.

        Raises:
            DataError: the batch has no tensor with a first dimension.
            BudgetError: the budget cannot hold the step.
            PoolFullError: ``pool_bytes`` cannot hold the codes, and no tighter plan is known.
            NonFiniteLossError: the loss is inf or NaN; parameters and buffers are untouched.
            ReleaseRefusedError: gradients must be released, and something needs them later.
            CommittedStepError: backward failed after parameters had been updated.
            DivergedError: ``rollback`` was asked for, and the run diverges again or codes cannot
                be wider.
        """
        return self._runner.run(self._context(batch, loss_fn))

    def _context(self, batch: Any, loss_fn: LossFunction) -> StepContext:
        return StepContext.of(batch, loss_fn, self._seed, self._runner.counters.step_index)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on as this one would have (JSON-able)."""
        counted = self._runner.counters.state_dict() | self._plan_controller.state_dict()
        rollback = self._runner.rollback.state_dict()
        return counted | {
            "noise": self._noise.state_dict(),
            "rollback": rollback,
            "seed": self._seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state_dict``: nothing is measured again; a search begins anew.

        Raises:
            ValueError: the plan's codes wait in host memory, and this session has none.
        """
        self._seed = state["seed"]
        self._runner.counters.load_state_dict(state)
        self._noise.load_state_dict(state["noise"])
        self._runner.rollback.load_state_dict(state["rollback"])
        self._plan_controller.load_state_dict(state)
