"""Paged attention in Triton: three kernels, which `shared.ops.paged_on_gpu` launches. Needs the package triton.

A *tile* is what a program multiplies at once: query heads of one key head, of the tokens of one sequence whose
positions are between two multiples of the tile's tokens. So a key is read once for all of them, and the row of a token
in its tile follows from its position. The keys are cut into *pieces*, whose borders are the same for every sequence. A
tile lies within one piece, and within one block of the keys that are multiplied at once.

So the bits of a token depend on its own position and on the keys of its sequence alone. What company adds to a tile
are rows of their own, and blocks that other rows do not see: these leave their sums and largest scores as they are. How
many programs share the pieces decides who adds, not what is added to what, and no compiler contracts the additions
(OPTIONS).
"""

import triton
import triton.language as tl

# A multiplication and an addition stay two operations.
OPTIONS = {"enable_fp_fusion": False}
# What differs from pass to pass: Triton would compile kernels of their own for 1 and for multiples of 16.
VARYING = ("num_tokens", "num_programs", "num_entries", "window")
# Pieces of a sequence, whatever its context: 8 for each doubling from 4,096 keys on.
MOST_PIECES = 256


@triton.jit
def piece_of(position):
    """The piece that a position is in: of 256 keys up to 4,096, from there on of an eighth of the octave."""
    octave = (position.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127  # floor(log2(position))
    return tl.where(position < 4096, position >> 8, 8 * (octave - 11) + (position >> tl.maximum(octave - 3, 0)))


@triton.jit
def begin_of(piece):
    """The first position of a piece."""
    return tl.where(piece < 16, piece << 8, (8 + piece % 8) << tl.maximum(piece // 8 + 7, 0))


@triton.jit
def first_seen(position, window):
    """The first position that a query at `position` sees."""
    return tl.where((window > 0) & (position >= window), position - window + 1, 0)


@triton.jit
def pieces_led(
    table_indices, positions, token, num_tokens, num_tables, capacity, window, SPLIT: tl.constexpr, TOK: tl.constexpr
):
    """Of how many pieces of keys each of `token` starts the work: those that its tile sees, if the token before it in
    the pass is not in the same tile; else 0. Also the first of these pieces."""
    inside = (token >= 0) & (token < num_tokens)
    at = tl.load(positions + token, mask=inside, other=-1)
    table = tl.load(table_indices + token, mask=inside, other=-1)
    before = inside & (token > 0)
    at_before = tl.load(positions + token - 1, mask=before, other=-1)
    table_before = tl.load(table_indices + token - 1, mask=before, other=-1)
    exists = inside & (at >= 0) & (at < capacity) & (table >= 0) & (table < num_tables)
    follows = before & (table_before == table) & (at_before == at - 1) & (at % TOK != 0)
    place = tl.where(exists, at, 0).to(tl.int32)
    first = piece_of(first_seen(place, window))
    count = piece_of(place) - first + 1 if SPLIT else first * 0 + 1
    return tl.where(exists & ~follows, count, 0), first


@triton.jit(do_not_specialize=VARYING)
def enter(
    k, v, keys, values, out, block_tables, table_indices, positions, work,
    num_tokens, num_blocks, num_tables, table_blocks, k_token, k_head, v_token, v_head, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, G: tl.constexpr,
    TOK: tl.constexpr, SPLIT: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
):  # fmt: skip
    """A program per token: writes its key and value to their block, and its share of the list of work. `work`: how
    many entries there are, then the entries, each a token and a piece. A token without a place gets its result."""
    token = tl.program_id(0)
    capacity = table_blocks * G
    at, table = tl.load(positions + token), tl.load(table_indices + token)
    exists = (at >= 0) & (at < capacity) & (table >= 0) & (table < num_tables)
    block = tl.load(block_tables + table * table_blocks + at // G, mask=exists, other=-1)
    d, dv = tl.arange(0, DP), tl.arange(0, DVP)
    if (block >= 0) & (block < num_blocks):
        for head in range(KV_HEADS):
            slot = (block * KV_HEADS + head) * G + at % G
            key = tl.load(k + token.to(tl.int64) * k_token + head * k_head + d, mask=d < D)
            tl.store(keys + slot * D + d, key, mask=d < D)
            value = tl.load(v + token.to(tl.int64) * v_token + head * v_head + dv, mask=dv < DV)
            tl.store(values + slot * DV + dv, value, mask=dv < DV)
    if not exists:
        nothing = tl.where(at < 0, 0.0, float("nan")) + tl.zeros((DVP,), tl.float32)
        for head in range(HEADS):
            row = token.to(tl.int64) * HEADS + head
            tl.store(out + row * DV + dv, nothing.to(out.dtype.element_ty), mask=dv < DV)
    start = token * 0
    lane = tl.arange(0, 256)
    for begin in range(0, token, 256):
        others = tl.where(begin + lane < token, begin + lane, -1)
        count, _ = pieces_led(table_indices, positions, others, num_tokens, num_tables, capacity, window, SPLIT, TOK)
        start += tl.sum(count, 0)
    count, first = pieces_led(table_indices, positions, token, num_tokens, num_tables, capacity, window, SPLIT, TOK)
    tl.store(work + 1 + start + lane, token * 256 + first + lane, mask=lane < count)
    if token == num_tokens - 1:
        tl.store(work, start + count)


@triton.jit
def attend_piece(
    keys, values, block_tables, query, at, live, least, last, begin, end, table, kv_head,
    num_blocks, table_blocks, scale, softcap, window,
    KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, G: tl.constexpr,
    DP: tl.constexpr, DVP: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, CAPPED: tl.constexpr,
    WIDENS: tl.constexpr,
):  # fmt: skip
    """The largest scores [BR], in base 2, the sums of weights [BR] and the weighted sums of values [BR, DVP] of the
    rows of a tile over the keys of positions [begin, end), of which the tile sees [least, last]."""
    largest = tl.full((BR,), -float("inf"), tl.float32)
    total = tl.zeros((BR,), tl.float32)
    sums = tl.zeros((BR, DVP), tl.float32)
    d, dv, lane = tl.arange(0, DP), tl.arange(0, DVP), tl.arange(0, BK)
    for block_begin in range(tl.maximum(begin, least // BK * BK), tl.minimum(end, last + 1), BK):
        key_at = block_begin + lane
        seen = (key_at >= least) & (key_at <= last)
        block = tl.load(block_tables + table * table_blocks + key_at // G, mask=seen, other=0)
        is_there = (block >= 0) & (block < num_blocks)
        slot = (block * KV_HEADS + kv_head) * G + key_at % G
        held = seen & is_there
        key = tl.load(keys + slot[None, :] * D + d[:, None], mask=held[None, :] & (d < D)[:, None], other=0.0)
        if WIDENS:
            key = key.to(tl.float32)
        score = tl.dot(query, key, input_precision="ieee") * scale
        if CAPPED:
            # tanh, from an exponential that cannot overflow
            share = tl.exp2(-2.885390081777927 * tl.abs(score))
            score = tl.where(score < 0, -1.0, 1.0) * softcap * ((1.0 - share) / (1.0 + share))
        own = (key_at[None, :] <= at[:, None]) & ((window == 0) | (at[:, None] - key_at[None, :] < window))
        own = own & live[:, None]
        score = tl.where(own, tl.where(is_there[None, :], score, float("nan")), -float("inf"))
        most = tl.maximum(largest, tl.max(score, 1))
        shift = tl.where(most == -float("inf"), 0.0, most)
        weight = tl.exp2(score - shift[:, None])
        keep = tl.exp2(largest - shift)
        total = total * keep + tl.sum(weight, 1)
        value = tl.load(values + slot[:, None] * DV + dv[None, :], mask=held[:, None] & (dv < DV)[None, :], other=0.0)
        if WIDENS:
            value = value.to(tl.float32)
        sums = tl.dot(weight.to(value.dtype), value, sums * keep[:, None], input_precision="ieee")
        largest = most
    return largest, total, sums


@triton.jit
def add_sink(most, whole, sink):
    """What to multiply the sums of values by, and the sum of shares with a key of score `sink` and value zero."""
    score = sink.to(tl.float32) * 1.4426950408889634
    largest = tl.maximum(most, score)
    keep = tl.exp2(most - largest)
    return keep, whole * keep + tl.exp2(score - largest)


@triton.jit(do_not_specialize=VARYING)
def attend(
    q, keys, values, sinks, out, parts, marks, block_tables, table_indices, positions, work,
    num_tokens, num_blocks, table_blocks, num_programs, num_entries, q_token, q_head, scale, softcap, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, G: tl.constexpr,
    TOK: tl.constexpr, SPLIT: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    TILE_HEADS: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, CAPPED: tl.constexpr, WIDENS: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """Programs (x) share the list of work, one tile of heads each (y). SPLIT: an entry is a piece, whose results go to
    `parts` and `marks`; else it is a tile, and its pieces are joined here. SINKS: to a key of score `sinks` [HEADS]
    whose value is zero."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    HEAD_TILES: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    kv_head = tl.program_id(1) // HEAD_TILES
    row = tl.arange(0, BR)
    of_group = tl.program_id(1) % HEAD_TILES * TILE_HEADS + row % TILE_HEADS
    head = kv_head * GROUP + of_group
    d, dv = tl.arange(0, DP), tl.arange(0, DVP)
    for number in range(tl.program_id(0), tl.load(work), num_programs):
        entry = tl.load(work + 1 + number)
        leader, piece = entry // 256, entry % 256
        table = tl.load(table_indices + leader)
        start = tl.load(positions + leader)
        token = leader + row // TILE_HEADS - (start % TOK).to(tl.int32)
        inside = (token >= leader) & (token < num_tokens)
        at = tl.load(positions + token, mask=inside, other=-1)
        owner = tl.load(table_indices + token, mask=inside, other=-1)
        live = inside & (at == start + token - leader) & (owner == table)
        live = live & (row // TILE_HEADS < TOK) & (at < table_blocks * G)
        at = tl.where(live, at, -1).to(tl.int32)
        live = live & (of_group < GROUP)
        place = token.to(tl.int64)
        query = tl.load(
            q + place[:, None] * q_token + head[:, None] * q_head + d[None, :],
            mask=live[:, None] & (d < D)[None, :],
            other=0.0,
        )
        if WIDENS:
            query = query.to(tl.float32)
        last = tl.max(at, 0)
        least = first_seen(start.to(tl.int32), window)
        out_row = place * HEADS + head
        if SPLIT:
            largest, total, sums = attend_piece(
                keys, values, block_tables, query, at, live, least, last, begin_of(piece), begin_of(piece + 1), table,
                kv_head, num_blocks, table_blocks, scale, softcap, window, KV_HEADS, D, DV, G, DP, DVP, BR, BK, CAPPED,
                WIDENS,
            )  # fmt: skip
            part = out_row * num_entries + piece
            tl.store(parts + part[:, None] * DV + dv[None, :], sums, mask=live[:, None] & (dv < DV)[None, :])
            tl.store(marks + part * 2, largest, mask=live)
            tl.store(marks + part * 2 + 1, total, mask=live)
        else:
            most = tl.full((BR,), -float("inf"), tl.float32)
            whole = tl.zeros((BR,), tl.float32)
            joined = tl.zeros((BR, DVP), tl.float32)
            for own in range(piece_of(least), piece_of(last) + 1):
                largest, total, sums = attend_piece(
                    keys, values, block_tables, query, at, live, least, last, begin_of(own), begin_of(own + 1), table,
                    kv_head, num_blocks, table_blocks, scale, softcap, window, KV_HEADS, D, DV, G, DP, DVP, BR, BK,
                    CAPPED, WIDENS,
                )  # fmt: skip
                before, most = most, tl.maximum(most, largest)
                shift = tl.where(most == -float("inf"), 0.0, most)
                keep, add = tl.exp2(before - shift), tl.exp2(largest - shift)
                whole = whole * keep + total * add
                joined = joined * keep[:, None] + sums * add[:, None]
            if SINKS:  # last, since before the loop it would take registers through it
                keep, whole = add_sink(most, whole, tl.load(sinks + head, mask=of_group < GROUP, other=0.0))
                joined *= keep[:, None]
            result = joined / whole[:, None]
            to = out + out_row[:, None] * DV + dv[None, :]
            tl.store(to, result.to(out.dtype.element_ty), mask=live[:, None] & (dv < DV)[None, :])


@triton.jit(do_not_specialize=VARYING)
def join(
    sinks, out, parts, marks, table_indices, positions, num_tables, table_blocks, num_entries, window,
    HEADS: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, G: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """A program per token (x) and query head (y): joins the pieces of a split tile as `attend` does."""
    token, dv = tl.program_id(0), tl.arange(0, DVP)
    at, table = tl.load(positions + token), tl.load(table_indices + token)
    if (at >= 0) & (at < table_blocks * G) & (table >= 0) & (table < num_tables):
        row = token.to(tl.int64) * HEADS + tl.program_id(1)
        most, whole = -float("inf"), 0.0
        joined = tl.zeros((DVP,), tl.float32)
        place = at.to(tl.int32)
        last = piece_of(place)
        for first in range(piece_of(first_seen(place, window)), last + 1, 8):
            for step in tl.static_range(8):  # eight reads at once
                piece = first + step
                part = row * num_entries + piece
                largest = tl.load(marks + part * 2, mask=last >= piece, other=-float("inf"))
                total = tl.load(marks + part * 2 + 1, mask=last >= piece, other=0.0)
                sums = tl.load(parts + part * DV + dv, mask=dv < tl.where(last >= piece, DV, 0), other=0.0)
                before, most = most, tl.maximum(most, largest)
                shift = tl.where(most == -float("inf"), 0.0, most)
                keep, add = tl.exp2(before - shift), tl.exp2(largest - shift)
                whole = whole * keep + total * add
                joined = joined * keep + sums * add
        if SINKS:
            keep, whole = add_sink(most, whole, tl.load(sinks + tl.program_id(1)))
            joined *= keep
        tl.store(out + row * DV + dv, (joined / whole).to(out.dtype.element_ty), mask=dv < DV)
