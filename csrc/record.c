/* Writes the running collective of a rank to its status page, for readers in other processes. */
#define _GNU_SOURCE
#include "internal.h"

#include <pthread.h>
#include <time.h>

static double wall_clock(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static phx_note *note_of(const phx_log *log) { return log->ring + log->record % log->entries; }

void phx_keep_log(phx_group *g, phx_log *log) { g->log = log; }

/* record.h explains why each store is a release; on x86 that is a plain store. */
#define STORE(field, value) atomic_store_explicit(&note->field, (value), memory_order_release)
#define LOAD(field) atomic_load_explicit(&note->field, memory_order_relaxed)

static void write_note(phx_note *note, const phx_log *log, double now)
{
    STORE(before, log->record);
    STORE(kind, log->kind);
    STORE(number, log->number);
    STORE(size, log->size);
    STORE(peer, log->no_peer);
    STORE(place, log->place);
    STORE(queued, now);
    STORE(started, now);
    STORE(ended, 0.0);
    STORE(after, log->record);
}

void note_start(phx_group *g)
{
    const phx_log *log = g->log;
    if (!log)
        return;
    phx_note *note = note_of(log);
    uint64_t there = LOAD(before);
    double now = wall_clock();
    g->noted = now_ns(); /* the other clock may be set meanwhile */
    if (there < log->record) {
        write_note(note, log, now);
    } else if (there == log->record) { /* it was queued, or is a call of several */
        STORE(ended, 0.0);
        if (LOAD(started) == 0.0)
            STORE(started, now);
    }
}

int note_end(phx_group *g, int result)
{
    const phx_log *log = g->log;
    if (!log || result != PHX_OK) /* the caller records a failure, with more details */
        return result;
    double seconds = (double)(now_ns() - g->noted) * 1e-9;
    phx_note *note = note_of(log);
    if (LOAD(before) == log->record)
        STORE(ended, wall_clock());
    if ((uint64_t)pthread_self() == log->thread && *log->blocked_since == 0.0)
        log->blocked[*log->phase] += seconds;
    double before = atomic_load_explicit(log->waited, memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(log->waited, &before, before + seconds, memory_order_relaxed,
                                                  memory_order_relaxed))
        ; /* `before` is what stands there now */
    return result;
}
