/* The entry to a collective: no rank leaves before all ranks have entered, with equal signatures. */
#include "internal.h"

#include <string.h>

static phx_signature signature_of(const phx_call *call)
{
    return (phx_signature){.op = call->op,
                           .reduce = call->reduce,
                           .dtype = call->dtype,
                           .root = call->root,
                           .count = call->count,
                           .factor = call->factor};
}

void enter(phx_group *g)
{
    phx_entry *entry = &g->seats[g->rank].entry[g->number % 2];
    const phx_call *call = &g->now.call;
    entry->signature = signature_of(call);
    if (call->op == PHX_ALL_TO_ALL) {
        for (int p = 0; p < g->ranks; p++) {
            counts_of(g, SENDS, g->rank)[p] = call->sends ? call->sends[p] : call->count;
            counts_of(g, RECEIVES, g->rank)[p] = call->receives ? call->receives[p] : call->count;
        }
    }
    raise_counter(g, COUNTER(entry) + (g->number % 2) * sizeof(phx_entry), g->number);
}

static bool equal(const phx_signature *a, const phx_signature *b)
{
    /* Compared as bytes: a NaN factor equals itself. The struct has no padding. */
    return memcmp(a, b, sizeof *a) == 0;
}

/* all_to_all: each rank must send what the receiver expects. Every rank checks all pairs, so a mismatch of two is an
 * error on all. */
static int check_splits(phx_group *g)
{
    for (int from = 0; from < g->ranks; from++)
        for (int to = 0; to < g->ranks; to++) {
            uint64_t sent = counts_of(g, SENDS, from)[to], expected = counts_of(g, RECEIVES, to)[from];
            if (sent != expected)
                return fail(g, (phx_failure){.kind = PHX_SPLITS,
                                             .culprit = from,
                                             .receiver = to,
                                             .sent = sent,
                                             .expected = expected});
        }
    return PHX_OK;
}

int wait_for_entries(phx_group *g)
{
    size_t place = g->number % 2;
    int result = wait_for_all(g, COUNTER(entry) + place * sizeof(phx_entry), g->number);
    if (result)
        return result;
    const phx_signature *own = &g->seats[g->rank].entry[place].signature;
    for (int p = 0; p < g->ranks; p++) {
        const phx_signature *other = &g->seats[p].entry[place].signature;
        if (!equal(own, other))
            return fail(g, (phx_failure){.kind = PHX_MISMATCH, .culprit = p, .finders = *own, .culprits = *other});
    }
    return own->op == PHX_ALL_TO_ALL ? check_splits(g) : PHX_OK;
}
