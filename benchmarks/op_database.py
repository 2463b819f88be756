"""The operator database that torch tests itself with, on DTensors: placements are drawn, all ranks
are in one process (LocalTensorMode), and what they hold is compared with one device.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch.distributed._local_tensor import LocalTensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from cute_sharding.sharding.rows import rows

RIGHT, WRONG, RAISES = "right", "wrong", "raises"

# Results are drawn, or are memory that nobody has written.
DRAWN = (
    "rand",
    "normal",
    "dropout",
    "empty",
    "bernoulli",
    "multinomial",
    "uniform",
    "rrelu",
    "exponential",
    "cauchy",
    "geometric",
    "log_normal",
    "svd_lowrank",
    "pca_lowrank",
    "multi_head_attention",
)


def database(only: list[str]) -> Iterator[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    for info in op_db:
        if any(word in info.name for word in DRAWN) or (only and info.name not in only):
            continue
        yield info


def dtype_of(info: Any) -> torch.dtype:
    """The first of those that the op has, floating ones first."""
    dtypes = (torch.float64, torch.float32, torch.int64, torch.bool)
    return next(dtype for dtype in dtypes if dtype in info.dtypes or dtype is torch.bool)


def samples_of(
    info: Any,
    gradients: bool,
    rng: random.Random,
    fits: Callable[[list[torch.Tensor]], bool],
    most: int,
    device: str = "cpu",
) -> list[Any]:
    """About ``most`` of the op's own inputs whose tensors fit, in a drawn order."""
    torch.manual_seed(0)
    found = []
    for i, sample in enumerate(info.sample_inputs(device, dtype_of(info), requires_grad=gradients)):
        tensors = leaves_of((sample.input, sample.args, sample.kwargs))
        if fits(tensors) and not sample.kwargs.get("dropout_p"):  # what is dropped is drawn, too
            found.append(sample)
        if len(found) > most or i > 10 * most:
            break
    rng.shuffle(found)
    return found


def cut_of(p: Any) -> Any:
    return (p.dim, getattr(p, "split_factor", 1)) if isinstance(p, (Shard, _StridedShard)) else None


def drawn(
    rng: random.Random,
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    kind: str,
    dtype: torch.dtype = torch.float32,
) -> list[Any] | None:
    """Placements of a kind for a tensor; None where there are none.

    - "even": Shard where sizes divide. "uneven": Shard of any dim
    - "strided": _StridedShard. "nested": the same and Shard, of one dim on all mesh dims
    - "pending": a sum over one mesh dim, and _StridedShard on the others
    """
    dims = [d for d, n in enumerate(shape) if kind != "even" or (n and n % prod(sizes) == 0)]
    if kind == "nested":
        dims = [rng.choice(dims)] if dims else []
    pending = rng.randrange(len(sizes)) if kind == "pending" and rng.random() < 0.85 else None
    result: list[Any] = []
    for m in range(len(sizes)):
        if m == pending:
            result.append(Replicate() if dtype is torch.bool else Partial("sum"))
        elif not dims or rng.random() < 0.15:
            result.append(Replicate())
        elif kind in ("even", "uneven") or (kind == "nested" and rng.random() < 0.4):
            result.append(Shard(rng.choice(dims)))
        else:
            result.append(_StridedShard(rng.choice(dims), split_factor=rng.choice((2, 2, 3, 5))))
    return result


def is_drawn(placements: Any) -> bool:
    """Whether some of them are not Replicate."""
    return any(not isinstance(p, Replicate) for p in placements or ())


def coordinate_of(rank: int, sizes: tuple[int, ...]) -> list[int]:
    result: list[int] = []
    for n in reversed(sizes):
        result.insert(0, rank % n)
        rank //= n
    return result


def contribution(
    full: torch.Tensor, placements: Any, sizes: tuple[int, ...], rank: int
) -> torch.Tensor:
    """What a rank adds to a tensor that is pending on one mesh dim: some of its elements, so that
    the sum is exact. Of another tensor all of it.
    """
    generator = torch.Generator().manual_seed(full.numel())
    for p, n, k in zip(placements, sizes, coordinate_of(rank, sizes)):
        if isinstance(p, Partial):
            owner = torch.randint(n, full.shape, generator=generator).to(full.device)
            return torch.where(owner == k, full, torch.zeros_like(full))
    return full


def local_of(
    full: torch.Tensor, placements: Any, sizes: tuple[int, ...], rank: int
) -> torch.Tensor:
    """What a rank holds of a tensor, by index arrays."""
    coordinate = coordinate_of(rank, sizes)
    for d in range(full.ndim):
        chain = [
            (cut_of(p)[1], n, k)
            for p, n, k in zip(placements, sizes, coordinate)
            if cut_of(p) is not None and cut_of(p)[0] == d
        ]
        if chain:
            index = [
                row for start, stop in rows(full.shape[d], chain) for row in range(start, stop)
            ]
            full = full.index_select(d, torch.tensor(index, device=full.device, dtype=torch.long))
    return full.contiguous()


def distributed(full: torch.Tensor, mesh: Any, placements: Any) -> Any:
    sizes = tuple(mesh.shape)
    with _disable_current_modes():
        plain = full.detach()
        parts = {
            rank: local_of(
                contribution(plain, placements, sizes, rank), placements, sizes, rank
            ).clone()
            for rank in range(prod(sizes))
        }
    spec = DTensorSpec(
        mesh,
        tuple(placements),
        TensorMeta(full.shape, full.contiguous().stride(), full.dtype),
        use_strided_shard_as_shard_order=False,
    )
    return DTensor(LocalTensor(parts), spec, requires_grad=full.requires_grad)


def whole(tensor: DTensor) -> torch.Tensor:
    """The tensor that a DTensor stands for, on one device, put together row by row; ranks that hold
    the same rows must agree.
    """
    spec = tensor._spec
    if any(p.is_partial() for p in spec.placements):
        tensor = tensor.redistribute(
            placements=[Replicate() if p.is_partial() else p for p in spec.placements]
        )
        spec = tensor._spec
    sizes = tuple(spec.mesh.shape)
    local = tensor._local_tensor
    if hasattr(local, "wait"):
        local = local.wait()
    with _disable_current_modes():
        index = torch.arange(max(prod(spec.shape), 0)).reshape(tuple(spec.shape))
        unset = False if tensor.dtype is torch.bool else -77
        result = torch.full((index.numel(),), unset, device=tensor.device, dtype=tensor.dtype)
        for rank in range(prod(sizes)):
            part = (
                local._local_tensors[rank].detach()
                if hasattr(local, "_local_tensors")
                else local.detach()
            )
            mine = local_of(index, spec.placements, sizes, rank)
            if tuple(mine.shape) != tuple(part.shape):
                raise AssertionError(
                    f"rank {rank} holds {tuple(part.shape)} for {tuple(mine.shape)} of "
                    f"{spec.placements}"
                )
            result[mine.reshape(-1)] = part.reshape(-1)
        for rank in range(prod(sizes)):
            part = (
                local._local_tensors[rank].detach()
                if hasattr(local, "_local_tensors")
                else local.detach()
            )
            mine = local_of(index, spec.placements, sizes, rank)
            if not same(result[mine.reshape(-1)], part.reshape(-1)):
                raise AssertionError("replicas differ")
        return result.reshape(tuple(spec.shape))


def same(x: torch.Tensor, y: torch.Tensor) -> bool:
    with _disable_current_modes():
        if hasattr(x, "_local_tensors"):
            return all(same(part, y) for part in x._local_tensors.values())
        return alike(x, y)


def alike(x: torch.Tensor, y: torch.Tensor) -> bool:
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if x.is_floating_point() or x.is_complex():
        return torch.allclose(x, y, rtol=1e-4, atol=1e-5, equal_nan=True)
    return torch.equal(x, y)


def leaves_of(value: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]


def run(
    op: Callable[..., Any], args: Any, kwargs: Any, gradients: bool
) -> tuple[list[Any], list[Any]]:
    """The results, and the gradients of the floating inputs."""
    results = leaves_of(op(*args, **kwargs))
    if not gradients:
        return results, []
    return results, gradients_of(results, leaves_of((args, kwargs)))


def gradients_of(results: list[Any], inputs: list[Any]) -> list[Any]:
    """Of the sum of all results, for each of ``inputs`` that wants one; none where nothing does."""
    roots = [y for y in results if y.requires_grad and y.numel()]
    leaves = [x for x in inputs if x.requires_grad]
    if not roots or not leaves:
        return []
    sums = [y.sum() if not y.is_complex() else torch.view_as_real(y).sum() for y in roots]
    return list(torch.autograd.grad(sums, leaves, allow_unused=True))


class TooLong(BaseException):
    """Not an Exception: torch goes on after those."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TooLong(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def outcome(program: Callable[[], tuple[list[Any], list[Any]]], expected: Any) -> tuple[str, str]:
    """What becomes of a program, and why: it gives results and gradients, and ``expected`` are
    those of :func:`on_one_device`.
    """
    try:
        results, grads = program()
    except (Exception, TooLong) as error:
        return RAISES, f"{type(error).__name__}: {str(error)[:400]}"
    try:
        for x, y in zip((*results, *grads), (*expected[0], *expected[1]), strict=True):
            if (x is None) != (y is None):
                return WRONG, "a gradient is missing"
            if x is not None and not same(
                whole(x) if isinstance(x, DTensor) else x.detach(), y.detach()
            ):
                return WRONG, f"{getattr(x, 'placements', None)}"
    except AssertionError as error:
        return WRONG, f"AssertionError: {str(error)[:200]}"
    except Exception as error:
        return RAISES, f"{type(error).__name__}: {str(error)[:200]}"
    return RIGHT, ""


def on_one_device(info: Any, args: Any, kwargs: Any, gradients: bool) -> Any | None:
    """Results and gradients; None where the op raises, or gives another result each time."""
    try:
        expected, again = (run(info.op, args, kwargs, gradients) for _ in range(2))
        pairs = zip((*expected[0], *expected[1]), (*again[0], *again[1]))
        twice = [(x.detach(), y.detach()) for x, y in pairs if x is not None]
        return expected if all(alike(x, y) for x, y in twice) else None
    except Exception:  # also of sparse results, which cannot be compared
        return None
