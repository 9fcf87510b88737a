"""A forward pass of a few examples, which finds what may be fused before the first real step.

The pass runs unfused and so holds more than a fused one: next to nothing on a few examples, but for
the logits of many classes, whose loss holds them once.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from daf.capture.capture import Capture
from daf.core.policy import Policy
from daf.operators.linear_cross_entropy import logits_loss
from daf.operators.protocol import OperatorCall
from daf.step.batch_cut import BatchCut
from daf.step.microbatch import LossFunction, likely_cut
from daf.step.state_snapshot import preserved_state
from daf.torch_compat.modules import OwnHook, modules_of
from daf.torch_compat.operator_mode import Arguments, Keywords, OperatorMode

EXAMPLES = 4  # batch statistics need several; tensors of fewer elements are not worth fusing


def dry_run(
    capture: Capture,
    model: nn.Module,
    policy: Policy,
    batch: Any,
    loss_fn: LossFunction,
    examples: int = EXAMPLES,
    cut: BatchCut | None = None,
) -> None:
    """Run ``loss_fn`` forward on the first examples of ``batch``; nothing of the model changes.

    ``cut``: how to cut the batch; None: the likeliest way. Where no part runs, the whole batch
    does. Afterwards ``capture.fusions()`` lists what later steps of the capture will fuse. Raises
    CodecError if the policy asks for a treatment that is unsound at a site.
    """

    def forward(part: Any) -> None:
        with (
            preserved_state(model, loss_fn),
            OperatorMode(_run),
            capture.step(policy, seed=0, step_index=0, batch=part),
        ):
            loss_fn(model, part)

    _on_few(forward, batch, examples, cut or likely_cut(batch))


def build_lazy(model: nn.Module, batch: Any, loss_fn: LossFunction) -> None:
    """Build lazy modules by a forward pass of a few examples; nothing else changes."""
    lazy = [each for each in modules_of(model) if isinstance(each, LazyModuleMixin)]
    if not any(each.has_uninitialized_params() for each in lazy):
        return
    built: list[tuple[Tensor, Tensor]] = []

    def note(module: nn.Module, _: Any) -> None:
        built.extend((each, each.clone()) for each in module.buffers(recurse=False))

    with preserved_state(model, loss_fn), ExitStack() as stack:
        for each in lazy:  # after their own hooks, which build them
            stack.callback(each.register_forward_pre_hook(OwnHook(note)).remove)
        _on_few(lambda part: loss_fn(model, part), batch, EXAMPLES, likely_cut(batch))
    for buffer, value in built:
        buffer.copy_(value)


def _on_few(forward: Callable[[Any], Any], batch: Any, examples: int, cut: BatchCut) -> None:
    is_whole = cut.size(batch) <= examples
    try:
        forward(batch if is_whole else cut.take(batch, 0, examples))
    except Exception:  # the user's own code may raise anything for a part
        if is_whole:
            raise
        forward(batch)


def _run(function: Callable[..., Any], arguments: Arguments, keywords: Keywords) -> Any:
    found = logits_loss(OperatorCall(function, arguments, keywords))
    return function(*arguments, **keywords) if found is None else found
