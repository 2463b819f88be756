"""What the processes of test_since.py run: of drawn models some elements change, and what is sent
of them is compared with a run that sends all.
"""

import random
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist
from across_worker import as_dtensor, draw_mesh, draw_ranks
from reshard_programs import raises
from reshard_worker import as_bytes, draw_tensor, mesh_of
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import cute_sharding
from cute_sharding.dtensor.models import since
from cute_sharding.exchange import bundle


@contextmanager
def sent():
    """The bytes and the messages that this rank sends, beside the numbers of changes."""
    found = [0, 0]

    def posted(letters, group, tag):
        for letter in letters:
            found[0] += len(letter.tensor) * letter.is_sent
            found[1] += letter.is_sent
        return messages(letters, group, tag)

    messages = since.post_messages
    with patch.object(since, "post_messages", posted):
        yield found


def of_all(found):
    total = torch.tensor(found)
    dist.all_reduce(total)
    return total.tolist()


def copied(state):
    """The same tensors in memory of their own."""
    own = {id(x): x for x in state.values()}
    own = {
        key: as_dtensor(x._local_tensor.clone(), x.shape, x.device_mesh, x.placements, x.dtype)
        for key, x in own.items()
    }
    return {name: own[id(x)] for name, x in state.items()}


def change(x, share, seed):
    """Other bits in a share of the elements, the same wherever they are held: by their values."""
    local = x._local_tensor
    if not local.numel():
        return local
    if any(isinstance(p, Partial) for p in x.placements):
        return local.add_(1) if share else local
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(997, generator=generator)
    with torch.no_grad():
        words = local.view(-1).view(torch.uint8) if local.is_contiguous() else None
        assert words is not None
        width = local.element_size()
        values = words.view(-1, width)
        numbers = values.long().mul(torch.arange(1, width + 1)).sum(1)
        chosen = draws[numbers % 997] < share
        if x.dtype == torch.bool:
            local.view(-1)[chosen] = ~local.view(-1)[chosen]
        else:
            values[chosen, -1] ^= 0x80  # a sign: also of 0, and of what is no number
    return local


def bits_of(state):
    return {name: as_bytes(x.to_local()) for name, x in state.items()}


def drawn_updates(first, stop, prepared=False):
    """Draws in [first, stop)."""
    bundle.LONG, since.PIECE, since.BLOCK = 16, 5, 16
    world = dist.get_world_size()
    for seed in range(first, stop):
        rng = random.Random(seed)
        one = draw_ranks(rng, world)
        other = rng.choice([draw_ranks(rng, world), one, rng.sample(one, len(one))])
        sizes, others = draw_mesh(rng, one), draw_mesh(rng, other)
        target = mesh_of(others, other)
        if prepared:
            cute_sharding.prepare_groups(mesh_of(sizes, one), target)
        drawn = [
            draw_tensor(rng, one, sizes, target, others, pending=seed % 3 == 0)
            for _ in range(rng.randint(1, 6))
        ]
        state = {f"w{k}": x for k, (x, *_) in enumerate(drawn)}
        for x in state.values():
            x._local_tensor = x._local_tensor.contiguous().clone()
        state["tied"] = state["w0"]
        placements = {f"w{k}": after for k, (_, after, *_) in enumerate(drawn)}
        placements["tied"] = placements["w0"]
        dtype = rng.choice([None, None, torch.bfloat16, torch.float64])
        said = f"seed {seed}: {one} as {sizes} -> {other} as {others} {placements}"
        plan = cute_sharding.plan_reshard(state, placements, target, dtype=dtype)
        updates(rng, plan, state, said)


@torch.no_grad()
def updates(rng, plan, state, said):
    held = plan.run(copied(state))
    pending = any(isinstance(p, Partial) for x in state.values() for p in x.placements)
    for share in (rng.choice([0.1, 0.3]), 0.0, rng.choice([0.7, 1.0])):
        before, seed = copied(state), rng.randrange(1000)
        for name, x in state.items():
            if name != "tied":
                change(x, share, seed)
        wanted = bits_of(plan.run(copied(state)))
        kept, memory = bits_of(state), {n: x._local_tensor.data_ptr() for n, x in held.items()}
        with sent() as found:
            assert plan.run(state, into=held, since=before) is held
        assert share or pending or found == [0, 0], (said, found)
        for name, bits in bits_of(held).items():
            assert torch.equal(bits, wanted[name]), (said, name, share)
            assert held[name]._local_tensor.data_ptr() == memory[name]
        assert all(torch.equal(bits, kept[name]) for name, bits in bits_of(state).items())
    for x in held.values():
        x._local_tensor.zero_()
    plan.run(state, into=held)
    assert all(torch.equal(bits, wanted[name]) for name, bits in bits_of(held).items()), said


DTYPES = (
    torch.uint8,
    torch.float8_e4m3fn,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex128,
)


def one_in_a_hundred(whole, seed):
    """Another sign in one element of a hundred; which ones is the same on all ranks."""
    other = whole.clone()
    some = torch.randperm(whole.numel(), generator=torch.Generator().manual_seed(seed))
    flat = other.view(-1).view(torch.uint8).view(whole.numel(), -1)
    flat[some[: whole.numel() // 100], -1] ^= 0x80
    return other


@torch.no_grad()
def one_in_a_hundred_is_less_than_three():
    """Of each dtype, from ranks to others, and among all."""
    line, square = mesh_of((4,), range(4)), mesh_of((2, 2), range(4))
    pairs = [(mesh_of((2,), (0, 1)), "S(0)", mesh_of((2,), (2, 3)), "S(1)")]
    pairs += [(line, "S(0)", square, "R, S(1)")]

    def copies(x):
        return DTensor.from_local(x, line, [Replicate()], run_check=False)

    for source, before, target, after in pairs:
        for seed, dtype in enumerate(DTYPES):
            whole = torch.randint(0, 255, (400, 600 * dtype.itemsize), dtype=torch.uint8)
            dist.broadcast(whole, 0)
            whole = whole.view(dtype)
            changed = one_in_a_hundred(whole, seed)
            then, now = (
                {"w": cute_sharding.redistribute(copies(x), source, before)}
                for x in (whole, changed)
            )
            plan = cute_sharding.plan_reshard(then, after, target)
            held = plan.run(dict(then))
            with sent() as found:
                plan.run(now, into=held, since=copied(then))
            got = held["w"].to_local()
            theirs = plan.run(dict(now))["w"].to_local()
            assert torch.equal(as_bytes(got), as_bytes(theirs)), dtype
            all_bytes = sum(
                each.bundle.received_by(rank) for each in plan.packed for rank in range(4)
            )
            # Beside, how many there are of each 65,536: of each message four at the most.
            assert 0 < of_all(found)[0] <= 0.03 * all_bytes + 16 * of_all(found)[1], (dtype, found)


@torch.no_grad()
def what_has_changed_is_sent_and_received():
    """From ranks that only have to ranks that only want."""
    trainer, generator = mesh_of((2,), (0, 1)), mesh_of((2,), (2, 3))
    is_trainer = dist.get_rank() < 2
    wholes = {f"layers.{i}": torch.arange(0.0, 60 * (i + 1)).view(6, -1) for i in range(5)}
    source = {n: distribute_tensor(x, trainer, [Shard(0)]) for n, x in wholes.items()}
    plan = cute_sharding.plan_reshard(source, "S(1)", generator)
    before = held = None
    for step in range(4):
        wholes["layers.3"][2, step] = float("nan") if step % 2 else -0.0
        state = {n: distribute_tensor(x, trainer, [Shard(0)]) for n, x in wholes.items()}
        with sent() as found:
            if is_trainer:
                plan.send(state, since=before)
                before = copied(state)
            elif held is None:
                held = plan.receive()
            else:
                assert plan.receive(since=held) is held
        if step:  # one element of 4 bytes, which is in a block of one: 4 and 2 more
            assert of_all(found) == [10, 1], found
        if not is_trainer:
            for name, x in wholes.items():
                part = x.chunk(2, 1)[dist.get_rank() - 2]
                assert torch.equal(as_bytes(held[name].to_local()), as_bytes(part)), (step, name)
    memory = {} if held is None else {n: x.to_local().data_ptr() for n, x in held.items()}
    if is_trainer:
        plan.send({n: distribute_tensor(x + 1, trainer, [Shard(0)]) for n, x in wholes.items()})
    else:
        plan.receive(into=held)
        for name, x in held.items():
            part = (wholes[name] + 1).chunk(2, 1)[dist.get_rank() - 2]
            assert torch.equal(as_bytes(x.to_local()), as_bytes(part))
            assert x.to_local().data_ptr() == memory[name]


def what_is_refused():
    line = mesh_of((4,), range(4))
    state = {"w": distribute_tensor(torch.ones(8, 4), line, [Shard(0)])}
    plan = cute_sharding.plan_reshard(state, "S(1)")
    held = plan.run(dict(state))
    with raises(ValueError, "pass the result of the earlier run as into="):
        plan.run(state, since=copied(state))
    with raises(ValueError, "w in since= shares memory with the state.*Keep a copy"):
        plan.run(state, into=held, since=state)
    with raises(ValueError, "when the plan was made: make a new plan"):
        plan.run(state, into=copied(state))
    with raises(ValueError, "Missing names: 'w'. Additional names: none"):
        plan.run(state, into={})


PROGRAMS = (
    one_in_a_hundred_is_less_than_three,
    what_has_changed_is_sent_and_received,
    what_is_refused,
)
