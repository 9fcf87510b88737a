"""Fast walks over a model find what PyTorch's own do, in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from daf.torch_compat.modules import modules_of, parameters_of


def assert_same_walks(model: nn.Module) -> None:
    assert list(map(id, modules_of(model))) == list(map(id, model.modules()))
    assert list(map(id, parameters_of(model))) == list(map(id, model.parameters()))


class Part(nn.Module):
    def __init__(self, parameters: list[nn.Parameter | None]) -> None:
        super().__init__()
        for index, each in enumerate(parameters):
            self.register_parameter(f"weight{index}", each)


@given(st.data())
def test_shared_missing_and_nested_parts_are_walked_as_pytorch_does(data: st.DataObject) -> None:
    shared = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
    choice = st.lists(st.sampled_from([None, *shared]), max_size=4)
    parts = [Part(data.draw(choice)) for _ in range(5)]
    for index, part in enumerate(parts):  # later parts hold earlier ones, some several times
        for inner in data.draw(st.lists(st.sampled_from([None, *parts[:index]]), max_size=4)):
            part.register_module(f"part{len(part._modules)}", inner)
    assert_same_walks(parts[-1])
    parts[0].register_module("around", parts[-1])  # a cycle
    assert_same_walks(parts[-1])


class Hides(nn.Module):
    """Says itself what its parameters are, as wrappers do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.hidden = nn.Linear(2, 2), nn.Linear(2, 2)

    def named_parameters(self, *arguments: Any, **keywords: Any) -> Iterator[Any]:
        return self.seen.named_parameters(*arguments, **keywords)


class Renames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def named_modules(self, *_: Any, **__: Any) -> Iterator[Any]:
        yield "only", self


@pytest.mark.parametrize("model", [Hides(), Renames(), nn.Sequential(Renames(), nn.Linear(2, 2))])
def test_a_model_that_says_itself_what_it_holds_is_believed(model: nn.Module) -> None:
    assert_same_walks(model)
