"""Philox4x32-10, the counter-based generator behind every seed (Salmon et al., SC 2011)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SIGN_STREAM = 0
DITHER_STREAM = 1

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW_WORD = np.uint64(0xFFFFFFFF)
_WORD_BITS = np.uint64(32)


def philox_words(
    key: int, blocks: NDArray[np.uint64], calls: NDArray[np.uint64], stream: int
) -> NDArray[np.uint32]:
    """Return (n, m, 4) random words for every pair of block (n,) and call (m,).

    The counter's low 64 bits are the block's number, its third word the call's, its fourth the
    ``stream``. ``key`` is in [0, 2**64); its low and high words are Philox's two key words.
    """
    shape = (len(blocks), len(calls))
    zero = np.zeros(shape, np.uint64)
    word0 = zero + (blocks & _LOW_WORD)[:, None]
    word1 = zero + (blocks >> _WORD_BITS)[:, None]
    word2 = zero + calls[None, :]
    word3 = zero + np.uint64(stream)
    for index in range(_ROUNDS):
        key0, key1 = _round_key(key, index)
        first, second = word0 * _MULTIPLIERS[0], word2 * _MULTIPLIERS[1]
        word0, word2 = (second >> _WORD_BITS) ^ word1 ^ key0, (first >> _WORD_BITS) ^ word3 ^ key1
        word1, word3 = second & _LOW_WORD, first & _LOW_WORD
    return np.stack([word0, word1, word2, word3], axis=-1).astype(np.uint32)


def _round_key(key: int, index: int) -> tuple[np.uint64, np.uint64]:
    low, high = key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF
    return (
        np.uint64((low + index * _KEY_STEPS[0]) & 0xFFFFFFFF),
        np.uint64((high + index * _KEY_STEPS[1]) & 0xFFFFFFFF),
    )


def sign_bits(key: int, blocks: NDArray[np.uint64], turn: int) -> NDArray[np.bool_]:
    """Return (n, 256) booleans: True if the sign changes in rotation round ``turn`` (0 or 1)."""
    calls = np.array([2 * turn, 2 * turn + 1], np.uint64)
    words = philox_words(key, blocks, calls, SIGN_STREAM).reshape(len(blocks), 8)
    place = np.arange(32, dtype=np.uint32)
    bits = (words[:, :, None] >> (place // 2 + 16 * (place % 2))) & np.uint32(1)
    return bits.reshape(len(blocks), 256).astype(bool)


def dither(key: int, blocks: NDArray[np.uint64]) -> NDArray[np.float32]:
    """Return (n, 256) numbers in [1, 2): one plus the uniform offset of stochastic rounding."""
    words = philox_words(key, blocks, np.arange(16, dtype=np.uint64), DITHER_STREAM)
    element = np.arange(256)
    vector, lane = element // 16, element % 16
    chosen = words[:, 8 * (vector // 8) + lane // 2, 2 * ((vector // 4) % 2) + lane % 2]
    turn = (8 * (vector % 4)).astype(np.uint32)
    turned = (chosen << turn) | (chosen >> ((np.uint32(32) - turn) % np.uint32(32)))
    pattern: NDArray[np.uint32] = np.uint32(0x3F800000) | (turned & np.uint32(0x007FFFFF))
    return pattern.view(np.float32)
