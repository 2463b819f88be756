"""What people read, word for word: explain, plan, refusals. After a change of words that is meant,
EXPECTTEST_ACCEPT=1 before the command writes them anew; the difference is then for review.
"""

import contextlib
import io
import shlex
from textwrap import fill

from expecttest import assert_expected_inline

from cute_sharding.tools.cli import main


def said(command):
    """What a command prints, and its exit code where that is not 0; long lines are broken."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(shlex.split(command))
    text = out.getvalue() + err.getvalue() + (f"exit code {code}" if code else "")
    lines = [fill(line, 96, subsequent_indent=" > ").rstrip() for line in text.splitlines()]
    return "\n".join(lines).rstrip()


def test_explain_a_view_that_is_free():
    command = "explain --shape 4,16,32 --mesh dp=2,tp=4 --placements S(0),S(2)"
    assert_expected_inline(
        said(f"{command} --view 4,16,8,4"),
        """\
view(4, 16, 8, 4) on mesh (dp=2, tp=4)
free: no communication

before: shape (4, 16, 32), placements [S(0), S(2)]
  layout (devices, local) -> flat index: ((2,4),(2,16,8)):((1024,8),(512,32,1))
    2:1024  dp     dim 0
    4:8     tp     dim 2
    2:512   local  dim 0
    16:32   local  dim 1
    8:1     local  dim 2
  rows of each dim, by device:
    dp=0, tp=0: local (2, 16, 8)  [0:2] x [0:16] x [0:8]
    dp=0, tp=1: local (2, 16, 8)  [0:2] x [0:16] x [8:16]
    dp=0, tp=2: local (2, 16, 8)  [0:2] x [0:16] x [16:24]
    dp=0, tp=3: local (2, 16, 8)  [0:2] x [0:16] x [24:32]
    dp=1, tp=0: local (2, 16, 8)  [2:4] x [0:16] x [0:8]
    dp=1, tp=1: local (2, 16, 8)  [2:4] x [0:16] x [8:16]
    dp=1, tp=2: local (2, 16, 8)  [2:4] x [0:16] x [16:24]
    dp=1, tp=3: local (2, 16, 8)  [2:4] x [0:16] x [24:32]

after: shape (4, 16, 8, 4), placements [S(0), S(2)]
  layout (devices, local) -> flat index: ((2,4),(2,16,2,4)):((1024,8),(512,32,4,1))
    2:1024  dp     dim 0
    4:8     tp     dim 2
    2:512   local  dim 0
    16:32   local  dim 1
    2:4     local  dim 2
    4:1     local  dim 3
  rows of each dim, by device:
    dp=0, tp=0: local (2, 16, 2, 4)  [0:2] x [0:16] x [0:2] x [0:4]
    dp=0, tp=1: local (2, 16, 2, 4)  [0:2] x [0:16] x [2:4] x [0:4]
    dp=0, tp=2: local (2, 16, 2, 4)  [0:2] x [0:16] x [4:6] x [0:4]
    dp=0, tp=3: local (2, 16, 2, 4)  [0:2] x [0:16] x [6:8] x [0:4]
    dp=1, tp=0: local (2, 16, 2, 4)  [2:4] x [0:16] x [0:2] x [0:4]
    dp=1, tp=1: local (2, 16, 2, 4)  [2:4] x [0:16] x [2:4] x [0:4]
    dp=1, tp=2: local (2, 16, 2, 4)  [2:4] x [0:16] x [4:6] x [0:4]
    dp=1, tp=3: local (2, 16, 2, 4)  [2:4] x [0:16] x [6:8] x [0:4]""",
    )


def test_explain_a_view_that_is_not():
    command = "explain --shape 4,16,32 --mesh 4 --placements S(2) --view 4,16,2,16"
    assert_expected_inline(
        said(command),
        """\
view(4, 16, 2, 16) on mesh (mesh0=4)
the input is redistributed first, to the cheapest placements: [S(0)]; a device receives up to
 > 384 elements
not free: no Shard or _StridedShard of the output gives the devices of mesh dim mesh0 the
 > elements that S(2) gives them
dim 2 of 32 is split into 2 x 16, and 2 is no multiple of the 4 devices that shard it: in
 > attention, the heads do not divide by the mesh

before: shape (4, 16, 32), placements [S(2)]
  layout (devices, local) -> flat index: ((4,),(4,16,8)):((8,),(512,32,1))
    4:8    mesh0  dim 2
    4:512  local  dim 0
    16:32  local  dim 1
    8:1    local  dim 2
  rows of each dim, by device:
    mesh0=0: local (4, 16, 8)  [0:4] x [0:16] x [0:8]
    mesh0=1: local (4, 16, 8)  [0:4] x [0:16] x [8:16]
    mesh0=2: local (4, 16, 8)  [0:4] x [0:16] x [16:24]
    mesh0=3: local (4, 16, 8)  [0:4] x [0:16] x [24:32]

after: shape (4, 16, 2, 16), placements [S(0)]
  layout (devices, local) -> flat index: ((4,),(1,16,2,16)):((512,),(0,32,16,1))
    4:512  mesh0  dim 0
    1:0    local  dim 0
    16:32  local  dim 1
    2:16   local  dim 2
    16:1   local  dim 3
  rows of each dim, by device:
    mesh0=0: local (1, 16, 2, 16)  [0:1] x [0:16] x [0:2] x [0:16]
    mesh0=1: local (1, 16, 2, 16)  [1:2] x [0:16] x [0:2] x [0:16]
    mesh0=2: local (1, 16, 2, 16)  [2:3] x [0:16] x [0:2] x [0:16]
    mesh0=3: local (1, 16, 2, 16)  [3:4] x [0:16] x [0:2] x [0:16]""",
    )


def test_explain_blocks_of_two_sizes():
    command = "explain --shape 7,4 --mesh 3 --placements S(1) --view 28"
    assert_expected_inline(
        said(command),
        """\
view(28,) on mesh (mesh0=3)
free: no communication

before: shape (7, 4), placements [S(1)]
  (7, 4) on mesh (3,) as [S(1)] has no layout: in tensor dim 1, mesh dim 0 cannot divide 4 rows
 > into 1 x 3 blocks of one size. Use local_shape, global_offset or rows
  rows of each dim, by device:
    mesh0=0: local (7, 2)  [0:7] x [0:2]
    mesh0=1: local (7, 2)  [0:7] x [2:4]
    mesh0=2: local (7, 0)  [0:7] x []

after: shape (28,), placements [_S(0,7)]
  (28,) on mesh (3,) as [_S(0,7)] has no layout: in tensor dim 0, mesh dim 0 cannot divide 28
 > rows into 7 x 3 blocks of one size. Use local_shape, global_offset or rows
  rows of each dim, by device:
    mesh0=0: local (14,)  [0:2, 4:6, 8:10, 12:14, ... 3 more]
    mesh0=1: local (14,)  [2:4, 6:8, 10:12, 14:16, ... 3 more]
    mesh0=2: local (0,)  []
  out of balance: the fullest device holds 14 elements; with plain shards of the same dims, it
 > would hold 10""",
    )


def test_plan_one_exchange_for_three():
    command = "plan --shape 64,64 --mesh dp=2,tp=4 --from S(0),S(1) --to S(1),S(0)"
    assert_expected_inline(
        said(command),
        """\
(64, 64): [S(0), S(1)] on mesh (dp=2, tp=4) of ranks 0 to 7 -> [S(1), S(0)] on mesh (dp=2, tp=4)
 > of ranks 0 to 7
network: dp 3e-06 s + 8.8e-12 s an element, tp 3e-06 s + 8.8e-12 s an element

all-to-all on mesh dims dp, tp: receives 512 elements, 9.005e-06 s
  ((2,4),(32,16)):((2048,16),(64,1)) -> ((2,4),(16,32)):((32,1024),(64,1))
in all: 1 collectives, 512 elements of 4 bytes received, at most 1,536 held, 9.005e-06 s
lower bound: 512 elements, the most that a device needs and does not hold""",
    )


def test_plan_of_uneven_shards():
    command = "plan --shape 7,5 --mesh 4 --from S(0) --to S(1)"
    assert_expected_inline(
        said(command),
        """\
(7, 5): [S(0)] on mesh (mesh0=4) of ranks 0 to 3 -> [S(1)] on mesh (mesh0=4) of ranks 0 to 3
network: mesh0 3e-06 s + 8.8e-12 s an element

all-to-all on mesh dims mesh0: receives 10 elements, 6e-06 s
in all: 1 collectives, 10 elements of 4 bytes received, at most 34 held, 6e-06 s
lower bound: 10 elements, the most that a device needs and does not hold""",
    )


def test_plan_of_a_pending_sum_on_two_kinds_of_link():
    command = "plan --shape 64,64 --mesh dp=2,tp=4 --from P(sum),S(0) --to S(0),R"
    assert_expected_inline(
        said(f"{command} --network infiniband,nvlink"),
        """\
(64, 64): [P(sum), S(0)] on mesh (dp=2, tp=4) of ranks 0 to 7 -> [S(0), R] on mesh (dp=2, tp=4)
 > of ranks 0 to 7
network: dp 1e-05 s + 8e-11 s an element, tp 3e-06 s + 8.8e-12 s an element

reduce-scatter (sum) on mesh dims dp: receives 512 elements, 1.004e-05 s
  ((2,4),(16,64)):((0,1024),(64,1)) -> ((2,4),(8,64)):((512,1024),(64,1))
all-to-all on mesh dims dp, tp: receives 512 elements, 1.604e-05 s
  ((2,4),(8,64)):((512,1024),(64,1)) -> ((2,4),(8,64)):((2048,512),(64,1))
all-gather on mesh dims tp: receives 1,536 elements, 6.014e-06 s
  ((2,4),(8,64)):((2048,512),(64,1)) -> ((2,4),(32,64)):((2048,0),(64,1))
in all: 3 collectives, 2,560 elements of 4 bytes received, at most 3,584 held, 3.21e-05 s""",
    )


def test_what_bad_arguments_are_told():
    commands = (
        "explain --shape 4 --mesh tp:2 --placements R --view 4",
        "explain --shape 4 --mesh 2 --placements Q(0) --view 4",
        "explain --shape 4 --mesh 2 --placements S(1) --view 4",
        "explain --shape 4 --mesh 2 --placements R --view 5",
        "plan --shape 4 --mesh 2 --from R --to P",
        "plan --shape 4 --mesh 2 --from R --to R --network pigeon",
        "plan --shape 64,64 --mesh 4 --from S(0) --to S(1) --memory-limit 1000",
    )
    told = "\n".join(said(command) for command in commands)
    assert_expected_inline(
        told,
        """\
cute_sharding: --mesh 'tp:2': write name=size or size, separated by commas, such as dp=2,tp=4
exit code 2
cute_sharding: cannot read the placement 'Q(0)': write S(dim), _S(dim,split_factor), R or P(op),
 > separated by commas
exit code 2
cute_sharding: placement S(1) is for tensor dim 1, but the shape (4,) has only 1 dim
exit code 2
cute_sharding: shape (5,) has 5 elements, but the tensor has 4
exit code 2
cute_sharding: no plan from R to P(sum) on mesh dim 0: a plan cannot create a Partial, and
 > cannot reduce a subclass of Partial
exit code 2
cute_sharding: unknown links ['pigeon']: use nvlink, infiniband or Link(alpha, beta)
exit code 2
cute_sharding: no plan for (64, 64) on mesh (4,) keeps every device within 1,000 elements: the
 > smallest possible limit is memory_limit=2144
exit code 2""",
    )
