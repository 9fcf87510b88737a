"""Every error that DAF raises, in one tree.

A message says what was asked, what was found and what to try. Where Python or PyTorch has an error
for the case, DAF's inherits from it too, so that existing handlers catch it.
"""


class DafError(Exception):
    """Base class of every error that DAF raises."""


class UnitError(DafError, ValueError):
    """A byte count such as ``"512MB"`` that cannot be parsed."""


class UnknownNameError(DafError, ValueError):
    """A model, data set or option that is unknown."""


class OptionError(DafError, ValueError):
    """An option whose value is none of its own, or that another one excludes."""


class DataError(DafError, ValueError):
    """A data file that is missing, truncated or of another format."""


class MissingPackageError(DafError, ImportError):
    """A package is not installed that a command, a model or data needs."""


class BudgetError(DafError, MemoryError):
    """A budget that cannot hold the job; ``least_bytes`` is the least that could, or None."""

    def __init__(self, message: str, least_bytes: int | None = None) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


class ClosedSessionError(DafError, RuntimeError):
    """A session was asked to go on after ``close``; make another over the same model."""


class SplitError(DafError, ValueError):
    """Micro-batches of this batch do not add up to it, as those of batches before did."""


class OtherPathError(SplitError):
    """A step computes otherwise than those for which cutting the batch was proven.

    ``unknown``: names of functions, and of parameters, that no proof saw.
    """

    def __init__(self, message: str, unknown: set[str]) -> None:
        super().__init__(message)
        self.unknown = unknown


class PoolFullError(DafError, MemoryError):
    """The paged pool cannot hold what was asked, even after evicting all that it may."""


class SpillError(DafError, OSError):
    """Tensors cannot be spilled as asked, or a spilled one cannot be read."""


class NonFiniteLossError(DafError, FloatingPointError):
    """The loss became inf or NaN; the parameters are those from before that step."""


class DivergedError(DafError, ArithmeticError):
    """The run no longer learns by its losses, and rolling back did not help or is impossible."""


class CodecError(DafError, ValueError):
    """A tensor cannot be coded as asked (bits, dtype, layout), or a code is used wrongly."""


class SavedTensorError(DafError, RuntimeError):
    """A saved tensor was changed in place, or its store was already released."""


class ReplayError(SavedTensorError):
    """A replayed ``module`` (a path) did something else than in its first pass."""

    def __init__(self, message: str, module: str) -> None:
        super().__init__(message)
        self.module = module


class FusionError(DafError, RuntimeError):
    """A step read what operator fusion had left out, which no earlier step did."""


class KernelError(DafError, RuntimeError):
    """A native kernel is missing, or was called outside its contract."""


class RunFolderError(DafError, OSError):
    """A run's folder cannot be written, read or resumed."""


class DamagedFileError(RunFolderError):
    """A file of a run is missing, cut, or not what was written."""


class PlatformError(DafError, RuntimeError):
    """This operating system cannot do what was asked."""


class AccumulatedGradientError(DafError, RuntimeError):
    """Gradients of the user's own cannot be told from those that a step left."""


class ReleaseRefusedError(DafError, ValueError):
    """Gradients cannot be released inside backward, because something needs them later."""


class CommittedStepError(DafError):
    """A step failed after parameters changed; no Python error, so that no retry catches it."""


class DoubleBackwardError(DafError, RuntimeError):
    """A second derivative was asked of an operator that has only a first."""


class HostError(DafError, RuntimeError):
    """A training loop of another library asks for what it cannot have within a budget."""
