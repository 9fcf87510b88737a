"""Profiles made up for the planner's tests; no model behind them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from daf.core.policy import Method, Need, Reading, Site
from daf.core.profile import Affine, CallProfile, DeviceSpeeds, Profile, Saving, Timeline

MIB = 2**20
NEEDS = (
    *(Need.LINEAR, Need.NORM, Need.SIGN, Need.LINEAR),
    *(Need.SMOOTH, Need.PRODUCT, Need.EXACT, Need.SCORE),
)
SPEEDS = DeviceSpeeds(
    encode=dict.fromkeys(Method, 1e9),
    decode=dict.fromkeys(Method, 1.3e9),
    copy=8e9,
    disk_write=2e8,
    disk_read=4e8,
)


def saving(
    index: int,
    count: int,
    need: Need,
    elements: int,
    *,
    call: int = 0,
    lives: int = 0,
    storage: int | None = None,
    parents: frozenset[Site] | None = None,
) -> Saving:
    """The ``index``-th of ``count`` tensors saved, read in reverse order, of float32."""
    return Saving(
        site=Site(f"block{call}", "operator", index, 0),
        need=need,
        storage=index if storage is None else storage,
        storage_bytes=Affine(0, 4 * elements),
        content=index if storage is None else storage,
        elements=Affine(0, elements),
        tensor_bytes=Affine(0, 4 * elements),
        saved=index,
        dies=min(index + lives, 2 * count - 1 - index),
        read=2 * count - 1 - index,
        released=2 * count - 1 - index,
        call=call,
        parents=parents,
    )


def fused(saved: Saving) -> Saving:
    """As a fused batch normalisation's input is saved: read where it lies."""
    site = replace(saved.site, operator="batch_norm")
    return replace(saved, site=site, reading=Reading.IN_PLACE)


def profile(
    savings: Sequence[Saving],
    *,
    calls: Sequence[CallProfile] = (),
    transient: Sequence[float] = (),
    batch: int = 8,
    refusal: str = "batch statistics",
    gradients: int = 3 * MIB,
    micro_batch_ms: tuple[tuple[int, float], ...] = ((2, 30.0), (4, 50.0)),
) -> Profile:
    """A profile whose timeline has two moments for every saving."""
    moments = 2 * len(savings)
    passing = list(transient) or [0.0] * moments
    growing = [gradients * max(0, m - len(savings)) // max(1, len(savings)) for m in range(moments)]
    timeline = Timeline(tuple(Affine(0, each) for each in passing), tuple(growing), len(savings))
    return Profile(
        floor_bytes=200 * MIB,
        resident_bytes=210 * MIB,
        parameter_bytes=gradients,
        gradient_bytes=gradients,
        optimizer_bytes=gradients,
        batch_size=batch,
        savings=tuple(savings),
        calls=tuple(calls),
        timeline=timeline,
        micro_batch_ms=micro_batch_ms,
        update_ms=2.0,
        speeds=SPEEDS,
        weights={},
        split_refusal=refusal,
    )


def blocks(count: int, size: int) -> list[CallProfile]:
    """The whole model, and modules in a row of which each saves ``size`` tensors."""
    whole = CallProfile("", -1, Affine(0, 1.0), 0, count - 1)
    rows = [
        CallProfile(f"block{1 + n}", 0, Affine(0.1, 0.2), n * size, min(count, (n + 1) * size) - 1)
        for n in range(-(-count // size))
    ]
    return [whole, *rows]


@st.composite
def profiles(
    draw: st.DrawFn, most: int = 4, *, splittable: bool | None = None, may_be_fused: bool = False
) -> Profile:
    """Small ones: needs, sizes, lifetimes, shared memory, derivations, tellers, modules vary.

    ``may_be_fused``: some are of fused operators, which a session has beside PyTorch's own.
    """
    is_fused = may_be_fused and draw(st.booleans())
    count = draw(st.integers(1 + is_fused, most))
    size = draw(st.integers(1, 2))
    found: list[Saving] = []
    for index in range(count):
        need = Need.NORM if is_fused and not found else draw(st.sampled_from(NEEDS))
        shares = index > 0 and draw(st.integers(0, 3)) == 3  # the least is drawn far more often
        norms = frozenset(each.site for each in found if each.need is Need.NORM)
        is_own = not (need is Need.LINEAR and not shares and norms) or draw(st.booleans())
        elements = draw(st.integers(1, 40)) * 10_000
        found.append(
            saving(
                index,
                count,
                need,
                round(found[-1].elements.per_example) if shares else elements,
                call=1 + index // size,
                lives=draw(st.integers(0, 1)),
                storage=found[-1].storage if shares else index,
                parents=None if is_own else norms,
            )
        )
        if need is Need.NORM and not shares and is_fused:
            found[-1] = fused(found[-1])
        smooth = [each.site for each in found[:-1] if each.need is Need.SMOOTH]
        if need is Need.LINEAR and is_own and not shares and is_fused and smooth:
            found[-1] = replace(found[-1], teller=smooth[-1], reading=Reading.CHUNKS)
    transient = draw(st.lists(st.integers(0, 10**6), min_size=2 * count, max_size=2 * count))
    free = draw(st.booleans()) if splittable is None else splittable
    made = profile(
        found,
        calls=blocks(count, size),
        transient=transient,
        batch=draw(st.sampled_from((2, 3, 8))),
        refusal="" if free else "batch statistics",
    )
    return replace(made, chunk_bytes=MIB) if is_fused else made


def large(count: int, seed: int = 0) -> Profile:
    """``count`` sites in modules of five, as a deep network has them."""
    numbers = random.Random(seed)
    found = [
        saving(
            index,
            count,
            numbers.choice(NEEDS),
            1000 * numbers.randint(1, 200),
            call=1 + index // 5,
            lives=numbers.randint(0, 2),
        )
        for index in range(count)
    ]
    transient = [float(numbers.randint(0, 10**6)) for _ in range(2 * count)]
    calls = [
        replace(call, forward_ms=Affine(0.1, numbers.uniform(0.05, 0.3)))
        for call in blocks(count, 5)
    ]
    return profile(found, calls=calls, transient=transient, batch=32)
