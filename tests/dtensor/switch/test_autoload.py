"""The environment flag: programs that never name this package. Each runs in an interpreter of its
own, with the entry point that pyproject.toml declares.
"""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import search_path

from cute_sharding import _autoload, _imports
from cute_sharding._settings import FLAGS, TABLE


@pytest.fixture
def program(site):
    def run(code, flag=None, timeout=300, redistribution=None, **flags):
        ours = (*FLAGS, "TORCH_DEVICE_BACKEND_AUTOLOAD")
        environment = {name: value for name, value in os.environ.items() if name not in ours}
        environment |= {"PYTHONPATH": search_path(site, Path(__file__).parents[1]), **flags}
        if flag is not None:
            environment["USE_CUTE_VIEW_PROPAGATION"] = flag
        if redistribution is not None:
            environment["USE_CUTE_REDISTRIBUTION"] = redistribution
        return subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return run


def succeeds(result):
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("flag", [None, "0"])
def test_without_the_flag_nothing_is_loaded(program, flag):
    """Where none is set `import torch` is as fast as without the package: not even the table of
    settings is read. Then DTensor is torch's.
    """
    code = """
import sys, torch
print([m for m in sys.modules if m.startswith("cute_sharding")])
print([m for m in ("torch.distributed.tensor", "cute_sharding.layout") if m in sys.modules])
import torch.distributed.tensor
print("cute_sharding.dtensor" in sys.modules)
import cute_sharding
print(cute_sharding.is_enabled())
"""
    loaded = ["cute_sharding", "cute_sharding._autoload"]
    table = [f"cute_sharding.{name}" for name in ("_imports", "_settings")]
    loaded += table if flag is not None else []
    assert succeeds(program(code, flag)).splitlines() == [str(loaded), "[]", "False", "False"]
    assert all(name.startswith(_autoload.PREFIX) for name in FLAGS)


def test_with_the_flag_dtensor_comes_switched_on(program):
    """And the import leaves no trace: the module is the one that its own loader made, and switched
    off again nothing of ours waits in the import system.
    """
    code = """
import sys, torch
# torch alone is as fast to import as ever
assert not {'cute_sharding.dtensor', 'torch.distributed.tensor'} & {*sys.modules}
before = len(sys.meta_path)
import torch.distributed.tensor as module
from torch.distributed.tensor import DTensor
propagate = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding_non_cached
assert propagate.__module__.startswith('cute_sharding.dtensor')
print(module.__name__, module.__spec__.name, module.__file__.endswith('__init__.py'))
import cute_sharding
print(cute_sharding.is_enabled())
cute_sharding.disable()  # the program can still switch it off
print(before - len(sys.meta_path), cute_sharding.is_enabled())
"""
    name = "torch.distributed.tensor"
    assert succeeds(program(code, "1")).split() == [name, name, "True", "True", "1", "False"]


# What a program of ops on one mesh that does not compile, and calls nothing of this package, does
# not wait for.
NOT_NEEDED = (
    *("cli", "drawing", "estimates", "models", "profiling", "showing", "_html"),
    *(f"dtensor.{name}" for name in ("checkpoints", "estimate", "models", "profile", "refit")),
    *("dtensor.reports", "dtensor.run.across_meshes", "dtensor.decide.any_sizes"),
    *("exchange.by_pieces", "exchange.meshes"),
    "dtensor.replaced.view_replay",
)


@pytest.mark.costly
def test_a_program_imports_what_it_needs(program):
    code = f"""
import sys, torch
assert not any(name.startswith("torch.distributed.tensor") for name in sys.modules)
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
mesh = init_device_mesh("cpu", (2,))
x = DTensor.from_local(torch.ones(4, 6), mesh, [Shard(0)], run_check=False).requires_grad_()
y = torch.cat([x.view(2, 4, 6).transpose(0, 1).flatten(), x.view(-1)]).roll(1)
(y.redistribute(placements=[Replicate()])[3:] @ torch.ones_like(y[3:])).sum().backward()
print([name for name in {NOT_NEEDED} if f"cute_sharding.{{name}}" in sys.modules])
import cute_sharding
print(cute_sharding.is_enabled(), x.grad.shape == x.shape)
"""
    found, switched = succeeds(program(code, USE_CUTE_SHARDING="1")).splitlines()
    assert (found, switched) == ("[]", "True True")
    for name in NOT_NEEDED:
        importlib.import_module(f"cute_sharding.{name}")


@pytest.mark.costly
def test_a_program_that_has_wrapped_what_redistributes_may_import_it(program):
    """By a function that keeps torch's, as decorators do, before it ever imports the package."""
    code = """
import functools, torch.distributed.tensor._redistribute as module
def watched(function):
    @functools.wraps(function)
    def around(*args, **kwargs):
        return function(*args, **kwargs)
    return around
module.redistribute_local_tensor = watched(module.redistribute_local_tensor)
import cute_sharding
cute_sharding.enable(redistribution=True)
print(cute_sharding.is_enabled())
"""
    assert succeeds(program(code, None)).split() == ["True"]


@pytest.mark.parametrize(
    "value, on",
    [
        *((v, True) for v in ("1", "true", "ON", " yes ")),
        *((v, False) for v in ("", "0", "off", "False", "no")),
    ],
)
def test_values_of_the_flag(monkeypatch, value, on):
    waited = []
    monkeypatch.setattr(_imports, "when_imported", lambda name, action: waited.append(name))
    monkeypatch.setenv(TABLE["views"].flag, value)
    _autoload.autoload()
    assert waited == ["torch.distributed.tensor"] * on


def test_a_value_of_either_flag_that_is_neither(monkeypatch):
    for name in ("views", "redistribution"):
        with monkeypatch.context() as changed, pytest.warns(RuntimeWarning) as warned:
            changed.setenv(TABLE[name].flag, "maybe")
            _autoload.autoload()
        assert f"{TABLE[name].flag}='maybe' is neither on nor off" in str(warned[0].message)


def test_several_may_wait_for_the_same_module(tmp_path, monkeypatch):
    (tmp_path / "imported_once.py").write_text("value = 1")
    monkeypatch.syspath_prepend(tmp_path)
    called = []
    for i in range(3):
        _imports.when_imported("imported_once", lambda i=i: called.append(i))
    assert importlib.import_module("imported_once").value == 1 and sorted(called) == [0, 1, 2]


def test_a_module_that_is_already_imported_is_switched_on_at_once():
    called = []
    _imports.when_imported("sys", lambda: called.append(1))
    assert called == [1]


@pytest.mark.costly
def test_a_value_that_is_neither_on_nor_off_is_a_warning(program):
    result = program("import torch", redistribution="perhaps")
    assert result.returncode == 0
    said = "USE_CUTE_REDISTRIBUTION='perhaps' is neither on nor off: set USE_CUTE_REDISTRIBUTION"
    assert f"{said} to 1 or 0" in result.stderr


@pytest.mark.costly
@pytest.mark.parametrize("rank", [None, "0", "1"])
def test_each_flag_that_nobody_knows_is_one_warning(program, rank):
    """With the nearest flag, by the first rank, and so is one of earlier versions; the known ones
    are in force.
    """
    code = "import torch.distributed.tensor, cute_sharding; print(cute_sharding.is_enabled())"
    of_rank = {} if rank is None else {"RANK": rank}
    of_old = "USE_CUTE_IMPLICIT_REDISTRIBUTION"
    flags = {"USE_CUTE_VIEWS": "1", "USE_CUTE_MOVMENT": "1", of_old: "error"}
    result = program(code, "1", **flags, **of_rank)
    assert succeeds(result).split() == ["True"]
    assert result.stderr.count("RuntimeWarning") == 3 * (rank != "1")
    if rank != "1":
        assert f"the environment variable {of_old} has no effect" in result.stderr
        for name, near in (("MOVMENT", "MOVEMENT"), ("VIEWS", "VIEW_PROPAGATION")):
            said = f"USE_CUTE_{name}, which is not a flag. Did you mean USE_CUTE_{near}?"
            assert said in result.stderr


@pytest.mark.processes
@pytest.mark.costly
def test_spawned_workers_are_switched_on_too(program, tmp_path):
    """Three real processes: uneven shards through a view, forward and backward, by a program
    without a word of this package.
    """
    code = f"""
import torch.multiprocessing as multiprocessing
from autoload_worker import view_of_uneven_shards
if __name__ == "__main__":
    args = (3, {str(tmp_path / "rendezvous")!r})
    multiprocessing.spawn(view_of_uneven_shards, args=args, nprocs=3)
    print("done")
"""
    assert succeeds(program(code, "1")).strip() == "done"


# What each flag switches on: a view that torch's rules refuse, and a redistribution that torch
# takes two collectives for.
WHICH = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
mesh = init_device_mesh("cpu", (2, 2))
tensor = DTensor.from_local(torch.ones(4, 4), mesh, [Shard(0), Shard(1)], run_check=False)
with CommDebugMode() as collectives:
    tensor.redistribute(placements=[Shard(1), Shard(0)])
mesh = init_device_mesh("cpu", (4,))
whole = dict(shape=(7, 3), stride=(3, 1))
uneven = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)], run_check=False, **whole)
try:
    views = list(uneven.view(21).shape) == [21]
except RuntimeError:
    views = False
print(views, collectives.get_total_counts() == 1)
"""


@pytest.mark.costly
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("redistribution", [False, True])
def test_the_two_flags_are_two_switches(program, views, redistribution):
    out = succeeds(program(WHICH, str(int(views)), redistribution=str(int(redistribution))))
    assert out.split() == [str(views), str(redistribution)]
