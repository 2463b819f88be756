"""Exchanges of compiled programs: one op that the compiler does not look into runs what an eager
program runs.
"""

from __future__ import annotations

import hashlib
from ast import literal_eval
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache, lru_cache, partial, reduce
from hashlib import sha1
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cute_sharding._memory import remembered
from cute_sharding.dtensor.bookkeeping.settings import Settings, in_force
from cute_sharding.dtensor.compiled.library import in_own_memory, library
from cute_sharding.dtensor.compiled.symbols import local_shape_of
from cute_sharding.dtensor.replaced import communication, compiler, dispatch_modes, symints
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec
from cute_sharding.dtensor.run.executor import is_native, is_shown, run
from cute_sharding.dtensor.run.groups import means, prepared_key
from cute_sharding.dtensor.run.moving import Movement
from cute_sharding.dtensor.run.together import Under, start_together
from cute_sharding.exchange import Exchange, Placed
from cute_sharding.exchange.flow import side_of
from cute_sharding.exchange.network import Network
from cute_sharding.exchange.plan import RedistributionPlan
from cute_sharding.exchange.planner import plan_steps
from cute_sharding.exchange.step import Step
from cute_sharding.relations import Move
from cute_sharding.relations.moves import Rows, Window, held_rows, parse_move
from cute_sharding.relations.table import MOVEMENTS
from cute_sharding.sharding.rows import Chains, Device, count_rows

# -- graph keys ------------------------------------------------------------------------------------
# Keys that keep the graphs apart which torch.compile caches on disk.


def tag(settings: Settings | None) -> None:
    """Key graphs by version, settings and rank: a graph has the sizes that a rank sends and holds,
    and torch's keys do not tell ranks apart.
    """
    if settings is None:
        compiler.tag_compiled_graphs(None)
        return
    rank = communication.this_rank() if dist.is_initialized() else None
    key = f"{_fingerprint()}:{settings.key}:{rank}:{prepared_key()}"
    compiler.tag_compiled_graphs(key if _plan is None else f"{key}:{_plan}")


# What tells the plan of a step by which programs are compiled from others.
_plan: str | None = None


def tag_plan(plan: str | None) -> None:
    """Key graphs by a plan from now on."""
    global _plan
    if plan != _plan:
        _plan = plan
        tag(in_force())


def tag_traced() -> None:
    """Call :func:`tag` when a graph is made; dynamo does so before it looks into a cache."""
    tag(in_force())


@cache
def _fingerprint() -> str:
    """A hash of this package's code: another version may decide otherwise, and compiled graphs
    outlive the process. It takes the version, and the sizes and times of the files: reading them
    all would double the time of a tag.
    """
    package = Path(__file__).parents[2]
    digest = hashlib.sha1((package / "__init__.py").read_bytes(), usedforsecurity=False)
    for source in sorted(package.rglob("*.py")):
        found = source.stat()
        digest.update(f"{source.name} {found.st_size} {found.st_mtime_ns} ".encode())
    return digest.hexdigest()[:16]


# -- in graphs -------------------------------------------------------------------------------------
# Exchanges of compiled programs: one op that the compiler does not look into runs what an eager
# program runs, on the sizes of each call.
#
# So there is one graph for all sizes, with the same nodes on every rank, and ranks that run
# compiled meet ranks that run eagerly in the same collectives. The op's arguments are in a string,
# because graphs are kept on disk: a kind (``KINDS``), the mesh, and what the kind needs.
# Collectives of whole tensor dims, which compilers know, are shown instead: for sizes that are
# numbers as ``executor.is_shown`` says, for symbols by ``redistribute``.

# The meshes that graphs name. Tracing adds to it, also before a graph from the disk is run.
_meshes: dict[str, Any] = {}


def exchange_in_graph(
    kind: str,
    operands: Sequence[torch.Tensor],
    shapes: Sequence[Sequence[Any]],
    numbers: Sequence[Any],
    mesh: Any,
    *how: Any,
    sends: bool = True,
    alike: bool = False,
) -> list[torch.Tensor]:
    """The op's results, with these local ``shapes``, for the sizes of each call.

    Args:
        numbers: ints or symbols that the kind needs.
        how: the kind's other arguments, as literals.
        sends: whether ranks exchange anything; without that, the op is no collective.
        alike: whether operands and results have the same local shapes on all ranks.
    """
    with dispatch_modes.of_each_rank() if alike else nullcontext():
        return _in_graph(kind, operands, shapes, numbers, mesh, *how, sends=sends)


def _in_graph(
    kind: str,
    operands: Sequence[torch.Tensor],
    shapes: Sequence[Sequence[Any]],
    numbers: Sequence[Any],
    mesh: Any,
    *how: Any,
    sends: bool,
) -> list[torch.Tensor]:
    text = repr((kind, _name_of(mesh), tuple(map(len, shapes)), *how))
    sizes = [n for shape in shapes for n in shape]
    if not sends:
        with dispatch_modes.of_this_rank():
            found: list[torch.Tensor] = torch.ops.cute_sharding.rearrange(
                operands, sizes, numbers, text
            )
        return found
    # Compilers keep results that are waited for, also if a rank's result is empty: other ranks wait
    # in the collectives of this op. (Inductor takes the wait for a collective's n-th result for one
    # that reads its n-th operand, and fails if there are fewer operands.)
    operands = [*operands, *[operands[0]] * (len(shapes) - len(operands))]
    with dispatch_modes.of_this_rank():  # another rank's sizes may be numbers
        results = torch.ops.cute_sharding.exchange(
            operands, sizes, numbers, text, _group_name(mesh)
        )
    return list(map(communication.waited_in_graph, results))


def _name_of(mesh: Any) -> str:
    """The name of the mesh in graphs; :func:`_mesh_named` finds the mesh by it from now on."""
    key = _name(mesh)
    _meshes[key] = mesh
    return key


def _group_name(mesh: Any) -> str:
    """The name of a process group of the mesh: see ``in_one_order`` in
    replaced/collective_order.py.
    """
    name: str = communication.group_of_dim(mesh, 0).group_name
    return name


@lru_cache(maxsize=1 << 8)
def _name(mesh: Any) -> str:
    return sha1(
        repr(
            (
                mesh.device_type,
                tuple(mesh.shape),
                mesh.mesh_dim_names,
                communication.rank_lists(mesh),
            )
        ).encode(),
        usedforsecurity=False,
    ).hexdigest()[:16]


_parsed = remembered(literal_eval)


def _mesh_named(key: str, how: str) -> Any:
    """
    Raises:
        RuntimeError: no graph on such a mesh was made in this process.
    """
    if key not in _meshes:
        raise RuntimeError(
            f"a compiled program redistributes on a mesh that this process does not know ({how}): "
            "compile the program again in this process"
        )
    return _meshes[key]


# -- a redistribution -----------------------------------------------------------------------------


def on_all_ranks(
    plans: Sequence[RedistributionPlan], dtypes: Sequence[torch.dtype], mesh: Any, *shapes: Any
) -> Any:
    """A context in which the nodes of plans count as those of all ranks, if sizes divide, so that
    all ranks have the same shapes, and no rank packs messages in the graph.
    """
    if not dispatch_modes.is_tracing() or symints.is_symbolic(*shapes):
        return nullcontext()
    if any(end.layout is None for plan in plans for step in plan.steps for end in step.ends):
        return nullcontext()
    steps = [(step, dtype) for plan, dtype in zip(plans, dtypes) for step in plan.steps]
    packs = all(is_shown(step, dtype, mesh) for step, dtype in steps) and not all(
        is_native(step, dtype, mesh) for step, dtype in steps
    )
    return nullcontext() if packs else dispatch_modes.of_each_rank()


def run_steps(
    plan: RedistributionPlan, local: torch.Tensor, spec: DTensorSpec, *, async_op: bool = False
) -> torch.Tensor:
    """Run a plan on a tensor whose sizes are numbers, also while a graph is traced."""
    steps, mesh = plan.steps, spec.mesh
    if dispatch_modes.is_tracing() and not all(is_shown(s, local.dtype, mesh) for s in steps):
        return run_opaque([plan], [local], mesh, [plan.shape])[0]
    return run(steps, local, mesh, async_op=async_op)


def run_opaque(
    plans: Sequence[RedistributionPlan],
    tensors: Sequence[torch.Tensor],
    mesh: Any,
    shapes: Sequence[tuple[Any, ...]],
) -> list[torch.Tensor]:
    """The results of several plans, run together on this rank's local tensors of DTensors with
    these global shapes, which may be symbolic.
    """
    how, onto = [], []
    for plan, shape in zip(plans, shapes):
        source, target = plan.source, plan.target
        how.append((source.chains, source.pending, target.chains, target.pending))
        onto.append(local_shape_of(shape, target.chains, mesh))
    sizes = [n for shape in shapes for n in shape]
    return exchange_in_graph("redistribute", tensors, onto, sizes, mesh, *how)


# -- a movement -----------------------------------------------------------------------------------


def moved_in_graph(movement: Movement, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results of a movement whose sizes are numbers."""
    mesh = movement.mesh
    exchange, device = movement.exchange, tuple(mesh.get_coordinate())
    shapes = [_result_on(exchange, k, device) for k in range(len(exchange.targets))]
    return exchange_in_graph(
        "exchange",
        operands,
        shapes,
        (),
        mesh,
        None,
        *_written(movement),
        sends=bool(movement.dims),
        alike=_is_alike(exchange),
    )


def _result_on(exchange: Exchange, k: int, device: Device) -> tuple[int, ...]:
    """The local shape of a result; of a dim whose rows stand for windows, with their rows."""
    pairs = [pair for link in exchange.move.links if link.target == k for pair in link.pairs]
    return _held_on(exchange.targets[k], [rows for _, rows in pairs], device)


def _operand_on(exchange: Exchange, i: int, device: Device) -> tuple[int, ...]:
    """The same of an operand."""
    pairs = [pair for link in exchange.move.links if link.source == i for pair in link.pairs]
    return _held_on(exchange.sources[i], [rows for rows, _ in pairs], device)


def _held_on(placed: Placed, every: Sequence[Rows], device: Device) -> tuple[int, ...]:
    shape = list(placed.shape_of(device))
    for rows in every:
        if isinstance(rows.form, Window) and rows.form.across is None and rows.dim is not None:
            shape[rows.dim] = count_rows(held_rows(rows, *side_of(placed, rows, device)))
    return tuple(shape)


@remembered
def _is_alike(exchange: Exchange) -> bool:
    """Whether each operand and each result has the same local shape on all devices."""
    for ends, shape_on in ((exchange.sources, _operand_on), (exchange.targets, _result_on)):
        for k, placed in enumerate(ends):
            if len({shape_on(exchange, k, device) for device in placed.classes}) > 1:
                return False
    return True


def write_back_in_graph(
    movement: Movement, output: int, moved: torch.Tensor, source: torch.Tensor
) -> None:
    """Write the rows of one result, ``moved``, back to the operand's local tensor."""
    (written,) = exchange_in_graph(
        "exchange",
        [moved, source],
        [source.shape],
        (),
        movement.mesh,
        output,
        *_written(movement),
        sends=bool(movement.turned(output).dims),
        alike=_is_alike(movement.exchange),
    )
    source.copy_(written)


def _written(movement: Movement) -> tuple[Any, ...]:
    """The movement as literals; :func:`_read` is the inverse."""
    exchange = movement.exchange
    ends = (exchange.sources, exchange.targets)
    chains = [tuple([placed.chains for placed in some]) for some in ends]
    return repr(exchange.move), *chains, movement.pending


@remembered
def _read(
    mesh: Any,
    numbers: tuple[int, ...],
    move: str,
    sources: tuple[Chains, ...],
    targets: tuple[Chains, ...],
    pending: tuple[tuple[int, str], ...],
) -> Movement:
    exchange = Exchange.on_mesh(parse_move(move), tuple(mesh.shape), sources, targets)
    found = Movement.on(exchange, mesh, pending)
    assert found is not None, "there was a group when the graph was made"
    return found


class MovementOfAnySize:
    """A movement with symbolic sizes: planned anew in each call.

    Args:
        name: the op's.
        given: the op's arguments, with shapes in place of DTensors.
        exchange: the exchange for the sizes at hand.
        onto: the global shapes of the results.
        mesh: the DeviceMesh. For some sizes all its ranks may exchange rows.
    """

    def __init__(
        self,
        name: str,
        given: tuple[Sequence[Any], dict[str, Any]],
        exchange: Exchange,
        onto: Sequence[tuple[Any, ...]],
        mesh: Any,
    ) -> None:
        args, kwargs = given
        self.exchange, self.dims = exchange, tuple(range(mesh.ndim))
        self._mesh, self._onto, self._reads = mesh, onto, MOVEMENTS[name].reads
        self._numbers: list[Any] = []
        self._how = (
            name,
            tuple([placed.chains for placed in exchange.sources]),
            tuple([placed.chains for placed in exchange.targets]),
            _write_literal((args, tuple(kwargs.values())), self._numbers),
            tuple(kwargs),
        )

    def __call__(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        shapes = [
            local_shape_of(shape, placed.chains, self._mesh)
            for shape, placed in zip(self._onto, self.exchange.targets)
        ]
        operands = operands[: self._reads]
        return exchange_in_graph(
            "move", operands, shapes, self._numbers, self._mesh, None, *self._how
        )

    def back(self, output: int, moved: torch.Tensor, source: torch.Tensor) -> None:
        """Write the rows of one result, ``moved``, back to the operand's local tensor."""
        operands, to = [moved, source], (self._numbers, self._mesh)
        (written,) = exchange_in_graph("move", operands, [source.shape], *to, output, *self._how)
        source.copy_(written)


def _write_literal(value: Any, numbers: list[Any]) -> Any:
    """A literal, with 0 in place of each integer (kept in ``numbers``), and text for floats."""
    if isinstance(value, (tuple, list)):
        return tuple([_write_literal(part, numbers) for part in value])
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (int, torch.SymInt)):
        numbers.append(value)
        return 0
    return repr(value)


def _read_literal(literal: Any, numbers: Iterator[int]) -> Any:
    """The inverse of :func:`_write_literal`."""
    if isinstance(literal, tuple):
        return tuple([_read_literal(part, numbers) for part in literal])
    if literal is None or isinstance(literal, bool):
        return literal
    return float(literal) if isinstance(literal, str) else next(numbers)


# -- seen from outside ----------------------------------------------------------------------------


def known_meshes() -> list[Any]:
    """The meshes that graphs name."""
    return [*_meshes.values()]


def received_in_graph(
    operands: Sequence[torch.Tensor], numbers: Sequence[Any], how: str
) -> tuple[Any, tuple[int, ...], int]:
    """Of an exchange in a graph: the mesh, the mesh dims whose ranks exchange, and the elements
    that the busiest rank receives. Symbols count by their present values.
    """
    kind, key, _, *rest = _parsed(how)
    mesh, ints = _mesh_named(key, how), tuple(symints.numbers_at_hand(list(numbers)) or ())
    if kind == "redistribute":
        steps = [step for steps in _plans_of(mesh, ints, *rest) for step in steps]
        dims = {m for step in steps for m in step.mesh_dims}
        return mesh, tuple(sorted(dims)), sum(step.received_elements for step in steps)
    output, *of = rest
    movement = (_read if kind == "exchange" else _movement)(mesh, ints, *of)
    moved = movement if output is None else movement.turned(output)
    return mesh, moved.dims, moved.exchange.received_elements


# -- in each call ----------------------------------------------------------------------------------


def _redistributed(
    mesh: Any,
    operands: list[torch.Tensor],
    numbers: tuple[int, ...],
    *how: tuple[Chains, tuple[tuple[int, str], ...], Chains, tuple[tuple[int, str], ...]],
) -> Under:
    """The operands, whose shapes are the ``numbers``, each redistributed from chains to chains."""
    plans = _plans_of(mesh, numbers, *how)
    return start_together(plans, operands, mesh, async_op=_is_process())


def _plans_of(mesh: Any, numbers: tuple[int, ...], *how: Any) -> list[tuple[Step, ...]]:
    sizes, by, remaining = tuple(mesh.shape), means(mesh), iter(numbers)
    network = Network.of_programs(sizes, by.network)
    plans = []
    for chains, pending, onto, kept in how:
        shape = tuple(islice(remaining, len(onto)))
        source = Placed.numbered(shape, sizes, chains, pending)
        target = Placed.numbered(shape, sizes, onto, kept)
        plans.append(plan_steps(source, target, network, groups=by.groups, native=by.native))
    return plans


def move_of(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Move | None:
    """The move of the op on these arguments; None if it is not defined, or no move is known."""
    try:
        return MOVEMENTS[name].move(*args, **kwargs)
    except (ValueError, IndexError, TypeError):
        return None  # torch raises the error


@remembered
def _movement(
    mesh: Any,
    numbers: tuple[int, ...],
    name: str,
    sources: tuple[Chains, ...],
    targets: tuple[Chains, ...],
    arguments: Any,
    names: tuple[str, ...],
) -> Movement:
    """
    Raises:
        RuntimeError: the op is not defined on these sizes.
    """
    args, values = _read_literal(arguments, iter(numbers))
    move = move_of(name, args, dict(zip(names, values)))
    if move is None:
        raise RuntimeError(
            f"{name} was compiled for dynamic shapes, but is not defined for the arguments {args}"
        )
    found = Movement.on(Exchange.on_mesh(move, tuple(mesh.shape), sources, targets), mesh)
    assert found is not None, "groups for any sizes were asked for when the graph was made"
    return found


def _moved(
    movement_of: Callable[..., Movement],
    mesh: Any,
    operands: list[torch.Tensor],
    numbers: tuple[int, ...],
    output: int | None,
    *how: Any,
) -> Under:
    """The results. With ``output``, of (result, operand): the operand after that result is written
    back to it.
    """
    movement = movement_of(mesh, numbers, *how)
    if output is None:
        operands = operands[: len(movement.exchange.sources)]
        if movement.dims and _is_process():
            return Under(*movement.start(operands))
        moved = movement(operands)
        return Under([*moved], lambda: moved)
    result, source = operands
    written = source.clone(memory_format=torch.contiguous_format)
    finish = movement.start_back(output, result, written, async_op=_is_process())

    def results() -> list[torch.Tensor]:
        finish()
        return [written]

    return Under([written], results)


def _is_process() -> bool:
    """Whether this process is one rank, so that an exchange may go on until it is waited for."""
    return dispatch_modes.local_tensor_mode() is None


# -- the op ----------------------------------------------------------------------------------------

# By kind: called with the mesh, the op's tensors, its numbers, and the rest of the string.
KINDS: dict[str, Callable[..., Under]] = {
    "redistribute": _redistributed,
    "exchange": partial(_moved, _read),
    "move": partial(_moved, _movement),
}


def _exchange(
    operands: list[torch.Tensor], sizes: list[int], numbers: list[int], how: str, group: str = ""
) -> list[torch.Tensor]:
    """Start an exchange: the results are complete when they are waited for."""
    under = _under(operands, numbers, how)
    if not _is_process():
        return [in_own_memory(result, operands) for result in under.results()]
    empty = iter(_shapes_of(operands, sizes, numbers, how, known=under.into))
    memory = [next(empty) if into is None else in_own_memory(into, operands) for into in under.into]

    def complete() -> None:
        for x, result in zip(memory, under.results()):
            if x.data_ptr() != result.data_ptr():
                x.copy_(result)

    communication.complete_when_waited(memory, complete)
    return memory


def _rearrange(
    operands: list[torch.Tensor], sizes: list[int], numbers: list[int], how: str
) -> list[torch.Tensor]:
    results = _under(operands, numbers, how).results()
    return [in_own_memory(result, operands) for result in results]


def _under(operands: list[torch.Tensor], numbers: list[int], how: str) -> Under:
    kind, key, _, *rest = _parsed(how)
    return KINDS[kind](_mesh_named(key, how), operands, tuple(numbers), *rest)


def _shapes_of(
    operands: list[torch.Tensor],
    sizes: list[Any],
    numbers: list[Any],
    how: str,
    group: str = "",
    known: Sequence[Any] = (),
) -> list[torch.Tensor]:
    """Tensors for the results, without elements yet; for those that are not ``known``."""
    kind, _, dims, *_ = _parsed(how)
    dtypes = [x.dtype for x in operands]
    if kind != "redistribute":  # which has one result for each operand, of its dtype
        dtypes = [reduce(torch.promote_types, dtypes)] * len(dims)
    remaining = iter(sizes)
    shapes = [[*islice(remaining, ndim)] for ndim in dims]
    return [
        operands[0].new_empty(shape, dtype=dtype)
        for shape, dtype, into in zip(shapes, dtypes, known or [None] * len(dims))
        if into is None
    ]


# The results' sizes are an argument, because a backward graph gets only the symbols that are
# arguments of its nodes.
library.define(
    "exchange(Tensor[] operands, SymInt[] sizes, SymInt[] numbers, str how, str group) -> Tensor[]",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
library.define(
    "rearrange(Tensor[] operands, SymInt[] sizes, SymInt[] numbers, str how) -> Tensor[]",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
# A kernel for meta tensors: torch's register_fake would search all loaded modules for the
# caller's, which takes longer than importing this package.
for _name_of_op, _kernel in (("exchange", _exchange), ("rearrange", _rearrange)):
    library.impl(_name_of_op, _kernel, "CompositeExplicitAutograd")
    library.impl(_name_of_op, _shapes_of, "Meta")
