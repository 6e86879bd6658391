"""Products and norms in Triton, which `shared.ops.products` launches. Needs the package triton.

A product multiplies rows of a matrix (the M of a matrix instruction) by tokens (its N). Each of its numbers is summed
over K by one program, front to back, in steps that follow from the matrix alone; or piece by piece, where the matrix is
cut into pieces, and the pieces are added front to back. So the bits of a token's result depend neither on how many
tokens share the product nor on its place among them, as far as an instruction gives a column the same bits at every
width. A card's trial at start shows whether it does (`shared.model.company`).

Blocks of a .gguf file, AWQ and GPTQ are dequantised in registers, to the numbers of their definition, and rounded to
the tokens' dtype. How they lie in memory: `shared.ops.blocks`.
"""

import triton
import triton.language as tl

# A multiplication and an addition stay two operations, as in GGUF's reference code.
OPTIONS = {"enable_fp_fusion": False}


@triton.jit
def half_at(word, PLACE: tl.constexpr):
    """The float16 in the lower (0) or upper (1) half of words int32, as float32."""
    return ((word >> (16 * PLACE)) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def widened(quants, words, supers, GROUP: tl.constexpr, SCALES: tl.constexpr, ZERO: tl.constexpr):
    """Quants [BN, 32] int32 of a group, with their words of scales [BN], as numbers float32. SCALES: 0: a scale and an
    addend of each group; 1: of each group 6 bits of scale and addend, which `supers` scale; 2: a signed scale for 16
    quants, which `supers` scale; 3: a scale and a zero; 4: of each group an exponent, and quants are floats."""
    if SCALES == 4:
        # With its bits where a float16 has them, a float of 4 bits is 2^-14 of itself. It is doubled, as GGUF does it.
        half = ((quants & 7) << 9 | (quants & 8) << 12).to(tl.int16).to(tl.float16, bitcast=True)
        exponent = (words >> (8 * (GROUP % 4))) & 255
        power = tl.where(exponent < 2, (exponent + 1) << 21, (exponent - 1) << 23).to(tl.float32, bitcast=True)
        return half.to(tl.float32) * 32768.0 * power[:, None]
    numbers = (quants - ZERO).to(tl.float32)
    if SCALES == 0:
        return half_at(words, 0)[:, None] * numbers + half_at(words, 1)[:, None]
    if SCALES == 3:
        return half_at(words, 0)[:, None] * (numbers - (words >> 16)[:, None].to(tl.float32))
    scale = half_at(supers, 0)
    if SCALES == 1:
        own = scale * ((words >> (8 * (GROUP % 2))) & 255).to(tl.float32)
        addend = half_at(supers, 1) * ((words >> (16 + 8 * (GROUP % 2))) & 255).to(tl.float32)
        return own[:, None] * numbers - addend[:, None]
    first = scale * ((words << (24 - 16 * (GROUP % 2))) >> 24).to(tl.float32)
    second = scale * ((words << (16 - 16 * (GROUP % 2))) >> 24).to(tl.float32)
    return tl.where(tl.arange(0, 32)[None, :] < 16, first[:, None], second[:, None]) * numbers


@triton.jit(do_not_specialize=("num_tokens",))
def multiply(
    x, weight, high, scales, supers, bias, out, parts, places, tiles, num_tokens, num_rows, all_rows, width, x_token,
    BN: tl.constexpr, BT: tl.constexpr, STEP: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr,
    SPLIT: tl.constexpr, BIASED: tl.constexpr, WIDENS: tl.constexpr, EVEN: tl.constexpr,
    BITS: tl.constexpr, HIGH: tl.constexpr, SCALES: tl.constexpr, SPAN: tl.constexpr, ZERO: tl.constexpr,
    CHOICES: tl.constexpr,
):  # fmt: skip
    """out [T, N] = x [T, K] times weight [N, K], or a matrix in blocks if BITS is not 0, plus bias [N]. Programs: tiles
    of tokens (x) times tiles of rows (y). SPLIT: times pieces (z), whose sums go to `parts` [PIECES, T, N].

    CHOICES: if not 0, the matrices of several experts lie one below the other, `all_rows` in all, as their biases do,
    and T is that of choices: choice p takes row p // CHOICES of x. `places` [T] are choices sorted by expert, and
    `tiles` [3, number] say of each tile its expert, its first place and how many there are."""
    row = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = row < num_rows
    held_row, stop = row.to(tl.int64), width
    if CHOICES == 0:
        token = tl.program_id(0) * BT + tl.arange(0, BT)
        there, source = token < num_tokens, token
    else:
        number, num_tiles = tl.program_id(0), tl.num_programs(0)
        own, count = tl.arange(0, BT), tl.load(tiles + 2 * num_tiles + number)
        there = own < count
        token = tl.load(places + tl.load(tiles + num_tiles + number) + own, mask=there, other=0)
        source, stop = token // CHOICES, tl.where(count > 0, width, 0)
        held_row += tl.load(tiles + number).to(tl.int64) * num_rows
    rows = tl.program_id(0).to(tl.int64) * 0 + all_rows
    COLUMNS: tl.constexpr = STEP if BITS == 0 else 32
    WORD: tl.constexpr = SPAN // 32
    k = tl.arange(0, COLUMNS)
    columns = x + source[None, :].to(tl.int64) * x_token + k[:, None]
    whole = tl.zeros((BN, BT), tl.float32)
    first = tl.program_id(2) if SPLIT else 0
    for piece in range(first, first + (1 if SPLIT else PIECES)):
        sums = tl.zeros((BN, BT), tl.float32)
        for begin in range(piece * PIECE, tl.minimum((piece + 1) * PIECE, stop), STEP):
            if BITS == 0:
                within = inside[:, None] if EVEN else inside[:, None] & (begin + k < width)[None, :]
                tile = tl.load(weight + held_row[:, None] * width + begin + k[None, :], mask=within, other=0.0)
                shown = there[None, :] if EVEN else there[None, :] & (begin + k < width)[:, None]
                column = tl.load(columns + begin, mask=shown, other=0.0)
                if WIDENS:
                    tile, column = tile.to(tl.float32), column.to(tl.float32)
                sums = tl.dot(tile, column, sums, input_precision="ieee")
            else:
                group = rows * (begin // 32)
                for i in tl.static_range(STEP // 32):
                    at = (held_row * 32)[:, None] + k[None, :]
                    if BITS == 8:
                        low = tl.load(weight + (group + rows * i) * 32 + at, mask=inside[:, None], other=0)
                        quants = low.to(tl.int8, bitcast=True).to(tl.int32)
                    else:
                        if i % 2 == 0:
                            low = tl.load(weight + (group // 2 + rows * (i // 2)) * 32 + at, mask=inside[:, None],
                                          other=0)  # fmt: skip
                        quants = ((low >> (4 * (i % 2))) & 15).to(tl.int32)
                    if HIGH == 2:
                        if i % 4 == 0:
                            upper = tl.load(high + (group // 4 + rows * (i // 4)) * 32 + at, mask=inside[:, None],
                                            other=0)  # fmt: skip
                        quants += ((upper >> (2 * (i % 4))) & 3).to(tl.int32) * 16
                    if HIGH == 1:
                        if i % 8 == 0:
                            upper = tl.load(high + group // 8 * 32 + at, mask=inside[:, None], other=0)
                        quants += ((upper >> (i % 8)) & 1).to(tl.int32) * 16
                    if i % WORD == 0:
                        words = tl.load(scales + group // WORD + rows * (i // WORD) + held_row, mask=inside, other=0)
                    if SCALES == 0 or SCALES == 3 or SCALES == 4:
                        above = words
                    else:
                        if i % 8 == 0:
                            above = tl.load(supers + rows * (begin // 256) + held_row, mask=inside, other=0)
                    tile = widened(quants, words, above, i, SCALES, ZERO).to(x.dtype.element_ty)
                    shown = there[None, :] if EVEN else there[None, :] & (begin + 32 * i + k < width)[:, None]
                    column = tl.load(columns + begin + 32 * i, mask=shown, other=0.0)
                    if WIDENS:
                        tile, column = tile.to(tl.float32), column.to(tl.float32)
                    sums = tl.dot(tile, column, sums, input_precision="ieee")
        if PIECES == 1 or SPLIT:
            whole = sums
        else:
            whole += sums
    held = inside[:, None] & there[None, :]
    place = token[None, :].to(tl.int64) * num_rows + row[:, None]
    if SPLIT:
        numbers = tl.program_id(0).to(tl.int64) * 0 + num_tokens
        tl.store(parts + tl.program_id(2) * num_rows * numbers + place, whole, mask=held)
    else:
        if BIASED:
            whole += tl.load(bias + held_row, mask=inside, other=0.0).to(tl.float32)[:, None]
        tl.store(out + place, whole.to(out.dtype.element_ty), mask=held)


@triton.jit(do_not_specialize=("num_numbers",))
def add_pieces(
    parts, bias, out, num_numbers, num_rows, PIECES: tl.constexpr, BIASED: tl.constexpr, BLOCK: tl.constexpr
):
    """out [T * N] = the sums of `parts` [PIECES, T * N] in the order in which `multiply` adds them, plus bias [N]."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_numbers
    stride = tl.program_id(0).to(tl.int64) * 0 + num_numbers
    whole = tl.zeros((BLOCK,), tl.float32)
    for piece in tl.static_range(PIECES):
        whole += tl.load(parts + stride * piece + at, mask=inside, other=0.0)
    if BIASED:
        whole += tl.load(bias + at % num_rows, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, whole.to(out.dtype.element_ty), mask=inside)


@triton.jit
def norm(
    x, weight, bias, out, width, eps, offset, D: tl.constexpr, CENTRED: tl.constexpr
):  # fmt: skip
    """A program per row of x [R, width]: the RMS norm, or CENTRED the layer norm, whose sums are of one order."""
    begin = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, D)
    inside = at < width
    value = tl.load(x + begin + at, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        value = tl.where(inside, value - tl.sum(value, 0) / width, 0.0)
    square = tl.sum(value * value, 0) / width
    value = (
        value * (1.0 / tl.sqrt(square + eps)) * (tl.load(weight + at, mask=inside, other=0.0).to(tl.float32) + offset)
    )
    if CENTRED:
        value += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + begin + at, value.to(out.dtype.element_ty), mask=inside)
