/* The rounds of a collective: the stages of collectives.c, each between a wait and the raise of a counter.
 *
 * Every stage is "wait, work, raise a counter", and only the wait can be interrupted. So a collective is resumed by
 * doing the step again at which it stopped. */
#include "internal.h"

/* From this size on the result is written past the caches: it would not fit there. */
enum { STREAM_BYTES = 8 << 20 };

void begin(phx_group *g, const phx_call *call)
{
    collective *c = &g->now;
    c->call = *call;
    c->shape = shape_of(g, call);
    uint64_t lines = g->slot_bytes / PHX_LINE;
    c->piece = c->shape->in_each ? lines / (uint64_t)g->ranks * PHX_LINE : g->slot_bytes;
    uint64_t delivered = 0;
    for (int p = 0; p < (c->shape->out_each ? g->ranks : 1); p++)
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
    /* Every step has its own deadline, also when it is resumed: the timeout counts while nothing moves. A rank that a
     * step waits for has all that it needs to reach it, so that rank is the late one. */
    for (; !has_ended(c); c->step++, c->deadline = 0) {
        int result = do_step(g, c->step);
        if (result)
            return result;
    }
    g->round += c->rounds;
    return PHX_OK;
}
