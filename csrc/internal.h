/* Declarations that the files of the library share; they are not part of the interface. */
#ifndef PHALANX_SHM_INTERNAL_H
#define PHALANX_SHM_INTERNAL_H

#include "phalanx_shm.h"

#include <poll.h>
#include <stdbool.h>
#include <stddef.h>

enum { SLOTS = 2 };
static const uint64_t MAGIC = UINT64_C(0x6d68732d78686c70);

/* What a rank does in round `k` of a collective, counted from its start. */
typedef void stage(phx_group *g, uint64_t k);

struct shape {
    stage *put;
    stage *combine;
    stage *take;
    bool reduces;
    bool in_each;   /* `in` has a block for each rank, and a slot a piece for each */
    bool out_each;  /* `out` has a block for each rank */
    bool from_root; /* only the root puts */
    bool to_root;   /* only the root takes */
};

/* A collective under way. `step` is where a wait that was interrupted is taken up again. */
typedef struct {
    phx_call call;
    const struct shape *shape;
    uint64_t piece;  /* bytes of a block that go into one round */
    bool streams;    /* the result is too large for the caches */
    uint64_t rounds; /* known after the entries have been read, for all_to_all */
    uint64_t step;
    uint64_t deadline; /* of the wait in this step, CLOCK_MONOTONIC in nanoseconds; 0 until it has to wait */
} collective;

struct phx_group {
    int rank;
    int ranks;
    bool crowded;   /* more ranks than cores */
    int times_away; /* yields in a row that let another process run */
    phx_header *header;
    phx_seat *seats;
    uint64_t *counts;
    char *slots;
    uint64_t slot_bytes;
    _Atomic uint64_t number; /* of the collective under way or last run; phx_abort reads it from another thread */
    uint64_t round;  /* rounds of all collectives before this one */
    collective now;
    phx_failure failure; /* this rank's copy */
    phx_log *log;        /* may be NULL */
    uint64_t noted;      /* when the collective under way began, if there is a log; as `deadline` */
    struct pollfd watched[PHX_MAX_RANKS];
};

static inline uint64_t smaller(uint64_t a, uint64_t b) { return a < b ? a : b; }
static inline uint64_t round_up(uint64_t bytes) { return (bytes + PHX_LINE - 1) / PHX_LINE * PHX_LINE; }

static inline uint64_t block_bytes(const phx_call *call) { return call->count * call->width; }

static inline uint64_t sent_bytes(const phx_call *call, int p)
{
    return (call->sends ? call->sends[p] : call->count) * call->width;
}

static inline uint64_t received_bytes(const phx_call *call, int p)
{
    return (call->receives ? call->receives[p] : call->count) * call->width;
}

static inline bool is_root(const phx_group *g) { return g->rank == g->now.call.root; }

/* The slot of `rank` for `round`, counted through the life of the group. */
static inline char *slot_of(const phx_group *g, int rank, uint64_t round)
{
    return g->slots + ((uint64_t)rank * SLOTS + round % SLOTS) * g->slot_bytes;
}

/* all_to_all: how many elements `rank` sends to each rank, or expects from each, in the collective under way. */
enum table { SENDS, RECEIVES, TABLES };

static inline uint64_t *counts_of(const phx_group *g, enum table table, int rank)
{
    uint64_t ranks = (uint64_t)g->ranks, tables = (g->number % 2) * TABLES + table;
    return g->counts + (tables * ranks + (uint64_t)rank) * ranks;
}

/* ---- wait.c */

uint64_t now_ns(void);

/* Where in a seat the counter lies that is waited for. */
typedef size_t counter_offset;
#define COUNTER(field) offsetof(phx_seat, field)

/* Raises a counter of the own seat and wakes the ranks that sleep for it. */
void raise_counter(phx_group *g, counter_offset counter, uint64_t value);

/* Waits until the counter of every other rank has reached `value`. Returns PHX_OK, or why not. */
int wait_for_all(phx_group *g, counter_offset counter, uint64_t value);

/* Waits until the counter of one rank has. */
int wait_for_one(phx_group *g, int rank, counter_offset counter, uint64_t value);

/* Returns whether any rank has failed the group, and copies its failure. */
bool group_has_failed(phx_group *g);

/* Fails the group, unless it has failed already; returns PHX_FAILED. */
int fail(phx_group *g, phx_failure failure);

/* ---- barrier.c */

void enter(phx_group *g);
int wait_for_entries(phx_group *g);

/* ---- reduce.c */

/* first = second = sources[0] op sources[1] op ...; `second` may be NULL, and either may be one of the sources. */
void reduce_blocks(const phx_call *call, void *first, void *second, const void *const *sources, int ranks,
                   uint64_t bytes);

void copy_bytes(void *to, const void *from, uint64_t bytes);

/* The same for a target that will not be read soon. */
void stream_bytes(void *to, const void *from, uint64_t bytes);

/* ---- record.c */

void note_start(phx_group *g);

/* Takes a collective's result, and returns it. */
int note_end(phx_group *g, int result);

/* ---- check.c: PHX_OK, or why it is refused */

int check_segment(const phx_header *header, uint64_t bytes, int rank, int ranks);
int check_call(const phx_group *g, const phx_call *call);

/* ---- collectives.c */

extern const struct shape SHAPES[PHX_OPS];

/* Returns the entry of SHAPES, or a faster one for a small collective. */
const struct shape *shape_of(const phx_group *g, const phx_call *call);

/* ---- rounds.c */

void begin(phx_group *g, const phx_call *call);
int go_on(phx_group *g);

/* Two steps until all have entered, then three a round. */
static inline bool has_ended(const collective *c) { return !c->shape || c->step == 2 + 3 * c->rounds; }

#endif
