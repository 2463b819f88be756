"""Drawn programs, a view and then an op of torch's operator database, on stock and with each of the
flags: is any worse with them?

    python -m benchmarks.programs [--samples 2] [--mesh 2 2] [--seed 0] [--part 0 2] [--only NAME]
        [--between] [--itself] [--kinds strided nested] [--device cuda]

Each tensor that an op is given is a view of one that is cut at random, of another shape; with
``--between``, that view moved to and fro, or written to by its slices. Forward and backward, all
ranks in one process (LocalTensorMode), against one device. Where stock is right, so must be each
setting; a program that raises on stock may do anything but give wrong data. What is received, but
for single numbers, is
counted twice: by the program itself, and with what makes its results and gradients whole, where a
result that is cut costs a gather that a replica does not.
"""

from __future__ import annotations

import argparse
import random
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from math import prod
from statistics import geometric_mean
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

import cute_sharding
from benchmarks.op_database import (
    RIGHT,
    WRONG,
    alike,
    database,
    distributed,
    drawn,
    gradients_of,
    leaves_of,
    limited,
    on_one_device,
    outcome,
    run,
    samples_of,
)

SETTINGS: dict[str, dict[str, Any]] = {
    "views": {},
    "both": {"redistribution": True},
    "gate": {"ops": False},
    "everything": {"redistribution": True, "movement": True},
    "movement": {"movement": True},
}


def halved(x: torch.Tensor, d: int) -> list[torch.Tensor]:
    return [x.narrow(d, 0, x.shape[d] // 2), x.narrow(d, x.shape[d] // 2, -(-x.shape[d] // 2))]


def written(x: torch.Tensor, d: int) -> torch.Tensor:
    """The same, by writes to its halves."""
    other = -x
    kept = halved(other, d)
    for part in halved(other, d):
        part.neg_()
    return (other + torch.cat(kept, d)) / 2


# Where torch derives a rule by trying placements, it may do so for hours.
SECONDS = 30

# What leaves a tensor as it is: (the tensor, a dim).
BETWEEN: tuple[Callable[[torch.Tensor, int], torch.Tensor], ...] = (
    lambda x, d: x,
    lambda x, d: torch.cat(x.chunk(2, d), d),
    lambda x, d: torch.cat(halved(x, d), d),
    lambda x, d: x.roll(1, d).roll(-1, d),
    lambda x, d: x.flip(d).flip(d),
    lambda x, d: torch.stack(x.unbind(d), d),
    written,
)


def source_shape(rng: random.Random, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape of as many elements: neighbouring dims are merged, or a dim is taken apart."""
    dims = list(shape)
    for _ in range(rng.randint(1, 2)):
        splits = [
            (i, f) for i, n in enumerate(dims) for f in (2, 3, 5) if n and n % f == 0 and n > f
        ]
        if dims and rng.random() < 0.5 and len(dims) > 1:
            i = rng.randrange(len(dims) - 1)
            dims[i : i + 2] = [dims[i] * dims[i + 1]]
        elif splits:
            i, f = rng.choice(splits)
            dims[i : i + 1] = [f, dims[i] // f] if rng.random() < 0.5 else [dims[i] // f, f]
        elif len(dims) > 1:
            i = rng.randrange(len(dims) - 1)
            dims[i : i + 2] = [dims[i] * dims[i + 1]]
    return tuple(dims)


NOT_RECEIVING = ("wait_tensor", "_wrap_tensor_autograd", "mesh_get_process_group")


def of_rank_0(n: Any) -> int:
    return n.node._local_ints[0] if isinstance(n, torch.SymInt) else n


class Received(TorchDispatchMode):
    """Counts the bytes that rank 0 receives in collectives, but for single numbers: results without
    dims are finished at once with views on, and never on stock where nobody reads them, as here the
    sum that gradients are of.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        name = func._opname
        is_number = name == "all_reduce" and isinstance(args[0], torch.Tensor) and not args[0].ndim
        if is_number:
            self.numbers += 1
        elif func.namespace in ("_c10d_functional", "_dtensor") and name not in NOT_RECEIVING:
            given, got = (
                sum(self.size(x) for x in leaves_of(value)) for value in (args[:1], result)
            )
            if "gather" in name:
                self.bytes += got - given
            elif "scatter" in name:
                self.bytes += given - got
            elif name == "shard_dim_alltoall":
                self.bytes += (
                    got - got // dist.distributed_c10d._resolve_process_group(args[3]).size()
                )
            elif name == "all_to_all_single":
                group = dist.distributed_c10d._resolve_process_group(args[3])
                splits = [of_rank_0(n) for n in args[1]]
                own = splits[dist.get_group_rank(group, 0)]
                self.bytes += got - own * got // max(sum(splits), 1)
            else:
                self.bytes += got
        return result

    @staticmethod
    def size(x: Any) -> int:
        return int((x._local_tensors[0] if hasattr(x, "_local_tensors") else x).nbytes)


def on_mesh(
    op: Any,
    args: Any,
    kwargs: Any,
    plan: list[Any],
    mesh: Any,
    gradients: bool,
    written: Iterable[int] = (),
) -> tuple[list[Any], list[Any]]:
    """Results and gradients of the op on views of tensors of those shapes and placements; the
    gradients are of these tensors. To the results belong the tensors that are ``written`` to, by
    position.
    """
    flat, tree = tree_flatten((args, kwargs))
    remaining = iter(plan)
    leaves, given = [], []
    for x in flat:
        if not isinstance(x, torch.Tensor):
            given.append(x)
            continue
        shape, placements, between = next(remaining)
        leaf = distributed(
            x.detach().reshape(shape).requires_grad_(x.requires_grad), mesh, placements
        )
        leaves.append(leaf)
        view = leaf.view(x.shape) if tuple(x.shape) != tuple(shape) else leaf
        k, d = between
        given.append(BETWEEN[k](view, d) if k else view)
    new_args, new_kwargs = tree_unflatten(given, tree)
    results, _ = run(op, new_args, new_kwargs, False)
    grads = gradients_of(results, leaves) if gradients else []
    inputs = leaves_of((new_args, new_kwargs))
    return [*results, *[inputs[i] for i in written]], grads


def expected_of(info: Any, args: Any, kwargs: Any, plan: list[Any], gradients: bool) -> Any | None:
    """What one device gives, with the gradients in the shapes of ``plan``."""
    expected = on_one_device(info, args, kwargs, gradients)
    if expected is None:
        return None
    shapes = [shape for x, (shape, *_) in zip(leaves_of((args, kwargs)), plan) if x.requires_grad]
    results, grads = expected
    return results, [
        None if grad is None else grad.reshape(shape) for grad, shape in zip(grads, shapes)
    ]


def written_by(op: Any, args: Any, kwargs: Any) -> dict[int, torch.Tensor]:
    """What one device leaves in the tensors that the op writes to, by position. (An op that goes
    beyond what a tensor shows of its memory writes to none, nor do those of numbers that cannot be
    compared.)
    """

    def copied(x: Any) -> Any:
        return x.detach().clone() if isinstance(x, torch.Tensor) else x

    before = leaves_of((args, kwargs))
    args, kwargs = tree_map(copied, (args, kwargs))
    try:
        run(op, args, kwargs, False)
        after = leaves_of((args, kwargs))
        return {i: y for i, (x, y) in enumerate(zip(before, after)) if not alike(x.detach(), y)}
    except RuntimeError:
        return {}


def fits(tensors: list[torch.Tensor]) -> bool:
    """Whether they are neither empty nor large."""
    return all(0 < x.numel() < 3000 for x in tensors) and any(x.ndim for x in tensors)


class Outcome(NamedTuple):
    """What became of a program, why, and how many bytes rank 0 received: for the program itself,
    and with what it takes to make all results and gradients whole.
    """

    said: str
    why: str
    itself: int
    whole: int


def outcome_and_bytes(program: Callable[[], Any], expected: Any) -> Outcome:
    itself = 0

    def patient() -> Any:
        nonlocal itself
        with limited(SECONDS):
            found = program()
        itself = received.bytes
        return found

    received = Received()
    with received:
        said, why = outcome(patient, expected)
    return Outcome(said, why, itself, received.bytes)


class Tally:
    """What came of the programs."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.ratios: dict[str, list[float]] = defaultdict(list)

    def add(self, program: str, name: str, stock: Outcome, ours: Outcome) -> None:
        """Of one program under one setting."""
        before, after = stock.said, ours.said
        self.counts[f"{name} {after}"] += 1
        if before == after == RIGHT:
            self._compare(program, name, stock.itself, ours.itself)
            self._compare(program, f"{name}, made whole", stock.whole, ours.whole)
        if (before == RIGHT and after != RIGHT) or (after == WRONG and before != WRONG):
            self.counts[f"{name} WORSE"] += 1
            self._say(f"WORSE {name}: {before} -> {after}: {program}: {ours.why}")
        elif after == WRONG:
            self.counts[f"{name} wrong, as stock"] += 1
            self._say(f"WRONG {name}, as stock: {program}: {ours.why}")

    def _compare(self, program: str, name: str, needed: int, moved: int) -> None:
        if needed + moved:
            self.ratios[name].append((moved + 1) / (needed + 1))
        if moved > needed:
            self.counts[f"{name} receives more"] += 1
            self._say(f"MORE {name}: {needed} -> {moved}: {program}")

    def _say(self, text: str) -> None:
        print(text.replace("\n", " ")[:700], flush=True)

    def show(self) -> None:
        print(dict(sorted(self.counts.items())))
        for name, found in self.ratios.items():
            print(
                f"{name}: {len(found)} programs that are right on both communicate on either; "
                f"bytes received, ours over stock's, geometric mean: {geometric_mean(found):.2f}"
            )


def measure(info: Any, mesh: DeviceMesh, options: argparse.Namespace, tally: Tally) -> None:
    """The programs that are drawn for one op."""
    rng = random.Random(f"programs {options.seed} {info.name} {info.variant_test_name}")
    gradients = bool(info.supports_autograd and info.dtypes & {torch.float64, torch.float32})
    with _disable_current_modes():
        samples = samples_of(info, gradients, rng, fits, 30, mesh.device_type)
    done = 0
    for sample in samples:
        args, kwargs = (sample.input, *sample.args), dict(sample.kwargs)
        plan = []
        for x in leaves_of((args, kwargs)):
            shape = tuple(x.shape)
            if not options.itself:
                shape = source_shape(rng, shape)
            kind = rng.choice(options.kinds)
            between = (0, 0)
            if options.between and x.ndim and x.dtype.is_floating_point:
                between = rng.randrange(len(BETWEEN)), rng.randrange(x.ndim)
            plan.append((shape, drawn(rng, shape, tuple(options.mesh), kind), between))
        with _disable_current_modes():
            expected = expected_of(info, args, kwargs, plan, gradients)
            if expected is None:
                continue
            left = written_by(info.op, args, kwargs)
        shapes = [tuple(x.shape) for x in leaves_of((args, kwargs))]
        program = f"{info.name}.{info.variant_test_name}: {shapes} from {plan}"
        run_on_mesh = partial(on_mesh, info.op, args, kwargs, plan, mesh, gradients, left)
        expected = [*expected[0], *left.values()], expected[1]
        stock = outcome_and_bytes(run_on_mesh, expected)
        tally.counts[f"stock {stock.said}"] += 1
        for name in options.settings:
            with cute_sharding.enabled(**SETTINGS[name]):
                ours = outcome_and_bytes(run_on_mesh, expected)
            tally.add(program, name, stock, ours)
        done += 1
        if done == options.samples:
            break


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--mesh", type=int, nargs="*", default=[2])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS))
    parser.add_argument("--between", action="store_true")
    parser.add_argument("--itself", action="store_true", help="no view before the op")
    parser.add_argument("--kinds", nargs="*", default=["even", "uneven"], help="of placements")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--part", type=int, nargs=2, default=[0, 1])
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    world = prod(options.mesh)
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    tally = Tally()
    for number, info in enumerate(database(options.only)):
        if number % options.part[1] == options.part[0]:
            with LocalTensorMode(world):
                mesh = DeviceMesh(options.device, torch.arange(world).reshape(options.mesh))
                measure(info, mesh, options, tally)
    tally.show()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
