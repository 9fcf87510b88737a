"""Every error that DAF raises: one tree.

Each message says what was asked, what was found and what to try. Errors that
stand in for one of Python's own (a bad value, a missing file, an in-place
change that PyTorch would have reported as ``RuntimeError``) inherit from it
too, so that callers who never heard of DAF still catch what they expect.
"""

from __future__ import annotations


class DafError(Exception):
    """Root of the tree; catch this to catch everything DAF raises."""


class UnitError(DafError, ValueError):
    """A byte count such as ``"512MB"`` could not be read."""


class UnknownNameError(DafError, ValueError):
    """A model, data set or option has a name that is not known here."""


class DataError(DafError, ValueError):
    """A data file is missing, truncated or not what its name promises."""


class MissingPackageError(DafError, ImportError):
    """A package that a command, a model or data needs is not installed."""


class BudgetError(DafError, MemoryError):
    """The budget cannot hold the job; ``least_bytes`` is the least that could (bytes, or None)."""

    def __init__(self, message: str, least_bytes: int | None = None) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


class PoolFullError(DafError, MemoryError):
    """The paged pool cannot hold what was asked, even after giving up all that it may."""


class SpillError(DafError, OSError):
    """Tensors cannot be spilled as asked, or one that was spilled cannot be read again."""


class NonFiniteLossError(DafError, FloatingPointError):
    """The loss became inf or NaN; the parameters are those from before that step."""


class DivergedError(DafError, ArithmeticError):
    """The losses say that the run no longer learns, and going back has not helped or cannot."""


class CodecError(DafError, ValueError):
    """A tensor cannot be coded as asked (bits, dtype, layout), or a code was used wrongly."""


class SavedTensorError(DafError, RuntimeError):
    """A tensor kept for backward was changed in place, or its store was already released."""


class FusionError(DafError, RuntimeError):
    """A step read what fusing operators had left out, which no step before it did."""


class KernelError(DafError, RuntimeError):
    """A native kernel is missing, or was called outside its contract."""


class RunFolderError(DafError, OSError):
    """A run's folder cannot be written, read or resumed."""


class PlatformError(DafError, RuntimeError):
    """This operating system cannot do what was asked."""


class ReleaseRefusedError(DafError, ValueError):
    """Gradients were to be released inside backward, and something needs them later."""


class CommittedStepError(DafError):
    """A step failed after some parameters had been updated; the model is between two steps.

    No Python error of its own: nobody who retries on those should catch it.
    """


class DoubleBackwardError(DafError, RuntimeError):
    """A second derivative was asked of an operator that has only a first."""
