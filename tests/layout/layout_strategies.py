"""Small random layouts and tiles for Hypothesis."""

from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st

from cute_sharding.layout import Layout, LayoutError

SETTINGS = settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@st.composite
def leaves(draw, most=3, negative=False, empty=False):
    """Half the time any sizes and strides, half the time sizes stacked up with gaps: then inverses
    and complements exist.
    """
    count = draw(st.integers(1, most))
    sizes = draw(
        st.lists(
            st.sampled_from([0, 1, 2, 3, 4] if empty else [1, 2, 2, 3, 4, 6]),
            min_size=count,
            max_size=count,
        )
    )
    if draw(st.booleans()):
        strides = draw(
            st.lists(st.integers(-4 if negative else 0, 12), min_size=count, max_size=count)
        )
        return list(zip(sizes, strides))
    out, current = [], 1
    for n in sizes:
        current *= draw(st.sampled_from([1, 1, 2, 3]))
        out.append((n, current))
        current *= max(n, 1)
    return draw(st.permutations(out))


@st.composite
def layouts(draw, **kwargs):
    items = draw(leaves(**kwargs))
    if len(items) == 1 and draw(st.booleans()):
        return Layout(*items[0])
    parts = [items[0]]
    for item in items[1:]:
        parts = [*parts, item] if draw(st.booleans()) else [*parts[:-1], _pair(parts[-1], item)]
    return Layout(tuple(p[0] for p in parts), tuple(p[1] for p in parts))


def _pair(a, b):
    return (a[0], b[0]), (a[1], b[1])


@st.composite
def tiles(draw):
    return (
        draw(layouts(most=2))
        if draw(st.booleans())
        else Layout(draw(st.integers(1, 6)), draw(st.integers(1, 4)))
    )


def answer(operation, *args):
    """The result; an example without one is no example of the post-condition."""
    try:
        return operation(*args)
    except LayoutError:
        assume(False)
