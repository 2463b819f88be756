"""Placements from text whose dims count from the end."""

import pytest

from cute_sharding.sharding import Shard, parse_placements


def test_dims_that_count_from_the_end_are_read():
    assert parse_placements("S(-1), _S(-3,2)", ndim=3) == (Shard(2), Shard(0, 2))


@pytest.mark.parametrize(
    ("ndim", "said"), [(2, "2 dims"), (None, "an unknown number"), (0, "0 dims")]
)
def test_there_are_not_so_many(ndim, said):
    with pytest.raises(ValueError, match=rf"S\(-3\).*from the last dim, but the tensor has {said}"):
        parse_placements("S(-3)", ndim=ndim)
