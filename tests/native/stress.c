/* Random collectives between ranks that are threads or processes, every result checked.
 *
 *     stress threads|processes|kills RANKS SECONDS SEED
 *
 * All ranks draw the same program from the seed: operation, type, sizes, offsets, roots, slot size. Delays are drawn
 * by each rank for itself, and threads are interrupted by signals all the time, so that waits are resumed. With
 * `kills` one process is killed at a random moment, and all others must name it within a second.
 *
 * Built with -fsanitize=thread or =address; exits with 0, or says what went wrong. */
#define _GNU_SOURCE
#include "../../csrc/phalanx_shm.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MOST_RANKS = 16, GUARD = 64, PROGRAM_STEPS = 40 };
static const unsigned char GUARD_BYTE = 0xA5;

static int ranks;
static uint64_t seed;

static void die(const char *what, int rank, uint64_t step)
{
    fprintf(stderr, "stress: rank %d of %d, seed %llu, step %llu: %s\n", rank, ranks, (unsigned long long)seed,
            (unsigned long long)step, what);
    _exit(1);
}

static double seconds_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static uint64_t draw(uint64_t *state)
{
    *state += UINT64_C(0x9e3779b97f4a7c15);
    uint64_t z = *state;
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

static uint64_t below(uint64_t *state, uint64_t limit) { return draw(state) % limit; }

/* ---- numbers of every type, small enough to be exact in all of them */

static const struct {
    uint32_t dtype;
    uint32_t width;
} TYPES[] = {{PHX_F32, 4}, {PHX_F64, 8}, {PHX_F16, 2}, {PHX_BF16, 2}, {PHX_I8, 1}, {PHX_I16, 2},
             {PHX_I32, 4}, {PHX_I64, 8}, {PHX_U8, 1},  {PHX_U16, 2},  {PHX_U32, 4}, {PHX_U64, 8}};

/* Small whole numbers in half precision: sign 0, exponent and mantissa by hand, independent of the library's own. */
static uint16_t half_of(unsigned value, int mantissa_bits, int bias)
{
    if (value == 0)
        return 0;
    int exponent = 31 - __builtin_clz(value);
    unsigned mantissa = (value << mantissa_bits >> exponent) & ((1u << mantissa_bits) - 1);
    return (uint16_t)(((unsigned)(exponent + bias) << mantissa_bits) | mantissa);
}

static void set(void *at, uint32_t dtype, uint64_t i, unsigned value)
{
    switch (dtype) {
    case PHX_F32: ((float *)at)[i] = (float)value; break;
    case PHX_F64: ((double *)at)[i] = value; break;
    case PHX_F16: ((uint16_t *)at)[i] = half_of(value, 10, 15); break;
    case PHX_BF16: ((uint16_t *)at)[i] = half_of(value, 7, 127); break;
    case PHX_I8:
    case PHX_U8: ((uint8_t *)at)[i] = (uint8_t)value; break;
    case PHX_I16:
    case PHX_U16: ((uint16_t *)at)[i] = (uint16_t)value; break;
    case PHX_I32:
    case PHX_U32: ((uint32_t *)at)[i] = value; break;
    default: ((uint64_t *)at)[i] = value;
    }
}

/* What rank `from` has at index i of its block for rank `to`. */
static unsigned number(uint64_t step, int from, int to, uint64_t i)
{
    return (unsigned)((step * 5 + (uint64_t)from * 7 + (uint64_t)to * 13 + i * 3) % 11);
}

static unsigned combined(uint32_t reduce, uint64_t step, int to, uint64_t i)
{
    unsigned result = number(step, 0, to, i);
    for (int p = 1; p < ranks; p++) {
        unsigned x = number(step, p, to, i);
        if (reduce == PHX_SUM)
            result += x;
        else if (reduce == PHX_MIN)
            result = x < result ? x : result;
        else
            result = x > result ? x : result;
    }
    return result;
}

/* ---- one step of the program */

typedef struct {
    phx_call call;
    uint64_t splits[MOST_RANKS][MOST_RANKS]; /* all_to_all: from, to */
    unsigned offset;
} step_plan;

static step_plan plan(uint64_t *state, uint64_t slot_bytes)
{
    step_plan p = {.offset = (unsigned)below(state, 8)};
    unsigned type = (unsigned)below(state, sizeof TYPES / sizeof *TYPES);
    const uint32_t reduces[] = {PHX_SUM, PHX_MIN, PHX_MAX};
    uint64_t most = below(state, 4) ? 40 : 3 * slot_bytes / TYPES[type].width; /* mostly small, some of many rounds */
    p.call = (phx_call){.op = (uint32_t)below(state, PHX_OPS),
                        .reduce = reduces[below(state, 3)],
                        .dtype = TYPES[type].dtype,
                        .width = TYPES[type].width,
                        .root = -1,
                        .yield_microseconds = (uint32_t)below(state, 60),
                        .count = below(state, most + 1),
                        .timeout_ns = UINT64_C(60) * 1000000000};
    uint32_t op = p.call.op;
    if (op == PHX_REDUCE || op == PHX_BROADCAST || op == PHX_GATHER || op == PHX_SCATTER)
        p.call.root = (int32_t)below(state, (uint64_t)ranks);
    bool uneven = below(state, 2);
    for (int i = 0; i < ranks; i++)
        for (int j = 0; j < ranks; j++)
            p.splits[i][j] = uneven ? below(state, p.call.count + 1) : p.call.count;
    return p;
}

/* A block with guards on both sides, at an odd address in multiples of the element. */
typedef struct {
    unsigned char *memory;
    unsigned char *start;
    uint64_t bytes;
} block;

static block new_block(const step_plan *p, uint64_t count)
{
    uint64_t bytes = count * p->call.width, shift = GUARD + (uint64_t)p->offset * p->call.width;
    block b = {.memory = malloc(bytes + 2 * GUARD + shift), .bytes = bytes};
    b.start = b.memory + shift;
    memset(b.memory, GUARD_BYTE, bytes + GUARD + shift);
    return b;
}

static void check_guards(const block *b, int rank, uint64_t step)
{
    for (unsigned char *c = b->memory; c < b->start; c++)
        if (*c != GUARD_BYTE)
            die("wrote before a block", rank, step);
    for (int i = 0; i < GUARD; i++)
        if (b->start[b->bytes + (uint64_t)i] != GUARD_BYTE)
            die("wrote behind a block", rank, step);
}

static void check_block(const block *b, const step_plan *p, int rank, uint64_t step, uint64_t count, int from, int to)
{
    bool reduces = p->call.op == PHX_ALL_REDUCE || p->call.op == PHX_REDUCE || p->call.op == PHX_REDUCE_SCATTER;
    for (uint64_t i = 0; i < count; i++) {
        unsigned char expected[8] = {0};
        set(expected, p->call.dtype, 0, reduces ? combined(p->call.reduce, step, to, i) : number(step, from, to, i));
        if (memcmp(expected, b->start + i * p->call.width, p->call.width) != 0)
            die("a wrong number", rank, step);
    }
}

typedef struct {
    block in[MOST_RANKS], out[MOST_RANKS];
    const void *ins[MOST_RANKS];
    void *outs[MOST_RANKS];
    uint64_t sends[MOST_RANKS], receives[MOST_RANKS];
} buffers;

static bool reads_many(uint32_t op) { return op == PHX_REDUCE_SCATTER || op == PHX_SCATTER || op == PHX_ALL_TO_ALL; }
static bool writes_many(uint32_t op) { return op == PHX_ALL_GATHER || op == PHX_GATHER || op == PHX_ALL_TO_ALL; }

static void make_buffers(buffers *b, const step_plan *p, int rank, uint64_t step)
{
    uint32_t op = p->call.op;
    for (int q = 0; q < ranks; q++) {
        b->sends[q] = op == PHX_ALL_TO_ALL ? p->splits[rank][q] : p->call.count;
        b->receives[q] = op == PHX_ALL_TO_ALL ? p->splits[q][rank] : p->call.count;
        b->in[q] = new_block(p, b->sends[q]);
        b->out[q] = new_block(p, b->receives[q]);
        b->ins[q] = b->in[q].start;
        b->outs[q] = b->out[q].start;
        for (uint64_t i = 0; i < b->sends[q]; i++)
            set(b->in[q].start, p->call.dtype, i, number(step, rank, reads_many(op) ? q : 0, i));
    }
}

static void check_buffers(buffers *b, const step_plan *p, int rank, uint64_t step)
{
    uint32_t op = p->call.op;
    bool root = p->call.root < 0 || p->call.root == rank;
    for (int q = 0; q < ranks; q++) {
        if (writes_many(op) && root)
            check_block(&b->out[q], p, rank, step, b->receives[q], q, op == PHX_ALL_TO_ALL ? rank : 0);
        check_guards(&b->in[q], rank, step);
        check_guards(&b->out[q], rank, step);
    }
    if (op == PHX_ALL_REDUCE || (op == PHX_REDUCE && root))
        check_block(&b->out[0], p, rank, step, p->call.count, 0, 0);
    if (op == PHX_REDUCE_SCATTER)
        check_block(&b->out[0], p, rank, step, p->call.count, 0, rank);
    if (op == PHX_SCATTER)
        check_block(&b->out[0], p, rank, step, p->call.count, p->call.root, rank);
    if (op == PHX_BROADCAST && !root)
        check_block(&b->out[0], p, rank, step, p->call.count, p->call.root, 0);
    for (int q = 0; q < ranks; q++) {
        free(b->in[q].memory);
        free(b->out[q].memory);
    }
}

static int run_step(phx_group *group, const step_plan *p, int rank, uint64_t step, uint64_t *own)
{
    buffers b;
    phx_call call = p->call;
    make_buffers(&b, p, rank, step);
    call.in = b.ins[0];
    call.out = b.outs[0];
    call.ins = reads_many(call.op) ? b.ins : NULL;
    call.outs = writes_many(call.op) ? b.outs : NULL;
    call.sends = call.op == PHX_ALL_TO_ALL ? b.sends : NULL;
    call.receives = call.op == PHX_ALL_TO_ALL ? b.receives : NULL;
    switch (below(own, 12)) {
    case 0: usleep((useconds_t)below(own, 2000)); break;
    case 1:
    case 2: sched_yield(); break;
    default: break;
    }
    int result = phx_run(group, &call);
    while (result == PHX_INTERRUPTED)
        result = phx_resume(group);
    if (result == PHX_OK)
        check_buffers(&b, p, rank, step);
    return result;
}

/* ---- ranks */

typedef struct {
    void *segment;
    uint64_t slot_bytes;
    uint64_t program; /* its seed */
    uint64_t steps;   /* 0: for ever */
    int rank;
    int pidfds[MOST_RANKS];
    atomic_bool ended;
} rank_job;

static int live(rank_job *job)
{
    phx_group *group;
    if (phx_open(job->segment, phx_segment_bytes(ranks, job->slot_bytes), job->rank, ranks, job->pidfds, &group))
        die("phx_open failed", job->rank, 0);
    uint64_t state = job->program, own = job->program ^ ((uint64_t)job->rank + 1) * 7919;
    int result = PHX_OK;
    for (uint64_t step = 1; result == PHX_OK && (!job->steps || step <= job->steps); step++) {
        step_plan p = plan(&state, job->slot_bytes);
        result = run_step(group, &p, job->rank, step, &own);
    }
    phx_failure failure;
    phx_get_failure(group, &failure);
    phx_close(group);
    return failure.kind == PHX_LOST ? 100 + failure.culprit : result;
}

static void *new_segment(uint64_t slot_bytes)
{
    uint64_t bytes = phx_segment_bytes(ranks, slot_bytes);
    void *segment = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (!bytes || segment == MAP_FAILED)
        die("no memory", -1, 0);
    phx_format(segment, ranks, slot_bytes);
    return segment;
}

static uint64_t random_slot(uint64_t *state)
{
    const uint64_t sizes[] = {64 * (uint64_t)ranks, 64 * (uint64_t)ranks + 192, 4096, 65536};
    uint64_t drawn = sizes[below(state, 4)];
    return drawn < 64 * (uint64_t)ranks ? 64 * (uint64_t)ranks : drawn;
}

/* ---- threads as ranks, under ThreadSanitizer */

static void nothing(int number) { (void)number; }

static void *thread_main(void *argument)
{
    rank_job *job = argument;
    if (live(job) != PHX_OK)
        die("a collective failed", job->rank, 0);
    atomic_store(&job->ended, true);
    return NULL;
}

static void round_of_threads(uint64_t *state)
{
    rank_job jobs[MOST_RANKS];
    pthread_t threads[MOST_RANKS];
    uint64_t slot_bytes = random_slot(state), program = draw(state);
    void *segment = new_segment(slot_bytes);
    for (int p = 0; p < ranks; p++) {
        jobs[p] = (rank_job){segment, slot_bytes, program, PROGRAM_STEPS, p, {0}, false};
        for (int q = 0; q < ranks; q++)
            jobs[p].pidfds[q] = -1;
        pthread_create(&threads[p], NULL, thread_main, &jobs[p]);
    }
    for (int p = 0; p < ranks; p++) { /* signals until it has ended: every sleep is interrupted now and then */
        while (!atomic_load(&jobs[p].ended)) {
            pthread_kill(threads[p], SIGUSR1);
            usleep(500);
        }
        pthread_join(threads[p], NULL);
    }
    munmap(segment, phx_segment_bytes(ranks, slot_bytes));
}

/* ---- processes as ranks, under AddressSanitizer, with or without a kill */

static void round_of_processes(uint64_t *state, bool with_kill)
{
    pid_t pids[MOST_RANKS];
    int go[2];
    uint64_t slot_bytes = random_slot(state), program = draw(state);
    void *segment = new_segment(slot_bytes);
    pid_t *shared = mmap(NULL, sizeof pids, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (pipe(go))
        die("pipe failed", -1, 0);
    for (int p = 0; p < ranks; p++) {
        pids[p] = fork();
        if (pids[p] == 0) {
            char token;
            close(go[1]);
            if (read(go[0], &token, 1) < 0) /* until all are there */
                _exit(1);
            rank_job job = {segment, slot_bytes, program, with_kill ? 0 : PROGRAM_STEPS, p, {0}, false};
            for (int q = 0; q < ranks; q++)
                job.pidfds[q] = q == p ? -1 : (int)syscall(SYS_pidfd_open, shared[q], 0);
            _exit(live(&job));
        }
        shared[p] = pids[p];
    }
    close(go[0]);
    close(go[1]);
    int victim = -1;
    double killed = 0;
    if (with_kill) {
        usleep((useconds_t)below(state, 30000));
        victim = (int)below(state, (uint64_t)ranks);
        kill(pids[victim], SIGKILL);
        killed = seconds_now();
    }
    for (int p = 0; p < ranks; p++) {
        int status, expected = victim < 0 ? PHX_OK : 100 + victim;
        if (p == victim)
            continue; /* a zombie until the others have ended: who comes late can still watch it */
        waitpid(pids[p], &status, 0);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != expected)
            die(victim < 0 ? "a collective failed" : "the killed rank was not named", p, (uint64_t)status);
    }
    if (victim >= 0)
        waitpid(pids[victim], NULL, 0);
    /* Sanitizers and a loaded machine are slow; it is still far from any timeout. */
    if (victim >= 0 && ranks > 1 && seconds_now() - killed > 5)
        die("the death of a rank was noticed late", victim, 0);
    munmap(shared, sizeof pids);
    munmap(segment, phx_segment_bytes(ranks, slot_bytes));
}

int main(int argc, char **argv)
{
    if (argc != 5) {
        fprintf(stderr, "usage: stress threads|processes|kills RANKS SECONDS SEED\n");
        return 2;
    }
    ranks = atoi(argv[2]);
    double until = seconds_now() + atof(argv[3]);
    seed = strtoull(argv[4], NULL, 10);
    if (ranks < 1 || ranks > MOST_RANKS)
        return 2;
    struct sigaction action = {.sa_handler = nothing}; /* without SA_RESTART: it interrupts */
    sigaction(SIGUSR1, &action, NULL);
    uint64_t state = seed, rounds = 0;
    do {
        if (strcmp(argv[1], "threads") == 0)
            round_of_threads(&state);
        else
            round_of_processes(&state, strcmp(argv[1], "kills") == 0);
        rounds++;
    } while (seconds_now() < until);
    printf("%s: %d ranks, %llu programs\n", argv[1], ranks, (unsigned long long)rounds);
    return 0;
}
