"""The kernels: K and V into pages, attention over pages, and the merge of its splits.

The pool is page-major and strided: in one layer, the vector of token `t` and head `h` of the page
in slot `s` begins at `s * slot_stride + t * token_stride + h * head_stride`, K first and V
`kv_stride` items behind it. `page_table[request, page]` is the slot.

Rows of a query tile are (token, head of the group): all heads that share K and V read them once.
Scores and sums are float32; masked keys are never read, so what lies outside live tokens may be
anything. The softmax is computed block by block (Milakov and Gimelshein 2018, arXiv:1805.02867; Dao
et al. 2022, arXiv:2205.14135), long contexts are cut into splits that are merged by their
log-sum-exp (Dao et al. 2023, Flash-Decoding).

A kernel is compiled for each set of constants, and by Triton's habit again for numbers that are 1
or a multiple of 16. So what changes from batch to batch is neither: a batch never seen before must
not wait for a compiler.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def write_kernel(
    key,
    value,
    pool,
    places,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    slot_stride,
    kv_stride,
    token_stride,
    head_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
):
    """One program a (token, head): its K and V to `places[token]` = slot * page_tokens + offset.

    A token whose place is negative belongs to nobody and writes nothing.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    place = tl.load(places + token)
    slot = place // PAGE_TOKENS
    offset = place % PAGE_TOKENS
    target = slot * slot_stride + offset * token_stride + head * head_stride
    d = tl.arange(0, BLOCK_D)
    live = (d < HEAD_DIM) & (place >= 0)
    k = tl.load(key + token * key_token_stride + head * key_head_stride + d, mask=live)
    v = tl.load(value + token * value_token_stride + head * value_head_stride + d, mask=live)
    tl.store(pool + target + d, k, mask=live)
    tl.store(pool + target + kv_stride + d, v, mask=live)


@triton.jit(do_not_specialize=["table_stride", "total_tokens"])
def attend_kernel(
    query,
    pool,
    output,
    partial,
    partial_lse,
    page_table,
    first_rows,
    positions,
    tile_request,
    tile_token,
    scale_log2,
    query_token_stride,
    query_head_stride,
    slot_stride,
    kv_stride,
    token_stride,
    head_stride,
    table_stride,
    output_token_stride,
    output_head_stride,
    total_tokens,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One program a (tile of queries, KV head, split of the keys).

    Tile i covers `BLOCK_M // GROUPS` tokens of request `tile_request[i]` from its token
    `tile_token[i]` on. With one split the result goes to `output`, `[tokens, heads, head_dim]`;
    with more, sums go to `partial`, float32 `[splits, tokens, heads, head_dim]`, and their base-2
    log-sum-exp to `partial_lse`, `[splits, tokens, heads]`. WIDEN multiplies in float32 what was
    rounded to the narrow format, for where products of that format are not to be had.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    request = tl.load(tile_request + tile).to(tl.int64)
    first = tl.load(tile_token + tile)
    row0 = tl.load(first_rows + request)
    tokens = tl.load(first_rows + request + 1) - row0
    position = tl.load(positions + request)

    m = tl.arange(0, BLOCK_M)
    TILE_TOKENS: tl.constexpr = BLOCK_M // GROUPS
    token = first + m // GROUPS
    head = kv_head * GROUPS + m % GROUPS
    live_rows = (m < TILE_TOKENS * GROUPS) & (token < tokens)
    d = tl.arange(0, BLOCK_D)
    live_d = d < HEAD_DIM
    rows = (row0 + token).to(tl.int64)
    q = tl.load(
        query + rows[:, None] * query_token_stride + head[:, None] * query_head_stride + d[None, :],
        mask=live_rows[:, None] & live_d[None, :],
        other=0.0,
    )
    if WIDEN:
        q = q.to(tl.float32)

    # A request without tokens in place (position below 0) has no keys: a row that fills a batch up.
    stop = tl.minimum(position + tokens, position + first + TILE_TOKENS)
    stop = tl.where(position < 0, 0, stop)
    blocks = tl.cdiv(stop, BLOCK_N)
    blocks_a_split = tl.cdiv(blocks, splits)
    begin = split * blocks_a_split * BLOCK_N
    end = tl.minimum(begin + blocks_a_split * BLOCK_N, stop)

    most = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    summed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    base = pool + kv_head * head_stride
    table = page_table + request * table_stride
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        live = n < end
        slot = tl.load(table + n // PAGE_TOKENS, mask=live, other=0).to(tl.int64)
        vectors = slot * slot_stride + (n % PAGE_TOKENS) * token_stride
        pointers = base + vectors[:, None] + d[None, :]
        readable = live[:, None] & live_d[None, :]
        k = tl.load(pointers, mask=readable, other=0.0)
        if WIDEN:
            k = k.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        seen = live[None, :] & (n[None, :] <= position + token[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        # A row that has seen no key yet keeps weight 0 and never computes inf - inf.
        base_score = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base_score[:, None])
        shrink = tl.exp2(most - base_score)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(pointers + kv_stride, mask=readable, other=0.0)
        summed = summed * shrink[:, None]
        weights = weights.to(v.dtype)
        if WIDEN:
            weights, v = weights.to(tl.float32), v.to(tl.float32)
        summed = tl.dot(weights, v, summed, input_precision=PRECISION)
        most = higher

    summed = summed / tl.where(total > 0, total, 1.0)[:, None]
    kept = live_rows[:, None] & live_d[None, :]
    if not IS_SPLIT:
        tl.store(
            output
            + rows[:, None] * output_token_stride
            + head[:, None] * output_head_stride
            + d[None, :],
            summed.to(output.dtype.element_ty),
            mask=kept,
        )
    else:
        row = (split * total_tokens + rows) * HEADS + head
        tl.store(partial + row[:, None] * HEAD_DIM + d[None, :], summed, mask=kept)
        lse = tl.where(total > 0, most + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(partial_lse + row, lse, mask=live_rows)


@triton.jit(do_not_specialize=["total_tokens"])
def merge_kernel(
    partial,
    partial_lse,
    output,
    rows,
    output_token_stride,
    output_head_stride,
    total_tokens,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One program a (token that was split, head): its splits' sums, weighted by exp2 of their lse.

    `rows[i]` is the token's row in the batch. A token that saw no key gets 0.
    """
    token = tl.load(rows + tl.program_id(0)).to(tl.int64)
    head = tl.program_id(1)
    s = tl.arange(0, SPLITS)
    d = tl.arange(0, BLOCK_D)
    row = (s * total_tokens + token) * HEADS + head
    lse = tl.load(partial_lse + row)
    most = tl.max(lse, 0)
    most = tl.where(most == float("-inf"), 0.0, most)
    weights = tl.exp2(lse - most)
    parts = tl.load(
        partial + row[:, None] * HEAD_DIM + d[None, :],
        mask=d[None, :] < HEAD_DIM,
        other=0.0,
    )
    total = tl.sum(weights, 0)
    merged = tl.sum(weights[:, None] * parts, 0) / tl.where(total > 0, total, 1.0)
    tl.store(
        output + token * output_token_stride + head * output_head_stride + d,
        merged.to(output.dtype.element_ty),
        mask=d < HEAD_DIM,
    )
