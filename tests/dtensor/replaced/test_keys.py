"""An op that is called again with another argument answers for that argument, also where torch's
cache would give the first call's answer. What only changes values is not in its keys.
"""

import json
import os
import random
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import other_arguments
import pytest
import torch
import torch.nn.functional as F
from processes import search_path
from simulation import mesh_of
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor._ops.single_dim_strategy import register_single_dim_strategy
from torch.distributed.tensor.experimental import register_sharding

import cute_sharding
from cute_sharding.dtensor.replaced import op_schemas

HERE = Path(__file__).parents[1]
PARTS = 300
SETTINGS = {
    "views": {},
    "everything": {"redistribution": True, "movement": True},
    "without ops": {"ops": False},
}


def cut(x, *placements):
    return distribute_tensor(x, mesh_of((4,)), placements, src_data_rank=None)


def calls_of(part):
    from torch.testing._internal.common_methods_invocations import op_db  # takes long to import

    return other_arguments.calls_of(op_db[part::PARTS])


def settings_of(part):
    return [*SETTINGS.values()][part % len(SETTINGS)]


@pytest.mark.one_in(100)
@pytest.mark.parametrize("part", range(PARTS))
def test_calls_with_other_arguments(part):
    """Each argument of each aten op that torch's samples of its ops call."""
    with cute_sharding.enabled(**settings_of(part)):
        found = other_arguments.answers_of_other_calls(calls_of(part), mesh_of((4,)))
    wrong = [f"{where}: {later}, not {fresh}" for where, later, fresh in found if later != fresh]
    assert not wrong, "\n".join(wrong)


ALONE = """
import sys, json
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
import cute_sharding, other_arguments
from simulation import mesh_of
from replaced.test_keys import calls_of, settings_of
part, wanted = int(sys.argv[1]), json.loads(sys.argv[2])
cute_sharding.enable(**settings_of(part))
print(json.dumps(other_arguments.answer_of_second(calls_of(part), mesh_of((4,)), wanted)))
"""


@pytest.mark.processes
@pytest.mark.costly
@pytest.mark.one_in(60)
@pytest.mark.parametrize("part", range(PARTS))
def test_as_in_a_process_of_its_own(part):
    """One of the calls: what empty caches answer is what a new process answers."""
    with cute_sharding.enabled(**settings_of(part)):
        found = other_arguments.answers_of_other_calls(calls_of(part), mesh_of((4,)))
    for where, later, _ in random.Random(part).sample(found, min(len(found), 1)):
        done = subprocess.run(
            [sys.executable, "-c", ALONE, str(part), json.dumps(where)],
            env={
                **os.environ,
                "PYTHONPATH": search_path(HERE.parent, HERE, *filter(None, sys.path)),
            },
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1]) == later, where


CASES = {
    "unfold": (lambda x, n: F.unfold(x.view(1, 2, 8, 8), n), (2, 3)),
    "fold": (lambda x, n: F.fold(x.view(1, 8, 16), (n, 8), 2, stride=2), (8,)),
    "squeeze_copy": (lambda x, dim: torch.squeeze_copy(x.view(1, 8, 1, 16), dim), (0, 2)),
    "view of bits": (
        lambda x, dtype: x.view(8, 16).view(dtype),
        (torch.int32, torch.uint8, torch.int16, torch.int64),
    ),
    "histc": (lambda x, bins: torch.histc(x, bins, 0, 9), (4, 5)),
    "multinomial": (lambda x, n: torch.multinomial(x.view(8, 16).softmax(-1), n), (2, 3)),
    "rounding": (
        lambda x, mode: torch.div(x.int(), 2 * x.int() + 1, rounding_mode=mode),
        (None, "floor", "trunc"),
    ),
    "a power of integers": (lambda x, n: x.int() ** n, (2, 2.5, 3)),
    "a norm": (lambda x, p: x.view(8, 16).norm(p, 0), (2, 1, float("inf"), 0)),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("case", CASES)
def test_in_all_threads(case, name):
    call, values = CASES[case]
    whole = torch.arange(128.0)
    # torch has no rule for windows, and ours moves rows
    settings = SETTINGS["everything" if case in ("unfold", "fold") else name]
    wrong = []

    def check():
        x = cut(whole, Replicate())
        for value in (*values, *values):
            found, wanted = call(x, value), call(whole, value)
            meta = found._spec.tensor_meta
            if (meta.shape, meta.dtype) != (wanted.shape, wanted.dtype):
                wrong.append((value, meta, wanted.shape, wanted.dtype))

    with cute_sharding.enabled(**settings):
        check()
        other = threading.Thread(target=check)
        other.start()
        other.join()
    assert not wrong


@pytest.mark.costly
@pytest.mark.parametrize("case", CASES)
def test_compiled(case):
    call, values = CASES[case]
    whole = torch.arange(128.0)
    with cute_sharding.enabled(redistribution=True, movement=True):
        x = cut(whole, Replicate())
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=False)
        for value in (*values, *values):
            assert compiled(x, value).shape == call(whole, value).shape, value


def misses(calls):
    """How many of the calls torch's cache in C++ does not answer."""
    before = torch._C._get_DTensor_sharding_propagator_cache_stats()[1]
    for call in calls:
        call()
    return torch._C._get_DTensor_sharding_propagator_cache_stats()[1] - before


STEPS = 5
NUMBERS = {
    "a factor": lambda x, y, k: x * (0.1 * k),
    "a learning rate": lambda x, y, k: x.add_(y, alpha=-0.1 * k),
    "addcmul": lambda x, y, k: torch.addcmul(x, x, y, value=0.1 * k),
    "addcdiv_": lambda x, y, k: x.addcdiv_(y, y, value=0.1 * k),
    "addmm": lambda x, y, k: torch.addmm(x, x, x, beta=0.1 * k, alpha=k),
    "full_like": lambda x, y, k: torch.full_like(x, 0.1 * k),
    "fill_": lambda x, y, k: x.fill_(0.1 * k),
    "lists": lambda x, y, k: torch._foreach_mul_([x, y], 0.1 * k),
    "lists of numbers": lambda x, y, k: torch._foreach_addcdiv_([x, y], [x, y], [y, x], [k, 2 * k]),
    "normal_": lambda x, y, k: x.normal_(0, 0.1 * k),
    "dropout": lambda x, y, k: torch.ops.aten.native_dropout(x, 0.1 * k, True),
    "adamw": lambda x, y, k: torch._fused_adamw_(
        [x],
        [y],
        [y],
        [y],
        [],
        [torch.ones(())],
        lr=0.1 * k,
        beta1=0.9,
        beta2=0.9,
        weight_decay=0.1 * k,
        eps=0.1,
        amsgrad=False,
        maximize=False,
    ),
}


@pytest.mark.parametrize("case", NUMBERS)
def test_numbers_that_change_in_each_step_are_no_keys(case):
    """They are values, which decide nothing: torch alone does not ask again either."""
    with cute_sharding.enabled(redistribution=True, movement=True):
        x, y = cut(torch.ones(8, 8), Shard(0)), cut(torch.ones(8, 8), Shard(0))
        NUMBERS[case](x, y, 1)
        NUMBERS[case](x, y, 2)  # the first call gives some ops their info
        assert misses([lambda k=k: NUMBERS[case](x, y, k) for k in range(3, 3 + STEPS)]) == 0


def test_what_cannot_be_hashed_is_in_no_key():
    """Complex numbers, and generators."""
    with cute_sharding.enabled(redistribution=True, movement=True):
        x = cut(torch.ones(8, 8) + 1j, Shard(0))
        for k in range(3):
            torch.addmm(x, x, x, beta=1j, alpha=k * 1j)
            torch.add(x, x, alpha=k * 1j)
            torch.full_like(x, k * 1j)
        y = cut(torch.full((8, 8), 0.5), Replicate())
        for _ in range(3):
            torch.multinomial(y, 2, generator=torch.Generator())
            torch.bernoulli(y, generator=torch.Generator())


# -- ops of the program ----------------------------------------------------------------------------

LIBRARY = torch.library.Library("cute_sharding_keys", "DEF")
LIBRARY.define(
    "made(Tensor x, bool flag, str text, float number, int[] sizes, *, ScalarType? dtype=None, "
    "bool? other=None) -> Tensor"
)
VALUES = (
    (False, True),
    ("a", "bc"),
    (1.0, 2.0),
    ([1], [2], [1, 1]),
)
KEYWORDS = {"dtype": (None, torch.float64), "other": (None, True)}


def made(x, flag, text, number, sizes, *, dtype=None, other=None):
    n = flag + len(text) + int(number) + sum(sizes) + len(sizes) + bool(other)
    return x.new_ones((*x.shape, n), dtype=dtype)


LIBRARY.impl("made", made, "CompositeExplicitAutograd")
MADE = torch.ops.cute_sharding_keys.made.default


def rule(x, flag, text, number, sizes, *, dtype=None, other=None):
    """A result is sharded along the dim that only the values of all arguments tell."""
    d = (flag + len(text) + int(number) + sum(sizes) + (dtype is not None) + bool(other)) % 2
    nothing = [None] * 4
    return [
        ([Replicate()], [Replicate(), *nothing]),
        ([Shard(d)], [Shard(d), *nothing]),
    ]


def forget(op):
    for table in (
        *op_schemas.tables(),
        op_schemas.propagator().op_to_schema_info_for_single_dim_strategy,
    ):
        table.pop(op, None)
    op_schemas.clear_propagation_caches()


@pytest.mark.parametrize("before", [True, False])
def test_rules_of_the_program_may_read_all_arguments(before):
    first = [some[0] for some in VALUES]
    calls = [(first, {})]
    for i, some in enumerate(VALUES):
        calls += [([*first[:i], value, *first[i + 1 :]], {}) for value in some[1:]]
    calls += [(first, {name: value}) for name, some in KEYWORDS.items() for value in some]
    try:
        if before:
            register_sharding(MADE)(rule)
        with cute_sharding.enabled(redistribution=True, movement=True):
            if not before:
                register_sharding(MADE)(rule)
            x = cut(torch.ones(8, 8), Shard(0))

            def answers(fresh):
                found = []
                for args, kwargs in calls:
                    if fresh:
                        op_schemas.clear_propagation_caches()
                    y = MADE(x, *args, **kwargs)
                    found.append((y.placements, y._spec.tensor_meta))
                return found

            assert answers(False) == answers(True)
            assert len({str(answer) for answer in answers(False)}) > 3
    finally:
        forget(MADE)


def of_one_dim(op, args, kwargs):
    return []


REGISTRATIONS = {
    "register_sharding": lambda op: register_sharding(op)(
        lambda x, dim, descending=False: [([Replicate()] * 2, [Replicate(), None, None])]
    ),
    "register_single_dim_strategy": lambda op: register_single_dim_strategy([op])(of_one_dim),
}


@contextmanager
def rules_as_before(op):
    """Puts back the rules of the op that are registered in the block."""
    tables = (
        *op_schemas.tables(),
        op_schemas.propagator().op_to_schema_info_for_single_dim_strategy,
    )
    held = [(table, table[op]) for table in tables if op in table]
    try:
        yield
    finally:
        forget(op)
        for table, entry in held:
            table[op] = entry


@pytest.mark.parametrize("name", REGISTRATIONS)
def test_a_rule_that_is_registered_later(name):
    """A call that has run before is answered by the new rule."""
    op = torch.ops.aten.sort.default
    with rules_as_before(op), cute_sharding.enabled(redistribution=True, movement=True):
        x = cut(torch.ones(8, 8), Shard(0))
        for _ in range(3):
            assert op(x, 1)[0].placements == (Shard(0),)
        REGISTRATIONS[name](op)
        for _ in range(3):
            assert op(x, 1)[0].placements == (Replicate(),)


OF_ALL_KINDS = {
    "a pointwise op, for which torch has a rule of one mesh dim": ("tanh", ()),
    "an op that torch has another rule for": ("sort", (1,)),
    "a movement op": ("roll", ([1], [1])),
    "a view": ("transpose.int", (0, 1)),
}


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("kind", OF_ALL_KINDS)
@pytest.mark.parametrize("one_dim", [True, False])
def test_a_rule_of_the_program_comes_first(one_dim, kind, before):
    name, args = OF_ALL_KINDS[kind]
    op = op_schemas.overload(name if "." in name else f"{name}.default")
    results = len(op._schema.returns)

    def rule(*given, **kwargs):
        nothing = [None] * (len(given) - 1)
        return [([Replicate()] * results, [Replicate(), *nothing])]

    def register():
        if one_dim:
            register_single_dim_strategy([op])(of_one_dim)
        else:
            register_sharding(op)(rule)

    with rules_as_before(op):
        if before:
            register()
        with cute_sharding.enabled(redistribution=True, movement=True):
            if not before:
                register()
            found = op(cut(torch.ones(8, 8), Shard(0)), *args)
            found = found[0] if isinstance(found, tuple) else found
            assert found.placements == (Replicate(),)
