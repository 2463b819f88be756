"""Pictures of DTensors, and what docs/lists/gallery.md says that torch does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import search_path
from simulation import mesh_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry
from torch.distributed.tensor.placement_types import _StridedShard

from cute_sharding import draw, plan_redistribution
from cute_sharding.sharding import Sharding, parse_placements

DOCS = Path(__file__).parents[3] / "docs"
NAMES = ("dp", "tp")


def tensor_of(shape, placements, local):
    return DTensor.from_local(
        torch.zeros(local),
        mesh_of((2, 4), NAMES),
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )


def test_a_dtensor_is_drawn_as_its_sharding():
    tensor = distribute_tensor(torch.zeros(5, 6), mesh_of((2, 4), NAMES), [Shard(0), Replicate()])
    assert draw(tensor) == draw(Sharding((5, 6), (2, 4), parse_placements("S(0),R")), names=NAMES)
    pending = tensor_of((4, 8), [Partial("max"), _StridedShard(1, split_factor=2)], (4, 2))
    sharding = Sharding((4, 8), (2, 4), parse_placements("P(max),_S(1,2)"))
    assert draw(pending) == draw(sharding, names=NAMES)
    assert draw(pending, view=(32,)) == draw(sharding, names=NAMES, view=(32,))
    renamed = draw(tensor, names=("a", "b"))
    assert "mesh (a=2, b=4)" in renamed.title


def test_a_redistribution_of_a_dtensor_is_the_plan():
    tensor = distribute_tensor(torch.zeros(8, 8), mesh_of((2, 4), NAMES), [Shard(0), Shard(1)])
    plan = plan_redistribution((8, 8), (2, 4), [Shard(0), Shard(1)], [Shard(0), Shard(0)])
    for target in ([Shard(0), Shard(0)], "S(0),S(0)"):
        assert draw(tensor, to=target) == draw(plan.named(NAMES))


def test_a_dtensor_to_another_mesh_is_the_plan():
    """By rank number; with the names of both meshes."""
    tensor = distribute_tensor(torch.zeros(8, 8), mesh_of((2, 4), NAMES), [Shard(0), Shard(1)])
    other = DeviceMesh("cpu", torch.tensor([7, 9, 8]), mesh_dim_names=("gen",), _init_backend=False)
    plan = plan_redistribution((8, 8), (2, 4), "S(0), S(1)", "S(0)", target_mesh=other)
    picture = draw(tensor, to=[Shard(0)], mesh=other)
    assert picture == draw(plan.named(NAMES))  # the DeviceMesh has names of its own
    assert picture.title.endswith("-> [S(0)] on mesh (gen=3) of ranks 7, 9, 8")
    same = draw(tensor, to="S(0), R", mesh=tensor.device_mesh)
    assert same.sections[2].title == "step 1: all-gather on tp" and "rank 7" in str(same)


def test_a_shard_order_of_its_own_is_drawn_as_it_is():
    plain = tensor_of((10, 6), [Shard(0), Shard(0)], (2, 6))
    order = (ShardOrderEntry(0, (1, 0)),)
    spec = DTensorSpec(plain.device_mesh, plain.placements, plain._spec.tensor_meta, order, False)
    picture = draw(DTensor(torch.zeros(2, 6), spec, requires_grad=False))
    panel = picture.sections[0].panels[0]
    assert panel.row_axis == "dim 0 (10), on tp, then dp"
    # tp deals 3, 3, 3, 1 rows out, and dp halves each.
    assert [row[0].label for row in panel.cells] == [*"0041152263"]
    with pytest.raises(ValueError, match="has a shard order"):
        draw(DTensor(torch.zeros(2, 6), spec, requires_grad=False), view=(60,))


def test_split_factors_that_encode_an_order_are_drawn_so():
    """Nine rows as [_S(0, 2), S(0)] on (4, 2): with tp first, the device at (3, 0) has no row."""
    mesh = DeviceMesh(
        "cpu", torch.tensor([6, 1, 2, 3, 4, 5, 0, 7]).reshape(4, 2), mesh_dim_names=NAMES
    )
    tensor = DTensor.from_local(
        torch.zeros(0, 6),
        mesh,
        [_StridedShard(0, split_factor=2), Shard(0)],
        run_check=False,
        shape=torch.Size((9, 6)),
        stride=(6, 1),
    )
    assert draw(tensor).sections[0].panels[0].row_axis == "dim 0 (9), on tp, then dp"


def test_devices_of_another_mesh_are_told_by_rank():
    mesh = DeviceMesh("cpu", torch.tensor([[6, 7], [2, 3]]), mesh_dim_names=NAMES)
    tensor = DTensor.from_local(
        torch.zeros(2, 4), mesh, [Replicate(), Replicate()], run_check=False
    )
    (key,) = draw(tensor).legend
    assert (key.label, key.text) == ("6..", "ranks 6, 7, 2, 3 (any dp, any tp): holds (2, 4)")


@pytest.mark.costly
def test_the_gallery_says_what_torch_does():
    measured = json.loads((DOCS / "gallery" / "measured.json").read_text())
    if measured["torch"] != torch.__version__.split("+")[0]:
        pytest.skip(f"measured with torch {measured['torch']}")
    code = (
        "import json, generate_gallery, measure_gallery; "
        "print(json.dumps(measure_gallery.measure(generate_gallery.PATTERNS)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": search_path(DOCS.parent, DOCS)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == measured
