"""The tensors of a model, from a file that has its sizes by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from cute_sharding.models.tensor import itemsize_of


class Shape(NamedTuple):
    """The global shape and the dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: str


def shapes_of(model: Mapping[str, Any]) -> dict[str, Shape]:
    """The tensors of a model, by name.

    Args:
        model: ``tensors``, from a name to a shape, whose sizes are numbers or names of ``sizes``;
            and ``dtype``, of all of them. A name with ``{layers}`` stands for as many tensors as
            that size says, numbered from 0.

    Raises:
        ValueError: something is missing, or not what it is to be.

    >>> shapes_of({
    ...     "dtype": "bfloat16",
    ...     "sizes": {"layers": 2, "d": 8},
    ...     "tensors": {"layers.{layers}.w": ["d", 4], "norm": ["d"]},
    ... })["layers.1.w"]
    Shape(shape=(8, 4), dtype='bfloat16')
    """
    dtype, tensors, sizes = model.get("dtype"), model.get("tensors"), model.get("sizes", {})
    if not (isinstance(dtype, str) and isinstance(tensors, Mapping) and isinstance(sizes, Mapping)):
        raise ValueError(
            "a model file needs dtype (a text) and tensors (an object of names and shapes). If "
            "shapes use named sizes, the file also needs sizes (an object of names and numbers). "
            f"The keys of the file are {', '.join(model) or 'none'}"
        )
    itemsize_of(dtype)

    def size(given: Any, of: str) -> int:
        found = sizes.get(given) if isinstance(given, str) else given
        if not isinstance(found, int) or found < 0:
            raise ValueError(
                f"the size {given!r} of {of} must be an integer of 0 or more, or the name of such "
                'an integer under the key "sizes" of the model (names under the key: '
                f"{', '.join(map(repr, sizes)) or 'none'})"
            )
        return found

    found: dict[str, Shape] = {}
    for name, shape in tensors.items():
        whole = Shape(tuple([size(given, name) for given in shape]), dtype)
        counted = re.search(r"\{(\w+)\}", name)
        many = size(counted[1], name) if counted else 1
        for k in range(many):
            found[name.replace(counted[0], str(k)) if counted else name] = whole
    return found
