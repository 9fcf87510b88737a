"""A replaced function comes back after its last listener, in any order and under anybody's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from daf.core.replaced import Replaced


def made() -> tuple[SimpleNamespace, Replaced[str], list[tuple[str, ...]], Any]:
    owner, heard = SimpleNamespace(function=lambda number: number + 1), []
    own = owner.function

    def instead(number: int) -> Any:
        heard.append(replaced.listeners)
        return replaced.original(number)

    replaced: Replaced[str] = Replaced(owner, "function", instead)
    return owner, replaced, heard, own


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("abc")), max_size=20))
def test_it_is_in_place_exactly_while_anybody_listens(calls: list[tuple[bool, str]]) -> None:
    owner, replaced, heard, own = made()
    present: list[str] = []
    for comes, name in calls:
        if comes:
            replaced.add(name)
            present.append(name)
        else:
            replaced.remove(name)
            if name in present:
                present.reverse()
                present.remove(name)
                present.reverse()
        assert replaced.listeners == tuple(present)
        assert (owner.function is own) == (not present)
        assert owner.function(1) == 2
    assert all(heard)


def test_who_replaced_it_in_turn_keeps_theirs() -> None:
    owner, replaced, heard, own = made()
    replaced.add("a")
    ours = owner.function
    owner.function = theirs = lambda number: ours(number) * 10
    replaced.remove("a")
    assert owner.function is theirs
    assert owner.function(1) == 20
    replaced.add("b")  # is heard through theirs, and calls itself never
    assert owner.function is theirs
    assert owner.function(1) == 20
    assert heard == [(), ("b",)]
    owner.function = ours
    replaced.remove("b")
    assert owner.function is own
