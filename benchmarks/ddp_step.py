"""What communication adds to a training step with DistributedDataParallel: shm beside gloo.

Copies of one model take turns in the same processes: without communication (alone), with DDP through shm, and through
gloo; those that communicate must end with the same parameters. A step is zero_grad, forward, backward and SGD of an
MLP of three linear layers with 8 samples a rank, or of a transformer encoder of six layers, of 3/16 of the MLP's
width, with 4 x 64 tokens a rank. buckets: the communication hook returns every bucket unchanged, so gradients are
copied into the buckets and back, but nothing is sent. all_reduce: one of all gradients in one tensor, with nothing
beside it.
"""

import functools
import gc
import sys
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from common import Batch, Order, check_same, main, mlp, mlp_batch, run_rank, stepper
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from phalanx.bench.commands import Settings, Step, job
from phalanx.bench.common import Benchmark, Flag, Row, Summary, compare, counts, positive, seconds, show
from phalanx.bench.ranks import Contender, Groups, Turns
from phalanx.errors import UsageError
from phalanx.parallel import data_parallel

ALONE, BUCKETS, SHM, GLOO, REDUCE = "alone", "buckets", "shm", "gloo", "all_reduce"
PLAIN, OURS = "DDP", "data_parallel"
MODELS = ("MLP", "transformer")
VOCABULARY = 256


def plan(settings: Settings) -> Iterator[Step]:
    if settings.width % 32:
        raise UsageError(f"--width is {settings.width}; give a multiple of 32, for the transformer's six heads.")
    order = {"width": settings.width, "seconds": settings.seconds}
    for repeat in range(settings.repeats):
        for ranks in settings.ranks:
            yield job("DDP", (__file__, "--rank"), ranks, order, (repeat, settings))
            # Each in processes of its own, as in training: where several models share a process, memory that one of
            # them gives back serves another, and page faults, which can be a third of such a step, are not seen.
            for only in (f"{backend}, {wrapper}" for backend in (SHM, GLOO) for wrapper in (PLAIN, OURS)):
                yield job(only, (__file__, "--rank"), ranks, {**order, "only": only}, (repeat, settings))


def share(row: Row) -> Summary | None:
    """What shm adds to a step as a part of what gloo adds, repeat by repeat; None when gloo added nothing."""
    shm, gloo, alone = (row.medians(name) for name in (SHM, GLOO, ALONE))
    added = [(shm[repeat] - time, gloo[repeat] - time) for repeat, time in alone.items()]
    return Summary.extremes([one / other for one, other in added if other > 0])


def tables(rows: Sequence[Row], _: Settings) -> list[str]:
    costs = [(SHM, ALONE), (GLOO, ALONE), (BUCKETS, ALONE), (SHM, BUCKETS)]
    extra = [("of what gloo adds", lambda row: show(share(row)))]
    pairs = [(f"{backend}, {OURS}", f"{backend}, {PLAIN}") for backend in (SHM, GLOO)]
    return [
        compare("A training step", rows, (ALONE, SHM, GLOO, REDUCE), costs=costs, extra=extra),
        compare(f"{OURS} beside {PLAIN}", rows, [way for pair in pairs for way in pair], pairs),
    ]


def measure(turns: Turns, groups: Groups, order: Order) -> None:
    for name in MODELS:
        torch.manual_seed(1 + dist.get_rank())
        batch = mlp_batch(order["width"]) if name == "MLP" else _tokens()
        if "only" in order:
            model = _wrapped(name, order["only"], groups, order["width"])
            size = 4 * sum(parameter.numel() for parameter in model.parameters())
            turns.measure(name, size, [Contender(order["only"], [stepper(model, batch)])])
            del model
        else:
            _measure_all(turns, groups, name, batch, order["width"])
        gc.collect()


def _measure_all(turns: Turns, groups: Groups, name: str, batch: Batch, width: int) -> None:
    """All contenders take the same steps on the same data, so the models that do communicate must stay the same."""
    models = {contender: _wrapped(name, contender, groups, width) for contender in (ALONE, BUCKETS, *groups)}
    gradients = torch.ones(sum(parameter.numel() for parameter in models[ALONE].parameters()))
    reduce = functools.partial(dist.all_reduce, gradients, op=dist.ReduceOp.AVG, group=groups[SHM])
    contenders = [Contender(each, [stepper(model, batch)]) for each, model in models.items()]
    turns.measure(name, 4 * gradients.numel(), [*contenders, Contender(REDUCE, [reduce])])
    check_same(models, (SHM, GLOO))


def _wrapped(name: str, contender: str, groups: Groups, width: int) -> nn.Module:
    torch.manual_seed(0)
    model = mlp(width) if name == "MLP" else _transformer(width * 3 // 16)
    if contender == ALONE:
        return model
    backend, _, wrapper = contender.partition(", ")
    wrap = data_parallel if wrapper == OURS else DistributedDataParallel
    wrapped = wrap(model, process_group=groups.get(backend, groups[SHM]))
    if contender == BUCKETS:
        # A lambda, for DDP compares annotations, and in this file they are strings.
        wrapped.register_comm_hook(None, lambda _, bucket: _unchanged(bucket))
    return wrapped


def _unchanged(bucket: dist.GradBucket) -> object:
    """DDP copies gradients into its buckets and back as always; what is in between is left out."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _transformer(width: int) -> nn.Module:
    """Six layers; 10.8 million parameters when the MLP's width is 2048."""
    layer = nn.TransformerEncoderLayer(width, nhead=6, dim_feedforward=4 * width, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, num_layers=6, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(VOCABULARY, width), encoder, nn.Linear(width, VOCABULARY))


def _tokens() -> Batch:
    return torch.randint(VOCABULARY, (4, 64)), torch.randint(VOCABULARY, (4, 64))


FLAGS = (
    Flag("--ranks", "A,B", counts, "2,4"),
    Flag("--width", "N", positive, 2048, "of the MLP, a multiple of 32"),
    Flag("--seconds", "S", seconds, 10.0, "for one model in one job, about"),
)
BENCHMARK = Benchmark("ddp-step", __doc__, plan, tables, FLAGS, timeout=300.0)
rank = functools.partial(run_rank, measure)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK, rank))
