"""The gradient of one batch under one plan, summed over micro-batches."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from daf.capture.capture import Capture
from daf.capture.compiled_calls import apart
from daf.capture.known_passes import KnownPasses
from daf.codecs.ranges import all_finite
from daf.core.errors import NonFiniteLossError, OtherPathError, SplitError
from daf.core.garbage import young_left_alone
from daf.core.plan import Plan
from daf.core.policy import Policy
from daf.core.replaced import replaced
from daf.kernels.devices import is_processor
from daf.memory.keeper import Keeper
from daf.step.context import StepContext
from daf.step.dry_run import dry_run
from daf.step.gradient_release import LEFT_TO_USER, GradientRelease
from daf.step.loss_weights import (
    ANY_COUNT,
    LossWeights,
    PartWeights,
    parameter_names,
    scale_watched,
)
from daf.step.microbatch import WeightedLoss, read_loss, scale_gradients
from daf.step.state_snapshot import StepSnapshot
from daf.step.user_gradients import UserGradients
from daf.torch_compat.compiled_modules import CompiledModules
from daf.torch_compat.compiler import eagerly
from daf.torch_compat.modules import OwnHook
from daf.torch_compat.pytree import tensors_in_batch


class _Losses:
    """Losses of micro-batches; reading one waits. ``refuse`` raises for a non-finite loss.

    ``may_scale``: where a ``GradScaler`` scaled it, that skips the update instead.
    """

    def __init__(
        self, refuse: Callable[[Any, float], NoReturn], *, may_scale: bool = False
    ) -> None:
        self._refuse, self._may_scale = refuse, may_scale
        self.is_scaled = False
        self._unread: list[tuple[Any, float | Tensor, Tensor, Tensor, Tensor | None]] = []
        self._total = self.weight = 0.0
        self.is_sum = False

    @property
    def mean(self) -> float:
        """Mean of all losses read; NaN if they weigh nothing, as plain PyTorch's."""
        return self._total / self.weight if self.weight else math.nan

    def add(self, part: Any, loss: WeightedLoss, scale: Tensor | None) -> None:
        """Keep copies: a recorded graph overwrites its outputs when it runs again.

        ``scale``: what ``GradScaler`` multiplied the loss by.
        """
        total = loss.total.detach().clone()
        mean = loss.mean.detach().clone() if loss.is_sum else total
        self._unread.append((part, loss.weight, total, mean, scale))
        self.is_sum = loss.is_sum

    def read(self) -> None:
        """Read all losses added since the last call."""
        unread, self._unread = self._unread, []
        for part, part_weight, total, mean, scale in unread:
            weight = float(part_weight)
            value = mean.item() if weight else total.item()
            self.is_scaled = self._may_scale and scale is not None
            if not math.isfinite(value) and not self.is_scaled:
                self._refuse(part, value)
            value /= 1.0 if scale is None else scale.item()
            self._total += value * weight if weight else value
            self.weight += weight

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Read the losses where a pass inside fails: one that is not finite may be why."""
        try:
            yield
        except Exception:
            self.read()
            raise


@dataclass(eq=False)
class GradientStep:
    """Runs forward and backward of whole batches; only released gradients change parameters.

    ``keeper`` is told just before a step changes its first parameter.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    capture: Capture
    release: GradientRelease
    keeper: Keeper
    is_dry_run: bool = False

    def __post_init__(self) -> None:
        self.users = UserGradients(self.model, self.optimizer)
        self._on_commit: Callable[[], None] = lambda: None
        self._knows_fusions = False
        self._known_passes = KnownPasses(self.capture)

    def run(
        self,
        context: StepContext,
        plan: Plan,
        snapshot: StepSnapshot,
        *,
        planned: bool,
        needed_bytes: int = 0,
    ) -> float:
        """Leave the gradient of the mean loss in the parameters, which have none; return that loss.

        ``snapshot`` is restored if the loss is not finite. ``planned`` is True if the plan decides
        on gradient release; else it is done wherever allowed. ``needed_bytes`` are reserved before
        the first update.

        Raises:
            NonFiniteLossError: the loss is inf or NaN; parameters and buffers are untouched.
            SplitError: parts do not add up to the batch after all.
            ReleaseRefusedError: gradients must be released, and something needs them later.
            CommittedStepError: backward failed after parameters had been updated.
        """
        if not self.is_dry_run:
            self._on_commit = partial(self.keeper.commit, needed_bytes)
        parts = context.parts(plan.micro_batch)
        if len(parts) > 1 and context.choice.functions and self._has_hooks():
            raise SplitError("a hook acts on its gradients, and would do so for each part")
        self._dry_run_once(context, plan.policy)
        is_held = planned and not plan.release_gradients
        self.release.begin(len(parts), held_by_plan=is_held, adds_to_users=self.users.are_waiting)
        weights = None
        if len(parts) > 1:
            weights = PartWeights(context.choice.weighing, parameter_names(self.model))
        refuse = partial(self._refuse_nonfinite, context, snapshot, weights)
        losses = _Losses(refuse, may_scale=self.release.kept_because == LEFT_TO_USER)
        reads_first = self._reads_first(snapshot)
        for index, part in enumerate(parts):
            with losses.explaining(), young_left_alone():
                loss, scale = self._forward(context, plan, part, index, weights)
                losses.add(part, loss, scale)
                if reads_first:
                    losses.read()
                if (weights and loss.is_sum) or not context.index & (context.index - 1):
                    self.users.others.set_aside(loss.total)  # what begins later is found soon
                self._backward(loss, context.info.examples, is_whole=weights is None)
                del loss
        losses.read()
        if weights is not None:
            weights.check()
            if context.choice.functions:
                weights.check_scalings(context.choice.functions)
        if math.isnan(losses.mean) and not losses.is_scaled:
            self._refuse_nonfinite(context, snapshot, weights, context.batch, losses.mean)
        if losses.is_sum and weights is not None:
            updated = (each for group in self.optimizer.param_groups for each in group["params"])
            others = (leaf for leaf, _ in self.users.others.taken())
            own = chain(self.model.parameters(), updated)
            scale_gradients(chain(own, others), 1.0 / losses.weight)
        return losses.mean

    def rehearse(
        self, context: StepContext, plan: Plan, snapshot: StepSnapshot, state_bytes: int
    ) -> int:
        """Run a step that updates nothing; return what it takes after its first update (bytes).

        0 if it releases no gradients. ``state_bytes``: of optimizer state to come; raises as
        ``run``.
        """
        self._on_commit = self.keeper.begin_need
        with replaced(self, is_dry_run=True), self.release.rehearsing(state_bytes):
            self.run(context, plan, snapshot, planned=True)
            return self.keeper.need_bytes() if self.release.is_active else 0

    def _reads_first(self, snapshot: StepSnapshot) -> bool:
        """True if losses are read before backward; on a device, only where backward may update."""
        if is_processor(snapshot.device):
            return True
        return self.release.is_active or self._has_hooks()

    def _has_hooks(self) -> bool:
        found = (
            e._backward_hooks or e._post_accumulate_grad_hooks for e in self.model.parameters()
        )
        return any(found)

    def _dry_run_once(self, context: StepContext, policy: Policy) -> None:
        """Find in the first step what may be fused; larger tensors show it in the second."""
        if not policy.fused or self._knows_fusions:
            return
        if not self.capture.fusions():
            cut, batch, loss_fn = context.choice.cut, context.batch, context.loss_fn
            with replaced(self, is_dry_run=True):
                dry_run(self.capture, self.model, policy, batch, loss_fn, cut=cut)
        self._knows_fusions = True

    def _forward(
        self,
        context: StepContext,
        plan: Plan,
        part: Any,
        micro_index: int,
        weights: PartWeights | None,
    ) -> tuple[WeightedLoss, Tensor | None]:
        """Return the loss of a part and the factor by which it was scaled."""
        # It is weighed as ``weights`` says; None: the whole batch is one part.
        is_whole = weights is None
        examples = context.info.examples if is_whole else context.choice.cut.size(part)
        policy = plan.policy.of_piece(examples, plan.micro_batch)
        capture = self._capturing(context, policy, part, micro_index, plan.micro_batch)
        operators = LossWeights(names=weights.names) if weights else None
        watching = self.release.watching()
        with capture, watching, operators or nullcontext(), scale_watched() as scaling:
            result = context.loss_fn(self.model, part)
        loss = read_loss(result, examples)
        if weights is not None and operators is not None:
            # What begins later (a penalty every fourth step, say) may couple examples. A promise,
            # which has no functions, needs no proof.
            proven = context.choice.functions
            unknown = operators.functions - proven
            if ANY_COUNT in proven:  # this step's batch was proven
                unknown = {each for each in unknown if " " not in each}
            if unknown and proven:
                raise OtherPathError(
                    f"a part calls {', '.join(sorted(unknown))}, which its proof did not see",
                    unknown,
                )
            weights.note_way(operators)
            operators.leave_out_beside(result)
            loss = weights.weighed(loss, operators)
        return loss, scaling.factor

    def _capturing(
        self, context: StepContext, policy: Policy, part: Any, micro_index: int, micro_batch: int
    ) -> AbstractContextManager[object]:
        """Capture a forward pass, unless what it saves is known."""
        compiled = CompiledModules(self.model)
        what = (context.kind, context.info.nbytes, micro_batch)
        is_known = self._known_passes.begin(policy, compiled, context.index, what)
        if is_known and not self.release.is_active:
            return apart(compiled)
        return self.capture.step(policy, context.seed, context.index, micro_index, batch=part)

    def _backward(self, loss: WeightedLoss, examples: int, *, is_whole: bool) -> None:
        if is_whole:
            scaled = loss.mean
        elif loss.is_sum:
            scaled = loss.total
        else:
            scaled = loss.total * (loss.weight / examples)
        # Checkpoints run forward passes again here, compiled parts as the first time.
        again = apart(CompiledModules(self.model))
        with again, self.release.stepping(scaled, on_commit=self._on_commit):
            scaled.backward()  # type: ignore[no-untyped-call]

    def _refuse_nonfinite(
        self,
        context: StepContext,
        snapshot: StepSnapshot,
        weights: PartWeights | None,
        part: Any,
        value: float,
    ) -> NoReturn:
        if weights is not None:
            weights.check(is_nan=True)  # a part's mean over nothing is the cut's fault
        snapshot.forget_backward()
        snapshot.restore()
        where = first_nonfinite(self.model, part, lambda: context.loss_fn(self.model, part))
        snapshot.restore()
        self.optimizer.zero_grad(set_to_none=True)
        raise NonFiniteLossError(
            f"the loss became {value} at step {context.index}; it began in {where}; parameters "
            f"are those from before this step; try a lower learning rate, more bits, or check the "
            f"data"
        )


def is_finite(value: Any) -> bool:
    """True if every floating-point tensor in a nest holds only finite numbers."""
    return all_finite(tensors_in_batch(value))


def first_nonfinite(model: nn.Module, batch: Any, run: Callable[[], Any]) -> str:
    """Run the forward pass again and return, in words, where the first non-finite value appears.

    ``run`` calls the model as the failed step did, with ``batch``. The words name a parameter, the
    batch, a module, or the loss function.
    """
    for name, parameter in model.named_parameters():
        if not is_finite(parameter):
            return f"parameter {name!r}"
    if not is_finite(batch):
        return "the batch itself"
    found: list[str] = []

    def watch(name: str, module: nn.Module, _inputs: Any, output: Any) -> None:
        if not found and not is_finite(output):
            found.append(f"the output of module {name or '<model>'!r} ({type(module).__name__})")

    with torch.no_grad(), eagerly(), ExitStack() as hooks:  # compiled modules have hooks too
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_hook(OwnHook(partial(watch, name))))
        run()
    return found[0] if found else "the loss function (every module's output is finite)"
