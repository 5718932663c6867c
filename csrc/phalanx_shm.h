/* phalanx_shm: collectives between the processes of one machine, through one piece of shared memory.
 *
 * This header is the whole interface, the layout of the shared segment, and the contract that orders every access to
 * it. Plain C11 with Linux futexes; it knows nothing of Python or torch.
 *
 *
 * The segment
 *
 *     phx_header          the version of its maker, and the first failure of any rank
 *     phx_seat[ranks]     one rank's counters, each in a cache line of its own
 *     counts              2 x 2 x ranks x ranks numbers, for all_to_all with uneven splits
 *     slots               ranks x 2 pieces of slot_bytes; every payload goes through them
 *
 * Only its owner writes to a seat and to a pair of slots. The segment has no lock, so a killed rank blocks nothing.
 *
 *
 * The order of a collective
 *
 * A collective is cut into rounds, and a round takes three stages:
 *
 *     put       copy what others need from the caller's tensor into the own slot, then raise `filled`
 *     combine   when all have filled: reduce the own share into the own slot, then raise `reduced`  (reductions only)
 *     take      when all have filled (reduced): copy from the others' slots to the tensor, then raise `done`
 *
 * Rounds are numbered through the life of the group, over all its collectives; every counter says how many rounds
 * its rank has finished at that stage. Round r lies in slot r % 2.
 *
 *     Reuse    A slot is written for round r only when every rank's `done` is at least r - 1: then no rank reads the
 *              data of round r - 2.
 *     Entry    A collective begins with an entry in the seat: its number, and what was called. It is written after the
 *              first put, and no rank leaves a collective before all have entered it with equal entries.
 *              So two entries are enough, entry[number % 2]: a rank that enters number + 2 knows that all have left number.
 *     Failure  The first failure is written to the header once and stays. The group cannot be used after it.
 *
 *
 * Memory order
 *
 * A counter is raised with seq_cst after the payload it stands for, and read with acquire before that payload is. That
 * makes plain loads and stores of payload and entries free of races, and ThreadSanitizer would find one. It finds
 * neither a lost wake-up, which is no race, nor what Python in another process reads: record.h argues for that, and
 * this for wake-ups:
 *
 *     raiser   stores the counter, then reads `sleepers`; if there are any, adds to `bell` and wakes them
 *     sleeper  reads `bell`, adds to `sleepers`, then reads the counter; if it has not come, sleeps while `bell` is the same
 *
 * All this is seq_cst, so it lies in one order for all. If the store comes before the sleeper's look at the counter, the
 * sleeper sees it. If not, the sleeper was counted before the raiser's look at `sleepers`, and is until it is awake; so
 * the raiser rings, and after the sleeper has read `bell`. Then the kernel finds `bell` changed, or has queued the
 * sleeper before the wake: it compares and queues under the lock that a wake takes. With release and acquire alone both
 * looks could miss, on x86 too. A failure rings without a look at `sleepers`: who reads `bell` after that ring sees
 * `failed` as well. A rank that leaves, or is killed before it rings, is noticed at the next tick, TICK_MS later.
 */
#ifndef PHALANX_SHM_H
#define PHALANX_SHM_H

#include "record.h"

#include <stdatomic.h>
#include <stdint.h>

#define PHX_VERSION 5
#define PHX_MAX_RANKS 256
#define PHX_LINE 64

#define PHX_API __attribute__((visibility("default")))

/* ---- what can be called */

enum phx_op {
    PHX_BARRIER,
    PHX_ALL_REDUCE,
    PHX_REDUCE,
    PHX_BROADCAST,
    PHX_ALL_GATHER,
    PHX_GATHER,
    PHX_REDUCE_SCATTER,
    PHX_SCATTER,
    PHX_ALL_TO_ALL,
    PHX_OPS
};

enum phx_reduce {
    PHX_SUM,
    PHX_AVG,
    PHX_PRODUCT,
    PHX_MIN,
    PHX_MAX,
    PHX_BAND,
    PHX_BOR,
    PHX_BXOR,
    PHX_PREMUL_SUM, /* every input times `factor` */
    PHX_REDUCES
};

/* Above PHX_DTYPES a number stands for a type that is moved but not reduced. */
enum phx_dtype {
    PHX_F32,
    PHX_F64,
    PHX_F16,
    PHX_BF16,
    PHX_I8,
    PHX_I16,
    PHX_I32,
    PHX_I64,
    PHX_U8,
    PHX_BOOL,
    PHX_U16,
    PHX_U32,
    PHX_U64,
    PHX_DTYPES
};

/* One collective, as one rank calls it. A block is what belongs to one rank: `count` elements of `width` bytes.
 *
 *                      reads                      writes
 *     all_reduce       in: one block              out: one block, may be `in`
 *     reduce           in: one block              out: one block, on the root
 *     broadcast        in: one block, the root    out: one block, on the others
 *     all_gather       in: one block              out: a block for each rank
 *     gather           in: one block              out: a block for each rank, on the root
 *     reduce_scatter   in: a block for each rank  out: one block
 *     scatter          in: the same, on the root  out: one block
 *     all_to_all       in: a block for each rank  out: a block for each rank
 *
 * Where blocks do not lie one after the other, `ins` or `outs` point to each of them. The arrays are read until the
 * collective has ended. */
typedef struct {
    uint32_t op;
    uint32_t reduce;
    uint32_t dtype;
    uint32_t width;
    int32_t root;      /* -1 where there is none */
    uint32_t yield_microseconds; /* microseconds of yielding before sleeping */
    uint64_t count;
    double factor;
    uint64_t timeout_ns; /* of waiting while no rank that is waited for gets any further */
    const void *in;
    void *out;
    const void *const *ins;
    void *const *outs;
    const uint64_t *sends;    /* all_to_all with uneven splits: elements for each rank ... */
    const uint64_t *receives; /* ... and from each; NULL: `count` */
} phx_call;

/* ---- how it ends */

enum phx_result {
    PHX_OK,
    PHX_INTERRUPTED, /* a signal came, or may have come; deal with it, then call phx_resume, or phx_abort */
    PHX_FAILED,      /* phx_get_failure returns why */
    /* All others: refused. Nothing was entered or written. */
    PHX_NO_DATA,       /* a pointer of the call is NULL where there are elements */
    PHX_NO_ARGUMENT,   /* an argument is NULL */
    PHX_UNALIGNED,     /* the segment does not begin at a multiple of PHX_LINE */
    PHX_BAD_RANK,      /* not 0 <= rank < ranks <= PHX_MAX_RANKS */
    PHX_NOT_FORMATTED, /* the memory is no segment */
    PHX_OTHER_VERSION, /* it was formatted by another version of the library */
    PHX_BAD_SIZE,      /* it was formatted for other numbers, or is larger than what is mapped */
    PHX_BAD_PIDFD,     /* one that is not -1 and not open */
    PHX_OUT_OF_MEMORY,
    PHX_BAD_ORDER,     /* phx_run while one is interrupted, or phx_resume while none is */
    PHX_BAD_OP,        /* not one of enum phx_op */
    PHX_BAD_ROOT,      /* not a rank, or not -1 where there is no root */
    PHX_BAD_WIDTH,     /* zero, or not that of the type */
    PHX_BAD_REDUCTION, /* phx_can_reduce denies it */
    PHX_BAD_COUNT,     /* more bytes than can be addressed, or splits where there are none */
    PHX_RESULTS
};

enum phx_failure_kind {
    PHX_NO_FAILURE,
    PHX_BEING_WRITTEN,
    PHX_MISMATCH, /* `culprit` entered something else than `finder` */
    PHX_SPLITS,   /* all_to_all: `culprit` sends `sent` elements to `receiver`, which expects `expected` */
    PHX_LOST,     /* the process of `culprit` is gone */
    PHX_LEFT,     /* `culprit` has left the group, and will never enter this collective */
    PHX_TIMEOUT,  /* `finder` waited `timeout_ns` for the ranks in `missing` */
    PHX_ABORTED   /* `finder` called phx_abort */
};

/* What a rank called; equal on all ranks, or it is a mismatch. */
typedef struct {
    uint32_t op;
    uint32_t reduce;
    uint32_t dtype;
    int32_t root;
    uint64_t count;
    double factor;
} phx_signature;

typedef struct {
    uint32_t kind;
    int32_t finder;
    int32_t culprit;
    int32_t receiver;
    uint64_t number; /* of the collective, from 1 */
    phx_signature finders;
    phx_signature culprits;
    uint64_t sent;
    uint64_t expected;
    uint64_t timeout_ns;
    uint64_t missing[PHX_MAX_RANKS / 64];
} phx_failure;

/* ---- the segment */

typedef struct {
    uint64_t magic;
    uint32_t version;
    uint32_t ranks;
    uint64_t bytes;
    uint64_t slot_bytes;
    _Alignas(PHX_LINE) _Atomic uint32_t failed; /* enum phx_failure_kind; `failure` is whole above BEING_WRITTEN */
    phx_failure failure;
} phx_header;

typedef struct {
    _Alignas(PHX_LINE) _Atomic uint64_t number; /* written last */
    phx_signature signature;                    /* in the same line: checking it costs nothing */
} phx_entry;

typedef struct {
    _Alignas(PHX_LINE) _Atomic uint64_t rounds;
} phx_counter;

typedef struct {
    phx_entry entry[2];
    phx_counter filled;
    phx_counter reduced;
    phx_counter done;
    _Alignas(PHX_LINE) _Atomic uint32_t bell; /* a futex: rung when the owner raises a counter and somebody sleeps */
    _Atomic uint32_t sleepers;
    _Atomic uint32_t left;
} phx_seat;

/* ---- the functions */

typedef struct phx_group phx_group;

/* Bytes of a segment for so many ranks; 0 for a number of ranks that cannot be. */
PHX_API uint64_t phx_segment_bytes(int ranks, uint64_t slot_bytes);

/* Writes the header of a segment that is all zeros. */
PHX_API void phx_format(void *segment, int ranks, uint64_t slot_bytes);

/* This rank's handle on a formatted segment of which `bytes` are mapped; PHX_OK, or why there is none.
 * `pidfds[p]` is a pidfd of rank p, or -1 for a rank that is not watched, such as this one. They stay the caller's. */
PHX_API int phx_open(void *segment, uint64_t bytes, int rank, int ranks, const int *pidfds, phx_group **group);

/* Says that this rank has left. Nothing may run in the group; the segment stays mapped, and is the caller's. */
PHX_API void phx_close(phx_group *group);

/* From now on what runs in the group is noted; NULL: no longer. */
PHX_API void phx_keep_log(phx_group *group, phx_log *log);

/* Runs a collective; one at a time in a group. Any result but PHX_INTERRUPTED is the end of it. */
PHX_API int phx_run(phx_group *group, const phx_call *call);
PHX_API int phx_resume(phx_group *group);

/* Whether a collective was interrupted and not resumed. */
PHX_API int phx_is_interrupted(const phx_group *group);

/* Fails the group for every rank; a wait that runs in another thread or process ends at once. */
PHX_API void phx_abort(phx_group *group);

/* The first failure of the group, as this rank knows it. */
PHX_API void phx_get_failure(const phx_group *group, phx_failure *failure);

PHX_API int phx_version(void);

/* The vector code in use: "avx512", "avx2", "neon" or "baseline". */
PHX_API const char *phx_instructions(void);

/* Uses this one from now on, for tests; -1 when it is unknown or the processor cannot do it. */
PHX_API int phx_use_instructions(const char *name);

/* Whether numbers of this type can be reduced so. */
PHX_API int phx_can_reduce(uint32_t dtype, uint32_t reduce);

/* In a helper process of a rank: SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 do what they do by default only when a process of
 * its own session has sent them, else nothing. One that is handled or ignored already stays as it is. In a worker of a
 * DataLoader, none does, SIGTERM ends it with exit code 0, and SIGINT does nothing. 0, or -1 when that failed. */
PHX_API int phx_obey_own_session(int loader_worker);

#endif
