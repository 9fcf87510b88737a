"""A job's key: the same in another process, another for whatever a measurement depends on."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf.step.job_key import job_key

SMOOTHING = 0.1


@dataclass
class Shape:
    width: int = 16
    scale: float = 1.0


def scaled(x: Tensor, shape: Shape) -> Tensor:
    return x * shape.scale


class Network(nn.Module):
    def __init__(self, shape: Shape | None = None, names: tuple[str, ...] = ("first",)) -> None:
        super().__init__()
        self.shape, self.names = shape or Shape(), [*names]
        self.body = nn.Sequential(nn.Linear(6, self.shape.width), nn.Dropout(0.1))
        self.head = nn.Linear(self.shape.width, 5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.features(x))
        return result

    def features(self, x: Tensor) -> Tensor:
        return scaled(torch.tanh(self.body(x)), self.shape)


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=SMOOTHING)


class Weighted:
    def __init__(self, weight: float) -> None:
        self.weight = weight

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return self.weight * loss(model, batch)


def closing_over(value: Any) -> Callable[..., Any]:
    return lambda model, batch: (value, loss(model, batch))[1]


def images(examples: int = 8) -> tuple[Tensor, Tensor]:
    return torch.zeros(examples, 6), torch.zeros(examples, dtype=torch.long)


def key(
    model: nn.Module | None = None,
    batch: Any = None,
    loss_fn: Callable[..., Any] = loss,
    kind: Callable[..., Any] = torch.optim.SGD,
    **options: Any,
) -> str | None:
    model = model or Network()
    optimizer = kind(model.parameters(), lr=0.1)
    return job_key(model, optimizer, batch or images(), loss_fn, options)


def hooked() -> nn.Module:
    model = Network()
    model.body.register_forward_hook(lambda *_: None)
    return model


def half() -> nn.Module:
    return nn.Dropout()


def tied() -> nn.Module:
    model = Network(Shape(6))
    model.head.weight = model.body[0].weight  # type: ignore[assignment]
    return model


def changed(name: str, value: Any) -> nn.Module:
    model = Network()
    setattr(model, name, value)
    return model


def test_values_rates_and_another_process_change_nothing() -> None:
    first = key()
    assert first is not None
    torch.manual_seed(7)
    assert key() == first
    model, (data, labels) = Network(), images()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    assert job_key(model, optimizer, (data + 1.0, labels + 1), loss, {}) == first
    program = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); "
        "from daf.torch_compat import compiler; compiler.keep_out(); "  # it takes seconds to import
        "import tests.step.test_job_key as job; print(job.key(), end='')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == first, done.stderr


CHANGES = {
    "width": lambda: key(Network(Shape(32))),
    "an attribute's attribute": lambda: key(Network(Shape(scale=2.0))),
    "a list's entry": lambda: key(Network(names=("second",))),
    "a new attribute": lambda: key(changed("is_fast", True)),
    "a part": lambda: key(changed("head", nn.Linear(16, 5, bias=False))),
    "a rate of dropout": lambda: key(
        changed("body", nn.Sequential(nn.Linear(6, 16), nn.Dropout()))
    ),
    "tied weights": lambda: key(tied()),
    "untied weights of that size": lambda: key(Network(Shape(6))),
    "evaluation": lambda: key(Network().eval()),
    "frozen": lambda: key(Network().requires_grad_(False)),
    "a hook": lambda: key(hooked()),
    "another batch": lambda: key(batch=images(9)),
    "another type of data": lambda: key(batch=(images()[0].double(), images()[1])),
    "another structure": lambda: key(batch=[*images()]),
    "another optimizer": lambda: key(kind=torch.optim.AdamW),
    "another kind of update": lambda: key(kind=partial(torch.optim.SGD, foreach=True)),
    "momentum": lambda: key(kind=partial(torch.optim.SGD, momentum=0.9)),
    "other parameters": lambda: key(kind=lambda all_, lr: torch.optim.SGD([*all_][:2], lr=lr)),
    "parameters otherwise chosen": lambda: key(
        kind=lambda all_, lr: torch.optim.SGD([*all_][1:3], lr=lr)
    ),
    "an option": lambda: key(tolerance=0.1),
    "another option": lambda: key(tolerance=0.2),
    "a loss's value": lambda: key(loss_fn=Weighted(1.0)),
    "another value": lambda: key(loss_fn=Weighted(2.0)),
    "what it closes over": lambda: key(loss_fn=closing_over(1)),
    "something else": lambda: key(loss_fn=closing_over(2)),
    "bound arguments": lambda: key(loss_fn=partial(loss)),
}


def test_whatever_a_measurement_depends_on_changes_it() -> None:
    found = {name: make() for name, make in CHANGES.items()} | {"as it is": key()}
    assert None not in found.values()
    assert len({*found.values()}) == len(found)


def test_so_does_a_global_value_a_function_called_and_the_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [key()]
    monkeypatch.setattr(sys.modules[__name__], "SMOOTHING", 0.2)
    found.append(key())
    monkeypatch.setattr(sys.modules[__name__], "scaled", lambda x, shape: x + shape.scale)
    found.append(key())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    found.append(key())
    monkeypatch.setattr(Network, "features", lambda self, x: self.body(x))
    found.append(key())
    assert None not in found
    assert len({*found}) == 5


class Depth:
    depth = 2


class Deeper(Depth):
    first, second = True, False


def test_a_class_s_own_values_count_by_name_and_so_does_what_its_methods_wrap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [key(changed("kind", Depth())), key(changed("kind", Deeper()))]
    monkeypatch.setattr(Depth, "depth", 3)
    found += [key(changed("kind", Depth())), key(changed("kind", Deeper()))]
    monkeypatch.setattr(Deeper, "first", False)
    monkeypatch.setattr(Deeper, "second", True)
    found.append(key(changed("kind", Deeper())))
    monkeypatch.setattr(Deeper, "sizes", [1, 2], raising=False)
    found.append(key(changed("kind", Deeper())))
    monkeypatch.setattr(Deeper, "run", torch.no_grad()(lambda _: 1), raising=False)
    found.append(key(changed("kind", Deeper())))
    monkeypatch.setattr(Deeper, "run", torch.no_grad()(lambda _: 2), raising=False)
    found.append(key(changed("kind", Deeper())))
    assert None not in found
    assert len({*found}) == len(found)


def test_a_module_of_the_user_s_is_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    found = []
    for number in (1, 22):
        (tmp_path / "users_library.py").write_text(f"def act(x): return x * {number}\n")
        job_key.__globals__["_file"].cache_clear()
        module = importlib.import_module("users_library")

        def using(model: nn.Module, batch: Any) -> Tensor:
            return MODULES["library"].act(loss(model, batch))

        monkeypatch.setitem(MODULES, "library", module)
        found.append(key(loss_fn=using))
    assert None not in found
    assert found[0] != found[1]


MODULES: dict[str, Any] = {}


def test_a_data_set_in_python_is_not_read_through() -> None:
    assert key(changed("rows", [(number,) for number in range(200_000)])) is None


def test_what_cannot_be_told_apart_has_no_key() -> None:
    assert key(changed("pending", {object()})) is None
    assert key(loss_fn=closing_over(each for each in "abc")) is None
    assert key(changed("config", SimpleNamespace(width=3))) is not None


def test_what_refers_to_itself_has_one() -> None:
    model = Network()
    model.names.append(model.names)  # type: ignore[arg-type]
    model.shape.owner = [model]  # type: ignore[attr-defined]
    assert key(model) == key(model) is not None
