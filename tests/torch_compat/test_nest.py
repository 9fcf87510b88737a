"""Nests keep their kinds, run no constructors, and stay themselves where nothing changes."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

from daf.torch_compat.pytree import map_nest, tensors_inside

pytestmark = pytest.mark.smoke


class Named(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True, slots=True)
class Checked:
    value: Any
    derived: Any = field(init=False, default=None)

    def __post_init__(self) -> None:
        if not isinstance(self.value, int):
            raise TypeError(self.value)


def negated(nest: Any) -> Any:
    return map_nest(int, lambda number: f"-{number}", nest)


@pytest.mark.parametrize(
    ("nest", "expected"),
    [
        (1, "-1"),
        ([1, (2.5, 3)], ["-1", (2.5, "-3")]),
        (Named(1, None), Named("-1", None)),
        ({"a": 1, "b": [2]}, {"a": "-1", "b": ["-2"]}),
        (OrderedDict(z=1, a=2), OrderedDict(z="-1", a="-2")),
        (UserDict(a=1), UserDict(a="-1")),
        (MappingProxyType({"a": 1}), MappingProxyType({"a": "-1"})),
    ],
)
def test_every_kind_of_container(nest: Any, expected: Any) -> None:
    found = negated(nest)
    assert type(found) is type(expected)
    assert found == expected


def test_a_mapping_keeps_what_else_it_knows() -> None:
    found = negated(defaultdict(list, a=1))
    assert found["a"] == "-1"
    assert found["missing"] == []


def test_a_dataclass_is_copied_without_its_checks() -> None:
    nest = Checked(4)
    found = negated(nest)
    assert (type(found), found.value, found.derived) == (Checked, "-4", None)
    assert nest.value == 4


def test_what_does_not_change_is_handed_back() -> None:
    for nest in (["a"], {"b": None}, Named("a", 2.0), (), object(), Checked):
        assert negated(nest) is nest
    inner = {"kept": "as it is"}
    assert negated([inner, 1])[0] is inner


def test_looking_into_a_nest_keeps_nothing_of_it_alive() -> None:
    batch = {"words": torch.zeros(3), "more": [Named(torch.ones(2), None)]}
    gone = weakref.ref(batch["words"])
    gc.disable()
    try:
        assert [len(each) for each in tensors_inside(batch)] == [3, 2]
        del batch
        assert gone() is None
    finally:
        gc.enable()
