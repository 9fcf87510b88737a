"""What the recorder touches of a source tree, whichever layout that tree has.

The recorder of one tree runs on the code of another, where modules, classes and fields may have
other names. ``TREE`` finds each of them: where it is now, then where it was, then anywhere.
A name that moves again is added here, and nowhere else.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import cached_property
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

# Names by module: the newer one first. A module that the tree lacks is passed over.
MODULES: Mapping[str, tuple[str, ...]] = {
    "norm_saves": ("daf.operators.norms.save",),
    "norm_passes": ("daf.operators.norms.passes",),
    "norm_words": ("daf.kernels.normalisation",),
    "devices": ("daf.kernels.devices",),
    "channel_norms": ("daf.operators.norms.channels_cpu", "daf.store.normalised"),
    "row_norms": ("daf.operators.norms.rows_cpu", "daf.store.normalised_rows"),
    "reductions": ("daf.kernels.cpu.reductions", "daf.kernels.cpu_measure"),
    "codecs": ("daf.codecs.codes", "daf.codecs.cpu", "daf.store.codec"),
    "ranged": ("daf.codecs.ranged", "daf.store.ranged"),
    "averaged": ("daf_bench.accuracy.averaged_codec", "daf.store.averaged"),
    "stores": ("daf.pool.store", "daf.store.buffers"),
    "paged": ("daf.pool.paged_pool", "daf.store.pool"),
    "kernel_words": ("daf.kernels",),
    "format": ("daf.core.code_format", "daf.kernels"),
    "tables": ("daf.core.code_tables", "daf.kernels.tables"),
    "sets": ("daf.kernels.cpu.instruction_sets", "daf.kernels.cpu.flat", "daf.kernels.cpu"),
    "policy": ("daf.core.policy", "daf.plan"),
    "plan": ("daf.core.plan", "daf.plan"),
    "profile": ("daf.core.profile", "daf.profile"),
    "plain": ("daf.core.json_dataclasses", "daf.plain_data"),
    "planner": ("daf.planning.planner",),
    "options": ("daf.planning.options",),
    "spill": ("daf.offload.spill", "daf.store.spill"),
    "workloads": ("daf_bench.workloads", "daf.bench.workloads"),
    "sources": ("daf_bench.workloads.sources", "daf.bench.workloads.sources"),
    "microbatch": ("daf.step.microbatch", "daf.execution.microbatch"),
    "errors": ("daf.core.errors", "daf.errors"),
}
# What a field was called, and is called: the former becomes the latter before sides are compared.
FIELDS: Mapping[str, str] = {
    "travels": "on_host",
    "retraced_to": "rolled_back_to",
    "told_bytes": "reported_bytes",
    "pieces": "micro_batches",
    "piece_ms": "micro_batch_ms",
}
# Fields that only one side may have, and the value with which they say nothing.
SILENT: Mapping[str, Any] = {"group": 1, "codec": "", "gradient_norm": None, "rounds": 1}
# What older plans chose for a site and newer encoders choose for each block (format 4).
CHOSEN_BY_ENCODERS = frozenset({"rounds"})
# Operators that a policy names, and the flags that it had for them.
OPERATORS: Mapping[str, str] = {
    "batch_norm": "fused",
    "row_norm": "fused_rows",
    "activation": "fused_smooth",
    "linear_cross_entropy": "fused_loss",
    "chunked": "chunked",
}
# What words in messages were, and are; whole words only.
WORDS: Mapping[str, str] = {
    "foretold": "predicted",
    "told": "reported",
    "given up": "evicted",
    "pieces": "micro-batches",
    "piece": "micro-batch",
    "retraced": "rolled back",
}
# Fields that hold times or the process's memory: they differ between two runs of one commit.
UNSTEADY = frozenset({"step_ms", "peak_bytes", "measuring_ms", "swapped_bytes"})
_WORDS = re.compile("|".join(rf"\b{word}\b" for word in WORDS))
_SOURCES = ("src", "benchmarks")


class Tree:
    """The code of one source tree; ``root`` holds ``src`` and ``benchmarks``.

    Modules from anywhere else, such as an installed DAF, are never taken.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()

    def has(self, name: str) -> bool:
        """True if the tree has a module that ``MODULES`` lists as ``name``."""
        return any(map(self._has, MODULES[name]))

    def module(self, name: str) -> ModuleType:
        """The module that ``MODULES`` lists as ``name``.

        Raises:
            LookupError: the tree has none of them.
        """
        for path in MODULES[name]:
            if self._has(path):
                return importlib.import_module(path)
        raise LookupError(f"{self._root} has none of {', '.join(MODULES[name])}; see {__file__}")

    def get(self, module: str, *names: str) -> Any:
        """An attribute by the first of ``names`` that a module has, or that one file defines.

        Raises:
            LookupError: none is defined, or several files define one.
        """
        for path in filter(self._has, MODULES[module]):
            found = importlib.import_module(path)
            for name in names:
                if hasattr(found, name):
                    return getattr(found, name)
        return self._search(names)

    def _has(self, path: str) -> bool:
        try:
            found = importlib.util.find_spec(path)
        except ModuleNotFoundError:
            return False
        return found is not None and self._root in Path(found.origin or "/").resolve().parents

    def _search(self, names: Iterable[str]) -> Any:
        for name in names:
            defines = re.compile(rf"^(class|def) {name}\b|^{name}\b[^=\n]*=[^=]", re.MULTILINE)
            found = [path for path, text in self._files.items() if defines.search(text)]
            if len(found) == 1:
                return getattr(importlib.import_module(found[0]), name)
            if found:
                raise LookupError(f"{name} is in {', '.join(found)}; say which in {__file__}")
        raise LookupError(f"{self._root} defines none of {', '.join(names)}; see {__file__}")

    @cached_property
    def _files(self) -> dict[str, str]:
        found = {}
        for source in (self._root / name for name in _SOURCES):
            for path in sorted(source.glob("daf*/**/*.py")):
                parts = path.relative_to(source).with_suffix("").parts
                found[".".join(parts).removesuffix(".__init__")] = path.read_text()
        return found


TREE = Tree(Path(os.environ["DAF_GOLDEN_TREE"]))


def norms() -> SimpleNamespace:
    """The passes of normalisations by their newer names; ``coded`` makes a code on the way."""
    is_direct = TREE.has("norm_saves") and hasattr(TREE.module("norm_saves"), "reading")
    if not is_direct and not TREE.has("norm_passes"):
        return _older_norms()
    passes = _direct_passes() if is_direct else TREE.module("norm_passes")
    words = TREE.module("norm_words")
    value_code, backend_of = TREE.get("codecs", "ValueCode"), TREE.get("devices", "backend_of")

    def coded(*arguments: Any, output: Any, rows: Any = None) -> Any:
        return value_code(*arguments, output=output, rows=rows)

    def gradient_factors(sums: Any, geometry: Any, deviation: Any, *others: Any) -> Any:
        return backend_of(deviation).gradient_factors(sums, geometry, deviation, *others)

    def take_statistics(x: Any, *others: Any) -> Any:
        return backend_of(x).channel_statistics(x, *others)

    own = {"coded": coded, "gradient_factors": gradient_factors, "KeptRows": words.KeptValues}
    if not hasattr(passes, "take_statistics"):
        own["take_statistics"] = take_statistics
    return SimpleNamespace(**(vars(words) | vars(passes) | own))


def _direct_passes() -> SimpleNamespace:
    """The passes where the backend is called with what ``reading`` and ``opened`` yield."""
    words, backend_of = TREE.module("norm_words"), TREE.get("devices", "backend_of")
    reading, opened = TREE.get("norm_saves", "reading"), TREE.get("codecs", "opened")

    def emit(x: Any, forward: Any, output: Any, rows: Any = None) -> None:
        with opened(output) as written:
            backend_of(x).emit(words.Encoding(x, forward, rows, written))

    def over_masked(name: str, last: Any, values: Any, gradient: Any, mask: Any, out: Any) -> Any:
        with reading(values, mask) as (source, planes):
            given = words.MaskedGradient(gradient, planes, out)
            return getattr(backend_of(gradient), name)(source, given, last)

    def backward_rows(values: Any, job: Any) -> Any:
        with reading(values) as (source, _):
            return backend_of(job.gradient).backward_rows(source, job)

    def unmeasured(x: Any, length: int) -> Any:
        scale, shift = (x.new_empty(x.numel() // length) for _ in range(2))
        return words.Channels(scale, shift, length)

    return SimpleNamespace(
        ComputedValues=TREE.get("norm_saves", "ComputedValues"),
        emit=emit,
        sum_gradient=lambda *given: over_masked("sum_gradient", given[-1], *given[:-1]),
        write_input_gradient=lambda *given: over_masked(
            "write_input_gradient", given[-1], *given[:-1]
        ),
        backward_rows=backward_rows,
        unmeasured=unmeasured,
    )


def _older_norms() -> SimpleNamespace:
    """The same where channels and rows have a module each."""
    channels, rows = TREE.module("channel_norms"), TREE.module("row_norms")
    value_code, found = TREE.get("codecs", "ValueCode"), vars(rows) | vars(channels)

    def wrapped(values: Any) -> Any:
        return channels.CodedValues(values) if isinstance(values, value_code) else values

    def coded(*arguments: Any, output: Any, rows: Any = None) -> Any:
        return value_code(*arguments, emission=output, rows=rows)

    def emit(x: Any, forward: Any, output: Any, moments: Any = None) -> None:
        if moments is None:
            return channels.emit(x, forward, output)
        return rows.emit_rows(x, forward, moments, output)

    own = {
        "coded": coded,
        "emit": emit,
        "NormOutput": channels.emission,
        "RunningStatistics": TREE.get("channel_norms", "RunningStatistics", "Running"),
        "gradient_factors": channels.take_factors,
        "sum_gradient": lambda values, *rest: channels.sum_gradient(wrapped(values), *rest),
        "backward_rows": lambda values, job: rows.backward_rows(job, values),
        "write_input_gradient": lambda values, *rest: channels.write_input_gradient(
            wrapped(values), *rest
        ),
    }
    return SimpleNamespace(**(found | own))


def element_codes() -> SimpleNamespace:
    """How a code of each kind is written, by its newer name, and ``read``."""
    codes = TREE.module("codecs")
    if not hasattr(codes, "ElementsCode"):
        return _older_element_codes()
    make, codec = codes.ElementsCode, TREE.get("kernel_words", "Codec")
    code = TREE.get("norm_words", "ElementCode")
    decoding = {codec.MASK: ("low", "high"), codec.DERIVATIVE: ("table",)}
    decoding |= {codec.STEPS: ("channels",), codec.INTEGERS: ()}

    def mask(store: Any, x: Any, predicate: Any, low: float, high: float = math.nan) -> Any:
        return make.encode(store, x, 1, code(codec.MASK, None, 0, predicate, low, high))

    def intervals(store: Any, x: Any, bits: int, borders: Any) -> Any:
        return make.encode(store, x, bits, code(codec.DERIVATIVE, table=borders))

    def steps(store: Any, x: Any, bits: int, key: int, to_steps: Any) -> Any:
        return make.encode(store, x, bits, code(codec.STEPS, to_steps, key))

    def integers(store: Any, x: Any, bits: int, base: int) -> Any:
        return make.encode(store, x, bits, code(codec.INTEGERS, base=base))

    def read(found: Any, out: Any, *values: Any) -> None:
        found.decode(out, **dict(zip(decoding[found.code.codec], values, strict=True)))

    return SimpleNamespace(
        mask=mask,
        unwritten_mask=make.unwritten_mask,
        intervals=intervals,
        steps=steps,
        integers=integers,
        read=read,
    )


def derivative_lines() -> Callable[[int], Any] | None:
    """What a newer tree's derivative codes take in place of borders, of tanh, by bits."""
    fit = getattr(TREE.module("tables"), "derivative_lines", None)
    if fit is None:
        return None
    places = np.linspace(-4.0, 4.0, 2048)
    slopes = 1.0 / np.cosh(places) ** 2
    return lambda bits: torch.from_numpy(fit(places, (2**bits - 1) * slopes)).float()


def range_measure() -> Callable[[Any, Any, tuple[int, int], Any], None]:
    """How least and greatest of (channels, inner) are written into (2, channels), by a strategy."""
    module = TREE.module("reductions")

    def measure(x: Any, ends: Any, cut: tuple[int, int], strategy: Any) -> None:
        chosen = module.range_strategy(x.numel(), 1, *cut) if strategy is None else strategy
        found = TREE.get("devices", "backend_of")(x).measure_ranges(x, chosen, *cut)
        ends.copy_(torch.stack([*found]))

    def older(x: Any, ends: Any, cut: tuple[int, int], strategy: Any) -> None:
        size = module.ranges_workspace_bytes(x.numel(), 1, *cut, strategy)
        room = torch.empty(max(1, size), dtype=torch.uint8)
        places = (ends[0].data_ptr(), ends[1].data_ptr(), room.data_ptr())
        source = (x.data_ptr(), TREE.get("codecs", "element_type")(x.dtype), x.numel())
        module.measure_ranges(*source, *places, 1, *cut, strategy)

    return older if hasattr(module, "measure_sums") else measure


def _older_element_codes() -> SimpleNamespace:
    """The same where each kind has a class of its own."""
    mask = TREE.get("codecs", "MaskCode")
    return SimpleNamespace(
        mask=mask,
        unwritten_mask=mask.unwritten,
        intervals=TREE.get("codecs", "DerivativeCode").encode,
        steps=TREE.get("ranged", "RangedCode"),
        integers=TREE.get("codecs", "IntegerCode"),
        read=lambda found, out, *values: found.decode(out, *values),
    )


def steady(value: Any) -> Any:
    """A value as JSON has it, by the newer names, without what differs between two runs.

    Numbers stay whole: floats are written as hexadecimal, so that equal texts are equal bits.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        pairs = ((key, each) for key, each in value.items() if _says_something(key, each))
        return {_name(key): steady(each) for key, each in pairs}
    if isinstance(value, (set, frozenset)):
        return sorted((steady(each) for each in value), key=str)
    if isinstance(value, (tuple, list)):
        return [steady(each) for each in value]
    if isinstance(value, Enum):
        return steady(value.value)
    if isinstance(value, float):
        return value.hex() if math.isfinite(value) else str(value)
    return reworded(value) if isinstance(value, str) else value


def _says_something(key: Any, value: Any) -> bool:
    return key not in UNSTEADY and not (key in SILENT and value == SILENT[key])


def _name(key: Any) -> str:
    if isinstance(key, Enum):
        key = key.value
    return FIELDS.get(str(key), str(key))


def reworded(text: str) -> str:
    """A message in the newer words."""
    return _WORDS.sub(lambda found: WORDS[found.group()], text)


def operators_of(policy: Any) -> list[str]:
    """The operators that a policy runs in place of PyTorch's, by name."""
    named = getattr(policy, "operators", None)
    if named is None:
        named = [name for name, flag in OPERATORS.items() if getattr(policy, flag)]
    return sorted(named)


def profile_of(plain: Any) -> Any:
    """A stored profile as this tree's ``Profile``, whichever names its fields had when stored."""
    read, kind = TREE.get("plain", "from_plain"), TREE.get("profile", "Profile")
    try:
        return read(kind, plain)
    except (KeyError, TypeError):
        return read(kind, _renamed(plain))


def plan_of(plain: Any) -> Any:
    """A plan that another tree wrote, as this tree's ``Plan``."""
    plain = _renamed(plain)
    policy, kind = plain["policy"], TREE.get("policy", "Policy")
    flags = {name: policy.pop(flag) for name, flag in OPERATORS.items() if flag in policy}
    if flags:
        policy["operators"] = [name for name, is_on in flags.items() if is_on]
    if "operators" not in {each.name for each in dataclasses.fields(kind)}:
        raise LookupError(f"plans are read by newer trees only, not by {kind.__module__}")
    for _, treatment in policy["by_need"] + policy["by_site"]:
        silent = {key for key, each in SILENT.items() if treatment.get(key, ...) == each}
        for field in silent | CHOSEN_BY_ENCODERS:
            treatment.pop(field, None)
    return TREE.get("plain", "from_plain")(TREE.get("plan", "Plan"), plain)


def planned(name: str, own: Any, *rest: Any, also: Any = (), **terms: Any) -> Any:
    """Call ``make_plan``, ``least_feasible_budget``, ``first_plan`` or ``tighter_plan``."""
    planner = TREE.module("planner")
    if not hasattr(planner, "Constraints"):
        return getattr(planner, name)(own, *rest, **terms, **({"also": also} if also else {}))
    names = {each.name for each in dataclasses.fields(planner.Constraints)}
    constraints = planner.Constraints(**{each: terms.pop(each) for each in names & terms.keys()})
    of = own if name == "first_plan" else (own, *also)
    found = getattr(planner, name.replace("make_plan", "make_plans"))
    made = found(of, *rest, constraints=constraints, **terms)
    return made[0] if name == "make_plan" else made


def _renamed(plain: Any) -> Any:
    if isinstance(plain, Mapping):
        return {FIELDS.get(key, key): _renamed(each) for key, each in plain.items()}
    return [_renamed(each) for each in plain] if isinstance(plain, list) else plain


def digest(*parts: Any) -> str:
    """A short SHA-256 of tensors (their bytes in memory order), bytes, and plain values."""
    found = hashlib.sha256()
    for part in parts:
        found.update(_bytes_of(part))
        found.update(b"|")
    return found.hexdigest()[:24]


def _bytes_of(part: Any) -> bytes:
    if not isinstance(part, torch.Tensor):
        return part if isinstance(part, bytes) else repr(steady(part)).encode()
    flat = part.detach().contiguous().view(-1)
    shape = f"{part.dtype}{tuple(part.shape)}".encode()
    return shape + flat.view(torch.uint8).numpy().tobytes()
