"""Capture: autograd holds codes instead of saved tensors.

In anybody's loop (a ``with`` statement around the forward pass and the loss;
backward may run inside or after it)::

    with daf.compress(model, bits=2):
        loss = loss_fn(model(x), y)
    loss.backward()

For a session, which names its policy, step and micro-batch::

    capture = Capture(model)
    with capture.step(policy, seed=0, step_index=7, micro_index=0, batch=batch):
        loss = ...
    loss.backward()
    capture.stats      # CaptureStats: plain and held bytes, now and at peak over the step
    capture.sites()    # SiteReport for every site of the step

How it works: ``saved_tensors_hooks`` shows every tensor that autograd saves,
and a function mode shows when the operator that saves it returns. By then the
autograd node exists, and its name and slots say what its backward will read
(``rules``); the policy turns that need into a treatment (``treatments``).
Tensors saved outside any known operator (custom ``autograd.Function``) are
kept as they are, integers and booleans packed without loss.

Calls of modules that the policy replays hold their inputs only (``replay``).

Gradients under ``rotated`` and ``minmax`` codes are unbiased where a tensor
enters them once and linearly. Behind a normalisation the squared bias measured
stays below 0.0003 of the gradient's square at 2 bits; derivative codes of
smooth activations are biased by their steps. Second derivatives through coded
tensors are those of the decoded values.

Tensors on devices other than the CPU are kept by reference: there is no kernel
for them yet. ``torch.func`` transforms do not work under saved-tensor hooks.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from daf.errors import CodecError, PlatformError
from daf.execution.accounting import Ledger, Source, Sources, strided_parts
from daf.execution.carrying import NormCarrier
from daf.execution.chunking import substitute
from daf.execution.evictions import Evictions
from daf.execution.fused_rows_call import is_row_norm
from daf.execution.fusing import Fusing, FusingMode
from daf.execution.fusing_rows import RowFusing, RowFusion
from daf.execution.fusing_smooth import SmoothFusing, SmoothFusion, is_smooth
from daf.execution.fusion import Fusion
from daf.execution.held import Held, Kept, Saved, unpacker
from daf.execution.microbatch import tensors_in_batch
from daf.execution.observation import Observer, Save, Watcher, watched
from daf.execution.operator_mode import OperatorMode, Substitute
from daf.execution.parameter_reads import ParameterReads
from daf.execution.provenance import ADDITIONS, FOLLOWED, Operands, Provenance
from daf.execution.replay import ReplayLog, Replays
from daf.execution.replay_keeper import ReplayKeeper
from daf.execution.rules import name_saves, need_of, parameter_behind
from daf.execution.sites import SiteRecord, SiteTracker, mix_key
from daf.execution.treatments import Call, Job, Treater, is_integer, is_treatable
from daf.plan import (
    KEEP,
    CaptureStats,
    FusionReport,
    Need,
    Policy,
    Site,
    SiteReport,
    Treatment,
    policy_for,
)
from daf.store.buffers import Store
from daf.store.default import make_store
from daf.store.pool import PagedStore
from daf.store.scratch import Scratch
from daf.store.spill import SpillOptions, SpillStore
from daf.units import parse_optional_bytes

_OUTSIDE_CALL = Call(None, (), {}, None, None)
_CUSTOM = "autograd.Function"
_NOISY = ("dropout", "attention", "lstm", "gru", "rnn")
_HOOKS_REFUSED = "saved tensor hooks"
_NO_DRAWS: Mapping[Site, int] = MappingProxyType({})


class Capture:
    """Replaces what autograd saves while one model runs; one thread at a time."""

    def __init__(
        self,
        model: nn.Module,
        store: Store | None = None,
        spill: SpillOptions | SpillStore | None = None,
    ) -> None:
        """Prepare for ``model``; codes go to ``store``, which is no other capture's.

        By default that is the paged pool (:func:`daf.store.default.make_store`).
        ``spill`` says where *spill* treatments write; nothing is opened before one does.
        """
        self._model = model
        self._store = store = make_store() if store is None else store
        self._spill = spill if isinstance(spill, SpillStore) else SpillStore(spill)
        spilled = self._spill
        self._ledger = Ledger(lambda: store.live_bytes, lambda: spilled.in_memory_bytes)
        self._evictions = Evictions(store)
        self._sources = Sources(self._ledger)
        self._tracker = SiteTracker(model)
        self._provenance = Provenance()
        self._fusion = Fusion()
        self._row_fusion = RowFusion()
        self._smooth_fusion = SmoothFusion()
        self._treater = Treater(store, spilled, self._ledger, self._provenance)
        self._scratch = Scratch()
        self.parameter_reads = ParameterReads()
        self._unpack = unpacker(self._scratch)
        self._replay_log = ReplayLog()

    @contextmanager
    def step(
        self,
        policy: Policy,
        seed: int,
        step_index: int,
        micro_index: int = 0,
        batch: Any = None,
        watcher: Watcher | None = None,
        draws: Mapping[Site, int] = _NO_DRAWS,
    ) -> Iterator[Capture]:
        """Capture what is saved inside; codes outlive the ``with``, hooks do not.

        Args:
            policy: what to do with each kind of site.
            seed: of the run; with the two indices and the site it fixes every code.
            step_index: which training step.
            micro_index: which part of the step's batch; 0 begins the account anew.
            batch: the caller's own tensors (any nest of them): never coded, never counted.
            watcher: told of every operator, save and read (see ``observation``).
            draws: sites whose codes take other seeds than the step gives them; every number
                but 0, which changes nothing, names a seed of its own.

        Raises:
            CodecError: the policy asks for a treatment that is unsound at a site, or for fused
                operators together with replayed calls.
            FusionError: a fused operator's inner result was read as in no step before.
            UnknownNameError: the policy replays a module that is not there or never called.
        """
        if micro_index == 0:
            self._spill.reset_peak()
            self._ledger.reset_peaks()
            self._tracker.begin_step()
            self._evictions.begin()
        self._replay_log.clear()
        self._tracker.redraw(draws)
        self._sources.forget()
        self._sources.set_external(self._own_tensors(batch))
        running = _Running(self, policy, (seed, step_index, micro_index), watcher)
        try:
            with ExitStack() as stack:
                stack.enter_context(self._tracker.following())
                stack.enter_context(self._watching_inputs())
                stack.enter_context(running.replays.watching())
                ours = running.substituting() if policy.chunked or policy.fused_rows else None
                fusing = running.fusing() if policy.fused else None
                mode = FusingMode(running, ours, fusing) if fusing else OperatorMode(running, ours)
                stack.enter_context(mode)
                unpack = self._unpack if watcher is None else watched(self._unpack, watcher)
                hooks = torch.autograd.graph.saved_tensors_hooks(running.hook, unpack)
                stack.enter_context(hooks)
                yield self
                if fusing:
                    fusing.finish()
        except RuntimeError as error:
            if _HOOKS_REFUSED in str(error):
                error.add_note(
                    "daf: torch.func transforms and saved-tensor hooks exclude each other; "
                    "move the transform outside the captured part"
                )
            raise
        finally:
            self._provenance.clear()

    def observer(self, examples: int) -> Observer:
        """For ``step``: notes what a step of so many examples holds, moment by moment."""
        return Observer(self._model, self._sources, examples, self.release_scratch)

    def release_scratch(self) -> None:
        """Give back what only saves time: memory that tensors were decoded in, or read into.

        Any thread may.
        """
        self._scratch.release()
        self._spill.drop_read_ahead()

    @property
    def pool_bytes(self) -> int | None:
        """The most that codes may hold, page tables and records included; None: no cap.

        May be set at any moment, from any thread. What is above it is given up
        at once, the least important planes first, and told in ``stats``.

        Raises:
            PlatformError: codes are not in a pool here.
        """
        return self._store.cap_bytes if isinstance(self._store, PagedStore) else None

    @pool_bytes.setter
    def pool_bytes(self, value: int | None) -> None:
        if not isinstance(self._store, PagedStore):
            raise PlatformError(
                "asked to bound the pool; codes lie in plain buffers here, because addresses are "
                "limited (ulimit -v); give pool_bytes from the start"
            )
        self._store.set_cap(value)

    @property
    def stats(self) -> CaptureStats:
        """Bytes that plain PyTorch would hold and that are held, now and at peak over the step."""
        ledger = self._ledger
        self._evictions.collect()
        self._spill.reap()
        return CaptureStats(
            plain_bytes=ledger.plain_bytes,
            plain_peak_bytes=ledger.plain_peak_bytes,
            held_bytes=ledger.held_bytes,
            held_peak_bytes=ledger.held_peak_bytes,
            sites=sum(1 for _ in self._tracker.used()),
            evicted_planes=self._evictions.planes,
            evicted_bytes=self._evictions.nbytes,
            spilled_bytes=self._spill.stored_bytes,
            spilled_peak_bytes=self._spill.stored_peak_bytes,
        )

    def sites(self) -> tuple[SiteReport, ...]:
        """What was done at every site since the step began."""
        self._evictions.collect()
        return tuple(self._tracker.reports(self._evictions.bytes_by_tag))

    def fusions(self) -> tuple[FusionReport, ...]:
        """Which operators are fused (with what follows), and which not and why.

        Empty unless the policy asks for it; known once a step has run them.
        """
        fusions = (self._fusion, self._row_fusion, self._smooth_fusion)
        return tuple(report for fusion in fusions for report in fusion.reports())

    @property
    def replays(self) -> tuple[tuple[str, int], ...]:
        """Which calls the last backward pass ran again, in order: module path and call.

        Calls of a module are counted from 0 within one ``with`` of :meth:`step`.
        """
        return tuple(self._replay_log.calls)

    def _own_tensors(self, batch: Any) -> Iterator[Tensor]:
        yield from self._model.parameters()
        yield from self._model.buffers()
        yield from tensors_in_batch(batch)

    @contextmanager
    def _watching_inputs(self) -> Iterator[None]:
        """What the model is called with belongs to the caller."""

        def note(_model: nn.Module, inputs: Any, keywords: Any) -> None:
            self._sources.add_external(_without_graph((inputs, keywords)))

        handle = self._model.register_forward_pre_hook(note, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()


def _without_graph(batch: Any) -> Iterator[Tensor]:
    return (tensor for tensor in tensors_in_batch(batch) if tensor.grad_fn is None)


def _weakly(pack: Callable[[Tensor], Saved]) -> Callable[[Tensor], Saved]:
    """The same for autograd, whose graph keeps the hook for as long as a result lives.

    Strongly, it would keep the model too: one that holds a result of its own would never go.
    """
    reference = weakref.WeakMethod(pack)

    def hook(tensor: Tensor) -> Saved:
        alive = reference()
        assert alive is not None  # hooks are called only inside the ``with`` that holds it
        return alive(tensor)

    return hook


class _Open(NamedTuple):
    """An operator that has begun: the state before it, and what is known of its arguments."""

    outer: list[Saved] | None
    first_sequence_number: int
    operands: Operands | None


class _Running:
    """One ``with`` of a capture: packs what is saved and settles it when its operator returns."""

    def __init__(
        self,
        capture: Capture,
        policy: Policy,
        key_parts: tuple[int, ...],
        watcher: Watcher | None = None,
    ) -> None:
        self._capture = capture
        self.watcher = watcher
        self._sources = capture._sources
        self._ledger = capture._ledger
        self._tracker = capture._tracker
        self._provenance = capture._provenance
        self._treater = capture._treater
        self._spill = capture._spill
        self._evictions = capture._evictions
        self._parameter_reads = capture.parameter_reads
        if (policy.fused or policy.fused_rows) and policy.replayed:
            raise CodecError(
                f"policy {policy.name!r} asks for fused operators and for replayed calls; a fused "
                "one may wait beyond the end of a call, so ask for one of the two"
            )
        self._policy = policy
        self._key = mix_key(*key_parts)
        keeper = ReplayKeeper(
            capture._ledger,
            capture._sources,
            capture._tracker,
            capture._treater,
            capture._scratch,
            self._parameter_reads,
            self._hold_input,
            self.is_constant,
        )
        self.replays = Replays(capture._model, policy.replayed, keeper, capture._replay_log)
        self._pending: list[Saved] | None = None  # None: no operator is running
        self.hook = _weakly(self.pack)

    # --- hooks ------------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Saved:
        """The hook that autograd calls for every tensor it saves."""
        if self.replays.is_running:
            with torch._C.DisableTorchFunction():
                return self.replays.pack(tensor)
        if self._pending is not None:
            saved = Saved(tensor)
            self._pending.append(saved)
            return saved
        with torch._C.DisableTorchFunction():
            saved = Saved(tensor)
            self._settle([saved], _CUSTOM, _OUTSIDE_CALL)
            return saved

    def begin(self, operator: Callable[..., Any], arguments: tuple[Any, ...]) -> _Open:
        """An operator is about to run."""
        operands = None
        if self.watcher is not None and self._pending is None:
            self.watcher.moment()
        if self.replays.is_running:
            self.replays.note_operator(operator)
        elif operator in FOLLOWED and self._policy.rederive:
            operands = self._provenance.operands(arguments)
        opened = _Open(self._pending, torch._C._autograd._get_sequence_nr(), operands)
        self._pending = []
        return opened

    def end(
        self,
        opened: _Open,
        operator: Callable[..., Any],
        arguments: tuple[Any, ...],
        keywords: Mapping[str, Any],
        result: Any,
    ) -> None:
        """It returned: settle what it saved."""
        pending, self._pending = self._pending, opened.outer
        if pending:
            name_saves(result, opened.first_sequence_number)
            call = Call(operator, arguments, keywords, result, opened.operands)
            self._settle(pending, getattr(operator, "__name__", type(operator).__name__), call)
        elif opened.operands is not None and operator in ADDITIONS and not keywords:
            self._provenance.learn_sum(arguments, result, opened.operands)

    def abandon(self, opened: _Open) -> None:
        """It raised: what it saved is dropped."""
        for saved in self._pending or ():
            saved.drop()
        self._pending = opened.outer

    @contextmanager
    def collecting(self) -> Iterator[list[Saved]]:
        """Everything packed inside is the caller's to settle; dropped if that fails."""
        outer, self._pending = self._pending, []
        collected = self._pending
        try:
            yield collected
        except BaseException:
            for saved in collected:
                saved.drop()
            raise
        finally:
            self._pending = outer

    def note_read(self, tensor: Tensor, held: object) -> None:
        """A constant may be read in backward for as long as ``held`` lives."""
        self._parameter_reads.note(tensor, held)

    def substituting(self) -> Substitute:
        """Runs other functions for some calls; never in replayed ones, which run again without."""
        chunked = substitute(self.hook, self._policy.chunk_bytes) if self._policy.chunked else None
        carrier = self._norm_carrier() if self._policy.fused_rows else None
        rows = RowFusing(self._capture._row_fusion, carrier) if carrier else None
        smooth = SmoothFusing(self._capture._smooth_fusion, carrier) if carrier else None

        def choose(
            function: Callable[..., Any], arguments: tuple[Any, ...], keywords: Mapping[str, Any]
        ) -> Callable[..., Any]:
            if self.replays.is_running:
                return function
            if rows is not None and is_row_norm(function):
                return rows.chosen(function, arguments, keywords)
            if smooth is not None and is_smooth(function):
                return smooth.chosen(function, arguments, keywords)
            return function if chunked is None else chunked(function, arguments, keywords)

        return choose

    def fusing(self) -> Fusing:
        """Lets normalisations wait for their ReLU."""
        return Fusing(self._capture._fusion, self._norm_carrier())

    def _norm_carrier(self) -> NormCarrier:
        parts = (self._ledger, self._sources, self._tracker, self._provenance)
        return NormCarrier(self, self._policy, self._key, self._capture._store, *parts)

    # --- settling ---------------------------------------------------------------------------

    def _settle(self, pending: list[Saved], operator: str, call: Call) -> None:
        try:
            self._settle_all(pending, operator, call)
        finally:
            for saved in pending:
                saved.drop()  # which settling has done, unless it raised

    def _settle_all(self, pending: list[Saved], operator: str, call: Call) -> None:
        needs = [self._need(saved, operator, call) for saved in pending]
        path, count = self._tracker.next_call(operator)
        for place, (saved, need) in enumerate(zip(pending, needs, strict=True)):
            assert saved.tensor is not None
            if self.is_constant(saved.tensor):
                site = Site(path, operator, count, place)
                kept = Kept(saved.tensor, saved.version, site)
                self._parameter_reads.note(saved.tensor, kept)
                saved.settle(kept)
            else:
                record = self._tracker.record(path, operator, count, place)
                self._settle_one(saved, need, record, call)
        self._evictions.collect()

    def _need(self, saved: Saved, operator: str, call: Call) -> Need:
        tensor = saved.tensor
        assert tensor is not None
        need = need_of(saved, self.is_constant)
        if need is Need.EXACT and is_integer(tensor):
            return Need.INTEGER
        if need is Need.LINEAR and _may_be_noise(tensor, operator, call):
            return Need.TWO_VALUED
        return need

    def _settle_one(self, saved: Saved, need: Need, record: SiteRecord, call: Call) -> None:
        tensor = saved.tensor
        assert tensor is not None
        record.need = need
        plain_before, told_before = self._ledger.plain_bytes, self._ledger.told_bytes
        spilled_before = self._spill.taken_bytes
        sources = tuple(self._sources.of(part) for part in strided_parts(tensor))
        plain = tuple(source.plain() for source in sources)
        start_s = time.perf_counter()
        held, record.treatment = self._hold(saved, tensor, need, record, sources, call)
        if self.watcher is not None:
            self.watcher.saved(
                Save(
                    saved,
                    tensor,
                    held,
                    record.site,
                    need,
                    record.treatment,
                    sources,
                    self._ledger.told_bytes - told_before,
                    1000.0 * (time.perf_counter() - start_s),
                    is_treatable(tensor),
                )
            )
        record.plain_bytes += self._ledger.plain_bytes - plain_before
        record.held_bytes += self._ledger.told_bytes - told_before
        record.spilled_bytes += self._spill.taken_bytes - spilled_before
        saved.settle(held, plain)

    def _hold(
        self,
        saved: Saved,
        tensor: Tensor,
        need: Need,
        record: SiteRecord,
        sources: tuple[Source, ...],
        call: Call,
    ) -> tuple[Held, Treatment]:
        site = record.site
        treatment = self._policy.treatment(need, record.site)
        if not is_treatable(tensor):
            return self._treater.keep(tensor, saved.version, site, sources), KEEP
        key = record.code_key(self._key)
        weight, tag = self._policy.weight(site), record.name_hash
        job = Job(saved, tensor, need, treatment, sources[0], call, site, key, weight, tag)
        return self._treater.treat(job, rederive=self._policy.rederive)

    def _hold_input(
        self, saved: Saved, need: Need, record: SiteRecord, sources: tuple[Source, ...]
    ) -> tuple[Held, Treatment]:
        """An input of a replayed call."""
        assert saved.tensor is not None
        spilled_before = self._spill.taken_bytes
        held = self._hold(saved, saved.tensor, need, record, sources, _OUTSIDE_CALL)
        record.spilled_bytes += self._spill.taken_bytes - spilled_before
        return held

    def is_constant(self, tensor: Tensor) -> bool:
        """Is this a parameter, a buffer, the caller's batch, or a view or cast copy of one?"""
        if tensor.layout is not torch.strided:
            parts = strided_parts(tensor)
            return bool(parts) and all(map(self._sources.is_external, parts))
        if self._sources.is_external(tensor):
            return True
        leaf = parameter_behind(tensor)
        return leaf is not None and leaf is not tensor and self.is_constant(leaf)


def _may_be_noise(tensor: Tensor, operator: str, call: Call) -> bool:
    """Is this a factor that a dropping operator made itself?"""
    return (
        not tensor.requires_grad
        and any(word in operator for word in _NOISY)
        and all(tensor is not argument for argument in call.arguments)
    )


class compress:  # noqa: N801 - used as a statement, like torch.no_grad
    """Hold what autograd saves inside the ``with`` as codes; see the module for an example.

    One object may be entered once for every step. ``stats`` and ``sites()``
    tell what the last step cost. Every entry takes fresh seeds: they follow from
    ``seed``, how often the object was entered, and how often the parameters
    were updated.
    """

    def __init__(
        self,
        model: nn.Module,
        bits: int | str = 2,
        *,
        seed: int = 0,
        policy: Policy | None = None,
        pool_bytes: str | int | None = None,
        spill: SpillOptions | None = None,
        fused: bool = False,
        chunked: bool = False,
    ) -> None:
        """Prepare for ``model``.

        Args:
            model: whose parameters and buffers are left alone, and whose module paths name sites.
            bits: 1 to 8 bits for every element wherever a lossy code is sound, ``"exact"``
                for gradients that equal plain PyTorch's bit for bit, ``"plain"`` to only count.
            seed: of the run.
            policy: instead of ``bits``, a treatment for every kind of site.
            pool_bytes: the most that codes may hold, as ``"200MB"`` or an int. Below what
                they need, the least important planes of ``rotated`` codes are given up, down
                to one bit; ``stats`` says how much. The attribute may be changed at any time.
            spill: where tensors go whose treatment is *spill*, and how much of them.
            fused: experimental: run batch normalisation, residual addition and ReLU as one
                operator from the second entry on, and layer and root-mean-square normalisation
                so that they read their code directly; ``fusions()`` tells where, and why not
                elsewhere.
            chunked: experimental: large convolutions and linear layers decode their input a part
                of the batch at a time in backward, which takes less memory.

        Raises:
            ValueError: ``bits`` is none of these, or ``pool_bytes`` cannot be read.
            PoolFullError: in the forward pass, where even one bit and all that must stay whole
                do not fit ``pool_bytes``.
        """
        self._policy = policy or policy_for(bits)
        self._policy = replace(
            self._policy,
            fused=fused or self._policy.fused,
            fused_rows=fused or self._policy.fused_rows,
            chunked=chunked or self._policy.chunked,
        )
        self._model = model
        self._capture = Capture(model, make_store(parse_optional_bytes(pool_bytes)), spill)
        self._seed = seed
        self._entries = 0
        self._open: list[AbstractContextManager[Capture]] = []

    def __enter__(self) -> Self:
        step_index = mix_key(self._entries, sum(p._version for p in self._model.parameters()))
        self._entries += 1
        step = self._capture.step(self._policy, self._seed, step_index)
        step.__enter__()
        self._open.append(step)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        return self._open.pop().__exit__(kind, error, trace)

    @property
    def pool_bytes(self) -> int | None:
        """The most that codes may hold; setting it acts at once, in mid-step too."""
        return self._capture.pool_bytes

    @pool_bytes.setter
    def pool_bytes(self, value: str | int | None) -> None:
        self._capture.pool_bytes = parse_optional_bytes(value)

    @property
    def stats(self) -> CaptureStats:
        """Bytes that plain PyTorch would hold and that are held, now and at peak over the step."""
        return self._capture.stats

    def sites(self) -> tuple[SiteReport, ...]:
        """What was done at every site of the last step."""
        return self._capture.sites()

    def fusions(self) -> tuple[FusionReport, ...]:
        """Which operators are fused (with what follows), and which not and why."""
        return self._capture.fusions()
