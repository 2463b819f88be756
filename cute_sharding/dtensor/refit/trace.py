"""A generator as one relation: its code is run once on tensors without data, and each op that only
moves elements says which.

What an op computes is no relation. Its result is marked, with the op's name, and is an error only
where a result of the generator is made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, NamedTuple, TypeAlias

import torch

from cute_sharding._words import counted
from cute_sharding.dtensor.refit.ops import TAKES_NUMBERS, relation_of, value_of
from cute_sharding.dtensor.refit.unwritten import ALLOCATES, Unwritten
from cute_sharding.dtensor.replaced import dispatch_modes, local_tensors
from cute_sharding.dtensor.replaced.local_tensors import leaves, tree_map
from cute_sharding.dtensor.replaced.observing import TorchDispatchMode
from cute_sharding.dtensor.replaced.op_schemas import decomposition
from cute_sharding.relations import NotOnlyMoved, Relation, beside, compose, filled
from cute_sharding.relations.relation import identity_pieces

Generator: TypeAlias = "Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]"

_MOVES = (
    "views, permutes, slices, cats, stacks, splits, expands, repeats, rolls, flips, pads, rows by "
    "number, and one cast"
)
# Arguments that do not change which elements there are.
_HOW_IT_LIES = ("memory_format", "dtype", "layout", "device", "pin_memory", "non_blocking")


class Computed(NamedTuple):
    """A tensor that is not made of elements of the sources alone.

    Attributes:
        why: what made it, and in what it is no movement.
        sources: the numbers of the sources that it is made of.
    """

    why: str
    sources: frozenset[int]


class Traced(NamedTuple):
    """What a generator says.

    Attributes:
        relation: of its results to its sources.
        names, dtypes: of the results.
    """

    relation: Relation
    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]


def trace(generator: Generator, sources: Mapping[str, tuple[Any, torch.dtype]]) -> Traced:
    """The relation that a generator's code is, of sources of those shapes and dtypes.

    Raises:
        NotOnlyMoved: it computes a result, writes into a tensor, or reads values.
        TypeError: it does not give tensors by name.
        ValueError: it gives nothing.
    """
    try:
        with dispatch_modes.no_modes(), _Tracing(sources) as mode, torch.no_grad():
            results = generator(_Given(zip(sources, mode.given)))
    except (NotImplementedError, RuntimeError, TypeError) as error:
        if "meta" not in str(error):
            raise
        raise NotOnlyMoved(
            "the generator (the function that makes the results) reads values or moves a tensor "
            "to a device, but tensors have no values while a refit is planned "
            f"({error}). A generator may only move elements ({_MOVES})"
        ) from error
    if not isinstance(results, Mapping) or not all(
        isinstance(name, str) and isinstance(result, torch.Tensor)
        for name, result in results.items()
    ):
        raise TypeError(
            "the generator (the function that makes the results) returns "
            f"{_kind(results)}: let it return a dict from names to tensors"
        )
    if not results:
        raise ValueError(
            "the generator (the function that makes the results) returns no tensor: let it return "
            "a dict from names to tensors"
        )
    relations = [mode.result(name, result) for name, result in results.items()]
    dtypes = tuple([result.dtype for result in results.values()])
    return Traced(beside(relations), tuple(results), dtypes)


class UnknownSource(KeyError):
    """A generator takes a source that is not there; ``name`` is its name."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name


class _Given(dict[str, torch.Tensor]):
    """The sources by name, which say what they are if a name is not among them."""

    def __missing__(self, name: str) -> Any:
        near = next(map(repr, get_close_matches(name, self, 1, 0)), "another checkpoint")
        raise UnknownSource(
            f"the generator (the function that makes the results) takes {name!r}, which is not "
            f"among the {counted(len(self), 'source')}: did you mean {near}?",
            name,
        )


def _kind(results: Any) -> str:
    if not isinstance(results, Mapping):
        return f"a {type(results).__name__}"
    kinds = sorted({f"{type(k).__name__} to {type(v).__name__}" for k, v in results.items()})
    return f"a mapping of {', '.join(kinds)}"


class _Tracing(TorchDispatchMode):
    """Knows of every tensor that is made of the sources which elements it has."""

    def __init__(self, sources: Mapping[str, tuple[Any, torch.dtype]]) -> None:
        super().__init__()
        self.names = tuple(sources)
        self.shapes = tuple([tuple(shape) for shape, _ in sources.values()])
        self.dtypes = [dtype for _, dtype in sources.values()]
        self.given = [
            torch.empty(shape, dtype=dtype, device="meta")
            for shape, dtype in zip(self.shapes, self.dtypes)
        ]
        # By id, with the tensor, so that no other gets the id.
        self.known: dict[int, tuple[torch.Tensor, Relation | Computed]] = {}
        self.unwritten = Unwritten()
        for k, tensor in enumerate(self.given):
            pieces = tuple(
                [each._replace(source=k) for each in identity_pieces(0, 0, tensor.numel())]
            )
            self.note(tensor, Relation(self.shapes, (self.shapes[k],), pieces))

    def note(self, tensor: torch.Tensor, said: Relation | Computed) -> None:
        """What a new tensor is. Ops that have nothing to do give their operand itself."""
        self.known.setdefault(id(tensor), (tensor, said))

    def said(self, tensor: torch.Tensor) -> Relation | Computed | None:
        """What a tensor is: of one that is made of the sources, or has elements without a value.
        These are in no piece of a relation. None for another tensor of the generator's own.
        """
        found = self.known.get(id(tensor))
        if found is not None:
            return found[1]
        left = self.unwritten.left_in(tensor)
        if not left:
            return None
        if left == tensor.numel():
            return self._nothing(tensor)
        return Computed(_without_value(left, tensor), frozenset())

    # -- an op -------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        made = [x for x in tensors if id(x) in self.known]
        self._check(func, made)
        value = value_of(func.__name__, args)
        is_new = value is not None or func.__name__.partition(".")[0] in ALLOCATES
        if not is_new and (made or not (func._schema.is_mutable or func._schema._is_view_op())):
            ours = [x for x in tensors if self.said(x) is not None]
            if ours:
                self._check_reads(func, ours)
                return self._on_sources(func, tensors, ours, (args, kwargs))
        out = self.unwritten.run(func, args, kwargs)
        if value is not None and out.is_meta:
            self.note(out, self._constant(out, value))
        return out

    def _check(self, func: Any, ours: Sequence[torch.Tensor]) -> None:
        name = func.__name__
        if ours and func._schema.is_mutable:
            raise NotOnlyMoved(
                "the generator (the function that makes the results) writes with "
                f"aten.{name} into a tensor made from {self._named(ours)}. Instead, make the "
                "result with torch.cat, torch.stack or torch.nn.functional.pad"
            )

    def _check_reads(self, func: Any, ours: Sequence[torch.Tensor]) -> None:
        if not any("Tensor" in str(x.type) for x in func._schema.returns):
            left = [x for x in ours if id(x) not in self.known]
            if left:
                without = _without_value(self.unwritten.left_in(left[0]), left[0])
                raise NotOnlyMoved(
                    "the generator (the function that makes the results) reads values with "
                    f"aten.{func.__name__}, but {without}"
                )
            raise NotOnlyMoved(
                "the generator (the function that makes the results) reads the values of "
                f"{self._named(ours)} with aten.{func.__name__}, but tensors have no values while "
                "a refit is planned. Use only shapes in the generator, or read the values before "
                "the refit"
            )

    def _on_sources(
        self, func: Any, tensors: Sequence[Any], ours: Sequence[Any], given: tuple[Any, Any]
    ) -> Any:
        """An op of which some operands are made of the sources."""
        name, numbers = func.__name__, set()
        if name in TAKES_NUMBERS:
            numbers = {id(x) for x in tensors if self.said(x) is None}

        def without_data(x: Any) -> Any:
            """A tensor of the generator's own as it meets sources; numbers of rows are read."""
            is_own = isinstance(x, torch.Tensor) and not x.is_meta and id(x) not in numbers
            return x.to("meta") if is_own else x

        args, kwargs = tree_map(without_data, given)
        out = func(*args, **kwargs)
        found: Relation | Computed | None
        found = next((x for x in map(self.said, ours) if isinstance(x, Computed)), None)
        if found is None and func.namespace == "aten":
            found = self._moved(func, tensors, ours, given, numbers)
            if not isinstance(found, Relation):
                apart = self._taken_apart(func, (args, kwargs))
                if apart is not None:
                    return apart
        if not isinstance(found, Relation):
            said = found or Computed(_computes(func), frozenset())
            self._mark(out, said._replace(sources=said.sources | self._sources(ours)))
            return out
        for k, result in enumerate(out if isinstance(out, (tuple, list)) else [out]):
            self.note(result, self._cast(func, found.of(k), ours, result.dtype))
        return out

    def _moved(
        self,
        func: Any,
        tensors: Sequence[Any],
        ours: Sequence[Any],
        given: tuple[Any, Any],
        numbers: Collection[int],
    ) -> Relation | Computed | None:
        """What an op of a table says, of the sources; None: no table has it. ``numbers``: by id,
        the tensors that are numbers of rows.
        """

        def shape_of(x: Any) -> Any:
            is_moved = isinstance(x, torch.Tensor) and id(x) not in numbers
            return tuple(x.shape) if is_moved else x

        args, kwargs = tree_map(shape_of, given)
        kwargs = {key: value for key, value in kwargs.items() if key not in _HOW_IT_LIES}
        try:
            found = relation_of(func.__name__, args, kwargs)
        except (NotOnlyMoved, ValueError, TypeError, IndexError) as error:
            return Computed(
                f"{func} does not fit into a refit with these arguments ({error})",
                self._sources(ours),
            )
        if found is None:
            return None
        relations: list[Relation] = []
        for x in [x for x in tensors if id(x) not in numbers]:
            said = self.said(x)
            said = self._of_values(x) if said is None else said
            if isinstance(said, Computed):
                return said
            relations.append(said)
        return compose(beside(relations[: len(found.inputs)]), found)

    def _taken_apart(self, func: Any, given: tuple[Any, Any]) -> Any:
        """The result of an op as torch takes it apart into others that only move. None: torch does
        not, or some compute, or write.
        """
        apart = decomposition(func)
        if apart is None:
            return None
        args, kwargs = given
        try:
            with self:
                out = apart(*args, **kwargs)
        except NotOnlyMoved:
            return None
        results = [x for x in leaves(out) if isinstance(x, torch.Tensor)]
        moved = results and all(isinstance(self.said(x), Relation) for x in results)
        return out if moved else None

    def _of_values(self, tensor: torch.Tensor) -> Relation | Computed:
        """Of a tensor of the generator's own: one value all over, or none."""
        if not tensor.numel():
            return self._nothing(tensor)
        written = self.unwritten.value_in(tensor)
        if tensor.is_meta and written is not None:
            return self._constant(tensor, written)
        flat = tensor.detach().reshape(-1)
        if tensor.is_meta or bool((flat != flat[0]).any()):
            return Computed(
                f"the generator makes a tensor of shape {tuple(tensor.shape)} with different "
                "values, which must be a source instead",
                frozenset(),
            )
        return self._constant(tensor, flat[0].item())

    def _constant(self, tensor: torch.Tensor, value: Any) -> Relation:
        return filled(self._nothing(tensor), _rounded(value, tensor.dtype))

    def _nothing(self, tensor: torch.Tensor) -> Relation:
        """Of which nothing is said: all there is to say of a tensor without elements."""
        return Relation(self.shapes, (tuple(tensor.shape),), ())

    def _cast(
        self, func: Any, said: Relation, ours: Sequence[torch.Tensor], dtype: torch.dtype
    ) -> Relation | Computed:
        """The relation of a result of that dtype, if what it is made of is cast once."""
        for x in ours:
            if x.dtype == dtype:
                continue
            if (x.is_complex() and not dtype.is_complex) or func.__name__.startswith("view_as"):
                return Computed(f"aten.{func.__name__} takes numbers apart", self._sources(ours))
            relation = self.said(x)
            assert isinstance(relation, Relation)
            for k in relation.sources:
                if self.dtypes[k] != x.dtype:
                    return Computed(
                        f"{self.names[k]!r} is cast twice, to {x.dtype} and then to {dtype}",
                        frozenset([k]),
                    )
        constants = tuple([_rounded(value, dtype) for value in said.constants])
        return replace(said, constants=constants)

    # -- what computes -----------------------------------------------------------------------------

    def _mark(self, out: Any, said: Computed) -> None:
        for result in leaves(out):
            if isinstance(result, torch.Tensor):
                self.note(result, said if result.numel() else self._nothing(result))

    def _sources(self, tensors: Sequence[torch.Tensor]) -> frozenset[int]:
        found: set[int] = set()
        for said in map(self.said, tensors):
            found.update(said.sources if said is not None else ())
        return frozenset(found)

    def _named(self, tensors: Sequence[torch.Tensor]) -> str:
        return self._names(self._sources(tensors))

    def _names(self, sources: Sequence[int] | frozenset[int]) -> str:
        names = [repr(self.names[k]) for k in sorted(sources)]
        return ", ".join(names[:4]) + (" and others" if len(names) > 4 else "") or "none"

    # -- at the end --------------------------------------------------------------------------------

    def result(self, name: str, tensor: torch.Tensor) -> Relation:
        """What a result of the generator is.

        Raises:
            NotOnlyMoved: it is computed, or made of nothing that is known.
        """
        said = self.said(tensor)
        if said is None:  # as an nn.Parameter that is made of one
            alike = [said for other, said in self.known.values() if _is_alias(tensor, other)]
            said = alike[0] if alike else self._of_values(tensor)
        if isinstance(said, Computed):
            raise NotOnlyMoved(
                f"a refit cannot make result {name!r} from its sources "
                f"({self._names(said.sources)}): {said.why}. A refit only moves "
                f"elements ({_MOVES}). Remove the op from the generator (the function that makes "
                "the results), and apply the op before or after the refit"
            )
        left = tensor.numel() - said.said(0)
        if left:
            raise NotOnlyMoved(
                f"a refit cannot make result {name!r}: {_without_value(left, tensor)}"
            )
        return said


def _without_value(left: int, tensor: torch.Tensor) -> str:
    return (
        f"{left} of the {tensor.numel()} elements of a tensor of shape {tuple(tensor.shape)} have "
        "no value, because they come from torch.empty (or new_empty, resize_) and the generator "
        "has not written to them. Use torch.zeros or torch.full, or write to all elements"
    )


def _is_alias(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same elements of the same memory."""
    lies, lies_too = (
        (x.shape, x.stride(), x.storage_offset(), x.dtype, x.device) for x in (one, other)
    )
    return lies == lies_too and local_tensors.share_memory(one, other)


def _computes(func: Any) -> str:
    return f"{func} computes new values, or is an op that a refit does not know"


def _rounded(value: Any, dtype: torch.dtype) -> Any:
    """A number as a tensor of that dtype has it."""
    return torch.tensor(value, dtype=dtype).item()
