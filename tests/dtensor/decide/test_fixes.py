"""Each row of fixes/table.py: torch is wrong there on stock, on the releases that the row names,
and right with us. Where a release is right on stock, its row can go.
"""

import pytest
import torch
import torch.nn.functional as F
from op_programs import compare_on_torchs, solved_with, values
from simulation import ranks_of
from torch.distributed.tensor import Replicate, Shard

import cute_sharding
from cute_sharding.dtensor.bookkeeping.versions import release
from cute_sharding.dtensor.fixes.table import TABLE

R, S = Replicate(), Shard
aten = torch.ops.aten


def mean_of(loss):
    return lambda x, y: loss(x, y.detach())


# Where the largest of each cube of a tensor of (2, 4, 4, 4) are.
PLACES = torch.tensor([[[[0, 2], [8, 10]], [[32, 34], [40, 42]]]] * 2)

# By the first op of a row: (program, its tensors, their placements, devices of each mesh dim).
SHOWN = {
    "index_put.default": (
        lambda x: x.detach().index_put((x.detach() > 0,), x.detach().sum() * 0),
        [values(7, 4)],
        [[S(1)]],
        (2,),
    ),
    "gather.default": (
        lambda x, i: x.gather(0, i),
        [values(7, 6), torch.tensor([[0, 1, 2, 3], [4, 5, 6, 0]])],
        [[S(1)], [R]],
        (2,),
    ),
    "convolution.default": (F.conv1d, [values(2, 2, 5), values(4, 2, 3)], [[R], [S(0)]], (2,)),
    "_local_scalar_dense.default": (
        lambda x: x * 0 + (x.sum(0)[0]).item(),
        [values(4, 3)],
        [[S(0)]],
        (2,),
    ),
    "equal.default": (
        lambda x, y: x * 0 + float(torch.equal(x, y)),
        [torch.ones(2, 3), torch.ones(1, 3)],
        [[S(0)], [R]],
        (2,),
    ),
    "linalg_vector_norm.default": [
        (
            lambda x: torch.linalg.vector_norm(x.detach(), float("inf")),
            [values(2, 3)],
            [[S(0)]],
            (4,),
        ),
        (lambda x: torch.linalg.vector_norm(x, dim=[]), [values(4, 6)], [[S(0)]], (2,)),
    ],
    "native_group_norm_backward.default": (
        lambda x: F.group_norm(x, 2),
        [values(4, 4, 3)],
        [[S(0)]],
        (2,),
    ),
    "_scaled_dot_product_flash_attention.default": None,  # an accelerator's
    "soft_margin_loss_backward.default": (
        mean_of(lambda x, y: F.soft_margin_loss(x, y.sign())),
        [values(4, 6), values(4, 6)],
        [[S(0)], [S(0)]],
        (2,),
    ),
    "mse_loss_backward.default": [
        (mean_of(F.mse_loss), [values(0, 6), values(0, 6)], [[S(1)], [S(1)]], (2,)),
        (mean_of(F.mse_loss), [values(4, 6), values(4, 6) + 1], [[S(0)], [S(0)]], (2,)),
    ],
    "sum.dim_IntList": (lambda x: torch.sum(x, dim=[]), [values(4, 6)], [[S(0)]], (2,)),
    "any.default": (
        lambda x: (x.detach() > -1).any(0).sum(),
        [values(4, 6)],
        [[S(0)]],
        (2,),
    ),
    "nansum.default": (
        lambda x: x.detach().sum(0).sum(dtype=torch.int64),
        [torch.full((2, 1), 0.5)],
        [[S(0)]],
        (2,),
    ),
    "embedding.default": (
        lambda w, i: F.embedding(i, w).view(8, 4),
        [values(9, 4), torch.tensor([[3, 0, 8, 8], [5, 1, 7, 2]])],
        [[S(0)], [R]],
        (2,),
    ),
    "embedding_dense_backward.default": (
        lambda w, i: F.embedding(i, w, scale_grad_by_freq=True),
        [values(7, 4), torch.tensor([[3, 3, 1, 0], [3, 1, 5, 5]])],
        [[R], [S(0)]],
        (2,),
    ),
    "histc.default": (
        lambda x: x.detach().histc(3, 1.0, 1.0),
        [torch.tensor([-2.0, -1, 0, 1, 2, 3, 4, 8])],
        [[S(0)]],
        (2,),
    ),
    "eye.m_out": (
        lambda x: torch.eye(4, 4, out=torch.zeros_like(x.detach())) * 2,
        [values(4, 4)],
        [[S(0)]],
        (2,),
    ),
    "_to_copy.default": (
        lambda x: x.detach().sum(0).to(torch.bfloat16).double(),
        [torch.tensor([[256.5], [1.0]])],
        [[S(0)]],
        (2,),
    ),
    "logsumexp.default": (
        lambda x: x.logsumexp(0, keepdim=True) + x * 0,
        [values(3, 4, 6)],
        [[S(1)]],
        (2,),
    ),
    "_adaptive_avg_pool2d_backward.default": (
        lambda g, x: aten._adaptive_avg_pool2d_backward(g.detach(), x.detach()),
        [values(2, 3, 2), values(2, 6, 5)],
        [[S(1)], [R]],
        (2,),
    ),
    "max_unpool3d.default": (
        lambda x, i: aten.max_unpool3d(x.detach(), i, [4, 4, 4], [2, 2, 2], [0, 0, 0]),
        [values(2, 2, 2, 2), PLACES],
        [[S(1)], [R]],
        (2,),
    ),
    "cumsum.default": (lambda x: x.cumsum(-1), [values(4, 6)], [[S(1)]], (2,)),
    "slice_backward.default": (
        lambda x: aten.select_backward(x.detach(), [4, 6, 3], -1, 0),
        [values(4, 6)],
        [[S(1)]],
        (2,),
    ),
    "addmv.default": (torch.addmv, [values(), values(5, 10), values(10)], [[R], [S(0)], [R]], (4,)),
    "linalg_ldl_solve.default": (
        lambda a, b: torch.linalg.solve(a.detach(), b.detach()),
        [values(4, 3, 3) + 3 * torch.eye(3), values(3, 5)],
        [[S(0)], [R]],
        (2,),
    ),
    "linalg_solve_triangular.default": (
        solved_with(),
        [values(4, 3, 3), values(4, 3, 6)],
        [[R], [S(0)]],
        (2,),
    ),
    "nll_loss_forward.default": (
        lambda x, i: F.cross_entropy(x, i),
        [values(9, 3), torch.tensor([-100, -100, -100, -100, 1, 2, 0, 0, 2])],
        [[S(0)], [S(0)]],
        (2,),
    ),
    "max.default": (lambda x: x.detach().max(), [values(2, 3)], [[S(0)]], (4,)),
    # Of uneven blocks.
    "mse_loss.default": (
        lambda x, y: F.mse_loss(x.detach(), y.detach()),
        [values(5, 6), values(5, 6) + 1],
        [[S(0)], [S(0)]],
        (4,),
    ),
}


def drawn(x):
    torch.manual_seed(0)
    return torch.rand_like(x.detach())


def cases():
    taken = {}
    for at, fix in enumerate(TABLE):
        name = fix.ops[0] if fix.ops else "drawn"
        shown = (drawn, [values(5, 3)], [[S(0)]], (2,)) if not fix.ops else SHOWN.get(name)
        if isinstance(shown, list):
            shown = shown[taken.setdefault(name, 0)]
            taken[name] += 1
        yield pytest.param(fix, shown, id=f"{at} {name}")


def is_right(program, tensors, placements, mesh):
    with ranks_of(mesh):
        try:
            compare_on_torchs(program, tensors, mesh, placements, "shown")
        except Exception:
            return False
        return True


@pytest.mark.one_in(1)
@pytest.mark.parametrize("fix, shown", cases())
def test_torch_is_wrong_there_and_we_are_right(fix, shown):
    if shown is None:
        pytest.skip("the op is an accelerator's")
    on_stock = is_right(*shown)
    with cute_sharding.enabled(), ranks_of(shown[3]):
        compare_on_torchs(shown[0], shown[1], shown[3], shown[2], fix.what)
    running = "{}.{}".format(*release())
    assert on_stock == (running not in fix.releases), (
        f"torch {running} is {'right' if on_stock else 'wrong'} on stock"
    )


def test_every_row_says_what_ends_it():
    for fix in TABLE:
        assert fix.what.endswith(".") and fix.until and set(fix.releases)
