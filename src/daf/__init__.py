"""DAF: train any PyTorch model inside a byte budget."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from daf.core.errors import BudgetError, DafError, NonFiniteLossError
    from daf.core.plan import Plan
    from daf.core.step_report import StepReport
    from daf.operators.chunked.cross_entropy import chunked_cross_entropy
    from daf.session.forward.compress import compress
    from daf.session.session import Session
    from daf.step.batch_cut import BatchSplit

__all__ = [
    "BatchSplit",
    "BudgetError",
    "DafError",
    "NonFiniteLossError",
    "Plan",
    "Session",
    "StepReport",
    "chunked_cross_entropy",
    "compress",
]

# Imported when first asked for: ``daf --help`` and the planner need no torch.
_MODULES = dict.fromkeys(("BudgetError", "DafError", "NonFiniteLossError"), "daf.core.errors") | {
    "BatchSplit": "daf.step.batch_cut",
    "Plan": "daf.core.plan",
    "Session": "daf.session.session",
    "StepReport": "daf.core.step_report",
    "chunked_cross_entropy": "daf.operators.chunked.cross_entropy",
    "compress": "daf.session.forward.compress",
}


if not TYPE_CHECKING:  # a checker would take every name for one that exists

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_MODULES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
