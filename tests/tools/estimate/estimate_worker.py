"""What is measured of the programs of estimated_programs.py: over gloo by every rank, and by dry
runs of every rank in one process.
"""

import pickle
import sys
from datetime import timedelta
from itertools import product
from math import prod
from pathlib import Path

import estimated_programs
import torch
import torch.distributed as dist
from estimated_programs import MODELS
from processes_worker import wait_for_others
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh

import cute_sharding
from cute_sharding._settings import from_environment
from cute_sharding.dtensor.replaced import dispatch_modes
from cute_sharding.dtensor.replaced.communication import stand_for
from cute_sharding.tools.estimate import __main__ as run
from cute_sharding.tools.estimate import stand_ins
from cute_sharding.tools.estimate.storages import Layers, Storages
from cute_sharding.tools.estimate.values import DEPTHS, SETTINGS, Traffic
from cute_sharding.tools.profile.recorder import Recorder

MESHES = (2,), (4,), (2, 2), (4, 1)
# Rank 0 on each of them, and the last one where sizes do not divide.
RANKS = [*((sizes, 0) for sizes in MESHES), ((4,), 3)]
PATIENCE = timedelta(seconds=120)


def cases(mesh):
    """(a name, the model, whether and how the package is on)."""
    for model, (setting, flags) in product(MODELS, SETTINGS.items()):
        yield f"{model.__name__} on {mesh}, {setting}", model, from_environment(flags)


def mesh_of(sizes):
    names = ("dp", "tp")[-len(sizes) :]
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def with_settings(settings, call):
    if settings is None:
        return call()
    with cute_sharding.enabled(**settings):
        return call()


def recorded(make):
    """What setting up and a step of a program send."""
    with Recorder() as setup:
        step = make()
    with Recorder() as recorder:
        step()
    return setup.collectives, recorder.collectives


def measure(rank, world, rendezvous, folder, sizes):
    """Over gloo, on a mesh of all ranks."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=PATIENCE
    )
    mesh, found = mesh_of(sizes), {}
    for name, model, settings in cases(sizes):
        torch.manual_seed(0)
        both = with_settings(settings, lambda model=model: recorded(lambda: model(mesh)))
        found[name] = [Traffic.of(each, sizes) for each in both]
    Path(folder, f"measured-{rank}").write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    wait_for_others(world, f"{rendezvous}-left")


def estimated(sizes, rank):
    """The same by a dry run of one rank."""
    stand_for(run.BACKENDS["cpu"])
    dispatch_modes.start_group(rank, prod(sizes))
    mesh, found = mesh_of(sizes), {}
    for name, model, settings in cases(sizes):
        one = with_settings(
            settings, lambda model=model: run.once(lambda: model(mesh), sizes, "cpu")
        )
        assert one.failure is None, (name, one.failure)
        found[name] = [one.setup, one.step]
    dist.destroy_process_group()
    return found


def on_one_mesh(call):
    dispatch_modes.start_group(0, 4)
    try:
        return call(mesh_of((2, 2)))
    finally:
        dist.destroy_process_group()


def once(model, *args):
    return on_one_mesh(lambda mesh: run.once(lambda: model(mesh, *args), (2, 2), "cpu"))


def peaks(model):
    """The most that is held, by this package's count and by torch's."""

    def both(mesh):
        layers, fakes = Layers(), stand_ins.Fakes()
        memory = Storages(layers, fakes.mode)
        with layers, memory, memory.resizing(), fakes, MemTracker() as tracker:
            model(mesh)()
        (of_torch,) = tracker.get_tracker_snapshot("peak").values()
        return max(sum(held.values()) for held in memory.peaks.values()), of_torch["Total"]

    return on_one_mesh(both)


def checks():
    """What else is looked at, in one process."""
    layers = {n: once(estimated_programs.sharded, n) for n in (*DEPTHS, 7)}
    return {
        "peaks": [
            peaks(model) for model in (estimated_programs.mlp, estimated_programs.transformer)
        ],
        "layers": layers,
        **{
            name: once(getattr(estimated_programs, name))
            for name in (
                "reads_a_value",
                "runs_by_itself",
                "raises",
                "makes_a_mesh",
                "takes_an_op_apart",
                "has_a_frozen_parameter",
            )
        },
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, result = sys.argv[1:]
    found = checks() if what == "checks" else estimated(*RANKS[int(what)])
    Path(result).write_bytes(pickle.dumps(found))
