"""Embeddings and ``gather`` of rows that are cut: each device gives its own, a sum is left pending,
which the next op that computes reduces, and whatever follows runs, forward and backward.
"""

import pytest
import torch
import torch.nn.functional as F
from op_programs import S, assert_close, compare, values
from readings import laid
from simulation import distribute, mesh_of, plain, ranks_of
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _MaskPartial

import cute_sharding

R = Replicate()
NUMBERS = torch.tensor([[3, 0, 8, 8], [5, 1, 7, 2]])
NEXT = {
    "itself": lambda y: y,
    "view": lambda y: y.view(8, 4),
    "slice": lambda y: y[:, 1:],
    "select": lambda y: y[:, -1],
    "linear": lambda y: F.linear(y, torch.ones_like(y[0])),
    "cat": lambda y: torch.cat([y, y], 1),
    "transpose": lambda y: y.transpose(1, 2) * 2,
    "unsqueeze": lambda y: y.unsqueeze(0),
    "rms norm": lambda y: F.rms_norm(y, (4,)),
    "layer norm": lambda y: F.layer_norm(y, (4,)),
    "twice": lambda y: y * y + y,
    "softmax": lambda y: y.softmax(-1),
    "mean": lambda y: y.mean(),
    "gathered": lambda y: (
        y.redistribute(placements=[R] * y.device_mesh.ndim) if hasattr(y, "device_mesh") else y
    ),
}
LAID = [
    ((2,), [Shard(0)], [R]),
    ((2,), [S(0)], [R]),
    ((4,), [Shard(0)], [R]),
    ((3,), [Shard(0)], [Shard(0)]),
    ((2, 2), [Shard(0), Shard(0)], [R, R]),
    ((2, 2), [S(0), Shard(0)], [R, R]),
    ((2, 2), [R, Shard(0)], [Shard(0), R]),
    ((2, 2), [Shard(1), Shard(0)], [R, R]),
    ((2, 2), [Shard(1), R], [Shard(0), R]),  # torch would cut the rows too, on the other mesh dim
    ((2, 2), [Shard(1), R], [Shard(1), R]),
]


@pytest.mark.parametrize(("mesh", "rows", "numbers"), LAID, ids=str)
def test_rows_that_are_scaled_to_a_largest_norm(mesh, rows, numbers):
    def scaled(w, i):
        table = w.detach().clone()
        return F.embedding(i, table, max_norm=0.7), table

    with plain():
        wanted = scaled(values(9, 4), NUMBERS)
    with ranks_of(mesh), cute_sharding.enabled():
        found = scaled(distribute(values(9, 4), mesh, rows), distribute(NUMBERS, mesh, numbers))
        for result, want in zip(found, wanted):
            assert_close(result, want, f"{mesh} {rows} {numbers}")


@pytest.mark.parametrize("flags", [{}, {"movement": True, "redistribution": True}], ids=str)
@pytest.mark.parametrize(("mesh", "rows", "numbers"), LAID, ids=str)
@pytest.mark.parametrize("following", NEXT)
def test_whatever_follows_an_embedding(following, mesh, rows, numbers, flags):
    go_on = NEXT[following]
    with ranks_of(mesh):
        compare(
            lambda w, i: go_on(F.embedding(i, w)),
            [values(9, 4), NUMBERS],
            mesh,
            [rows, numbers],
            following,
            **flags,
        )


@pytest.mark.parametrize(("mesh", "rows", "numbers"), LAID, ids=str)
@pytest.mark.parametrize(
    "program",
    [
        lambda w, i: F.embedding(i, w, padding_idx=8),
        lambda w, i: F.embedding(i, w) @ w.t(),
        lambda w, i: F.embedding(i, w) + F.embedding(i[:, :1], w),
        lambda w, i: w.gather(0, i.reshape(-1)[:4].reshape(1, 4)) * 2,
        lambda w, i: (w > 1).gather(0, i.reshape(-1)[:4].reshape(1, 4)).sum(),
        lambda w, i: F.embedding(i, w[1:] * 2.0) if 8 not in i else F.embedding(i - i // 8, w[1:]),
    ],
    ids=["padding", "tied", "two uses", "gather", "gather of flags", "of a slice"],
)
def test_programs(program, mesh, rows, numbers):
    with ranks_of(mesh):
        compare(program, [values(9, 4), NUMBERS], mesh, [rows, numbers], "program", movement=True)


@pytest.mark.parametrize("placement", [Shard(0), S(0)], ids=str)
def test_a_plain_sum_is_pending_and_nothing_is_gathered(placement):
    with ranks_of((2,)), cute_sharding.enabled():
        weight = distribute(values(9, 4), (2,), [placement])
        index = distribute(NUMBERS, (2,), [R])
        with CommDebugMode() as communicated:
            found = F.embedding(index, weight)
        assert [type(p) for p in found.placements] == [_MaskPartial], "as on torch alone"
        assert communicated.get_total_counts() == 0


@pytest.mark.one_in(1)
def test_rows_in_an_order_of_mesh_dims_are_gathered():
    full = values(9, 4)
    with ranks_of((4, 2)), cute_sharding.enabled():
        weight = laid(full)
        index = distribute(NUMBERS, (4, 2), [R, R])
        assert_close(F.embedding(index, weight), F.embedding(NUMBERS, full), "embedding")


def test_a_graph_for_any_sizes_picks_by_the_rows_there_are():
    """As rank 0, which has the first rows, alone."""
    embedded = torch.compile(
        lambda w, i: F.embedding(i, w) * 2, backend="aot_eager", fullgraph=True, dynamic=True
    )
    with cute_sharding.enabled():
        for rows in (9, 13, 6, 9):
            full = values(rows, 4)
            index = torch.tensor([0, rows - 1, rows // 2, 1, (rows + 1) // 2])
            weight = tensor_of_rank_0(full, [Shard(0)], full[: (rows + 1) // 2])
            found = embedded(weight, tensor_of_rank_0(index, [R], index))
            own = (index < (rows + 1) // 2)[:, None]
            assert torch.equal(found.to_local(), full[index] * 2 * own), rows


def tensor_of_rank_0(full, placements, local):
    return DTensor.from_local(
        local.clone(),
        mesh_of((2,)),
        placements,
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )


# What picks elements of a tensor of (6, 9) by indices.
PICKS = {
    "gather": lambda z, i: z.gather(-1, i),
    "gather of one": lambda z, i: z.gather(1, i[:, :1]),
    "gather over rows": lambda z, i: z.gather(0, i[:1] % 6),
    "take_along_dim": lambda z, i: torch.take_along_dim(z, i[:, :1], 1),
    "take_along_dim of all": lambda z, i: torch.take_along_dim(z, i[:, :2], -1),
    "index_select": lambda z, i: z.index_select(1, i[0]),
    "indexed": lambda z, i: z[i[0, :3] % 6],
    "indexed by two": lambda z, i: z[i[:, 0] % 6, i[:, 1]],
    "take": lambda z, i: z.detach().take(i) + z[:, :3],
    "embedding": lambda z, i: F.embedding(i % 6, z),
    "scatter": lambda z, i: z.scatter(1, i, 2.0),
    "scatter_add": lambda z, i: z.scatter_add(1, i, z[:, :3]),
    "index_add": lambda z, i: z.index_add(0, i[0] % 6, z[:3]),
    "index_fill": lambda z, i: z.index_fill(0, i[0] % 6, 2.0),
    "index_put": lambda z, i: z.index_put((i[0] % 6,), z[:3], accumulate=True),
    "masked_fill": lambda z, i: z.masked_fill(z.detach() > 0, 2.0),
}
AFTER_PICKS = {
    "squeezed": lambda y: y.squeeze(-1) * 1,
    "flat": lambda y: y.reshape(-1) + 1,
    "turned": lambda y: y.transpose(0, -1).unsqueeze(0) * 2,
    "sum": lambda y: y.sum(0),
    "a slice": lambda y: y[1:].exp(),
}
# What makes a tensor of (6, 9) of which something is pending, of (6, 8) and (9, 8).
PENDING = {
    "sum": lambda a, b: a @ b.t(),
    "avg": lambda a, b: (a[:, None] * b).mean(2),
    "max": lambda a, b: (a[:, None] * b).amax(2),
}


@pytest.mark.parametrize("mesh", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("pending", PENDING)
@pytest.mark.parametrize("pick", PICKS)
def test_elements_that_are_picked_of_what_is_pending(pick, pending, mesh):
    """And what follows: of each pick something else, in turn."""
    make, picked = PENDING[pending], PICKS[pick]
    index = torch.arange(18).reshape(6, 3) * 5 % 9
    first = [*PICKS].index(pick) + [*PENDING].index(pending)
    following = [*AFTER_PICKS][first % len(AFTER_PICKS)]
    if following == "squeezed" and picked(values(6, 9), index).shape[-1] != 1:
        following = "flat"
    with ranks_of(mesh):
        compare(
            lambda a, b, i: AFTER_PICKS[following](picked(make(a, b), i)),
            [values(6, 8), values(9, 8), index],
            mesh,
            [[Shard(1), R][: len(mesh)], [Shard(1), R][: len(mesh)], [R] * len(mesh)],
            following,
            movement=True,
        )


@pytest.mark.parametrize("ops", [True, False])
@pytest.mark.parametrize("mesh", [(4,), (2, 2)], ids=str)
def test_a_picked_element_of_each_pending_row_is_no_longer_masked(mesh, ops):
    index = torch.arange(6)[:, None]
    with ranks_of(mesh):
        for view in (
            lambda y: y.squeeze(-1) * 1,
            lambda y: y.t() + 1,
            lambda y: y.view(2, 3).exp(),
        ):
            compare(
                lambda a, b, i: view((a @ b.t()).gather(-1, i)),
                [values(6, 8), values(9, 8), index],
                mesh,
                [[Shard(1)] * len(mesh), [Shard(1)] * len(mesh), [R] * len(mesh)],
                f"{mesh} {ops}",
                ops=ops,
            )
