"""What a capture does for a fused operator: treatment, account, recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from torch import Tensor

from daf.codecs.codes import MaskCode, ValueCode, Values
from daf.core.errors import CodecError
from daf.core.policy import KEEP, Method, Need, Policy
from daf.kernels import RowMoments
from daf.kernels.normalisation import Channels, NormOutput
from daf.operators.stand_ins import StandIns
from daf.saved_tensors.derivation import Derivation
from daf.saved_tensors.observation import Save, Watcher
from daf.saved_tensors.packed_tensor import Kept, PackedTensor, Recipe, SavedTensor, Stored
from daf.saved_tensors.packer import check_sound, kept_holding
from daf.saved_tensors.sites import SiteRecord
from daf.saved_tensors.state import SavedTensorState
from daf.torch_compat.ownership import sole_holders


class Hooks(Protocol):
    """The saved-tensor hooks of one step."""

    @property
    def hook(self) -> Callable[[Tensor], SavedTensor]:
        """What autograd calls for every tensor it saves."""

    def run(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        keywords: Mapping[str, Any],
    ) -> Any:
        """Run a function as an operator of its own, whose saves are at sites of its name."""

    def collecting(self) -> AbstractContextManager[list[SavedTensor]]:
        """Everything packed inside is the caller's to settle."""

    def is_constant(self, tensor: Tensor) -> bool:
        """True if plain PyTorch would hold nothing for us here."""

    def note_read(self, tensor: Tensor, held: object) -> None:
        """A constant may be read in backward for as long as ``held`` lives."""

    @property
    def is_replaying(self) -> bool:
        """True while a replayed call runs."""

    @property
    def watcher(self) -> Watcher | None:
        """Sees operators and saves."""

    @property
    def spilled_bytes(self) -> int:
        """What ever went to disk, or to wait on the host."""


class OperatorContext:
    """What one step brings to its fused operators."""

    def __init__(self, hooks: Hooks, state: SavedTensorState, policy: Policy, key: int) -> None:
        sole_holders()  # known before the first backward pass asks
        self.hooks = hooks
        self.state = state
        self.policy = policy
        self.key = key
        self.stand_ins = StandIns()
        self.seen: AbstractContextManager[object] = nullcontext()  # operators inside are seen

    @contextmanager
    def counted_at(self, record: SiteRecord) -> Iterator[None]:
        """Bytes that are held from inside on, by us and in plain PyTorch, count at this site."""
        ledger = self.state.ledger
        reported_bytes, plain_bytes = ledger.reported_bytes, ledger.plain_bytes
        yield
        record.plain_bytes += ledger.plain_bytes - plain_bytes
        record.held_bytes += ledger.reported_bytes - reported_bytes

    def note_moment(self) -> None:
        """An operator begins."""
        if self.hooks.watcher is not None:
            self.hooks.watcher.moment()

    def note_saved(
        self, saved: SavedTensor, x: Tensor, held: PackedTensor, holder: InputHolder, **more: Any
    ) -> None:
        """An operator's input ``x`` was saved, and is stood for by itself or its code."""
        if self.hooks.watcher is None or holder.is_external:
            return
        record = holder.record
        save = Save(
            saved,
            x,
            held,
            record.site,
            record.need,
            record.treatment,
            holder.sources[:1],
            record.held_bytes,
            ms=None,
            treatable=True,
        )
        self.hooks.watcher.saved(save._replace(**more))

    def learn(self, result: Tensor, held: PackedTensor, recipe: Recipe | None) -> None:
        """``recipe`` computes the operator's result, as long as ``held`` lives."""
        held.recipe = recipe
        if recipe is not None:
            self.state.provenance.learn(result, held)

    def learn_function(self, result: Tensor, function: Derivation) -> None:
        """``function`` of the operator's input is its result."""
        self.state.provenance.learn_function(result, function)

    def counted(self, values: Stored[Values] | Values) -> Stored[Values]:
        """The values that others derive something from."""
        return values if isinstance(values, Stored) else Stored(self.state.ledger, values)


class InputHolder:
    """Holds an operator's input ``x`` as the policy says, and counts it.

    ``is_external``: plain PyTorch would hold nothing for it. ``plain``: what it would hold.
    """

    def __init__(
        self,
        context: OperatorContext,
        x: Tensor,
        need: Need,
        record: SiteRecord,
        beside: Sequence[Tensor] = (),
    ) -> None:
        """``beside``: what plain PyTorch would save too.

        Raises:
            CodecError: the policy asks for a treatment that is unsound here.
        """
        self._context = context
        self.record = record
        self._version = x._version
        self.is_external = context.hooks.is_constant(x)
        parts = tuple(beside) if self.is_external else (x, *beside)
        self.sources = tuple(context.state.sources.of(part) for part in parts)
        self.plain = tuple(source.plain() for source in self.sources)
        record.need = need
        treatment = context.policy.treatment(need, record.site)
        check_sound(treatment.method, need, record.site)
        if treatment.method is Method.SPILL:
            raise CodecError(
                f"asked to spill what {record.site} saves, which is a fused normalisation; these "
                "keep or code it; give that site another treatment, or do not fuse"
            )
        record.treatment = KEEP if self.is_external else treatment

    def hold_input(self, x: Tensor) -> Kept | None:
        """The input itself, if that is to be held; None: it is coded."""
        if self.record.treatment.method is not Method.KEEP:
            return None
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
        with self._counting_spilled():
            code = context.state.coder.values(
                x,
                record.treatment,
                record.code_key(context.key),
                channels,
                weight=context.policy.weight(record.site),
                tag=record.name_hash,
                output=written,
                rows=rows,
            )
        return self.stored(code)

    def new_mask(self, x: Tensor) -> MaskCode:
        """Room for a mask of a tensor, where the code goes."""
        with self._counting_spilled():
            on_host = self.record.treatment.on_host
            return self._context.state.coder.unwritten_mask(x, on_host=on_host)

    def stored(self, content: Any) -> Stored[Any]:
        """Count something that is held."""
        return Stored(self._context.state.ledger, content)

    @contextmanager
    def _counting_spilled(self) -> Iterator[None]:
        hooks = self._context.hooks
        before = hooks.spilled_bytes
        yield
        self.record.spilled_bytes += hooks.spilled_bytes - before
