"""Spoken digits of one second as log-power spectrograms; the last speaker is the test part.

32 moments by 32 frequency bands on the mel scale (O'Shaughnessy 1987: 2595 log10(1 + f / 700)).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from daf.core.errors import DataError
from daf.training.data.images import ByteArray, ImageData, LabelledImages, Normalisation
from daf_bench.data.guarded_files import read_npz

_KEYS = ("audio", "label", "speaker")
_SIZE = 32
_DIGITS = 10
_SAMPLES_PER_S = 8000
_WINDOW = 512
_DECIBELS = 80.0  # quieter than a clip's loudest point by so much is silence
_NORMALISATION = Normalisation((0.5,), (0.25,), "round numbers")


@dataclass(frozen=True, slots=True)
class SpokenDigits:
    """uint8 spectrograms [N, 32, 32, 1], digits [N] and speakers [N], both int64."""

    clips: LabelledImages
    speakers: NDArray[np.int64]

    def of(self, chosen: NDArray[np.bool_]) -> LabelledImages:
        """Return the clips where ``chosen`` [N] is True."""
        return LabelledImages(self.clips.images[chosen], self.clips.labels[chosen])


def read_spoken_digits(path: Path) -> SpokenDigits:
    """Read ``audio`` (int16 [N, 8000], 8 kHz), ``label`` and ``speaker`` ([N]) from an ``.npz``.

    Raises:
        DataError: the file is missing, damaged or holds something else.
    """
    if not path.exists():
        raise DataError(
            f"asked for spoken:{path}, but there is no such file; name an .npz with "
            f"{', '.join(_KEYS)}"
        )
    arrays = read_npz(path, _KEYS)
    audio, label, speaker = (arrays[key] for key in _KEYS)
    if audio.ndim != 2 or audio.dtype != np.int16 or audio.shape[1] < _WINDOW:
        raise DataError(
            f"{path} audio: expected int16 clips [N, samples] of at least {_WINDOW}, "
            f"found {audio.dtype} {list(audio.shape)}"
        )
    if not len(audio) or label.shape != audio.shape[:1] or speaker.shape != audio.shape[:1]:
        raise DataError(
            f"{path}: expected as many labels and speakers as clips, "
            f"found {len(audio)}, {list(label.shape)} and {list(speaker.shape)}"
        )
    if label.dtype.kind not in "iu" or speaker.dtype.kind not in "iu":
        raise DataError(
            f"{path}: expected whole numbers as labels and speakers, found {label.dtype} and "
            f"{speaker.dtype}"
        )
    if label.min() < 0 or label.max() >= _DIGITS:
        raise DataError(f"{path}: labels run from {label.min()} to {label.max()}; digits to 9")
    images = LabelledImages(_pictures(audio), label.astype(np.int64))
    return SpokenDigits(images, speaker.astype(np.int64))


def load_spoken_digits(path: Path, image_size: int | None = None) -> ImageData:
    """Read all speakers; the last one, unheard in training, is the test part.

    Raises:
        DataError: as ``read_spoken_digits``, or there is only one speaker.
    """
    spoken = read_spoken_digits(path)
    last = spoken.speakers == spoken.speakers.max()
    if last.all():
        raise DataError(f"{path} has one speaker; to test on one never heard it takes two")
    return _data(path, spoken, ~last, last).at_size(image_size)


def load_new_speaker(path: Path) -> ImageData:
    """Read the last speaker; every second clip of each digit is for training, the others test.

    Raises:
        DataError: as ``read_spoken_digits``.
    """
    spoken = read_spoken_digits(path)
    mine = np.flatnonzero(spoken.speakers == spoken.speakers.max())
    return _every_second(path, spoken, mine[np.argsort(spoken.clips.labels[mine], kind="stable")])


def load_known_speakers(path: Path) -> ImageData:
    """Read all speakers; every second clip of a speaker's digit is for training, the others test.

    Raises:
        DataError: as ``read_spoken_digits``.
    """
    spoken = read_spoken_digits(path)
    return _every_second(path, spoken, np.lexsort((spoken.clips.labels, spoken.speakers)))


def _every_second(path: Path, spoken: SpokenDigits, order: NDArray[np.int64]) -> ImageData:
    trained, tested = np.zeros((2, len(spoken.speakers)), bool)
    trained[order[::2]] = True
    tested[order[1::2]] = True
    return _data(path, spoken, trained, tested)


def _data(
    path: Path, spoken: SpokenDigits, trained: NDArray[np.bool_], tested: NDArray[np.bool_]
) -> ImageData:
    return ImageData(
        name=f"spoken:{path}",
        train=spoken.of(trained),
        test=spoken.of(tested),
        classes=tuple(str(digit) for digit in range(int(spoken.clips.labels.max()) + 1)),
        full_scale=255,
        normalisation=_NORMALISATION,
    )


def _pictures(audio: NDArray[np.int16]) -> ByteArray:
    starts = np.linspace(0, audio.shape[1] - _WINDOW, _SIZE).astype(np.int64)
    places = starts[:, None] + np.arange(_WINDOW)
    bands = _bands()
    pictures = np.empty((len(audio), _SIZE, _SIZE, 1), np.uint8)
    for picture, clip in zip(pictures, audio, strict=True):
        windows = clip[places].astype(np.float64) * np.hanning(_WINDOW)
        power = np.square(np.abs(np.fft.rfft(windows))) @ bands
        decibels = 10 * np.log10(power / max(power.max(), 1e-9) + 1e-12)
        picture[..., 0] = np.rint(255 * np.clip(decibels / _DECIBELS + 1, 0, 1)).T
    return pictures


def _bands() -> NDArray[np.float64]:
    """Return weights [frequencies, 32]: triangles that overlap by halves."""
    frequencies = np.fft.rfftfreq(_WINDOW, 1 / _SAMPLES_PER_S)
    mel = 2595 * np.log10(1 + frequencies / 700)
    centres = np.linspace(0, mel[-1], _SIZE + 2)
    width = centres[1] - centres[0]
    # At low frequencies a triangle may lie between two frequencies: it takes the nearest one.
    bands: NDArray[np.float64] = np.clip(1 - np.abs(mel[:, None] - centres[1:-1]) / width, 0, None)
    empty = ~bands.any(0)
    bands[np.abs(mel[:, None] - centres[1:-1]).argmin(0)[empty], np.flatnonzero(empty)] = 1.0
    return bands
