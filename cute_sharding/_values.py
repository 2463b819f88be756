"""Immutable values: frozen dataclasses, defined in a quarter of the time.

``dataclasses`` writes six methods of each class as text, and compiles each by itself: for some
seventy kinds of values that was half of what importing this package took. Here those that name the
fields are one text, and the others are the same for all classes. Fields are found as ever, and what
reads them (``fields``, ``replace``, ``asdict``) sees an ordinary dataclass. Below all else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

__all__ = ["dataclass"]


def _dataclass(*, frozen: bool, eq: bool = True) -> Callable[[type], type]:
    """``dataclasses.dataclass`` with these arguments. Values are frozen; where one is defined, that
    is said.
    """
    assert frozen

    def defined(kind: type) -> type:
        dataclasses.dataclass(init=False, repr=False, eq=False)(kind)
        fields = dataclasses.fields(kind)
        methods = [*_written(kind, fields, eq), _shown(fields), *_KEPT]
        for method in methods:
            if vars(kind).get(method.__name__) is None:  # None: by an __eq__ of its own, __hash__
                setattr(kind, method.__name__, method)
        return kind

    return defined


def _written(kind: type, fields: tuple[dataclasses.Field[Any], ...], eq: bool) -> list[Any]:
    """The methods that name the fields one by one."""
    names: dict[str, Any] = {"_put": object.__setattr__}
    taken: list[str] = ["self"]
    by_name: list[str] = []
    body: list[str] = []
    for field in fields:
        name, default, value = field.name, "", field.name
        if field.default is not dataclasses.MISSING:
            default, names[f"_of_{name}"] = f"=_of_{name}", field.default
        elif field.default_factory is not dataclasses.MISSING:
            default, names[f"_of_{name}"] = f"=_of_{name}", field.default_factory
            value = f"_of_{name}() if {name} is _of_{name} else {name}"
        (by_name if field.kw_only else taken).append(name + default)
        body.append(f"_put(self, {name!r}, {value})")
    if hasattr(kind, "__post_init__"):
        body.append("self.__post_init__()")
    arguments = ", ".join([*taken, *(["*", *by_name] if by_name else [])])
    text = f"def __init__({arguments}): {'; '.join(body or ['pass'])}\n"
    if eq:
        of, other = (
            "".join([f"{one}.{field.name}, " for field in fields if field.compare])
            for one in ("self", "other")
        )
        text += _COMPARED.format(of=of, other=other)
    exec(text, names)
    names["__init__"].__qualname__ = f"{kind.__qualname__}.__init__"  # as errors say it
    return [names[name] for name in ("__init__", "__eq__", "__hash__") if name in names]


_COMPARED = """
def __eq__(self, other):
    return ({of}) == ({other}) if other.__class__ is self.__class__ else NotImplemented
def __hash__(self): return hash(({of}))
"""


def _shown(fields: tuple[dataclasses.Field[Any], ...]) -> Any:
    names = [field.name for field in fields if field.repr]

    def __repr__(self: Any) -> str:
        of = [f"{name}={getattr(self, name)!r}" for name in names]
        return f"{self.__class__.__qualname__}({', '.join(of)})"

    return __repr__


def __setattr__(self: Any, name: str, value: Any) -> None:
    kind = type(self).__name__
    raise dataclasses.FrozenInstanceError(
        f"{kind} is immutable; build a new one instead of setting {name!r}"
    )


def __delattr__(self: Any, name: str) -> None:
    kind = type(self).__name__
    raise dataclasses.FrozenInstanceError(f"{kind} is immutable; {name!r} cannot be deleted")


_KEPT = (__setattr__, __delattr__)

if TYPE_CHECKING:
    from dataclasses import dataclass
else:
    dataclass = _dataclass
