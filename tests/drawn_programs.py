"""Programs drawn at random, as values: placings are what each mesh dim does, moves cost what is
received, and ops have some ways. With the first way of each op they can run.
"""

from dataclasses import replace
from itertools import product

from cute_sharding.programs.program import FreeValues, Op, OpWay, Price, Program
from cute_sharding.propagation.signatures import Operand, received_for

PARTS = {"R": None, "S0": (0, 1), "S1": (1, 1), "P": "sum"}
SHAPES = ((4, 8), (8, 2), (6, 6))


def moves_of(shape, mesh):
    """What it costs to bring a tensor from each placing to each other; nothing becomes pending that
    was not.
    """
    found = {}
    for source, target in product(product(PARTS, repeat=len(mesh)), repeat=2):
        if source != target and all(p == "P" for p, q in zip(source, target) if q == "P"):
            parts = [tuple(PARTS[p] for p in placing) for placing in (source, target)]
            received = received_for(Operand(shape, parts[0]), parts[1], mesh)
            found[source, target] = Price(received, int(received > 0))
    return found


def elements(shape, placing, mesh):
    """Of the fullest device."""
    sizes = list(shape)
    for part, devices in zip(placing, mesh):
        if PARTS[part] is not None and part != "P":
            d, _ = PARTS[part]
            sizes[d] = -(-sizes[d] // devices)
    return sizes[0] * sizes[1]


class _Drawing:
    """
    Attributes:
        lies: how each value lies if all ops take their first ways.
    """

    def __init__(self, rng, mesh):
        self.rng = rng
        self.placings = list(product(PARTS, repeat=len(mesh)))
        self.moves = {
            shape: {
                pair: price for pair, price in moves_of(shape, mesh).items() if rng.random() < 0.95
            }
            for shape in SHAPES
        }
        self.kinds, self.lies, self.ops, self.read = {}, {}, [], []

    def value(self, kind, placing):
        v = len(self.kinds)
        self.kinds[v], self.lies[v] = kind, placing
        return v

    def copies(self, v):
        """How an op may need a value that lies as it does."""
        return [q for q in self.placings if self.can_be(v, q, False)]

    def can_be(self, v, q, as_it_lies):
        p = self.lies[v]
        return p == q or (not as_it_lies and (p, q) in self.moves[self.kinds[v]])

    def op(self, ways, as_lies, again):
        """An op of new ways."""
        rng = self.rng
        operands = [
            rng.choice(self.read if self.read and rng.random() < again else list(self.kinds))
            for _ in range(rng.randint(1, 3))
        ]
        lies = frozenset(i for i in range(len(operands)) if rng.random() < as_lies)
        results = range(rng.choice((1, 1, 1, 2)))
        first = [
            self.lies[v] if i in lies else rng.choice(self.copies(v))
            for i, v in enumerate(operands)
        ]
        choices = [
            OpWay(
                tuple(rng.choice(self.placings) for _ in operands) if w else tuple(first),
                tuple(rng.choice(self.placings) for _ in results),
                Price(rng.choice((0, 0, 1, 4, 30)), rng.choice((0, 0, 1))),
            )
            for w in range(rng.randint(1, ways))
        ]
        shapes = [rng.choice(SHAPES) for _ in results]
        self.add(Op(tuple(operands), (), tuple(choices), len(self.ops), lies), shapes)

    def like(self, op):
        """One more op of a kind, if there are operands for it."""
        fitting = [
            [
                v
                for v in self.kinds
                if self.kinds[v] == self.kinds[u]
                and self.can_be(v, op.ways[0].operands[i], i in op.as_lies)
            ]
            for i, u in enumerate(op.operands)
        ]
        if all(fitting):
            operands = tuple(self.rng.choice(values) for values in fitting)
            shapes = [self.kinds[v] for v in op.results]
            self.add(Op(operands, (), op.ways, op.kind, op.as_lies), shapes)

    def add(self, op, shapes):
        made = tuple(map(self.value, shapes, op.ways[0].results))
        self.ops.append(Op(op.operands, made, op.ways, op.kind, op.as_lies, f"op {len(self.ops)}"))
        self.read += op.operands


def drawn_program(rng, ops, ways=3, mesh=(2,), kinds=0.2, fixed=0.2, as_lies=0.2, again=0.5):
    """
    Args:
        rng: draws.
        ops: how many, at most.
        ways: of an op, at most.
        kinds: how often an op is of the kind of one before it.
        fixed: how often a value stays as it is made.
        as_lies: how often an operand is read as it lies.
        again: how often an operand is one that was read before.
    """
    drawing = _Drawing(rng, mesh)
    given = [drawing.value(rng.choice(SHAPES), rng.choice(drawing.placings)) for _ in range(2)]
    for _ in range(ops):
        if drawing.ops and rng.random() < kinds:
            drawing.like(rng.choice(drawing.ops))
        else:
            drawing.op(ways, as_lies, again)
    views = {
        op.results[0]: op.operands[min(op.as_lies)]
        for op in drawing.ops
        if op.as_lies and rng.random() < 0.7
    }
    return Program(
        tuple(drawing.ops),
        {v: drawing.lies[v] for v in given},
        drawing.moves,
        drawing.kinds,
        frozenset(
            v for v in drawing.kinds if v not in given and (v in views or rng.random() < fixed)
        ),
        {shape: {p: elements(shape, p, mesh) for p in drawing.placings} for shape in SHAPES},
        frozenset(v for v in drawing.kinds if rng.random() < 0.1),
        views,
        frozenset(v for v in drawing.kinds if rng.random() < 0.2),
    )


def freed(rng, program, together=0.5, placings=3):
    """The program with what is given free: each value by itself, or those that are alike together.
    Those that are alike may lie in the same placings.
    """
    every, choices, groups = [*next(iter(program.sizes.values()))], {}, {}
    for v, placing in program.given.items():
        alike = program.kinds[v], placing
        if alike not in choices:
            choices[alike] = tuple(dict.fromkeys([placing, *rng.sample(every, placings)]))
        groups.setdefault((alike, None if rng.random() < together else v), []).append(v)
    free = [FreeValues(tuple(values), choices[alike]) for (alike, _), values in groups.items()]
    return replace(program, given={}, free=tuple(free))


def in_layers(program, layers):
    """The program as one layer of many: each reads what the one before made, if that fits, in place
    of the first value that is given. None if it does not fit.
    """
    first, *weights = program.given
    fitting = [
        v for op in program.ops for v in op.results if program.kinds[v] == program.kinds[first]
    ]
    if not fitting:
        return None
    ops, given, kinds, within = [], {first: program.given[first]}, {}, {}
    fixed, kept, alone = set(), set(), set()
    kinds[first] = program.kinds[first]
    into, numbers = first, len(program.kinds)
    for layer in range(layers):
        number = {v: v + numbers * (layer + 1) for v in program.kinds}
        number[first] = into
        for v in set(program.kinds) - {first}:
            kinds[number[v]] = program.kinds[v]
        given.update({number[v]: program.given[v] for v in weights})
        fixed.update(number[v] for v in program.fixed if v != first)
        kept.update(number[v] for v in program.kept if v != first)
        alone.update(number[v] for v in program.alone if v != first)
        within.update({number[v]: number[u] for v, u in program.within.items()})
        for op in program.ops:
            operands, results = ([number[v] for v in each] for each in (op.operands, op.results))
            kind = None if op.kind is None else (op.kind, layer)
            ops.append(Op(tuple(operands), tuple(results), op.ways, kind, op.as_lies, op.what))
        into = number[fitting[-1]]
    return Program(
        tuple(ops),
        given,
        program.moves,
        kinds,
        frozenset(fixed),
        program.sizes,
        frozenset(kept),
        within,
        frozenset(alone),
    )
