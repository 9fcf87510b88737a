"""DAF: train any PyTorch model inside a byte budget."""

from daf.errors import BudgetError, DafError, NonFiniteLossError
from daf.execution.chunked import chunked_cross_entropy
from daf.execution.compression import compress
from daf.plan import Plan
from daf.session import Session
from daf.step_report import StepReport

__all__ = [
    "BudgetError",
    "DafError",
    "NonFiniteLossError",
    "Plan",
    "Session",
    "StepReport",
    "chunked_cross_entropy",
    "compress",
]
