"""Attention on any cut, with masks, which torch takes by keyword, and on devices that have no
heads, on which torch's kernel divides by zero.
"""

import random
from functools import partial
from math import prod

import pytest
import torch
import torch.nn.functional as F
from drawing import draw_placements
from op_programs import assert_close, values
from simulation import distribute, plain, ranks_of
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

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


# -- the kernels of accelerators, which a stand-in computes here -----------------------------------

LOAD = 16  # bytes that the memory-efficient kernel loads at a time


def scores(q, k, bias, causal, scale):
    found = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        found = found.masked_fill(torch.ones(found.shape[-2:]).triu(1).bool(), -torch.inf)
    return found if bias is None else found + bias


def attended(q, k, v, bias=None, causal=False, scale=None):
    """The result and its statistics; several heads of queries may share one of keys."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    found = scores(q, k, bias, causal, scale)
    return found.softmax(-1) @ v, found.logsumexp(-1)


def gradients(g, q, k, v, bias, causal, scale, o, s):
    """Of queries, keys, values and the mask: by hand, as ops run below autograd, and as kernels
    compute them: from the result and the logarithm.
    """
    groups = k.shape[1], q.shape[1] // k.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    wide_k, wide_v = (x.repeat_interleave(groups[1], 1) for x in (k, v))
    p = (scores(q, wide_k, bias, causal, scale) - s[:, :, : q.shape[2]].unsqueeze(-1)).exp()
    of_scores = p * (g @ wide_v.mT - (g * o).sum(-1, keepdim=True))
    of_keys, of_values = (
        x.unflatten(1, groups).sum(2) for x in (of_scores.mT @ q * scale, p.mT @ g)
    )
    return of_scores @ wide_k * scale, of_keys, of_values, None if bias is None else of_scores


def check_alignment(bias):
    step = LOAD // bias.element_size()
    if any(stride % step for stride in bias.stride()[:-1]):
        raise RuntimeError(f"attn_bias is not correctly aligned: {bias.stride()}")


def seeds():
    return torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)


def flash(q, k, v, dropout_p=0.0, causal=False, debug=False, *, scale=None):
    result, statistics = attended(q, k, v, None, causal, scale)
    lengths = q.shape[2], k.shape[2]
    return result, statistics, None, None, *lengths, *seeds(), torch.empty(0)


def flash_backward(g, q, k, v, o, s, cq, ck, mq, mk, p, causal, seed, offset, *, scale=None):
    return tuple(gradients(g, q, k, v, None, causal, scale, o, s)[:3])


def efficient(q, k, v, bias, wanted, dropout_p=0.0, causal=False, *, scale=None):
    if bias is not None:
        check_alignment(bias)
    result, statistics = attended(q, k, v, bias, causal, scale)
    return result, F.pad(statistics, (0, -q.shape[2] % 32)), *[x.sum() for x in seeds()]


def efficient_backward(
    g, q, k, v, bias, o, s, seed, offset, p, wanted, causal=False, *, scale=None
):
    if bias is not None:
        check_alignment(bias)
    return tuple(gradients(g, q, k, v, bias, causal, scale, o, s))


def cudnn(q, k, v, bias, wanted, dropout_p=0.0, causal=False, debug=False, *, scale=None):
    result, statistics = attended(q, k, v, bias, causal, scale)
    lengths, states = (q.shape[2], k.shape[2]), [x.sum() for x in seeds()]
    return result, statistics.unsqueeze(-1), None, None, *lengths, *states, None


def cudnn_backward(g, q, k, v, o, s, seed, offset, bias, cq, ck, mq, mk, p, causal, *, scale=None):
    return tuple(gradients(g, q, k, v, bias, causal, scale, o, s.squeeze(-1))[:3])


@pytest.fixture(scope="module")
def kernels():
    library = torch.library.Library("aten", "IMPL")
    for name, forward, backward in (
        ("flash", flash, flash_backward),
        ("efficient", efficient, efficient_backward),
        ("cudnn", cudnn, cudnn_backward),
    ):
        library.impl(f"_scaled_dot_product_{name}_attention", forward, "CPU")
        library.impl(f"_scaled_dot_product_{name}_attention_backward", backward, "CPU")
    yield torch.ops.aten
    library._destroy()


def kernel_of(aten, kind, causal):
    if kind == "flash":
        return lambda q, k, v: aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[0]
    op = getattr(aten, f"_scaled_dot_product_{kind}_attention")
    return lambda q, k, v, bias=None: op(q, k, v, bias, True, 0.0, causal)[0]


def pending(placements, mesh):
    """Of how many parts of it a tensor is the sum."""
    return prod(n for n, p in zip(mesh, placements) if p.is_partial())


def with_dropout(aten, kind, dropout, q, k, v):
    op = getattr(aten, f"_scaled_dot_product_{kind}_attention")
    return op(q, k, v, *([] if kind == "flash" else [None, True]), dropout)[0]


def compare_kernels(kernel, shapes, placements, mesh, differ=4):
    """The results and the gradients of all but what is behind ``differ``."""

    def run(tensors):
        result = kernel(*tensors)
        return result, *torch.autograd.grad((result * result).sum(), tensors[:differ])

    with plain():
        fulls = [values(*shape).requires_grad_(i < differ) for i, shape in enumerate(shapes)]
        alone = [F.pad(x, (0, 3))[..., :5] if x.shape[-1] == 5 else x for x in fulls]
        result = kernel(*alone)  # of a mask as torch prepares it on one device
        expected = result, *torch.autograd.grad((result * result).sum(), fulls[:differ])
    with ranks_of(mesh), cute_sharding.enabled():
        cute_sharding.stats(reset=True)
        tensors = [
            distribute(full.detach() / pending(p, mesh), mesh, p, requires_grad=i < differ)
            for i, (full, p) in enumerate(zip(fulls, placements))
        ]
        for got, wanted in zip(run(tensors), expected, strict=True):
            assert_close(got.detach(), wanted.detach(), f"{shapes}: {placements}")
        return cute_sharding.stats()


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize(
    "kind, bias",
    [
        ("flash", False),
        ("efficient", False),
        ("efficient", True),
        ("cudnn", False),
        ("cudnn", True),
    ],
)
def test_kernels_of_accelerators_on_any_cut(kernels, kind, bias, mesh):
    rng = random.Random(f"{kind} {bias} {mesh}")
    kernel = kernel_of(kernels, kind, causal=not bias)
    for b, h in ((4, 2), (3, 4), (1, 5)):
        s, t, e = 3, 5, 8
        shapes = [(b, h, s, e), (b, h, t, e), (b, h, t, e), *[(b, h, s, t)] * bias]
        for _ in range(2):
            placements = [draw_placements(rng, mesh, shape) for shape in shapes]
            # cuDNN gives no gradient of a mask
            compare_kernels(kernel, shapes, placements, mesh, differ=3 if kind == "cudnn" else 4)


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
def test_kernels_of_accelerators_gather_no_strided_heads(kernels, kind):
    """As views of fused projections leave them: what torch would gather for."""
    shapes, heads = [(2, 8, 3, 8)] * 3, [_StridedShard(1, split_factor=2)]
    kernel = kernel_of(kernels, kind, causal=True)
    with CommDebugMode() as communication:
        found = compare_kernels(kernel, shapes, [heads] * 3, (2,))
    for name in (f"_scaled_dot_product_{kind}_attention{of}.default" for of in ("", "_backward")):
        assert found[name]["signature"] == 1 and not found[name]["gate"]
    assert communication.get_total_counts() <= 4, "what is compared is made whole, nothing else"


KINDS_OF_CUT = {"R": Replicate(), "P": Partial(), **{f"S{d}": Shard(d) for d in range(4)}}


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
@pytest.mark.parametrize("cuts", ["P S0 S2", "S0 P S2", "S1 P S0", "P R R", "R R S1", "P P P"])
def test_no_device_is_left_without_heads(kernels, kind, cuts):
    """Of 4 heads over 3 devices two each are for the first two; kernels divide by their number."""
    kernel, shapes = kernel_of(kernels, kind, causal=False), [(3, 4, 2, 8)] * 3
    for dropout in (0.0, 1e-9):  # which the signatures do not answer, and the stand-ins do not do
        compare_kernels(
            partial(with_dropout, kernels, kind, dropout) if dropout else kernel,
            shapes,
            [[KINDS_OF_CUT[cut]] for cut in cuts.split()],
            (3,),
        )


def test_a_pending_gradient_leaves_heads_with_their_keys(kernels):
    """As of ``result @ w`` where rows of ``w`` are cut."""

    def run(q, k, v, w):
        result = kernels._scaled_dot_product_flash_attention(q, k, v)[0] @ w
        return result

    shapes = [(2, 12, 3, 8), (2, 3, 4, 8), (2, 3, 4, 8), (8, 6)]
    placements = [[Replicate()]] * 3 + [[Shard(1)]]
    compare_kernels(run, shapes, placements, (2,))


@pytest.mark.parametrize("kind", ["flash", "cudnn"])
@pytest.mark.parametrize("heads", [(6, 3), (12, 3), (8, 2)], ids=str)
def test_heads_stay_with_the_keys_that_they_share(kernels, kind, heads):
    """Of 3 heads of keys over 2 devices the first has 2, and half of the queries want 1.5."""
    h, g = heads
    shapes = [(2, h, 3, 8), (2, g, 4, 8), (2, g, 4, 8)]
    kernel = kernel_of(kernels, kind, causal=False)
    for p in ([Shard(1)], [_StridedShard(1, split_factor=2)], [Shard(0)]):
        compare_kernels(kernel, shapes, [p] * 3, (2,))
    # Torch would cut heads by itself, to have all cut alike or to finish what is pending.
    for cuts in ("S2 S2 S1", "R R S1", "P R R", "R R P", "S0 S1 P", "P S0 S2", "S0 S1 S1"):
        compare_kernels(kernel, shapes, [[KINDS_OF_CUT[cut]] for cut in cuts.split()], (2,))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("cuts", ["S2 S2 S2", "R S2 S2", "S2 R R", "S2 S2 R"])
@pytest.mark.parametrize("rows", [12, 7, 2])
def test_the_flash_kernel_attends_in_shards_of_a_sequence(kernels, cuts, causal, rows):
    """By blocks whose causal ones are squares, as newer kernels align others at their ends."""
    shapes = [(1, 2, rows, 8), (1, 1, rows, 8), (1, 1, rows, 8)]
    compare_kernels(
        kernel_of(kernels, "flash", causal),
        shapes,
        [[KINDS_OF_CUT[cut]] for cut in cuts.split()],
        (3,),
    )
