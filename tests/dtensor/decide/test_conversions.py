"""Conversions of what is pending: rounded once, after the reduction, as on one device."""

import pytest
import torch
from op_programs import values
from simulation import distribute, plain, ranks_of
from torch.distributed.tensor import Replicate, Shard

import cute_sharding
from cute_sharding.dtensor.fixes.table import _has_all_of

SMALL = (torch.int8, torch.uint8, torch.int16, torch.float16, torch.bfloat16)
SMALLER = (torch.float8_e4m3fn, torch.float8_e5m2)
LARGE = (torch.int32, torch.int64, torch.float32, torch.float64)


def numbers_of(dtype):
    """All numbers of a small dtype; of a large one the ends, and those around powers of 2."""
    if dtype in (*SMALL, *SMALLER):
        words = torch.int8 if dtype.itemsize == 1 else torch.int16
        ends = torch.iinfo(words)
        numbers = torch.arange(ends.min, ends.max + 1).to(words).view(dtype)
        return numbers if not dtype.is_floating_point else numbers[numbers.float().isfinite()]
    if dtype.is_floating_point:
        ends = torch.finfo(dtype)
        return torch.tensor([0.0, 1 + ends.eps, ends.max, ends.min, ends.tiny], dtype=dtype)
    ends = torch.iinfo(dtype)
    near = [2**k + d for k in range(ends.bits - 1) for d in (-1, 0, 1) if 2**k + d <= ends.max]
    return torch.tensor([ends.min, ends.max, *near], dtype=dtype)


@pytest.mark.one_in(1)
def test_which_dtypes_have_all_numbers_of_another():
    every = (*SMALL, *SMALLER, *LARGE)
    for source in every:
        numbers = numbers_of(source)
        for wanted in every:
            if wanted.is_floating_point or not source.is_floating_point:
                found, given = numbers.to(wanted).tolist(), numbers.tolist()
                same = found == given  # of Python's numbers, which are exact
            else:
                same = False
            assert _has_all_of(wanted, source) == same, (wanted, source)
        assert _has_all_of(source, torch.bool) and not _has_all_of(torch.bool, source)


CONVERSIONS = {
    "to": lambda y: y.to(torch.bfloat16),
    "to, a copy": lambda y: y.to(torch.bfloat16, copy=True),
    "bfloat16": lambda y: y.bfloat16(),
    "half": lambda y: y.half(),
    "type": lambda y: y.type(torch.bfloat16),
    "type_as": lambda y: y.type_as(y.half()),
    "int": lambda y: y.int(),
    "int8": lambda y: (y / 10).to(torch.int8),
    "bool": lambda y: (y - 1).bool(),
    "then a view": lambda y: y.bfloat16().view(-1) * 2,
    "there and back": lambda y: y.half().float(),
    "of a slice": lambda y: y[1:].bfloat16(),
    "copy_": lambda y: torch.empty_like(y, dtype=torch.bfloat16).copy_(y),
    "copy_ to whole": lambda y: torch.zeros_like(y, dtype=torch.int32).copy_(y),
    "truncated": lambda y: torch.div(y, 3, rounding_mode="trunc"),
    "floored": lambda y: torch.div(y, 3, rounding_mode="floor"),
    "floor division": lambda y: y // 3,
    "rounded": lambda y: y.round(),
}
REDUCED = [
    *[
        (dtype, name)
        for dtype in (torch.float32, torch.float64)
        for name in ("sum", "mean", "amax")
    ],
    *[(torch.int64, name) for name in ("sum", "amax")],
]


@pytest.mark.parametrize("flags", [{}, {"redistribution": True, "movement": True}], ids=str)
@pytest.mark.parametrize(("dtype", "reduction"), REDUCED, ids=str)
@pytest.mark.parametrize("name", CONVERSIONS)
def test_what_is_pending_is_rounded_once(name, dtype, reduction, flags):
    convert = CONVERSIONS[name]
    with plain():
        full = (values(8, 6) * 100 + 133.3).to(dtype)
        expected = convert(getattr(full, reduction)(0))
    with ranks_of((4,)), cute_sharding.enabled(**flags):
        pending = getattr(distribute(full, (4,), [Shard(0)]).detach(), reduction)(0)
        assert pending.placements[0].is_partial()
        found = convert(pending).redistribute(placements=[Replicate()]).to_local()
        for got in found._local_tensors.values():
            with plain():
                assert got.dtype == expected.dtype
                exact = expected.dtype not in (torch.float32, torch.float64)
                how = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-5}
                assert torch.allclose(got, expected, **how), f"{got} is not {expected}"


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float64),
        (torch.int32, torch.int64),
        (torch.int16, torch.float32),
        (torch.float32, torch.float32),
    ],
    ids=str,
)
def test_what_loses_nothing_stays_pending(source, wanted):
    with ranks_of((4,)), cute_sharding.enabled():
        x = distribute(values(8, 6).to(source), (4,), [Shard(0)]).detach()
        pending = x.sum(0, dtype=source)
        assert pending.to(wanted).placements[0].is_partial()


def test_the_largest_of_what_is_rounded_alike_stays_pending():
    with ranks_of((4,)), cute_sharding.enabled():
        x = distribute(values(7, 6) * 100, (4,), [Shard(0)]).detach()
        assert x.amax(0).bfloat16().placements[0].is_partial()
        assert not x.long().amax(0).to(torch.int8).placements[0].is_partial()
