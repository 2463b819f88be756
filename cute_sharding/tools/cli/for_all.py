"""The command ``explain`` for sizes with names, such as ``b=2,s=8,16``: the placements for all
sizes, and the facts that they need.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

from cute_sharding.layout import Fact, asking, assuming, symbol
from cute_sharding.layout.size import size
from cute_sharding.layout.symbolic import parse_expr
from cute_sharding.propagation.views import carry
from cute_sharding.relations.table import BY_OP
from cute_sharding.sharding import Partial, Replicate, Shard
from cute_sharding.tools.cli.arguments import UsageError, read_mesh


def without_names(shape: str) -> str:
    """A shape whose sizes may have names, ``b=2,16``, with only the numbers."""
    return re.sub(r"[A-Za-z_]\w*\s*=", "", shape)


class _Numbers:
    """Sizes by name, with the numbers of this call. As an Oracle, it records the facts that are
    asked, except that sizes are 2 or more.
    """

    def __init__(self, text: str) -> None:
        self.numbers = {
            symbol(name): int(number)
            for name, number in re.findall(r"([A-Za-z_]\w*)\s*=\s*(\d+)", text)
        }
        self.asked: list[str] = []

    def read(self, text: str) -> tuple[Any, ...]:
        exprs = tuple([parse_expr(part) for part in text.split(",") if part.strip()])
        unknown = {
            str(name)
            for expr in exprs
            if not isinstance(expr, int)
            for name in expr.free_symbols - self.numbers.keys()
        }
        if unknown:
            raise UsageError(
                f"--shape has no number for {', '.join(sorted(unknown))}: write each name with a "
                "number, such as b=2"
            )
        return exprs

    def number(self, expr: Any) -> int:
        return expr if isinstance(expr, int) else int(expr.subs(self.numbers))

    def holds(self, fact: Fact) -> bool:
        left, right = self.number(fact.left), self.number(fact.right)
        answer = {
            "divides": lambda: left % right == 0,
            "equal": lambda: left == right,
            "at most": lambda: left <= right,
        }[fact.relation]()
        return answer is fact.holds

    def assume(self, fact: Fact) -> None:
        self.asked.append(str(fact))


def explain_for_all(
    arguments: argparse.Namespace, placements: tuple[Shard | Replicate | Partial, ...]
) -> tuple[dict[str, Any], argparse.Namespace]:
    """The propagation for sizes with names (``b=2,s=8,16``): the output's placements for all sizes
    for which the assumed facts hold; and the arguments with numbers instead of names.
    """
    sizes = _Numbers(arguments.shape)
    if 0 in sizes.numbers.values():
        raise UsageError(
            f"--shape {arguments.shape!r}: a size with a name must be 1 or more; write the size 0 "
            "without a name"
        )
    if arguments.view is None:
        raise UsageError(
            "names in --shape work only with --view, such as --shape b=2,s=8,16 --view b*s,16"
        )

    named = sizes.read(re.sub(r"=\s*\d+", "", arguments.shape)), sizes.read(arguments.view)
    _, mesh = read_mesh(arguments.mesh)
    with (
        asking(sizes),
        assuming(*(f"{name} >= 2" for name, number in sizes.numbers.items() if number >= 2)),
    ):
        shape, target = (tuple([size(n) for n in exprs]) for exprs in named)
        view = BY_OP["Tensor.view"].view(shape, target)
        cuts = tuple(
            [(p.dim, p.split_factor) if isinstance(p, Shard) else None for p in placements]
        )
        carried = carry(view, cuts, mesh)
    numbers = {
        name: ",".join(str(sizes.number(n)) for n in exprs)
        for name, exprs in zip(("shape", "view"), named)
    }
    found = {
        "shape": [str(n) for n in named[0]],
        "target_shape": [str(n) for n in named[1]],
        "output": (
            None if carried.blocked is not None else list(map(_text, placements, carried.cuts))
        ),
        "assumed": sizes.asked,
    }
    return found, argparse.Namespace(**{**vars(arguments), **numbers})


def _text(placement: Shard | Replicate | Partial, cut: Any) -> str:
    """A placement after the view, as text, of a cut that may have names."""
    if cut is None:
        return str(placement) if isinstance(placement, Partial) else "R"
    dim, factor = cut
    return f"S({dim})" if isinstance(factor, int) and factor == 1 else f"_S({dim},{factor})"
