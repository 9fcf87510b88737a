"""Ctrl-C at any line of what DAF changes in PyTorch meanwhile leaves PyTorch as it was found."""

from __future__ import annotations

import pytest
import torch
from daf_bench.faults.interrupts import InterruptedAt
from torch import nn
from torch.amp import GradScaler

from daf.core.replaced import replaced
from daf.step.loss_weights import scale_watched
from daf.torch_compat.autograd_graph import pack_hook, saved_tensor_hooks
from daf.torch_compat.compiler import eagerly
from daf.torch_compat.modules import around_calls


def found() -> tuple[object, ...]:
    """What others read while nobody of ours listens."""
    stance = torch._dynamo.eval_frame._stance
    hooks = torch.autograd.graph.disable_saved_tensors_hooks
    return stance.stance, hooks, nn.Module.__call__, pack_hook(), GradScaler.scale


def is_interrupted(line: int, owner: object) -> bool:
    try:
        with (
            InterruptedAt(line),
            replaced(owner, own="ours", other="ours"),
            eagerly(),
            around_calls(lambda *_: None),
            saved_tensor_hooks(lambda tensor: tensor, lambda tensor: tensor),
            scale_watched(),
        ):
            pass
    except KeyboardInterrupt:
        return True
    return False


@pytest.mark.parametrize("stance", ["default", "eager_on_recompile"])
def test_pytorch_is_as_it_was_found(stance: str) -> None:
    class Owner:
        own = "the class's"

    pytest.importorskip("torch._dynamo")
    owner, line = Owner(), 1
    owner.other = "theirs"  # type: ignore[attr-defined]
    with torch.compiler.set_stance(stance):
        before = found()
        while is_interrupted(line, owner):
            assert found() == before, line
            assert vars(owner) == {"other": "theirs"}, line
            line += 1
        assert found() == before
    assert line > 60  # lines of coming and going
