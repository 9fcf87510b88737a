"""What a user could do instead of DAF: each a way to make one training step with less memory."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from daf.errors import PlatformError, UnknownNameError
from daf.execution.capture import Capture
from daf.execution.microbatch import batch_size, pieces, read_loss, scale_gradients
from daf.plan import Method, Need, Policy, Treatment, exact_policy
from daf.store.default import make_store
from daf.training.batches import Batch

COMPILERS = ("c++", "g++", "clang++")
# Below this a file costs more than the bytes it frees.
SPILL_FROM_BYTES = 100_000

LossFunction = Callable[[nn.Module, Batch], Any]


@dataclass(frozen=True, slots=True)
class Setting:
    """What every peer trains: the same model, optimizer and loss."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss_fn: LossFunction
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Peer:
    """A way to train: ``step`` returns a batch's mean loss.

    ``saved_peak_bytes`` tells what is held for backward at most, where the peer counts it.
    """

    step: Callable[[Batch], float]
    saved_peak_bytes: Callable[[], int | None] = lambda: None


def make_peer(name: str, setting: Setting, amount: float) -> Peer:
    """The peer called ``name``; ``amount`` is its pieces, its share of memory or its bits.

    Raises:
        UnknownNameError: there is no such peer.
        PlatformError: it cannot work with this model or on this machine.
    """
    makers = {
        "plain": lambda: Peer(_stepper(setting)),
        "checkpoint": lambda: _checkpointed(setting),
        "accumulate": lambda: Peer(lambda batch: accumulated_step(setting, batch, int(amount))),
        "compile": lambda: _compiled(setting, None),
        "activation-budget": lambda: _compiled(setting, amount),
        "disk": lambda: _on_disk(setting),
        "minmax": lambda: _coded(setting, int(amount)),
    }
    if name not in makers:
        raise UnknownNameError(f"unknown peer {name!r}; known: {', '.join(makers)}")
    return makers[name]()


def plain_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    loss_fn: Callable[[nn.Module, Any], Any],
) -> float:
    """The loop that everybody writes: the side of a comparison without DAF."""
    optimizer.zero_grad(set_to_none=True)
    found = loss_fn(model, batch)
    # A sum with its weight, or the mean itself (the design's section 2).
    loss: Tensor = found[0] / found[1] if isinstance(found, tuple) else found
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.item()


def accumulated_step(setting: Setting, batch: Batch, count: int) -> float:
    """Static accumulation (SAGE's SGA): the batch in ``count`` pieces, one update.

    Layers with batch statistics then see those of the pieces: plain PyTorch does not refuse.
    """
    setting.optimizer.zero_grad(set_to_none=True)
    examples = batch_size(batch)
    total = weight = 0.0
    for part in pieces(batch, -(-examples // count)):
        loss = read_loss(setting.loss_fn(setting.model, part), batch_size(part))
        scaled = loss.total if loss.is_sum else loss.total * loss.weight
        scaled.backward()  # type: ignore[no-untyped-call]
        total, weight = total + scaled.item(), weight + loss.weight
    scale_gradients(list(setting.model.parameters()), 1.0 / weight)
    setting.optimizer.step()
    return total / weight


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Members of sequences and lists that are made of modules but are no row of blocks themselves.

    What one wraps by hand in ``checkpoint``: residual blocks, transformer layers.
    """
    found: list[nn.Module] = []
    for child in model.children():
        inner = blocks_of(child) if _is_row(child) or not _is_row(model) else []
        is_block = _is_row(model) and any(child.children())
        found += inner or ([child] if is_block else [])
    return found


def _is_row(module: nn.Module) -> bool:
    return isinstance(module, (nn.Sequential, nn.ModuleList))


def _stepper(setting: Setting) -> Callable[[Batch], float]:
    model, optimizer, loss_fn = setting.model, setting.optimizer, setting.loss_fn
    return lambda batch: plain_step(model, optimizer, batch, loss_fn)


def _checkpointed(setting: Setting) -> Peer:
    blocks = blocks_of(setting.model)
    if not blocks:
        raise PlatformError("the model has no sequence of blocks to checkpoint")
    for block in blocks:
        block.forward = _checkpointing(block.forward)
    return Peer(_stepper(setting))


def _checkpointing(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*inputs: Any, **named: Any) -> Any:
        return checkpoint(forward, *inputs, use_reentrant=False, **named)

    return run


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
    optimizer, loss_fn = setting.optimizer, setting.loss_fn
    return Peer(lambda batch: plain_step(compiled, optimizer, batch, loss_fn))


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

    def step(batch: Batch) -> float:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return plain(batch)

    return Peer(step)


def _is_parameter(tensor: Tensor, model: nn.Module) -> bool:
    address = tensor.untyped_storage().data_ptr()
    return any(each.untyped_storage().data_ptr() == address for each in model.parameters())


def minmax_policy(bits: int) -> Policy:
    """ActNN's and GACT's: one width of min-max codes wherever backward reads floats.

    Masks, indices and dropped content are exact, as both papers have them. Their allocation of
    widths by sensitivity is not part of it: every tensor has ``bits``.
    """
    code = Treatment(Method.MINMAX, bits)
    lossy = dict.fromkeys((Need.LINEAR, Need.NORM, Need.PRODUCT, Need.PROBABILITY), code)
    lossy[Need.SMOOTH] = Treatment(Method.DERIVATIVE, min(max(bits, 2), 4))
    exact = dict(exact_policy().by_need)
    return Policy(f"min-max {bits}", MappingProxyType(exact | lossy), rederive=False)


def _coded(setting: Setting, bits: int) -> Peer:
    capture = Capture(setting.model, make_store(None))
    policy, steps, peak_bytes = minmax_policy(bits), 0, 0

    def step(batch: Batch) -> float:
        nonlocal steps, peak_bytes
        setting.optimizer.zero_grad(set_to_none=True)
        with capture.step(policy, seed=setting.seed, step_index=steps, batch=batch):
            loss = read_loss(setting.loss_fn(setting.model, batch), batch_size(batch)).mean
        loss.backward()  # type: ignore[no-untyped-call]
        setting.optimizer.step()
        steps, peak_bytes = steps + 1, max(peak_bytes, capture.stats.held_peak_bytes)
        return loss.item()

    return Peer(step, lambda: peak_bytes)
