"""Loads on real processes: drawn loaders, which write to the engine's tensors as engines do, beside
the same loader on whole tensors; and what is refused.
"""

import random

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import cute_sharding
from cute_sharding import Spec, plan_load, plan_refit, plan_reshard
from cute_sharding.dtensor.run.specs import name_of
from cute_sharding.dtensor.run.this_process import ReshardError
from cute_sharding.models.tensor import itemsize_of, wire_of
from cute_sharding.relations import NotOnlyMoved

TRAINER = [[0, 1], [2, 3]]
DTYPES = (torch.float32, torch.bfloat16, torch.int64)


def numbered(shape, first, dtype):
    return (torch.arange(first, first + torch.Size(shape).numel()) % 251).view(shape).to(dtype)


def drawn_weights(rng):
    """Whole tensors by name, and how each lies: placements on the trainer's mesh or on a slice of
    it, or whole on each of its ranks.
    """
    weights, how = {}, {}
    for k in range(rng.randint(1, 5)):
        shape = tuple(rng.choice([0, 1, 3, 4, 7, 8, 12]) for _ in range(rng.randint(1, 3)))
        weights[f"w{k}"] = numbered(shape, rng.randrange(200), rng.choice(DTYPES))
        dims = range(len(shape))
        kinds = [Replicate(), *(Shard(d) for d in dims)]
        one, other = rng.choice(kinds), rng.choice(kinds)
        if rng.random() < 0.3 and isinstance(other, Shard):
            one = _StridedShard(other.dim, split_factor=2)
        how[f"w{k}"] = rng.choice([(one, other), (one, other), (rng.choice(kinds),), ()])
    return weights, how


def changed(whole, more):
    """The whole tensor after so many changes of a few elements."""
    flat = whole.clone().view(-1)
    for k in range(more):
        flat[k :: 3 + 2 * k] += 1
    return flat.view(whole.shape)


def as_it_lies(whole, how, mesh):
    if not how:
        return whole
    on = mesh if len(how) == 2 else mesh["tp"]
    if any(isinstance(p, _StridedShard) for p in how):  # which distribute_tensor does not divide
        replicated = distribute_tensor(whole, on, [Replicate()] * 2)
        with cute_sharding.enabled():
            return replicated.redistribute(on, how)
    return distribute_tensor(whole, on, how)


def drawn_engine(seed, rank, held):
    """An engine's tensors on one of its two ranks, and its loader: both divide a dim, or take all,
    transpose, pad, cast, write over, fill, put together in a buffer of their own.
    """
    rng = random.Random(seed)
    weights, _ = drawn_weights(random.Random(seed))
    into, writes = {}, []
    for name, whole in weights.items():
        for k in range(rng.randint(0, 2)):
            draw_write(rng, rank, held, f"{name}.{k}", name, whole, into, writes)
    if rng.random() < 0.3 and rank == 1 and into:
        into.pop(next(iter(into)))  # a stage of a pipeline
    into["cache"] = torch.full((5,), held, dtype=torch.float32)
    shuffled = rng.sample(writes, len(writes))

    def load(w):
        for name, write in shuffled:
            if name in into:
                write(w, into[name].data)

    return into, load


def draw_write(rng, rank, held, name, source, whole, into, writes):
    dtype = rng.choice(DTYPES)
    turned = whole.ndim > 1 and rng.random() < 0.3
    shape = list(whole.mT.shape if turned else whole.shape)
    d = rng.randrange(len(shape))
    parts = rng.choice([1, 2])
    size = -(-shape[d] // parts) + rng.choice([0, 0, 2])
    before = rng.choice([0, 1])
    start = min(rank * size if parts == 2 else 0, shape[d])
    count = max(min(size, shape[d] - start), 0)
    shape[d] = before + size
    lies = torch.full(shape, held).to(dtype)
    into[name] = lies.mT.contiguous().mT if lies.ndim > 1 and rng.random() < 0.3 else lies
    kind = rng.randrange(6)

    def write(w, tensor):
        x = w[source].mT if turned else w[source]
        part = x.narrow(d, start, count)
        onto = tensor.narrow(d, before, count)
        if kind == 0:
            onto.copy_(part)
        elif kind == 1:
            for one, other in zip(onto.unbind(0), part.unbind(0)):
                one.copy_(other)
        elif kind == 2:
            tensor.zero_()
            onto[...] = part.to(tensor.dtype)
        elif kind == 3:
            buffer = torch.empty(part.shape, dtype=part.dtype)
            buffer.copy_(part)
            onto.copy_(buffer)
        elif kind == 4:
            tensor.fill_(3)
            onto.copy_(torch.cat([part.flip(0)[:1], part[1:]]) if len(part) else part)
        else:
            bits = part.contiguous().view(-1)
            onto.copy_(bits.view(torch.uint8).clone().view(part.dtype).view(part.shape))

    writes.append((name, write))


def needed(seed, rank, weights):
    """The bytes that a rank of the engine is sent: each element of a weight that its loader brings
    it, once, as the loader does it with elements that are numbers.
    """
    into, load = drawn_engine(seed, rank, 0)
    dtypes, total = {name: x.dtype for name, x in into.items()}, 0
    for x in into.values():
        x.data = torch.zeros(x.shape, dtype=torch.int64)
    marks, first = {}, 1 << 20
    for name, whole in weights.items():
        marks[name] = torch.arange(first, first + whole.numel()).view(whole.shape)
        first += whole.numel()
    load(marks)
    for name, whole in weights.items():
        mine = {key: x[torch.isin(x, marks[name])].unique() for key, x in into.items()}
        onto = {name_of(dtypes[key]) for key, found in mine.items() if len(found)}
        width = itemsize_of(wire_of(name_of(whole.dtype), onto))
        total += len(torch.cat([*mine.values()]).unique()) * width
    return total


def drawn(first, last):
    """Loads of drawn loaders are what the loaders make of whole tensors."""
    rank = dist.get_rank()
    mesh = DeviceMesh("cpu", TRAINER, mesh_dim_names=("dp", "tp"))
    for seed in range(first, last):
        weights, how = drawn_weights(random.Random(seed))
        limit = [None, 1 << 20][seed % 2]
        if rank < 4:
            state = {n: as_it_lies(x, how[n], mesh) for n, x in weights.items()}
            plan = plan_load(source=state, memory_limit=limit)
            plan.run(state)
            assert plan.received_bytes == 0
            for more in (1, 2):
                later = {n: as_it_lies(changed(x, more), how[n], mesh) for n, x in weights.items()}
                plan.run(later, since=state if seed % 3 or more == 2 else False)
                state = later
            continue
        into, load = drawn_engine(seed, rank - 4, 9)
        before = {name: x.clone() for name, x in into.items()}
        plan = plan_load(load, into, memory_limit=limit)
        assert all(torch.equal(x, before[name]) for name, x in into.items()), seed
        for more in (0, 1, 2):
            plan.run(since=bool(more and (seed % 3 or more == 2)))
            wanted, by_hand = drawn_engine(seed, rank - 4, 9)
            by_hand({n: changed(x, more) for n, x in weights.items()})
            for name, x in into.items():
                assert torch.equal(x, wanted[name]), (seed, name, x, wanted[name])
        assert plan.unwritten["cache"] == 5
        assert plan.received_bytes == needed(seed, rank - 4, weights), seed


def raised(function, kind, words):
    try:
        function()
    except kind as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError(f"{words} was not raised")


def computed():
    """What computes is refused by all ranks, with its line; another plan runs after it."""
    rank = dist.get_rank()
    mesh = DeviceMesh("cpu", TRAINER, mesh_dim_names=("dp", "tp"))
    state = {"w": distribute_tensor(torch.ones(4, 6), mesh, [Shard(0), Shard(1)])}
    into = {"p": torch.zeros(4, 6), "scale": torch.zeros(1)}

    def quantize(w):
        into["p"].copy_(w["w"])
        into["scale"].copy_(w["w"].abs().max())

    def exchanged(w):
        into["p"].copy_(w["w"])
        into["p"][0].copy_(into["scale"].expand(6))

    for loader, words in (
        (quantize, ["'scale'", "'w'", "load_worker.py:"]),
        (exchanged, ["'p'", "'scale' held"]),
        (lambda w: w["v"], ["takes 'v'", "did you mean 'w'"]),
        (lambda w: w["w"].full_tensor(), ["full_tensor", "remove the call"]),
        (lambda w: into["p"].copy_(w["w"][: int(w["w"].sum())]), ["reads"]),
    ):
        if rank < 4:
            raised(
                lambda: plan_load(source=state),
                RuntimeError,
                ["plan_load failed on rank 4", *words],
            )
        elif rank == 4:
            raised(lambda f=loader: plan_load(f, into), (NotOnlyMoved, KeyError), words)
        else:
            raised(lambda f=loader: plan_load(f, into), (NotOnlyMoved, KeyError), words)
    plan = (
        plan_load(source=state) if rank < 4 else plan_load(lambda w: into["p"].copy_(w["w"]), into)
    )
    plan.run(state if rank < 4 else None)
    assert rank < 4 or bool((into["p"] == 1).all())


def quantizes():
    """What a loader computes is computed again at each run, of what was moved, cast, put together
    and computed before; or refused, where it cannot be.
    """
    rank = dist.get_rank()
    mesh = DeviceMesh("cpu", TRAINER, mesh_dim_names=("dp", "tp"))

    def engine():
        names = {"q": (4, 6), "scale": (4,), "fused": (8, 6), "turned": (6, 4), "bias": (3,)}
        return {name: torch.full(shape, 7.0) for name, shape in names.items()}

    def loader(into, r):
        def load(w):
            x = w["w"].narrow(0, 4 * r, 4)
            scale = x.abs().amax(1).clamp(min=1e-6) / 8
            into["scale"].copy_(scale)
            into["q"].copy_((x / scale[:, None]).round())
            into["fused"][:4] = x
            into["fused"][4:].copy_(torch.cat([x.flip(0)[:2] * 2, x[:2] + x[2:]]))
            into["turned"].copy_(x.mT.double().exp())
            into["bias"][1:].copy_(w["b"][r : r + 2])
            into["bias"][:1].copy_(w["b"].to(torch.bfloat16).sum(0, keepdim=True))
            into["bias"].mul_(0.5)

        return load

    torch.manual_seed(3)
    weights = {"w": torch.randn(8, 6), "b": torch.randn(3)}
    mine = engine()
    for run in range(2):
        whole = {name: x + run for name, x in weights.items()}
        if rank < 4:
            state = {
                "w": distribute_tensor(whole["w"], mesh, [Shard(0), Shard(1)]),
                "b": whole["b"],
            }
        if run == 0 and rank < 4:
            plan = plan_load(source=state, computes=True)
        elif run == 0:
            plan = plan_load(loader(mine, rank - 4), mine, computes=True)
            assert "then computed on this rank: aten.div.Tensor" in str(plan)
        plan.run(state if rank < 4 else None)
        if rank >= 4:
            by_hand = engine()
            loader(by_hand, rank - 4)(whole)
            for name, x in mine.items():
                assert torch.equal(x, by_hand[name]), (name, x, by_hand[name])

    raised(lambda: plan.run(state if rank < 4 else None, since=True), ValueError, ["since="])

    def drawn_numbers(w):
        mine["bias"].copy_(torch.rand_like(w["b"]) * w["b"])

    if rank < 4:
        raised(lambda: plan_load(source=state, computes=True), RuntimeError, ["rank 4", "'bias'"])
    else:
        raised(lambda: plan_load(drawn_numbers, mine, computes=True), NotOnlyMoved, ["'bias'"])


def arguments():
    """Arguments that do not fit are refused by all ranks."""
    rank = dist.get_rank()
    mesh = DeviceMesh("cpu", TRAINER, mesh_dim_names=("dp", "tp"))
    state = {"w": distribute_tensor(torch.ones(4, 6), mesh, [Shard(0), Shard(1)])}

    def raises(words, mine, kind=(ValueError, TypeError, RuntimeError)):
        raised(mine, kind, words)

    other = state if rank else {"w": torch.ones(4, 6)}
    raises(["'w'", "give the same tensor"], lambda: plan_load(source=other if rank < 4 else None))
    other = state if rank != 2 else {"w": [1]}
    raises(["'w' is a list"], lambda: plan_load(source=other if rank < 4 else None))
    if rank < 4:
        other = torch.nn.Linear(6, 4) if rank == 3 else state
    raises(["source is a Linear"], lambda: plan_load(source=other if rank < 4 else None))
    raises(
        ["pass the missing one"],
        lambda: plan_load(source=state) if rank < 4 else plan_load(None, {"p": torch.ones(1)}),
    )
    into = {"p": torch.zeros(4, 6)}

    def load(w):
        into["p"].copy_(w["w"])

    plan = plan_load(source=state) if rank < 4 else plan_load(load, into)
    # What one rank alone gets wrong is raised by all, before anything is sent.
    rows = state["w"].redistribute(mesh, [Shard(0), Replicate()]) if rank < 4 else None
    given = state if rank < 4 else None
    for wrong, words, call in (
        (0, "was called on the ranks 0 and not", lambda: plan.run(state, since=state)),
        (1, "no tensor 'w'", lambda: plan.run({})),
        (2, "'w' is (4, 6)", lambda: plan.run({"w": rows})),
        (4, "into has no tensor 'p'", lambda: plan.run(into={})),
        (5, "'p' of into has shape", lambda: plan.run(into={"p": torch.ones(2)})),
        (5, "is expanded, so nothing", lambda: plan.run(into={"p": torch.zeros(6).expand(4, 6)})),
        (4, "made in inference mode", lambda: plan.run(into={"p": inference_tensor()})),
        (5, "on the meta device", lambda: plan.run(into={"p": torch.ones(4, 6, device="meta")})),
    ):
        raises([words], call if rank == wrong else lambda: plan.run(given))
    of_engine, lacking = (load, into) if rank > 3 else (), {} if rank == 3 else given
    limit = 1 << 20 if rank == 2 else None
    raises(["'w' is", "the ranks 3"], lambda: plan_load(*of_engine, source=lacking))
    raises(["memory_limit"], lambda: plan_load(*of_engine, source=given, memory_limit=limit))
    plan.run(state if rank < 4 else None)
    assert rank < 4 or bool((into["p"] == 1).all())
    assert plan.parts(4)[0].receives == tuple([24] * 4), plan.parts(4)


def inference_tensor():
    with torch.inference_mode():
        return torch.zeros(4, 6)


class WithoutText(Exception):
    def __str__(self):
        raise ValueError("no text")


def one_rank_alone():
    """What fails on one rank in a loader, in a step, or in memory, is raised by all; after a run
    that failed, since= is refused.
    """
    rank, whole = dist.get_rank(), {"w": torch.ones(4, 6), "rows": torch.tensor([0, 3])}
    into = {"p": torch.zeros(4, 6)}

    def planned(load, **how):
        return plan_load(load, into, **how) if rank > 3 else plan_load(source=whole, **how)

    for error in (WithoutText(), SystemExit(1)):

        def fails(w, error=error):
            if rank == 5:
                raise error

        try:
            planned(fails)
        except type(error):
            assert rank == 5
        except RuntimeError as said:
            assert rank != 5 and f"rank 5: {type(error).__name__}" in str(said)
        else:
            raise AssertionError("nothing is raised")
    plan = planned(
        lambda w: into["p"].copy_(w["w"].index_select(0, w["rows"] * 1)[:1]), computes=True
    )
    plan.run(whole if rank < 4 else None)
    past = {"w": whole["w"], "rows": torch.tensor([0, 9])}
    raised(lambda: plan.run(past if rank < 4 else None), ReshardError, ["index"])
    plan = planned(lambda w: into["p"].copy_(w["w"]))
    plan.run(whole if rank < 4 else None)
    raised(lambda: plan.run({} if rank < 4 else None), (ValueError, RuntimeError), ["no tensor"])
    raised(
        lambda: plan.run(whole if rank < 4 else None, since=whole if rank < 4 else True),
        (ValueError, RuntimeError),
        ["the run before failed"],
    )
    plan.run(whole if rank < 4 else None)
    plan.run(whole if rank < 4 else None, since=whole if rank < 4 else True)
    # A tensor of the engine in the memory of a weight of this rank.
    mine = {"d": torch.rand(4, 6)}
    given = whole if rank < 4 else mine if rank == 5 else None
    onto = {"p": mine["d"] if rank == 5 else into["p"], "q": torch.zeros(4, 6)}

    def load(w):
        onto["p"].copy_(w["w"])
        onto["q"].copy_(w["d"])

    plan = plan_load(load, onto, given) if rank > 3 else plan_load(source=given)
    raised(lambda: plan.run(given), (ValueError, RuntimeError), ["shares memory with the source"])


def one_process_is_both():
    """Ranks that train and serve keep what they have."""
    mesh = DeviceMesh("cpu", [[0, 1, 2], [3, 4, 5]], mesh_dim_names=("dp", "tp"))
    whole = numbered((12, 6), 0, torch.float32)
    state = {"w": distribute_tensor(whole, mesh, [Replicate(), Shard(0)])}
    into = torch.nn.Linear(6, 4, bias=False)
    rank = mesh.get_local_rank("tp")

    def load(w):
        into.weight.data.copy_(w["w"].narrow(0, 4 * rank, 4))

    plan = plan_load(load, into, state)
    plan.run(state)
    assert plan.received_bytes == 0 and torch.equal(into.weight.data, whole[4 * rank :][:4])


def on_slices():
    """Refits and reshards of weights on slices of a mesh, which are replicas, and of plain ones."""
    rank = dist.get_rank()
    mesh = DeviceMesh("cpu", TRAINER, mesh_dim_names=("dp", "tp"))
    engine, line = DeviceMesh("cpu", [4, 5]), DeviceMesh("cpu", [0, 1, 2, 3])
    a, b, c = (numbered((8, 4), 40 * k, torch.float32) for k in range(3))
    state = {
        "a": distribute_tensor(a, mesh, [Shard(0), Shard(1)]) if rank < 4 else None,
        "b": distribute_tensor(b, mesh["tp"], [Shard(0)]) if rank < 4 else None,
        "c": c if rank < 4 else None,
    }
    rows = (mesh["tp"], [Shard(0)]) if rank < 4 else (mesh, [Replicate(), Shard(0)])
    specs = {
        "a": Spec((8, 4), mesh, [Shard(0), Shard(1)]),
        "b": Spec((8, 4), *rows),
        "c": Spec((8, 4), mesh, [Replicate()] * 2),
    }
    plan = plan_refit(
        lambda w: {"all": torch.cat([*w.values()])}, specs, {"*": (engine, [Shard(0)])}
    )
    found = plan.run({k: x for k, x in state.items() if x is not None})
    wanted = torch.cat([a, b, c]).chunk(2)
    assert rank < 4 or torch.equal(found["all"].to_local(), wanted[rank - 4])
    if rank < 4:
        moved = plan_reshard({k: state[k] for k in "abc"}, {"*": [Shard(0)]}, line).run(dict(state))
        for x, whole in ((moved["a"], a), (moved["b"], b)):
            assert isinstance(x, DTensor) and torch.equal(x.to_local(), whole.chunk(4)[rank])
        assert moved["c"] is c


PROGRAMS = (computed, quantizes, arguments, one_rank_alone, one_process_is_both, on_slices)
