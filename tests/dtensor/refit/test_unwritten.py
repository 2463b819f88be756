"""Generators that allocate memory without values: what they leave unwritten is refused, whatever
the memory held, and what they write is a constant.
"""

import random

import pytest
import torch
from drawn_moves import carried_out

from cute_sharding.dtensor.refit.trace import trace
from cute_sharding.relations import NotOnlyMoved

SOURCE = torch.arange(24).reshape(4, 6)


def resized(shape):
    return torch.zeros(0, dtype=torch.int64).resize_(shape)


ALLOCATED = [
    lambda shape: torch.empty(shape, dtype=torch.int64),
    lambda shape: torch.empty_like(torch.zeros(shape, dtype=torch.int64)),
    lambda shape: torch.zeros(2, dtype=torch.int64).new_empty(shape),
    lambda shape: torch.empty_strided(shape, (1, shape[0]), dtype=torch.int64),
    lambda shape: torch.empty(shape[0] * shape[1] + 4, dtype=torch.int64)[2:-2].view(shape),
    resized,
]
WRITES = [
    lambda x, value: x.fill_(value),
    lambda x, value: x.zero_().add_(value),
    lambda x, value: x.copy_(torch.full(x.shape, value)),
    lambda x, value: torch._foreach_copy_([x], [torch.full(x.shape, value)]),
    lambda x, value: torch.full(x.shape, value, out=x) if x.is_contiguous() else x.fill_(value),
]
RESULTS = [
    lambda x, made: torch.cat([x, made]),
    lambda x, made: torch.cat([made[:1], x])[:3],
    lambda x, made: made,
    lambda x, made: torch.stack([x[:1].expand(made.shape), made]),
    lambda x, made: torch.cat([x, made.clone()])[:, ::2],
    lambda x, made: torch.cat([x, made])[: x.shape[0]],
]


def part_of(x, rng):
    for _ in range(rng.randint(0, 2)):
        d, n = rng.randrange(max(x.ndim, 1)), x.shape[:1] and x.shape[0]
        if not n:
            return x
        start = rng.randrange(n)
        x = [
            x.narrow(0, start, rng.randint(1, n - start)),
            x.select(0, start),
            x.transpose(0, d),
            x[start :: rng.randint(1, 2)],
        ][rng.randrange(4)]
    return x


def drawn(seed, held=None):
    """A generator; ``held``: what memory without values holds, by default what it happens to."""

    def generator(w):
        rng = random.Random(seed)

        def allocated():
            made = rng.choice(ALLOCATED)((rng.randint(1, 4), 6))
            return made if held is None else made.fill_(held)

        made, value = allocated(), rng.randint(0, 1)
        for _ in range(rng.randint(0, 5)):
            part = part_of(made, rng)
            if rng.random() < 0.8:
                rng.choice(WRITES)(part, value)
            else:
                other = allocated()
                part.copy_(other.reshape(-1)[0])
        return {"made": rng.choice(RESULTS)(w["w"], made)}

    return generator


def test_drawn_writes():
    refused = 0
    for seed in range(300):
        one, other = (drawn(seed, held)({"w": SOURCE})["made"] for held in (111, -222))
        try:
            found = trace(drawn(seed), {"w": ((4, 6), torch.int64)})
        except NotOnlyMoved:
            refused += 1
            continue
        (made,) = carried_out(found.relation, [SOURCE])
        assert torch.equal(made, one) and torch.equal(made, other), seed
    assert 60 < refused < 200


MADE = {
    "new_empty, of a source": lambda w: torch.cat([w, w.new_empty(2, 6).zero_()]),
    "empty_like, of a source": lambda w: torch.cat([w, torch.empty_like(w).fill_(3)]),
    "row by row": lambda w: torch.cat([w, rows(w)]),
    "cut off": lambda w: torch.cat([w, w.new_empty(2, 6)])[:4],
    "row numbers": lambda w: w[torch.stack([torch.empty(2).fill_(1).long(), torch.ones(2).long()])],
}


def rows(w):
    made = torch.empty(2, 6, dtype=torch.int64)
    for row in made:
        row.fill_(5)
    return made


@pytest.mark.parametrize("name", MADE)
def test_what_is_written_is_taken(name):
    generator = MADE[name]
    found = trace(lambda w: {"made": generator(w["w"])}, {"w": ((4, 6), torch.int64)})
    (made,) = carried_out(found.relation, [SOURCE])
    assert torch.equal(made, generator(SOURCE))


def test_some_elements_are_left():
    def generator(w):
        made = torch.empty(2, 6)
        made[0] = 1
        return {"made": made}

    with pytest.raises(NotOnlyMoved, match=r"'made'.*6 of the 12 elements .* no value"):
        trace(generator, {"w": ((4, 6), torch.float32)})
    with pytest.raises(NotOnlyMoved, match=r"'made': 12 of the 36 elements .* torch.zeros"):
        trace(
            lambda w: {"made": torch.cat([w["w"], torch.Tensor(2, 6)])},
            {"w": ((4, 6), torch.float32)},
        )


def test_values_are_not_read():
    with pytest.raises(NotOnlyMoved, match=r"reads the values of .* 1 of the 1 elements"):
        trace(
            lambda w: {"made": w["w"][int(torch.empty(1)) :]},
            {"w": ((4, 6), torch.float32)},
        )


def test_row_numbers_without_values():
    with pytest.raises(NotOnlyMoved, match=r"row numbers"):
        trace(
            lambda w: {"made": w["w"][torch.empty(2, dtype=torch.int64)]},
            {"w": ((4, 6), torch.float32)},
        )
