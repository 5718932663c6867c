/* Checks the arguments of phx_open and phx_run before they are used.
 *
 * A pointer does not show whether it has memory behind it: that is up to the caller. */
#include "internal.h"

static const uint32_t WIDTHS[PHX_DTYPES] = {
    [PHX_F32] = 4, [PHX_F64] = 8, [PHX_F16] = 2, [PHX_BF16] = 2, [PHX_I8] = 1,  [PHX_I16] = 2, [PHX_I32] = 4,
    [PHX_I64] = 8, [PHX_U8] = 1,  [PHX_BOOL] = 1, [PHX_U16] = 2, [PHX_U32] = 4, [PHX_U64] = 8,
};

int check_segment(const phx_header *header, uint64_t bytes, int rank, int ranks)
{
    if ((uintptr_t)header % PHX_LINE)
        return PHX_UNALIGNED;
    if (ranks < 1 || ranks > PHX_MAX_RANKS || rank < 0 || rank >= ranks)
        return PHX_BAD_RANK;
    if (bytes < sizeof *header)
        return PHX_BAD_SIZE;
    if (header->magic != MAGIC)
        return PHX_NOT_FORMATTED;
    if (header->version != PHX_VERSION)
        return PHX_OTHER_VERSION;
    uint64_t needed = phx_segment_bytes(ranks, header->slot_bytes); /* 0: no segment has such slots */
    bool fits = needed && needed <= bytes && needed == header->bytes && header->ranks == (uint32_t)ranks;
    return fits ? PHX_OK : PHX_BAD_SIZE;
}

/* Returns whether the blocks of all ranks together can be addressed. */
static bool is_addressable(const phx_group *g, uint64_t count, uint32_t width)
{
    uint64_t bytes;
    return !__builtin_mul_overflow(count, (uint64_t)width * (uint64_t)g->ranks, &bytes) && bytes <= PTRDIFF_MAX;
}

static bool are_addressable(const phx_group *g, const phx_call *call)
{
    bool so = is_addressable(g, call->count, call->width);
    for (int p = 0; so && p < g->ranks && (call->sends || call->receives); p++)
        so = (!call->sends || is_addressable(g, call->sends[p], call->width)) &&
             (!call->receives || is_addressable(g, call->receives[p], call->width));
    return so;
}

/* Returns whether this rank has given every pointer that its part of the collective needs. */
static bool has_memory(const phx_group *g, const phx_call *call, const struct shape *shape)
{
    bool root = g->rank == call->root, reads = !shape->from_root || root;
    bool writes = call->op == PHX_BROADCAST ? !root : !shape->to_root || root;
    if ((call->sends && !call->ins) || (call->receives && !call->outs))
        return false; /* uneven blocks need a pointer each */
    for (int p = 0; p < g->ranks; p++) {
        bool lacks_in = !(shape->in_each && call->ins ? call->ins[p] : call->in) && sent_bytes(call, p);
        bool lacks_out = !(shape->out_each && call->outs ? call->outs[p] : call->out) && received_bytes(call, p);
        if ((reads && lacks_in) || (writes && lacks_out))
            return false;
        if (!call->ins && !call->outs)
            break; /* the same for all */
    }
    return true;
}

int check_call(const phx_group *g, const phx_call *call)
{
    if (call->op >= PHX_OPS)
        return PHX_BAD_OP;
    const struct shape *shape = &SHAPES[call->op];
    bool rooted = shape->from_root || shape->to_root;
    if (rooted ? call->root < 0 || call->root >= g->ranks : call->root != -1)
        return PHX_BAD_ROOT;
    if (call->op == PHX_BARRIER)
        return PHX_OK;
    if (call->dtype < PHX_DTYPES ? call->width != WIDTHS[call->dtype] : call->width == 0)
        return PHX_BAD_WIDTH;
    if (shape->reduces && !phx_can_reduce(call->dtype, call->reduce))
        return PHX_BAD_REDUCTION;
    if ((call->op != PHX_ALL_TO_ALL && (call->sends || call->receives)) || !are_addressable(g, call))
        return PHX_BAD_COUNT;
    return has_memory(g, call, shape) ? PHX_OK : PHX_NO_DATA;
}
