"""The sizes of a program that is being compiled, global and local: torch's SymInts as sizes of the
layout algebra, and back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch

from cute_sharding.dtensor.bookkeeping.stats import logger
from cute_sharding.dtensor.replaced.symints import assert_at_run_time, is_empty, is_truly
from cute_sharding.layout import Undecided
from cute_sharding.layout.size import Size, asking, expression, size
from cute_sharding.layout.symbolic import (
    Fact,
    Int,
    forgetting_afterwards,
    fraction,
    learn,
    remainder,
    symbol,
)
from cute_sharding.sharding.rows import Chains, kinds_of_device, local_size

# -- symbols ---------------------------------------------------------------------------------------
# The sizes of a program that is being compiled: torch's SymInts as sizes of the layout algebra, and
# back.
#
# A SymInt carries a sympy expression, so a Size needs only torch's own functions rewritten as
# sympy's. What the algebra cannot prove, it asks (cute_sharding/layout/size.py): the answer holds
# for the call that is being compiled, and becomes a guard of torch's ShapeEnv, by evaluating the
# fact as a SymBool. For sizes that have no value yet (unbacked ones) only what torch knows for sure
# counts; otherwise the algebra raises Undecided.


class Symbols:
    """The symbols of one trace; an Oracle for what cannot be proved about them.

    Attributes:
        guards: the facts that were assumed, in order.
    """

    def __init__(self, shape_env: Any) -> None:
        self.guards: list[Fact] = []
        self._shape_env = shape_env
        self._names: list[
            tuple[Any, Any]
        ] = []  # (expression, symbol) of the sizes of local tensors
        self._torch: dict[Any, Any] = {}  # our symbol -> torch's expression
        self._ours: dict[Any, Any] = {}

    def recall(self) -> None:
        """Learn the divisibilities that the trace was asked about before, and the sizes of local
        tensors. (Other facts are asked again, and the trace knows the answers.)
        """
        replace = self._shape_env.replace  # what has become known since
        for known in getattr(self._shape_env, "divisible", ()):
            known = replace(known)
            if type(known).__name__ in ("Mod", "PythonMod"):
                learn(Fact("divides", *map(self._read, known.args)))
        for expr, name in _named.get(self._shape_env, {}).items():
            named = self._read(replace(expr)), self._read(replace(name))
            if named[1].is_Symbol and not named[0].is_Symbol:
                self._names.append(named)
                learn(Fact("equal", named[1], named[0]))

    def size(self, value: int | torch.SymInt) -> Int:
        """A number or SymInt as an int or Size."""
        if not isinstance(value, torch.SymInt):
            return value
        return size(self._read(value.node.expr))

    def symint(self, value: Int, *, local: bool = False) -> Any:
        """The inverse of :meth:`size`; for a ``local`` size, in the symbols of local sizes."""
        return (
            self._written(expression(value, self._names if local else ()))
            if isinstance(value, Size)
            else value
        )

    def hint(self, value: Int) -> int | None:
        """The size's value in the call that is being compiled; None if it has none yet."""
        if not isinstance(value, Size):
            return value
        expr = value.expr.subs({s: self._hint_of(s) for s in value.expr.free_symbols})
        return int(expr) if expr.is_number and expr.is_Integer else None

    def holds(self, fact: Fact) -> bool | None:
        left, right = (self.hint(size(side)) for side in (fact.left, fact.right))
        if left is not None and right is not None:
            return fact.is_true_of(left, right)
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        condition = self._condition(fact)
        if statically_known_true(condition):
            return True
        return False if statically_known_true(torch.sym_not(condition)) else None

    def assume(self, fact: Fact) -> None:
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        condition = self._condition(fact)
        if not statically_known_true(condition):
            self.guards.append(fact)
            names = sorted(
                {
                    name
                    for side in (fact.left, fact.right)
                    for name in getattr(side, "free_symbols", ())
                },
                key=str,
            )
            logger.debug(
                "guard: %s (now %s)",
                fact,
                ", ".join(f"{name} = {self._hint_of(name)}" for name in names),
            )
        if not bool(condition):
            raise RuntimeError(
                f"the fact {fact} is true for the sizes of this call, but PyTorch says that {fact} "
                "is false: please report this message"
            )

    def _condition(self, fact: Fact) -> Any:
        left, right = self._written(fact.left), self._written(fact.right)
        if fact.relation == "divides":
            return left % right == 0 if fact.holds else left % right != 0
        if fact.relation == "equal":
            return left == right if fact.holds else left != right
        return left <= right if fact.holds else left > right

    def _hint_of(self, ours: Any) -> Any:
        node = self._node(ours).node
        return node.hint if node.has_hint() else ours

    def _node(self, ours: Any) -> Any:
        return self._shape_env.create_symintnode(self._torch[ours], hint=None)

    def _symbol(self, expr: Any) -> Any:
        """Our symbol for a symbol of torch, or for an expression of an unknown kind: a positive
        integer, with the bounds that torch knows. If its present value is not positive, that number
        instead.
        """
        import sympy

        if expr not in self._ours:
            ours = symbol(str(expr) if expr.is_Symbol else f"({expr})")
            self._ours[expr], self._torch[ours] = ours, expr
            now = self._hint_of(ours)
            if now is not ours and now < 1:  # an offset, or an empty dim: taken as a number
                self.assume(Fact("equal", ours, now))
                self._ours[expr] = sympy.Integer(now)
                return self._ours[expr]
            lower = self._shape_env.bound_sympy(expr).lower
            if lower.is_Integer and lower > 1:
                learn(Fact("at most", int(lower), ours))
            elif not (lower.is_Integer and lower == 1) and self._node(ours).node.has_hint():
                # A size without a value may turn out to be 0: what is proved for positive sizes is
                # then about an empty tensor, where nothing can be wrong.
                self.assume(Fact("at most", 1, ours))
        return self._ours[expr]

    def _read(self, expr: Any) -> Any:
        import sympy

        if expr.is_Integer:
            return expr
        read = _READ.get(type(expr).__name__)
        if read is None or (read is _power and not expr.exp.is_Integer):
            return self._symbol(expr)
        return read(sympy, *(self._read(arg) for arg in expr.args))

    def _written(self, expr: Any) -> Any:
        """A sympy expression of ours as an int or SymInt."""
        import sympy

        expr = sympy.sympify(expr)
        numerator, denominator = fraction(expr)
        if denominator != 1:
            return self._written(numerator) // self._written(denominator)
        if expr.is_Integer:
            return int(expr)
        if expr.is_Symbol:
            return self._node(expr)
        if isinstance(expr, (sympy.floor, sympy.ceiling)):
            numerator, denominator = map(self._written, fraction(expr.args[0]))
            return (
                numerator // denominator
                if isinstance(expr, sympy.floor)
                else -(-numerator // denominator)
            )
        args = [self._written(arg) for arg in expr.args]
        if expr.is_Add:
            return sum(args[1:], args[0])
        if expr.is_Mul:
            return prod(args[1:], start=args[0])
        if expr.is_Pow:
            return prod([args[0]] * args[1])
        fold = torch.sym_max if isinstance(expr, sympy.Max) else torch.sym_min
        result = args[0]
        for arg in args[1:]:
            result = fold(result, arg)
        return result


def _power(sympy: Any, base: Any, exponent: Any) -> Any:
    return base**exponent


# torch's functions (torch/utils/_sympy/functions.py), and sympy's, by name.
_READ = {
    "Add": lambda sympy, *args: sympy.Add(*args),
    "Mul": lambda sympy, *args: sympy.Mul(*args),
    "Pow": _power,
    "PowByNatural": _power,
    "FloorDiv": lambda sympy, a, b: sympy.floor(a / b),
    "CleanDiv": lambda sympy, a, b: sympy.floor(a / b),
    "CeilDiv": lambda sympy, a, b: sympy.ceiling(a / b),
    "Mod": lambda sympy, a, b: remainder(a, b),
    "PythonMod": lambda sympy, a, b: remainder(a, b),
    "Max": lambda sympy, *args: sympy.Max(*args),
    "Min": lambda sympy, *args: sympy.Min(*args),
}

# For each trace, torch's expressions for sizes that have a symbol of their own as well: the sizes
# of its inputs' local tensors, whose symbols are not those of the global sizes.
_named: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()


def equate(name: Any, value: Any, others: Sequence[Any] = ()) -> None:
    """Record that a local size is ``value`` by the rule and ``name`` on the tensor.

    If one of them is a number, the other gets a guard that it is this number, if it has a value
    yet. If both are expressions, a guard makes them equal (or an assertion at run time, if they
    have no value yet); and ``name`` is written for ``value`` from now on, if it is a symbol and not
    in ``others``. If the two differ, ``name`` means something else (a compiler may use one symbol
    for sizes that are equal in the call that it compiles, so a local size may have another dim's):
    then the only guard is that they differ.
    """
    if not (isinstance(value, torch.SymInt) and isinstance(name, torch.SymInt)):
        symbols = [n for n in (value, name) if isinstance(n, torch.SymInt) and n.node.has_hint()]
        if symbols:
            # At once: a compiler's later stages cannot handle sizes that turn out to be constants.
            bool(value == name)
        return
    if not (value.node.has_hint() and name.node.has_hint()):
        assert_at_run_time(name == value)
    elif not bool(name == value):
        return
    expr, symbol = value.node.expr, name.node.expr
    taken = {
        s
        for other in others
        if isinstance(other, torch.SymInt)
        for s in other.node.expr.free_symbols
    }
    if symbol.is_Symbol and not expr.is_Symbol and symbol not in taken:
        _named.setdefault(name.node.shape_env, {})[expr] = symbol


_now: ContextVar[Symbols | None] = ContextVar("cute_sharding_symbols", default=None)


@contextmanager
def symbols_of(*values: Any) -> Iterator[Symbols | None]:
    """Inside the ``with`` block, questions that the algebra cannot decide go to the trace to which
    the SymInts among ``values`` belong. Without SymInts nothing changes.
    """
    first = next(_symints(values), None)
    if first is None:
        yield _now.get()
        return
    found = Symbols(first.node.shape_env)
    token = _now.set(found)
    try:
        with asking(found), forgetting_afterwards():
            found.recall()
            yield found
    finally:
        _now.reset(token)


def _symints(values: Iterable[Any]) -> Iterator[torch.SymInt]:
    for value in values:
        if isinstance(value, torch.SymInt):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _symints(value)


def to_sizes(value: Any) -> Any:
    """A SymInt as a Size, also inside tuples and lists; any other value unchanged."""
    if isinstance(value, torch.SymInt):
        return _symbols_here().size(value)
    if isinstance(value, (tuple, list)):
        return tuple([to_sizes(item) for item in value])
    return value


def to_symints(value: Any, *, local: bool = False) -> Any:
    """The inverse of :func:`to_sizes`; ``local`` sizes are in the symbols of local tensors."""
    if isinstance(value, Size):
        return _symbols_here().symint(value, local=local)
    if isinstance(value, (tuple, list)):
        return tuple([to_symints(item, local=local) for item in value])
    return value


def hints_of(value: Any) -> Any:
    """The values of sizes in the call that is being compiled, also inside tuples and lists; None
    for one that has no value yet.
    """
    if isinstance(value, Size):
        return _symbols_here().hint(value)
    if isinstance(value, (tuple, list)):
        return tuple([hints_of(item) for item in value])
    return value


def _symbols_here() -> Symbols:
    symbols = _now.get()
    if symbols is None:
        raise RuntimeError("a symbolic size outside of symbols_of(...)")
    return symbols


# -- local sizes -----------------------------------------------------------------------------------
# The sizes of local tensors in a compiled program.
#
# The rule is that of ``cute_sharding.sharding.rows.local_size``, for even and uneven blocks; here
# it is applied to symbolic sizes. Facts that it has to know become guards (``symbols``). Callers:
# ``replaced.compiler`` (tensors that enter a graph, and shapes and sizes that torch computes),
# ``run.in_graphs`` (results of the op that exchanges). ``symbols.equate`` adds the guard that the
# local tensor of a graph's input has the size of the rule.

Cut: TypeAlias = tuple[Any, int, int]  # split factor, devices, this device's coordinate


def local_size_of(n: Any, *cuts: Cut) -> Any:
    """The number of rows, of ``n``, that a device holds after ``cuts``, each (split factor,
    devices, its coordinate); a number or a SymInt, like the arguments.

    Raises:
        Undecided: it depends on sizes that have no value yet.
    """
    given = n, *(split_factor for split_factor, _, _ in cuts)
    with symbols_of(*given):
        rows = to_sizes(n)
        if isinstance(n, torch.SymInt):
            now = hints_of(to_sizes(given))  # None: no value yet
            if None not in now:
                kinds = _by_kind(rows, now, cuts)
                # A size of 0 or 1 becomes a constant, and the compiler then solves for the global
                # size. It does not if it has a fact about the fullest device.
                is_truly(to_symints(kinds[max(kinds)]) >= 2)
        for split_factor, parts, coordinate in cuts:
            rows = local_size(rows, to_sizes(split_factor), parts, coordinate)
        local = to_symints(rows, local=True)
        # In a graph, no rows are the number 0, as they are for an empty tensor that enters one.
        return 0 if is_empty(local) else local


def local_shape_of(shape: Sequence[Any], chains: Chains, mesh: Any) -> list[Any]:
    """The sizes of this rank's part of a tensor with these chains of cuts."""
    device = mesh.get_coordinate()
    return [
        local_size_of(n, *((factor, mesh.size(m), device[m]) for m, factor in chain))
        for n, chain in zip(shape, chains)
    ]


def _by_kind(rows: Any, now: Sequence[int], cuts: Sequence[Cut]) -> dict[int, Any]:
    """The rows of one device of each kind, keyed by their present number, of ``rows``, which are
    ``now[0]`` at present; the rest of ``now`` are the split factors.

    Every question about a device's own rows is asked for all kinds of device. It becomes a guard on
    the global size, and such facts decide what is a symbol or a constant, free or moved: devices
    that learn different facts would wait in different collectives.
    """
    kinds = {now[0]: rows}
    for factor, (split_factor, parts, _) in zip(now[1:], cuts):
        parents, kinds = kinds, {}
        for n, whole in parents.items():
            for device in kinds_of_device(n, factor, parts):
                mine = local_size(whole, to_sizes(split_factor), parts, device)
                kinds.setdefault(local_size(n, factor, parts, device), mine)
    return kinds


def local_size_if_known(n: Any, *cuts: Cut) -> Any:
    """:func:`local_size_of`; None if it cannot be computed."""
    try:
        return local_size_of(n, *cuts)
    except Undecided:
        return None
