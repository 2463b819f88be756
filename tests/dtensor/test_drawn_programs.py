"""Programs drawn at random: with redistribution allowed no view is refused, and every rank's values and gradients are those of one device."""

import random
from collections import Counter
from contextlib import contextmanager
from itertools import product
from math import prod

import pytest
import torch.distributed as dist
from enumeration import cuts_on, devices, shapes_of, signature
from simulation import assert_holds, cuts_of, distribute, number, placements_of, plain, ranks_of
from torch.distributed.tensor import Partial, Replicate, _dispatch
from torch.distributed.tensor.debug import CommDebugMode

import cute_sharding
from cute_sharding.dtensor import compat
from cute_sharding.redistribution import received_elements
from cute_sharding.views import carry, view_of
from cute_sharding.views.dim_map import reshape

MESHES = [(2,), (3,), (4,), (8,), (1, 2), (2, 2), (2, 3), (4, 2), (2, 2, 2)]
CASES = 260  # of each mesh

EMPTY = [(0,), (0, 1), (5, 0), (0, 4), (1, 0, 3), (2, 0, 2), (0, 0), (3, 1, 0, 2)]


def shapes(n):
    """Shapes of n elements and one to four dims."""
    return shapes_of(n)[n == 1 :] if n else EMPTY


def draw_cuts(rng, mesh, shape):
    """Shard, _StridedShard with any split factor from 1 to the dim's size, or none."""
    cuts = []
    for _ in mesh:
        dim = rng.randrange(-1, len(shape))
        cuts.append(None if dim < 0 else (dim, rng.choice((1, rng.randint(1, max(shape[dim], 1))))))
    return tuple(cuts)


def blocked(shape, target, cuts, mesh):
    return carry(view_of(shape, reshape(shape, target)), cuts, mesh).blocked is not None


def draw_view(rng, mesh, sizes, wants_communication=None):
    """A shape, another, and cuts of the first. Most draws are free, so those that are not can be asked for."""
    while True:
        n = rng.choice(sizes)
        shape, target = rng.choice(shapes(n)), rng.choice(shapes(n))
        cuts = draw_cuts(rng, mesh, shape)
        if wants_communication is None or blocked(shape, target, cuts, mesh) == wants_communication:
            return shape, target, cuts


OPS = ["view", "view", "reshape", "reshape", "flatten", "unflatten", "permute", "squeeze", "unsqueeze"]


def draw_op(rng, tensor):
    """An op that a single device can do with its tensor, and its arguments."""
    shape, ndim = tuple(tensor.shape), tensor.dim()
    name = rng.choice(OPS if ndim else ["reshape", "unsqueeze"])
    if name in ("view", "reshape"):
        return "view" if name == "view" and tensor.is_contiguous() else "reshape", (rng.choice(shapes(prod(shape))),)
    if name == "flatten":
        start = rng.randrange(ndim)
        return name, (start, rng.randrange(start, ndim))
    if name == "unflatten":
        dim = rng.randrange(ndim)
        return name, (dim, rng.choice([s for s in shapes(shape[dim]) if s] if shape[dim] else [(0, 3), (2, 0)]))
    if name == "permute":
        return name, (rng.sample(range(ndim), ndim),)
    if name == "squeeze":
        return name, rng.choice([(), (rng.randrange(-ndim, ndim),), (tuple(range(ndim)),)])
    return name, (rng.randint(-ndim - 1, ndim),)


def run(program, tensor):
    for name, args in program:
        tensor = getattr(tensor, name)(*args)
    return tensor


def contributions(full, mesh, placements):
    """What each rank has: all the same, but for a contribution of its own on each mesh dim with a pending sum."""
    pending = [m for m, p in enumerate(placements) if isinstance(p, Partial)]
    with plain():
        return {rank: full + sum(100 ** (m + 1) * device[m] for m in pending) for rank, device in enumerate(devices(mesh))}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_program_runs_and_is_right(mesh):
    rng = random.Random(f"programs {mesh}")
    with ranks_of(mesh), cute_sharding.enabled(implicit_redistribution=True):
        for _ in range(CASES):
            shape, target, cuts = draw_view(rng, mesh, range(49), rng.choice((None, True)))
            with plain():
                single = number(shape).requires_grad_()
                program = [("view", (target,)) if rng.random() < 0.5 else draw_op(rng, single)]
                if rng.random() < 0.4:
                    program.append(draw_op(rng, run(program, single)))
                expected = run(program, single)
                gradient = number(expected.shape) + 0.5
                expected.backward(gradient)
            # Only before a single op may a sum be pending: a reshape that has to copy first may finish it, as torch's own rule for copies likes.
            placements = [Partial() if cut is None and len(program) == 1 and rng.random() < 0.3 else p for cut, p in zip(cuts, placements_of(cuts))]
            inputs = contributions(single.detach(), mesh, placements)
            try:
                tensor = distribute(inputs, mesh, placements, requires_grad=True)
                result = run(program, tensor)
                with plain():
                    outputs = {rank: run(program, full) for rank, full in inputs.items()}
                assert_holds(result, outputs)
                assert [isinstance(p, Partial) for p in result.placements] == [isinstance(p, Partial) for p in placements]
                # The gradient of a sum is whole on each of its contributions.
                result.backward(distribute(gradient, mesh, [Replicate() if isinstance(p, Partial) else p for p in result.placements]))
                assert not any(isinstance(p, Partial) for p in tensor.grad.placements)
                assert_holds(tensor.grad, single.grad)
            except Exception as error:
                raise AssertionError(f"{shape} as {placements} on {mesh}: {program}") from error
        outcomes = Counter()
        for counts in cute_sharding.stats().values():
            outcomes.update(counts)
    assert outcomes["refused"] == outcomes["stock"] == 0
    assert outcomes["redistribution"] >= CASES // 4 and outcomes["algebra"] >= CASES // 4 and outcomes["tracing"] >= CASES // 8


# -- what it costs ------------------------------------------------------------------------------------------------------------


@contextmanager
def watched(monkeypatch):
    """What goes on while views run: the (before, after) placements of their inputs, and for each collective the elements that each rank is sent by others."""
    moves, received = [], []
    redistribute, all_to_all, all_gather = _dispatch.redistribute_local_tensor, compat.all_to_all, compat.all_gather

    def mine(ints, rank, group):
        """Of one int for each rank of the group, those of the others. Groups are those of row-major meshes: so far apart, so many."""
        ranks = dist.get_process_group_ranks(group)
        me = rank // (ranks[1] - ranks[0]) % len(ranks)
        return [n if isinstance(n, int) else n.node._local_ints[rank] for i, n in enumerate(ints) if i != me]

    def watched_redistribute(local, current, target, **options):
        moves.append((current.placements, target.placements))
        return redistribute(local, current, target, **options)

    def watched_all_to_all(buffer, receives, sends, group):
        received.append({rank: sum(mine(receives, rank, group)) for rank in buffer._ranks})
        return all_to_all(buffer, receives, sends, group)

    def watched_all_gather(buffer, group):
        received.append({rank: sum(mine([part.numel()] * dist.get_world_size(group), rank, group)) for rank, part in buffer._local_tensors.items()})
        return all_gather(buffer, group)

    with monkeypatch.context() as patch:
        patch.setattr(_dispatch, "redistribute_local_tensor", watched_redistribute)
        patch.setattr(compat, "all_to_all", watched_all_to_all)
        patch.setattr(compat, "all_gather", watched_all_gather)
        yield moves, received


def busiest(before, after):
    return max((wanted & ~had).bit_count() for had, wanted in zip(before, after, strict=True))


def cheapest(shape, target, cuts, mesh):
    """By brute force and set comparison alone: the least that the busiest device must receive to hold what some cuts of the view's output hold as well."""
    of_outputs = {signature(target, mesh, output) for output in product(cuts_on(target), repeat=len(mesh))}
    before = signature(shape, mesh, cuts)
    candidates = {signature(shape, mesh, source) for source in product(cuts_on(shape), repeat=len(mesh))}
    return min(busiest(before, after) for after in candidates & of_outputs)


@pytest.mark.parametrize("mesh, cases", [((2,), 60), ((4,), 60), ((2, 2), 60)], ids=str)
def test_the_input_goes_where_it_is_cheapest(mesh, cases, monkeypatch):
    rng = random.Random(f"cheapest {mesh}")
    with ranks_of(mesh), cute_sharding.enabled(implicit_redistribution=True), watched(monkeypatch) as (moves, received):
        for _ in range(cases):
            shape, target, cuts = draw_view(rng, mesh, (6, 8, 9, 10, 12, 15, 16, 18), wants_communication=True)
            distribute(number(shape), mesh, placements_of(cuts)).view(target)
            [(before, after)] = moves
            assert before == placements_of(cuts)
            least = cheapest(shape, target, cuts, mesh)
            assert received_elements(shape, cuts, cuts_of(after), mesh) == least, (shape, target, before, after)
            # And so much is sent indeed.
            assert max(sum(sent[rank] for sent in received) for rank in range(prod(mesh))) == least if received else least == 0
            moves.clear()
            received.clear()


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_one_collective_at_most(mesh, monkeypatch):
    """None for a view that is free, nor for an input that has all it needs where it is."""
    rng = random.Random(f"collectives {mesh}")
    counts = Counter()
    with ranks_of(mesh), cute_sharding.enabled(implicit_redistribution=True), watched(monkeypatch) as (moves, _):
        for case in range(30):
            shape, target, cuts = draw_view(rng, mesh, range(1, 49), wants_communication=case % 3 > 0)
            tensor = distribute(number(shape), mesh, placements_of(cuts))
            with CommDebugMode() as communication:
                tensor.view(target)
            assert len(moves) == (case % 3 > 0), (shape, target, cuts)
            elements = received_elements(shape, cuts, cuts_of(moves.pop()[1]), mesh) if moves else 0
            assert communication.get_total_counts() == (elements > 0), (shape, target, cuts, communication.get_comm_counts())
            counts[elements > 0] += 1
    assert counts[True] >= 15 and counts[False] >= 10
