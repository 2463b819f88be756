"""The pattern language: what a signature says of an op's dims."""

import pytest

from cute_sharding.relations.signature import Reads, parse


@pytest.mark.parametrize(
    ("pattern", "ndims", "text"),
    [
        ("m k, k n -> m n", (2, 2), "m k, k n -> m n"),
        ("... d, ... d -> ...", (3, 2), "...2 ...1 d, ...1 d -> ...2 ...1"),
        ("d0 [d1] -> d0 [d1]", (2,), "d0 [d1] -> d0 [d1]"),
        (
            "n c [...], o c [...] -> n o [...]",
            (4, 4),
            "n c [...2] [...1], o c [...2] [...1] -> n o [...2] [...1]",
        ),
        ("+n, m k, k n -> m n", (1, 2, 2), "+n, m k, k n -> m n"),
        ("+, k, k ->", (0, 1, 1), "+, k, k -> "),
        ("a [b] -> a 1", (2,), "a [b] -> a 1"),
        ("a b, _ -> a b", (2, 3), "a b, _ -> a b"),
    ],
)
def test_patterns_as_they_are_read(pattern, ndims, text):
    assert str(parse(pattern, ndims)) == text


def test_a_list_of_results_is_alike():
    assert parse("a [b] -> a [c]", (2,), 3).results == (("a", "c"),) * 3


@pytest.mark.parametrize(
    ("pattern", "ndims", "message"),
    [
        ("m k, k n", (2, 2), "has no ->"),
        ("m k, k n -> m n", (2,), "has 2 operands, but the number of given operands is 1"),
        ("m k -> m", (3,), "an operand of 3 dims does not fit the dim names 'm k'"),
        ("m k ... -> m", (1,), "an operand of 1 dim does not fit the dim names 'm k ...'"),
    ],
)
def test_what_does_not_fit_is_refused(pattern, ndims, message):
    with pytest.raises(ValueError, match=message):
        parse(pattern, ndims)


def test_dims_of_size_one_beside_longer_ones_are_broadcast():
    assert parse("... , ... -> ...", (2, 2)).fitted([(4, 1), (1, 6)]).operands == (
        ("...2", "1"),
        ("1", "...1"),
    )
    assert parse("... , ... -> ...", (2, 2)).fitted([(4, 1), (1, 1)]).operands == (
        ("...2", "...1"),
        ("1", "...1"),
    )


def test_a_name_of_dims_of_several_sizes_is_whole():
    """Also where one of them is 1: an index of one row is not repeated."""
    assert parse("a [v], a k -> a k", (2, 2)).fitted([(4, 3), (1, 5)]).whole == {"v", "a"}
    assert parse("+a b, a k, k b -> a b", (2, 2, 2)).fitted([(1, 3), (4, 5), (5, 3)]).operands[
        0
    ] == ("1", "b")
    assert parse("a [v], a k -> a k", (2, 2)).fitted([(4, 3), (2, 5)]).whole == {"v", "a"}


def test_operands_of_other_dims_are_refused():
    with pytest.raises(ValueError, match="do not fit the signature m k, k n -> m n"):
        parse("m k, k n -> m n", (2, 2)).sizes([(4, 3), (2,)])


def test_results_are_what_the_operands_come_to():
    gather = parse("a [v], a k -> a k", (2, 2))
    assert gather.gives([(4, 3), (4, 5)], [(4, 5)]) and gather.gives([(4, 3), (1, 5)], [(1, 5)])
    assert (
        not gather.gives([(4, 3), (4, 5)], [(3, 5)])
        and not gather.gives([(4, 3), (4, 5)], [(4,)])
        and not gather.gives([(4, 3), (4, 5)], [])
    )


def test_rows_of_whole_windows():
    """A dim of several rows for each row of its name: sizes are those of the name."""
    patches = parse("n c y*4, o c [k] -> n o y", (3, 3))
    assert str(patches) == "n c y*4, o c [k] -> n o y"
    assert parse(str(patches), (3, 3)) == patches
    assert patches.in_halos == {"y": [Reads(4, 4)]}
    assert patches.sizes([(1, 3, 8), (6, 3, 4)])["y"] == 2
    assert patches.gives([(1, 3, 8), (6, 3, 4)], [(1, 6, 2)])
    assert not patches.gives([(1, 3, 8), (6, 3, 4)], [(1, 6, 3)])
