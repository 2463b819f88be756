"""Runs drawn programs under a setting, and prints what each does as JSON, by how it was run.

"fresh": in a process of its own, which has run no op; "together": one after the other; "turned":
the last first; "emptied": with all caches emptied between any two ops. For test_no_history.py:
``python no_history_worker.py SETTINGS FIRST LAST``.
"""

import faulthandler
import json
import os
import sys
import warnings

import stranger_programs
import torch
import torch.distributed as dist
from processes_worker import distribute, mesh_of_ranks
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import cute_sharding
from cute_sharding.dtensor.bookkeeping import kept
from cute_sharding.dtensor.replaced import op_schemas


def empty():
    kept.empty()
    op_schemas.clear_propagation_caches()


def run(seed, settings, between=lambda: None):
    with cute_sharding.enabled(**settings):
        return stranger_programs.events_of(seed, between)


def alone(run, seed, settings):
    """``run(seed, settings)`` in a process of its own."""
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            faulthandler.dump_traceback_later(200, exit=True)
            os.write(write, json.dumps(run(seed, settings)).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        found = pipe.read()
    os.wait()
    return json.loads(found or '["died"]')


def whole(x):
    return x.full_tensor().detach() if isinstance(x, DTensor) else x.detach()


def looks(rng, mesh):
    """What a program looks at on one rank: free views, slices of dims that are not cut, shapes."""
    shape = rng.choice([(2, 6, 4), (4, 6, 2), (2, 8, 4)])
    x = distribute(torch.zeros(shape), mesh, [Shard(rng.randrange(3)), Replicate()])
    cut = x.placements[0].dim
    d = rng.choice([d for d in range(3) if d != cut])
    views = (
        lambda: x.view(shape[0], -1, 2).shape,
        lambda: x.transpose(0, 2).shape,
        lambda: x.unflatten(cut, (2, -1)).placements,
        lambda: x[(slice(None),) * d + (slice(1, None),)].shape,
        lambda: x.select(d, 0).size(),
        lambda: x.detach().unsqueeze(0).flatten(1, 2).placements,
    )
    return rng.choice(views)


def looked_at(first, last):
    """Programs, before each op of which one rank alone looks at something else, on gloo."""
    mesh = mesh_of_ranks([[0, 1], [2, 3]])
    made = lambda full, placements: distribute(full, mesh, placements)  # noqa: E731
    for seed in range(first, last):
        for settings in ({}, {"redistribution": True, "movement": True}):
            _, shape, placements, rng = stranger_programs.draw_program(seed)
            placements = [p if p != Partial() else Shard(0) for p in (*placements, Replicate())]
            full = torch.arange(float(torch.Size(shape).numel())).reshape(shape) / 10
            x, expected = made(full, placements[:2]), full
            with cute_sharding.enabled(**settings):
                for _ in range(rng.randint(2, 6)):
                    step = stranger_programs.draw_step(rng, tuple(expected.shape))
                    who, look = rng.randrange(4), looks(rng, mesh)
                    if step[0] in ("dropout", "uniform"):
                        continue
                    try:
                        single = stranger_programs.run_step(expected, step, lambda full, _: full)
                    except (RuntimeError, IndexError):  # what one device refuses
                        continue
                    if dist.get_rank() == who and is_free(look):
                        look()
                    try:
                        x, expected = stranger_programs.run_step(x, step, made), single
                    except RuntimeError as error:
                        assert "view size is not compatible" in str(error), (seed, step)
                        break
                found = whole(x)
            assert torch.allclose(found, expected.detach(), rtol=1e-4, atol=1e-5), (seed, settings)


def is_free(look):
    """Whether it sends nothing: asked where nothing can be sent."""
    with stranger_programs.Sent() as sent:
        look()
    return not sent.events


def numbers_read_alone():
    """What every program does with a number: reads it on one rank."""
    mesh = mesh_of_ranks([[0, 1], [2, 3]])
    full = torch.arange(48.0).reshape(2, 6, 4) / 10 - 1
    for settings in ({}, {"redistribution": True, "movement": True}):
        for placements in ([Shard(2), Shard(1)], [Replicate(), Shard(1)], [Shard(0), Shard(2)]):
            with cute_sharding.enabled(**settings):
                x = distribute(full, mesh, placements)
                numbers = {
                    "loss": (x.transpose(0, 1).reshape(6, 8).pow(2).mean(), float),
                    "slice": (x[:, 1:4].isfinite().all(), bool),
                    "norm": (torch.linalg.vector_norm(x.flip(0)), float),
                    "accuracy": ((x[..., 1:].argmax(-1) == 1).float().mean(), float),
                    "greatest": (x.view(12, 4).max(), float),
                    "sum": (x.roll(1, 2).sum(), str),
                }
                numbers["loss"][0].backward()
                numbers["total"] = (torch.nn.utils.clip_grad_norm_([x], 1.0), float)
                numbers["flag"] = ((x.grad > 100).any(), bool)
                for i, (number, read) in enumerate(numbers.values()):
                    if dist.get_rank() == i % 4:
                        read(number)
                assert abs(float(numbers["loss"][0]) - full.pow(2).mean()) < 1e-4


def main():
    settings, first, last = json.loads(sys.argv[1]), *map(int, sys.argv[2:4])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    seeds = range(first, last)
    found = {
        "fresh": {seed: alone(run, seed, settings) for seed in seeds},  # before any op has run here
        "together": {seed: run(seed, settings) for seed in seeds},
        "turned": {seed: run(seed, settings) for seed in reversed(seeds)},
        "emptied": {seed: run(seed, settings, empty) for seed in seeds},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
