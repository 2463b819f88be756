"""Arguments of ops in compiled programs, as rules are given them that compute with numbers."""

from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from cute_sharding.dtensor.replaced import symints
from cute_sharding.relations.table import SIGNATURES
from cute_sharding.relations.table.names import ThisCall


def test_symbols_become_numbers_that_another_call_may_have_otherwise():
    env = ShapeEnv()
    n = env.create_symintnode(env.create_symbol(8, ConstantSource("n")), hint=8)
    later = env.create_unbacked_symint()
    args, kwargs = symints.with_numbers(((8, 4), [3, n], later, None), {"end": n})
    assert args == ((8, 4), [3, 8], 0, None) and kwargs == {"end": 8}
    assert type(args[1][0]) is int
    assert {type(k) for k in (args[1][1], args[2], kwargs["end"])} == {ThisCall}
    assert not env.guards
    row = SIGNATURES["slice.Tensor"]
    assert row.is_moved and row.pattern(args[0], 0, 0, args[1][1]) == "[d0] d1 -> [to0] d1"


def test_numbers_stay_as_they_are():
    args = ((8, 4), [3], None)
    assert symints.with_numbers(args, {})[0] is args
