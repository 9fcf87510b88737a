"""What one step brings to its fused operators: treatments, the ledger, recipes."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from daf.codecs.codes import ElementsCode, ValueCode, opened
from daf.core.errors import CodecError
from daf.core.policy import KEEP, Method, Need, Policy
from daf.kernels import RowMoments
from daf.kernels.devices import backend_of
from daf.kernels.normalisation import Channels, Encoding, NormOutput
from daf.operators.fused_function import FusedFunction, FusedSave
from daf.operators.fusion_table import CallSite
from daf.operators.stand_ins import StandIns
from daf.saved_tensors.ledger import Holding, Plain, Unmade
from daf.saved_tensors.observation import Save, Watcher
from daf.saved_tensors.packed_tensor import Kept, Recipe, SavedTensor, Stored
from daf.saved_tensors.packer import check_sound, kept_holding
from daf.saved_tensors.sites import SiteRecord
from daf.saved_tensors.state import SavedTensorState
from daf.torch_compat.operator_mode import Arguments, Keywords
from daf.torch_compat.ownership import sole_holders

Held = TypeVar("Held", bound=FusedSave)


class Hooks(Protocol):
    """The saved-tensor hooks of one step."""

    @property
    def hook(self) -> Callable[[Tensor], SavedTensor]:
        """What autograd calls for every tensor it saves."""

    @property
    def is_replaying(self) -> bool:
        """True while a replayed call runs."""

    @property
    def watcher(self) -> Watcher | None:
        """What observes operators and saves."""

    def run(self, function: Callable[..., Any], arguments: Arguments, keywords: Keywords) -> Any:
        """Run a function as an operator of its own, whose saves are at sites of its name."""

    def collecting(self) -> AbstractContextManager[list[SavedTensor]]:
        """Collect everything packed inside; the caller settles it, and says so."""

    def note_settled(self) -> None:
        """Note that what was collected is settled."""

    def is_constant(self, tensor: Tensor) -> bool:
        """True if plain PyTorch would hold no memory for this tensor."""


class FusedCall(NamedTuple, Generic[Held]):
    """One call of a fused operator: its result, its one save, and what stands for that."""

    x: Tensor
    result: Tensor
    held: Held
    saved: SavedTensor
    holder: "InputHolder"
    plain: tuple[Plain, ...]


@dataclass(eq=False)
class OperatorContext:
    """What one step brings to its fused operators."""

    hooks: Hooks
    state: SavedTensorState
    policy: Policy
    key: int
    can_run_again: bool = True  # whoever runs the step, after a FusionError
    stand_ins: StandIns = field(default_factory=StandIns)
    # Operators inside are seen.
    seen: AbstractContextManager[object] = field(default_factory=nullcontext)

    def __post_init__(self) -> None:
        sole_holders()  # known before the first backward pass asks

    def site(self, operator: str) -> CallSite:
        """Return the site of the call of ``operator`` that is about to run."""
        path, call = self.state.tracker.present_call(operator)
        return CallSite(path, operator, call)

    def fuse(
        self,
        function: type[FusedFunction],
        inputs: Sequence[Tensor | None],
        holder: "InputHolder",
        forward: Callable[[], tuple[Tensor, Held]],
    ) -> FusedCall[Held]:
        """Run a fused operator of ``inputs``, the first of which is saved; ``settle`` the call.

        ``forward`` computes the result, and what ``holder`` holds in place of the first input.
        """
        if self.hooks.watcher is not None:
            self.hooks.watcher.moment()
        made: list[Held] = []

        def run() -> Tensor:
            out, held = forward()
            made.append(held)
            return out

        x = inputs[0]
        assert x is not None
        with self.state.ledger.counted_at(holder.record):
            plain = holder.count_plain()
            with self.hooks.collecting() as pending:
                result: Tensor = function.apply(run, *inputs)  # type: ignore[no-untyped-call]
        (held,), (saved,) = made, pending
        if holder.is_external:
            self.state.parameter_reads.note(x, held)
        return FusedCall(x, result, held, saved, holder, plain)

    def settle(self, call: FusedCall[Any], plain: tuple[Plain, ...] = (), **more: Any) -> Tensor:
        """Let what is held stand for the save, and return the result.

        ``plain`` is what plain PyTorch would hold besides; ``more`` are fields of ``Save``.
        """
        watcher, holder, record = self.hooks.watcher, call.holder, call.holder.record
        if watcher is not None and not holder.is_external:
            what = (record.site, record.need, record.treatment, holder.sources[:1])
            save = Save(call.saved, call.x, call.held, *what, record.held_bytes, None, True)
            watcher.saved(save._replace(**more))
        call.saved.settle(call.held, (*call.plain, *plain))
        self.hooks.note_settled()
        return call.result

    def learn(self, call: FusedCall[Any], recipe: Recipe | None) -> None:
        """Let others compute the call's result by ``recipe`` for as long as its save lives."""
        call.held.recipe = recipe
        if recipe is not None:
            self.state.provenance.learn(call.result, call.held)


class InputHolder:
    """Holds an operator's input ``x`` by the policy, in the ledger.

    ``is_external`` is True if plain PyTorch would hold no memory for ``x``. Plain PyTorch would
    also save ``beside``, and make and save tensors of ``unmade_bytes``. CodecError: the policy asks
    for a treatment that is unsound here.
    """

    def __init__(
        self,
        context: OperatorContext,
        x: Tensor,
        need: Need,
        record: SiteRecord,
        beside: Sequence[Tensor] = (),
        unmade_bytes: Sequence[int] = (),
    ) -> None:
        self._context, self.record = context, record
        self._version = x._version
        self.is_external = context.hooks.is_constant(x)
        parts = tuple(beside) if self.is_external else (x, *beside)
        self.sources = tuple(context.state.sources.of(part) for part in parts)
        self._unmade_bytes = unmade_bytes
        record.need = need
        treatment = context.policy.treatment(need, record.site)
        check_sound(treatment.method, need, record.site)
        if treatment.method is Method.SPILL:
            raise CodecError(
                f"asked to spill what {record.site} saves, which is a fused normalisation; these "
                "keep or code it; give that site another treatment, or do not fuse"
            )
        record.treatment = KEEP if self.is_external else treatment

    @property
    def is_kept(self) -> bool:
        """True if the input itself is held."""
        return self.record.treatment.method is Method.KEEP

    def count_plain(self) -> tuple[Plain, ...]:
        """Count what plain PyTorch would hold."""
        ledger = self._context.state.ledger
        unmade = (Plain(ledger, Unmade(nbytes)) for nbytes in self._unmade_bytes)
        return (*(source.plain() for source in self.sources), *unmade)

    def normalise(
        self, x: Tensor, forward: Channels, written: NormOutput, rows: RowMoments | None = None
    ) -> Stored[ValueCode] | Kept:
        """Write ``written`` from ``forward`` of the input, and hold the input or that as a code."""
        if self.is_kept:
            with opened(written) as output:
                backend_of(x).emit(Encoding(x.detach(), forward, rows, output))
            return self.keep(x)
        code = self.encode(x, forward, written, rows)
        is_over = written.out.data_ptr() == x.data_ptr()  # then nothing else is left of the input
        return code if code.content.is_finite or is_over else self.keep(x)

    def keep(self, x: Tensor) -> Kept:
        """Hold the input itself."""
        self.record.treatment = KEEP
        ledger = self._context.state.ledger
        counted = () if self.is_external else (kept_holding(self.sources[0], ledger),)
        return Kept(x, self._version, self.record.site, counted)

    def encode(
        self,
        x: Tensor,
        channels: Channels | None = None,
        written: NormOutput | None = None,
        rows: RowMoments | None = None,
    ) -> Stored[ValueCode]:
        """Code ``channels`` of the input; ``written`` is the result to write meanwhile."""
        record, context = self.record, self._context
        weight, key = context.policy.weight(record.site), record.code_key(context.key)
        options = {"weight": weight, "tag": record.name_hash, "output": written, "rows": rows}
        coder = context.state.coder
        return self.stored(coder.values(x.detach(), record.treatment, key, channels, **options))

    def new_mask(self, x: Tensor) -> ElementsCode:
        """Allocate a mask of a tensor, where its code goes."""
        on_host = self.record.treatment.on_host
        return self._context.state.coder.unwritten_mask(x, on_host=on_host)

    def stored(self, content: Any) -> Stored[Any]:
        """Count what is held, for as long as the returned object lives."""
        return Stored(self._context.state.ledger, content)

    def count(self, nbytes: int) -> Holding:
        """Count bytes for as long as the returned object lives."""
        return Holding(self._context.state.ledger, nbytes)
