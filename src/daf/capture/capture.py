"""Capture: autograd holds codes instead of saved tensors."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from daf.capture.compiled_calls import apart
from daf.capture.saved_tensor_hooks import SavedTensorHooks
from daf.codecs.coder import Coder
from daf.codecs.scratch import Scratch
from daf.core.errors import PlatformError
from daf.core.garbage import young_left_alone
from daf.core.policy import Policy, Site
from daf.core.reports import CaptureStats, FusionReport, SiteReport
from daf.offload.host_codes import HostCodes, HostOptions
from daf.offload.spill import SpillOptions, SpillStore
from daf.operators.operator_context import OperatorContext
from daf.operators.registry import OperatorDispatch, OperatorFamilies
from daf.pool.device_pool import DeviceStores
from daf.pool.paged_pool import PagedStore, make_store
from daf.pool.store import Store
from daf.recompute.replay import ReplayLog
from daf.saved_tensors.ledger import Ledger, Sources
from daf.saved_tensors.observation import Watcher, watched
from daf.saved_tensors.packed_tensor import unpacker
from daf.saved_tensors.packer import Packer
from daf.saved_tensors.provenance import Provenance
from daf.saved_tensors.sites import SiteTracker
from daf.saved_tensors.state import Evictions, SavedTensorState
from daf.torch_compat.autograd_graph import saved_tensor_hooks
from daf.torch_compat.compiled_modules import CompiledModules
from daf.torch_compat.modules import OwnHook
from daf.torch_compat.operator_mode import OperatorMode
from daf.torch_compat.parameter_reads import ParameterReads
from daf.torch_compat.pytree import tensors_in_batch

_NO_DRAWS: Mapping[Site, int] = MappingProxyType({})


class Capture:
    """Replaces what autograd saves while one model runs; one thread at a time.

    Args:
        model: what is captured.
        store: where codes go; no other capture's. Default: the paged pool
            (``daf.pool.paged_pool.make_store``). Codes of tensors on a GPU go to a pool there under
            the same cap (``devices``).
        spill: where *spill* treatments write; nothing is opened before one does.
        host: how much of a device's codes may wait in host memory; None: none.
        can_run_again: whoever runs a step runs it again after a ``FusionError``. Else fewer raise
            it: what a deferred normalisation is computed from lives as long as its result.
    """

    def __init__(
        self,
        model: nn.Module,
        store: Store | None = None,
        spill: SpillOptions | SpillStore | None = None,
        host: HostOptions | HostCodes | None = None,
        *,
        can_run_again: bool = True,
    ) -> None:
        self.model, self._can_run_again = model, can_run_again
        self._store = store = make_store() if store is None else store
        self.devices = devices = DeviceStores(self.pool_bytes)
        self.spill = spill = spill if isinstance(spill, SpillStore) else SpillStore(spill)
        self.host = host = HostCodes(host) if isinstance(host, HostOptions) else host
        elsewhere: list[SpillStore | HostCodes] = [spill] if host is None else [spill, host]
        self._elsewhere = elsewhere
        ledger = Ledger(
            lambda: store.live_bytes + devices.live_bytes,
            lambda: spill.in_memory_bytes + (host.device_bytes if host else 0),
            lambda: sum(each.taken_bytes for each in elsewhere),
        )
        if host is not None:
            host.on_moved = ledger.note_held
        self._operators = OperatorFamilies()
        self._replay_log = ReplayLog()
        coder, provenance = Coder(store, devices, host), Provenance()
        self._state = SavedTensorState(
            coder,
            Packer(coder, spill, ledger, provenance),
            ledger,
            Sources(ledger),
            SiteTracker(model),
            provenance,
            Evictions(store, devices),
            Scratch(),
            ParameterReads(),
            {},
            {},
        )

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
    ) -> "Iterator[Capture]":
        """Capture what is saved inside; codes outlive the ``with``.

        Args:
            policy: what to do with each kind of site.
            seed: of the run; with the two indices and the site it fixes every code.
            step_index: which training step.
            micro_index: which micro-batch of the step; 0 starts peaks and reports anew.
            batch: the caller's own tensors in any nest, which are never coded or counted.
            watcher: gets every operator, save and read (see ``observation``).
            draws: sites whose codes take other seeds than the step's, one for every number but 0.

        Raises:
            CodecError: the policy asks for a treatment that is unsound at a site, or for fused
                operators together with replayed calls.
            FusionError: a fused operator's inner result was read as in no step before.
            UnknownNameError: the policy replays a module that is not there or never called, or
                names an operator that is not registered.
        """
        if self.host is not None:
            self.host.begin_pass()
        if micro_index == 0:
            for each in self._elsewhere:
                each.reset_peak()
            self._state.ledger.reset_peaks()
            self._state.tracker.begin_step()
            self._state.evictions.begin()
        self._replay_log.clear()
        self._state.tracker.redraw(draws)
        self.sources.begin_step(
            chain(self.model.parameters(), self.model.buffers(), tensors_in_batch(batch))
        )
        keys = (seed, step_index, micro_index)
        running = SavedTensorHooks(self.model, self._state, self._replay_log, policy, keys, watcher)
        try:
            with self._entered(running, policy, watcher):
                yield self
        finally:
            running.close()
            self._state.provenance.clear()

    @contextmanager
    def _entered(
        self, running: SavedTensorHooks, policy: Policy, watcher: Watcher | None
    ) -> Iterator[None]:
        """Enter hooks and modes, in the order in which they must lie on each other."""
        compiled = CompiledModules(self.model)
        with ExitStack() as stack:
            stack.enter_context(young_left_alone())
            stack.enter_context(self._state.tracker.following(compiled))
            stack.enter_context(self._watching_inputs(compiled))
            stack.enter_context(running.replays.watching())
            operators = None
            if policy.operators:
                again, own = self._can_run_again, self._operators.named(policy.operators)
                at_work = running, self._state, policy, running.key
                operators = OperatorDispatch(own, OperatorContext(*at_work, can_run_again=again))
            stack.enter_context(operators.mode if operators else OperatorMode(running.run))
            stack.enter_context(apart(compiled, self.parameter_reads.unseen))
            pack: Any = running.hook
            if compiled.attributes:  # else it would be compiled with what it is called from
                pack = torch.compiler.disable(pack)  # type: ignore[no-untyped-call]
            unpack = unpacker(self._state.scratch)
            unpack = unpack if watcher is None else watched(unpack, watcher)
            stack.enter_context(saved_tensor_hooks(pack, unpack))
            if running.recorder is not None and not compiled.attributes:  # compilers trace modes
                stack.enter_context(running.recorder)
            yield
            if operators:
                operators.finish()

    @property
    def parameter_reads(self) -> ParameterReads:
        """Which parameters backward may still read."""
        return self._state.parameter_reads

    @property
    def sources(self) -> Sources:
        """The storages that the capture knows: parameters, buffers, the caller's batch, saves."""
        return self._state.sources

    def release_scratch(self) -> None:
        """Free memory that tensors were decoded in, or read into; from any thread."""
        self._state.scratch.release()
        self.spill.drop_read_ahead()
        if self.host is not None:
            self.host.drop_staged()

    def wait_until_packed(self) -> None:
        """Wait until the processor has packed everything of a device."""
        if self.host is not None:
            self.host.wait_until_packed()

    @property
    def pool_bytes(self) -> int | None:
        """The most bytes that codes may hold, on the host and on each device; None: no cap.

        Page tables and records count, but for tables that a device reads. May be set at any moment,
        from any thread: what is above is evicted at once, least important first (see ``stats``).

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
        self.devices.set_cap(value)

    @property
    def stats(self) -> CaptureStats:
        """Bytes that plain PyTorch would hold and that are held, now and at peak over the step."""
        ledger, evictions = self._state.ledger, self._state.evictions
        evicted_bytes = evictions.collect()
        self.spill.reap()
        return CaptureStats(
            plain_bytes=ledger.plain_bytes,
            plain_peak_bytes=ledger.plain_peak_bytes,
            held_bytes=ledger.held_bytes,
            held_peak_bytes=ledger.held_peak_bytes,
            sites=sum(1 for _ in self._state.tracker.used()),
            evicted_planes=evictions.planes,
            evicted_bytes=evicted_bytes,
            spilled_bytes=sum(each.stored_bytes for each in self._elsewhere),
            spilled_peak_bytes=sum(each.stored_peak_bytes for each in self._elsewhere),
        )

    def sites(self) -> tuple[SiteReport, ...]:
        """Return the treatment and bytes of every site since the step began."""
        self._state.evictions.collect()
        return tuple(self._state.tracker.reports(self._state.evictions.bytes_by_tag))

    def fusions(self) -> tuple[FusionReport, ...]:
        """Return which operators are fused (with what follows), and which not and why.

        Empty unless the policy names operators and a step has run them.
        """
        return tuple(report for each in self._operators.all() for report in each.table.reports())

    def fallen_back(self) -> tuple[FusionReport, ...]:
        """Return which operators were fused with what follows, and are no more, and why."""
        return tuple(each for op in self._operators.all() for each in op.table.fallen_back())

    def stop_deferring(self, reason: str) -> bool:
        """Compute every result where PyTorch does from the next step on; False: that is so."""
        found = [e.table.stop_deferring(e.alone, reason) for e in self._operators.all()]
        return any(found)

    @property
    def replays(self) -> tuple[tuple[str, int], ...]:
        """Calls that the last backward ran again, in order: path, number (from 0) in ``step``."""
        return tuple(self._replay_log.calls)

    @contextmanager
    def _watching_inputs(self, compiled: CompiledModules) -> Iterator[None]:
        """Name the tensors that the model is called with external: they are the caller's."""

        def note(_model: nn.Module, inputs: Any, keywords: Any) -> None:
            given = tensors_in_batch((inputs, keywords))
            self.sources.add_external(tensor for tensor in given if tensor.grad_fn is None)

        if compiled.is_traced(self.model):
            yield
            return
        with self.model.register_forward_pre_hook(OwnHook(note), with_kwargs=True):
            yield
