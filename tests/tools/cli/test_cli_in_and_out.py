"""python -m cute_sharding: it takes what it prints, says what torch would do, and runs programs."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import cute_sharding
from cute_sharding.exchange import Network
from cute_sharding.tools.cli import main

MOVE = "plan --shape 10000000,512 --mesh 2,4 --from S(0),S(1) --to S(0),S(0)"
GATHERED = "the input is redistributed to [R], a device receives"


def run(capsys, command):
    code = main(shlex.split(command))
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    "given",
    [
        "--shape 4,16 --mesh tp=4 --placements [S(1)]",
        "--shape '(4, 16)' --mesh '(tp=4)' --placements 'S(-1)'",
        "--shape 'torch.Size([4, 16])' --mesh tp=4 --placements '(Shard(dim=1),)'",
        "--shape [4,16] --mesh tp=4, --placements '((4,),(4,4)):((4,),(16,1))'",
    ],
)
@pytest.mark.parametrize("op", ["--view '(4, 4, 4)'", "--slice 1,0,4"])
def test_explain_takes_what_it_prints(capsys, given, op):
    assert run(capsys, f"explain {given} {op}") == run(
        capsys, f"explain --shape 4,16 --mesh tp=4 --placements S(1) {op}"
    )


def test_plan_and_draw_take_what_they_print(capsys):
    """Also what torch prints: placements in brackets or as a tuple, dims from the end, dtypes."""
    wanted = run(capsys, "plan --shape 64,64 --mesh 2,4 --from S(0),S(1) --to R,R --itemsize 2")
    layout = "((2,4),(32,16)):((2048,16),(64,1))"
    for source, of in (("[S(0),S(-1)]", "bfloat16"), (layout, "torch.float16")):
        command = f"plan --shape '(64, 64)' --mesh 2,4 --from '{source}' --to R,R --dtype {of}"
        assert run(capsys, command) == wanted
    assert run(capsys, f"{MOVE} --dtype brain")[2].startswith("cute_sharding: --itemsize 'brain'")
    drawn = run(capsys, "draw --shape 4,6 --mesh tp=2 --placements S(1) --to S(0)")
    assert run(capsys, "draw --shape 4,6 --mesh tp=2 --placements [S(-1)] --to [S(-2)]") == drawn


def test_plan_says_in_python_what_it_says_here(capsys):
    """The same size of an element, and so the same time."""
    shape, source, target = (10_000_000, 512), "[S(0), S(1)]", "S(0), S(0)"
    here = json.loads(run(capsys, f"{MOVE} --json")[1])["ours"]
    plan = cute_sharding.plan_redistribution(shape, (2, 4), source, target)
    assert (plan.itemsize, plan.seconds) == (4, pytest.approx(here["seconds"]))
    assert "480,000,000 elements of 4 bytes received" in str(plan)
    half = cute_sharding.plan_redistribution(shape, (2, 4), source, target, itemsize=2)
    assert "elements of 2 bytes" in str(half) and half.seconds < 0.6 * plan.seconds
    flat = Network.flat(alpha=1e-6, beta=3.2e-10)  # so many seconds an element, whatever its size
    given = [
        cute_sharding.plan_redistribution((8, 8), (4,), "S(0)", "R", network=flat, itemsize=n)
        for n in (1, 8)
    ]
    assert given[0].seconds == given[1].seconds


def test_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"cute_sharding {cute_sharding.__version__}\n"


def test_explain_says_which_ops_it_knows(capsys):
    code, _, err = run(capsys, "explain --shape 4,6 --mesh 2 --placements S(1)")
    assert code == 2
    assert all(f"--{name}" in err for name in ("view", "repeat", "slice", "roll", "unfold"))


@pytest.mark.parametrize(
    ("op", "said"),
    [
        (
            "--view 2,2,12",
            f"{GATHERED} 24 elements, the output is [R]",
        ),
        ("--view 12,4", "nothing is redistributed, the output is [S(1)]"),
        ("--slice 2,1", f"{GATHERED} 24 elements, the output is [R]"),
        ("--split 2,2", f"{GATHERED} 24 elements, the output is [R]"),
        ("--cat 2,3", f"{GATHERED} 72 elements, the output is [R]"),
        ("--roll 2,1", f"{GATHERED} 24 elements, the output is [R]"),
        ("--unfold 2,2,1", "raises "),
    ],
)
def test_explain_says_what_torch_would_do(capsys, op, said):
    """Whatever is switched on here."""
    command = f"explain --shape 2,6,4 --mesh 2 --placements S(2) {op} --torch"
    with cute_sharding.enabled(movement=True):
        code, out, err = run(capsys, command)
        assert cute_sharding.settings().movement
    assert (code, err) == (0, "")
    assert f"by torch's own rule: {said}" in out.splitlines()[-1], out


def test_explain_says_what_torch_raises(capsys):
    command = "explain --shape 4,16,32 --mesh 4 --placements S(2) --view 4,16,2,16 --torch"
    assert "by torch's own rule: raises Cannot unflatten" in run(capsys, command)[1]


def test_explain_says_when_shares_are_out_of_balance(capsys):
    explained = "explain --shape 4,16 --mesh 4 --placements S(1)"
    _, out, _ = run(capsys, f"{explained} --slice 1,0,4")  # all of it on the first device, free
    assert (
        "  out of balance: the fullest device holds 16 elements; with plain shards of the same "
        "dims, it would hold 4" in out
    )
    assert "out of balance" not in run(capsys, f"{explained} --slice 1,0,15")[1]
    assert "out of balance" not in run(capsys, f"{explained} --view 64")[1]


PROGRAM = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
mesh = init_device_mesh("cpu", (2,))
x = DTensor.from_local(torch.zeros(2, 6, 2), mesh, [Shard(2)])
x.view(2, 2, 12).redistribute(placements=[Replicate()])
x[:, :, 1:]
dist.destroy_process_group()
if len(sys.argv) > 1:
    sys.exit(int(sys.argv[1]))
"""


def stats_of(tmp_path, *arguments, options=(), **flags):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    code = "import sys; from cute_sharding.tools.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, "stats", *options, str(program), *arguments],
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith("USE_CUTE_")},
            "PYTHONPATH": str(Path(__file__).parents[3]),
            **flags,
        },
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.costly
def test_stats_of_a_program(tmp_path):
    """The flags are read as the package is installed (tests/dtensor/switch/test_autoload.py)."""
    found = stats_of(tmp_path, "3", USE_CUTE_SHARDING="1")
    assert found.returncode == 3, found.stderr
    rows = {line.split("  ")[0]: line.split()[-3:] for line in found.stdout.splitlines()}
    assert rows["slice.Tensor"] == ["12", "48", "0.25"]
    assert rows["view.default"] == ["0", "48", "0.00"]
    assert rows["redistribute"] == ["48", "48", "1.00"]
    silent = stats_of(tmp_path, USE_CUTE_SHARDING="1", RANK="1")
    assert (silent.returncode, silent.stdout) == (0, "")
    data = json.loads(stats_of(tmp_path, options=["--json"], USE_CUTE_SHARDING="1").stdout)
    assert data["stats"]["redistribute"]["plan"] == 1


@pytest.mark.costly
def test_stats_of_a_program_without_flags(tmp_path, capsys):
    assert "no flag is on" in stats_of(tmp_path).stdout
    err = run(capsys, "stats nowhere.py")[2]
    assert err.startswith("cute_sharding: the file 'nowhere.py' does not exist") and len(err) < 120
