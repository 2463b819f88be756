"""What a terminal shows: wide, narrow, with colour and without."""

import io

import pytest
from expecttest import TestCase

from cute_sharding import draw
from cute_sharding.layout import Layout, LayoutError, symbol
from cute_sharding.sharding import Partial, Replicate, Shard, Sharding, parse_placements


def sharding(shape, mesh, placements):
    return Sharding(shape, mesh, parse_placements(placements))


FLATTEN = draw(sharding((2, 6), (2,), "S(1)"), view=(12,), names=("tp",))


class TestText(TestCase):
    maxDiff = None

    def test_two_mesh_dims_and_uneven_shards(self):
        picture = draw(sharding((3, 7), (2, 3), "S(0),S(1)"), names=("dp", "tp"))
        self.assertExpectedInline(
            picture.text(),
            """\
(3, 7): [S(0), S(1)] on mesh (dp=2, tp=3) of ranks 0 to 5

down: dim 0 (3), on dp
across: dim 1 (7), on tp
   0  1  2  3  4  5  6
0  0  0  0  1  1  1  2
1  0  0  0  1  1  1  2
2  3  3  3  4  4  4  5

 0  rank 0 (dp=0, tp=0): holds (2, 3)
 1  rank 1 (dp=0, tp=1): holds (2, 3)
 2  rank 2 (dp=0, tp=2): holds (2, 1)
 3  rank 3 (dp=1, tp=0): holds (1, 3)
 4  rank 4 (dp=1, tp=1): holds (1, 3)
 5  rank 5 (dp=1, tp=2): holds (1, 1)""",
        )

    def test_a_view_on_a_wide_terminal(self):
        self.assertExpectedInline(
            FLATTEN.text(100),
            """\
view(12,) of (2, 6): [S(1)] on mesh (tp=2) of ranks 0, 1

before: (2, 6) as [S(1)]    after: (12,) as [_S(0,2)]

down: dim 0 (2)             dim 0 (12), on tp in 2 pieces
across: dim 1 (6), on tp      0   1   2   3   4   5   6   7   8   9   10  11
   0  1  2  3  4  5           0   0   0   1   1   1   0   0   0   1   1   1
0  0  0  0  1  1  1
1  0  0  0  1  1  1            mode         whose  placed
                            *  2:3          tp     dim 0
   mode  whose  placed      *  (2,3):(6,1)  local  dim 0
*  2:3   tp     dim 1
*  2:6   local  dim 0
*  3:1   local  dim 1

 0  rank 0 (tp=0): holds (2, 3), then (6,)
 1  rank 1 (tp=1): holds (2, 3), then (6,)

free: no element moves between ranks
* marks the modes that moved: another dim, or another stride""",
        )

    def test_a_view_on_a_narrow_terminal(self):
        self.assertExpectedInline(
            FLATTEN.text(40),
            """\
view(12,) of (2, 6): [S(1)] on mesh
(tp=2) of ranks 0, 1

before: (2, 6) as [S(1)]

down: dim 0 (2)
across: dim 1 (6), on tp
   0  1  2  3  4  5
0  0  0  0  1  1  1
1  0  0  0  1  1  1

   mode  whose  placed
*  2:3   tp     dim 1
*  2:6   local  dim 0
*  3:1   local  dim 1

after: (12,) as [_S(0,2)]

dim 0 (12), on tp in 2 pieces
  0   1   2   3   4   5   6   11
  0   0   0   1   1   1   0   1
columns 7 to 10 are not shown: the
terminal is 40 wide

   mode         whose  placed
*  2:3          tp     dim 0
*  (2,3):(6,1)  local  dim 0

 0  rank 0 (tp=0): holds (2, 3), then
    (6,)
 1  rank 1 (tp=1): holds (2, 3), then
    (6,)

free: no element moves between ranks
* marks the modes that moved: another
dim, or another stride""",
        )

    def test_a_view_that_is_not_free(self):
        picture = draw(sharding((2, 8), (4,), "S(1)"), view=(2, 2, 4), names=("tp",))
        self.assertExpectedInline(
            picture.text(),
            """\
view(2, 2, 4) of (2, 8): [S(1)] on mesh (tp=4) of ranks 0 to 3

before: (2, 8) as [S(1)]      after: (2, 2, 4)

down: dim 0 (2)               [0, :, :]            [1, :, :]
across: dim 1 (8), on tp      down: dim 1 (2)      down: dim 1 (2)
   0  1  2  3  4  5  6  7     across: dim 2 (4)    across: dim 2 (4)
0  0  0  1  1  2  2  3  3        0  1  2  3           0  1  2  3
1  0  0  1  1  2  2  3  3     0  0  0  1  1        0  0  0  1  1
                              1  2  2  3  3        1  2  2  3  3
                              what each rank would hold: no placements
                              say so

 0  rank 0 (tp=0): holds (2, 2)
 1  rank 1 (tp=1): holds (2, 2)
 2  rank 2 (tp=2): holds (2, 2)
 3  rank 3 (tp=3): holds (2, 2)

not free: no Shard or _StridedShard of the output gives the devices of mesh dim tp the elements that
S(1) gives them
dim 1 of 8 is split into 2 x 4, and 2 is no multiple of the 4 devices that shard it: in attention,
the heads do not divide by the mesh
redistributed to [_S(1,2)] first, it is free, as [S(2)]: a rank receives up to 4 elements""",
        )

    def test_replicas_and_a_pending_sum(self):
        picture = draw(sharding((2, 4), (2, 2), "P(sum),S(1)"), to="R,R", names=("dp", "tp"))
        self.assertExpectedInline(
            picture.text(120),
            """\
(2, 4) on mesh (dp=2, tp=2) of ranks 0 to 3: [P(sum), S(1)] -> [R, R]

before: [P(sum), S(1)]      after: [R, R]             step 1: all-reduce (sum) on dp

down: dim 0 (2)             down: dim 0 (2)           down: sender
across: dim 1 (4), on tp    across: dim 1 (4)         across: receiver
    0    1    2    3            0    1    2    3          0    1    2    3
0  0+2  0+2  1+3  1+3       0  0-3  0-3  0-3  0-3     0  (4)   .    4    .
1  0+2  0+2  1+3  1+3       1  0-3  0-3  0-3  0-3     1   .   (4)   .    4
                                                      2   4    .   (4)   .
                                                      3   .    4    .   (4)
                                                      the busiest rank receives 4 elements; of
                                                      each pair it is counted what a reduce-
                                                      scatter and an all-gather send, rounded
                                                      up
                                                      in brackets: what a rank keeps

step 2: all-gather on tp

down: sender
across: receiver
    0    1    2    3
0  (4)   4    .    .
1   4   (4)   .    .
2   .    .   (4)   4
3   .    .    4   (4)
the busiest rank receives 4 elements
in brackets: what a rank keeps

 0+2  ranks 0, 2 (tp=0, each dp a term of the sum): before, holds (2, 2)
 1+3  ranks 1, 3 (tp=1, each dp a term of the sum): before, holds (2, 2)
 0-3  ranks 0 to 3 (any dp, any tp): after, holds (2, 4)

in all 2 collectives: the busiest rank receives 8 elements""",
        )

    def test_many_dims(self):
        picture = draw(sharding((4, 2, 4), (2, 2), "S(0),S(2)"), names=("dp", "tp"))
        self.assertExpectedInline(
            picture.text(60),
            """\
(4, 2, 4): [S(0), S(2)] on mesh (dp=2, tp=2) of ranks 0 to 3

[0:2, :, :]                 [2:4, :, :]
down: dim 1 (2)             down: dim 1 (2)
across: dim 2 (4), on tp    across: dim 2 (4), on tp
   0  1  2  3                  0  1  2  3
0  0  0  1  1               0  2  2  3  3
1  0  0  1  1               1  2  2  3  3

 0  rank 0 (dp=0, tp=0): holds (2, 2, 2)
 1  rank 1 (dp=0, tp=1): holds (2, 2, 2)
 2  rank 2 (dp=1, tp=0): holds (2, 2, 2)
 3  rank 3 (dp=1, tp=1): holds (2, 2, 2)""",
        )

    def test_a_large_tensor_on_many_devices(self):
        picture = draw(sharding((1 << 20, 4096), (64, 8), "S(0),R"), names=("dp", "tp"))
        self.assertExpectedInline(
            picture.text(),
            """\
(1048576, 4096): [S(0), R] on mesh (dp=64, tp=8) of ranks 0 to 511

down: dim 0 (1048576), on dp
across: dim 1 (4096)
                   0:
                  4096
        0:16384    0-7
    16384:32768   8-15
    32768:49152   16-23
    49152:65536   24-31
    65536:81920   32-39
    81920:98304   40-47
   98304:114688   48-55
  114688:131072   56-63
  131072:147456   64-71
  147456:163840   72-79
  163840:180224   80-87
  180224:196608   88-95
  196608:212992  96-103
  212992:229376  104-111
             ..    ..
1032192:1048576  504-511
dim 0: rows 229376 to 1032191 of 1048576
go on alike

   0-7    ranks 0 to 7 (dp=0, any tp): holds (16384, 4096)
  8-15    ranks 8 to 15 (dp=1, any tp): holds (16384, 4096)
  16-23   ranks 16 to 23 (dp=2, any tp): holds (16384, 4096)
  24-31   ranks 24 to 31 (dp=3, any tp): holds (16384, 4096)
  32-39   ranks 32 to 39 (dp=4, any tp): holds (16384, 4096)
  40-47   ranks 40 to 47 (dp=5, any tp): holds (16384, 4096)
  48-55   ranks 48 to 55 (dp=6, any tp): holds (16384, 4096)
  56-63   ranks 56 to 63 (dp=7, any tp): holds (16384, 4096)
  64-71   ranks 64 to 71 (dp=8, any tp): holds (16384, 4096)
  72-79   ranks 72 to 79 (dp=9, any tp): holds (16384, 4096)
  80-87   ranks 80 to 87 (dp=10, any tp): holds (16384, 4096)
  88-95   ranks 88 to 95 (dp=11, any tp): holds (16384, 4096)
 96-103   ranks 96 to 103 (dp=12, any tp): holds (16384, 4096)
 104-111  ranks 104 to 111 (dp=13, any tp): holds (16384, 4096)
 112-119  ranks 112 to 119 (dp=14, any tp): holds (16384, 4096)
 504-511  ranks 504 to 511 (dp=63, any tp): holds (16384, 4096)

of 64 sets of ranks that hold the same, the first 15 and the last are in the legend; the others are
left out""",
        )

    def test_a_layout(self):
        self.assertExpectedInline(
            draw(Layout((2, (2, 3)), (1, (6, 2)))).text(),
            """\
layout (2,(2,3)):(1,(6,2))

down: mode 0, 2:1
across: mode 1, (2,3):(6,2)
   0   1   2   3   4   5
0  0   2   4   6   8   10
1  1   3   5   7   9   11""",
        )

    def test_scalars_and_what_has_no_elements(self):
        scalar = draw(sharding((), (2, 2), "P(max),R"))
        empty = draw(sharding((0, 4), (2,), "S(0)"))
        self.assertExpectedInline(
            scalar.text() + "\n\n" + empty.text(),
            """\
(): [P(max), R] on mesh (mesh0=2, mesh1=2) of ranks 0 to 3

a scalar
  +0-3

 +0-3  ranks 0 to 3 (any mesh1, each mesh0 a term of the max): holds a scalar

(0, 4): [S(0)] on mesh (mesh0=2) of ranks 0, 1

no elements: nobody holds any

 0  rank 0 (mesh0=0): holds nothing
 1  rank 1 (mesh0=1): holds nothing""",
        )


def test_print_and_repr():
    assert str(FLATTEN) == FLATTEN.text(100)
    assert (
        repr(FLATTEN)
        == "<Picture of view(12,) of (2, 6): [S(1)] on mesh (tp=2) of ranks 0, 1: 2 panels>"
    )


def test_with_colour_there_are_the_same_letters():
    from rich.text import Text

    coloured = FLATTEN.text(100, colour=True)
    assert "\x1b[38;2;0;0;0;48;2;119;170;221m 0 \x1b[0m" in coloured
    plain = [line.rstrip() for line in Text.from_ansi(coloured).plain.splitlines()]
    assert plain == FLATTEN.text(100).splitlines()


@pytest.mark.parametrize("width", [20, 30, 57, 80, 200])
def test_no_line_is_wider_than_the_terminal(width):
    for picture in (FLATTEN, draw(sharding((24, 24), (8,), "S(1)"), to="S(0)")):
        assert max(map(len, picture.text(width).splitlines())) <= width


def test_a_file_gets_no_escapes_and_no_color_is_respected(monkeypatch):
    file = io.StringIO()
    FLATTEN.show(file)
    assert "\x1b" not in file.getvalue() and "after: (12,)" in file.getvalue()
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("TERM", "xterm-256color")
    for variables, coloured in (({}, True), ({"NO_COLOR": "1"}, False)):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        file = io.StringIO()
        FLATTEN.show(file)
        assert ("48;2;119;170;221" in file.getvalue()) is coloured


def test_rich_prints_it():
    from rich.console import Console

    console = Console(file=io.StringIO(), width=100)
    console.print(FLATTEN)
    shown = "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())
    assert shown == FLATTEN.text(100)


def test_a_layout_of_a_tensor_is_its_sharding():
    of = Sharding((4, 6), (2,), (Shard(1),))
    assert draw(of.layout, shape=(4, 6)) == draw(of)


@pytest.mark.parametrize(
    "given, error, message",
    [
        (lambda: draw(3), TypeError, "draw takes a DTensor, a Sharding"),
        (lambda: draw(Layout(4), view=(2, 2)), ValueError, "view= is for Sharding, DTensor"),
        (lambda: draw(Layout(symbol("s"))), LayoutError, "replace the symbols by numbers"),
        (lambda: draw(Layout((2, 2)), shape=(8,)), LayoutError, "exactly one device must hold"),
        (
            lambda: draw(Sharding((4,), (2,), (Replicate(),)), shape=(4,)),
            ValueError,
            "shape= is for Layout, not for",
        ),
        (
            lambda: draw(Sharding((4,), (2,), (Replicate(),)), view=(2, 2), to="R"),
            ValueError,
            "view= or to=, not both",
        ),
        (
            lambda: draw(Sharding((4,), (2,), (Replicate(),)), names=("a", "b")),
            ValueError,
            "give each mesh dim a different name",
        ),
        (
            lambda: draw(Sharding((4,), (2,), (Replicate(),)), to="P"),
            ValueError,
            "a plan cannot create a Partial",
        ),
        (
            lambda: draw(Sharding((4,), (2,), (Replicate(),)), to=[3]),
            TypeError,
            "3 is not a placement that can be drawn",
        ),
        (
            lambda: draw(Sharding((4,), (2, 2), (Partial("sum"), Partial("max"))), to="R,R"),
            ValueError,
            "use one reduction for all Partial placements",
        ),
        (
            lambda: draw(
                Sharding((4,), (2,), (Replicate(),)), to=Sharding((5,), (2,), (Replicate(),))
            ),
            ValueError,
            "must have the same shape",
        ),
        (lambda: FLATTEN.save("picture.pdf"), ValueError, "ends in '.pdf'"),
    ],
)
def test_what_cannot_be_drawn_is_told_why(given, error, message):
    with pytest.raises(error, match=message):
        given()
