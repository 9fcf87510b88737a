"""GELU and SiLU with one code that serves the activation and the layer behind it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from daf.codecs.layout import in_memory_order, layout_of
from daf.codecs.scratch import Scratch
from daf.core.code_format import BLOCK_ELEMENTS, block_count
from daf.core.policy import KEEP, Method, Need, Site, Treatment
from daf.kernels.normalisation import Channels
from daf.operators.eligibility import autocast_objection, autograd_objection, input_objection
from daf.operators.fused_function import FusedFunction, FusedSave, Gradients
from daf.operators.fusion_table import CallSite
from daf.operators.norms.save import computed_values
from daf.operators.operator_context import InputHolder, OperatorContext
from daf.operators.protocol import FusedOperator, OperatorCall
from daf.saved_tensors.packed_tensor import Derivation, Kept, Recipe, Rederived, Term

# What is decoded is still in the cache when it is used. A GPU's is larger; never tuned on one.
_BLOCKS_AT_A_TIME = 512
_DEVICE_BLOCKS_AT_A_TIME = 1 << 15
LEAST_BITS = 2  # at one bit the squared bias of the derivative reaches 0.1 of its square


class FusedSmooth(FusedFunction):
    """The autograd function of a fused activation."""


def decoded_bytes_on(device: torch.device) -> int:
    """Return the most bytes of an activation's input that backward decodes at a time (float32)."""
    return 4 * BLOCK_ELEMENTS * _blocks_at_a_time(device)


def _blocks_at_a_time(device: torch.device) -> int:
    return _BLOCKS_AT_A_TIME if device.type == "cpu" else _DEVICE_BLOCKS_AT_A_TIME


class Smooth(NamedTuple):
    """An activation with f(0) = 0; ``approximate`` is GELU's."""

    name: str
    approximate: str = "none"

    def forward(self, x: Tensor) -> Tensor:
        """Return f(x), a new tensor."""
        found: Tensor = getattr(torch.ops.aten, self.name)(x, **self._options)
        return found

    def apply_(self, x: Tensor) -> None:
        """Replace ``x`` by f(x)."""
        getattr(torch.ops.aten, self.name).out(x, **self._options, out=x)

    def backward(self, gradient: Tensor, x: Tensor, out: Tensor) -> None:
        """Write ``gradient * f'(x)``; ``out`` may be ``gradient``."""
        backward = getattr(torch.ops.aten, f"{self.name}_backward").grad_input
        backward(gradient, x, **self._options, grad_input=out)

    @property
    def _options(self) -> dict[str, str]:
        return {"approximate": self.approximate} if self.name == "gelu" else {}


def shared_treatment(linear: Treatment) -> Treatment | None:
    """Return the treatment of an input that also serves a layer coded by ``linear``, or None.

    It has one bit more, up to four: still fewer than a derivative code (two at least) and
    ``linear`` together, and with less error behind than ``linear`` alone up to three bits.
    """
    if linear.method is Method.ROTATED and linear.bits < 4:
        return replace(linear, bits=linear.bits + 1)
    return linear if linear.is_code else None


class SmoothHeld(FusedSave):
    """What a fused activation holds: its input, or how to derive it."""

    __slots__ = ("input", "smooth")

    def __init__(self, smooth: Smooth, held: Rederived | Kept) -> None:
        super().__init__(held.layout)
        self.smooth, self.input = smooth, held

    def restore(self, scratch: Scratch) -> Tensor:
        """Return the activation's input."""
        return self.input.restore(scratch)

    def run_again(self, x: Tensor, *_parameters: Tensor | None) -> Tensor:
        return self.smooth.forward(x)

    # Of one input, which needs its gradient.
    def backward(self, gradient: Tensor, needs: Sequence[bool], *, owned: bool) -> Gradients:  # noqa: ARG002
        written = gradient if owned else self.layout.empty()
        if isinstance(self.input, Kept):
            self.smooth.backward(gradient, self.input.restore(Scratch()), written)
            return (written,)
        flat, out = (in_memory_order(tensor) for tensor in (gradient, written))
        blocks, step = block_count(gradient.numel()), _blocks_at_a_time(self.layout.device)
        for first in range(0, blocks, step):
            x = self.input.restore_blocks(first, min(blocks, first + step))
            part = slice(first * BLOCK_ELEMENTS, first * BLOCK_ELEMENTS + x.numel())
            self.smooth.backward(flat[part], x, out[part])
        return (written,)


_UNREAD = "no layer behind it reads its result in backward"


def _read_gelu(input: Any, *, approximate: str = "none") -> tuple[Any, Smooth] | None:
    return (input, Smooth("gelu", approximate)) if approximate in ("none", "tanh") else None


def _read_silu(input: Any, *, inplace: bool = False) -> tuple[Any, Smooth] | None:
    return None if inplace else (input, Smooth("silu"))


_SIGNATURES: Mapping[Any, Callable[..., tuple[Any, Smooth] | None]] = {
    F.gelu: _read_gelu,
    F.silu: _read_silu,
}


class ActivationOperator(FusedOperator):
    """``F.gelu`` and ``F.silu``, each as one operator from which the layer behind derives."""

    name = "activation"
    functions = frozenset(_SIGNATURES)

    def __init__(self) -> None:
        super().__init__()
        self._unread: set[CallSite] = set()  # coded when they last ran, and derived by no layer

    def begin(self, context: OperatorContext) -> None:
        super().begin(context)
        self._ran: dict[CallSite, tuple[Derivation, Treatment]] = {}

    def replacement(self, call: OperatorCall) -> Callable[[], Any] | None:
        """Return the operator, where one code is to serve it and the layer behind."""
        site = self.context.site(call.name)
        read = call.read(_SIGNATURES[call.function])
        treatment = self._treatment(site)
        reason = self._objection(read, site, treatment)
        self.table.decide(site, "" if reason else f"{call.name} + layer behind", reason)
        if read is None or treatment is None or reason:
            return None
        return partial(self._run, *read, site, treatment)

    def finish(self) -> None:
        """Note the results that no layer derived."""
        for site, (derivation, treatment) in self._ran.items():
            self._unread.discard(site)
            if derivation.readers == 0:
                self.table.decide(site, "", _UNREAD)
                if treatment != KEEP:
                    self._unread.add(site)

    def _treatment(self, site: CallSite) -> Treatment | None:
        """Return how the input is held so that it serves the layer behind too; None: it cannot."""
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
        x, hooks = read[0], self.context.hooks
        if treatment is None:
            return "the policy neither keeps it nor codes both it and the layer behind"
        reason = input_objection(x) or autocast_objection(x) or autograd_objection((x,), hooks.hook)
        if reason or hooks.is_constant(x):
            return reason or "its input is the caller's own"
        return _UNREAD if treatment != KEEP and site in self._unread else ""

    def _run(self, x: Tensor, smooth: Smooth, site: CallSite, treatment: Treatment) -> Tensor:
        context, tracker = self.context, self.context.state.tracker
        tracker.next_call(site.operator)
        derivation = Derivation(smooth.apply_)
        holder = InputHolder(context, x, Need.SMOOTH, tracker.record(*site, 0))

        def forward() -> tuple[Tensor, SmoothHeld]:
            return smooth.forward(x.detach()), self._held(x, smooth, treatment, holder)

        call = context.fuse(FusedSmooth, (x,), holder, forward)
        assert call.held.recipe is not None
        context.learn(call, (call.held.recipe[0]._replace(derivation=derivation),))
        context.state.provenance.learn_function(call.result, derivation)
        self._ran[site] = derivation, treatment
        return context.settle(call, derives=derivation)

    def _held(
        self, x: Tensor, smooth: Smooth, treatment: Treatment, holder: InputHolder
    ) -> SmoothHeld:
        """Return what stands for the input; its ``recipe`` computes the input itself."""
        if (recipe := self._recipe(x, treatment, holder)) is None:
            kept, unchanged = holder.keep(x), Channels.times(1.0, x.device)
            values = computed_values(kept, unchanged, x.numel(), self.context.state.ledger)
            held = SmoothHeld(smooth, kept)
            held.recipe = (Term(values),)
            return held
        held = SmoothHeld(smooth, Rederived(recipe, layout_of(x)))
        held.recipe = recipe
        return held

    def _recipe(self, x: Tensor, treatment: Treatment, holder: InputHolder) -> Recipe | None:
        """Return how backward computes the input from codes; None: it is kept."""
        if treatment == KEEP:
            return None
        known = self._known(x)
        holder.record.treatment = treatment if known is None else Treatment(Method.REDERIVE)
        if known is not None:
            return known
        code = holder.encode(x)
        return (Term(code),) if code.content.is_finite else None

    def _known(self, x: Tensor) -> Recipe | None:
        """Return the recipe of the input by a normalisation's code, if that is wide enough."""
        recipe = self.context.state.provenance.recipe(x, x._version)
        if recipe is None or len(recipe) > 1 or recipe[0].mask or recipe[0].derivation:
            return None
        return recipe if recipe[0].code.content.treatment.bits >= LEAST_BITS else None
