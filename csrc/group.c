/* A rank's handle on a segment: where things lie in it, and the calls that start and end a collective. */
#define _GNU_SOURCE
#include "internal.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

static uint64_t seats_at(void) { return round_up(sizeof(phx_header)); }
static uint64_t counts_at(int ranks) { return seats_at() + (uint64_t)ranks * sizeof(phx_seat); }

static uint64_t slots_at(int ranks)
{
    uint64_t counts = 2 * TABLES * (uint64_t)ranks * (uint64_t)ranks * sizeof(uint64_t);
    const uint64_t page = 4096; /* slots begin on a page: vector loops run from aligned addresses */
    return (counts_at(ranks) + counts + page - 1) / page * page;
}

static int usable_cores(void)
{
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) ? 1 : CPU_COUNT(&set);
}

/* A wait would take a descriptor that is no pidfd for a process that has ended. */
static bool are_open(struct pollfd *fds, int count)
{
    bool open = poll(fds, (nfds_t)count, 0) >= 0;
    for (int i = 0; open && i < count; i++)
        open = !(fds[i].revents & POLLNVAL);
    return open;
}

uint64_t phx_segment_bytes(int ranks, uint64_t slot_bytes)
{
    /* A slot is shared out among the ranks in whole lines. Below 2^40 the sum cannot overflow. */
    bool fits = slot_bytes % PHX_LINE == 0 && slot_bytes / PHX_LINE >= (uint64_t)ranks && slot_bytes < UINT64_C(1) << 40;
    if (ranks < 1 || ranks > PHX_MAX_RANKS || !fits)
        return 0;
    return slots_at(ranks) + (uint64_t)ranks * SLOTS * slot_bytes;
}

void phx_format(void *segment, int ranks, uint64_t slot_bytes)
{
    phx_header *header = segment;
    header->magic = MAGIC;
    header->version = PHX_VERSION;
    header->ranks = (uint32_t)ranks;
    header->slot_bytes = slot_bytes;
    header->bytes = phx_segment_bytes(ranks, slot_bytes);
}

int phx_open(void *segment, uint64_t bytes, int rank, int ranks, const int *pidfds, phx_group **group)
{
    if (!segment || !pidfds || !group)
        return PHX_NO_ARGUMENT;
    *group = NULL;
    phx_header *header = segment;
    int refused = check_segment(header, bytes, rank, ranks);
    if (refused)
        return refused;
    phx_group *g = calloc(1, sizeof *g);
    if (!g)
        return PHX_OUT_OF_MEMORY;
    g->rank = rank;
    g->ranks = ranks;
    g->crowded = ranks > usable_cores();
    g->header = header;
    g->seats = (phx_seat *)((char *)segment + seats_at());
    g->counts = (uint64_t *)((char *)segment + counts_at(ranks));
    g->slots = (char *)segment + slots_at(ranks);
    g->slot_bytes = header->slot_bytes;
    for (int p = 0; p < ranks; p++)
        g->watched[p] = (struct pollfd){.fd = pidfds[p], .events = POLLIN};
    if (!are_open(g->watched, ranks)) {
        free(g);
        return PHX_BAD_PIDFD;
    }
    *group = g;
    return PHX_OK;
}

void phx_close(phx_group *g)
{
    atomic_store_explicit(&g->seats[g->rank].left, 1, memory_order_release);
    raise_counter(g, COUNTER(done), g->round); /* unchanged, but it wakes the sleepers, which see that this rank has left */
    free(g);
}

int phx_run(phx_group *g, const phx_call *call)
{
    if (!g || !call)
        return PHX_NO_ARGUMENT;
    int refused = has_ended(&g->now) || group_has_failed(g) ? check_call(g, call) : PHX_BAD_ORDER;
    if (refused)
        return refused;
    note_start(g);
    if (group_has_failed(g))
        return PHX_FAILED;
    begin(g, call);
    return note_end(g, go_on(g));
}

int phx_resume(phx_group *g)
{
    if (!g)
        return PHX_NO_ARGUMENT;
    return has_ended(&g->now) ? PHX_BAD_ORDER : note_end(g, go_on(g));
}

int phx_is_interrupted(const phx_group *g) { return !has_ended(&g->now); }

void phx_abort(phx_group *g)
{
    /* May run beside a wait in another thread, which owns g->failure: only the segment is touched here. */
    phx_group other = {.rank = g->rank, .ranks = g->ranks, .header = g->header, .seats = g->seats, .number = g->number};
    fail(&other, (phx_failure){.kind = PHX_ABORTED, .culprit = g->rank});
}

void phx_get_failure(const phx_group *g, phx_failure *failure)
{
    bool known = g->failure.kind || atomic_load_explicit(&g->header->failed, memory_order_acquire) <= PHX_BEING_WRITTEN;
    *failure = known ? g->failure : g->header->failure;
}

int phx_version(void) { return PHX_VERSION; }
