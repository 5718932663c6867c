/* The layout of all structs that another process or Python reads by offsets.
 *
 * A change of a struct changes these numbers, PHX_VERSION and its mirror: native/library.py, for phx_note
 * status/layout.py. */
#include "internal.h"

#define SIZE(type, bytes) _Static_assert(sizeof(type) == (bytes), #type " has another size")
#define AT(type, field, offset) _Static_assert(offsetof(type, field) == (offset), #type "." #field " has moved")

/* Processes can share these without a lock only if the processor has instructions for it. */
_Static_assert(ATOMIC_INT_LOCK_FREE == 2 && ATOMIC_LLONG_LOCK_FREE == 2, "atomics need a lock");
_Static_assert(sizeof(void *) == 8, "phalanx_shm is for 64-bit machines");
SIZE(_Atomic uint32_t, 4);
SIZE(_Atomic uint64_t, 8);
SIZE(_Atomic double, 8);

/* ---- mirrored in Python */

SIZE(phx_call, 96);
AT(phx_call, op, 0); AT(phx_call, reduce, 4); AT(phx_call, dtype, 8); AT(phx_call, width, 12);
AT(phx_call, root, 16); AT(phx_call, yield_microseconds, 20); AT(phx_call, count, 24); AT(phx_call, factor, 32);
AT(phx_call, timeout_ns, 40); AT(phx_call, in, 48); AT(phx_call, out, 56); AT(phx_call, ins, 64);
AT(phx_call, outs, 72); AT(phx_call, sends, 80); AT(phx_call, receives, 88);

SIZE(phx_signature, 32);
AT(phx_signature, op, 0); AT(phx_signature, reduce, 4); AT(phx_signature, dtype, 8); AT(phx_signature, root, 12);
AT(phx_signature, count, 16); AT(phx_signature, factor, 24);

SIZE(phx_failure, 144);
AT(phx_failure, kind, 0); AT(phx_failure, finder, 4); AT(phx_failure, culprit, 8); AT(phx_failure, receiver, 12);
AT(phx_failure, number, 16); AT(phx_failure, finders, 24); AT(phx_failure, culprits, 56); AT(phx_failure, sent, 88);
AT(phx_failure, expected, 96); AT(phx_failure, timeout_ns, 104); AT(phx_failure, missing, 112);

SIZE(phx_log, 104);
AT(phx_log, record, 0); AT(phx_log, kind, 8); AT(phx_log, number, 16); AT(phx_log, size, 24);
AT(phx_log, place, 32); AT(phx_log, no_peer, 40); AT(phx_log, entries, 48); AT(phx_log, ring, 56);
AT(phx_log, waited, 64); AT(phx_log, blocked, 72); AT(phx_log, phase, 80); AT(phx_log, blocked_since, 88);
AT(phx_log, thread, 96);

SIZE(phx_note, 96);
AT(phx_note, before, 0); AT(phx_note, kind, 8); AT(phx_note, number, 16); AT(phx_note, size, 24);
AT(phx_note, peer, 32); AT(phx_note, place, 40); AT(phx_note, queued, 48); AT(phx_note, started, 56);
AT(phx_note, ended, 64); AT(phx_note, after, 72); AT(phx_note, unused, 80);

/* ---- of the segment, which all ranks map */

SIZE(phx_header, 4 * PHX_LINE);
AT(phx_header, magic, 0); AT(phx_header, version, 8); AT(phx_header, ranks, 12); AT(phx_header, bytes, 16);
AT(phx_header, slot_bytes, 24); AT(phx_header, failed, 64); AT(phx_header, failure, 72);

SIZE(phx_entry, PHX_LINE);
AT(phx_entry, number, 0); AT(phx_entry, signature, 8);

SIZE(phx_counter, PHX_LINE);

SIZE(phx_seat, 6 * PHX_LINE);
AT(phx_seat, entry, 0); AT(phx_seat, filled, 128); AT(phx_seat, reduced, 192); AT(phx_seat, done, 256);
AT(phx_seat, bell, 320); AT(phx_seat, sleepers, 324); AT(phx_seat, left, 328);
