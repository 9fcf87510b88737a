"""DAF: train any PyTorch model inside a byte budget."""

from daf.errors import BudgetError, DafError, NonFiniteLossError
from daf.execution.capture import compress
from daf.plan import Plan
from daf.session import Session, StepReport

__all__ = [
    "BudgetError",
    "DafError",
    "NonFiniteLossError",
    "Plan",
    "Session",
    "StepReport",
    "compress",
]
