"""GELU and SiLU, so that one code serves them and the layer behind.

Whether there is such a layer shows when it saves its input. An activation that is
coded, and whose result no layer derived when it last ran fused, is left alone from
then on: a code of its derivative is smaller. One that is kept takes no more by running
fused, whoever reads it, and plans count on that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from daf.codecs.layout import layout_of
from daf.core.policy import KEEP, Method, Need, Site, Treatment
from daf.operators.activation.function import (
    LEAST_BITS,
    FusedSmooth,
    Smooth,
    SmoothHeld,
    shared_treatment,
    values_of,
)
from daf.operators.eligibility import (
    autocast_objection,
    autograd_objection,
    has_usual_strides,
    is_plain_float,
)
from daf.operators.fusion_table import CallSite
from daf.operators.operator_context import InputHolder, OperatorContext
from daf.operators.protocol import FusedOperator, OperatorCall
from daf.saved_tensors.derivation import Derivation
from daf.saved_tensors.norm_inputs import channel_stride
from daf.saved_tensors.packed_tensor import Recipe, Rederived, Term
from daf.saved_tensors.packer import SMALL_BYTES

_UNREAD = "no layer behind it reads its result in backward"


def read_call(
    operator: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> tuple[Any, Smooth] | None:
    """(input, activation); None where the arguments are odd, or it works in place."""
    names = dict(keywords)
    if "input" in names and not arguments:
        arguments = (names.pop("input"),)
    if len(arguments) != 1:
        return None
    if operator is F.gelu:
        approximate = names.pop("approximate", "none")
        known = approximate in ("none", "tanh") and not names
        return (arguments[0], Smooth("gelu", approximate)) if known else None
    inplace = names.pop("inplace", False)
    return None if names or inplace else (arguments[0], Smooth("silu"))


class ActivationOperator(FusedOperator):
    """``F.gelu`` and ``F.silu``, each as one operator that tells its result to the layer behind."""

    name = "activation"
    functions = frozenset({F.gelu, F.silu})

    def __init__(self) -> None:
        super().__init__()
        self._unread: set[CallSite] = set()  # coded when they last ran, and derived by no layer

    def begin(self, context: OperatorContext) -> None:
        """A step begins."""
        super().begin(context)
        self._ran: dict[CallSite, tuple[Derivation, Treatment]] = {}

    def replacement(self, call: OperatorCall) -> Callable[[], Any] | None:
        """The operator, where one code is to serve it and the layer behind."""
        path, count = self.context.state.tracker.present_call(call.name)
        site = CallSite(path, call.name, count)
        read = read_call(*call)
        treatment = self._treatment(site)
        reason = self._objection(read, site, treatment)
        self.table.decide(site, "" if reason else f"{call.name} + layer behind", reason)
        if read is None or treatment is None or reason:
            return None
        return partial(self._run, *read, site, treatment)

    def finish(self) -> None:
        """Which results did no layer derive?"""
        for site, (derivation, treatment) in self._ran.items():
            self._unread.discard(site)
            if derivation.readers == 0:
                self.table.decide(site, "", _UNREAD)
                if treatment != KEEP:
                    self._unread.add(site)

    def _treatment(self, site: CallSite) -> Treatment | None:
        """How the input is held where that is to serve the layer behind too."""
        policy = self.context.policy
        own = policy.treatment(Need.SMOOTH, Site(*site, 0))
        linear = policy.by_need.get(Need.LINEAR)
        if not policy.rederive:
            return None
        if own.method is Method.DERIVATIVE and linear is not None:
            return shared_treatment(linear)
        return KEEP if own == KEEP else None

    def _objection(
        self, read: tuple[Any, Smooth] | None, site: CallSite, treatment: Treatment | None
    ) -> str:
        if read is None:
            return "its arguments are odd, or it works in place"
        x, _ = read
        if treatment is None:
            return "the policy neither keeps it nor codes both it and the layer behind"
        if not is_plain_float(x):
            return "its input is no float32 tensor, nor on a GPU one of half the width"
        if channel_stride(x) is None or not has_usual_strides(x):
            return "its input lies neither contiguous nor channels-last"
        if x.nbytes < SMALL_BYTES:
            return "its input is small"
        hooks = self.context.hooks
        unsaved = autocast_objection(x) or autograd_objection((x,), hooks.hook)
        if unsaved or hooks.is_constant(x):
            return unsaved or "its input is the caller's own"
        return _UNREAD if treatment != KEEP and site in self._unread else ""

    def _run(self, x: Tensor, smooth: Smooth, site: CallSite, treatment: Treatment) -> Tensor:
        context, tracker = self.context, self.context.state.tracker
        context.note_moment()
        tracker.next_call(site.operator)
        record = tracker.record(*site, 0)
        derivation = Derivation(smooth.apply_)
        with context.counted_at(record):
            holder = InputHolder(context, x, Need.SMOOTH, record)
            with context.hooks.collecting() as pending:
                result: Tensor = FusedSmooth.apply(x, lambda: smooth.forward(x.detach()))  # type: ignore[no-untyped-call]
            held, recipe = self._held(x, smooth, treatment, holder)
            context.learn(result, held, (recipe[0]._replace(derivation=derivation),))
            context.learn_function(result, derivation)
            self._ran[site] = derivation, treatment
        (saved,) = pending
        context.note_saved(saved, x, held, holder, tells=derivation)
        saved.settle(held, holder.plain)
        return result

    def _held(
        self, x: Tensor, smooth: Smooth, treatment: Treatment, holder: InputHolder
    ) -> tuple[SmoothHeld, Recipe]:
        """What stands for the input, and the recipe that computes it."""
        kept = holder.hold_input(x) if treatment == KEEP else None
        if kept is not None:
            held = SmoothHeld(smooth, kept)
            return held, (Term(self.context.counted(values_of(kept, x))),)
        recipe = self._known(x)
        holder.record.treatment = Treatment(Method.REDERIVE) if recipe is not None else treatment
        if recipe is None:
            recipe = (Term(holder.encode(x.detach())),)
        return SmoothHeld(smooth, Rederived(recipe, layout_of(x))), recipe

    def _known(self, x: Tensor) -> Recipe | None:
        """What is held anyway and tells the input well enough: a normalisation's code."""
        recipe = self.context.state.provenance.recipe(x, x._version)
        if recipe is None or len(recipe) > 1 or recipe[0].mask or recipe[0].derivation:
            return None
        return recipe if recipe[0].code.content.treatment.bits >= LEAST_BITS else None
