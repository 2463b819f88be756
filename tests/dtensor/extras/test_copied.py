"""Copies of what ops return: on each device alike, whether or not its local tensor begins at an
offset in memory.
"""

import copy
import io
import pickle

import pytest
import torch
from torch.distributed._state_dict_utils import _copy_state_dict, _create_cpu_state_dict
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import cute_sharding

DEVICES = 4

RESULTS = {
    "rows": lambda x: x[1:],
    "few rows": lambda x: x[2:3],
    "no rows": lambda x: x[:0],
    "columns": lambda x: x[:, 1:],
    "every other": lambda x: x[1::2, 2:],
    "a row": lambda x: x[3],
    "a part": lambda x: x.split([2, 3, 4])[1],
    "a chunk": lambda x: x.chunk(2, 1)[1],
    "one of many": lambda x: x.unbind(1)[2],
    "a diagonal": lambda x: x.diagonal(1),
    "turned": lambda x: x[:, 1:].t(),
    "flat": lambda x: x.view(36),
    "flat rows": lambda x: x[1:].reshape(32),
    "joined": lambda x: torch.cat([x[4:], x[:, :]]),
    "rolled": lambda x: x.roll(1, 0)[1:],
    "moved": lambda x: x[1:].redistribute(placements=[Shard(1)])[:, 1:],
    "whole": lambda x: x.redistribute(placements=[Replicate()])[2:, 1:],
    "strided": lambda x: x.redistribute(placements=[_StridedShard(0, split_factor=2)])[1:],
    "pending": lambda x: x[:, 1:].sum(0, keepdim=True),
    "pending, a slice": lambda x: (x.t() @ x)[1:],
    "given": lambda x: DTensor.from_local(torch.arange(6.0)[2:], x.device_mesh, [Partial()]),
    "parameter": lambda x: torch.nn.Parameter(x[:, 1:]),
}


def saved_and_loaded(x):
    file = io.BytesIO()
    torch.save({"x": x}, file)
    file.seek(0)
    return torch.load(file, weights_only=False)["x"]


def staged(x):
    return StateDictStager().stage({"x": x})["x"]


def on_cpu(x):
    return _copy_state_dict({"x": x}, _create_cpu_state_dict({"x": x}))["x"]


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "of a copy": lambda x: copy.deepcopy(copy.deepcopy(x)),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "save": saved_and_loaded,
    "stage": staged,
    "state dict": on_cpu,
    "clone": lambda x: x.clone(),
    "deepcopy of clone": lambda x: copy.deepcopy(x.detach().clone()),
    "detach": lambda x: copy.deepcopy(x.detach()),
    "data": lambda x: copy.deepcopy(x.data),
    "cpu": lambda x: copy.deepcopy(x.detach().cpu()),
    "to": lambda x: x.detach().to("cpu", copy=True),
}


COMPILED = {
    "compiled": lambda x: x[1:].t() + 0,
    "compiled view": lambda x: x[1:, 1:],
}


def compare(result, y, placement):
    for name, copied in COPIES.items():
        case = f"{name} of {result} of {placement}"
        try:
            z = copied(y)
        except Exception as error:
            raise AssertionError(f"{case}: {error}") from error
        assert (type(z), z.shape) == (type(y), y.shape), case
        assert z.dtype == y.dtype and z.device_mesh == y.device_mesh, case
        if "clone" in name and y.placements[0].is_partial():
            continue  # torch finishes it
        assert z.placements == y.placements, case
        assert torch.equal(z.to_local(), y.to_local()), case
        if name in ("copy", "deepcopy", "pickle", "save"):
            assert z.requires_grad == y.requires_grad, case
            assert isinstance(z, torch.nn.Parameter) == (result == "parameter"), case
        if name != "stage":  # which is made to be saved
            assert z.stride() == z._spec.stride, case


def mesh_at(device):
    """A mesh on which the rank of the test is this device."""
    ranks = [*range(1, DEVICES)]
    ranks.insert(device, 0)
    return DeviceMesh("cpu", ranks)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "flags", [{}, {"redistribution": True, "movement": True}], ids=["views", "all"]
)
@pytest.mark.parametrize("device", range(DEVICES))
def test_copies_of_whatever_an_op_returns(device, flags):
    full, mesh = torch.arange(36.0).reshape(9, 4), mesh_at(device)
    with cute_sharding.enabled(**flags):
        for placement in (Shard(0), Shard(1), Replicate()):
            x = distribute_tensor(full, mesh, [placement], src_data_rank=None)
            for result, make in RESULTS.items():
                compare(result, make(x), placement)


def test_copies_of_what_a_graph_returns():
    full, mesh = torch.arange(36.0).reshape(9, 4), mesh_at(1)
    with cute_sharding.enabled(movement=True):
        x = distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)
        for result, make in COMPILED.items():
            compare(result, torch.compile(make, backend="aot_eager")(x), Shard(0))


def test_a_deep_copy_keeps_what_belongs_to_a_tensor():
    """Its gradient, what a program has set on it, and that two names are for one tensor."""
    x = distribute_tensor(
        torch.arange(36.0).reshape(9, 4), mesh_at(1), [Shard(0)], src_data_rank=None
    )
    with cute_sharding.enabled():
        weight = torch.nn.Parameter(x[1:, 1:])
        weight.grad, weight.note = x[1:, 1:] * 2, ["tied"]
        one, other = copy.deepcopy([weight, weight])
    assert one is other and isinstance(one, torch.nn.Parameter)
    assert torch.equal(one.grad.to_local(), weight.grad.to_local())
    assert one.note == ["tied"] and one.note is not weight.note
    with torch.no_grad():
        one.to_local().zero_()
    assert weight.to_local().any()


def test_arguments_have_the_names_of_torchs():
    """As torch itself passes them for a GradScaler."""
    x = distribute_tensor(torch.zeros(4, 4), mesh_at(0), [Shard(0)], src_data_rank=None)
    with cute_sharding.enabled(movement=True):
        made = DTensor(local_tensor=x._local_tensor, spec=x._spec, requires_grad=False)
        assert made.placements == x.placements


@pytest.mark.one_in(1)
@pytest.mark.parametrize("is_parameter", [False, True])
def test_data_that_is_set(is_parameter):
    """A DTensor becomes the other one, and has its memory; as plain tensors do."""
    mesh, other_mesh = mesh_at(1), DeviceMesh("cpu", [[0, 1], [2, 3]])
    at_rows = Shard(0)

    def of(value, placement=at_rows, shape=(8, 4), mesh=mesh, dtype=torch.float32):
        full = torch.full(shape, value, dtype=dtype)
        return distribute_tensor(full, mesh, [placement] * mesh.ndim, src_data_rank=None)

    others = [
        of(2.0),
        of(2.0, Replicate()),
        of(2.0, Shard(1)),
        of(2.0, _StridedShard(0, split_factor=2)),
        of(2.0, shape=(9, 2, 2)),
        of(2.0, Replicate(), shape=()),
        of(2.0, shape=(0, 4)),
        of(2.0, dtype=torch.float64),
        of(2.0, mesh=other_mesh),
        of(2.0)[1:, 1:],
        of(2.0).sum(0),
    ]
    with cute_sharding.enabled(movement=True):
        for other in [*others, torch.nn.Parameter(of(2.0))]:
            x = of(1.0)
            x = torch.nn.Parameter(x) if is_parameter else x
            before = x
            x.data = other
            case = f"{tuple(other.shape)} {other.placements}"
            assert x is before and x.requires_grad == is_parameter, case
            assert x._spec == other._spec and x.stride() == other.stride(), case
            assert (x.shape, x.dtype) == (other.shape, other.dtype), case
            assert torch.equal(x.to_local(), other.to_local()), case
            assert x.data.placements == other.placements, case
            with torch.no_grad():
                other.to_local().zero_()
            assert not x.to_local().any(), case
            if is_parameter:
                (x * 3).sum().backward()
                assert (x.grad.shape, x.grad.dtype) == (x.shape, x.dtype), case
        x = of(1.0)
        for plain in (torch.zeros(8, 4), torch.nn.Parameter(torch.zeros(2, 4))):
            with pytest.raises(TypeError, match="cannot set the data of a DTensor of shape"):
                x.data = plain
        assert x.to_local().all()
        read = torch.compile(lambda x: x.data * 2, backend="aot_eager", fullgraph=True)
        assert torch.equal(read(x).to_local(), x.to_local() * 2)
