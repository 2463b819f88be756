"""python -m cute_sharding: each command prints what its function gives; and what bad arguments are
told.
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import cute_sharding
from cute_sharding import draw, explain, plan_redistribution
from cute_sharding.exchange import Mesh, Network
from cute_sharding.layout import Layout
from cute_sharding.sharding import Sharding, parse_placements
from cute_sharding.tools.cli import main, read_mesh_of_ranks

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "language_model.py"


def run(capsys, command):
    code = main(shlex.split(command))
    out, err = capsys.readouterr()
    return code, out, err


def as_json(capsys, command):
    code, out, err = run(capsys, f"{command} --json")
    assert (code, err) == (0, ""), err
    return json.loads(out)


# -- explain ---------------------------------------------------------------------------------------

OPS = [
    ("--view 4,8,2,32", {"view": (4, 8, 2, 32)}),
    ("--view=-1,32", {"view": (-1, 32)}),
    ("--view -1,32", {"view": (-1, 32)}),
    ("--permute 1,0,2", {"permute": [1, 0, 2]}),
    ("--expand 4,16,32", {"expand": [4, 16, 32]}),
    ("--repeat 1,2,1", {"repeat": [1, 2, 1]}),
    ("--slice 1,1", {"slice": (1, 1)}),
    ("--slice 1,,8", {"slice": (1, None, 8)}),
    ("--flip 1", {"flip": 1}),
    ("--cat 1,2", {"cat": (1, 2)}),
    ("--unfold 1,3,1", {"unfold": (1, 3, 1)}),
]


@pytest.mark.parametrize("option, op", OPS, ids=[option for option, _ in OPS])
def test_explain_prints_what_the_function_gives(capsys, option, op):
    command = f"explain --shape 4,16,32 --mesh dp=2,tp=2 --placements S(0),S(1) {option}"
    found = explain(shape=(4, 16, 32), mesh={"dp": 2, "tp": 2}, placements="S(0), S(1)", **op)
    assert as_json(capsys, command) == json.loads(json.dumps(found.to_dict()))
    assert run(capsys, command) == (0, f"{found}\n", "")


@pytest.mark.parametrize(
    "of, op, said",
    [
        ("4,16,32 --mesh dp=2,tp=4 --placements S(0),S(2)", "--view 4,16,8,4", "free: no comm"),
        ("4,16,32 --mesh 4 --placements S(2)", "--view 4,16,2,16", "placements: [S(0)]; a device"),
        ("7,4 --mesh 3 --placements S(1)", "--view 28", "placements [_S(0,7)]"),
        ("7,4 --mesh 3 --placements S(1)", "--view 28", "with plain shards of the same dims"),
        ("2,6 --mesh 2 --placements S(1)", "--permute 1,0", "(6, 2), placements [S(0)]"),
        ("6 --mesh 2 --placements S(0)", "--repeat 3", "placements [_S(0,3)]"),
        ("1,6 --mesh 2 --placements P(sum)", "--expand 5,6", "(5, 6), placements [P(sum)]"),
        ("'' --mesh 2 --placements R", "--view=''", "free"),
        ("0,4 --mesh 2 --placements S(1)", "--view 4,0", "free"),
        ("4,16 --mesh 4 --placements S(1)", "--slice 1,1", "4 elements\n  (1,) -> (0,): 4"),
        ("4,16 --mesh 4 --placements S(1)", "--slice 1,0,15", "free: no communication"),
        ("4,16 --mesh 4 --placements S(1)", "--slice 1,0,4", "device holds 16 elements; with"),
        ("4,16 --mesh 4 --placements S(1)", "--select 1,-1", "(4,), placements [S(0)]"),
        ("4,16 --mesh 4 --placements S(1)", "--split 1,8", "after, part 1: shape (4, 8)"),
        ("4,16 --mesh 4 --placements S(1)", "--roll 1,2", "(3,) -> (0,): 8"),
        ("4,16 --mesh 4 --placements S(1)", "--flip 1", "(3,) -> (0,): 16"),
        ("4,16 --mesh 4 --placements S(1)", "--pad 1,2,2", "after: shape (4, 20)"),
        ("4,16 --mesh 4 --placements S(1)", "--cat 1", "(4, 32), placements [_S(1,2)]"),
        ("4,16 --mesh 4 --placements S(1)", "--unfold 1,3,1", "after: shape (4, 14, 3)"),
        ("4,16 --mesh 4 --placements S(1)", "--reflect 1,2,0", "after: shape (4, 18)"),
        ("4,16 --mesh 4 --placements S(1)", "--diagonal 0,0,1", "free: no communication"),
    ],
)
def test_explain_says(capsys, of, op, said):
    code, out, err = run(capsys, f"explain --shape {of} {op}")
    assert (code, err) == (0, "") and said in out, out


def test_an_explanation_begins_with_what_the_op_costs(capsys):
    of = "explain --shape 4,16 --mesh 4 --placements S(1)"
    for op, said in (
        ("--view 4,2,8", "the input is redistributed first"),
        ("--slice 1,1", "one exchange on mesh0"),
        ("--slice 1,0,15", "free: no communication"),
    ):
        assert run(capsys, f"{of} {op}")[1].splitlines()[1].startswith(said)


def test_explain_of_a_sharding_and_what_is_wrong():
    rows = Sharding((6, 4), (4,), parse_placements("S(0)"))
    found = explain(rows, view=(24,))
    assert not found.is_free and "not free" in str(found)
    assert found.redistributed.placements == parse_placements("S(1)") and found.output
    for arguments, said in (
        ({"x": rows}, "takes exactly one op, such as view"),
        ({"x": rows, "turn": 1}, "takes exactly one op, not turn: use one of view"),
        ({"shape": (4,), "view": (2, 2)}, "needs a DTensor, a Sharding, or all of shape="),
        ({"x": [4], "view": (2, 2)}, "takes a DTensor or a Sharding, not a list"),
    ):
        with pytest.raises(TypeError, match=said):
            explain(**arguments)
    with pytest.raises(ValueError, match="write DIM,START,STOP,STEP"):
        explain(rows, slice=0)


# -- plan ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, arguments",
    [
        ("", {}),
        ("--itemsize 2", {"itemsize": 2}),
        ("--dtype bfloat16", {"itemsize": 2}),
        ("--groups none", {"groups": ()}),
        ("--groups dp+tp", {"groups": ((0, 1),)}),
        ("--memory-limit 1500", {"memory_limit": 1500}),
        ("--network flat:1e-6,3e-10", {"network": Network.flat(alpha=1e-6, beta=3e-10)}),
        ("--to-mesh gen=8@8-15", {"target_mesh": Mesh((8,), range(8, 16))}),
    ],
)
def test_plan_prints_the_plan(capsys, options, arguments):
    to = "S(0)" if "gen" in options else "S(1),S(0)"
    command = f"plan --shape 64,64 --mesh dp=2,tp=4 --from S(0),S(1) --to {to} {options}"
    plan = plan_redistribution((64, 64), (2, 4), "S(0), S(1)", to, **arguments)
    plan = plan.named(("dp", "tp"), *[("gen",)] * ("gen" in options))
    found = as_json(capsys, command)
    assert found["ours"] == plan.to_dict()
    assert found["itemsize"] == plan.itemsize
    assert f"\n{plan}\n" in run(capsys, command)[1]


# -- draw ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, drawn",
    [
        ("", {}),
        ("--view 24", {"view": (24,)}),
        ("--to S(0)", {"to": "S(0)"}),
        ("--to S(0) --to-mesh 4", {"to": "S(0)", "mesh": (4,)}),
        ("--to S(0) --to-mesh 4@2-5", {"to": "S(0)", "mesh": Mesh((4,), range(2, 6))}),
    ],
)
def test_draw_prints_the_picture(capsys, options, drawn):
    of = f"draw --shape 4,6 --mesh tp=2 --placements S(1) {options}"
    picture = draw(Sharding((4, 6), (2,), parse_placements("S(1)")), names=("tp",), **drawn)
    for width in (30, 100):
        assert run(capsys, f"{of} --width {width}") == (0, f"{picture.text(width)}\n", "")
    assert as_json(capsys, of) == json.loads(json.dumps(picture.to_dict()))


@pytest.mark.parametrize(
    "of, said",
    [
        ("--shape 4,6 --mesh 2 --placements S(1) --permute 1,0", "after: (6, 4) as [S(0)]"),
        ("--shape 4,6 --mesh 2 --placements S(1) --repeat 1,2", "[_S(1,2)]"),
        ("--shape 1,6 --mesh 2 --placements P --expand 2,6", "after: (2, 6) as [P(sum)]"),
        ("--layout (2,3):(1,2)", f"{draw(Layout((2, 3), (1, 2)))}"),
        ("--layout ((2,),(4,3)):((3,),(6,1)) --shape 4,6", "(4, 6): [S(1)] on mesh"),
        ("--shape 4,6 --mesh tp=2@4,9 --placements S(1)", "rank 9 (tp=1): holds (4, 3)"),
        ("--shape 4,6 --mesh tp=2@4,9 --placements P", "4+9"),
        ("--shape 4,6 --mesh tp=2@4,9 --placements S(1) --to S(0)", "9   6   (6)\n"),
    ],
)
def test_draw_says(capsys, of, said):
    code, out, err = run(capsys, f"draw {of}")
    assert (code, err) == (0, "") and said in out, out


@pytest.mark.parametrize("suffix", ["svg", "png", "txt"])
def test_files(capsys, tmp_path, suffix):
    path = tmp_path / f"picture.{suffix}"
    of = "draw --shape 8,8 --mesh 2,2 --placements S(0),S(1) --to-mesh 4@8-11 --to S(0)"
    assert run(capsys, f"{of} --output {path}") == (0, f"wrote {path}\n", "")
    assert path.stat().st_size > 1000


# -- what they take, and what they are told --------------------------------------------------------


@pytest.mark.parametrize(
    "command, other",
    [
        *(
            (f"explain {given} --view '(4, 4, 4)'", f"explain {plain} --view 4,4,4")
            for plain in ("--shape 4,16 --mesh tp=4 --placements S(1)",)
            for given in (
                "--shape 4,16 --mesh tp=4 --placements [S(1)]",
                "--shape '(4, 16)' --mesh '(tp=4)' --placements 'S(-1)'",
                "--shape 'torch.Size([4, 16])' --mesh tp=4 --placements '(Shard(dim=1),)'",
                "--shape [4,16] --mesh tp=4, --placements '((4,),(4,4)):((4,),(16,1))'",
            )
        ),
        (
            "plan --shape '(64, 64)' --mesh 2,4 --from '[S(0),S(-1)]' --to R,R --dtype float16",
            "plan --shape 64,64 --mesh 2,4 --from S(0),S(1) --to R,R --itemsize 2",
        ),
        (
            "plan --shape 64,64 --mesh 2,4 --from '((2,4),(32,16)):((2048,16),(64,1))' --to R,R",
            "plan --shape 64,64 --mesh 2,4 --from S(0),S(1) --to R,R",
        ),
        (
            "plan --shape 8,8 --mesh tp=4@0-3 --to-mesh tp=4 --from S(0) --to S(1)",
            "plan --shape 8,8 --mesh tp=4 --from S(0) --to S(1)",
        ),
        (
            "draw --shape 4,6 --mesh tp=2 --placements [S(-1)] --to [S(-2)]",
            "draw --shape 4,6 --mesh tp=2 --placements S(1) --to S(0)",
        ),
    ],
)
def test_they_take_what_they_and_torch_print(capsys, command, other):
    assert run(capsys, command) == run(capsys, other)


@pytest.mark.parametrize(
    "text, names, sizes, ranks",
    [
        ("dp=2,tp=4", ("dp", "tp"), (2, 4), range(8)),
        ("4@8-11", ("mesh0",), (4,), range(8, 12)),
        ("gen=4@8,9,10,11", ("gen",), (4,), range(8, 12)),
        ("(dp=2, tp=2)@0, 1, 8-9", ("dp", "tp"), (2, 2), (0, 1, 8, 9)),
        ("2,2@3,1,2,0", ("mesh0", "mesh1"), (2, 2), (3, 1, 2, 0)),
        ("tp=1 @ 7", ("tp",), (1,), range(7, 8)),
    ],
)
def test_the_ranks_of_a_mesh(text, names, sizes, ranks):
    assert read_mesh_of_ranks(text) == (names, Mesh(sizes, ranks))


EXPLAIN = "explain --shape 4 --mesh 2 --placements R"
PLAN = "plan --shape 8,6 --mesh dp=2,tp=2 --from S(0),S(1)"
DRAW = "draw --shape 4,6 --mesh tp=2 --placements S(1)"
ESTIMATE = "estimate train:f --mesh dp=2,tp=4"


@pytest.mark.parametrize(
    "command, message",
    [
        ("explain --shape 4", "--mesh, --placements"),
        ("explain --shape 4,x --mesh 2 --placements R --view 4", "--shape '4,x'"),
        ("explain --shape 4 --mesh tp:2 --placements R --view 4", "--mesh 'tp:2'"),
        ("explain --shape 4 --mesh 0 --placements R --view 4", "--mesh '0'"),
        ("explain --shape 4 --mesh 2 --placements Q(0) --view 4", "'Q(0)'"),
        ("explain --shape 4 --mesh 2 --placements S(1) --view 4", "for tensor dim 1"),
        ("explain --shape 4 --mesh 2 --placements R,R --view 4", "[R, R] has 2: "),
        ("explain --shape -4 --mesh 2 --placements R --view 4", "shape"),
        ("explain --shape 4 --mesh tp=2,tp=2 --placements R,R --view 4", "a different name"),
        ("explain --shape 8 --mesh 2@4-5 --placements R --view 4,2", "would not be used: write 2"),
        (EXPLAIN, "give exactly one of the options --view, --permute"),
        (f"{EXPLAIN} --roll 0", "roll '0': write DIM,SHIFT"),
        (f"{EXPLAIN} --roll x", "--roll 'x': write DIM,SHIFT"),
        (f"{EXPLAIN} --flip 3", "dim 3 is out of range"),
        (f"{EXPLAIN} --flip 0 --view 4", "give exactly one of the options --view, --flip"),
        (f"{EXPLAIN} --unfold 0,9,1", "does not fit a tensor"),
        (f"{EXPLAIN} --view 5", "5 elements"),
        (f"{EXPLAIN} --permute 1", "out of range"),
        (f"{EXPLAIN} --view 4 --json --colour", "--colour"),
        ("plan --mesh 2 --from R --to R", "plan needs --shape, or --model FILE"),
        ("plan --shape 4 --mesh 2 --from S(0) --to R --output x.svg", "--output needs --model"),
        ("plan --shape 4 --mesh 2 --from R", "--to"),
        ("plan --shape 4 --mesh 2 --from R,R --to R", "the mesh (2,) has 1 dim, but"),
        ("plan --shape 4 --mesh 2 --from R --to S(1)", "placement S(1) is for tensor dim 1"),
        ("plan --shape 4 --mesh 2 --from Q --to R", "'Q'"),
        ("plan --shape 4 --mesh 2 --from P(mean) --to R", "the reduction of P(mean) is unknown"),
        ("plan --shape 4 --mesh 2 --from R --to P", "from R to P(sum)"),
        ("plan --shape 4 --mesh 2,2 --from P,P(max) --to R,R", "Mixed Partial"),
        ("plan --shape=-4 --mesh 2 --from R --to R", "negative"),
        ("plan --shape 4 --mesh 2 --from R --to R --network flat:1e-6", "flat:ALPHA,BETA"),
        ("plan --shape 4 --mesh 2 --from R --to R --network flat:-1,1", "must be 0 or more"),
        ("plan --shape 4 --mesh 2 --from R --to R --network pigeon", "'pigeon'"),
        ("plan --shape 4 --mesh 2 --from R --to R --network nvlink,nvlink", "2 links"),
        ("plan --shape 4 --mesh 2 --from R --to R --itemsize 0", "itemsize 0"),
        ("plan --shape 4 --mesh 2 --from R --to R --dtype brain", "--dtype 'brain' is neither"),
        ("plan --mesh 2 --from R --to R --model no.json", "--model 'no.json' cannot be opened: No"),
        ("plan --shape 4 --mesh 2 --from R --to R --memory-limit 1GB", "--memory-limit"),
        ("plan --shape 4 --mesh 2 --from R --to R --groups cp", "the mesh has no dim cp"),
        ("plan --shape 8 --mesh 2@4-5 --from R --to R", "would not be used: write 2"),
        (f"{PLAN} --to S(0) --to-mesh gen=4@8-x", "write the ranks after @"),
        (f"{PLAN} --to S(0) --to-mesh gen=4@", "or one by one, such as dp=2"),
        (f"{PLAN} --to S(0) --to-mesh gen=4@11-8", "--to-mesh 'gen=4@11-8'"),
        (f"{PLAN} --to S(0) --to-mesh gen=4@8-10", "such as gen=4@8-11"),
        (f"{PLAN} --to S(0) --to-mesh 4@0-99999999999", "has 100,000,000,000 ranks after @ for"),
        (f"{PLAN} --to S(0) --to-mesh 4@8-10,9", "a mesh must not repeat a rank"),
        (f"{PLAN} --to S(0) --to-mesh gen:4", "--to-mesh 'gen:4': write name="),
        (f"{PLAN} --to S(0),R --to-mesh 4", "the list of placements [S(0), R] has 2"),
        (f"{PLAN} --to P --to-mesh 4", "a plan cannot create a Partial"),
        (f"{PLAN} --to S(0) --to-mesh 4@8-11 --memory-limit 1", "the smallest possible limit is"),
        ("draw", "or only --layout: also give --shape, --mesh, --placements"),
        ("draw --shape 4,6 --mesh 2", "also give --placements"),
        ("draw --layout 4", "cannot read '4' as a layout"),
        (f"{DRAW} --view 24 --to R", "a picture shows only one change"),
        (f"{DRAW} --layout 4:1", "with --layout, leave out"),
        (f"{DRAW} --width 5", "20 columns or more"),
        (f"{DRAW} --output picture.gif", "ends in '.gif'"),
        (f"{DRAW} --output /nowhere/picture.txt", "--output /nowhere/picture.txt"),
        (f"{DRAW} --view 5", "5"),
        (f"{DRAW} --to S(7)", "for tensor dim 7"),
        (f"{DRAW} --to-mesh 2@4-5", "--to-mesh needs --to"),
        (f"{DRAW} --to-mesh 2@4-5 --to P", "a plan cannot create a Partial"),
        (f"{DRAW} --to-mesh 2@4 --to R", "2@4' has 1 rank after @ for a mesh of 2 devices"),
        ("draw --shape 8 --mesh 2@4-5 --placements R --view 4,2", "would not be used: write 2"),
        ("estimate train --mesh 2", "'train' is not the name of a function: write module:function"),
        ("estimate train:f --mesh dp:2", "--mesh 'dp:2': write name=size"),
        (f"{ESTIMATE} --settings stock", "give one or more of PyTorch, views"),
        (f"{ESTIMATE} --network pigeon", "unknown links"),
        (f"{ESTIMATE} --rank 9", "rank=9: the mesh (2, 4) has the ranks 0 to 7"),
        (f"{ESTIMATE} --layers 0", "layers=0: a model has at least one layer"),
        (f"{ESTIMATE} --device tpu", "invalid choice: 'tpu'"),
        (f"{ESTIMATE} --save page.pdf", "give a file name for the estimate that ends in one of"),
        ("profile --save page.pdf nowhere.py", "give a file name for the profile that ends"),
        ("stats nowhere.py", "the file 'nowhere.py' does not exist"),
    ],
)
def test_bad_arguments_are_told_in_one_line(capsys, command, message):
    code, out, err = run(capsys, command)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert err.startswith("cute_sharding: ") and message in err, err


@pytest.mark.parametrize(
    "option, said",
    [
        (["--version"], f"cute_sharding {cute_sharding.__version__}\n"),
        (["plan", "--help"], "gen=4@8-11"),
        (["draw", "--help"], "gen=4@8-11"),
        (["explain", "--help"], "write 1,1"),
    ],
)
def test_what_ends_at_once(capsys, option, said):
    with pytest.raises(SystemExit) as end:
        main(option)
    assert end.value.code == 0 and said in capsys.readouterr().out


def python(code, *arguments, **flags):
    kept = {k: v for k, v in os.environ.items() if not k.startswith("USE_CUTE_")}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**kept, "PYTHONPATH": str(ROOT), **flags},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_explain_and_draw_need_no_torch_and_name_what_is_missing():
    commands = (f"{EXPLAIN} --view 4", DRAW, f"{DRAW} --to-mesh 2@4-5 --to R")
    done = python(f"""
import sys
from cute_sharding.tools.cli import main
for command in {commands}:
    assert main(command.split()) == 0 and "torch" not in sys.modules
sys.modules.update(dict.fromkeys([m for m in sys.modules if m.split(".")[0] == "rich"]))
sys.exit(main({DRAW.split()}))
""")
    assert done.returncode == 2 and 'pip install "cute-sharding[draw]"' in done.stderr


@pytest.mark.costly
def test_estimate_of_the_example(capsys, tmp_path):
    page = tmp_path / "page.html"
    command = f"estimate {EXAMPLE}:small --mesh dp=2,tp=4 --settings PyTorch,all --save {page}"
    found = as_json(capsys, command)
    assert "Memory of each layer" in page.read_text()
    stock, ours = (found["settings"][name] for name in ("PyTorch", "all"))
    assert stock["failure"] is ours["failure"] is None
    assert 0 < ours["busiest_bytes"] < stock["busiest_bytes"]
    assert ours["memory"]["peak"] < stock["memory"]["peak"]
    assert {cause["op"] for cause in ours["causes"]} > {"_log_softmax"}


# -- stats -----------------------------------------------------------------------------------------

PROGRAM = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
x = DTensor.from_local(torch.zeros(2, 6, 2), mesh, [Shard(2)])
x.view(2, 2, 12).redistribute(placements=[Replicate()])
x[:, :, 1:]
dist.destroy_process_group()
if len(sys.argv) > 1:
    sys.exit(int(sys.argv[1]))
"""


@pytest.mark.costly
def test_a_profile_of_a_program(tmp_path):
    """As it stands; it ends its process group, and may exit with any status."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    code = "import sys; from cute_sharding.tools.cli import main; sys.exit(main())"
    found = python(code, "profile", str(program), "3")
    assert found.returncode == 3, found.stderr
    assert "Rank 0 of 4, mesh tp=2, torch" in found.stdout, found.stdout
    assert "program.py:13\n    x[:, :, 1:]\n    slice redistributes" in found.stdout
    page = tmp_path / "page.html"
    silent = python(code, "profile", "--save", str(page), str(program), RANK="1")
    assert not page.exists()
    python(code, "profile", "--save", str(page), str(program))
    assert "<figure" in page.read_text()
    assert (silent.returncode, silent.stdout) == (0, "")
    data = json.loads(python(code, "profile", "--json", str(program)).stdout)
    assert data["collectives"] == 2 and "does not exist" in python(code, "profile", "no").stderr


@pytest.mark.costly
def test_stats_of_a_program(tmp_path):
    """The flags are read as the package is installed (tests/dtensor/switch/test_autoload.py)."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    code = "import sys; from cute_sharding.tools.cli import main; sys.exit(main())"
    assert "no flag is on" in python(code, "stats", str(program)).stdout
    found = python(code, "stats", str(program), "3", USE_CUTE_SHARDING="1")
    assert found.returncode == 3, found.stderr
    lines = filter(None, found.stdout.splitlines())
    rows = {line.split("  ")[0]: line.split()[-1] for line in lines}
    assert [rows[op] for op in ("slice.Tensor", "view.default", "redistribute")] == [
        *("12", "0", "48")
    ]
    silent = python(code, "stats", str(program), USE_CUTE_SHARDING="1", RANK="1")
    assert (silent.returncode, silent.stdout) == (0, "")
    data = json.loads(python(code, "stats", "--json", str(program), USE_CUTE_SHARDING="1").stdout)
    assert data["stats"]["redistribute"]["plan"] == 1


def test_the_former_name_of_resetting_counts_warns():
    with pytest.warns(DeprecationWarning, match=r"call cute_sharding.stats\(reset=True\)"):
        cute_sharding.reset_stats()


def test_without_a_command_the_help_is_printed(capsys):
    code, out, err = run(capsys, "")
    assert code == 2 and not err and out.startswith("usage: ")
    assert "plan one step of a program" in " ".join(out.split())


def test_a_pipe_may_be_closed_early():
    command = [sys.executable, "-m", "cute_sharding", *shlex.split(EXPLAIN), "--view", "2,2"]
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    os.close(writes)
    assert (done.returncode, done.stderr) == (0, "")
