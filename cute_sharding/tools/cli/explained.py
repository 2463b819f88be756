"""``cute_sharding.explain``: the command ``explain`` as a function."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from cute_sharding._html import of_text
from cute_sharding.sharding import Sharding
from cute_sharding.tools.cli import moves
from cute_sharding.tools.cli.arguments import VIEWS
from cute_sharding.tools.cli.explain import run_explain, show_explain
from cute_sharding.tools.drawing.inputs import (
    DTensorLike,
    PlacementsLike,
    names_of,
    placements_of,
    sharding_of_dtensor,
)

# The numbers of an op. None stands for a number that is left out, as in ``x[:, 1:]``.
Numbers: TypeAlias = "int | Sequence[int | None]"


@dataclass(frozen=True)
class Explanation:
    """The explanation of an op on a sharding. ``print`` shows it as the command ``explain`` does.

    Attributes:
        data: the explanation as plain data, as ``explain --json`` prints it.
    """

    data: Mapping[str, Any]

    @property
    def is_free(self) -> bool:
        """Whether the op needs no communication."""
        return bool(self.data["free"])

    @property
    def output(self) -> tuple[str, ...] | None:
        """The placements of the result, or of the first result; None if a view is not free. In this
        case, ``data["redistribute_to"]`` has placements of the input for which the view is free.
        """
        outputs = self.data.get("outputs") or [self.data.get("output")]
        return None if outputs[0] is None else tuple(outputs[0]["placements"])

    def to_dict(self) -> dict[str, Any]:
        """The explanation as plain data."""
        return dict(self.data)

    def _repr_html_(self) -> str:
        return of_text(str(self))

    def __str__(self) -> str:
        return show_explain(dict(self.data))


def explain(
    x: DTensorLike | Sharding | None = None,
    *,
    shape: Sequence[int] | None = None,
    mesh: Mapping[str, int] | Sequence[int] | None = None,
    placements: PlacementsLike | None = None,
    torch: bool = False,
    **op: Numbers,
) -> Explanation:
    """Explain a view or a movement op of a sharded tensor: the elements of each device before and
    after the op, whether the op is free, and its communication. Nothing is communicated.

    Args:
        x: a DTensor or a :class:`~cute_sharding.sharding.Sharding`. Instead of it, give ``shape``,
            ``mesh`` and ``placements``.
        shape: the tensor's global shape.
        mesh: the device mesh: sizes, or names with sizes, such as ``{"dp": 2, "tp": 4}``.
        placements: one for each mesh dim, as text (``"S(0), R"``) or as PyTorch's objects.
        torch: whether to add the result of PyTorch's own rule for the op (imports torch).
        op: one op as a keyword argument, with its numbers: ``view``, ``permute``, ``expand`` or
            ``repeat`` with sizes, or a movement op as ``python -m cute_sharding explain --help``
            lists them, such as ``slice=(1, 1)`` for ``x[:, 1:]`` or ``roll=(0, 1)``.

    Returns:
        The explanation, which you can print. It has ``.is_free``, ``.output`` and ``.to_dict()``.

    Raises:
        TypeError: the op or the tensor is missing, or the op has an unknown name.
        ValueError: the arguments do not fit together.

    >>> found = explain(shape=(4, 16), mesh={"tp": 4}, placements="S(1)", view=(4, 8, 2))
    >>> found.is_free, found.output
    (True, ('S(1)',))
    >>> found = explain(shape=(4, 16), mesh=(4,), placements="S(1)", slice=(1, 1))
    >>> found.is_free, found.output, found.to_dict()["received_elements"]
    (False, ('S(1)',), 4)
    """
    known = (*VIEWS, *moves.OPTIONS)
    if len(op) != 1 or next(iter(op)) not in known:
        said = f"not {', '.join(op)}" if op else "such as view=(4, 8)"
        raise TypeError(f"explain takes exactly one op, {said}: use one of {', '.join(known)}")
    ((name, numbers),) = op.items()
    sharding, names = _sharding(x, shape, mesh, placements)
    options = {
        **dict.fromkeys(known),
        "shape": _text(sharding.shape),
        "mesh": ",".join(f"{m}={n}" for m, n in zip(names, sharding.mesh)),
        "placements": ",".join(map(str, sharding.placements)),
        "torch": torch,
        name: _text(numbers),
    }
    return Explanation(run_explain(Namespace(**options)))


def _sharding(x: Any, shape: Any, mesh: Any, placements: Any) -> tuple[Sharding, tuple[str, ...]]:
    """The sharding, and the names of the mesh dims."""
    if x is not None:
        if isinstance(x, DTensorLike):
            return sharding_of_dtensor(x), names_of(
                x.device_mesh.mesh_dim_names, x.device_mesh.shape
            )
        if isinstance(x, Sharding):
            return x, names_of(None, x.mesh)
        raise TypeError(f"explain takes a DTensor or a Sharding, not a {type(x).__name__}")
    if shape is None or mesh is None or placements is None:
        raise TypeError(
            "explain needs a DTensor, a Sharding, or all of shape=, mesh= and placements="
        )
    named = mesh if isinstance(mesh, Mapping) else None
    sizes = tuple(mesh.values()) if named is not None else tuple(mesh)
    names = names_of(None if named is None else tuple(named), sizes)
    return Sharding(tuple(shape), sizes, placements_of(placements, len(shape))), names


def _text(numbers: Numbers) -> str:
    some = (numbers,) if isinstance(numbers, int) else numbers
    return ",".join("" if n is None else str(n) for n in some)
