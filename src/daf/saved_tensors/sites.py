"""Where in the model an operator runs: module paths, call counts, stable names and seeds."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from threading import get_ident
from typing import Any

from torch import nn
from torch.nn.modules import module as global_hooks

from daf.core.policy import KEEP, Need, Site, Treatment
from daf.core.replaced import replaced
from daf.core.reports import SiteReport
from daf.torch_compat.compiled_modules import CompiledModules
from daf.torch_compat.modules import OwnHook

OUTSIDE = "<outside>"  # the module path of operators that run in no module, such as a loss function
_WORD = 2**64


@dataclass(slots=True, eq=False)
class SiteRecord:
    """The bytes and uses of one site since the step began."""

    site: Site
    uses: int = 0
    draw: int = 0
    plain_bytes: int = 0
    held_bytes: int = 0
    spilled_bytes: int = 0
    need: Need = Need.EXACT
    treatment: Treatment = KEEP
    name_hash: int = field(init=False)

    def __post_init__(self) -> None:
        self.name_hash = int.from_bytes(blake2b(str(self.site).encode(), digest_size=8).digest())

    def clear(self) -> None:
        """Begin a new step."""
        self.uses = self.draw = self.plain_bytes = self.held_bytes = self.spilled_bytes = 0
        self.need, self.treatment = Need.EXACT, KEEP

    def code_key(self, step_key: int) -> int:
        """Return the seed of this use's code: another in every step, and for every ``draw``."""
        parts = (step_key, self.name_hash, self.uses)
        return mix_key(*parts, self.draw) if self.draw else mix_key(*parts)


@dataclass(slots=True, eq=False)
class _Frame:
    module: nn.Module | None
    path: str
    calls: dict[str, int] = field(default_factory=dict)


class SiteTracker:
    """Follows the module calls of one thread and names the operators inside them."""

    def __init__(self, model: nn.Module) -> None:
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._model = model  # keeps the ids above valid
        self._frames = [_Frame(None, OUTSIDE)]
        self._records: dict[tuple[str, str, int, int], SiteRecord] = {}
        self._thread = 0
        self._draws: Mapping[Site, int] = {}

    def redraw(self, draws: Mapping[Site, int]) -> None:
        """Seed the codes of these sites anew from now on; a draw of 0 is the ordinary seed."""
        self._draws = draws

    def begin_step(self) -> None:
        """Forget the bytes and uses of the step before."""
        for record in self._records.values():
            record.clear()

    def used(self) -> Iterator[SiteRecord]:
        """Return every site used since the step began, in order of first use ever."""
        return (record for record in self._records.values() if record.uses)

    def reports(self, evicted: Mapping[int, int]) -> Iterator[SiteReport]:
        """Return the same as data; ``evicted``: evicted bytes by the hash of the site's name."""
        for each in self.used():
            evicted_bytes = evicted.get(each.name_hash, 0)
            held = each.plain_bytes, each.held_bytes, evicted_bytes, each.spilled_bytes
            yield SiteReport(each.site, each.need, each.treatment, *held)

    def present_call(self, operator: str) -> tuple[str, int]:
        """Return what ``next_call`` will return."""
        frame = self._frames[-1]
        return frame.path, frame.calls.get(operator, 0)

    def next_call(self, operator: str) -> tuple[str, int]:
        """Return the module's path and the calls of ``operator`` so far in it; count one more."""
        path, count = self.present_call(operator)
        self._frames[-1].calls[operator] = count + 1
        return path, count

    def record(self, path: str, operator: str, call: int, save: int) -> SiteRecord:
        """Return the record of one site, and count one more use."""
        key = (path, operator, call, save)
        if (found := self._records.get(key)) is None:
            found = self._records[key] = SiteRecord(Site(*key))
        found.uses += 1
        found.draw = self._draws.get(found.site, 0)
        return found

    @contextmanager
    def following(self, compiled: CompiledModules) -> Iterator[None]:
        """Follow this thread's module calls inside."""
        with self.at_the_top(get_ident()), ExitStack() as hooks:
            keep, enter, leave = hooks.enter_context, OwnHook(self._enter), OwnHook(self._leave)
            # Kept in the line that makes them: an interrupt may come after any line.
            if not compiled.attributes:  # all at once
                keep(global_hooks.register_module_forward_pre_hook(self._enter))
                keep(global_hooks.register_module_forward_hook(self._leave, always_call=True))
            for _, module in compiled.hookable() if compiled.attributes else ():
                keep(module.register_forward_pre_hook(enter))
                keep(module.register_forward_hook(leave, always_call=True))
            yield

    def at_the_top(self, thread: int = 0) -> AbstractContextManager[None]:
        """Follow a thread's module calls inside from outside of the model on; 0: none."""
        return replaced(self, _frames=[_Frame(None, OUTSIDE)], _thread=thread)

    def _enter(self, module: nn.Module, _inputs: Any) -> None:
        if get_ident() == self._thread:
            unknown = f"{self._frames[-1].path}/<{type(module).__name__}>"
            self._frames.append(_Frame(module, self._paths.get(id(module), unknown)))

    def _leave(self, module: nn.Module, _inputs: Any, _output: Any) -> None:
        """Return to the caller's frame; drop frames of calls that never returned."""
        if get_ident() != self._thread:
            return
        for depth in range(len(self._frames) - 1, 0, -1):
            if self._frames[depth].module is module:
                del self._frames[depth:]
                return


def mix_key(*parts: int) -> int:
    """Return a 64-bit key of integers by splitmix64's finaliser (Steele et al., OOPSLA 2014)."""
    key = 0
    for part in parts:
        key = (key + part + 0x9E3779B97F4A7C15) % _WORD
        key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9 % _WORD
        key = (key ^ (key >> 27)) * 0x94D049BB133111EB % _WORD
        key ^= key >> 31
    return key
