"""What comes of a case on a mesh: one line of the golden table."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from golden.cases import MESHES, PLACEMENTS, Case, case_of, placements
from simulation import distribute, ranks_of
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import cute_sharding
from benchmarks.received import FROM_OTHERS, Received

# An error is told by its first words: what follows may name lines and addresses.
WORDS = 10


def lines_of(name: str) -> list[str]:
    """All lines of a case, headed by its name, its tensors, and the ops that it comes to."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            case = case_of(name)
        except Exception as error:
            return [f"{name}: no sample: {first_words(error)}"]
        if case is None:
            return [f"{name}: no sample with dense tensors"]
        shapes = ", ".join(
            f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in case.tensors()
        )
        found, ops = [], set()
        # Switching on empties the caches: what is found does not depend on the cases before.
        with cute_sharding.enabled(redistribution=True, movement=True):
            for mesh in MESHES:
                with ranks_of(mesh):
                    found += [line(case, mesh, way, ops) for way in PLACEMENTS]
    return ["; ".join([f"{name}: {shapes}", *([", ".join(sorted(ops))] if ops else [])]), *found]


def line(case: Case, mesh: tuple[int, ...], way: str, ops: set[str]) -> str:
    """What comes of it; the ops on DTensors are put in ``ops``."""
    given = [placements(way, i, x, mesh) for i, x in enumerate(case.tensors())]
    start = f"  {'x'.join(map(str, mesh))} {way}: {', '.join(map(text, given))} -> "
    try:
        return start + told(case, mesh, given, ops)
    except Exception as error:  # ops refuse in many ways
        return f"{start}{type(error).__name__}: {first_words(error)}"


def told(case: Case, mesh: tuple[int, ...], given: list[list[Any]], ops: set[str]) -> str:
    """Placements of the results, what was communicated for them; and the same of the gradients."""
    flat, tree = tree_flatten((case.args, case.kwargs))
    remaining, with_gradients = iter(given), case.gradients and mesh == MESHES[0]
    leaves = [
        distribute(
            x,
            mesh,
            next(remaining),
            requires_grad=with_gradients and (x.is_floating_point() or x.is_complex()),
        )
        if isinstance(x, torch.Tensor)
        else x
        for x in flat
    ]
    args, kwargs = tree_unflatten(leaves, tree)
    with recorded(ops) as forward:
        results = [y for y in tree_leaves(case.function(*args, **kwargs)) if is_tensor(y)]
    found = f"{listed(results) or 'none'}{cost(forward)}"
    roots = [y for y in results if y.requires_grad]
    wanted = [x for x in leaves if is_tensor(x) and x.requires_grad]
    if not roots or not wanted:
        return found
    try:
        ones = [torch.ones_like(y) for y in roots]
        with recorded(ops) as backward:
            gradients = torch.autograd.grad(roots, wanted, ones, allow_unused=True)
    except Exception as error:
        return f"{found}; gradients: {type(error).__name__}: {first_words(error)}"
    return f"{found}; gradients: {listed(gradients)}{cost(backward)}"


@contextmanager
def recorded(ops: set[str]) -> Iterator[Received]:
    received = Received()
    try:
        with received:
            yield received
    finally:
        ops.update(received.ops)


def is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def cost(received: Received) -> str:
    """The collectives, and what the busiest rank receives; nothing where there are none."""
    if not received.collectives:
        return ""
    many = ", ".join(f"{n} {name}" for name, n in sorted(received.collectives.items()))
    uncounted = "".join(" + ?" for name in received.collectives if name not in FROM_OTHERS)
    return f" ({many}: {max(received.bytes_by_rank.values(), default=0)}{uncounted} B)"


def listed(tensors: Any) -> str:
    """How they lie, one after the other; those in a row that lie alike once, with their number."""
    runs = [(how, len(list(alike))) for how, alike in groupby(map(lying, tensors))]
    return ", ".join(how if n == 1 else f"{n} x {how}" for how, n in runs)


def lying(x: Any) -> str:
    if x is None:
        return "none"
    return text(x.placements) if isinstance(x, DTensor) else "plain"


def text(placements: Any) -> str:
    return "".join(map(short, placements))


def short(p: Any) -> str:
    if isinstance(p, Replicate):
        return "R"
    if isinstance(p, Partial):
        # Some reductions carry an object beside the name.
        op = re.sub(r"0x[0-9a-f]+", "", str(getattr(p, "reduce_op", "")))
        return "P" if op == "sum" and type(p) is Partial else f"P({op})"
    factor = getattr(p, "split_factor", None)
    return f"S{p.dim}" if factor is None else f"S({p.dim},{factor})"


def first_words(error: Exception) -> str:
    words = re.sub(r"0x[0-9a-f]+", "0x", str(error)).split()
    return " ".join(words[:WORDS])
