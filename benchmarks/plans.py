"""How long the solver of programs takes on a training step of a transformer, and the gap it leaves.

    python -m benchmarks.plans [--layers 1 32 126] [--mesh 8 8] [--width 4096] [--limit 0.7]

The step is made up here, op by op: forward, backward, SGD. Its weights are sharded over all mesh
dims in turn, its tokens over the first.
"""

from __future__ import annotations

import argparse
import time
from functools import cache
from itertools import product
from math import prod

from cute_sharding.exchange import MemoryLimitError
from cute_sharding.programs import solve
from cute_sharding.programs.program import Op, OpWay, Placing, Price, Program, Solved

PARTS = ("R", "S0", "S1", "P")  # what one mesh dim does to a matrix
# What one mesh dim may do in an op: to each operand, and to each result.
MATMUL = ("R R R", "S0 R S0", "R S1 S1", "S1 S0 P")
BY_ROWS = {n: (" ".join(["R"] * n), " ".join(["S0"] * n)) for n in range(2, 8)}
BY_ELEMENT = {n: (*BY_ROWS[n], " ".join(["S1"] * n)) for n in range(2, 8)}
LINEAR = {n: (*BY_ELEMENT[n], " ".join(["P"] * n)) for n in range(2, 8)}
TRANSPOSED = ("R R", "S0 S1", "S1 S0", "P P")
NORM = ("R R R", "S0 R S0")
NORM_BACKWARD = ("R R R R R", "S0 S0 R S0 P")  # gradient, input, weight; both gradients
ITEMSIZE = 2


@cache
def ways_of(
    choices: tuple[str, ...], results: int, mesh_dims: int, first: tuple[tuple[int, Placing], ...]
) -> tuple[OpWay, ...]:
    """Each mesh dim chooses for itself. Those come first in which some operands lie so."""
    found = []
    for chosen in product(choices, repeat=mesh_dims):
        placings = list(zip(*[choice.split() for choice in chosen]))
        found.append(OpWay(tuple(placings[:-results]), tuple(placings[-results:])))
    return tuple(sorted(found, key=lambda way: any(way.operands[i] != p for i, p in first)))


@cache
def moves_of(shape: tuple[int, int], mesh: tuple[int, ...]) -> dict[tuple[Placing, Placing], Price]:
    found = {}
    for source, target in product(product(PARTS, repeat=len(mesh)), repeat=2):
        if source != target and all(p == "P" for p, q in zip(source, target) if q == "P"):
            bytes_received = ITEMSIZE * received(shape, source, target, mesh)
            found[source, target] = Price(bytes_received, int(bytes_received > 0))
    return found


def received(
    shape: tuple[int, int], source: tuple[str, ...], target: tuple[str, ...], mesh: tuple[int, ...]
) -> int:
    """Elements that each device receives, nearly: what is pending is reduced first, to a shard if
    it is to be one; then what a device needs and has not is sent to it.
    """
    reduced = 0
    lies = list(source)
    for m, (p, q) in enumerate(zip(source, target)):
        if p == "P" != q:
            lies[m] = q
            block = held(shape, tuple(lies), mesh) // ITEMSIZE
            reduced += block * (mesh[m] - 1) * (2 if q == "R" else mesh[m]) // mesh[m]
    both = [n for p, q, n in zip(lies, target, mesh) if q[0] == "S" or p[0] == "S"]
    differ = [n for p, q, n in zip(lies, target, mesh) if q[0] == p[0] == "S" and p != q]
    needed = held(shape, target, mesh) // ITEMSIZE
    return reduced + needed - prod(shape) // (prod(both) * prod(differ))


def held(shape: tuple[int, int], placing: tuple[str, ...], mesh: tuple[int, ...]) -> int:
    """Bytes of the fullest device."""
    sizes = list(shape)
    for part, devices in zip(placing, mesh):
        if part in ("S0", "S1"):
            d = int(part[1])
            sizes[d] = -(-sizes[d] // devices)
    return ITEMSIZE * prod(sizes)


class Step:
    """A training step as it is written down."""

    def __init__(self, mesh: tuple[int, ...]) -> None:
        self.mesh = mesh
        self.ops: list[Op] = []
        self.given: dict[int, Placing] = {}
        self.lies: dict[int, Placing] = {}  # if all ops take their first ways
        self.shapes: dict[int, tuple[int, int]] = {}
        self.fixed: set[int] = set()
        self.within: dict[int, int] = {}

    def value(self, shape: tuple[int, int]) -> int:
        self.shapes[len(self.shapes)] = shape
        return len(self.shapes) - 1

    def give(self, shape: tuple[int, int], placing: tuple[str, ...]) -> int:
        v = self.value(shape)
        self.given[v] = self.lies[v] = placing
        return v

    def op(
        self,
        what: str,
        choices: tuple[str, ...],
        operands: tuple[int, ...],
        *shapes: tuple[int, int],
        as_lies: tuple[int, ...] = (),
    ) -> tuple[int, ...]:
        results = tuple(map(self.value, shapes))
        first = tuple((i, self.lies[operands[i]]) for i in as_lies)
        ways = ways_of(choices, len(shapes), len(self.mesh), first)
        self.lies.update(zip(results, ways[0].results))
        self.ops.append(Op(operands, results, ways, None, frozenset(as_lies), what))
        if as_lies:
            self.fixed.update(results)
            self.within.update(dict.fromkeys(results, operands[as_lies[0]]))
        return results

    def matmul(self, x: int, w: int) -> int:
        shape = (self.shapes[x][0], self.shapes[w][1])
        return self.op("mm", MATMUL, (x, w), shape)[0]

    def transposed(self, x: int) -> int:
        n, m = self.shapes[x]
        return self.op("t", TRANSPOSED, (x,), (m, n), as_lies=(0,))[0]

    def add(self, x: int, y: int) -> int:
        return self.op("add", LINEAR[3], (x, y), self.shapes[x])[0]

    def each(self, what: str, *operands: int) -> int:
        return self.op(what, BY_ELEMENT[len(operands) + 1], operands, self.shapes[operands[0]])[0]

    def linear_backward(self, x: int, w: int, wt: int, gradient: int) -> tuple[int, int]:
        """The gradients of the input and of the weight, of which ``wt`` is the transpose."""
        of_weight = self.matmul(self.transposed(gradient), x)
        return self.matmul(gradient, w), of_weight

    def sgd(self, w: int, gradient: int) -> None:
        scaled = self.op("mul", LINEAR[2], (gradient,), self.shapes[w])[0]
        self.op("add_", BY_ELEMENT[3], (w, scaled), self.shapes[w], as_lies=(0,))

    def program(self) -> Program:
        return Program(
            ops=tuple(self.ops),
            given=self.given,
            moves={shape: moves_of(shape, self.mesh) for shape in set(self.shapes.values())},
            kinds=self.shapes,
            fixed=frozenset(self.fixed),
            kept=frozenset(self.given),
            within=self.within,
            sizes={
                shape: {
                    placing: held(shape, placing, self.mesh)
                    for placing in product(PARTS, repeat=len(self.mesh))
                }
                for shape in set(self.shapes.values())
            },
        )


def transformer(
    layers: int, mesh: tuple[int, ...], width: int, tokens: int = 16384, words: int = 128256
) -> Program:
    """A step of a model with gated MLPs and grouped heads of keys."""
    step, hidden, keys = Step(mesh), 7 * width // 2, width // 4
    by_turns = tuple(f"S{(m + 1) % 2}" for m in range(len(mesh)))
    by_tokens = ("S0", *["R"] * (len(mesh) - 1))

    def weight(out: int, into: int) -> int:
        return step.give((out, into), by_turns)

    def scale() -> int:
        return step.give((1, width), ("R",) * len(mesh))

    x = step.give((tokens, width), by_tokens)
    backwards = []
    for _ in range(layers):
        attention = [weight(out, width) for out in (width, keys, keys, width)]
        mlp = [weight(hidden, width), weight(hidden, width), weight(width, hidden)]
        weights = [*attention, *mlp]
        x, saved = forward(step, x, weights, scale(), scale())
        backwards.append((weights, saved))
    head = weight(words, width)
    turned = step.transposed(head)
    logits = step.matmul(x, turned)
    gradient = step.op("loss", BY_ROWS[2], (logits,), (tokens, words))[0]
    gradient, of_head = step.linear_backward(x, head, turned, gradient)
    updates = [(head, of_head)]
    for weights, saved in reversed(backwards):
        gradient, more = backward(step, gradient, weights, saved)
        updates += more
    for w, of_weight in updates:
        step.sgd(w, of_weight)
    return step.program()


def forward(
    step: Step, x: int, weights: list[int], before: int, between: int
) -> tuple[int, dict[str, int]]:
    shape = step.shapes[x]
    turned = [step.transposed(w) for w in weights]
    normed = step.op("norm", NORM, (x, before), shape)[0]
    q, k, v = [step.matmul(normed, w) for w in turned[:3]]
    turned_q, turned_k = step.each("rope", q), step.each("rope", k)
    attended = step.op("attention", BY_ELEMENT[4], (turned_q, turned_k, v), shape)[0]
    y = step.add(x, step.matmul(attended, turned[3]))
    normed_too = step.op("norm", NORM, (y, between), shape)[0]
    gate, up = [step.matmul(normed_too, w) for w in turned[4:6]]
    open_gate = step.each("silu", gate)
    product_of = step.each("mul", open_gate, up)
    z = step.add(y, step.matmul(product_of, turned[6]))
    names = "x normed q k v attended y normed_too gate up open_gate product_of before between"
    values = [x, normed, turned_q, turned_k, v, attended, y, normed_too, gate, up, open_gate]
    saved = dict(zip(names.split(), [*values, product_of, before, between]))
    return z, {**saved, **{f"turned {i}": t for i, t in enumerate(turned)}}


def backward(
    step: Step, gradient: int, weights: list[int], saved: dict[str, int]
) -> tuple[int, list[tuple[int, int]]]:
    """The gradient of the layer's input, and weights with their gradients."""
    s, shape, updates = saved, step.shapes[saved["x"]], []

    def linear(i: int, x: int, of: int) -> int:
        of_input, of_weight = step.linear_backward(x, weights[i], s[f"turned {i}"], of)
        updates.append((weights[i], of_weight))
        return of_input

    of_product = linear(6, s["product_of"], gradient)
    of_open = step.each("mul", of_product, s["up"])
    of_up = step.each("mul", of_product, s["open_gate"])
    of_gate = step.each("silu backward", of_open, s["gate"])
    of_normed = step.add(linear(5, s["normed_too"], of_up), linear(4, s["normed_too"], of_gate))
    of_y, of_between = step.op(
        "norm backward", NORM_BACKWARD, (of_normed, s["y"], s["between"]), shape, (1, shape[1])
    )
    updates.append((s["between"], of_between))
    gradient = step.add(gradient, of_y)
    of_attended = linear(3, s["attended"], gradient)
    q, k, v = s["q"], s["k"], s["v"]
    of_q, of_k, of_v = step.op(
        "attention backward",
        BY_ELEMENT[7],
        (of_attended, q, k, v),
        *[step.shapes[u] for u in (q, k, v)],
    )
    of_normed = linear(2, s["normed"], of_v)
    of_normed = step.add(of_normed, linear(1, s["normed"], step.each("rope backward", of_k)))
    of_normed = step.add(of_normed, linear(0, s["normed"], step.each("rope backward", of_q)))
    of_x, of_before = step.op(
        "norm backward", NORM_BACKWARD, (of_normed, s["x"], s["before"]), shape, (1, shape[1])
    )
    updates.append((s["before"], of_before))
    return step.add(gradient, of_x), updates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 32, 126])
    parser.add_argument("--mesh", type=int, nargs="+", default=[8, 8])
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--limit", type=float, help="of the memory of the plan without a limit")
    given = parser.parse_args()
    mesh = tuple(given.mesh)
    print(f"mesh {mesh}")
    print(" layers     ops    ways  seconds  received MB  held MB     gap")
    for layers in given.layers:
        program = transformer(layers, mesh, given.width)
        solved = shown(layers, program)
        if given.limit:
            try:
                shown(layers, program, int(given.limit * solved.peak))
            except MemoryLimitError as error:
                print(error)


def shown(layers: int, program: Program, memory_limit: int | None = None) -> Solved:
    begin = time.perf_counter()
    solved = solve(program, memory_limit=memory_limit)
    seconds = time.perf_counter() - begin
    ways = sum(len(op.ways) for op in program.ops)
    gap = 1 - solved.least / solved.weight if solved.weight else 0.0
    print(
        f"{layers:7} {len(program.ops):7} {ways:7} {seconds:8.1f} "
        f"{solved.price.received / 1e6:12,.1f} {solved.peak / 1e6:8,.0f} {gap:7.2%}",
        flush=True,
    )
    return solved


if __name__ == "__main__":
    main()
