"""Plans for ops by their signatures."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from math import lcm, prod
from typing import Any, NamedTuple

import torch

from cute_sharding.dtensor.bookkeeping.settings import network_in_force
from cute_sharding.dtensor.bookkeeping.stats import count, logger
from cute_sharding.dtensor.decide.local import (
    by_folds,
    by_halos,
    by_numbers_of_rows,
    by_shares,
    in_their_place,
    of_results,
)
from cute_sharding.dtensor.door.cuts import (
    are_read_as_order,
    are_understood,
    keeps_the_only_shards,
    last_of,
    parts_of,
    placements_of,
)
from cute_sharding.dtensor.replaced import op_schemas, symints
from cute_sharding.dtensor.replaced.op_schemas import OpSchema
from cute_sharding.dtensor.replaced.tensor_specs import (
    DTensorSpec,
    Partial,
    Placement,
    are_known,
    is_masked,
)
from cute_sharding.dtensor.run.op_plan import (
    OpPlan,
    as_list,
    dtypes_of_results,
    placed,
    shapes_of_results,
)
from cute_sharding.dtensor.run.placements import text
from cute_sharding.propagation.signatures import (
    Assignment,
    Operand,
    Part,
    assign,
    assignments,
    owed_for,
    received_for,
    state_moves,
    state_of,
)
from cute_sharding.relations.signature import (
    UNREAD,
    Folding,
    Linear,
    Reads,
    Signature,
    State,
    parse,
)
from cute_sharding.relations.table import Row


def by_signature(
    row: Row,
    name: str,
    schema: OpSchema,
    specs: Sequence[DTensorSpec],
    *,
    halos: bool = True,
) -> OpPlan | None:
    """The op's plan by its signature. None if it has none for these arguments, or if placements are
    of kinds that no signature carries. Without ``halos``, dims that are read in windows are whole.
    """
    try:
        asked = _read(row, schema, specs, halos=halos)
        if asked is None:
            return None
        found = _assign(asked)
    except ValueError as error:
        logger.debug("%s: %s", name, error)
        return None
    signature, metas, shapes = asked.signature, asked.metas, [each.shape for each in asked.operands]
    args, kwargs, factors, made = asked.args, asked.kwargs, asked.factors, shapes_of_results(metas)
    last = last_of(specs)
    needed = [placements_of(parts, factors, last) for parts in found.operands]
    wanted = _kept_where_sized(signature, specs, needed)
    given = [
        None if _is_a_state(names, shape) else placements_of(parts, factors, last)
        for names, shape, parts in zip(signature.results, made, of_results(row.shares, found))
    ]
    as_order = are_read_as_order(specs)
    if as_order and not keeps_the_only_shards(specs, wanted):
        return None
    # Rows by number depend on which rows a device has, not only on how many.
    if as_order and _are_cut(signature.picked, signature, found):
        return None
    plan = placed(schema, specs, wanted, given, metas, as_order=as_order)
    with_halos = by_halos(plan, name, row.windows, specs, signature, found)
    if with_halos is None:
        return by_signature(row, name, schema, specs, halos=False)
    _note(name, signature, wanted, given, found.received)
    plan = by_folds(with_halos, name, row.fold, specs, signature, needed)
    if row.shares is not None and row.reduction(*args, **kwargs) == "avg":
        plan = by_shares(plan, row.shares, specs, signature.fitted(shapes), found)
    plan = by_numbers_of_rows(plan, row, specs, signature, wanted)
    others = [i for i in signature.sized if wanted[i] != needed[i]]
    return plan.prepared(in_their_place(schema, signature, others))


class _Asked(NamedTuple):
    """An op whose row has a signature for these operands.

    Attributes:
        args, kwargs: with shapes in place of tensors.
        factors: the split factors of specs, by their present numbers.
        metas: of the results.
    """

    row: Row
    schema: OpSchema
    specs: Sequence[DTensorSpec]
    signature: Signature
    operands: Sequence[Operand]
    args: Sequence[Any]
    kwargs: dict[str, Any]
    factors: dict[int, Any]
    metas: Any

    @property
    def reduce(self) -> str | None:
        reduction = self.row.reduction(*self.args, **self.kwargs)
        return _reduction(self.row, reduction, self.signature, self.specs)

    @property
    def how(self) -> dict[str, Any]:
        """The arguments of :func:`.signatures.assign` beside the reduction."""
        row, specs, metas = self.row, self.specs, self.metas
        is_real = any(dtype.is_floating_point for dtype in _dtypes(specs))  # it may have a gradient
        return {
            "linear": _linear(row.commuting(*self.args, **self.kwargs), specs, metas),
            "filled": row.has_rows(*self.args, **self.kwargs),
            "shares": row.shares is not None,
            "empty": row.empty,
            "network": network_in_force(),
            "results": _numbers(metas),
            "itemsizes": list(map(_itemsize, as_list(metas))),
            "folding": row.fold if is_real else row.fold._replace(turns=0),
            "weighs_picks": bool(self.signature.picked) and not row.picks_as_torch,
            "exchanges": not _is_symbolic(specs),
        }


def _read(
    row: Row, schema: OpSchema, specs: Sequence[DTensorSpec], *, halos: bool
) -> _Asked | None:
    """The op by its row; None if it has no signature for these arguments, or if placements are of
    kinds that no signature carries.

    Raises:
        ValueError: the operands do not fit the signature, or are not known to.
    """
    if not are_understood(specs):
        return None
    shapes = symints.numbers_at_hand([tuple(spec.shape) for spec in specs])
    factors = symints.factors_at_hand(specs)
    if shapes is None or factors is None:
        return None
    args, kwargs = op_schemas.arguments_with(schema, shapes)
    if row.is_moved:
        args, kwargs = symints.with_numbers(args, kwargs)
    pattern = row.pattern(*args, **kwargs)
    metas = None if pattern is None else op_schemas.output_metas(schema)
    if pattern is None or metas is None:
        return None
    operands = [
        Operand(shape, parts_of(spec.placements), _itemsize(spec.tensor_meta))
        for spec, shape in zip(specs, shapes)
    ]
    made = shapes_of_results(metas)
    signature = _signature(row, pattern, specs, operands, made, halos=halos)
    return _Asked(row, schema, specs, signature, operands, args, kwargs, factors, metas)


def placements_allowed(
    row: Row,
    schema: OpSchema,
    specs: Sequence[DTensorSpec],
    candidates: Sequence[Sequence[tuple[Placement, ...]]],
) -> Iterator[list[tuple[Placement, ...]]]:
    """Placements of its operands for which the op's signature needs no redistribution, wherever
    they lie now: those of each operand, for :func:`.signatures.assignments` with the parts of
    ``candidates``.
    """
    try:
        asked = _read(row, schema, specs, halos=True)
    except ValueError:
        return
    if asked is None:
        return
    mesh = tuple(specs[0].mesh.shape)
    known = [[parts_of(each) for each in some if are_known(each)] for some in candidates]
    for found in assignments(
        asked.signature,
        asked.operands,
        mesh,
        candidates=known,
        reduce=asked.reduce,
        **asked.how,
    ):
        yield [placements_of(parts, asked.factors) for parts in found.operands]


def _assign(asked: _Asked) -> Assignment:
    row, schema, specs, metas = asked.row, asked.schema, asked.specs, asked.metas
    signature, operands = asked.signature, asked.operands
    mesh = tuple(specs[0].mesh.shape)
    assigned = partial(assign, signature, operands, mesh, **asked.how)
    is_symbolic = _is_symbolic(specs)

    def decide(reduce: str | None, spare: bool, **others: Any) -> Assignment:
        found = assigned(reduce=reduce, spare=spare, **others)
        if (
            row.shares == "elements"
            and reduce == "avg"
            and (not _are_blocks_equal(specs, found) if is_symbolic else found.differ)
        ):
            # Each device scales its mean by its share of all elements (by_shares), and a sum of
            # these is left pending.
            return decide("sum", spare, **others)
        return found

    reduce = asked.reduce
    # What an op writes to would have to be moved back.
    spare = not schema.op._schema.is_mutable
    if not is_symbolic:
        return decide(reduce, spare)
    compared: list[Assignment] = []
    any_size = reduce in ("sum", "avg") or row.empty
    found = always = decide(reduce if any_size else None, False, compared=compared)
    for assume_rows in (True, False):
        others: list[Assignment] = []
        other = decide(reduce, spare, assume_rows=assume_rows, compared=others)
        if other == always or _have_rows(asked, other):
            found, compared = other, others
            break
    for other in compared:
        _keep_choice(specs, operands, metas, signature, row.fold, other, found)
    return found


def _are_blocks_equal(specs: Sequence[DTensorSpec], found: Assignment) -> bool:
    """Whether what is reduced comes from blocks of equal sizes, with guards that it does."""
    reduced = _reduced_on(found)
    for spec, cuts in zip(specs, found.operands):
        blocks = _blocks_of(cuts, spec.mesh.shape)
        for part in (cuts[m] for m in reduced):
            if isinstance(part, tuple) and not symints.is_truly(
                spec.shape[part[0]] % blocks[part[0]] == 0
            ):
                return False
    return True


def _blocks_of(cuts: Sequence[Part], mesh: Sequence[int]) -> dict[int, int]:
    """Into how many blocks each dim is cut."""
    found: dict[int, int] = {}
    for part, size in zip(cuts, mesh):
        if isinstance(part, tuple):
            found[part[0]] = found.get(part[0], 1) * part[1] * size
    return found


def _reduced_on(found: Assignment) -> list[int]:
    """The mesh dims on which a result is pending."""
    return [
        m for m, parts in enumerate(zip(*found.results)) if any(isinstance(p, str) for p in parts)
    ]


def _may_fold(folding: Folding, specs: Sequence[DTensorSpec]) -> bool:
    """Whether an op may fold: real numbers that mesh dims shard from left to right."""
    dtypes, meta = _dtypes(specs), specs[0].tensor_meta
    if _is_stand_in(specs) or meta is None or are_read_as_order(specs):
        return False
    is_real = not any(dtype.is_complex for dtype in dtypes)
    return is_real and (folding.exact or meta.dtype.is_floating_point)


def _is_stand_in(specs: Sequence[DTensorSpec]) -> bool:
    """Whether the mesh has one device, as torch's stand-in for any mesh. Of such specs only what
    holds without an exchange may be said: torch then runs the op that was taken apart as one, on
    local tensors.
    """
    return specs[0].mesh.size() == 1


def _itemsize(meta: Any) -> int:
    """The bytes of an element; of no tensor 1."""
    return 1 if meta is None else meta.dtype.itemsize


def _numbers(metas: Any) -> tuple[tuple[int, ...] | None, ...] | None:
    """The shapes of the results, in numbers; None if some have none at hand."""
    return symints.numbers_at_hand(tuple(shapes_of_results(metas)))


class _Received(NamedTuple):
    """What is received of a tensor, in bytes by its shape in numbers, with two assignments.

    Attributes:
        chosen, other: with the one that is taken, and with another one.
        numbers, shape: the shape, in numbers and in symbols.
        blocks: the least number of rows of each dim that all cuts divide evenly.
        is_strided: whether a cut has a split factor.
    """

    chosen: Callable[[Sequence[int]], int]
    other: Callable[[Sequence[int]], int]
    numbers: tuple[int, ...]
    shape: tuple[Any, ...]
    blocks: dict[int, int]
    is_strided: bool

    @classmethod
    def of(
        cls,
        chosen: Callable[[Sequence[int]], int],
        other: Callable[[Sequence[int]], int],
        numbers: Sequence[int],
        shape: Sequence[Any],
        cuts: Sequence[Sequence[Part]],
        mesh: Sequence[int],
    ) -> _Received:
        blocks: dict[int, int] = {}
        for some in cuts:
            for d, many in _blocks_of(some, mesh).items():
                blocks[d] = lcm(blocks.get(d, 1), many)
        is_strided = any(isinstance(part, tuple) and part[1] != 1 for some in cuts for part in some)
        return cls(chosen, other, tuple(numbers), tuple(shape), blocks, is_strided)

    def around(self, sizes: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The sizes, in numbers or in symbols, down and up to those that are divided evenly."""
        down = [n // self.blocks.get(d, 1) * self.blocks.get(d, 1) for d, n in enumerate(sizes)]
        up = [-(-n // self.blocks.get(d, 1)) * self.blocks.get(d, 1) for d, n in enumerate(sizes)]
        return down, up

    def uneven(self) -> list[int]:
        """The dims of symbolic sizes that are not divided evenly, with a guard for each that is or
        is not.
        """
        return [
            d
            for d, many in self.blocks.items()
            if symints.is_symbolic(self.shape[d])
            and not symints.is_truly(self.shape[d] % many == 0)
        ]

    def room(self, dims: Sequence[int]) -> tuple[int, int]:
        """How many sizes of these dims lie below and above before one that is divided evenly."""
        rests = [(self.numbers[d] % self.blocks[d], self.blocks[d]) for d in dims]
        return min(rest - 1 for rest, _ in rests), min(many - rest - 1 for rest, many in rests)

    def near(self, dims: Sequence[int], offset: int) -> tuple[int, ...]:
        """The shape in numbers, but for an offset of these dims."""
        return tuple([n + offset if d in dims else n for d, n in enumerate(self.numbers)])


def _keep_choice(
    specs: Sequence[DTensorSpec],
    operands: Sequence[Operand],
    metas: Any,
    signature: Signature,
    folding: Folding,
    other: Assignment,
    chosen: Assignment,
) -> None:
    """Add guards that in every call of the graph ``chosen`` compares with ``other`` as now: in what
    is received, and in that together with what is received later for what is left pending.
    """
    mesh, network = tuple(specs[0].mesh.shape), network_in_force()

    def received(operand: Operand, to: tuple[Part, ...], shape: Sequence[int]) -> int:
        moved = received_for(operand._replace(shape=tuple(shape)), to, mesh, network)
        return operand.itemsize * moved

    def owed(itemsize: int, parts: tuple[Part, ...], shape: Sequence[int]) -> int:
        return itemsize * owed_for(tuple(shape), parts, mesh)

    now, later, made = list[_Received](), list[_Received](), as_list(metas)
    for spec, operand, one, two in zip(specs, operands, chosen.operands, other.operands):
        if one != two:
            both = partial(received, operand, one), partial(received, operand, two)
            cuts = operand.parts, one, two
            now.append(_Received.of(*both, operand.shape, tuple(spec.shape), cuts, mesh))
    for found in (chosen, other):
        moved = state_moves(
            signature, operands, found.operands, mesh, folding, _numbers(metas) or ()
        )
        for kind, (state, to) in zip(folding.states, moved):
            of_state = partial(received, state, to)
            here, there = (of_state, _nothing) if found is chosen else (_nothing, of_state)
            shape = _shape_of_state(kind, signature, specs, made, state.shape)
            now.append(_Received.of(here, there, state.shape, shape, (state.parts, to), mesh))
    for meta, number, one, two in zip(made, _numbers(metas) or (), chosen.results, other.results):
        if number and one != two:
            both = partial(owed, _itemsize(meta), one), partial(owed, _itemsize(meta), two)
            later.append(_Received.of(*both, number, tuple(meta.shape), (one, two), mesh))
    _keep_order(now)
    if chosen.received:  # what is free is taken whatever it leaves pending
        _keep_order([*now, *later])


def _nothing(shape: Sequence[int]) -> int:
    return 0


def _shape_of_state(
    state: State,
    signature: Signature,
    specs: Sequence[DTensorSpec],
    made: Sequence[Any],
    numbers: Sequence[int],
) -> tuple[Any, ...]:
    """The shape of a state, in symbols; ``numbers``: in numbers."""
    i = signature.of_fold
    parts = (None,) * specs[i].mesh.ndim
    found = (
        state_of(signature, tuple(specs[i].shape), parts, tuple(specs[i].mesh.shape))[0]
        if isinstance(state, str)
        else tuple(made[state[1]].shape)
    )
    return (*numbers[: len(numbers) - len(found)], *found)  # in front: of how many devices


def _keep_order(every: Sequence[_Received]) -> None:
    """Add guards that in every call of the graph the chosen assignment receives more than the other
    one, less, or as much, as now.

    Of even blocks a share of the elements is received. Of uneven ones as much as lies between that
    of the next sizes below and above that are divided evenly. If these decide, they are the guard,
    for all sizes. If not, blocks stay even, and sizes of uneven ones between the least and the
    greatest for which what is received at these decides.
    """
    now = sum(each.chosen(each.numbers) - each.other(each.numbers) for each in every)
    if not any(each.chosen(each.numbers) for each in every) or _is_settled(every, now):
        return  # what is free is taken for all sizes
    uneven = [each.uneven() for each in every]
    below, above = _reach(every, uneven, now)
    terms = list[tuple[Fraction, Any]]()
    for each, dims in zip(every, uneven):
        for d in dims:
            symints.is_truly(each.shape[d] >= each.numbers[d] - below)
            symints.is_truly(each.shape[d] <= each.numbers[d] + above)
        more, less = _more_and_less(each, now)
        rest = [d for d in range(len(each.shape)) if d not in dims]
        given = more(each.near(dims, -below)) - less(each.near(dims, above))
        share = Fraction(given, max(prod(each.numbers[d] for d in rest), 1))
        terms.append((share, prod(each.shape[d] for d in rest)))
    symints.is_truly(_total(terms) > 0 if now else _total(terms) <= 0)


def _more_and_less(
    each: _Received, now: int
) -> tuple[Callable[[Sequence[int]], int], Callable[[Sequence[int]], int]]:
    return (each.chosen, each.other) if now >= 0 else (each.other, each.chosen)


def _is_settled(every: Sequence[_Received], now: int) -> bool:
    """Whether the sizes around these that are divided evenly decide, with a guard that they do."""
    low, high = list[tuple[Fraction, Any, int]](), list[tuple[Fraction, Any, int]]()
    for each in every:
        (down, up), around = each.around(each.numbers), each.around(each.shape)
        for found, received, k in zip((low, high), _more_and_less(each, now), (0, 1)):
            share = Fraction(received(up), max(prod(up), 1))
            found.append((share, prod(around[k]), prod((down, up)[k])))
    numbers = [sum(share * n for share, _, n in found) for found in (low, high)]
    if numbers[0] <= numbers[1] or any(each.is_strided for each in every):
        return False
    terms = [*[(share, n) for share, n, _ in low], *[(-share, n) for share, n, _ in high]]
    return symints.is_truly(_total(terms) > 0)


def _reach(
    every: Sequence[_Received], uneven: Sequence[Sequence[int]], now: int
) -> tuple[int, int]:
    """How far below and above these the sizes of uneven dims may lie for what is received to
    compare as now.
    """
    both = [(each, dims) for each, dims in zip(every, uneven) if dims]
    if not both or any(each.is_strided for each, _ in both):
        return 0, 0

    def decide(below: int, above: int) -> bool:
        if not now:
            return all(
                each.chosen(each.near(dims, k)) == each.other(each.near(dims, k))
                for each, dims in zip(every, uneven)
                for k in (-below, above)
            )
        low = high = 0
        for each, dims in zip(every, uneven):
            more, less = _more_and_less(each, now)
            low, high = low + more(each.near(dims, -below)), high + less(each.near(dims, above))
        return low > high

    rooms = [each.room(dims) for each, dims in both]
    below = above = 0
    while above < min(room for _, room in rooms) and decide(below, above + 1):
        above += 1
    while below < min(room for room, _ in rooms) and decide(below + 1, above):
        below += 1
    return below, above


def _total(terms: Sequence[tuple[Fraction, Any]]) -> Any:
    """The sum of shares of elements, times what makes it whole."""
    short = [(share.limit_denominator(1 << 10), n) for share, n in terms]
    whole = lcm(*[share.denominator for share, _ in short])
    return sum(int(share * whole) * n for share, n in short)


def _have_rows(asked: _Asked, found: Assignment) -> bool:
    """Whether every device has rows of each dim over which mesh dims reduce, or of all that they
    cut if something moves, in every call of the graph that is being compiled: guards are added that
    the last device has some. False if such a dim is cut by a split factor and has other rows than
    these divide evenly, for which there is no such short condition.
    """
    reduced = _reduced_on(found)
    moves = any(some != x.parts for some, x in zip(found.operands, asked.operands))
    of_all = moves or asked.row.has_rows(*asked.args, **asked.kwargs)
    for spec, some in zip(asked.specs, found.operands):
        dims = {
            part[0]
            for m, part in enumerate(some)
            if isinstance(part, tuple) and (of_all or m in reduced)
        }
        rows = list(spec.shape)
        for part, parts in zip(some, spec.mesh.shape):
            if isinstance(part, tuple) and part[0] in dims:
                d, factor = part
                if factor > 1 and not symints.is_truly(rows[d] % (factor * parts) == 0):
                    return False
                rows[d] -= (parts - 1) * ((rows[d] + parts - 1) // parts)
                if not symints.is_truly(rows[d] > 0):
                    return False
    return True


def _note(
    name: str,
    signature: Signature,
    wanted: Sequence[tuple[Placement, ...]],
    given: Sequence[tuple[Placement, ...] | None],
    received: int,
) -> None:
    count(name, "signature")
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug(
            "%s: %s: %s -> %s, %d elements received",
            name,
            signature,
            ", ".join(map(text, wanted)),
            ", ".join(map(text, filter(None, given))),
            received,
        )


def _kept_where_sized(
    signature: Signature, specs: Sequence[DTensorSpec], needed: Sequence[tuple[Placement, ...]]
) -> list[tuple[Placement, ...]]:
    """The placements to redistribute to; operands of which only sizes are read are not moved."""
    return [
        tuple(spec.placements) if i in signature.sized else placements
        for i, (spec, placements) in enumerate(zip(specs, needed))
    ]


def _are_cut(some: frozenset[str], signature: Signature, found: Assignment) -> bool:
    """Whether a mesh dim cuts a dim of one of these names."""
    return any(
        isinstance(part, tuple) and names[part[0]] in some
        for names, parts in zip(signature.operands, found.operands)
        for part in parts
    )


def _is_a_state(names: tuple[str, ...], shape: tuple[int, ...] | None) -> bool:
    """Whether a result is a scalar that does not depend on the operands: to torch no DTensor."""
    return names == (UNREAD,) and not shape


def _linear(
    linear: Linear | tuple[int, ...], specs: Sequence[DTensorSpec], metas: Any
) -> Linear | tuple[int, ...]:
    """The operands in which the op is linear. None for copies of several dtypes, which convert
    some; for ops whose results have fewer digits than what is pending: a sum of rounded numbers is
    not the rounded sum; and for picked rows, which the next op reduces.
    """
    if any(is_masked(p) for spec in specs for p in spec.placements):
        return ()
    dtypes = _dtypes(specs)
    if isinstance(linear, Linear) and len(dtypes) > 1:
        return ()
    pending = _dtypes(
        [spec for spec in specs if any(isinstance(p, Partial) for p in spec.placements)]
    )
    made = max(map(_step, dtypes_of_results(metas)), default=0)
    return () if min(map(_step, pending), default=made) < made else linear


def _step(dtype: torch.dtype) -> float:
    """The relative distance between numbers of the dtype; that of integers is above all others."""
    return torch.finfo(dtype).eps if _has_fractions(dtype) else 1.0


def _reduction(
    row: Row, reduce: str | None, signature: Signature, specs: Sequence[DTensorSpec]
) -> str | None:
    """The reduction that contracted dims leave pending. For symbolic sizes no averages but those
    by shares, which are right for blocks of any sizes. And an added term is divided into equal
    parts, which integers cannot be.
    """
    if signature.picked and torch.bool in _dtypes(specs[:1]):
        reduce = "max"  # a sum of flags would be a count
    needs_even = reduce == "avg" and row.shares is None
    in_parts = bool(signature.added) and not all(map(_has_fractions, _dtypes(specs)))
    return None if (_is_symbolic(specs) and needs_even) or in_parts else reduce


def _is_symbolic(specs: Sequence[DTensorSpec]) -> bool:
    return symints.is_symbolic(*(tuple(spec.shape) for spec in specs))


def _dtypes(specs: Sequence[DTensorSpec]) -> set[torch.dtype]:
    return {spec.tensor_meta.dtype for spec in specs if spec.tensor_meta is not None}


def _has_fractions(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _signature(
    row: Row,
    pattern: str,
    specs: Sequence[DTensorSpec],
    operands: Sequence[Operand],
    results: Sequence[tuple[int, ...] | None],
    *,
    halos: bool,
) -> Signature:
    """The pattern as a signature that fits these operands; symbolic ones in every call. Names whose
    rows may not be combined, or exchanged, here are whole.

    Raises:
        ValueError: they do not fit it, or are not known to.
    """
    shapes = [operand.shape for operand in operands]
    signature = parse(pattern, tuple([len(shape) for shape in shapes]), len(results))
    if _is_symbolic(specs):
        every = [*[tuple(spec.shape) for spec in specs], *results]
        signature = _with_windows_of_numbers(signature, every, tiles=row.windows.tiles)
        if not _known_to_fit(signature, specs, row.fold.rows | signature.folded):
            raise ValueError(f"sizes of one name in {signature} may differ in another call")
    elif not signature.gives(shapes, results):
        raise ValueError(f"results of shapes {results} are not what {signature} says")
    if (signature.folded or row.fold.rows) and not _may_fold(row.fold, specs):
        signature = signature.without_folds(row.fold.rows)
    if not halos or are_read_as_order(specs) or _is_stand_in(specs):
        signature = signature.without_halos(signature.in_halos)
    return signature


def _with_windows_of_numbers(
    signature: Signature, shapes: Sequence[Sequence[Any] | None], *, tiles: bool
) -> Signature:
    """The signature in which rows read windows side by side, that have all rows of dims whose sizes
    are numbers: for others devices may have to exchange halos, maybe in another call.

    Args:
        shapes: of operands and results.
        tiles: whether the op is right on such windows as it is.
    """
    rows, read = dict[str, Any](), list[tuple[str, Any, Reads]]()
    for i, (shape, names) in enumerate(zip(shapes, (*signature.operands, *signature.results))):
        reads = signature.read_by(i)
        for d, (n, name) in enumerate(zip(shape or (), names)):
            if d in reads:
                read.append((name, n, reads[d]))
            else:
                rows[name] = n
    others = {
        name
        for name, n, reads in read
        if not (tiles and reads.are_tiles)
        or symints.is_symbolic(n, rows[name])
        or n != reads.step * rows[name]
    }
    symbolic = {name for name, n in rows.items() if symints.is_symbolic(n)}
    found = signature.without_halos(others)
    return found._replace(whole=found.whole | (symbolic & signature.in_groups))


def _known_to_fit(
    signature: Signature, specs: Sequence[DTensorSpec], compared: frozenset[str]
) -> bool:
    """Whether dims of one name that may be sharded have the same size in every call of the graph
    that is being compiled, not only in this one. For names that are ``compared`` by the op itself
    guards are added.
    """
    sizes: dict[str, dict[str, Any]] = {}
    shapes = signature.per_row([spec.shape for spec in specs])
    for i, (shape, names) in enumerate(zip(shapes, signature.operands)):
        read = signature.read_by(i)
        for d, (n, name) in enumerate(zip(shape, names)):
            is_broadcast = symints.size_text(n) == "1" and name.startswith("...")
            # A size of 1 is 1 in every call.
            if not is_broadcast and d not in read and name not in signature.whole:
                sizes.setdefault(name, {})[symints.size_text(n)] = n
    for name, by_text in sizes.items():
        first, *others = by_text.values()
        if others and not (
            name in compared and all(symints.is_truly(first == other) for other in others)
        ):
            return False
    return True
