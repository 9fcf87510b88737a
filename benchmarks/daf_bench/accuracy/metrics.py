"""What is reported of predictions: from SciPy and scikit-learn, in percent where customary."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score

from daf.core.errors import DataError

Floats = NDArray[np.floating]


def classification_metrics(scores: Floats, labels: NDArray[np.int64]) -> dict[str, float]:
    """Accuracy of the highest of ``scores`` [N, classes]; with two classes F1 of class 1; percent.

    Raises:
        DataError: there are no predictions, or not one for every label.
    """
    _check(scores, labels)
    chosen = scores.argmax(1)
    found = {"accuracy_percent": 100.0 * float(accuracy_score(labels, chosen))}
    if scores.shape[1] == 2:
        found["f1_percent"] = 100.0 * float(f1_score(labels, chosen, zero_division=0.0))
    return found


def correlation_metrics(scores: Floats, targets: Floats) -> dict[str, float]:
    """Pearson's and Spearman's correlation of ``scores`` [N] with ``targets`` [N], in percent.

    Scores that are all the same correlate with nothing: 0.

    Raises:
        DataError: there are no predictions, or not one for every target.
    """
    _check(scores, targets)
    if len(scores) < 2 or np.ptp(scores) == 0 or np.ptp(targets) == 0:
        return {"pearson_percent": 0.0, "spearman_percent": 0.0}
    return {
        "pearson_percent": 100.0 * float(pearsonr(scores, targets).statistic),
        "spearman_percent": 100.0 * float(spearmanr(scores, targets).statistic),
    }


def token_metrics(total_nats: float, tokens: float) -> dict[str, float]:
    """Mean loss per token in nats, and perplexity.

    Raises:
        DataError: there are no tokens.
    """
    if tokens <= 0:
        raise DataError("asked for a loss per token of no tokens; give test rows that ask for some")
    mean = total_nats / tokens
    return {"token_loss": mean, "perplexity": math.exp(min(mean, 700.0))}


def _check(scores: Floats, targets: NDArray[np.generic]) -> None:
    if not len(scores) or len(scores) != len(targets):
        raise DataError(
            f"asked to judge {len(scores)} predictions of {len(targets)} targets; "
            "give one prediction for each, and at least one"
        )
