"""A graph for any sizes takes the steps that an eager program takes at the sizes of the call. So a
rank that runs eagerly, or whose graph is for one size, waits for nobody.
"""

from weakref import WeakKeyDictionary

import pytest
import torch
import torch.nn.functional as F
from compiling import fresh_compiler  # noqa: F401
from recording_group import Recording, recording_mesh
from simulation import zeros_of
from torch.distributed.tensor import Replicate, Shard

from cute_sharding.dtensor.run import groups as groups_of_ranks

R, S = Replicate(), Shard

PROGRAMS = {
    "linear": lambda x, w: x @ w,
    "linear, softmax": lambda x, w: (x @ w).softmax(0),
    "layer_norm, linear": lambda x, w: F.layer_norm(x, x.shape[1:]) @ w,
    "layer_norm": lambda x, w: F.layer_norm(x, (x.shape[1],)),
    "layer_norm, chunk": lambda x, w: F.layer_norm(x, (x.shape[1],)).chunk(2, 1)[0] * 1,
    "softmax": lambda x, w: x.softmax(0),
    "any": lambda x, w: (x > 0).any(0) * 1,
    "amax": lambda x, w: x.amax(1),
    "prod": lambda x, w: x.prod(0),
    "mean": lambda x, w: x.mean(0) * 2,
    "cumsum": lambda x, w: x.cumsum(1),
    "matmul": lambda x, w: x @ x.t(),
    "mean of rows": lambda x, w: x.mean(-1) * 2,
    "sort": lambda x, w: x.sort(-1)[0],
    "less a mean": lambda x, w: x - x.mean(0),
}
PLACEMENTS = {
    (4,): [(S(0),), (S(1),)],
    (2, 2): [(S(0), S(1)), (S(1), S(1)), (R, S(1)), (S(0), S(0))],
}
# Each graph is for the first size; some devices have no rows of 4 and of 5.
SIZES = (8, 13, 5, 20, 4)
CASES = [
    (sizes, placements, name)
    for sizes, some in PLACEMENTS.items()
    for placements in some
    for name in PROGRAMS
]


@pytest.fixture(scope="module")
def meshes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups_of_ranks, "_groups", WeakKeyDictionary())
        yield {sizes: recording_mesh(*sizes) for sizes in PLACEMENTS}


def outcome(program, n, mesh, placements):
    """The placements of the result, and what this rank received in which collectives."""
    rows, weight = zeros_of(mesh, (n, 8), placements), zeros_of(mesh, (8, 3), [S(1)] * mesh.ndim)
    Recording.events.clear()
    return program(rows, weight).placements, list(Recording.events)


@pytest.mark.one_in(72)
@pytest.mark.parametrize(
    ("sizes", "placements", "name"), CASES, ids=lambda value: str(value).replace(" ", "")
)
def test_an_op_takes_the_steps_of_an_eager_program(sizes, placements, name, meshes):
    program, mesh = PROGRAMS[name], meshes[sizes]
    graph = torch.compile(program, backend="aot_eager", dynamic=True, fullgraph=True)
    for n in SIZES:
        assert outcome(graph, n, mesh, placements) == outcome(program, n, mesh, placements), n


GUARDED = {
    "costs of uneven blocks and of even ones": ("matmul", (S(0), S(0)), (8, 13, 20, 12, 21)),
    "costs of uneven blocks": ("layer_norm", (S(1), S(1)), (13, 5)),
    "means over even blocks of uneven rows": ("mean of rows", (S(0), S(1)), (9, 1, 7)),
    "maxima on devices without rows": ("amax", (S(1), S(0)), (1, 9, 1)),
    "a shard moves to rows that all devices have": ("sort", (S(1), S(1)), (16, 3, 9)),
    "a shard moves to uneven rows": ("sort", (S(1), S(0)), (6, 24, 10, 101)),
    "a mean on devices without rows": ("less a mean", (S(0), R), (4, 1)),
}


@pytest.mark.one_in(1)
@pytest.mark.parametrize("kind", GUARDED)
def test_what_is_compared_is_guarded(kind, meshes):
    name, placements, sizes = GUARDED[kind]
    program, mesh = PROGRAMS[name], meshes[2, 2]
    graph = torch.compile(program, backend="aot_eager", dynamic=True, fullgraph=True)
    for n in sizes:
        assert outcome(graph, n, mesh, placements) == outcome(program, n, mesh, placements), n
