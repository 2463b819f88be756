"""Movement ops of real models on sharded dims, by torch and here: time, bytes received, memory.

python -m benchmarks.movement             # 4 processes over gloo, tensors of 64 MB
python -m benchmarks.movement --megabytes 1 --repeats 1   # quickly

PyTorch's column is measured in processes that never import the package, in turn with ours.

Time is that of the slowest rank, the least of several runs; bytes are what the busiest rank
receives; memory is the most that a rank's process has beyond what it had before (Linux).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from math import isclose, prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard as Strided
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.sides import Side, torch_alone, with_flags
from benchmarks.timing import geometric_mean

WORLD = 4


class Pattern(NamedTuple):
    """What is run, on a tensor of that shape (of 2**24 elements) and those placements, and on the
    tensors that ``beside`` makes for it, before time is taken.
    """

    name: str
    shape: tuple[int, ...]
    placement: Placement
    run: Callable[..., Any]
    beside: Callable[[DTensor], tuple[DTensor, ...]] = lambda x: ()
    dtype: torch.dtype = torch.float32


def _rotated(x: DTensor) -> DTensor:
    one, other = x.chunk(2, -1)
    return torch.cat([-other, one], -1)


def _shifted(x: DTensor) -> DTensor:
    return x.roll((-3, -3), (1, 2))


def _with_new_token(cache: DTensor) -> DTensor:
    new = torch.zeros(*cache.shape[:2], 1, cache.shape[3])
    mesh = cache.device_mesh
    return torch.cat([cache, DTensor.from_local(new, mesh, [Replicate()], run_check=False)], 2)


def _windows(x: DTensor) -> DTensor:
    """What a causal convolution of 4 steps reads."""
    return F.pad(x, (0, 0, 3, 0)).unfold(1, 4, 1)


SEQUENCE = (8, 2048, 1024)
PATTERNS = (
    Pattern("next tokens x[:, 1:]", SEQUENCE, Shard(1), lambda x: x[:, 1:]),
    Pattern("all but the last x[:, :-1]", SEQUENCE, Shard(1), lambda x: x[:, :-1]),
    Pattern("last token x[:, -1]", SEQUENCE, Shard(1), lambda x: x[:, -1]),
    Pattern("first half x[:, :n / 2]", SEQUENCE, Shard(1), lambda x: x[:, : x.shape[1] // 2]),
    Pattern("fused QKV, chunk", SEQUENCE, Strided(2, split_factor=4), lambda x: x.chunk(4, 2)),
    Pattern("fused gate and up", SEQUENCE, Strided(2, split_factor=2), lambda x: x.chunk(2, 2)),
    Pattern("QKV cut plainly, chunk", SEQUENCE, Shard(2), lambda x: x.chunk(4, 2)),
    Pattern("RoPE, halves rotated", SEQUENCE, Shard(2), _rotated),
    Pattern(
        "shifted windows, roll", (8, 64, 64, 512), Shard(1), lambda x: x.roll((-3, -3), (1, 2))
    ),
    Pattern("KV cache, cat", (4, 16, 2048, 128), Shard(2), _with_new_token),
    Pattern("causal windows, pad and unfold", SEQUENCE, Shard(1), _windows),
    Pattern("reversed sequence, flip", SEQUENCE, Shard(1), lambda x: x.flip(1)),
    Pattern("causal mask, tril", (4096, 4096), Shard(0), lambda x: x.tril()),
)


class Received(TorchDispatchMode):
    """Counts the bytes that collectives bring to this rank from others."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func.namespace == "_c10d_functional":
            width, me = args[0].element_size(), dist.get_rank()
            if func._opname == "all_gather_into_tensor":
                self.bytes += args[0].numel() * width * (args[1] - 1)
            elif func._opname == "all_to_all_single":
                self.bytes += sum(n for k, n in enumerate(args[1]) if k != me) * width
            elif func._opname == "all_reduce":
                self.bytes += 2 * args[0].numel() * width * (WORLD - 1) // WORLD
            elif func._opname == "reduce_scatter_tensor":
                self.bytes += args[0].numel() * width * (WORLD - 1) // WORLD
        return func(*args, **(kwargs or {}))


class Measured(NamedTuple):
    """Of the slowest or busiest rank; seconds, bytes, bytes; and whether the values are ours."""

    seconds: float
    received: int
    memory: int
    is_right: bool


def _waited(results: Any) -> None:
    for result in results if isinstance(results, (list, tuple)) else [results]:
        local = result.to_local()
        getattr(local, "wait", lambda: None)()


def _peak() -> int:
    """The most memory that this process has had since :func:`_forget_peak`, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


# What a process keeps between calls: the pattern and its tensors.
_now: dict[str, Any] = {}


def _begin(module: str, name: str, megabytes: float) -> tuple[int, list[float]] | str:
    """The bytes that this rank receives, and numbers that stand for the values of the results; or
    the error that PyTorch raises.
    """
    torch.manual_seed(dist.get_rank())
    pattern = next(each for each in import_module(module).PATTERNS if each.name == name)
    x = _local(pattern, init_device_mesh("cpu", (WORLD,)), megabytes)
    given = x, *pattern.beside(x)
    _now.update(run=pattern.run, given=given)
    try:
        with Received() as received:
            results = pattern.run(*given)
            _waited(results)
        several = results if isinstance(results, (list, tuple)) else [results]
        values = [float(_weighted(each.full_tensor().double().reshape(-1))) for each in several]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return received.bytes, values


def _weighted(values: torch.Tensor) -> torch.Tensor:
    return (values * torch.arange(len(values)).remainder(97)).mean()


def _time_once() -> tuple[float, int]:
    """The seconds of one run, and the bytes of memory that this process has had beside."""
    _forget_peak()
    before = _peak()
    dist.barrier()
    begin = time.perf_counter()
    _waited(_now["run"](*_now["given"]))
    return time.perf_counter() - begin, _peak() - before


def _local(pattern: Pattern, mesh: DeviceMesh, megabytes: float) -> DTensor:
    d = pattern.placement.dim  # type: ignore[attr-defined]
    first = max(int(pattern.shape[0] * megabytes / 64), 1)
    if d == 0:
        first = -(-first // WORLD) * WORLD  # the same for every rank
    shape = (first, *pattern.shape[1:])
    local = list(shape)
    local[d] //= WORLD
    size, stride = torch.Size(shape), tuple([prod(shape[k + 1 :]) for k in range(len(shape))])
    given = torch.rand(local, dtype=pattern.dtype)
    placements = [pattern.placement]
    return DTensor.from_local(given, mesh, placements, run_check=False, shape=size, stride=stride)


def _compare(
    module: str, pattern: Pattern, sides: Sequence[Side], options: Any
) -> list[Measured | None]:
    """What each side takes; None where PyTorch raises."""
    begun = [side.call(_begin, module, pattern.name, options.megabytes)[0] for side in sides]
    assert not isinstance(begun[1], str), (pattern.name, begun[1])
    found: list[list[tuple[float, int]]] = [[], []]
    for _ in range(options.repeats):
        for k, side in enumerate(sides):
            if not isinstance(begun[k], str):
                seconds, memory = zip(*side.call(_time_once))
                found[k].append((max(seconds), max(memory)))
    is_right = not isinstance(begun[0], str) and all(
        isclose(*pair, rel_tol=1e-2, abs_tol=1e-6) for pair in zip(begun[0][1], begun[1][1])
    )
    return [
        Measured(min(s for s, _ in some), got[0], max(m for _, m in some), is_right or k == 1)
        if some
        else None
        for k, (some, got) in enumerate(zip(found, begun))
    ]


def _line(name: str, stock: Measured | None, ours: Measured) -> str:
    def pair(a: float | None, b: float, digits: int) -> str:
        return f"{'raises' if a is None else f'{a:.{digits}f}':>10}{b:9.{digits}f}"

    mega = 1 << 20
    return (
        f"{name:30}"
        + pair(stock and stock.seconds, ours.seconds, 4)
        + pair(stock and stock.received / mega, ours.received / mega, 2)
        + pair(stock and stock.memory / mega, ours.memory / mega, 0)
        + ("" if stock is None or stock.is_right else "   torch gives other values")
    )


def compare(
    module: str, patterns: Sequence[Pattern], flags: Mapping[str, str], description: str
) -> None:
    """Prints a line for each of a module's patterns."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--megabytes", type=float, default=64, help="of each tensor")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=[], help="patterns with such words")
    options = parser.parse_args()
    print(f"{'':32}{'seconds':>17}{'MB received':>19}{'MB more held':>19}")
    print(f"{'':32}{'torch':>8}{'here':>9}{'torch':>10}{'here':>9}{'torch':>10}{'here':>9}")
    ratios = []
    with torch_alone(WORLD) as torchs, with_flags(flags, WORLD) as here:
        for pattern in patterns:
            if options.only and not any(word in pattern.name for word in options.only):
                continue
            stock, ours = _compare(module, pattern, (torchs, here), options)
            assert ours is not None
            if stock is not None and stock.is_right:
                ratios.append(ours.seconds / stock.seconds)
            print(_line(pattern.name, stock, ours), flush=True)
    print(f"time here / torch: geometric mean {geometric_mean(ratios):.3f}, most {max(ratios):.3f}")


def main() -> None:
    flags = {"USE_CUTE_VIEW_PROPAGATION": "1", "USE_CUTE_MOVEMENT": "1"}
    compare("benchmarks.movement", PATTERNS, flags, __doc__)


if __name__ == "__main__":
    main()
