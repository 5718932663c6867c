/* Waits for other ranks: spins briefly, then yields the core, then sleeps.
 *
 * There may be more ranks than cores, and then a rank that spins keeps the awaited rank from running. So a wait spins
 * for some microseconds only. A yield returns at once when no other process wants the core, and otherwise lets it run. */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { SPINS = 10, TICK_MS = 100 };

/* A yield that takes longer has let another process run on this core. If that happens repeatedly although every rank could
 * have its own core, two ranks share one, and the kernel does not separate them while both keep running. A process that
 * wakes up gets an idle core, so the remedy is to sleep. */
enum { AWAY_NS = 3000, TIMES_AWAY = 4 };

uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void pause_briefly(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static _Atomic uint64_t *counter_of(phx_group *g, int rank, counter_offset counter)
{
    return (_Atomic uint64_t *)((char *)&g->seats[rank] + counter);
}

/* ---- bells */

static void ring(phx_seat *seat)
{
    atomic_fetch_add_explicit(&seat->bell, 1, memory_order_seq_cst);
    syscall(SYS_futex, &seat->bell, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

void raise_counter(phx_group *g, counter_offset counter, uint64_t value)
{
    phx_seat *own = &g->seats[g->rank];
    /* seq_cst: publishes the payload, and is ordered before the look at `sleepers`. */
    atomic_store_explicit(counter_of(g, g->rank, counter), value, memory_order_seq_cst);
    if (atomic_load_explicit(&own->sleepers, memory_order_seq_cst))
        ring(own);
}

/* ---- failures */

static void wake_everybody(phx_group *g)
{
    for (int p = 0; p < g->ranks; p++)
        ring(&g->seats[p]);
}

bool group_has_failed(phx_group *g)
{
    if (g->failure.kind)
        return true;
    /* acquire: the record was written before its kind. */
    if (atomic_load_explicit(&g->header->failed, memory_order_acquire) <= PHX_BEING_WRITTEN)
        return false;
    g->failure = g->header->failure;
    return true;
}

int fail(phx_group *g, phx_failure failure)
{
    if (g->failure.kind)
        return PHX_FAILED;
    failure.finder = g->rank;
    failure.number = g->number;
    uint32_t none = PHX_NO_FAILURE;
    if (atomic_compare_exchange_strong(&g->header->failed, &none, PHX_BEING_WRITTEN)) {
        g->header->failure = failure;
        atomic_store_explicit(&g->header->failed, failure.kind, memory_order_release);
        wake_everybody(g);
    }
    /* Another rank was first. If it died while writing, this rank's own failure is used. */
    if (!group_has_failed(g))
        g->failure = failure;
    return PHX_FAILED;
}

static int fail_because_of(phx_group *g, enum phx_failure_kind kind, int culprit)
{
    return fail(g, (phx_failure){.kind = kind, .culprit = culprit});
}

static int time_is_up(phx_group *g, counter_offset counter, uint64_t value)
{
    phx_failure failure = {.kind = PHX_TIMEOUT, .culprit = -1, .timeout_ns = g->now.call.timeout_ns};
    for (int p = 0; p < g->ranks; p++)
        if (p != g->rank && atomic_load_explicit(counter_of(g, p, counter), memory_order_relaxed) < value)
            failure.missing[p / 64] |= UINT64_C(1) << (p % 64);
    return fail(g, failure);
}

/* A rank that has ended will not raise its counter. Only the awaited rank matters: others may have done their part and
 * ended. */
static int look_after(phx_group *g, int rank, counter_offset counter, uint64_t value)
{
    enum phx_failure_kind kind = PHX_NO_FAILURE;
    if (atomic_load_explicit(&g->seats[rank].left, memory_order_acquire))
        kind = PHX_LEFT;
    else if (g->watched[rank].fd >= 0 && poll(&g->watched[rank], 1, 0) > 0)
        kind = PHX_LOST;
    if (kind == PHX_NO_FAILURE || atomic_load_explicit(counter_of(g, rank, counter), memory_order_acquire) >= value)
        return PHX_OK;
    return fail_because_of(g, kind, rank);
}

/* ---- waiting */

static bool has_come(phx_group *g, int rank, counter_offset counter, uint64_t value)
{
    /* acquire: what the counter stands for may be read after it. */
    return atomic_load_explicit(counter_of(g, rank, counter), memory_order_acquire) >= value;
}

/* Sleeps until the bell rings, for a tick at most. Returns false when a signal or the tick ended the sleep: the caller
 * then returns to Python, which runs signal handlers. The tick does so too, because a signal that comes between two
 * sleeps, or at the very end of one, causes no EINTR. */
static bool sleep_for(phx_group *g, int rank, counter_offset counter, uint64_t value)
{
    phx_seat *seat = &g->seats[rank];
    bool rang = true;
    struct timespec tick = {.tv_nsec = TICK_MS * 1000000L};
    uint32_t bell = atomic_load_explicit(&seat->bell, memory_order_seq_cst);
    /* seq_cst: counted before the counter is read again, as raise_counter does it the other way round. */
    atomic_fetch_add_explicit(&seat->sleepers, 1, memory_order_seq_cst);
    bool come = atomic_load_explicit(counter_of(g, rank, counter), memory_order_seq_cst) >= value;
    if (!come && atomic_load_explicit(&g->header->failed, memory_order_seq_cst) <= PHX_BEING_WRITTEN)
        rang = syscall(SYS_futex, &seat->bell, FUTEX_WAIT, bell, &tick, NULL, 0) == 0 || errno == EAGAIN;
    atomic_fetch_sub_explicit(&seat->sleepers, 1, memory_order_seq_cst);
    return rang;
}

static int wait_patiently(phx_group *g, int rank, counter_offset counter, uint64_t value)
{
    uint64_t now = now_ns(), until = now + g->now.call.yield_microseconds * UINT64_C(1000);
    if (!g->now.deadline)
        g->now.deadline = now + smaller(g->now.call.timeout_ns, UINT64_MAX - now);
    while (now < until && g->times_away < TIMES_AWAY) {
        uint64_t before = now;
        sched_yield();
        now = now_ns();
        g->times_away = !g->crowded && now - before > AWAY_NS ? g->times_away + 1 : 0;
        if (has_come(g, rank, counter, value))
            return PHX_OK;
    }
    g->times_away = 0;
    for (;;) {
        bool rang = sleep_for(g, rank, counter, value);
        if (has_come(g, rank, counter, value))
            return PHX_OK;
        if (group_has_failed(g) || look_after(g, rank, counter, value))
            return PHX_FAILED;
        if (now_ns() >= g->now.deadline)
            return time_is_up(g, counter, value);
        if (!rang)
            return PHX_INTERRUPTED;
    }
}

int wait_for_one(phx_group *g, int rank, counter_offset counter, uint64_t value)
{
    for (int i = 0; i < SPINS; i++) {
        if (has_come(g, rank, counter, value))
            return PHX_OK;
        pause_briefly();
    }
    return wait_patiently(g, rank, counter, value);
}

int wait_for_all(phx_group *g, counter_offset counter, uint64_t value)
{
    for (int p = 0; p < g->ranks; p++) {
        int result = p == g->rank ? PHX_OK : wait_for_one(g, p, counter, value);
        if (result)
            return result;
    }
    return PHX_OK;
}
