"""What the processes of test_worlds.py run: a trainer on two, and an engine on two others, which
are a world of their own.
"""

import asyncio
import pickle
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

TRAINERS, WORKERS = 2, 2
PATIENCE = timedelta(seconds=100)


def start(number, folder, job):
    """A rank of the trainer, or of the engine."""
    sys.path.insert(0, str(Path(__file__).parent))
    torch.set_num_threads(1)
    trains = number < TRAINERS
    rank = number if trains else number - TRAINERS
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/{'trainer' if trains else 'engine'}",
        rank=rank,
        world_size=TRAINERS if trains else WORKERS,
        timeout=PATIENCE,
    )
    store = dist.FileStore(f"{folder}/calls", TRAINERS + WORKERS)
    store.set_timeout(PATIENCE)
    port = int(store.get("port")) if number else free_port(store)
    try:
        globals()[job](trains, rank, store, port)
        store.set(f"left {number}", "")
        store.wait([f"left {k}" for k in range(TRAINERS + WORKERS)])
    finally:
        dist.destroy_process_group()


def free_port(store):
    from cute_sharding.integrations.groups import meeting_place

    port = meeting_place("127.0.0.1").port
    store.set("port", str(port))
    return port


def joined(trains, rank, port):
    from cute_sharding.integrations.groups import join

    number = rank if trains else TRAINERS + rank
    return join("127.0.0.1", port, rank=number, size=TRAINERS + WORKERS)


def whole_weights(step):
    sizes = {"a.weight": (5, 6), "b.weight": (8, 6), "c.weight": (8, 6), "d": (7,)}
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(size, generator=generator) for name, size in sizes.items()}


def shards(step):
    mesh = DeviceMesh("cpu", list(range(TRAINERS)))
    return {name: distribute_tensor(x, mesh, [Shard(0)]) for name, x in whole_weights(step).items()}


def groups(trains, rank, store, port):
    """A rank of the group is not one of its world, and joining changes nothing else."""
    group = joined(trains, rank, port)
    number = rank if trains else TRAINERS + rank
    assert (group.rank(), group.size()) == (number, TRAINERS + WORKERS)
    assert (dist.get_rank(), dist.get_world_size()) == (rank, 2)
    sent = torch.arange(4.0) + 10 * number
    received = torch.empty(4)
    dist.all_to_all_single(received, sent, group=group)
    assert received.tolist() == [10 * k + number for k in range(4)]
    dist.destroy_process_group(group)


def streams(trains, rank, store, port):
    """Whole tensors on those who want them, and no bucket is larger than said."""
    from cute_sharding.integrations.streams import Stream

    stream = Stream(joined(trains, rank, port), bucket_bytes=200)
    for step in range(3):
        if trains:
            stream.send(shards(step).items())
            continue
        found = dict(stream.receive())
        expected = whole_weights(step)
        assert [*found] == [*expected]
        assert all(torch.equal(x, expected[name]) for name, x in found.items())
        plans = [*stream._plans.values()]
        assert len(plans) == 4 and all(plan.received_bytes <= 200 for plan in plans)
    mixed = Stream(bucket_bytes=10**6)  # each in its own world
    if trains:
        found = dict(mixed.whole(shards(5).items()))
        assert all(torch.equal(x, found[name]) for name, x in whole_weights(5).items())
        (plan,) = mixed._plans.values()
        assert plan.received_bytes < sum(x.nbytes for x in found.values())


class Client:
    """Asks every worker to call a method of its engine, and waits until all have."""

    def __init__(self, store):
        self.store, self.count = store, 0

    def __getattr__(self, method):
        return lambda *args: self.ask(method, args)

    def ask(self, method, args):
        self.count += 1
        self.store.set(f"ask {self.count}", pickle.dumps((method, args)))
        for worker in range(WORKERS):
            said = self.store.get(f"answer {self.count} {worker}").decode()
            if said:
                raise RuntimeError(said)


def serve(store, rank, methods):
    count = 0
    while True:
        count += 1
        method, args = pickle.loads(store.get(f"ask {count}"))
        said = ""
        try:
            methods[method](*args)
        except Exception:
            said = traceback.format_exc()
        store.set(f"answer {count} {rank}", said)
        if method == "stop":
            return


def vllm(trains, rank, store, port):
    """vLLM's calls, in its order, on both sides."""
    import standins

    worker_factory, trainer_factory = standins.vllm()
    from cute_sharding.integrations.vllm import register

    register()
    register()
    if trains:
        vllm_trainer(rank, store, port, trainer_factory.made("cute"))
    else:
        vllm_worker(rank, store, worker_factory.made("cute"))


def vllm_trainer(rank, store, port, engine_class):
    from cute_sharding.integrations.vllm.trainer import CuteTrainerInitInfo, ShardedSource

    client, step = Client(store), [0]
    info = CuteTrainerInitInfo(
        rank=rank, master_address="127.0.0.1", master_port=port, trainers=2, world_size=4
    )
    try:
        engine_class.trainer_init(info, client=client, source=None)
    except TypeError as error:
        assert "ShardedSource(model)" in str(error)
    engine = engine_class.trainer_init(
        info, client=client, source=ShardedSource(lambda: shards(step[0]))
    )
    for step[0] in range(3):
        engine.send_weights()
        if rank == 0:
            client.check(step[0])
    if rank == 0:
        client.stop()
    engine.shutdown()


class Model(torch.nn.Module):
    """Two layers, one of them fused of two weights and cut by rows; and one that nobody loads."""

    def __init__(self, rank):
        import standins

        super().__init__()
        self.rank = rank
        self.a, self.bc, self.idle = (standins.Layer(*s) for s in ((5, 6), (8, 6), (2, 2)))

    @staticmethod
    def loader(param, loaded, at=0):
        param.data.narrow(0, at, loaded.shape[0]).copy_(loaded)

    def load_weights(self, weights):
        for name, loaded in weights:
            if name == "a.weight":
                self.a.weight.weight_loader(self.a.weight, loaded)
            elif name != "d":
                mine = loaded.chunk(2)[self.rank]
                self.bc.weight.weight_loader(self.bc.weight, mine, 4 * (name == "c.weight"))


def vllm_worker(rank, store, engine_class):
    from cute_sharding.integrations.vllm.worker import CuteInitInfo

    model = Model(rank)
    model.idle.weight.data.fill_(3)
    places = [x.data_ptr() for x in model.parameters()]
    here = SimpleNamespace(data_parallel_index=0, world_size=2, rank=rank)
    engine = engine_class(None, SimpleNamespace(parallel_config=here), "cpu", model)

    def check(step):
        whole = whole_weights(step)
        fused = torch.cat([whole[name].chunk(2)[rank] for name in ("b.weight", "c.weight")])
        assert torch.equal(model.a.weight, whole["a.weight"].t())
        assert torch.equal(model.bc.weight, fused.t())
        assert model.idle.weight.eq(3).all() and model.idle.table.eq(5).all()
        assert model.a.table.eq(5).all()
        assert [x.data_ptr() for x in model.parameters()] == places
        assert engine.plan.received_bytes == (5 * 6 + 8 * 6) * 4

    serve(
        store,
        rank,
        {
            "init_weight_transfer_engine": lambda told: engine.init_transfer_engine(
                CuteInitInfo(**told)
            ),
            "start_weight_update": engine.start_weight_update,
            "update_weights": engine.update_weights,
            "finish_weight_update": engine.finish_weight_update,
            "check": check,
            "stop": lambda: None,
        },
    )
    engine.shutdown()


def verl(trains, rank, store, port):
    """verl's calls, in its order: whole tensors of a trainer that gathers, then shards."""
    import standins

    known = standins.verl()
    import cute_sharding.integrations.verl  # noqa: F401

    is_master = trains and rank == 0
    engine = known["cute"](bucket_size=200, is_master=is_master, address="127.0.0.1")
    for step in range(3):
        told = engine.prepare()
        if is_master:
            store.set(f"told {step}", pickle.dumps(told))
        told = pickle.loads(store.get(f"told {step}"))
        sides = type(engine).build_topology(TRAINERS, WORKERS, [told, {}, {}, {}])
        side = sides[not trains]
        engine.init_process_group(**{name: values[rank] for name, values in side.items()})
        if trains:
            engine.state = (lambda step=step: shards(step)) if step else None
            pairs = ((name, x.full_tensor()) for name, x in shards(step).items())
            asyncio.run(engine.send_weights(iter(()) if step else pairs, global_steps=step))
        else:
            assert asyncio.run(received(engine, step)) == [*whole_weights(step)]
        engine.finalize()


async def received(engine, step):
    names = []
    async for name, x in engine.receive_weights(global_steps=step):
        assert torch.equal(x, whole_weights(step)[name])
        names.append(name)
    return names
