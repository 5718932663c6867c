/* What a rank notes of its collectives while they run, for whoever looks at it from outside. */
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

/* A reader takes a note only if its two numbers are equal. */
static void write_note(phx_note *note, const phx_log *log, double now)
{
    atomic_store_explicit(&note->before, log->record, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    note->kind = log->kind;
    note->number = log->number;
    note->size = log->size;
    note->peer = log->no_peer;
    note->place = log->place;
    note->queued = note->started = now;
    note->ended = 0.0;
    atomic_store_explicit(&note->after, log->record, memory_order_release);
}

void note_start(phx_group *g)
{
    const phx_log *log = g->log;
    if (!log)
        return;
    phx_note *note = note_of(log);
    uint64_t there = atomic_load_explicit(&note->before, memory_order_relaxed);
    double now = wall_clock();
    g->noted = now_ns(); /* the other clock may be set meanwhile */
    if (there < log->record) {
        write_note(note, log, now);
    } else if (there == log->record) { /* it was queued, or is a call of several */
        note->ended = 0.0;
        if (note->started == 0.0)
            note->started = now;
    }
}

int note_end(phx_group *g, int result)
{
    const phx_log *log = g->log;
    if (!log || result != PHX_OK) /* of a failure the caller knows more */
        return result;
    double seconds = (double)(now_ns() - g->noted) * 1e-9;
    phx_note *note = note_of(log);
    if (atomic_load_explicit(&note->before, memory_order_relaxed) == log->record)
        note->ended = wall_clock();
    if ((uint64_t)pthread_self() == log->thread && *log->blocked_since == 0.0)
        log->blocked[*log->phase] += seconds;
    double before = atomic_load_explicit(log->waited, memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(log->waited, &before, before + seconds, memory_order_relaxed,
                                                  memory_order_relaxed))
        ; /* `before` is what stands there now */
    return result;
}
