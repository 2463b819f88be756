"""Linear programs, some of whose variables are whole numbers, as scipy's HiGHS takes them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from math import inf
from typing import Any, NamedTuple, TypeAlias

Column: TypeAlias = "tuple[Any, ...]"
Terms: TypeAlias = "list[tuple[float, Column]]"
# The solver's tolerances are absolute, and meant for weights of this size.
GREATEST_WEIGHT = 1e6
ROUNDING = 1e-6
# Of so many variables an interior point is found sooner than a vertex.
MANY = 200_000
OPTIMAL, INFEASIBLE = 0, 2  # its statuses


class Optimum(NamedTuple):
    """The variables at the least weight that was found; what no weight is below; and, if fractions
    were allowed, how much more no weight is below if a variable is 1.
    """

    values: Sequence[float]
    bound: float
    more: Sequence[float] = ()


@dataclass
class Model:
    """Variables from 0 to 1, by name, and what each weighs; rows, of which each is a sum between
    two numbers. What is said again of a variable or a row is added to it.

    Attributes:
        closed: variables that are 0.
    """

    weights: list[float] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    number: dict[Column, int] = field(default_factory=dict)
    rows: dict[Column, tuple[dict[int, float], list[float]]] = field(default_factory=dict)
    closed: set[Column] = field(default_factory=set)

    def column(self, name: Column, weight: float = 0, whole: bool = False) -> None:
        if name not in self.number:
            self.number[name] = len(self.weights)
            self.weights.append(0)
            self.whole.append(whole)
        self.weights[self.number[name]] += weight

    def row(
        self,
        name: Column,
        terms: Iterable[tuple[float, Column]],
        low: float,
        high: float,
        times: int = 1,
    ) -> None:
        sums, limits = self.rows.setdefault(name, (defaultdict(float), [0, 0]))
        for factor, column in terms:
            sums[self.number[column]] += times * factor
        limits[0] += times * low
        limits[1] += times * high

    def forbid(self, name: Column, found: Optimum) -> None:
        """Add a row: not all variables of a row are 1 that were."""
        sums, _ = self.rows[name]
        ones = [column for column in sums if found.values[column] > 0.5]
        row = ("forbidden", len(self.rows))
        self.rows[row] = (dict.fromkeys(ones, 1.0), [-inf, len(ones) - 1])

    def optimum(
        self, seconds: float | None = None, gap: float = 0.0, whole: bool = True
    ) -> Optimum | None:
        """
        Args:
            seconds: stop then.
            gap: stop as near to the bound, as a part of the weight.
            whole: whether the variables that are to be whole numbers are; else it is a bound alone.

        Returns:
            None: the rows contradict each other.

        Raises:
            TimeoutError: nothing was found in ``seconds``.
        """
        if not self.rows:
            return Optimum((), 0)
        fractions = self._fractions(seconds)
        if not whole or fractions is None or self._is_whole(fractions.values):
            return fractions
        found = self._whole(seconds, gap)
        return found and found._replace(bound=max(found.bound, fractions.bound))

    def _is_whole(self, values: Sequence[float]) -> bool:
        return all(
            min(value, 1 - value) < ROUNDING for value, whole in zip(values, self.whole) if whole
        )

    def _fractions(self, seconds: float | None) -> Optimum | None:
        matrix, low, high = self._sparse_rows()
        equal = low == high
        above, below = ~equal & (low > -inf), ~equal & (high < inf)
        found = library("scipy.optimize").linprog(
            self._scaled(),
            A_ub=library("scipy.sparse").vstack([-matrix[above], matrix[below]], format="csr"),
            b_ub=[*-low[above], *high[below]],
            A_eq=matrix[equal],
            b_eq=low[equal],
            bounds=self._bounds(),
            method="highs" if len(self.weights) < MANY else "highs-ipm",
            options={} if seconds is None else {"time_limit": max(seconds, 0)},
        )
        if found.status == INFEASIBLE:
            return None
        if found.status != OPTIMAL:
            raise TimeoutError(
                f"no way to run the program was found in {seconds or inf:.0f} seconds: pass more "
                "seconds"
            )
        return Optimum(found.x, self._scale * found.fun, self._scale * found.lower.marginals)

    def _whole(self, seconds: float | None, gap: float) -> Optimum | None:
        optimize = library("scipy.optimize")
        options: dict[str, Any] = {"mip_rel_gap": gap}
        if seconds is not None:
            options["time_limit"] = max(seconds, 0)
        found = optimize.milp(
            self._scaled(),
            integrality=self.whole,
            bounds=optimize.Bounds(*self._bounds().T),
            constraints=optimize.LinearConstraint(*self._sparse_rows()),
            options=options,
        )
        if found.status == INFEASIBLE:
            return None
        if found.x is None:
            raise TimeoutError(
                f"no way to run the program was found in {seconds or inf:.0f} seconds: pass more "
                "seconds"
            )
        exact = found.status == OPTIMAL and not gap
        return Optimum(found.x, self._scale * (found.fun if exact else found.mip_dual_bound or 0))

    @property
    def _scale(self) -> float:
        return (max(self.weights) or 1) / GREATEST_WEIGHT

    def _scaled(self) -> Any:
        return library("numpy").array(self.weights) / self._scale

    def _bounds(self) -> Any:
        bounds = library("numpy").array([(0.0, 1.0)] * len(self.weights))
        bounds[[self.number[column] for column in self.closed if column in self.number], 1] = 0
        return bounds

    def _sparse_rows(self) -> tuple[Any, Any, Any]:
        numpy = library("numpy")
        entries = [
            (factor, r, column)
            for r, (sums, _) in enumerate(self.rows.values())
            for column, factor in sums.items()
        ]
        factors, row, column = zip(*entries)
        matrix = library("scipy.sparse").csr_array(
            (factors, (row, column)), (len(self.rows), len(self.weights))
        )
        low, high = numpy.array([limits for _, limits in self.rows.values()]).T
        return matrix, low, high


def library(name: str) -> Any:
    """A module of scipy, or numpy, on which it stands.

    Raises:
        ImportError: it is not installed; the message says how to install it.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(
            f"the cheapest way to run a program is found with scipy, which cannot be imported "
            f'({error}): run pip install "cute-sharding[plan]"',
            name="scipy",
        ) from error
