"""Models and data by name: built in, of another distribution, or ``package.module:attribute``.

Another distribution adds names by entry points of the groups ``daf.models`` and ``daf.data``.
"""

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, NamedTuple

from daf.core.errors import DataError, UnknownNameError


class Found(NamedTuple):
    """A factory, how it was named, and what stood behind its name, as in ``NAME:PATH``."""

    reference: str
    factory: Callable[..., Any]
    path: str

    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """Return the factory's parameters; raises UnknownNameError if C code hides them."""
        try:
            return inspect.signature(self.factory).parameters
        except ValueError as error:
            raise UnknownNameError(f"{self.reference!r} hides its arguments: {error}") from error


@dataclass(frozen=True, slots=True)
class Names:
    """The names of one ``kind`` of thing; ``built_in``: places ``module:attribute`` by name."""

    kind: str
    group: str
    built_in: Mapping[str, str]

    def all(self) -> Mapping[str, EntryPoint]:
        """Return all installed names and their entry points."""
        own = [EntryPoint(name, place, self.group) for name, place in self.built_in.items()]
        installed = sorted(entry_points(group=self.group), key=lambda point: point.name)
        return {point.name: point for point in (*own, *installed)}

    def help(self) -> str:
        """Return the installed names, and the form of a user's own."""
        return f"{', '.join(self.all())}, or package.module:factory"

    def find(self, reference: str) -> Found:
        """Import what ``NAME``, ``NAME:PATH`` or ``package.module:factory[:PATH]`` refers to.

        Raises UnknownNameError, or DataError if a known one needs a package not installed.
        """
        known = self.all()
        name, _, path = reference.partition(":")
        if name in known:
            try:
                factory = known[name].load()
            except ModuleNotFoundError as error:
                raise DataError(
                    f"{self.kind} {reference!r} needs the package {error.name!r}, which is not "
                    f"installed; try: pip install {error.name}"
                ) from error
            return Found(reference, factory, path)
        attribute, _, path = path.partition(":")
        if not attribute:
            raise UnknownNameError(f"unknown {self.kind} {reference!r}; {self._advice(name)}")
        return Found(reference, self._users(reference, name, attribute), path)

    def origin(self, reference: str) -> str | None:
        """Return the place of the code that ``find`` would import; None for an installed name."""
        module_name = reference.partition(":")[0]
        if module_name in self.all():
            return None
        _look_here()
        try:
            spec = importlib.util.find_spec(module_name.partition(".")[0])
        except (ImportError, ValueError):
            spec = None
        if spec is None:
            return "nowhere: there is no such module"
        return spec.origin or ", ".join(spec.submodule_search_locations or ())

    def _users(self, reference: str, module_name: str, attribute: str) -> Callable[..., Any]:
        here = _look_here()
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            raise UnknownNameError(
                f"unknown {self.kind} {reference!r}: there is no module {error.name!r} in {here} "
                f"or the installed packages; {self._advice(module_name)}"
            ) from error
        factory = getattr(module, attribute, None)
        if not callable(factory):
            hint = _nearest(attribute, dir(module))
            raise UnknownNameError(f"module {module_name!r} has no factory {attribute!r}{hint}")
        return factory  # type: ignore[no-any-return]

    def _advice(self, name: str) -> str:
        plain = name.lower().replace("-", "_")
        advice = f"known: {self.help()}{_nearest(plain, self.all())}"
        if not entry_points(group=self.group):
            advice += "; daf-bench has more (in a clone of DAF: pip install ./benchmarks)"
        return advice


def _look_here() -> str:
    """Let modules be found in the current directory; return it."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    return here


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), 1, cutoff=0.4)
    return f"; did you mean {near[0]!r}?" if near else ""
