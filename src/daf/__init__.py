"""DAF: train any PyTorch model inside a byte budget."""

from daf.capture.compress import compress
from daf.core.errors import BudgetError, DafError, NonFiniteLossError
from daf.core.plan import Plan
from daf.core.step_report import StepReport
from daf.operators.chunked.cross_entropy import chunked_cross_entropy
from daf.session.session import Session

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
