"""What the processes of profile/test_profile_over_gloo.py run: every rank records what it sends,
and compares it with CommDebugMode and with what its backend was handed.
"""

import random
import time
from collections import Counter
from datetime import timedelta

import recording_group
import stranger_programs
import torch
import torch.distributed as dist
from processes_worker import distribute
from recording_group import Recording
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed._tensor.common_dtensor import ModelArgs, Transformer

import cute_sharding
from cute_sharding.tools.profile.recorder import Recorder

KINDS = {
    "all_gather_into_tensor": "all-gather",
    "all_reduce": "all-reduce",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_to_all_single": "all-to-all",
    "shard_dim_alltoall": "all-to-all",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "alltoall_base_": "all-to-all",
    "scatter_": "scatter",
    "allreduce_": "all-reduce",
}
# CommDebugMode does not count messages from rank to rank.
UNCOUNTED = ("send", "receive", "messages", "barrier")


def start(rank, world, rendezvous, backend, *jobs):
    torch.set_num_threads(1)
    recording_group.register()
    dist.init_process_group(
        backend,
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=100),
    )
    try:
        for name, *args in jobs:
            globals()[name](*args)
        dist.barrier()
        time.sleep(0.3)  # the threads of whoever is done first serve the others still
    finally:
        dist.destroy_process_group()


def by_kind(mode):
    """What CommDebugMode counted."""
    found = Counter()
    for op, times in mode.get_comm_counts().items():
        found[KINDS[str(op).rpartition(".")[2]]] += times
    return found


def compared(run, case, *, busiest=False):
    """Run something, and compare what was recorded; what it gives, and what was recorded."""
    Recording.events.clear()
    with CommDebugMode() as counted, Recorder() as recorder:
        result = run()
    sent = recorder.collectives
    mine = [(one.op, one.received_bytes) for one in sent if one.op != "messages"]
    theirs = [event for event in Recording.events if event[0] not in ("send", "receive")]
    assert mine == theirs, (case, mine, theirs)
    messages = sum(one.received_bytes for one in sent if one.op in UNCOUNTED)
    assert messages == sum(n for kind, n in Recording.events if kind == "receive"), case
    wanted = Counter(one.op for one in sent if one.op not in UNCOUNTED)
    assert by_kind(counted) == wanted, (case, wanted)
    if busiest:
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, [one.received_bytes for one in sent])
        for k, one in enumerate(sent):
            if one.busiest_bytes is not None:
                by_all = [received[k] for received in every]
                of_group = max(by_all[rank] for rank in one.ranks)
                assert of_group <= one.busiest_bytes <= max(by_all), (case, one, by_all)
    return result, sent


def programs(seeds):
    """Drawn programs with the package on: they raise on all ranks or on none."""
    sent = ran = 0
    with cute_sharding.enabled(redistribution=True, movement=True):
        for seed in seeds:
            sizes, shape, placements, rng = stranger_programs.draw_program(seed)
            mesh = DeviceMesh("cpu", torch.arange(4).reshape((2, 2) if len(sizes) == 2 else (4,)))
            placements = [*placements, *placements][: mesh.ndim]
            start = torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape)

            def program():
                x = y = distribute(start, mesh, placements)
                for _ in range(4):
                    step = stranger_programs.draw_step(rng, tuple(y.shape))
                    y = stranger_programs.run_step(
                        y, step, lambda full, to: distribute(full, mesh, to[: mesh.ndim])
                    )
                y.sum().full_tensor().backward()
                return x.grad

            state = random.getstate()
            try:
                _, found = compared(program, seed, busiest=True)
                sent, ran = sent + len(found), ran + 1
            except (RuntimeError, IndexError, NotImplementedError, ValueError):
                random.setstate(state)
    assert ran >= len(seeds) // 2 and sent > len(seeds), (ran, sent)


def transformer(switched_on):
    """torch's own test transformer, its tensor parallelism with sequences cut, forward and
    backward.
    """
    torch.manual_seed(0)
    mesh = DeviceMesh("cpu", torch.arange(4))
    arguments = ModelArgs(n_layers=1, vocab_size=16, max_seq_len=8, dim=16, n_heads=4)
    arguments.dropout_p = 0.0
    # Of attention on CPUs torch has no rule: it gets local tensors, as in torch's own test.
    model = Transformer.parallelize(
        Transformer(arguments), mesh, use_seq_parallel=True, local_output_for_attn=True
    )
    ids = torch.arange(16).reshape(2, 8) % 16

    def forward():
        return model(ids)

    def step():
        out = forward()
        out.sum().backward()
        return out

    if switched_on:
        with cute_sharding.enabled(redistribution=True, movement=True):
            _, sent = compared(step, "transformer", busiest=True)
    else:
        _, sent = compared(step, "transformer", busiest=True)
    assert {one.backward for one in sent} == {True, False}
    # The model is torch's own: the program's line is the one that calls it.
    assert {one.place.function.rpartition(".")[2] for one in sent} <= {"forward", "step"}


def direct():
    """What torch.distributed is called for, on gloo's own group: a group that is written in Python
    is called without torch's dispatcher.
    """
    rank = dist.get_rank()
    x = torch.full((6,), float(rank))
    with CommDebugMode() as counted, Recorder() as recorder:
        dist.all_reduce(x)
        dist.broadcast(x, 1)
        dist.all_gather([torch.empty(6) for _ in range(4)], x)
        dist.reduce_scatter_tensor(torch.empty(2), torch.ones(8))
        dist.all_to_all_single(torch.empty(8), torch.ones(8))
        ops = [
            dist.P2POp(dist.isend, x, (rank + 1) % 4),
            dist.P2POp(dist.irecv, torch.empty(6), (rank - 1) % 4),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    elements = {one.op: (one.received, one.sent) for one in recorder.collectives}
    assert elements == {
        "all-reduce": (9, 9),
        "broadcast": (0, 6) if rank == 1 else (6, 0),
        "all-gather": (18, 18),
        "reduce-scatter": (6, 6),
        "all-to-all": (6, 6),
        "send": (0, 6),
        "receive": (6, 0),
    }, elements
    kinds = Counter(one.op for one in recorder.collectives if one.op not in UNCOUNTED)
    assert by_kind(counted) == kinds, (by_kind(counted), kinds)


def between_meshes():
    """This package's messages from rank to rank are one batch."""
    rank = dist.get_rank()
    source, target = (DeviceMesh("cpu", torch.arange(k, k + 2)) for k in (0, 2))
    local = torch.full((3, 4), float(rank)) if rank < 2 else torch.empty(0)
    shape = torch.Size((6, 4))
    rows = DTensor.from_local(
        local, source, [Shard(0)], run_check=False, shape=shape, stride=(4, 1)
    )
    with Recorder() as recorder:
        cute_sharding.redistribute(rows, target, [Shard(1)])
    (batch,) = recorder.collectives
    assert batch.op in ("messages", "all-to-all"), batch
    assert batch.busiest_bytes >= 6 * 2 * 4, batch  # ranks 2 and 3 receive two columns of six rows
    assert (batch.received_bytes > 0) == (rank >= 2), batch
    assert batch.place.function == "between_meshes", batch
