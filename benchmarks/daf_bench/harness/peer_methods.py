"""What a user could do instead of DAF: each a way to make one training step with less memory."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from daf.capture.capture import Capture
from daf.core.errors import PlatformError, UnknownNameError
from daf.core.policy import Policy
from daf.memory.recycling_allocator import RecyclingAllocator, unsupported_reason
from daf.pool.paged_pool import make_store
from daf.pool.store import Store
from daf.step.dry_run import dry_run
from daf.step.microbatch import LossFunction, likely_cut, read_loss
from daf.torch_compat import compiler
from daf_bench.ablations.stages import STAGES, Stage
from daf_bench.accuracy.published_allocation import gact_policy, minmax_policy
from daf_bench.harness.saved_bytes import SavedBytes
from daf_bench.harness.static_baselines import accumulating_step, checkpoint_blocks

COMPILERS = ("c++", "g++", "clang++")
# Below this a file costs more than the bytes it frees.
SPILL_FROM_BYTES = 100_000


@dataclass(frozen=True, slots=True)
class Setting:
    """What every peer trains: the same model, optimizer and loss.

    ``blocks`` are the modules that a user would checkpoint (paths in ``named_modules``).
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss_fn: LossFunction
    blocks: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Peer:
    """A way to train: ``step`` returns a batch's mean loss.

    ``saved_peak_bytes`` tells what is held for backward at most, where the peer counts it.
    ``saves_by_autograd`` says that hooks of autograd's see all that is held, so that
    it can be counted from outside (``saved_bytes``). What they do not see ``counts_in`` tells
    from then on: what is held while a block is computed again.
    """

    step: Callable[[Any], float]
    saved_peak_bytes: Callable[[], int | None] = lambda: None
    saves_by_autograd: bool = False
    counts_in: Callable[[SavedBytes], None] = lambda _: None


def make_peer(name: str, setting: Setting, amount: float) -> Peer:
    """The peer called ``name``; ``amount`` is its pieces, its share of blocks or memory, its bits.

    Raises:
        UnknownNameError: there is no such peer.
        PlatformError: it cannot work with this model or on this machine.
    """
    makers: dict[str, Callable[[], Peer]] = {
        "plain": lambda: Peer(_stepper(setting), saves_by_autograd=True),
        "no-compiler": lambda: _without_compiler(setting),
        "checkpoint": lambda: _checkpointed(setting, amount),
        "accumulate": lambda: _accumulating(setting, int(amount)),
        "compile": lambda: _compiled(setting, None),
        "activation-budget": lambda: _compiled(setting, amount),
        "disk": lambda: _on_disk(setting),
        "minmax": lambda: _coded(setting, lambda _: minmax_policy(int(amount))),
        "gact": lambda: _coded(setting, lambda batch: _gact(setting, batch, int(amount))),
        **{stage: partial(_staged, setting, STAGES[stage]) for stage in STAGES},
    }
    if name not in makers:
        raise UnknownNameError(f"unknown peer {name!r}; known: {', '.join(makers)}")
    return makers[name]()


def plain_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, loss_fn: LossFunction
) -> float:
    """The loop that everybody writes: the side of a comparison without DAF."""
    optimizer.zero_grad(set_to_none=True)
    found = loss_fn(model, batch)
    # A sum with its weight, or the mean itself (the design's section 2).
    loss: Tensor = found[0] / found[1] if isinstance(found, tuple) else found
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.item()


def lean_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    loss_fn: LossFunction,
    forward: AbstractContextManager[Any] | None = None,
) -> float:
    """The same without importing torch's compiler, if the optimizer was made without it.

    The forward pass runs in the context ``forward``, if there is one.
    """
    optimizer.zero_grad(set_to_none=True)
    with forward or nullcontext():
        loss = read_loss(loss_fn(model, batch), likely_cut(batch).size(batch)).mean
    loss.backward()  # type: ignore[no-untyped-call]
    compiler.step(optimizer)
    return loss.item()


def _stepper(setting: Setting, model: nn.Module | None = None) -> Callable[[Any], float]:
    trained = setting.model if model is None else model
    return lambda batch: plain_step(trained, setting.optimizer, batch, setting.loss_fn)


def _without_compiler(setting: Setting) -> Peer:
    """Plain, but its optimizer does not import torch's compiler, as DAF's sessions see to it."""
    return Peer(lambda batch: _lean_step(setting, batch), saves_by_autograd=True)


def _lean_step(
    setting: Setting, batch: Any, forward: AbstractContextManager[Any] | None = None
) -> float:
    return lean_step(setting.model, setting.optimizer, batch, setting.loss_fn, forward)


def _checkpointed(setting: Setting, share: float) -> Peer:
    if not setting.blocks:
        raise PlatformError("the model has no blocks that one would checkpoint")
    blocks = checkpoint_blocks(setting.model, setting.blocks, share)

    def count_in(counted: SavedBytes) -> None:
        blocks.counted = counted

    return Peer(_stepper(setting), saves_by_autograd=True, counts_in=count_in)


def _accumulating(setting: Setting, pieces: int) -> Peer:
    """Layers with batch statistics see those of the pieces: plain PyTorch does not refuse."""
    step = accumulating_step(setting.model, setting.optimizer, setting.loss_fn, pieces)

    def refusing(batch: Any) -> float:
        if likely_cut(batch).size(batch) < 2:
            raise PlatformError("a batch of one example cannot be cut into pieces")
        return step(batch)

    return Peer(refusing, saves_by_autograd=True)


def compiler_is_present() -> bool:
    """Whether ``torch.compile`` finds a C++ compiler for the CPU."""
    return any(map(shutil.which, COMPILERS))


def _compiled(setting: Setting, activation_budget: float | None) -> Peer:
    if not compiler_is_present():
        raise PlatformError(f"torch.compile needs one of {', '.join(COMPILERS)}; none is here")
    if activation_budget is not None:
        import torch._functorch.config as functorch

        functorch.activation_memory_budget = activation_budget
    compiled: Any = torch.compile(setting.model)
    return Peer(_stepper(setting, compiled))


class _File:
    """A tensor's content on disk, removed with the last reference to it."""

    def __init__(self, tensor: Tensor, path: Path) -> None:
        self._path = path
        torch.save(tensor.detach().clone(), path)  # a view alone, not all that it looks at
        weakref.finalize(self, path.unlink, missing_ok=True)

    def load(self) -> Tensor:
        found: Tensor = torch.load(self._path, weights_only=True)
        return found


def _on_disk(setting: Setting) -> Peer:
    """Every large saved tensor in a file of its own, as PyTorch's tutorial on hooks shows it."""
    folder = Path(tempfile.mkdtemp(prefix="daf-peer-"))
    weakref.finalize(setting.model, shutil.rmtree, folder, ignore_errors=True)
    plain = _stepper(setting)
    written = 0

    def pack(tensor: Tensor) -> Tensor | _File:
        nonlocal written
        is_small = tensor.numel() * tensor.element_size() < SPILL_FROM_BYTES
        if is_small or _is_parameter(tensor, setting.model):
            return tensor
        written += 1
        return _File(tensor, folder / f"{written}.pt")

    def unpack(kept: Tensor | _File) -> Tensor:
        return kept.load() if isinstance(kept, _File) else kept

    def step(batch: Any) -> float:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return plain(batch)

    return Peer(step)


def _is_parameter(tensor: Tensor, model: nn.Module) -> bool:
    address = tensor.untyped_storage().data_ptr()
    return any(each.untyped_storage().data_ptr() == address for each in model.parameters())


def _gact(setting: Setting, batch: Any, bits: int) -> Policy:
    return gact_policy(bits, setting.model, setting.loss_fn, batch)


def _coded(
    setting: Setting,
    policy_for: Callable[[Any], Policy],
    store: Store | None = None,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Peer:
    """Codes by this policy, which is settled on the first batch; ``around``: each step."""
    capture = Capture(setting.model, store or make_store(None))
    policy: Policy | None = None
    steps = peak_bytes = 0

    def step(batch: Any) -> float:
        nonlocal policy, steps, peak_bytes
        with around():
            if policy is None:
                policy = policy_for(batch)
                if policy.operators:  # what is fused is proven first
                    dry_run(capture, setting.model, policy, batch, setting.loss_fn)
            coding = capture.step(policy, seed=setting.seed, step_index=steps, batch=batch)
            loss = _lean_step(setting, batch, coding)
        steps, peak_bytes = steps + 1, max(peak_bytes, capture.stats.held_peak_bytes)
        return loss

    return Peer(step, lambda: peak_bytes)


def _staged(setting: Setting, stage: Stage) -> Peer:
    """A stage of an ablation; freed blocks are used again while it lives, as by ``compress``.

    Else its peak would be that of gaps in the C library's heap.
    """
    recycling = None if unsupported_reason() else RecyclingAllocator().__enter__()

    def choosing(_lives: object = recycling) -> AbstractContextManager[Any]:
        return stage.choosing()

    return _coded(setting, lambda _: stage.policy(), stage.make_store(), choosing)
