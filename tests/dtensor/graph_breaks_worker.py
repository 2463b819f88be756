"""What the processes of test_graph_breaks.py run: compiled programs whose graphs break, so that ops
on DTensors run between graphs, where the compiler looks at each Python function that they call.
"""

from collections import Counter

import torch
import torch._dynamo
import torch.distributed as dist
from processes_worker import distribute, mesh_of_ranks
from simulation import number
from torch._dynamo import convert_frame
from torch.distributed.tensor import DTensor, Replicate, Shard

import cute_sharding


def branch(x):
    y = x * 2
    return y.view(-1) + 1 if y.sum() > 0 else y.t()


def number_inside(x):
    y = x.flatten()
    return (x + y.sum().item()).view(2, -1)


def loop(x):
    while x.max() > 4:
        x = x[1:] / 2
    return x


def of_unknown_size(x):
    return x.roll(1, 0)[x.full_tensor().unique().numel() % 3 :] * 2


@torch._dynamo.disable
def apart(x):
    return x.view(-1, 2).flip(0)


def beside_what_is_disabled(x):
    return apart(x * 2).redistribute(placements=[Replicate()]) + 1


def attention(x):
    q, k = x.chunk(2, -1)
    scores = (q @ k.transpose(-1, -2)).softmax(-1)
    return scores @ k if bool((scores >= 0).all()) else scores


PROGRAMS = [branch, number_inside, loop, of_unknown_size, beside_what_is_disabled, attention]


def compiled_frames(program, x):
    """The result, the graphs, and of each module's functions how many were compiled."""
    seen, graphs = Counter(), []
    stock = convert_frame._compile

    def _compile(code, globals_of_it, *rest, **options):
        seen[str(globals_of_it.get("__name__")).partition(".")[0]] += 1
        return stock(code, globals_of_it, *rest, **options)

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    convert_frame._compile = _compile
    try:
        result = torch.compile(program, backend=backend)(x)
    finally:
        convert_frame._compile = stock
    return result, len(graphs), seen


def programs():
    mesh = mesh_of_ranks([*range(dist.get_world_size())])
    for program in PROGRAMS:
        for placement in (Shard(0), Shard(1)):
            whole = number((6, 4)) / 10
            x = distribute(whole, mesh, [placement]).detach()
            replicas = DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
            expected = program(replicas).full_tensor()
            _, stocks, _ = compiled_frames(program, x)
            with cute_sharding.enabled(movement=True, redistribution=True):
                result, graphs, seen = compiled_frames(program, x)
                found = result.full_tensor()
            what = program.__name__, placement
            assert torch.allclose(found, expected), what
            assert not seen["cute_sharding"], (what, seen)
            assert graphs <= stocks, (what, graphs, stocks)
