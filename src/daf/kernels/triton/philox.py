"""Philox4x32-10 on a GPU as ``reference.philox``; Triton's own has words in another order."""

import triton
import triton.language as tl
from triton.language import constexpr


@triton.jit
def philox_words(key_low, key_high, blocks, calls, STREAM: constexpr):
    """Return four (BLOCKS, CALLS) uint32 words of counters (block, call, stream).

    ``blocks`` (BLOCKS,) int64, ``calls`` (CALLS,) int32; the key's halves are int32 patterns.
    """
    zero = (blocks[:, None] * 0 + calls[None, :] * 0).to(tl.uint32)
    word0 = zero + (blocks & 0xFFFFFFFF).to(tl.uint32)[:, None]
    word1 = zero + (blocks >> 32).to(tl.uint32)[:, None]
    word2 = zero + calls.to(tl.uint32)[None, :]
    word3 = zero + STREAM
    key0 = zero + key_low.to(tl.uint32, bitcast=True)
    key1 = zero + key_high.to(tl.uint32, bitcast=True)
    for _ in tl.static_range(10):
        first = word0.to(tl.uint64) * 0xD2511F53
        second = word2.to(tl.uint64) * 0xCD9E8D57
        word0 = (second >> 32).to(tl.uint32) ^ word1 ^ key0
        word2 = (first >> 32).to(tl.uint32) ^ word3 ^ key1
        word1 = second.to(tl.uint32)
        word3 = first.to(tl.uint32)
        key0 += 0x9E3779B9
        key1 += 0xBB67AE85
    return word0, word1, word2, word3


@triton.jit
def sign_words(key_low, key_high, blocks, TURN: constexpr, BLOCKS: constexpr):
    """Return (BLOCKS, 8) int32: bits that are set where round TURN of the rotation negates."""
    calls = tl.arange(0, 2) + 2 * TURN
    word0, word1, word2, word3 = philox_words(key_low, key_high, blocks, calls, 0)
    quads = tl.join(tl.join(word0, word2), tl.join(word1, word3))  # block, call, bit 1, bit 0
    return tl.reshape(quads, (BLOCKS, 8)).to(tl.int32, bitcast=True)


@triton.jit
def spread_signs(words, BLOCKS: constexpr):
    """Return (BLOCKS, 256) int32, of which bit 31 is set where the element is negated."""
    lane = tl.arange(0, 32)
    upwards = 31 - (lane // 2 + 16 * (lane % 2))
    return tl.reshape(words[:, :, None] << upwards[None, None, :], (BLOCKS, 256))


@triton.jit
def flip_signs(values, signs):
    """Negate float32 numbers where bit 31 is set."""
    return (values.to(tl.int32, bitcast=True) ^ (signs & -(2**31))).to(tl.float32, bitcast=True)


@triton.jit
def dither(key_low, key_high, blocks, BLOCKS: constexpr):
    """Return (BLOCKS, 256) numbers in [1, 2): 1 + the uniform offset of stochastic rounding."""
    word0, word1, word2, word3 = philox_words(key_low, key_high, blocks, tl.arange(0, 16), 1)
    quads = tl.join(tl.join(word0, word2), tl.join(word1, word3))  # block, call, bit 1, bit 0
    quads = tl.reshape(quads, (BLOCKS, 2, 8, 2, 2))
    rows = tl.reshape(tl.permute(quads, (0, 1, 3, 2, 4)), (BLOCKS, 4, 1, 16))
    turn = (8 * tl.arange(0, 4)).to(tl.uint32)[None, None, :, None]
    turned = (rows << turn) | (rows >> ((32 - turn) & 31))
    pattern = 0x3F800000 | (turned & 0x007FFFFF)
    return tl.reshape(pattern, (BLOCKS, 256)).to(tl.float32, bitcast=True)
