/* The collectives: each is a row of up to three stages, and one engine that takes them round by round.
 *
 * Every stage is "wait, work, raise a counter", and only the wait can be interrupted. So a collective is resumed by
 * doing the step again at which it stopped. */
#include "internal.h"

/* Up to this size an all_reduce is done by every rank for itself: one synchronisation less is worth more than the
 * reading that is saved by sharing the work. */
enum { DIRECT_BYTES = 16 * 1024 };

/* What a collective moves to one rank is written past the caches from this size on: it would not stay there. */
enum { STREAM_BYTES = 8 << 20 };

typedef void stage(phx_group *g, uint64_t k);

struct shape {
    stage *put;
    stage *combine;
    stage *take;
    bool shared_out;  /* a slot holds a piece for each rank */
    bool from_root;   /* only the root puts */
    bool to_root;     /* only the root takes */
};

typedef struct {
    uint64_t start;
    uint64_t bytes;
} span;

/* ---- geometry */

static uint64_t block_bytes(const phx_call *call) { return call->count * call->width; }

/* What of a block belongs to round `k`. */
static span part(const phx_group *g, uint64_t bytes, uint64_t k)
{
    uint64_t start = smaller(k * g->now.piece, bytes);
    return (span){start, smaller(g->now.piece, bytes - start)};
}

/* What of a round's part is reduced by rank `p`. Whole lines, so no two ranks write to one and no element is cut. */
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

static uint64_t sent_bytes(const phx_call *call, int p)
{
    return (call->sends ? call->sends[p] : call->count) * call->width;
}

static uint64_t received_bytes(const phx_call *call, int p)
{
    return (call->receives ? call->receives[p] : call->count) * call->width;
}

static char *slot_now(const phx_group *g, int rank, uint64_t k) { return slot_of(g, rank, g->round + k); }

/* The others in an order that starts behind the own rank, so that not all read from the same one at once. */
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

static bool is_root(const phx_group *g) { return g->rank == g->now.call.root; }

/* ---- all_reduce, small: everybody reduces everything */

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

/* ---- all_reduce and reduce: everybody reduces a share, and the shares are collected */

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

static const struct shape SHAPES[PHX_OPS] = {
    [PHX_BARRIER] = {0},
    [PHX_ALL_REDUCE] = {.put = put_shares, .combine = reduce_share, .take = take_shares},
    [PHX_REDUCE] = {.put = put_shares, .combine = reduce_share, .take = take_shares, .to_root = true},
    [PHX_BROADCAST] = {.put = put_whole, .take = take_from_root, .from_root = true},
    [PHX_ALL_GATHER] = {.put = put_whole, .take = take_from_all},
    [PHX_GATHER] = {.put = put_whole, .take = take_from_all, .to_root = true},
    [PHX_REDUCE_SCATTER] = {.put = put_pieces, .take = take_reducing_pieces, .shared_out = true},
    [PHX_SCATTER] = {.put = put_pieces, .take = take_piece_of_root, .shared_out = true, .from_root = true},
    [PHX_ALL_TO_ALL] = {.put = put_pieces, .take = take_pieces, .shared_out = true},
};

static const struct shape SMALL_ALL_REDUCE = {.put = put_whole, .take = take_reducing_all};

/* ---- the engine */

bool has_memory(const phx_group *g, const phx_call *call)
{
    const struct shape *shape = &SHAPES[call->op];
    bool root = g->rank == call->root, reads = !shape->from_root || root, writes = !shape->to_root || root;
    bool in_each = shape->shared_out, out_each = shape->take == take_from_all || shape->take == take_pieces;
    if (call->op == PHX_BROADCAST)
        writes = !root;
    for (int p = 0; p < g->ranks && call->op != PHX_BARRIER; p++) {
        bool lacks_in = !(in_each && call->ins ? call->ins[p] : call->in) && sent_bytes(call, p);
        bool lacks_out = !(out_each && call->outs ? call->outs[p] : call->out) && received_bytes(call, p);
        if ((reads && lacks_in) || (writes && lacks_out))
            return false;
        if (!call->ins && !call->outs && !call->sends && !call->receives)
            break; /* the same for all */
    }
    return true;
}

void begin(phx_group *g, const phx_call *call)
{
    collective *c = &g->now;
    c->call = *call;
    bool small = call->op == PHX_ALL_REDUCE && block_bytes(call) <= smaller(DIRECT_BYTES, g->slot_bytes);
    c->shape = small ? &SMALL_ALL_REDUCE : &SHAPES[call->op];
    uint64_t lines = g->slot_bytes / PHX_LINE;
    c->piece = c->shape->shared_out ? lines / (uint64_t)g->ranks * PHX_LINE : g->slot_bytes;
    bool to_each = call->op == PHX_ALL_GATHER || call->op == PHX_GATHER || call->op == PHX_ALL_TO_ALL;
    uint64_t delivered = 0;
    for (int p = 0; p < (to_each ? g->ranks : 1); p++)
        delivered += received_bytes(call, p);
    c->streams = delivered >= STREAM_BYTES;
    c->rounds = call->op == PHX_BARRIER ? 0 : (block_bytes(call) + c->piece - 1) / c->piece;
    c->step = c->deadline = 0;
    g->number++;
}

/* all_to_all: as many rounds as the largest of all splits needs, which every rank finds in the same table. */
static void count_rounds(phx_group *g)
{
    uint64_t largest = 0;
    for (int p = 0; p < g->ranks; p++)
        for (int q = 0; q < g->ranks; q++) {
            uint64_t count = counts_of(g, SENDS, p)[q];
            largest = count > largest ? count : largest;
        }
    g->now.rounds = (largest * g->now.call.width + g->now.piece - 1) / g->now.piece;
}

static int put(phx_group *g, uint64_t k)
{
    const struct shape *shape = g->now.shape;
    bool only_receives = is_root(g) ? shape->to_root && !shape->combine : shape->from_root;
    if (!only_receives) {
        uint64_t round = g->round + k;
        int result = round ? wait_for_all(g, COUNTER(done), round - 1) : PHX_OK;
        if (result)
            return result;
        shape->put(g, k);
    }
    if (k == 0)
        enter(g); /* stands for the first `filled` as well */
    else
        raise_counter(g, COUNTER(filled), g->round + k + 1);
    return PHX_OK;
}

static int wait_for_filled(phx_group *g, uint64_t k)
{
    if (k == 0)
        return PHX_OK; /* all have entered */
    if (g->now.shape->from_root)
        return is_root(g) ? PHX_OK : wait_for_one(g, g->now.call.root, COUNTER(filled), g->round + k + 1);
    return wait_for_all(g, COUNTER(filled), g->round + k + 1);
}

static int combine(phx_group *g, uint64_t k)
{
    if (!g->now.shape->combine)
        return PHX_OK;
    int result = wait_for_filled(g, k);
    if (result)
        return result;
    g->now.shape->combine(g, k);
    raise_counter(g, COUNTER(reduced), g->round + k + 1);
    return PHX_OK;
}

static int take(phx_group *g, uint64_t k)
{
    const struct shape *shape = g->now.shape;
    if (!shape->to_root || is_root(g)) {
        int result = shape->combine ? wait_for_all(g, COUNTER(reduced), g->round + k + 1) : wait_for_filled(g, k);
        if (result)
            return result;
        shape->take(g, k);
    }
    raise_counter(g, COUNTER(done), g->round + k + 1);
    return PHX_OK;
}

static int do_step(phx_group *g, uint64_t step)
{
    collective *c = &g->now;
    if (step == 0) {
        if (c->rounds || c->call.op == PHX_ALL_TO_ALL)
            return put(g, 0);
        enter(g);
        return PHX_OK;
    }
    if (step == 1) {
        int result = wait_for_entries(g);
        if (!result && c->call.op == PHX_ALL_TO_ALL)
            count_rounds(g);
        return result;
    }
    uint64_t k = (step - 2) / 3;
    switch ((step - 2) % 3) {
    case 0:
        return k + 1 < c->rounds ? put(g, k + 1) : PHX_OK;
    case 1:
        return combine(g, k);
    default:
        return take(g, k);
    }
}

int go_on(phx_group *g)
{
    collective *c = &g->now;
    /* Every step has a deadline of its own, also when it is resumed: time counts while nothing moves. A rank that is
     * waited for in a step has all that it needs to get there, so its silence is its own. */
    for (; !has_ended(c); c->step++, c->deadline = 0) {
        int result = do_step(g, c->step);
        if (result)
            return result;
    }
    g->round += c->rounds;
    return PHX_OK;
}
