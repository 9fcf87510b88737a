"""Families of what trains: optimizers, autograd's own machinery, and DAF's ways through a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch._dynamo  # what optimizers import in their first step, once for all children
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import checkpoint

import daf
from daf.saved_tensors.activation_codes import smooth_code
from daf_bench.faults.family import Family, Step, gradients_of

_Make = Callable[[], Step]


def training_families() -> dict[str, Family]:
    """Return every family by name."""
    kinds = _optimizers() | _autograd() | _daf()
    return {name: Family(name, make) for name, make in kinds.items()}


def _optimizers() -> dict[str, _Make]:
    optim = torch.optim
    makes: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "sgd": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
        "adam": optim.Adam,
        "adam foreach": partial(optim.Adam, foreach=True, amsgrad=True),
        "adamw fused": partial(optim.AdamW, fused=True),
        "rmsprop": partial(optim.RMSprop, momentum=0.9, centered=True),
        "adagrad": optim.Adagrad,
        "adadelta": optim.Adadelta,
        "adamax": optim.Adamax,
        "nadam": optim.NAdam,
        "radam": optim.RAdam,
        "asgd": optim.ASGD,
        "rprop": optim.Rprop,
        "adafactor": optim.Adafactor,
        "lbfgs": partial(optim.LBFGS, max_iter=4),
    }
    return {f"optimizer {name}": partial(_updates, make) for name, make in makes.items()}


def _updates(make: Callable[..., torch.optim.Optimizer]) -> Step:
    """Two updates from the same beginning every time, and one of clipped gradients."""
    model = _network()
    start = [each.detach().clone() for each in model.parameters()]
    batch = torch.randn(32, 64)

    def step() -> Iterable[Tensor]:
        with torch.no_grad():
            for parameter, first in zip(model.parameters(), start, strict=True):
                parameter.copy_(first)
        optimizer = make(model.parameters())

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            return loss

        losses = [torch.as_tensor(optimizer.step(closure)) for _ in range(2)]
        return [*losses, *(each.detach() for each in model.parameters())]

    return step


def _network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 8)
    )


def _autograd() -> dict[str, _Make]:
    return {
        "checkpointing": lambda: _through(_checkpointed),
        "second derivative": lambda: _through(_penalised),
        "accumulated gradients": _accumulated,
        "custom function": lambda: _through(lambda model, x: _Doubled.apply(model(x))),  # type: ignore[no-any-return, no-untyped-call]
        "hooks": lambda: _through(_hooked),
        "function transforms": _transformed,
        "mixed precision": lambda: _through(_mixed),
        "sparse gradient": _sparse,
        "views and in-place": lambda: _through(_in_place),
    }


def _through(compute: Callable[[nn.Module, Tensor], Tensor]) -> Step:
    model = _network()
    batch = torch.randn(64, 64, requires_grad=True)
    return lambda: gradients_of(compute(model, batch), [batch, *model.parameters()])


def _checkpointed(model: nn.Module, batch: Tensor) -> Tensor:
    found: Tensor = checkpoint.checkpoint(model, batch, use_reentrant=False)
    return found


def _penalised(model: nn.Module, batch: Tensor) -> Tensor:
    output = model(batch)
    (slope,) = torch.autograd.grad(output.square().sum(), batch, create_graph=True)
    return output.mean() + slope.norm(dim=1)


def _accumulated() -> Step:
    model = _network()
    batch = torch.randn(64, 64)

    def step() -> Iterable[Tensor]:
        model.zero_grad(set_to_none=True)
        for part in batch.split(16):
            model(part).square().mean().backward()
        return [each.grad for each in model.parameters() if each.grad is not None]

    return step


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        ctx.save_for_backward(given)
        return 2.0 * given * given

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (given,) = ctx.saved_tensors
        return 4.0 * given * gradients[0]


def _hooked(model: nn.Module, batch: Tensor) -> Tensor:
    pack = torch.autograd.graph.saved_tensors_hooks
    with pack(lambda saved: saved.clone(), lambda packed: packed.clone()):
        output: Tensor = model(batch)
    output.register_hook(lambda gradient: gradient * 2.0)
    return output


def _transformed() -> Step:
    weight, batch = torch.randn(24, 24), torch.randn(16, 24)

    def loss(weight: Tensor, row: Tensor) -> Tensor:
        return (row @ weight).tanh().square().sum()

    return lambda: [
        torch.func.vmap(torch.func.grad(loss), (None, 0))(weight, batch),
        torch.func.jacrev(lambda each: (each @ weight).sin())(batch[0]),
    ]


def _mixed(model: nn.Module, batch: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        output: Tensor = model(batch)
    return output.float()


def _sparse() -> Step:
    table = nn.Embedding(400, 48, sparse=True)
    words = torch.randint(400, (64, 12))

    def step() -> Iterable[Tensor]:
        table.zero_grad(set_to_none=True)
        table(words).square().mean().backward()
        assert table.weight.grad is not None
        return [table.weight.grad]

    return step


def _in_place(model: nn.Module, batch: Tensor) -> Tensor:
    output: Tensor = model(batch)
    larger = output.new_zeros(64, 16)
    larger[:, :8] = output
    larger[:, 8:] = output.flip(1)
    return larger.mul_(0.5).T.relu_()


def _daf() -> dict[str, _Make]:
    # Here, because each child would try thousands of borders anew.
    smooth_code(F.gelu(torch.zeros(1, requires_grad=True)).grad_fn, bits=2)
    return {
        "daf session": partial(_session, bits="exact"),
        "daf session codes": partial(_session, bits=2),
        "daf session fused": partial(_session, bits="exact", fused=True),
        "daf compress": _compressed,
    }


def _image_network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def _image_batch() -> tuple[Tensor, Tensor]:
    return torch.randn(16, 3, 16, 16), torch.randint(10, (16,))


def _image_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _session(**options: Any) -> Step:
    """Return one step of a session of its own, from the same beginning every time."""
    model, batch = _image_network(), _image_batch()
    start = {name: value.clone() for name, value in model.state_dict().items()}

    def step() -> Iterable[Tensor]:
        model.load_state_dict(start)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with daf.Session(model, optimizer, None, sensitivity=False, **options) as session:
            loss = session.step(batch, _image_loss).loss
        return [torch.tensor(loss), *(each.detach() for each in model.parameters())]

    return step


def _compressed() -> Step:
    model, (images, labels) = _image_network(), _image_batch()

    def step() -> Iterable[Tensor]:
        model.zero_grad(set_to_none=True)
        with daf.compress(model, bits="exact"):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        return [loss, *(each.grad for each in model.parameters() if each.grad is not None)]

    return step
