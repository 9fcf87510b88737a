"""The measured sensitivity of a model, and what follows from it: plain values, no torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from daf.core.code_errors import relative_error
from daf.core.errors import DataError
from daf.core.json_dataclasses import from_plain, to_plain
from daf.core.policy import Site, Treatment

# The most of the gradient's square that errors of codes should make which do not average out: what
# they make at two bits (``daf bench bias``). A measurement tells more beyond so many errors of its
# own, as it is made by few passes.
SQUARED_BIAS = 0.0005
_SURE_DEVIATIONS = 3.0


@dataclass(frozen=True, slots=True)
class SiteSensitivity:
    """One site's sensitivity: squared gradient error per unit of relative code error."""

    variance_per_error: float  # 0: the site's errors have not reached the gradient yet
    standard_error: float
    prior: float = 0.0  # the formula's value before any measurement (0: none)

    @property
    def at_least(self) -> float:
        """The value to plan with: at least its standard error."""
        return max(self.variance_per_error, self.standard_error)


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """A model's sensitivity on one batch, about the gradient of the batch's mean loss.

    ``batch_variance``: the gradient's squared deviation from batch to batch (None: a single example
    cannot tell). It and the codes' variances fall as 1 / ``examples``, so their ratio holds for
    other batch sizes; ``relative`` ones need not, but do so together. ``squared_bias``: what of
    the running codes' errors does not average out, over the gradient's square; an estimate without
    a bias of its own, so perhaps below 0 (None: not measured).
    """

    sites: Mapping[Site, SiteSensitivity]
    gradient_energy: float  # the gradient's squared length
    examples: int
    passes: float  # forward and backward passes spent
    batch_variance: float | None = None
    batch_variance_error: float = 0.0  # its standard error
    relative: bool = False  # errors count beside each parameter's own gradient
    squared_bias: float | None = None
    squared_bias_error: float = 0.0  # its standard error

    def weights(self) -> dict[Site, float]:
        """Return planning weights, 1 on average; a site without one counts 1."""
        values = {site: each.at_least for site, each in self.sites.items()}
        total = sum(values.values())
        if total <= 0.0:
            return dict.fromkeys(values, 1.0)
        return {site: len(values) * value / total for site, value in values.items()}

    @property
    def noise_per_weight(self) -> float:
        """Noise of an error of 1 at a site of weight 1, over the batch's own (0: unknown)."""
        if not self.batch_variance or not self.sites:
            return 0.0
        total = sum(each.at_least for each in self.sites.values())
        return total / len(self.sites) / self.batch_variance

    @property
    def is_finite(self) -> bool:
        """True if every number is finite: a gradient that overflows says nothing."""
        own = self.batch_variance or 0.0
        numbers = (own, self.gradient_energy, self.squared_bias or 0.0)
        return all(map(math.isfinite, numbers)) and all(
            math.isfinite(each.at_least) for each in self.sites.values()
        )

    @property
    def is_biased(self) -> bool:
        """True if the squared bias is above ``SQUARED_BIAS`` beyond doubt."""
        sure = (self.squared_bias or 0.0) - _SURE_DEVIATIONS * self.squared_bias_error
        return sure > SQUARED_BIAS

    def added_variance(self, treatments: Mapping[Site, Treatment]) -> float:
        """Return the expected squared gradient error; sites not measured add 0."""
        return sum(
            each.variance_per_error * relative_error(treatments[site])
            for site, each in self.sites.items()
            if site in treatments
        )

    def added_noise(self, treatments: Mapping[Site, Treatment]) -> float:
        """Return the added variance ÷ the batch's own; raises DataError if that is unknown."""
        if not self.batch_variance:
            raise DataError(
                "asked for noise relative to the batch's own, which was not measured "
                f"({self.examples} examples); measure on a batch of at least two"
            )
        return self.added_variance(treatments) / self.batch_variance

    def refreshed(self, newer: "Sensitivity") -> "Sensitivity":
        """Return an exponential average with a later measurement, which counts half.

        Sites known to one only are taken from it; if they differ in ``relative``, the newer counts.
        """
        if self.relative is not newer.relative:
            return newer
        scaled = self._of_examples(newer.examples)
        sites = dict(scaled.sites) | dict(newer.sites)
        for site in self.sites.keys() & newer.sites.keys():
            old, new = scaled.sites[site], newer.sites[site]
            if self.relative and not (old.variance_per_error and new.variance_per_error):
                sites[site] = new if new.variance_per_error else old  # one knew nothing of it
                continue
            variance = _mixed(old.variance_per_error, new.variance_per_error)
            deviation = _mixed_error(old.standard_error, new.standard_error)
            sites[site] = SiteSensitivity(variance, deviation, new.prior)
        own, error = newer.batch_variance, newer.batch_variance_error
        if own is None:
            own, error = scaled.batch_variance, scaled.batch_variance_error
        elif scaled.batch_variance is not None:
            own = _mixed(scaled.batch_variance, own)
            error = _mixed_error(scaled.batch_variance_error, error)
        energy = _mixed(self.gradient_energy, newer.gradient_energy)
        passes = self.passes + newer.passes
        return replace(
            newer,
            sites=sites,
            gradient_energy=energy,
            passes=passes,
            batch_variance=own,
            batch_variance_error=error,
        )

    def variance_of(self, examples: int) -> float | None:
        """Return ``batch_variance`` of a batch of ``examples`` examples."""
        return self._of_examples(examples).batch_variance

    def _of_examples(self, examples: int) -> "Sensitivity":
        """Return it for another batch size: variances of a mean fall as 1 / ``examples``."""
        if self.relative:  # beside gradients of noise they do not; only their ratios count
            return replace(self, examples=examples)
        factor = self.examples / max(1, examples)
        sites = {
            site: SiteSensitivity(
                factor * each.variance_per_error, factor * each.standard_error, factor * each.prior
            )
            for site, each in self.sites.items()
        }
        own = None if self.batch_variance is None else factor * self.batch_variance
        error = factor * self.batch_variance_error
        return replace(
            self, sites=sites, examples=examples, batch_variance=own, batch_variance_error=error
        )

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON: a checkpoint, or another run of the same model."""
        return dict(to_plain(self))

    @staticmethod
    def from_dict(value: Mapping[str, Any]) -> "Sensitivity":
        """Return the inverse of ``as_dict``; raises DataError if a value is missing."""
        try:
            found: Sensitivity = from_plain(Sensitivity, value)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"these are no stored sensitivities ({error}); measure them again"
            ) from error
        return found


def _mixed(old: float, new: float) -> float:
    return 0.5 * old + 0.5 * new


def _mixed_error(old: float, new: float) -> float:
    return float((0.25 * old**2 + 0.25 * new**2) ** 0.5)
