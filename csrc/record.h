/* What a rank notes of itself: a ring of its latest collectives, for readers in other processes.
 *
 * The memory is the caller's, and so is the layout of the page around it (src/phalanx/status/layout.py); times are
 * seconds since 1970.
 *
 * Memory order: all stores of a note are releases, in the order `before`, fields, `after`, so whoever sees one of them
 * sees those before it. The reader (src/phalanx/status/reading.py) copies the page twice and takes note n if both copies
 * are equal and have n at both ends. A copy loads its words in any order, but the second after the first: each is a
 * read(2), and the kernel takes and drops references to the page with full barriers.
 *
 *     No field is of a later note.     If one in the first copy were, `before` in the second would be later than n.
 *     No field is of an earlier note.  The second copy comes after an `after` of n, so there the field is what n or a
 *                                      later note wrote, and the copies differ, unless n has that value too.
 *
 * One case is left: the copies fall into two writes, of n and of the note a whole ring later, and that one has the
 * earlier value again. `started` and `ended` are stored again later: single words, of note n whenever they are seen.
 * Notes that Python writes itself (src/phalanx/status/page.py) are ordered on x86 only; elsewhere it is the comparison
 * of the copies that guards them. */
#ifndef PHALANX_RECORD_H
#define PHALANX_RECORD_H

#include <stdatomic.h>
#include <stdint.h>

typedef struct {
    _Atomic uint64_t before; /* the note's number, written first ... */
    _Atomic uint64_t kind;
    _Atomic uint64_t number; /* in its group */
    _Atomic uint64_t size;
    _Atomic uint64_t peer;
    _Atomic uint64_t place;
    _Atomic double queued;
    _Atomic double started;
    _Atomic double ended;
    _Atomic uint64_t after; /* ... and last */
    uint64_t unused[2];
} phx_note;

typedef struct {
    /* Of the next collective. A note that the ring has already, of a queued one, is only brought up to date. */
    uint64_t record; /* the note's number */
    uint64_t kind;
    uint64_t number;
    uint64_t size;
    uint64_t place;
    /* For all of them. */
    uint64_t no_peer;
    uint64_t entries;
    phx_note *ring;
    _Atomic double *waited;      /* seconds in collectives, of any thread */
    double *blocked;             /* the same for each phase, in the thread with the loop ... */
    const uint64_t *phase;
    const double *blocked_since; /* ... unless this is not zero: then it is counted otherwise */
    uint64_t thread;             /* pthread_self() of that thread */
} phx_log;

#endif
