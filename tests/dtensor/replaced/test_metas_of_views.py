"""What a view gives, found without a mode of torch's, is what torch finds."""

import pytest
import torch
from simulation import mesh_of, plain
from torch.distributed.tensor import Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from cute_sharding.dtensor.replaced import op_schemas
from cute_sharding.relations.table import VIEWS

LAYOUTS = {
    "rows": lambda: torch.zeros(4, 6, 8),
    "columns": lambda: torch.zeros(8, 6, 4).transpose(0, 2),
    "a slice": lambda: torch.zeros(6, 9, 8)[1:5, ::2][:, :, 3:],
    "one value": lambda: torch.zeros(()).expand(4, 6, 8),
    "no rows": lambda: torch.zeros(4, 0, 8),
    "numbers of two parts": lambda: torch.zeros(4, 2, 2, dtype=torch.complex64),
}
CALLS = {
    "view": lambda x: x.view(x.shape[0], -1) if x.numel() and x.is_contiguous() else x.view_as(x),
    "reshape": lambda x: x.reshape(-1),
    "_unsafe_view": lambda x: torch.ops.aten._unsafe_view(x.contiguous(), [x.numel()]),
    "permute": lambda x: x.permute(2, 0, 1),
    "transpose": lambda x: x.transpose(0, 1).mT,
    "unsqueeze": lambda x: x.unsqueeze(1).squeeze(1).squeeze(),
    "expand": lambda x: x[:1].expand(3, -1, -1),
    "slice": lambda x: x[1:, :, ::2],
    "split": lambda x: x.split([1, 3]) + x.split(3, -1),
    "unbind": lambda x: x.unbind(0),
    "select": lambda x: x.select(2, -1),
    "diagonal": lambda x: x.diagonal(0, 0, 2),
    "unfold": lambda x: x.unfold(0, 2, 1),
    "parts": lambda x: torch.view_as_real(x) if x.is_complex() else x.unflatten(-1, (-1, 1)),
    "view of another dtype": lambda x: x.contiguous().view(torch.uint8),
    "detach": lambda x: torch.ops.aten.alias(x.detach()),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("call", CALLS)
def test_a_view_gives_what_torch_finds(call, layout):
    mesh, compared = mesh_of((2,)), []

    def spec(leaf):
        if not isinstance(leaf, torch.Tensor):
            return leaf
        meta = TensorMeta(leaf.shape, leaf.stride(), leaf.dtype)
        return DTensorSpec(mesh, (Replicate(),), meta)

    class Compare(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if op_schemas._is_view(op):
                schema = OpSchema(op, *tree_map(spec, (args, kwargs or {})))
                torchs = op_schemas.propagator()._propagate_tensor_meta_non_cached(schema)
                with plain():
                    ours = op_schemas.output_metas(schema)
                several = isinstance(torchs, (list, tuple)) and not isinstance(torchs, TensorMeta)
                assert ours == (list(torchs) if several else torchs), op
                compared.append(op)
            return op(*args, **(kwargs or {}))

    x = LAYOUTS[layout]()
    with Compare():
        CALLS[call](x)
    assert compared


def test_a_mode_of_the_program_does_not_see_it():
    seen = []

    class See(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            seen.append(op)
            return op(*args, **(kwargs or {}))

    meta = TensorMeta(torch.Size([4, 6]), (6, 1), torch.float32)
    given = DTensorSpec(mesh_of((2,)), (Replicate(),), meta)
    with See():
        found = op_schemas.output_metas(OpSchema(torch.ops.aten.t.default, (given,), {}))
    assert found == TensorMeta(torch.Size([6, 4]), (1, 6), torch.float32) and not seen


def test_rows_of_views_are_views():
    ops = [*filter(None, map(op_schemas.overload, VIEWS))]
    assert ops and all(map(op_schemas._is_view, ops))
