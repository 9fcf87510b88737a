"""The ``rotated`` codec on a GPU: section 4 of ``docs/format.md``."""

import triton
import triton.language as tl
from triton.language import constexpr

from daf.kernels.triton import blocks as device
from daf.kernels.triton.philox import flip_signs, sign_words, spread_signs

_LEAST_ENERGY = tl.constexpr(2.0**-60)
_GREATEST_ENERGY = tl.constexpr(2.0**60)
_PEAKED_FACTOR = tl.constexpr(16.0)
_LENGTH = tl.constexpr(2000.0)
_LENGTH_TIMES_UNIT = tl.constexpr(2000.0 * 2048.0)
_TO_INTEGER = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it drops the fraction
_PART = tl.constexpr(1 / 256)  # a product with it is rounded as the quotient by 256
_LEVELS = tl.constexpr(8)  # where a table's levels begin, behind its thresholds
# Which blocks a kernel encodes, and the header of one that is left to another kernel.
ALL_BLOCKS, USUAL_BLOCKS, UNUSUAL_BLOCKS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_UNUSUAL = tl.constexpr(-1)


@triton.jit
def _spread(centred, BLOCKS: constexpr):
    """Return the energies of blocks around their mean, and which are peaked, (BLOCKS,) each."""
    fours = device.add_halves(device.add_halves(centred * centred, BLOCKS, 256), BLOCKS, 128)
    energy = device.tree_sum(fours, BLOCKS, FIRST=2)
    peak = device.tree_sum(fours * fours, BLOCKS, FIRST=2)
    return energy, peak * _PEAKED_FACTOR > energy * energy


@triton.jit
def _centre(values, valid, real_count, prescale, unscale, BLOCKS: constexpr):
    """Return blocks around their rounded mean; the mean's bf16 pattern; energy; who is peaked."""
    scaled = values * prescale[:, None]
    average = tl.math.div_rn(device.tree_sum(scaled, BLOCKS), real_count)
    mean = device.nearest_bfloat16(average * unscale)
    origin = device.widen_bfloat16(mean) * prescale
    centred = tl.where(valid, scaled - origin[:, None], 0.0)
    energy, peaked = _spread(centred, BLOCKS)
    return centred, mean, energy, peaked


@triton.jit
def _is_ordinary(energy):
    return (energy >= _LEAST_ENERGY) & (energy <= _GREATEST_ENERGY)


@triton.jit
def _centre_any(values, valid, real_count, BLOCKS: constexpr):
    """Do the same, prescaled if the energy asks for it."""
    # Also return the prescale's inverse, whether all are finite, and that these blocks are coded.
    one = real_count * 0.0 + 1.0
    _, _, energy, _ = _centre(values, valid, real_count, one, one, BLOCKS)
    ordinary = _is_ordinary(energy)
    prescale, unscale, finite = device.prescale_of(values, BLOCKS)
    prescale, unscale = tl.where(ordinary, one, prescale), tl.where(ordinary, one, unscale)
    known = tl.where(finite[:, None], values, 0.0)
    centred, mean, energy, peaked = _centre(known, valid, real_count, prescale, unscale, BLOCKS)
    return centred, mean, energy, peaked, unscale, finite, one > 0.0


@triton.jit
def _centre_usual(values, real_count, BLOCKS: constexpr):
    """Do the same for whole blocks of an ordinary energy that are not peaked; lastly, which are."""
    # Their elements are finite: the energy would not be.
    mean = device.nearest_bfloat16(device.tree_sum(values, BLOCKS) * _PART)
    centred = values - device.widen_bfloat16(mean)[:, None]
    energy, peaked = _spread(centred, BLOCKS)
    one = real_count * 0.0 + 1.0
    usual = _is_ordinary(energy) & (real_count == 256.0) & (peaked == 0)
    return centred, mean, energy, one < 0.0, one, one > 0.0, usual


@triton.jit
def _to_integers(values):
    """Round float32 numbers below 2**22 to nearest even."""
    return (values + _TO_INTEGER) - _TO_INTEGER


@triton.jit
def _between_rounds(values, signs):
    """Divide integers by 16, a half upwards, and flip signs: half an odd number never ties."""
    return flip_signs(_to_integers((values + 0.5) * 0.0625), signs)


@triton.jit
def _words_of_turn(words, turn, TURNS: constexpr, BLOCKS: constexpr):
    """Return (BLOCKS, 8) of (TURNS * BLOCKS, 8)."""
    if TURNS > 1:
        own = tl.arange(0, TURNS)[:, None, None] == turn
        words = tl.sum(tl.where(own, tl.reshape(words, (TURNS, BLOCKS, 8)), 0), axis=0)
    return words


@triton.jit
def _transform_again(values, matrix, blocks, peaked, key_low, key_high, BLOCKS: constexpr):
    if tl.max(peaked.to(tl.int32), axis=0) != 0:
        words = sign_words(key_low, key_high, blocks, 1, BLOCKS)
        again = _between_rounds(values, spread_signs(words, BLOCKS))
        again = device.hadamard(again, matrix, BLOCKS, NARROW=False)
        values = tl.where(peaked[:, None], again, values)
    return values


@triton.jit
def _choose2(table, bit, FIRST: constexpr, STEP: constexpr):
    """Return an entry by a bit: a gather would bring its own order of lanes."""
    return tl.where(bit, tl.load(table + FIRST + STEP), tl.load(table + FIRST))


@triton.jit
def _choose4(table, bit1, bit0, FIRST: constexpr, STEP: constexpr):
    upper = _choose2(table, bit0, FIRST + 2 * STEP, STEP)
    return tl.where(bit1, upper, _choose2(table, bit0, FIRST, STEP))


@triton.jit
def _choose8(table, bit2, bit1, bit0, FIRST: constexpr, STEP: constexpr):
    upper = _choose4(table, bit1, bit0, FIRST + 4 * STEP, STEP)
    return tl.where(bit2, upper, _choose4(table, bit1, bit0, FIRST, STEP))


@triton.jit
def _find_cells(rotated, table, BITS: constexpr):
    """Return each number's code, its most significant bit at weight 8, and its level's product."""
    # Cells lie symmetrically, so magnitudes decide; of negative numbers, lower bits are inverted.
    size = tl.abs(rotated)
    cell = tl.zeros(size.shape, tl.int32)
    if BITS == 1:
        level = tl.load(table + _LEVELS)
    elif BITS == 2:
        bit2 = size >= tl.load(table)
        level, cell = _choose2(table, bit2, _LEVELS, 1), tl.where(bit2, 4, 0)
    elif BITS == 3:
        bit2 = size >= tl.load(table + 1)
        bit1 = size >= _choose2(table, bit2, 0, 2)
        level = _choose4(table, bit2, bit1, _LEVELS, 1)
        cell = tl.where(bit2, 4, 0) + tl.where(bit1, 2, 0)
    else:
        bit2 = size >= tl.load(table + 3)
        bit1 = size >= _choose2(table, bit2, 1, 4)
        bit0 = size >= _choose4(table, bit2, bit1, 0, 2)
        level = _choose8(table, bit2, bit1, bit0, _LEVELS, 1)
        cell = tl.where(bit2, 4, 0) + tl.where(bit1, 2, 0) + tl.where(bit0, 1, 0)
    return cell ^ tl.where(rotated >= 0.0, 8, 7), level * size


@triton.jit
def _sum_products(products, BLOCKS: constexpr):
    """Sum (BLOCKS, 256) integers as int32: of sixteen, Cauchy's bound is less than 2**24."""
    sixteens = tl.sum(tl.reshape(products, (BLOCKS, 16, 16)), axis=2)
    return tl.sum(sixteens.to(tl.int32), axis=1)


@triton.jit
def _encode(
    centre,
    blocks,
    there,
    planes,
    table,
    matrix,
    words,
    key_low,
    key_high,
    full_runs,
    BITS: constexpr,
    KEPT: constexpr,
    WHICH: constexpr,
    BLOCKS: constexpr,
):
    """Write blocks, given around their mean, where ``there``; mark those that are not ``usual``."""
    centred, mean, energy, peaked, unscale, finite, usual = centre
    norm = tl.math.sqrt_rn(energy)
    some = finite & (norm != 0.0)
    length = tl.where(some, norm, 1.0)
    factor = tl.math.div_rn(length * 0.0 + _LENGTH, length)
    integers = _to_integers(centred * factor[:, None])
    rotated = flip_signs(integers, spread_signs(words, BLOCKS))
    rotated = device.hadamard(rotated, matrix, BLOCKS, NARROW=False)
    if WHICH != USUAL_BLOCKS:
        rotated = _transform_again(rotated, matrix, blocks, peaked, key_low, key_high, BLOCKS)
    cells, products = _find_cells(rotated, table, BITS)
    product = _sum_products(products, BLOCKS)
    gain = tl.math.div_rn(norm * _LENGTH_TIMES_UNIT, tl.where(some, product, 1).to(tl.float32))
    step = device.nearest_bfloat16(gain * unscale) | tl.where(peaked, 0x8000, 0)
    step = tl.where(norm == 0.0, 0, step)
    good = finite & device.is_finite_bfloat16(mean) & device.is_finite_bfloat16(step)
    pair = tl.where(usual, device.joined_headers(mean, step, good), _UNUSUAL)
    device.store_headers(planes, blocks, there, pair, BITS)
    written = (good & (norm != 0.0))[:, None]
    full = blocks * 8 < full_runs * planes.page_words.to(tl.int64)
    for plane in tl.static_range(KEPT):
        exists = there & (full | (plane < KEPT - 1))
        packed = tl.where(written, device.bit_words((cells & (8 >> plane)) != 0, BLOCKS), 0)
        device.store_words(planes, plane, blocks, exists, packed, BLOCKS)


# Lanes side by side load elements side by side, one each, so that halves of a block are added in
# registers: what is known of the source's alignment would give each lane several neighbours.
@triton.jit(do_not_specialize=["key_low", "key_high"], do_not_specialize_on_alignment=["source"])
def encode_rotated(
    source,
    planes,
    affine,
    table,
    count,
    key_low,
    key_high,
    full_runs,
    TYPE: constexpr,
    BITS: constexpr,
    KEPT: constexpr,
    WHICH: constexpr,
    TURNS: constexpr,
    BLOCKS: constexpr,
):
    """Write the headers and the planes that each run has.

    ``table`` (16,) float32: the magnitudes' ascending thresholds, and from the eighth their levels.
    WHICH: all blocks; or the usual, and a mark into the others' headers; or those so marked. The
    registers that an unusual block takes would leave room for half as many warps.
    """
    matrix, first = device.hadamard_matrix(), tl.program_id(0).to(tl.int64) * (TURNS * BLOCKS)
    every = first + tl.arange(0, TURNS * BLOCKS)
    words = sign_words(key_low, key_high, every, 0, TURNS * BLOCKS)  # of many, so no lane idles
    for turn in range(TURNS):
        blocks = first + turn * BLOCKS + tl.arange(0, BLOCKS)
        valid, there = device.which_exist(blocks, count)
        real_count = tl.minimum(tl.maximum(count - blocks * 256, 1), 256).to(tl.float32)
        if WHICH == UNUSUAL_BLOCKS:
            place = device.header_place(planes, tl.where(there, blocks, 0), BITS)
            there = there & (tl.load(planes.headers + place, mask=there, other=0) == _UNUSUAL)
        if (WHICH != UNUSUAL_BLOCKS) or (tl.max(there.to(tl.int32), axis=0) != 0):
            values = device.load_values(source, blocks, valid, affine, TYPE)
            if WHICH == USUAL_BLOCKS:
                centre = _centre_usual(values, real_count, BLOCKS)
            else:
                centre = _centre_any(values, valid, real_count, BLOCKS)
            _encode(
                centre,
                blocks,
                there,
                planes,
                table,
                matrix,
                _words_of_turn(words, turn, TURNS, BLOCKS),
                key_low,
                key_high,
                full_runs,
                BITS,
                KEPT,
                WHICH,
                BLOCKS,
            )


@triton.jit
def _decode_level(planes, levels, blocks, there, full, KEPT: constexpr, BLOCKS: constexpr):
    """Return (BLOCKS, 256) float32: levels by the planes that each run has."""
    if KEPT == 1:
        signs = device.load_plane(planes, 0, blocks, there, BLOCKS)
        level = tl.where(signs != 0, tl.load(levels + 8), tl.load(levels))
    else:
        cells = tl.zeros((BLOCKS, 256), tl.int32)
        for plane in tl.static_range(KEPT):
            exists = there & (full | (plane < KEPT - 1))
            bits = device.load_plane(planes, plane, blocks, exists, BLOCKS)
            cells += bits << (3 - plane)
        level = tl.load(levels + tl.where(full, 0, 16)[:, None] + cells)
    return level


@triton.jit(do_not_specialize=["key_low", "key_high", "first_block"])
def decode_rotated(
    destination,
    planes,
    affine,
    mask,
    levels,
    factors,
    count,
    first_block,
    key_low,
    key_high,
    full_runs,
    TYPE: constexpr,
    BITS: constexpr,
    KEPT: constexpr,
    ACCUMULATE: constexpr,
    BLOCKS: constexpr,
):
    """Decode every run from the planes it has: the first KEPT, or one less after ``full_runs``.

    ``levels`` holds the table of KEPT planes, then that of one less; ``factors`` likewise.
    """
    blocks = first_block.to(tl.int64) + device.tile_blocks(BLOCKS)
    there = blocks * 256 < count
    mean, step, good = device.load_headers(planes, blocks, there, BITS)
    full = blocks * 8 < full_runs * planes.page_words.to(tl.int64)
    level = _decode_level(planes, levels, blocks, there, full, KEPT, BLOCKS)
    matrix, peaked = device.hadamard_matrix(), step.to(tl.int32, bitcast=True) < 0
    # Levels are at most 127, so that sums of sixteen are narrow.
    rotated = device.hadamard(level, matrix, BLOCKS, NARROW=True)
    rotated = _transform_again(rotated, matrix, blocks, peaked, key_low, key_high, BLOCKS)
    words = sign_words(key_low, key_high, blocks, 0, BLOCKS)
    rotated = flip_signs(rotated, spread_signs(words, BLOCKS))
    factor = tl.abs(step) * tl.load(factors + tl.where(full, 0, 1))
    mean = tl.where(good, mean, float("nan"))
    values = mean[:, None] + factor[:, None] * rotated
    device.write_values(
        destination, values, blocks, first_block, affine, mask, count, TYPE, ACCUMULATE, BLOCKS
    )
