"""A process group that counts what a rank receives: below torch's dispatcher, from the tensors that
its backend is handed. It hands them on to gloo, or to nobody.

What a rank receives is worked out anew here: from outputs that are not its own part, and of
reductions by running the ring step by step.
"""

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future
from torch.utils._pytree import tree_leaves

from benchmarks.received import ring_elements


def done(result=None):
    future = Future()
    future.set_result(result)
    return _create_work_from_future(future)


def size(tensors):
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(size, tensors))


class Recording(dist.ProcessGroup):
    """``events``: (what it is, bytes that this rank receives)."""

    events = []

    def __init__(self, rank, world, inner=None):
        super().__init__(rank, world)
        self.at, self.world, self.inner = rank, world, inner

    def getBackendName(self):
        return "recording"

    def size(self):
        return self.world

    @property
    def group_name(self):
        return dist.distributed_c10d._world.pg_names[self]

    def _run(self, kind, received, names, *args):
        self.events.append((kind, received))
        if self.inner is None:
            for x in tree_leaves(args[:1]):
                if not x.is_floating_point():
                    x.zero_()  # programs read integers as indices
            return done(args[0] if args else None)
        method = next(getattr(self.inner, name) for name in names if hasattr(self.inner, name))
        return method(*args)

    def allreduce(self, tensors, opts=None):
        n = sum(ring_elements(self.world, x.numel()) * x.element_size() for x in tensors)
        return self._run("all-reduce", n, ["allreduce"], tensors, opts)

    def allreduce_coalesced(self, tensors, opts=None):
        n = sum(ring_elements(self.world, x.numel()) * x.element_size() for x in tensors)
        return self._run("all-reduce", n, ["allreduce_coalesced"], tensors, opts)

    def allgather(self, outputs, inputs, opts=None):
        n = size(outputs) - size(inputs)
        return self._run("all-gather", n, ["allgather"], outputs, inputs, opts)

    def all_gather_single(self, output, given, opts=None):
        n = size(output) - size(given)
        names = ["all_gather_single", "_allgather_base"]
        return self._run("all-gather", n, names, output, given, opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        n = size(outputs) - size(inputs)
        names = ["all_gather_single_coalesced", "allgather_into_tensor_coalesced"]
        return self._run("all-gather", n, names, outputs, inputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(self, outputs, inputs, opts=None):
        n = (self.world - 1) * size(outputs)
        return self._run("reduce-scatter", n, ["reduce_scatter"], outputs, inputs, opts)

    def reduce_scatter_single(self, output, given, opts=None):
        n = (self.world - 1) * size(output)
        names = ["reduce_scatter_single", "_reduce_scatter_base"]
        return self._run("reduce-scatter", n, names, output, given, opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=None):
        n = (self.world - 1) * size(outputs)
        names = ["reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"]
        return self._run("reduce-scatter", n, names, outputs, inputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(self, output, given, receives, sends, opts=None):
        own = receives[self.at] if receives else output.shape[0] // self.world
        rows = sum(receives) if receives else output.shape[0]
        row = size(output) // rows if rows else 0
        names = ["all_to_all_single", "alltoall_base"]
        n = (rows - own) * row
        return self._run("all-to-all", n, names, output, given, receives, sends, opts)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs, inputs, opts=None):
        n = size(outputs) - size(outputs[self.at])
        return self._run("all-to-all", n, ["alltoall"], outputs, inputs, opts)

    def broadcast(self, tensors, opts=None):
        n = 0 if opts.rootRank == self.at else size(tensors)
        return self._run("broadcast", n, ["broadcast"], tensors, opts)

    def reduce(self, tensors, opts=None):
        n = size(tensors) if opts.rootRank == self.at else 0
        return self._run("reduce", n, ["reduce"], tensors, opts)

    def scatter(self, outputs, inputs, opts=None):
        n = 0 if opts.rootRank == self.at else size(outputs)
        return self._run("scatter", n, ["scatter"], outputs, inputs, opts)

    def gather(self, outputs, inputs, opts=None):
        n = size(outputs) - size(inputs) if opts.rootRank == self.at else 0
        return self._run("gather", n, ["gather"], outputs, inputs, opts)

    def send(self, tensors, to, tag):
        return self._run("send", 0, ["send"], tensors, to, tag)

    def recv(self, tensors, source, tag):
        return self._run("receive", size(tensors), ["recv"], tensors, source, tag)

    def barrier(self, opts=None):
        return self._run("barrier", 0, ["barrier"], *([] if opts is None else [opts]))


def _of_nobody(store, rank, world, timeout):
    return Recording(rank, world)


def _of_gloo(store, rank, world, timeout):
    inner, gloo = dist.ProcessGroup(store, rank, world), dist.ProcessGroup.BackendType.GLOO
    inner._set_default_backend(gloo)
    backend = dist.ProcessGroupGloo(store, rank, world, timeout)
    inner._register_backend(torch.device("cpu"), gloo, backend)
    return Recording(rank, world, inner)


def register():
    """The backends "recording", which communicates with nobody, and "recording_gloo"."""
    for name, create in (("recording", _of_nobody), ("recording_gloo", _of_gloo)):
        if name not in dist.Backend.backend_list:
            dist.Backend.register_backend(name, create, devices=["cpu"])


def recording_mesh(*sizes):
    """A mesh, on new groups that hand what they count to nobody."""
    register()
    ranks = torch.arange(torch.Size(sizes).numel()).reshape(sizes)
    groups = []
    for m in range(len(sizes)):
        lines = ranks.movedim(m, -1).reshape(-1, sizes[m]).tolist()
        made = [dist.new_group(line, backend="recording") for line in lines]
        groups.append(made[0])
    if len(sizes) == 1:
        return DeviceMesh.from_group(groups[0], "cpu")
    return DeviceMesh.from_group(groups, "cpu", mesh=ranks, mesh_dim_names=("a", "b"))
