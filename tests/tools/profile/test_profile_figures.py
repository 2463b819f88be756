"""What a profile says beside what is counted otherwise: rules beside stats(), bytes beside sums."""

from collections import Counter
from contextlib import nullcontext

import pytest
import stranger_programs
import torch
from other_arguments import empty_caches
from profile_programs import run_as_far_as_it_goes
from simulation import distribute, number, ranks_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel

import cute_sharding

ON = {"redistribution": True, "movement": True}


@pytest.fixture(scope="module")
def meshes():
    def mesh(*sizes):
        ranks = torch.arange(torch.Size(sizes).numel()).reshape(sizes)
        return DeviceMesh("cpu", ranks, mesh_dim_names=("a", "b")[: len(sizes)])

    return {sizes: mesh(*sizes) for sizes in stranger_programs.MESHES}


def ran_by(seed, meshes):
    """The lines of a drawn program, and what stats() counts of it, each op decided anew."""
    with cute_sharding.enabled(**ON):
        empty_caches()
        cute_sharding.stats(reset=True)
        with cute_sharding.profile() as p:
            run_as_far_as_it_goes(seed, meshes)
        return p.lines, cute_sharding.stats(reset=True)


def is_state(moved):
    """Whether it may be the state of an op that folds, which is reduced, or gathered from all."""
    changed = [(a, b) for a, b in zip(moved.before, moved.after) if a != b]
    return all(a in ("P(max)", "P(sum)", "S(0)") and b == "R" for a, b in changed)


def check(seeds, meshes):
    """How many lines of ops have a rule that stats() counted as the program ran."""
    found = Counter()
    for seed in seeds:
        lines, counted = ran_by(seed, meshes)
        for line in lines:
            cause = line.cause
            if cause.kind == "op" and cause.rule not in ("", "PyTorch"):
                ops = [counts for op, counts in counted.items() if op.partition(".")[0] == cause.op]
                assert any(counts[o] for counts in ops for o in OUTCOMES[cause.rule]), (seed, cause)
                found[cause.rule] += 1
                assert all(
                    f"{moved.shape} [{', '.join(moved.before)}]" in cause.operands
                    or is_state(moved)
                    for moved in cause.moved
                ), (seed, cause)
    return found


# Outcomes of stats(), by the rule that decides.
OUTCOMES = {
    "view": ("redistribution",),
    "movement": ("exchanged",),
    "signature": ("signature",),
    "fallback": ("gate",),
}


def test_rules_are_those_that_were_counted(meshes):
    found = check(range(24), meshes)
    assert len(found) > 2 and found.total() > 16, found


@pytest.mark.costly
def test_rules_of_two_hundred_programs_are_those_that_were_counted(meshes):
    found = check(range(24, 224), meshes)
    assert len(found) == len(OUTCOMES) and found.total() > 100, found


# -- what the program asks for ---------------------------------------------------------------------


def sums(mesh, *placements):
    return DTensor.from_local(torch.ones(4, 4), mesh, placements, run_check=False)


def by_line(is_on, run):
    on = cute_sharding.enabled(**ON) if is_on else nullcontext()
    with on, cute_sharding.profile() as p:
        run()
    (line,) = p.lines
    return line


def test_the_weight_of_a_loss_is_counted(meshes):
    """It is added up beside the loss."""
    mesh = meshes[2, 2]
    scores = DTensor.from_local(torch.zeros(2, 5), mesh, [Shard(0), Shard(0)])
    classes = DTensor.from_local(torch.arange(4), mesh, [Shard(0), Replicate()])
    line = by_line(True, lambda: torch.nn.functional.nll_loss(scores, classes))
    assert line.received == 16 and line.cause.rule == "signature"


def test_a_redistribution_of_several_collectives_is_asked_for_once(meshes):
    mesh = meshes[2, 2]
    x = sums(mesh, Shard(0), Shard(0))
    line = by_line(False, lambda: [x.full_tensor() for _ in range(3)])
    assert line.kinds == {"all-gather": 6}
    assert line.received == 3 * 3 * 4 * 4 * 4


def test_a_gradient_that_goes_the_way_back_is_no_op(meshes):
    mesh = meshes[4,]

    def run():
        local = torch.ones(2, 4, requires_grad=True)
        x = DTensor.from_local(local, mesh, [Replicate()], run_check=False)
        x.to_local(grad_placements=[Partial()]).sum().backward()

    for is_on in (False, True):
        line = by_line(is_on, run)
        cause = line.cause
        assert (cause.kind, cause.op, cause.backward) == ("asked", "from_local", True)
        assert line.received == 2 * 4 * 4 * 2 * 3 // 4


def test_reductions_of_other_placements_are_counted(meshes):
    """Those of norms: the placement's own method in PyTorch, and here a sum of powers."""
    mesh = meshes[2, 2]
    norms = torch.linalg.vector_norm(sums(mesh, Shard(0), Replicate()), dim=0)
    cute_sharding.stats(reset=True)
    for is_on in (False, True):
        line = by_line(is_on, lambda: norms.redistribute(placements=[Replicate()] * 2))
        assert line.kinds == {"all-reduce": 1} and line.received == 4 * 4
    counted = cute_sharding.stats()["redistribute"]
    assert counted["collectives"] == 1 and counted["received_elements"] == 4


def test_what_functions_of_torchs_own_send_is_by_pytorchs_rule(meshes):
    """Of searches and losses. Its function for convolutions is wrong here, and does not run."""
    mesh = meshes[4,]
    x = sums(mesh, Shard(0))
    scores = DTensor.from_local(torch.zeros(2, 5), mesh, [Shard(1)])
    classes = DTensor.from_local(torch.arange(2), mesh, [Replicate()])
    images = DTensor.from_local(torch.ones(1, 4, 4, 2), mesh, [Shard(3)])
    weight = DTensor.from_local(torch.ones(4, 4, 3, 3), mesh, [Replicate()])

    def run():
        x.argmax(0)
        with loss_parallel():
            torch.nn.functional.cross_entropy(scores, classes)

    for is_on in (False, True):
        with cute_sharding.enabled(**ON) if is_on else nullcontext(), cute_sharding.profile() as p:
            run()
        rules = {line.cause.op: line.cause.rule for line in p.lines}
        assert rules.pop("argmax") == ("signature" if is_on else "PyTorch")
        assert rules == dict.fromkeys(("_log_softmax", "nll_loss_forward"), "PyTorch")
    line = by_line(True, lambda: torch.nn.functional.conv2d(images, weight, padding=1))
    assert (line.cause.op, line.cause.rule) == ("convolution", "signature")


def test_all_ranks_in_one_process():
    """Their messages differ in size: those of the first rank are counted."""
    with ranks_of((4,)), cute_sharding.enabled(redistribution=True, movement=True):
        x = distribute(number((8, 6)), (4,), [Shard(0)])
        with cute_sharding.profile() as p:
            x[1:5]
    (row,) = p.to_dict()["lines"]
    assert row["kinds"] == {"all-to-all": 1} and row["received_bytes"] == 24, row
