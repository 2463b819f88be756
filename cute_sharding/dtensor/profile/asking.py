"""The redistributions and results of an op, by PyTorch's rule and by this package's rule, and the
bytes that ranks receive. Nothing runs: a decision depends only on the op, the specs, the
settings and the release.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cute_sharding.dtensor.answer import answers
from cute_sharding.dtensor.bookkeeping import stats
from cute_sharding.dtensor.bookkeeping.settings import Settings
from cute_sharding.dtensor.decide import propagation
from cute_sharding.dtensor.decide.places import redistribution_of
from cute_sharding.dtensor.fixes.when import convolves_wrongly
from cute_sharding.dtensor.profile.profiler import PLAIN, Asked, Call
from cute_sharding.dtensor.replaced import dispatch_modes, op_schemas, process_groups, registry
from cute_sharding.dtensor.replaced.op_schemas import OpSchema
from cute_sharding.dtensor.replaced.tensor_specs import (
    DTensorSpec,
    MaskPartial,
    Partial,
    Placement,
    Replicate,
    placed_as,
    with_shape,
)
from cute_sharding.dtensor.reports.stock import StockPlan, stock_plan
from cute_sharding.dtensor.run.groups import means
from cute_sharding.dtensor.run.redistribute import prepare
from cute_sharding.exchange.network import Network
from cute_sharding.profiling import Moved, Other
from cute_sharding.relations.table import ROWS

EVERYTHING = Settings(redistribution=True, movement=True)


class Answered(NamedTuple):
    """The redistributions and results of an op.

    Attributes:
        moved: for each redistributed operand, the specs before and after.
        results: the specs of the results.
        outcome: the rule of this package that decided, as :func:`cute_sharding.stats` counts it; ""
            for PyTorch's rule.
        other: the bytes that are received.
        by_function: whether the op runs as a function of this package, which sends the missing
            elements.
    """

    moved: tuple[tuple[DTensorSpec, DTensorSpec], ...]
    results: tuple[DTensorSpec, ...]
    outcome: str
    other: Other
    by_function: bool = False


def schema_of(call: Call) -> OpSchema | None:
    """The op on its specs; None if an argument was a plain tensor, or an argument that cannot be
    kept.
    """
    if PLAIN in _leaves((call.args, call.kwargs)):
        return None
    args = tuple([_listed(value) for value in call.args])
    kwargs = {name: _listed(value) for name, value in call.kwargs}
    return OpSchema(call.op, args, kwargs, registry.schema_info(call.op))


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, tuple) and not isinstance(value, DTensorSpec):
        return [leaf for each in value for leaf in _leaves(each)]
    return [value]


def _listed(value: Any) -> Any:
    return [_listed(each) for each in value] if isinstance(value, tuple) else value


def _in(other: Other, schema: OpSchema, *, by_torch: bool = False) -> Other:
    """What is received in an op; unknown of those that torch has functions of its own for, where
    these may send more than their rules say. That of a convolution
    (torch/distributed/tensor/_tp_conv.py) does where more than first dims are cut; that of its
    gradient brings one operand to another's placements. With this package on, those that torch
    gets wrong go by its rule.
    """
    function, row = registry.op_handlers().get(schema.op), ROWS.get(registry.name_of(schema.op))
    if function is None:
        return other
    if not (row and row.has_function) and function.__module__.startswith("cute_sharding."):
        return other  # the op follows its rule
    specs = op_schemas.specs_of(schema)
    is_search = op_schemas.place_of(schema.op, "dim") is not None
    if not (by_torch or is_search) and convolves_wrongly(specs, len(schema.args_schema)):
        return other
    placements = [p for spec in specs for p in spec.placements]
    is_gradient = len(schema.op._schema.returns) > 1
    cuts_first = all(getattr(p, "dim", 0) == 0 for p in placements)
    is_known = cuts_first and not is_search and not is_gradient
    return other if is_known else Other(None)


def by_torch(schema: OpSchema, network: Any) -> Answered:
    """The decision of PyTorch alone. Raises the errors of PyTorch's rule."""
    with dispatch_modes.no_modes():
        found = registry.stock_propagation()(schema)
        moved = _moved(schema, found)
        plans = [stock_plan(*redistribution_of(spec, to.placements)) for spec, to in moved]
        other = together([of_stock(plan, spec, network) for plan, (spec, _) in zip(plans, moved)])
    return Answered(tuple(moved), _results(found), "", _in(other, schema, by_torch=True))


def by_package(schema: OpSchema, settings: Settings, network: Any) -> Answered:
    """The decision of this package under the settings, with the existing process groups. Raises the
    errors that the program would get.
    """
    stock = registry.stock_propagation()
    rule = propagation(stock, settings) if settings.views else stock
    with dispatch_modes.no_modes(), stats.count_apart() as counted:
        found = rule(schema)
    moved, function = _moved(schema, found), _runs_function(found)
    if counted.places:
        spec = op_schemas.specs_of(schema)[0]
        elements = sum(place.received().busiest for _, place in counted.places)
        other = Other(elements * spec.tensor_meta.dtype.itemsize)  # type: ignore[union-attr]
    elif function:
        other = Other(None)
    else:
        other = together([redistributed(a, b, settings, network) for a, b in moved])
    finished = [redistributed(a, b, None, network) for a, b in _finished(found)]
    other = _in(together([other, *finished]), schema)
    outcomes = [outcome for _, outcome in counted.outcomes]
    return Answered(
        tuple(moved), _results(found), outcomes[-1] if outcomes else "", other, function
    )


@dataclass(frozen=True)
class Ask:
    """Computes the redistributions of ops, and the bytes that redistributions receive, under the
    settings; None: PyTorch alone.

    Args:
        network: the network that gives the seconds.
    """

    settings: Settings | None
    network: Any

    def __call__(self, schema: OpSchema) -> Answered:
        """The redistributions and results of an op. Raises the errors of the rule."""
        if self.settings is None:
            return by_torch(schema, self.network)
        return by_package(schema, self.settings, self.network)

    def received_to(
        self, spec: DTensorSpec, placements: Sequence[Placement], *, sums: bool = False
    ) -> int | None:
        """The bytes that the busiest rank receives if the program redistributes a tensor to other
        placements. None: the number is unknown, or the tensor is a Partial. With ``sums``, the
        reduction of a Partial counts.
        """
        if not sums and any(isinstance(p, Partial) for p in spec.placements):
            return None
        by_plan = self.settings is not None and self.settings.redistribution
        to = placed_as(spec, tuple(placements))
        return redistributed(spec, to, self.settings if by_plan else None, self.network).received


def asked_of(ask: Callable[[], Answered]) -> Answered | Exception:
    """The decision, or the error of the rule."""
    try:
        return ask()
    except Exception as error:  # any error is the answer of the rule for this op
        return error


def redistributed(
    before: DTensorSpec, after: DTensorSpec, settings: Settings | None, network: Any
) -> Other:
    """The bytes that one redistribution receives, by a plan or by PyTorch's own steps."""
    redistribution = redistribution_of(before, after.placements)
    if settings is None:
        return of_stock(stock_plan(*redistribution), before, network)
    by = means(before.mesh)
    plan = prepare(*redistribution, by=by)
    itemsize = before.tensor_meta.dtype.itemsize  # type: ignore[union-attr]
    sizes = tuple(before.mesh.shape)
    timed = Network.of_elements(sizes, network, itemsize)
    return Other(plan.kind.moved.received.busiest * itemsize, plan.seconds(timed))


def of_stock(plan: StockPlan, spec: DTensorSpec, network: Any) -> Other:
    """The bytes of PyTorch's own steps. Unknown for placements that PyTorch may misread."""
    if plan.error is not None or plan.misread:
        return Other(None, None, plan.error)
    if spec.mesh.device_type == "cpu":
        plan = plan.on_cpus()
    itemsize = spec.tensor_meta.dtype.itemsize  # type: ignore[union-attr]
    timed = Network.of_elements(plan.mesh, network, itemsize)
    return Other(plan.received_elements * itemsize, plan.seconds(timed))


def together(others: Sequence[Other]) -> Other:
    """The sum over several tensors."""
    error = next((other.error for other in others if other.error is not None), None)
    if any(other.received is None for other in others):
        return Other(None, None, error)
    seconds = [other.seconds for other in others]
    return Other(
        sum(other.received or 0 for other in others),
        None if None in seconds else sum(s or 0.0 for s in seconds),
    )


def _moved(schema: OpSchema, found: Any) -> list[tuple[DTensorSpec, DTensorSpec]]:
    wanted = getattr(found, "redistribute_schema", None)
    if wanted is None or _runs_function(found):
        return []
    specs, to = (op_schemas.specs_of(each) for each in (schema, wanted))
    pairs = zip(specs, to) if len(specs) == len(to) else ()
    moved = [(a, b) for a, b in pairs if tuple(a.placements) != tuple(b.placements)]
    answer = answers.answer_of(wanted)
    return [*moved, *(answer.keywords.values() if answer else ())]


def _runs_function(found: Any) -> bool:
    wanted = getattr(found, "redistribute_schema", None)
    answer = None if wanted is None else answers.answer_of(wanted)
    return answer is not None and answer.takes_all


def _finished(found: Any) -> list[tuple[DTensorSpec, DTensorSpec]]:
    """The specs before and after of numbers that are reduced with the op. Numbers with the same
    Partial are reduced together.
    """
    kinds = Counter(answers.finished_by(found))
    return [_replicated(spec, count) for spec, count in kinds.items()]


def _replicated(spec: DTensorSpec, count: int) -> tuple[DTensorSpec, DTensorSpec]:
    """The specs before and after of ``count`` numbers."""
    many = with_shape(spec, (count,))
    return many, placed_as(many, (Replicate(),) * many.mesh.ndim)


def _results(found: Any) -> tuple[DTensorSpec, ...]:
    return tuple([x for x in answers.specs_of_results(found) if isinstance(x, DTensorSpec)])


# -- as text ---------------------------------------------------------------------------------------


def name_of(source: Call | Asked) -> str:
    """The name of an op without its overload, or of the function that the program calls."""
    if isinstance(source, Asked):
        return source.function
    return registry.name_of(source.op).removesuffix(".default").partition(".")[0]


def in_brackets(placements: Sequence[object]) -> str:
    """Placements as text.

    >>> in_brackets(["S(0)", "R"])
    '[S(0), R]'
    """
    return f"[{', '.join(map(str, placements))}]"


def moved_of(before: DTensorSpec, after: DTensorSpec) -> Moved:
    """A redistribution as plain values."""
    mesh: Any = before.mesh
    sizes = tuple(map(int, mesh.shape))
    names = mesh.mesh_dim_names or tuple([f"mesh dim {m}" for m in range(len(sizes))])
    placements = [tuple(map(_text, spec.placements)) for spec in (before, after)]
    return Moved(tuple(map(int, before.shape)), sizes, tuple(names), *placements)


def spec_text(spec: DTensorSpec) -> str:
    """The shape and the placements."""
    return f"{tuple(spec.shape)} [{', '.join(map(_text, spec.placements))}]"


def _text(placement: Placement) -> str:
    """A placement as DTensor prints it; for a masked embedding, without the size of the table."""
    return "MaskP(sum)" if isinstance(placement, MaskPartial) else str(placement)


def group_on(mesh: Any, ranks: tuple[int, ...]) -> tuple[int, ...] | None:
    """The mesh dims whose ranks a group has; None where it is no group of the mesh."""
    for on in process_groups.slices(mesh):
        if all(on.coordinates(rank) is not None for rank in ranks):
            places = zip(*map(on.device, ranks))
            return tuple([m for m, of in enumerate(places) if len({*of}) > 1])
    return None
