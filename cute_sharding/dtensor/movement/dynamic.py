"""Movement ops in a compiled program whose sizes are symbolic.

What an op does to the rows of the dims that it touches may be known by numbers, where only other
dims are symbolic: then it is decided as in an eager program, and what is free is slices of the
local tensor. Else the result keeps the operand's placements, so that nothing is decided by sizes
which another call has not; and the op becomes one that the compiler does not look into, which plans
anew in each call, on the sizes of that call, what an eager program would run. So there is one graph
for all sizes. What the op is to do is written in a string, for graphs are kept on disk (see
run/dynamic.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, reduce
from itertools import combinations, islice
from typing import Any, NamedTuple

import torch

from cute_sharding.dtensor.compiled.library import in_own_memory, library
from cute_sharding.dtensor.compiled.local_sizes import local_shape_of
from cute_sharding.dtensor.movement.copies import note_movement
from cute_sharding.dtensor.movement.running import LISTS, Runner
from cute_sharding.dtensor.replaced import (
    answers,
    collective_ops,
    dispatch,
    local_tensors,
    op_schemas,
    registry,
    symints,
)
from cute_sharding.dtensor.replaced.op_schemas import OpSchema
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec, Partial, Replicate
from cute_sharding.dtensor.run.dynamic import exchanged, mesh_named, parsed, redistributed
from cute_sharding.dtensor.run.groups import dims_of_group
from cute_sharding.dtensor.run.order import laid_out
from cute_sharding.dtensor.run.placements import cut_of, placement_of
from cute_sharding.dtensor.run.reading import agree
from cute_sharding.exchange import Exchange
from cute_sharding.layout import Undecided
from cute_sharding.movement import BY_OVERLOAD
from cute_sharding.movement.choose import Choice, chosen, kept, open_dims
from cute_sharding.movement.free import Cuts
from cute_sharding.movement.slices import is_view
from cute_sharding.ops.rules.parts import is_whole
from cute_sharding.relations import Move
from cute_sharding.sharding.chains import Chains

# Where the dim of a slice stands among its arguments; after it come start, end and step.
_SLICES = {"slice.Tensor": 1, "slice_backward.default": 2}
# For which torch raises, whatever is cut; other ops without a rule it takes apart.
_WITHOUT_RULE = ("unfold.default", "unfold_backward.default")


class Found(NamedTuple):
    """What runs in the place of the op, and for the sizes at hand what was chosen."""

    runner: Any
    choice: Choice
    metas: Any


def dynamic_of(name: str, schema: OpSchema, specs: Sequence[DTensorSpec]) -> Found | None:
    """The op as a movement for any sizes; None where none is known."""
    given = op_schemas.with_shapes(schema, [tuple(spec.shape) for spec in specs])
    mesh, place = specs[0].mesh, _SLICES.get(name)
    if any(isinstance(p, Partial) for spec in specs for p in spec.placements) or (
        place is not None and is_whole(*schema.args_schema[place + 1 :])
    ):
        return None
    now = _at_hand(*given)
    move = None if now is None else _move_of(name, *now)
    if move is None:
        return None
    cuts = tuple([tuple([cut_of(p) for p in spec.placements]) for spec in specs])
    sizes = tuple(mesh.shape)
    # Also what torch has no rule for, or gathers whatever is cut.
    anyway = name in _WITHOUT_RULE or (move.triangle is not None and any(map(any, cuts)))
    if not open_dims(move, cuts, sizes) and not anyway:
        return None
    metas = registry.output_metas(schema)
    if _goes_by_numbers(move, schema, specs):
        choice = chosen(move, cuts, sizes, anyway=True)
        assert choice is not None
        if not all(
            agree(shape, specs[0], [placement_of(cut) for cut in some])
            for shape, some in zip(move.outputs, choice.cuts)
        ):
            return None  # torch reads them as an order
        if is_view(choice.exchange) and schema.op._schema._is_view_op():
            placements = tuple([tuple(spec.placements) for spec in specs])
            given_as = choice.exchange, mesh, (), tuple(specs), placements, ()
            return Found(Runner(*given_as, name, _as_it_is, answers.listed(metas)), choice, metas)
    elif all(cut is None or cut[1] == 1 for some in cuts for cut in some):
        choice = kept(move, cuts, sizes)
    else:
        return None
    onto = [shape for shape in answers.shapes_of_results(metas) if shape is not None]
    if not (_have_groups(move, cuts, mesh) and _are_known(onto, choice.exchange, mesh)):
        return None
    runner = _Runner(
        name,
        tuple(specs),
        given,
        onto,
        [meta for meta in answers.listed(metas) if meta is not None],
        choice.exchange,
        note_movement if schema.op._schema._is_view_op() else None,
    )
    return Found(runner, choice, metas)


def _at_hand(args: Sequence[Any], kwargs: dict[str, Any]) -> Any | None:
    """The arguments as numbers; None where something is none, or has no value yet."""
    if not symints.has_shape_env(*args, *kwargs.values()):
        return None
    return symints.numbers_at_hand((args, kwargs))


def _as_it_is(*_: Any) -> None:
    """What is a view is one of the local tensor, and nobody has to be told."""


def _move_of(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Move | None:
    try:
        return BY_OVERLOAD[name].move(*args, **kwargs)
    except (ValueError, IndexError, TypeError):
        return None  # torch says what is wrong


def _goes_by_numbers(move: Move, schema: OpSchema, specs: Sequence[DTensorSpec]) -> bool:
    """Whether what the op does to the dims that it touches is the same whatever the symbols are.

    Sizes among its arguments may be those of other dims.
    """
    others: set[str] = set()
    for i, spec in enumerate(specs):
        touched = move.touched(i)
        if move.triangle is not None:
            touched |= {len(spec.shape) - 2, len(spec.shape) - 1}
        if symints.is_symbolic(*(spec.shape[d] for d in touched)):
            return False
        others.update(symints.size_text(n) for d, n in enumerate(spec.shape) if d not in touched)
    for given in (*schema.args_schema, *schema.kwargs_schema.values()):
        if isinstance(given, torch.SymInt):
            return False
        some = given if isinstance(given, (list, tuple)) else ()
        if any(isinstance(n, torch.SymInt) and symints.size_text(n) not in others for n in some):
            return False
    return True


def _have_groups(move: Move, cuts: tuple[Cuts, ...], mesh: Any) -> bool:
    """Whether all ranks that may have to exchange something, for some sizes, have a group."""
    dims = open_dims(move, cuts, tuple(mesh.shape))
    return all(
        dims_of_group(mesh, some) is not None
        for count in range(2, len(dims) + 1)
        for some in combinations(dims, count)
    )


def _are_known(onto: Sequence[tuple[Any, ...]], exchange: Exchange, mesh: Any) -> bool:
    """Whether the sizes of this rank's results can be said."""
    try:
        for shape, placed in zip(onto, exchange.targets):
            local_shape_of(shape, placed.chains, mesh)
    except Undecided:
        return False
    return True


class _Runner:
    """Called with the op's arguments, in which local tensors stand for DTensors."""

    def __init__(
        self,
        name: str,
        specs: tuple[DTensorSpec, ...],
        given: tuple[Any, ...],
        onto: Sequence[tuple[Any, ...]],
        metas: Sequence[Any],
        exchange: Exchange,
        note: Callable[[Any, torch.Tensor, list[torch.Tensor]], None] | None,
    ) -> None:
        args, kwargs = given
        self.name, self.specs, self.exchange, self._note = name, specs, exchange, note
        self._reads = BY_OVERLOAD[name].reads
        self._numbers: list[Any] = []
        arguments = _written((args, tuple(kwargs.values())), self._numbers)
        self._onto, self._metas = onto, metas
        self._how = (
            name,
            tuple([placed.chains for placed in exchange.sources]),
            tuple([placed.chains for placed in exchange.targets]),
            arguments,
            tuple(kwargs),
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for spec in self.specs:
            whole = DTensorSpec(spec.mesh, (Replicate(),) * spec.mesh.ndim, spec.tensor_meta)
            dispatch.observe(spec, whole, self.name)
        operands = [
            collective_ops.waited(leaf)
            for leaf in local_tensors.leaves(args, kwargs)
            if isinstance(leaf, torch.Tensor)
        ]
        results = self._moved(operands)
        if self._note is not None:
            self._note(self, operands[0], results)
        return results[0] if len(results) == 1 and self.name not in LISTS else results

    def _moved(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        mesh = self.specs[0].mesh
        shapes = [
            local_shape_of(shape, placed.chains, mesh)
            for shape, placed in zip(self._onto, self.exchange.targets)
        ]
        operands = operands[: self._reads]
        moved = exchanged("move", operands, shapes, self._numbers, mesh, *self._how)
        return [laid_out(x, meta) for x, meta in zip(moved, self._metas)]

    def again(self, output: int, source: torch.Tensor) -> torch.Tensor:
        """One of the results."""
        return self._moved([source])[output]

    def back(self, output: int, moved: torch.Tensor, source: torch.Tensor) -> None:
        """Write to the operand's local tensor what one of the results, ``moved``, has of it."""
        operands, mesh = [moved, source], self.specs[0].mesh
        how = output, *self._how
        (written,) = exchanged("move back", operands, [source.shape], self._numbers, mesh, *how)
        source.copy_(written)


# -- the op's arguments, as numbers and a literal --------------------------------------------------


def _written(value: Any, numbers: list[Any]) -> Any:
    """A literal, in which 0 stands for each integer, and text for other numbers."""
    if isinstance(value, (tuple, list)):
        return tuple([_written(part, numbers) for part in value])
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (int, torch.SymInt)):
        numbers.append(value)
        return 0
    return repr(value)


def _read(literal: Any, numbers: Iterator[int]) -> Any:
    """The inverse of :func:`_written`."""
    if isinstance(literal, tuple):
        return tuple([_read(part, numbers) for part in literal])
    if literal is None or isinstance(literal, bool):
        return literal
    return float(literal) if isinstance(literal, str) else next(numbers)


# -- in each call ----------------------------------------------------------------------------------


@lru_cache(maxsize=1 << 10)
def _runner(
    mesh: Any,
    numbers: tuple[int, ...],
    name: str,
    sources: tuple[Chains, ...],
    targets: tuple[Chains, ...],
    arguments: Any,
    names: tuple[str, ...],
) -> Runner:
    """
    Raises:
        RuntimeError: the op cannot be run on such sizes.
    """
    args, values = _read(arguments, iter(numbers))
    move = _move_of(name, args, dict(zip(names, values)))
    if move is None:
        raise RuntimeError(
            f"{name} was compiled for any sizes, and these it is not defined for: {args}"
        )
    exchange = Exchange.on_mesh(move, tuple(mesh.shape), sources, targets)
    dims = dims_of_group(mesh, exchange.mesh_dims)
    assert dims is not None  # _have_groups
    return Runner(exchange, mesh, dims, (), (), (), name)


def _move(
    mesh: Any, operands: list[torch.Tensor], numbers: tuple[int, ...], *how: Any
) -> list[torch.Tensor]:
    return _runner(mesh, numbers, *how).copies(operands)


def _move_back(
    mesh: Any, operands: list[torch.Tensor], numbers: tuple[int, ...], output: int, *how: Any
) -> list[torch.Tensor]:
    """What the operand's local tensor becomes, where one of the results is written to."""
    moved, source = operands
    written = source.clone(memory_format=torch.contiguous_format)
    _runner(mesh, numbers, *how).back(output, moved, written)
    return [written]


# -- the op ----------------------------------------------------------------------------------------

# By kind: called with the mesh, the op's tensors, its numbers, and what else the string says.
KINDS: dict[str, Callable[..., list[torch.Tensor]]] = {
    "redistribute": redistributed,
    "move": _move,
    "move back": _move_back,
}


def _exchange(
    operands: list[torch.Tensor], sizes: list[int], numbers: list[int], how: str, group: str
) -> list[torch.Tensor]:
    kind, key, _, *rest = parsed(how)
    results = KINDS[kind](mesh_named(key, how), operands, tuple(numbers), *rest)
    return [in_own_memory(result, operands) for result in results]


def _shapes_of(
    operands: list[torch.Tensor], sizes: list[Any], numbers: list[Any], how: str, group: str
) -> list[torch.Tensor]:
    kind, _, dims, *_ = parsed(how)
    dtypes = [x.dtype for x in operands]
    if kind != "redistribute":  # there each operand has a result, of its own dtype
        dtypes = [reduce(torch.promote_types, dtypes)] * len(dims)
    remaining = iter(sizes)
    return [
        operands[0].new_empty([*islice(remaining, ndim)], dtype=dtype)
        for ndim, dtype in zip(dims, dtypes)
    ]


# The results' sizes are an argument: a backward graph is handed the symbols that its nodes have as
# arguments, and no others.
library.define(
    "exchange(Tensor[] operands, SymInt[] sizes, SymInt[] numbers, str how, str group) -> Tensor[]",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
library.impl("exchange", _exchange, "CompositeExplicitAutograd")
# As a kernel of meta tensors: torch's register_fake looks through all modules there are for the
# caller's, which takes longer than to import all of this package's.
library.impl("exchange", _shapes_of, "Meta")
