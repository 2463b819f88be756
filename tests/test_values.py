"""Values are what frozen dataclasses are."""

import copy
import dataclasses
import inspect
import pickle
from typing import ClassVar

import pytest

from cute_sharding import _values

HOW = {"dataclasses": dataclasses.dataclass, "values": _values.dataclass}


def kinds(dataclass):
    @dataclass(frozen=True)
    class Point:
        """At a place."""

        x: int
        y: tuple[int, ...] = ()
        seen: list[int] = dataclasses.field(default_factory=list, compare=False)
        name: str = dataclasses.field(default="", kw_only=True)
        hidden: int = dataclasses.field(default=0, repr=False)
        count: ClassVar[int] = 3

        def __post_init__(self):
            object.__setattr__(self, "y", tuple(self.y))

    @dataclass(frozen=True)
    class Marked(Point):
        mark: str = "o"

        def __repr__(self):
            return f"marked {self.x}"

        def __eq__(self, other):
            return isinstance(other, Point) and other.x == self.x

    @dataclass(frozen=True, eq=False)
    class Itself:
        x: int

    @dataclass(frozen=True)
    class Nothing:
        pass

    return Point, Marked, Itself, Nothing


@pytest.mark.parametrize("how", HOW)
def test_values_are_made_compared_and_shown(how):
    point, marked, itself, nothing = kinds(HOW[how])
    one, other = point(1, [2, 3]), point(x=1, y=(2, 3), seen=[4], name="")
    assert one == other and hash(one) == hash(other) and one != point(1, (2, 3), name="a")
    assert one != (1, (2, 3)) and one.seen is not point(1).seen
    assert repr(one).endswith("Point(x=1, y=(2, 3), seen=[], name='')")
    assert repr(marked(5)) == "marked 5" and marked(5) == marked(5, mark="x")
    assert isinstance(hash(marked(5)), int)
    assert itself(1) != itself(1) and nothing() == nothing() and hash(nothing()) == hash(())
    assert point.__match_args__ == ("x", "y", "seen", "hidden") and point.count == 3
    assert [field.name for field in dataclasses.fields(marked)] == [
        *("x", "y", "seen", "name", "hidden", "mark")
    ]
    assert list(inspect.signature(point).parameters) == ["x", "y", "seen", "hidden", "name"]
    assert dataclasses.replace(one, x=7) == point(7, (2, 3))
    assert dataclasses.asdict(itself(4)) == {"x": 4} and copy.deepcopy(one) == one


@pytest.mark.parametrize("how", HOW)
def test_values_stay_as_they_are(how):
    point, _, _, nothing = kinds(HOW[how])
    for value, name in ((point(1), "x"), (point(1), "other"), (nothing(), "x")):
        with pytest.raises(dataclasses.FrozenInstanceError, match=f"'{name}'"):
            setattr(value, name, 2)
    with pytest.raises(dataclasses.FrozenInstanceError, match="'x'"):
        del point(1).x
    with pytest.raises(TypeError, match=r"Point.__init__\(\) missing 1 required .* 'x'"):
        point()
    with pytest.raises(TypeError, match=r"Point.__init__\(\) takes from 2 to 5 positional"):
        point(1, (), [], 0, "name")


@_values.dataclass(frozen=True)
class Kept:
    x: int
    y: str = "y"


def test_values_are_pickled():
    assert pickle.loads(pickle.dumps(Kept(3))) == Kept(3)
