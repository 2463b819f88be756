"""Plans whose bytes go by other means: a store in memory, under the numbers of the bucket and of
both ranks. Of a plan it knows what ``parts`` says.
"""

import random

import pytest
import torch
from across_worker import draw_mesh, draw_ranks, local_of
from drawing import draw_placements, draw_shape
from drawn_moves import drawn_program

from cute_sharding import Spec, plan_refit, plan_reshard
from cute_sharding.exchange import Mesh
from cute_sharding.exchange.flow import flat

DTYPES = (torch.float32, torch.bfloat16, torch.int16, torch.float64)


class Store:
    """Bytes from rank to rank, bucket by bucket; each is put once, and got once."""

    def __init__(self):
        self.messages, self.received = {}, {}

    def put(self, key, message):
        assert key not in self.messages
        self.messages[key] = message

    def get(self, key):
        message = self.messages.pop(key)
        self.received[key[2]] = self.received.get(key[2], 0) + len(message)
        return message


def places(sizes, start, steps, strides):
    found = torch.tensor([flat(start, strides)])
    for n, step in zip(sizes, steps, strict=True):
        found = (found[:, None] + torch.arange(n) * flat(step, strides)).view(-1)
    return found


def write(copy, x, y):
    rows, into = (
        places(copy.sizes, start, steps, tensor.stride())
        for tensor, start, steps in ((x, copy.x, copy.dx), (y, copy.y, copy.dy))
    )
    y.view(-1)[into] = x.view(-1)[rows].to(y.dtype)


def put(store, rank, number, part, operands, wires):
    """Pack what a rank sends in a bucket. ``operands``: of each of its exchanges."""
    buffer = torch.empty(sum(part.sends), dtype=torch.uint8)
    for each, given, wire in zip(part.parts, operands, wires, strict=True):
        for copies, x in zip(each.packs, given):
            for copy in copies or ():
                write(copy, x, buffer.view(wire))
    at = 0
    for peer, size in zip(part.peers, part.sends, strict=True):
        store.put((number, rank, peer), buffer[at : at + size])
        at += size


def get(store, rank, number, part, operands, wires, results):
    """Write what a rank has of each exchange of a bucket then."""
    messages = [store.get((number, peer, rank)) for peer in part.peers]
    assert tuple(map(len, messages)) == part.receives
    received = torch.cat([torch.empty(0, dtype=torch.uint8), *messages])
    for each, given, wire, some in zip(part.parts, operands, wires, results, strict=True):
        for k, result in enumerate(some):
            assert (each.target_shapes[k] is None) == (result is None)
            for copy in each.unpacks[k] or ():
                write(copy, received.view(wire), result)
            for i, copy in each.kept(k):
                write(copy, given[i], result)


def carried_out(plan, ranks, operands_of, wires_of, results_of):
    """Write what each rank has of each exchange, by bucket; what each has received."""
    store, parts = Store(), {rank: plan.parts(rank) for rank in ranks}
    for rank in ranks:
        for number, part in enumerate(parts[rank]):
            put(store, rank, number, part, operands_of(rank, number), wires_of(number))
    for rank in ranks:
        for number, part in enumerate(parts[rank]):
            given = operands_of(rank, number), wires_of(number), results_of(rank, number)
            get(store, rank, number, part, *given)
    assert not store.messages
    return store.received


class Lies:
    """A mesh, drawn, without process groups."""

    def __init__(self, rng, ranks):
        self.ranks, self.sizes = ranks, draw_mesh(rng, ranks)
        self.mesh = Mesh(self.sizes, ranks)

    def spec(self, rng, whole, dtype=None):
        placements = draw_placements(rng, self.sizes, tuple(whole.shape))
        return Spec(tuple(whole.shape), self.mesh, placements, dtype or whole.dtype)

    def local(self, whole, spec, rank):
        local = local_of(whole, self.sizes, self.ranks, spec.placements, rank)
        return None if local is None else local.contiguous()


def drawn_pair(rng, ranks=6):
    one, other = draw_ranks(rng, ranks), draw_ranks(rng, ranks)
    return Lies(rng, one), Lies(rng, rng.choice([other, one]))


def drawn_values(rng, shape):
    return torch.randint(0, 100, shape).to(rng.choice(DTYPES))


def smaller(one, other):
    return other if one.itemsize > other.itemsize else one


class Results:
    """What each rank is to have of each tensor, by name; with nothing in it."""

    def __init__(self, target, specs, whole, ranks):
        self.wanted = {
            (rank, name): target.local(whole[name].to(spec.dtype), spec, rank)
            for name, spec in specs.items()
            for rank in ranks
        }
        self.made = {
            key: None if x is None else torch.full_like(x, 101) for key, x in self.wanted.items()
        }

    def of(self, rank, names):
        return [self.made[rank, name] for name in names]

    def assert_right(self):
        for key, x in self.wanted.items():
            assert x is None or torch.equal(self.made[key], x), key


def assert_received(received, plan, ranks, wanted_of):
    """A message ends at a multiple of the widest element, which has eight bytes at the most."""
    for rank in ranks:
        more = received.get(rank, 0) - wanted_of(rank)
        assert 0 <= more < 8 * len(ranks) * max(len(plan.packed), 1)


@pytest.mark.parametrize("seed", range(60))
def test_a_model(seed):
    rng = random.Random(seed)
    source, target = drawn_pair(rng)
    whole = {f"w{k}": drawn_values(rng, draw_shape(rng)) for k in range(rng.randint(1, 6))}
    before = {name: source.spec(rng, x) for name, x in whole.items()}
    after = {
        name: target.spec(rng, x, rng.choice([None, torch.bfloat16])) for name, x in whole.items()
    }
    plan = plan_reshard(before, after)
    plan = plan_reshard(before, after, memory_limit=rng.choice([None, plan.peak_bytes]))
    moving = {name: after[name] for name, _, stays in plan.tensors if not stays}
    results = Results(target, moving, whole, plan.ranks)
    names = [[plan.tensors[i].name for i in each.members] for each in plan.packed]
    received = carried_out(
        plan,
        plan.ranks,
        lambda rank, i: [[source.local(whole[n], before[n], rank)] for n in names[i]],
        lambda i: [smaller(before[n].dtype, after[n].dtype) for n in names[i]],
        lambda rank, i: [results.of(rank, [n]) for n in names[i]],
    )
    results.assert_right()
    bundles = [each.bundle for each in plan.packed]
    assert_received(
        received, plan, plan.ranks, lambda rank: sum(b.received_by(rank) for b in bundles)
    )


@pytest.mark.parametrize("seed", range(60))
def test_weights_of_another_program(seed):
    rng, program = random.Random(seed), drawn_program(seed)
    source, target = drawn_pair(rng)
    whole = {f"w{k}": drawn_values(rng, shape) for k, shape in enumerate(program.shapes)}
    before = {name: source.spec(rng, x) for name, x in whole.items()}

    def generator(w):
        return dict(zip("abcdefghijklmnop", program([*w.values()])))

    made = generator(whole)
    after = {name: target.spec(rng, x) for name, x in made.items()}
    plan = plan_refit(generator, before, after)
    ranks, names, onto = plan.bundle.ranks, [*before], [*after]
    results = Results(target, after, made, ranks)
    members = [[plan.members[i] for i in each.members] for each in plan.packed]

    def operands_of(rank, number):
        return [
            [source.local(whole[names[k]], before[names[k]], rank) for k in member.operands]
            + [torch.tensor([value]) for value in member.constants]
            for member in members[number]
        ]

    received = carried_out(
        plan,
        ranks,
        operands_of,
        lambda i: [getattr(torch, member.dtype) for member in members[i]],
        lambda rank, i: [results.of(rank, [onto[k] for k in m.results]) for m in members[i]],
    )
    results.assert_right()
    assert_received(received, plan, ranks, plan.received_by)


def test_what_is_pending_is_no_copy():
    pending, finished = Spec((4, 4), (2,), "P"), Spec((4, 4), (2,), "S(0)")
    with pytest.raises(ValueError, match="cannot describe the reduction of a Partial"):
        plan_reshard({"w": pending}, {"w": finished}).parts(0)
