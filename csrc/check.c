/* What phx_open and phx_run are given, checked before anything is done with it. */
#include "internal.h"

bool has_memory(const phx_group *g, const phx_call *call)
{
    const struct shape *shape = &SHAPES[call->op];
    bool root = g->rank == call->root, reads = !shape->from_root || root;
    bool writes = call->op == PHX_BROADCAST ? !root : !shape->to_root || root;
    for (int p = 0; p < g->ranks && call->op != PHX_BARRIER; p++) {
        bool lacks_in = !(shape->in_each && call->ins ? call->ins[p] : call->in) && sent_bytes(call, p);
        bool lacks_out = !(shape->out_each && call->outs ? call->outs[p] : call->out) && received_bytes(call, p);
        if ((reads && lacks_in) || (writes && lacks_out))
            return false;
        if (!call->ins && !call->outs && !call->sends && !call->receives)
            break; /* the same for all */
    }
    return true;
}
