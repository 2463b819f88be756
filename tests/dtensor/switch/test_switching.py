"""enable, disable and enabled: the registries, the caches of every thread, and failures
half way.
"""

import functools
import threading

import pytest
import torch
from simulation import mesh_of
from torch.distributed.tensor import DTensor, Replicate, Shard, _api
from torch.distributed.tensor._ops import _view_ops
from torch.distributed.tensor.experimental import register_sharding

import cute_sharding
from cute_sharding.dtensor.replaced import op_schemas
from cute_sharding.dtensor.replaced.patch import Installed
from cute_sharding.dtensor.switch.adapter import objects_replaced
from cute_sharding.relations.table import VIEWS


def registries():
    """Every registration of the propagator, by registry and op. A copy: what is in it are the very
    objects.
    """
    propagator = DTensor._op_dispatcher.sharding_propagator
    names = [
        name
        for name, value in vars(propagator).items()
        if name.startswith("op_to_") or name.endswith("_funcs")
    ]
    assert {
        "op_to_rules",
        "op_strategy_funcs",
        "op_single_dim_strategy_funcs",
        "op_to_schema_info",
    } <= set(names)
    return {name: dict(getattr(propagator, name)) for name in names}


def assert_same_objects(before, after):
    assert before.keys() == after.keys()
    for name in before:
        assert before[name].keys() == after[name].keys(), name
        for op, entry in before[name].items():
            assert after[name][op] is entry, (name, op)


# Torch's rules refuse this view: seven rows over four devices do not divide. It is free, as 21
# elements are dealt in blocks of two rows all the same.
SHAPE, TARGET = (7, 3), (21,)


def make():
    """Rank 0's part is enough: switching is about one process."""
    return DTensor.from_local(
        torch.arange(6.0).reshape(2, 3),
        mesh_of((4,)),
        [Shard(0)],
        run_check=False,
        shape=torch.Size(SHAPE),
        stride=(3, 1),
    )


def is_refused(tensor):
    """Run the view: True where it is refused, False where it is free."""
    try:
        viewed = tensor.view(TARGET)
    except RuntimeError as error:
        assert "Sharding propagation failed" in str(error)
        return True
    assert viewed.placements == (Shard(0),) and viewed.to_local().tolist() == [0, 1, 2, 3, 4, 5]
    return False


def test_the_example_is_one():
    rule = _view_ops.view_groups(SHAPE, TARGET)
    with pytest.raises(RuntimeError):
        _view_ops.propagate_shape_and_sharding([Shard(0)], SHAPE, rule, (4,), True)
    assert is_refused(make())
    with cute_sharding.enabled():
        assert not is_refused(make())


def test_registrations_are_the_same_objects_afterwards():
    before = registries()
    cute_sharding.enable()
    while_on = registries()
    assert while_on["op_strategy_funcs"] == before["op_strategy_funcs"]
    told_apart = while_on["op_to_schema_info"]
    assert all(
        "cute_sharding" in told_apart[op_schemas.overload(name)].static_kwargkey
        for name in VIEWS
        if op_schemas.overload(name) is not None
    )
    cute_sharding.enable(redistribution=True)
    cute_sharding.enable()
    with cute_sharding.enabled(ops=False):
        pass
    cute_sharding.disable()
    assert_same_objects(before, registries())


def test_enable_and_disable_can_be_repeated():
    before = registries()
    cute_sharding.disable()
    assert not cute_sharding.is_enabled()
    for _ in range(3):
        cute_sharding.enable()
        cute_sharding.enable()
        assert cute_sharding.is_enabled()
        cute_sharding.disable()
        assert not cute_sharding.is_enabled()
    assert_same_objects(before, registries())


def test_the_next_op_is_decided_anew_both_ways():
    tensor = make()
    assert is_refused(tensor)
    # A view that both can do, so that the caches are warm with an answer of each.
    both = tensor.view(7, 3, 1).placements
    for _ in range(3):
        cute_sharding.enable()
        for _ in range(3):
            assert not is_refused(tensor)
            assert tensor.view(7, 3, 1).placements == both
        cute_sharding.disable()
        for _ in range(3):
            assert is_refused(tensor)
            assert tensor.view(7, 3, 1).placements == both


def test_contexts_nest_and_restore():
    before = registries()
    tensor = make()
    with cute_sharding.enabled():
        with cute_sharding.enabled(ops=False):
            assert cute_sharding.is_enabled() and not is_refused(tensor)
            cute_sharding.disable()
            assert is_refused(tensor)
        assert cute_sharding.is_enabled() and not is_refused(tensor)
    assert not cute_sharding.is_enabled() and is_refused(tensor)
    assert_same_objects(before, registries())
    cute_sharding.enable()
    with cute_sharding.enabled():
        pass
    assert cute_sharding.is_enabled()


def test_an_exception_in_the_context_restores():
    before = registries()
    with pytest.raises(KeyError), cute_sharding.enabled():
        raise KeyError
    assert not cute_sharding.is_enabled()
    assert_same_objects(before, registries())
    assert is_refused(make())


@pytest.mark.parametrize("was_on", [False, True])
def test_enable_that_fails_half_way_leaves_everything_as_it_was(monkeypatch, was_on):
    tensor = make()
    if was_on:
        cute_sharding.enable()
    before = registries()
    put, calls = Installed.put, []

    def fails_third(*args):
        calls.append(args)
        if len(calls) == 3:
            raise MemoryError("in the middle of it")
        put(*args)

    monkeypatch.setattr(Installed, "put", fails_third)
    with pytest.raises(MemoryError):
        cute_sharding.enable(ops=False)
    monkeypatch.undo()
    assert cute_sharding.is_enabled() == was_on
    if not was_on:
        assert_same_objects(before, registries())
    assert is_refused(tensor) == (not was_on)
    # And it can still be switched both ways.
    cute_sharding.enable()
    assert not is_refused(tensor)
    cute_sharding.disable()
    assert is_refused(tensor)


def test_a_change_that_fails_and_cannot_be_taken_back_leaves_it_off(monkeypatch):
    """Half of it would be views whose results the other half does not know."""
    before = registries()
    cute_sharding.enable()
    monkeypatch.setattr(op_schemas, "install_propagation", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cute_sharding.enable(redistribution=True)
    monkeypatch.undo()
    assert not cute_sharding.is_enabled() and objects_replaced() == {}
    assert_same_objects(before, registries())
    assert is_refused(make())


def test_what_a_program_registers_meanwhile_stays():
    op = torch.ops.aten.unfold.default
    rows = DTensor.from_local(torch.ones(2, 6), mesh_of((2,)), [Shard(0)], run_check=False)
    before = registries()
    held = {id(table): {op: table[op]} for table in op_schemas.tables() if op in table}
    cute_sharding.enable(movement=True)

    @register_sharding(op)
    def rule(x, dim, size, step):
        free = [([Shard(d)], [Shard(d), None, None, None]) for d in range(2) if d != dim]
        return [([Replicate()], [Replicate(), None, None, None]), *free]

    try:
        cute_sharding.disable()
        found = [tuple(rows.unfold(dim, 2, 1).placements) for dim in (1, 0)]
        assert found == [(Shard(0),), (Replicate(),)]  # and not that of the other dim
    finally:
        for table in op_schemas.tables():
            table.pop(op, None)
            table.update(held.get(id(table), {}))
        op_schemas.clear_propagation_caches()
    assert_same_objects(before, registries())


def wrapped(function):
    @functools.wraps(function)
    def around(*args, **kwargs):
        around.calls += 1
        return function(*args, **kwargs)

    around.calls = 0
    return around


def bare(function):
    around = wrapped(function)
    del around.__wrapped__
    return around


@pytest.mark.parametrize("around", [wrapped, bare])
def test_what_a_program_has_wrapped_is_called_as_it_is(monkeypatch, caplog, around):
    """What replaces the code of torch's own function replaces none of another's."""
    theirs = around(_api.distribute_tensor)
    monkeypatch.setattr(_api, "distribute_tensor", theirs)
    with cute_sharding.enabled():
        parts, said = objects_replaced(), caplog.text
        result = _api.distribute_tensor(torch.ones(4, 3), mesh_of((2,)), [Shard(0)])
    assert theirs.calls == 1 and result.placements == (Shard(0),)
    assert any("distribute_tensor.__code__" in part for part in parts) == (around is wrapped)
    assert ("the program has replaced this function" in said) == (around is bare)


def test_a_context_that_cannot_be_entered_changes_nothing(monkeypatch):
    before = registries()
    monkeypatch.setattr(op_schemas, "install_propagation", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), cute_sharding.enabled():
        raise AssertionError("not reached")
    monkeypatch.undo()
    assert not cute_sharding.is_enabled()
    assert_same_objects(before, registries())


class Worker(threading.Thread):
    """A thread that runs what it is handed, step by step, and keeps its caches in between."""

    def __init__(self):
        super().__init__(daemon=True)
        self.steps, self.results = [], []
        self.wake, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.start()

    def run(self):
        while True:
            self.wake.acquire()
            step = self.steps.pop()
            if step is None:
                return
            try:
                self.results.append(step())
            except BaseException as error:
                self.results.append(error)
            self.done.release()

    def __call__(self, step):
        self.steps.append(step)
        self.wake.release()
        assert self.done.acquire(timeout=60)
        return self.results.pop()

    def stop(self):
        self.steps.append(None)
        self.wake.release()
        self.join(60)


@pytest.fixture
def worker():
    thread = Worker()
    yield thread
    thread.stop()


def test_other_threads_do_not_serve_what_they_cached(worker):
    """DTensor caches propagations in each thread for itself, and a thread cannot empty another's
    cache.
    """
    tensor = make()
    for _ in range(3):
        for _ in range(2):
            assert worker(lambda: is_refused(tensor)) is True
            assert is_refused(tensor)
        cute_sharding.enable()
        for _ in range(2):
            assert worker(lambda: is_refused(tensor)) is False
            assert not is_refused(tensor)
        cute_sharding.disable()


def test_other_threads_follow_where_both_rules_answer(worker):
    """Nothing raises here, so that the cached answers themselves are seen: stock replicates what
    ours keeps.
    """
    mesh = mesh_of((2,))
    tensor = DTensor.from_local(
        torch.arange(12.0).reshape(4, 3),
        mesh,
        [Shard(1)],
        run_check=False,
        shape=torch.Size((4, 6)),
        stride=(6, 1),
    )

    def placements():
        return tensor.view(8, 3).placements

    stock = worker(placements)
    assert stock == (Replicate(),)
    assert worker(placements) == stock == placements()
    with cute_sharding.enabled():
        ours = worker(placements)
        assert ours == placements() == worker(placements)
        assert ours != stock
    assert worker(placements) == stock == placements()
    # What another thread switches on is on here.
    worker(cute_sharding.enable)
    assert placements() == ours == worker(placements)
    worker(cute_sharding.disable)
    assert placements() == stock == worker(placements)


def test_without_signatures_all_else_is_in_place():
    """Views make the same placements, so checkpoints, writes and ops have to be kept right."""
    with cute_sharding.enabled():
        expected = objects_replaced()
    with cute_sharding.enabled(ops=False):
        assert objects_replaced() == expected
