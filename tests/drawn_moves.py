"""Programs that only move elements, drawn: trees of views, permutes, slices, cats, expands and so
on. Each step is done on tensors by torch, and is a relation by the tables.
"""

import random
from itertools import product
from math import prod
from typing import NamedTuple

import torch

from cute_sharding.relations import Relation, beside, compose
from cute_sharding.relations.table import relation_of

MOST = 600  # elements of a tensor


class Step(NamedTuple):
    """One op on tensors of a pool, of whose results one is put into it."""

    op: str
    operands: tuple
    args: tuple
    result: int = 0


# What torch does, given the operands and the arguments of a row of the tables.
DONE = {
    "Tensor.view": lambda x, shape: x.reshape(shape),
    "torch.permute": lambda x, dims: x.permute(dims),
    "torch.unsqueeze": lambda x, d: x.unsqueeze(d),
    "torch.squeeze": lambda x: x.squeeze(),
    "Tensor.expand": lambda x, shape: x.expand(shape),
    "Tensor.repeat": lambda x, times: x.repeat(times),
    "Tensor.__getitem__": lambda x, d, a, b, s: x[(slice(None),) * d + (slice(a, b, s),)],
    "torch.select": lambda x, d, i: x.select(d, i),
    "torch.roll": torch.roll,
    "torch.flip": torch.flip,
    "torch.nn.functional.pad": lambda x, pads, value: torch.nn.functional.pad(x, pads, value=value),
    "torch.split": lambda x, n, d: x.split(n, d),
    "Tensor.unfold": lambda x, d, n, s: x.unfold(d, n, s),
    "torch.diagonal": torch.diagonal,
    "torch.cat": lambda *given: torch.cat(given[:-1], given[-1]),
}
VIEWS = ("Tensor.view", "torch.permute", "torch.unsqueeze", "torch.squeeze", "Tensor.expand")
VIEWS += ("Tensor.repeat",)


def sizes_of(rng, n):
    """Some shape of n elements."""
    if n == 0:
        return tuple(rng.choice([(0,), (3, 0), (0, 2)]))
    sizes = []
    while n > 1 and len(sizes) < 4:
        k = rng.choice([k for k in range(2, n + 1) if n % k == 0])
        sizes.append(k)
        n //= k
    return (*sizes, *([n] if n > 1 else []))


def _slice(rng, x, d):
    a = rng.randrange(0, max(x[d], 1))
    return d, a, rng.randint(a, x[d]) if rng.random() < 0.5 else x[d], rng.choice([1, 1, 2, 3])


# How arguments are drawn, for a tensor of that shape and one of its dims; None: not for such a one.
DRAWN = {
    "Tensor.view": lambda rng, x, d: (sizes_of(rng, prod(x)),),
    "torch.permute": lambda rng, x, d: (tuple(rng.sample(range(len(x)), len(x))),),
    "torch.unsqueeze": lambda rng, x, d: (rng.randint(0, len(x)),),
    "torch.squeeze": lambda rng, x, d: () if 1 in x else None,
    "Tensor.expand": lambda rng, x, d: (
        (tuple(rng.choice([2, 3]) if n == 1 else n for n in x),) if 1 in x else None
    ),
    "Tensor.repeat": lambda rng, x, d: (tuple(rng.choice([1, 1, 2, 3]) for _ in x),),
    "Tensor.__getitem__": _slice,
    "torch.select": lambda rng, x, d: (d, rng.randrange(x[d])) if x[d] else None,
    "torch.roll": lambda rng, x, d: ([rng.randint(-9, 9)], [d]),
    "torch.flip": lambda rng, x, d: ([d] if rng.random() < 0.6 else [*range(len(x))],),
    "torch.nn.functional.pad": lambda rng, x, d: (
        [0, 0] * (len(x) - 1 - d) + [rng.randint(-min(x[d], 1), 3), rng.randint(0, 2)],
        -rng.randint(1, 3),
    ),
    "torch.split": lambda rng, x, d: (rng.randint(1, x[d]), d) if x[d] else None,
    "Tensor.unfold": lambda rng, x, d: (
        (d, rng.randint(1, x[d]), rng.choice([1, 2, 3])) if x[d] and len(x) < 4 else None
    ),
    "torch.diagonal": lambda rng, x, d: (
        (rng.randint(-2, 2), *rng.sample(range(len(x)), 2)) if len(x) > 1 else None
    ),
    "torch.cat": lambda rng, x, d: (d,),
}
OFTEN = ("Tensor.view", "torch.permute", "torch.cat", "Tensor.__getitem__", "torch.unsqueeze")


def drawn_step(rng, shapes, ops=tuple(DRAWN)):
    """A step on tensors of those shapes, preferably the last of them; None: none was found."""
    for _ in range(60):
        op = rng.choice(ops if rng.random() < 0.5 else [op for op in OFTEN if op in ops])
        at = len(shapes) - 1 if rng.random() < 0.6 else rng.randrange(len(shapes))
        x = shapes[at]
        args = DRAWN[op](rng, x, rng.randrange(len(x))) if x else None
        if args is None:
            continue
        operands = (at,)
        if op == "torch.cat":
            d = args[0]
            alike = [k for k, y in enumerate(shapes) if _but_for(x, d) == _but_for(y, d)]
            operands = (at, *rng.choices(alike, k=rng.randint(1, 2)))
        found = [tuple(y.shape) for y in done(Step(op, operands, args), shapes_as_tensors(shapes))]
        k = rng.randrange(len(found))
        if prod(found[k]) <= MOST and len(found[k]) <= 5:
            return Step(op, operands, args, k)
    return None


def _but_for(shape, d):
    return len(shape) > d and (*shape[:d], *shape[d + 1 :])


def shapes_as_tensors(shapes):
    return [torch.empty(shape, device="meta") for shape in shapes]


def done(step, tensors):
    """What torch makes of the tensors."""
    found = DONE[step.op](*[tensors[k] for k in step.operands], *step.args)
    return list(found) if isinstance(found, (tuple, list)) else [found]


def relation_of_step(step, shapes):
    """The relation of a step by itself, of its operands."""
    given = [shapes[k] for k in step.operands]
    if step.op in VIEWS:
        return relation_of(step.op, given[0], *step.args)
    return relation_of(step.op, given if step.op == "torch.cat" else given[0], *step.args)


class Program(NamedTuple):
    """Sources of those shapes, steps, and which tensors of the pool are the results."""

    shapes: tuple
    steps: tuple
    results: tuple

    def __call__(self, tensors):
        pool = list(tensors)
        for step in self.steps:
            pool.append(done(step, pool)[step.result])
        return [pool[k] for k in self.results]

    def relation(self):
        """The whole, composed step by step."""
        sources = Relation.same(*self.shapes)
        pool = [sources.of(k) for k in range(len(self.shapes))]
        for step in self.steps:
            given = beside([pool[k] for k in step.operands])
            whole = compose(given, relation_of_step(step, [r.outputs[0] for r in pool]))
            pool.append(whole.of(step.result))
        return beside([pool[k] for k in self.results])


def drawn_program(seed, depth=(3, 12), **options):
    rng = random.Random(seed)
    shapes = [
        tuple(rng.choice([1, 2, 3, 4, 5, 6, 7, 8, 12]) for _ in range(rng.choice([1, 2, 2, 3])))
        for _ in range(rng.randint(1, 3))
    ]
    sources, steps = tuple(shapes), []
    for _ in range(rng.randint(*depth)):
        step = drawn_step(rng, shapes, **options)
        if step is not None:
            steps.append(step)
            found = done(step, shapes_as_tensors(shapes))[step.result]
            shapes.append(tuple(found.shape))
    last = len(shapes) - 1
    others = [k for k in range(len(sources), last) if rng.random() < 0.2]
    return Program(sources, tuple(steps), (*others, last))


# -- counted out -----------------------------------------------------------------------------------


def numbered(shapes):
    """Tensors in which no number stands twice."""
    found, first = [], 0
    for shape in shapes:
        found.append(torch.arange(first, first + prod(shape)).reshape(shape))
        first += prod(shape)
    return found


def elements_of(piece):
    """(element of the source, element of the target) of a piece, one by one."""
    for turns in product(*(range(n) for n, _, _ in piece.modes)):
        yield (
            piece.x + sum(i * dx for i, (_, dx, _) in zip(turns, piece.modes)),
            piece.y + sum(i * dy for i, (_, _, dy) in zip(turns, piece.modes)),
        )


def counted_out(relation):
    """Of each result and element which (operand, element) it is, or which (None, value)."""
    found = {}
    for piece in relation.pieces:
        for x, y in elements_of(piece):
            assert (piece.target, y) not in found, "an element is said twice"
            constant = piece.source < 0
            found[piece.target, y] = (
                (None, relation.constants[-1 - piece.source]) if constant else (piece.source, x)
            )
    return found


def carried_out(relation, tensors, nothing=None):
    """The results, of those operands; ``nothing`` where the relation does not say."""
    given = [tensor.reshape(-1).tolist() for tensor in tensors]
    results = [torch.full(shape, -99) for shape in relation.outputs]
    flat = [result.view(-1) for result in results]
    said = counted_out(relation)
    for (k, y), (source, x) in said.items():
        flat[k][y] = x if source is None else given[source][x]
    assert nothing is not None or len(said) == sum(r.numel() for r in results)
    return results
