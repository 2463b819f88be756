"""Parameters that fully_shard shards once more, over tensor parallelism: drawn, and what each rank
is to hold of them, by torch.chunk of chunks.
"""

import copy
import pickle
import random
import shutil
import tempfile
from contextlib import nullcontext
from functools import lru_cache, partial
from itertools import product
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import cute_sharding
from cute_sharding import local_boxes

# The names of the mesh dims, those of tensor parallelism, and of fully_shard.
KINDS = {
    "one dim": (("dp", "tp"), ("tp",), ("dp",)),
    "replicas too": (("rep", "dp", "tp"), ("tp",), ("rep", "dp")),
    "two dims of experts": (("dp", "ep", "tp"), ("ep", "tp"), ("dp",)),
    "one mesh": (("a", "dp", "b"), ("a", "b"), ("dp",)),
    "one mesh, of two dims": (("dp", "cp", "tp"), ("tp",), ("dp", "cp")),
}
ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 12, 16, 24, 24, 36)


class Drawn:
    """A weight, sharded by tensor parallelism, and how fully_shard is to shard it."""

    def __init__(self, seed, world):
        rng = random.Random(seed)
        self.kind = rng.choice([*KINDS])
        self.names, self.tp, self.dp = KINDS[self.kind]
        self.sizes = ()
        while prod(self.sizes) != world:
            self.sizes = tuple([rng.choice([1, 2, 2, 3, 4]) for _ in self.names])
        self.shape = (rng.choice(ROWS), rng.choice([1, 4, 6, 8, 12]))
        self.cuts = [self._placement(rng) for _ in self.tp]
        self.dim = rng.choice([None, None, 0, 1])

    @staticmethod
    def _placement(rng):
        dim, kind = rng.choice([0, 0, 0, 1]), rng.random()
        if kind < 0.1:
            return Replicate()
        return Shard(dim) if kind < 0.4 else _StridedShard(dim, split_factor=rng.choice([2, 3, 4]))

    def __repr__(self):
        return f"{self.kind} {self.sizes}: {self.shape} as {self.cuts}, dim {self.dim}"

    @property
    def whole(self):
        return torch.arange(float(prod(self.shape))).reshape(self.shape)

    @property
    def mesh(self):
        return _mesh(self.sizes, self.names)

    def built(self):
        """(A layer of which fully_shard has sharded the weight, what this rank is to hold of it)"""
        mesh, here, on = self.mesh, [], {}
        if self.kind.startswith("one mesh"):
            from torch.distributed.fsdp import DataParallelMeshDims

            here, on = mesh, {"dp_mesh_dims": DataParallelMeshDims(shard=self.dp)}
            named = dict(zip(self.tp, self.cuts))
            placements = [named.get(name, Replicate()) for name in self.names]
        else:
            here, placements = mesh[self.tp], self.cuts
        at = mesh.get_coordinate()
        local = self.whole
        for m, placement in in_order(placements, here):
            local = chunk(local, placement, here.size(m), here.get_coordinate()[m])
        weight = DTensor.from_local(
            local.contiguous(), here, placements, shape=self.whole.shape, stride=self.whole.stride()
        )
        layer = nn.Linear(1, 1, bias=False)
        layer.weight = nn.Parameter(weight)
        chosen = None if self.dim is None else (lambda p: Shard(self.dim))
        fully_shard(layer, mesh=mesh if on else mesh[self.dp], shard_placement_fn=chosen, **on)
        parts, mine = 1, 0
        for name in self.dp:
            if name != "rep":
                m = self.names.index(name)
                parts, mine = parts * self.sizes[m], mine * self.sizes[m] + at[m]
        return layer, chunk(local, Shard(self.dim or 0), parts, mine)


@lru_cache(None)
def _mesh(sizes, names):
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def in_order(placements, mesh):
    """The placements with their mesh dims, in the order in which they shard: that of torch's own
    labels for two dims of experts, [_StridedShard(0, n), Shard(0)], is from right to left.
    """
    pairs = [*enumerate(placements)]
    if len(pairs) == 2 or all(isinstance(p, Replicate) for p in placements[1:-1]):
        first, last = placements[0], placements[-1]
        if (
            isinstance(first, _StridedShard)
            and first.split_factor == mesh.size(len(pairs) - 1)
            and last == Shard(first.dim)
        ):
            return [(pairs[-1][0], last), (0, Shard(first.dim))]
    return [(m, p) for m, p in pairs if not isinstance(p, Replicate)]


def chunk(whole, placement, n, k):
    """Part ``k`` of ``n``."""
    if isinstance(placement, Replicate):
        return whole
    dim, factor = placement.dim, getattr(placement, "split_factor", 1)
    parts = []
    for piece in torch.chunk(whole, factor, dim):
        some = torch.chunk(piece, n, dim)
        parts.append(some[k] if k < len(some) else piece.narrow(dim, 0, 0))
    return torch.cat(parts, dim)


def holds(tensor, local, whole):
    """Whether a rank's local tensor is ``local``, and the boxes of its placements say so."""
    said = torch.full(tensor._local_tensor.shape, -1.0)
    for box in local_boxes(tensor):
        for part in box.contiguous():
            said[part.local_slices] = whole[part.global_slices]
    found = tensor._local_tensor.detach()
    return all(torch.equal(x.reshape(local.shape), local) for x in (found, said))


def as_each_rank(rank, world, count, folder):
    """The placements of drawn weights, or refusals, as one rank of a fake group has them."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    found = []
    with cute_sharding.enabled():
        for seed in range(count):
            drawn = Drawn(seed, world)
            try:
                layer, local = drawn.built()
            except NotImplementedError:
                found.append("refused")
                continue
            assert holds(layer.weight, local, drawn.whole), (rank, drawn)
            found.append(str(layer.weight.placements))
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(found))


def refused(drawn, found):
    """Whether torch refuses to shard the weight: on all ranks, or on none."""
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    assert len({*every}) == 1, (drawn, every)
    return found is not None


def all_readers_are_right(first, stop, settings):
    """Of drawn weights on four processes; ops too, unless torch alone runs views."""
    line = init_device_mesh("cpu", (4,))
    with cute_sharding.enabled(**settings):
        for seed in range(first, stop):
            drawn = Drawn(seed, 4)
            layer = found = None
            try:
                layer, local = drawn.built()
            except NotImplementedError as error:
                found = str(error)
            if not refused(drawn, found):
                read(drawn, layer.weight, local, line)
                if settings.get("views", True):
                    compute(drawn, layer.weight)


def read(drawn, w, local, line):
    whole = drawn.whole
    assert holds(w, local, whole), drawn
    assert torch.equal(w.full_tensor(), whole), drawn
    laid = distribute_tensor(whole, w.device_mesh, w.placements)
    assert holds(laid, local, whole), drawn
    moved = cute_sharding.reshard({"w": w.detach()}, "S(0)", line)["w"]
    assert torch.equal(moved.full_tensor(), whole), drawn
    back = cute_sharding.reshard({"w": moved}, lambda *_: w.placements, w.device_mesh)["w"]
    assert holds(back, local, whole), drawn
    plan = cute_sharding.plan_refit(
        lambda s: {"v": s["w"].flip(0)}, {"w": w}, {"*": (line, [Shard(1)])}
    )
    assert torch.equal(plan.run({"w": w})["v"].full_tensor(), whole.flip(0)), drawn
    saved(drawn, w.detach(), local)


def compute(drawn, w):
    whole = drawn.whole
    doubled = (w.detach() * 2).full_tensor()
    assert torch.equal(doubled, whole * 2), drawn
    assert torch.equal(w.detach().t().full_tensor(), whole.t()), drawn
    assert torch.equal(w.detach().reshape(-1).full_tensor(), whole.reshape(-1)), drawn
    replica = distribute_tensor(whole.t(), w.device_mesh, [Replicate()] * w.device_mesh.ndim)
    assert torch.allclose((w.detach() @ replica).full_tensor(), whole @ whole.t()), drawn
    assert torch.allclose(w.detach().sum(0).full_tensor(), whole.sum(0)), drawn
    norm = torch.linalg.vector_norm(w.detach())
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    assert torch.allclose(norm, whole.norm()), drawn


def saved(drawn, w, local):
    """A checkpoint, loaded whole and into the same placements."""
    import torch.distributed.checkpoint as dcp

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    dcp.save({"w": w}, checkpoint_id=folder[0])
    state = {"w": torch.zeros(drawn.shape)}
    dcp.load(state, checkpoint_id=folder[0])
    assert torch.equal(state["w"], drawn.whole), drawn
    alike = {"w": torch.zeros_like(w)}
    dcp.load(alike, checkpoint_id=folder[0])
    assert holds(alike["w"], local, drawn.whole), drawn
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])


def training(settings, count):
    """Modules with fewer features than ranks, and some of fused parts, as on one device."""
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    clips = settings.get("views", True)  # torch alone does not clip gradients on several meshes
    every = [
        case
        for case in product(
            (1, 3, 4), (1, 2, 6), ("columns", "rows", "fused"), (True, False), (False, True)
        )
        if case[2] != "fused" or case[1] == 6
    ]
    with cute_sharding.enabled(**settings):
        for case in random.Random(0).sample(every, min(count, len(every))):
            train(*case, square, clips)


def train(inner, outer, style, bias, apart, mesh, clips):
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(4, inner), nn.Linear(inner, outer, bias=bias))
    model = copy.deepcopy(alone)
    styles = {
        "columns": ColwiseParallel(output_layouts=Replicate()),
        "rows": RowwiseParallel(input_layouts=Replicate()),
        "fused": Fused(),
    }
    parallelize_module(model, mesh["tp"], {"1": styles[style]})
    for module in [model[1], model] if apart else [model]:
        fully_shard(module, mesh=mesh["dp"])
    optimizers = [torch.optim.Adam(of.parameters(), lr=0.01) for of in (model, alone)]
    for _ in range(2):
        x = torch.randn(3, 4)
        for of, optimizer in zip((model, alone), optimizers):
            y = of(x)
            y = y.full_tensor() if isinstance(y, DTensor) else y
            y.pow(2).sum().backward()
            if clips:
                torch.nn.utils.clip_grad_norm_(of.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    for (name, of), wanted in zip(model.named_parameters(), alone.parameters()):
        found = of.full_tensor()
        assert torch.allclose(found, wanted, atol=1e-3), (name, inner, outer, style, bias, apart)


OPTIMIZERS = {
    "Adam, one by one": partial(torch.optim.Adam, foreach=False),
    "Adam of lists": partial(torch.optim.Adam, foreach=True),
    "Adam, fused": partial(torch.optim.Adam, fused=True),
    "SGD of lists": partial(torch.optim.SGD, momentum=0.9, foreach=True),
}


def switched_before_it_trains(pairs):
    """A weight of three parts, of which fully_shard takes one part and a half: composed under the
    first settings of each pair, and trained and read under the second, None for off.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh.get_coordinate()
    for composed_by, then in pairs:
        for name, optimizer in OPTIMIZERS.items():
            alone = nn.Linear(4, 24, bias=False)
            alone.weight = nn.Parameter(torch.arange(96.0).reshape(24, 4) / 96)
            with cute_sharding.enabled(**composed_by):
                layer = copy.deepcopy(alone)
                parallelize_module(layer, mesh["tp"], Fused())
                fully_shard(layer, mesh=mesh["dp"])
            assert layer.weight.placements[0].split_factor == -2
            with nullcontext() if then is None else cute_sharding.enabled(**then):
                steps_alike(layer, alone, optimizer)
                whole = alone.weight.detach()
                local = whole.view(3, 2, 4, 4)[:, tp].reshape(12, 4).chunk(2)[dp]
                weight = layer.weight.detach()
                case = composed_by, then, name
                assert torch.allclose(weight._local_tensor, local, atol=1e-5), case
                if then is not None:
                    assert torch.allclose(weight.full_tensor(), whole, atol=1e-5), case
                    continue
                for read in (DTensor.full_tensor, lambda x: x[1:], lambda x: x.view(-1), to_disk):
                    with pytest.raises(BaseException, match="Expected num_chunks > 0, got -2"):
                        read(weight)


def steps_alike(layer, alone, optimizer):
    """Steps with clipped gradients and another learning rate in each."""
    optimizers = [optimizer(of.parameters(), lr=0.1) for of in (layer, alone)]
    for lr in (0.1, 0.01):
        norms = []
        for of, each in zip((layer, alone), optimizers):
            y = of(torch.ones(2, 4))
            y = y.full_tensor() if isinstance(y, DTensor) else y
            y.pow(2).sum().backward()
            norm = torch.nn.utils.clip_grad_norm_(of.parameters(), 1.0)
            norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
            each.param_groups[0]["lr"] = lr
            each.step()
            each.zero_grad()
        assert torch.allclose(*norms)


def to_disk(weight):
    import torch.distributed.checkpoint as dcp

    dcp.save({"w": weight}, checkpoint_id=tempfile.gettempdir())


class Fused(ColwiseParallel):
    """Columns in three parts."""

    def __init__(self):
        super().__init__(output_layouts=Replicate(), use_local_output=False)

    def _partition_linear_fn(self, name, module, device_mesh):
        for key, value in list(module.named_parameters()):
            laid = distribute_tensor(value, device_mesh, [_StridedShard(0, split_factor=3)])
            module.register_parameter(key, nn.Parameter(laid))
