/* The stages of each collective: what a rank copies and reduces in one round. rounds.c calls them in order. */
#include "internal.h"

/* Up to this size every rank reduces everything: one synchronisation less saves more time than sharing the work. */
enum { DIRECT_BYTES = 16 * 1024 };

typedef struct {
    uint64_t start;
    uint64_t bytes;
} span;

/* ---- geometry */

/* The part of a block that round `k` moves. */
static span part(const phx_group *g, uint64_t bytes, uint64_t k)
{
    uint64_t start = smaller(k * g->now.piece, bytes);
    return (span){start, smaller(g->now.piece, bytes - start)};
}

/* The share of a round's part that rank `p` reduces: whole cache lines, so no two ranks write to one. */
static span share(const phx_group *g, uint64_t bytes, int p)
{
    uint64_t each = round_up((bytes + (uint64_t)g->ranks - 1) / (uint64_t)g->ranks);
    uint64_t start = smaller((uint64_t)p * each, bytes);
    return (span){start, smaller(each, bytes - start)};
}

static const char *in_block(const phx_call *call, int p)
{
    return call->ins ? call->ins[p] : (const char *)call->in + (uint64_t)p * block_bytes(call);
}

static char *out_block(const phx_call *call, int p)
{
    return call->outs ? call->outs[p] : (char *)call->out + (uint64_t)p * block_bytes(call);
}

static char *slot_now(const phx_group *g, int rank, uint64_t k) { return slot_of(g, rank, g->round + k); }

/* The other ranks, beginning after this one, so that not all read from the same rank at once. */
static int nth_other(const phx_group *g, int i) { return (g->rank + i) % g->ranks; }

static void deliver(const phx_group *g, char *to, const char *from, uint64_t bytes)
{
    if (to == from)
        return; /* in place */
    if (g->now.streams)
        stream_bytes(to, from, bytes);
    else
        copy_bytes(to, from, bytes);
}

/* ---- all_reduce, small: every rank reduces everything */

static void put_whole(phx_group *g, uint64_t k)
{
    span s = part(g, block_bytes(&g->now.call), k);
    copy_bytes(slot_now(g, g->rank, k), (const char *)g->now.call.in + s.start, s.bytes);
}

static void take_reducing_all(phx_group *g, uint64_t k)
{
    const phx_call *call = &g->now.call;
    const void *sources[PHX_MAX_RANKS];
    for (int p = 0; p < g->ranks; p++)
        sources[p] = p == g->rank ? call->in : slot_now(g, p, k);
    reduce_blocks(call, call->out, NULL, sources, g->ranks, block_bytes(call));
}

/* ---- all_reduce and reduce: every rank reduces a share, and the shares are collected */

static void put_shares(phx_group *g, uint64_t k)
{
    const phx_call *call = &g->now.call;
    span s = part(g, block_bytes(call), k);
    for (int i = 1; i < g->ranks; i++) {
        span theirs = share(g, s.bytes, nth_other(g, i));
        copy_bytes(slot_now(g, g->rank, k) + theirs.start, (const char *)call->in + s.start + theirs.start,
                   theirs.bytes);
    }
}

static void reduce_share(phx_group *g, uint64_t k)
{
    const phx_call *call = &g->now.call;
    span s = part(g, block_bytes(call), k);
    span own = share(g, s.bytes, g->rank);
    const void *sources[PHX_MAX_RANKS];
    for (int p = 0; p < g->ranks; p++)
        sources[p] = p == g->rank ? (const char *)call->in + s.start + own.start : slot_now(g, p, k) + own.start;
    bool wanted_here = call->op == PHX_ALL_REDUCE || is_root(g);
    char *out = wanted_here ? (char *)call->out + s.start + own.start : NULL;
    reduce_blocks(call, slot_now(g, g->rank, k) + own.start, out, sources, g->ranks, own.bytes);
}

static void take_shares(phx_group *g, uint64_t k)
{
    const phx_call *call = &g->now.call;
    span s = part(g, block_bytes(call), k);
    for (int i = 1; i < g->ranks; i++) {
        int p = nth_other(g, i);
        span theirs = share(g, s.bytes, p);
        copy_bytes((char *)call->out + s.start + theirs.start, slot_now(g, p, k) + theirs.start, theirs.bytes);
    }
}

/* ---- broadcast, all_gather, gather: whole slots */

static void take_from_root(phx_group *g, uint64_t k)
{
    const phx_call *call = &g->now.call;
    span s = part(g, block_bytes(call), k);
    if (!is_root(g))
        deliver(g, (char *)call->out + s.start, slot_now(g, call->root, k), s.bytes);
}

static void take_from_all(phx_group *g, uint64_t k)
{
    const phx_call *call = &g->now.call;
    span s = part(g, block_bytes(call), k);
    deliver(g, out_block(call, g->rank) + s.start, (const char *)call->in + s.start, s.bytes);
    for (int i = 1; i < g->ranks; i++) {
        int p = nth_other(g, i);
        deliver(g, out_block(call, p) + s.start, slot_now(g, p, k), s.bytes);
    }
}

/* ---- reduce_scatter, scatter, all_to_all: a slot holds a piece for each rank */

static void put_pieces(phx_group *g, uint64_t k)
{
    const phx_call *call = &g->now.call;
    for (int i = 1; i < g->ranks; i++) {
        int p = nth_other(g, i);
        span s = part(g, sent_bytes(call, p), k);
        copy_bytes(slot_now(g, g->rank, k) + (uint64_t)p * g->now.piece, in_block(call, p) + s.start, s.bytes);
    }
}

static const char *piece_for_me(const phx_group *g, int from, uint64_t k)
{
    return slot_now(g, from, k) + (uint64_t)g->rank * g->now.piece;
}

static void take_reducing_pieces(phx_group *g, uint64_t k)
{
    const phx_call *call = &g->now.call;
    span s = part(g, block_bytes(call), k);
    const void *sources[PHX_MAX_RANKS];
    for (int p = 0; p < g->ranks; p++)
        sources[p] = p == g->rank ? in_block(call, p) + s.start : piece_for_me(g, p, k);
    reduce_blocks(call, (char *)call->out + s.start, NULL, sources, g->ranks, s.bytes);
}

static void take_piece_of_root(phx_group *g, uint64_t k)
{
    const phx_call *call = &g->now.call;
    span s = part(g, block_bytes(call), k);
    const char *from = is_root(g) ? in_block(call, g->rank) + s.start : piece_for_me(g, call->root, k);
    deliver(g, (char *)call->out + s.start, from, s.bytes);
}

static void take_pieces(phx_group *g, uint64_t k)
{
    const phx_call *call = &g->now.call;
    for (int i = 0; i < g->ranks; i++) {
        int p = nth_other(g, i);
        span s = part(g, received_bytes(call, p), k);
        const char *from = p == g->rank ? in_block(call, p) + s.start : piece_for_me(g, p, k);
        deliver(g, out_block(call, p) + s.start, from, s.bytes);
    }
}

/* ---- the table */

const struct shape SHAPES[PHX_OPS] = {
    [PHX_BARRIER] = {0},
    [PHX_ALL_REDUCE] = {.put = put_shares, .combine = reduce_share, .take = take_shares, .reduces = true},
    [PHX_REDUCE] =
        {.put = put_shares, .combine = reduce_share, .take = take_shares, .reduces = true, .to_root = true},
    [PHX_BROADCAST] = {.put = put_whole, .take = take_from_root, .from_root = true},
    [PHX_ALL_GATHER] = {.put = put_whole, .take = take_from_all, .out_each = true},
    [PHX_GATHER] = {.put = put_whole, .take = take_from_all, .out_each = true, .to_root = true},
    [PHX_REDUCE_SCATTER] = {.put = put_pieces, .take = take_reducing_pieces, .reduces = true, .in_each = true},
    [PHX_SCATTER] = {.put = put_pieces, .take = take_piece_of_root, .in_each = true, .from_root = true},
    [PHX_ALL_TO_ALL] = {.put = put_pieces, .take = take_pieces, .in_each = true, .out_each = true},
};

const struct shape *shape_of(const phx_group *g, const phx_call *call)
{
    static const struct shape small_all_reduce = {.put = put_whole, .take = take_reducing_all, .reduces = true};
    bool small = call->op == PHX_ALL_REDUCE && block_bytes(call) <= smaller(DIRECT_BYTES, g->slot_bytes);
    return small ? &small_all_reduce : &SHAPES[call->op];
}
