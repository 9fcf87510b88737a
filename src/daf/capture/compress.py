"""``daf.compress``: capture in anybody's training loop."""

from contextlib import AbstractContextManager
from threading import get_ident
from typing import Any, Self

from torch import nn

from daf.capture.capture import Capture
from daf.core import policy as policies
from daf.core.errors import OptionError
from daf.core.reports import CaptureStats, FusionReport, SiteReport
from daf.core.units import parse_optional_bytes
from daf.memory.domain import device_of
from daf.memory.glibc import return_free_memory
from daf.memory.process_memory import resident_bytes
from daf.memory.recycling_allocator import RecyclingAllocator, unsupported_reason
from daf.offload.host_codes import host_options
from daf.offload.spill import SpillOptions
from daf.pool.paged_pool import make_store
from daf.pool.store import PoolOptions
from daf.saved_tensors.sites import mix_key
from daf.torch_compat.autograd_graph import version_of
from daf.torch_compat.modules import Uncopied


class compress(Uncopied):  # noqa: N801 - used as a statement, like torch.no_grad
    """Hold what autograd saves inside the ``with`` as codes; see the module for an example.

    Enter one object once for every step; ``stats`` and ``sites()`` report the last one. Every entry
    takes fresh seeds, from ``seed``, the number of entries and the updates of parameters. From the
    first one on, and as long as the object lives, blocks that PyTorch frees on the processor are
    used again: paging them in anew takes time, and glibc's heap would keep gaps.
    """

    def __init__(
        self,
        model: nn.Module,
        bits: int | str = 2,
        *,
        seed: int = 0,
        policy: policies.Policy | None = None,
        pool_bytes: PoolOptions | str | int | None = None,
        spill: SpillOptions | None = None,
        fused: bool = False,
        chunked: bool = False,
        host_bytes: str | int | None = None,
    ) -> None:
        """Prepare for ``model``.

        Args:
            model: whose parameters and buffers are left alone, and whose module paths name sites.
            bits: 1 to 8 bits for every element wherever a lossy code is sound, ``"exact"`` for
                gradients that equal plain PyTorch's bit for bit (fused: within rounding),
                ``"plain"`` to only count.
            seed: of the run.
            policy: instead of ``bits``, a treatment for every kind of site.
            pool_bytes: the most that codes may hold, as ``"200MB"`` or an int; None: no cap. Below
                what they need, the least important planes of ``rotated`` codes are evicted, down to
                one bit; ``stats`` reports how much. A ``daf.pool.store.PoolOptions`` evicts whole
                activations, or grows by fixed steps. The attribute may be set at any time.
            spill: where tensors go whose treatment is *spill*, and how much of them.
            fused: experimental: run batch normalisation, residual addition and ReLU as one operator
                from the second entry on; let layer and root-mean-square normalisation, GELU and
                SiLU read their code directly; make no large logits that only cross-entropy reads.
                ``fusions()`` reports where, and why not elsewhere.
            chunked: experimental: large convolutions and linear layers decode their input a part
                of the batch at a time in backward, which takes less memory.
            host_bytes: pinned host memory in which codes of a model on a GPU wait for backward, as
                ``"4GB"`` or an int; None: none.

        Raises:
            OptionError: in the forward pass, where another thread is in one.
            PlatformError: ``host_bytes`` was given for a model on the processor.
            UnknownNameError: ``bits`` is none of these.
            UnitError: ``pool_bytes`` cannot be read.
            PoolFullError: in the forward pass, where even one bit and all that must stay whole
                do not fit ``pool_bytes``.
        """
        policy = policy or policies.policy_for(bits)
        host = host_options(model, host_bytes)
        policy = policy if host is None else policies.with_host_codes(policy)
        chunked = chunked or policy.chunked
        policy = policies.with_chunked_operators(policy, policy.chunk_bytes, chunked=chunked)
        self._policy = policies.with_fused_operators(policy, chunked=chunked) if fused else policy
        self._model = model
        store = make_store(pool_bytes)
        self._capture = Capture(model, store, spill, host, can_run_again=False)
        self._seed = seed
        self._entries, self._resident_bytes = 0, resident_bytes()
        is_on_cpu = device_of(model).type == "cpu" and unsupported_reason() is None
        recycles = is_on_cpu and self._policy != policies.plain_policy()
        self._recycling = RecyclingAllocator() if recycles else None
        self._open: list[AbstractContextManager[Capture]] = []
        self._thread = 0  # that entered it

    def __enter__(self) -> Self:
        if self._open and self._thread != get_ident():
            raise OptionError("asked to enter a daf.compress in two threads; make one for each")
        self._thread = get_ident()
        step_index = mix_key(self._entries, sum(map(version_of, self._model.parameters())))
        if self._recycling is not None:
            self._recycling.__enter__()
            if self._entries == 0 and resident_bytes() - self._resident_bytes > 2**26:
                return_free_memory()  # such 64 MB of glibc's, if idle, serve nobody from now on
        self._entries += 1
        step = self._capture.step(self._policy, self._seed, step_index)
        step.__enter__()
        self._open.append(step)
        return self

    def __exit__(self, *exception: Any) -> bool | None:
        return self._open.pop().__exit__(*exception)

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
        """Return the treatment and bytes of every site of the last step."""
        return self._capture.sites()

    def fusions(self) -> tuple[FusionReport, ...]:
        """Return which operators are fused (with what follows), and which not and why."""
        return self._capture.fusions()
