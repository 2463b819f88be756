"""Attention on any cut, with masks, which torch takes by keyword, and on devices that have no
heads, on which torch's kernel divides by zero.
"""

import random

import pytest
import torch
import torch.nn.functional as F
from drawing import draw_placements
from op_programs import assert_close, values
from simulation import distribute, plain, ranks_of
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import cute_sharding

MASKS = {
    "none": None,
    "for all": lambda b, h, s, t: (s, t),
    "for each head": lambda b, h, s, t: (1, h, s, t),
    "for each row": lambda b, h, s, t: (b, 1, s, t),
    "for each": lambda b, h, s, t: (b, h, s, t),
}


def attend(q, k, v, mask=None):
    """The result, and the gradients of queries, keys and values."""
    result = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return result, *torch.autograd.grad((result * result).sum(), (q, k, v))


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2), (2, 1, 2)], ids=str)
@pytest.mark.parametrize("kind", MASKS)
def test_on_any_cut(kind, mesh):
    rng = random.Random(f"attention {kind} {mesh}")
    for b, h in ((4, 2), (3, 1), (1, 5)):
        s, t, e = 3, 4, 2
        shapes = [(b, h, s, e), (b, h, t, e), (b, h, t, e)]
        if MASKS[kind] is not None:
            shapes.append(MASKS[kind](b, h, s, t))
        with plain():
            fulls = [values(*shape) for shape in shapes]
            expected = attend(*[x.requires_grad_(i < 3) for i, x in enumerate(fulls)])
        placements = [draw_placements(rng, mesh, shape) for shape in shapes]
        with ranks_of(mesh), cute_sharding.enabled():
            tensors = [
                distribute(full, mesh, p, requires_grad=i < 3)
                for i, (full, p) in enumerate(zip(fulls, placements))
            ]
            for got, wanted in zip(attend(*tensors), expected, strict=True):
                assert_close(got.detach(), wanted.detach(), f"{kind}, {b}, {h}: {placements}")


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(2), Shard(3)], ids=str)
def test_a_mask_is_brought_where_it_is_needed(placement):
    """Also where the same op ran before on a mask that had not to be moved."""
    shapes = [(4, 2, 4, 2)] * 3 + [(4, 2, 4, 4)]
    with plain():
        fulls = [values(*shape) for shape in shapes]
        expected = F.scaled_dot_product_attention(*fulls[:3], attn_mask=fulls[3])
    with ranks_of((2,)), cute_sharding.enabled():
        q, k, v = (distribute(full, (2,), [Shard(0)]) for full in fulls[:3])
        for before in (Shard(0), placement):
            mask = distribute(fulls[3], (2,), [before])
            with CommDebugMode() as communication:
                got = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            assert list(got.placements) == [Shard(0)]
            assert_close(got, expected, f"mask {before}")
        assert communication.get_total_counts() == (placement in (Shard(2), Shard(3)))
