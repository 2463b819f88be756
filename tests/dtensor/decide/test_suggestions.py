"""What the error of a view suggests: as the command line does, and what leads to the fewest
collectives first.
"""

import pytest
from refusals import refuse, suggestions
from simulation import cuts_of, distribute, ranks_of
from torch import randn
from torch.distributed.tensor import Replicate, Shard
from torch.nn.functional import linear, scaled_dot_product_attention

import cute_sharding
from cute_sharding import sharding
from cute_sharding.relations.table import BY_OP
from cute_sharding.tools.checks import CollectiveCounter
from cute_sharding.tools.cli import explain


@pytest.mark.parametrize(
    ("shape", "target", "mesh", "cuts"),
    [
        ((4, 16, 32), (4, 16, 2, 16), (4,), ((2, 1),)),
        ((4, 16, 128), (4, 16, 2, 64), (2, 4), ((0, 1), (2, 1))),
        ((4, 16, 96), (4, 16, 3, 2, 16), (4,), ((2, 3),)),
        ((7, 4), (28,), (3,), ((0, 1),)),
        ((4, 8, 6), (4, 8, 2, 3), (2, 4), ((0, 1), (2, 1))),
    ],
)
@pytest.mark.one_in(1)
def test_the_command_line_suggests_what_the_error_does(shape, target, mesh, cuts):
    placements = [sharding.Replicate() if cut is None else sharding.Shard(*cut) for cut in cuts]
    view = BY_OP["Tensor.view"].view(shape, target)
    names = [f"mesh{m}" for m in range(len(mesh))]
    found = explain("view", view, names, mesh, tuple(placements))
    message = refuse(shape, target, mesh, cuts)
    theirs = [
        [sharding.Replicate() if cut is None else sharding.Shard(*cut) for cut in cuts_of(each)]
        for each in suggestions(message)
    ]
    assert [each["input"] for each in found["redistribute_to"]] == [
        list(map(str, each)) for each in theirs
    ]
    split = found["blocked_by"]["split"]
    assert (split is not None) == ("is no multiple of the" in message)
    assert split is None or split[1:] in message


def _collectives_of_attention(placements):
    """Of a layer with 4 heads of queries and 2 of keys on 4 devices, whose keys and values go to
    those placements before their view; None where it does not run.
    """
    batch, length, heads, keys, size = 4, 8, 4, 2, 4
    width = heads * size

    def weight(rows, cut):
        return distribute(randn(rows, width), (4,), [Shard(cut)]).requires_grad_()

    queries = weight(width, 0)
    shared, out = (weight(keys * size, 0), weight(keys * size, 0)), weight(width, 1)
    x = distribute(randn(batch, length, width), (4,), [Replicate()])
    calls = CollectiveCounter()
    try:
        with calls:
            q = linear(x, queries).view(batch, length, heads, size).transpose(1, 2)
            k, v = (
                linear(x, each)
                .redistribute(placements=placements)
                .view(batch, length, keys, size)
                .transpose(1, 2)
                .repeat_interleave(heads // keys, dim=1)
                for each in shared
            )
            y = scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous()
            linear(y.view(batch, length, width), out).sum().backward()
    except RuntimeError:
        return None
    return calls.count


def test_the_first_suggestion_leads_to_the_fewest_collectives():
    first, *others = suggestions(refuse((4, 8, 8), (4, 8, 2, 4), (4,), ((2, 1),)))
    with ranks_of((4,)), cute_sharding.enabled():
        least = _collectives_of_attention(first)
        found = [_collectives_of_attention(placements) for placements in others]
    assert least is not None
    assert all(count is None or least < count for count in found), (least, found)
