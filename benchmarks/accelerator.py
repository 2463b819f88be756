"""What only an accelerator shows, in real processes: attention by each of its kernels, what one
stream gathers and another uses, redistributions and draws over its own collectives. Stock and with
the flags, against one device.

    python -m benchmarks.accelerator                        # four processes over NCCL
    python -m benchmarks.accelerator --device cpu           # over gloo: what of it a CPU can run
    python -m benchmarks.accelerator --only attention --ranks 2

Processes that outnumber the GPUs share them, which NCCL has to be allowed
(``NCCL_MULTI_RANK_GPU_ENABLE=1``, from 2.30 on). It ends with 1 where it finds anything worse.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.nn.attention import SDPBackend, sdpa_kernel

import cute_sharding
from benchmarks.op_database import contribution, drawn, local_of

SETTINGS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "views": {},
    "everything": {"redistribution": True, "movement": True},
}
PATIENCE = timedelta(seconds=120)


def switched(setting: str) -> AbstractContextManager[Any]:
    options = SETTINGS[setting]
    return nullcontext() if options is None else cute_sharding.enabled(**options)


def full(x: Any) -> torch.Tensor:
    whole: torch.Tensor = x.full_tensor() if isinstance(x, DTensor) else x
    return whole


class Run:
    """One rank's side of it.

    Attributes:
        device: the type of the devices that tensors are on.
        side: a group over which ranks tell one another what they have found.
    """

    def __init__(self, device: str, side: Any):
        self.device, self.side = device, side
        self.counts: Counter[str] = Counter()

    def mesh(self, sizes: tuple[int, ...]) -> DeviceMesh:
        return init_device_mesh(self.device, sizes)

    def meshes(self) -> Iterator[DeviceMesh]:
        world = dist.get_world_size()
        yield self.mesh((world,))
        if world % 2 == 0 and world > 2:
            yield self.mesh((2, world // 2))

    def told(self, mine: Any) -> list[Any]:
        """What each rank has to say."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine, group=self.side)
        return found

    def compare(self, program: str, run: Callable[[], str]) -> None:
        """``run`` says what is wrong, or nothing; on stock and with each of the flags."""
        stock = ""
        for setting in SETTINGS:
            try:
                with switched(setting):
                    mine = run()
            except Exception as error:
                mine = f"raises {type(error).__name__}: {str(error)[:150]}"
            worst = max(self.told(mine), key=len)
            kind = "right" if not worst else "raises" if worst.startswith("raises") else "wrong"
            self.counts[f"{setting} {kind}"] += 1
            if setting == "stock":
                stock = worst
            elif worst and (not stock or (kind == "wrong" and stock.startswith("raises"))):
                self.counts["WORSE"] += 1
                if dist.get_rank() == 0:
                    print(f"WORSE {setting}: {program}: {worst}", flush=True)


# -- attention -------------------------------------------------------------------------------------

BATCH, LENGTH, HEADS, WIDTH = 4, 30, 8, 64  # rows of masks that are not as long as kernels want


def _to_heads(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(BATCH, LENGTH, -1, WIDTH).transpose(1, 2)


# How queries, keys and values come: (their shapes, the dim that is cut, the way to heads).
PROJECTIONS: dict[str, tuple[list[tuple[int, ...]], int, Callable[[Any], Any]]] = {
    "heads": ([(BATCH, LENGTH, HEADS * WIDTH)] * 3, 2, _to_heads),
    "strided heads": ([(BATCH, LENGTH, 2, HEADS // 2 * WIDTH)] * 3, 3, _to_heads),
    "strided batch": ([(2, BATCH // 2, LENGTH, HEADS * WIDTH)] * 3, 1, _to_heads),
    "a batch of heads": (
        [(BATCH, LENGTH, HEADS * WIDTH)] * 3,
        2,
        lambda x: _to_heads(x).reshape(1, BATCH * HEADS, LENGTH, WIDTH),
    ),
    "shared keys": (
        [(BATCH, h, LENGTH, WIDTH) for h in (6, 3, 3)],
        1,
        lambda x: x * 1,
    ),
}
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


def attention(run: Run) -> None:
    """(For the CPU's kernel torch derives a rule, for half a minute each time.)"""
    if run.device != "cuda":
        return
    for mesh in run.meshes():
        for kernel, kind, masked in product(KERNELS, PROJECTIONS, (False, True)):
            if not (masked and kind == "shared keys"):
                _attend(run, mesh, kernel, kind, masked)


def _attend(run: Run, mesh: DeviceMesh, kernel: str, kind: str, masked: bool) -> None:
    shapes, dim, heads = PROJECTIONS[kind]
    generator = torch.Generator().manual_seed(0)
    plain = [torch.randn(s, generator=generator).to(run.device, torch.bfloat16) for s in shapes]
    b, h = heads(plain[0]).shape[:2]
    bias = torch.randn(b, h, LENGTH, LENGTH, generator=generator).to(run.device, torch.bfloat16)
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(dim)]

    def attended(place: Callable[[torch.Tensor, Any], Any]) -> list[torch.Tensor]:
        leaves = [place(x, placements).requires_grad_() for x in plain]
        options: dict[str, Any] = {"enable_gqa": kind == "shared keys"}
        if masked:
            options["attn_mask"] = place(bias, [Replicate()] * mesh.ndim)
        with sdpa_kernel(KERNELS[kernel]):
            result = F.scaled_dot_product_attention(*map(heads, leaves), **options)
        gradients = torch.autograd.grad(result.float().square().sum(), leaves)
        return [full(x).float() for x in (result.detach(), *gradients)]

    try:
        expected = attended(lambda x, _: x.detach().clone())
    except RuntimeError:
        return  # not for such tensors, on one device

    def wrong() -> str:
        found = attended(lambda x, placements: distribute_tensor(x.detach(), mesh, placements))
        return _differ(found, expected, tolerance=2e-2)

    run.compare(f"{kernel}, {kind}{', masked' * masked} on {tuple(mesh.shape)}", wrong)


def _differ(found: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float) -> str:
    for x, y in zip(found, expected, strict=True):
        most = y.abs().max().item() * tolerance
        if x.shape != y.shape or not torch.allclose(x, y, rtol=tolerance, atol=most):
            return f"a tensor of {tuple(x.shape)} for {tuple(y.shape)} is not that of one device"
    return ""


# -- streams ---------------------------------------------------------------------------------------


def streams(run: Run) -> None:
    """What is gathered on one stream, which is late, is used on another that knows of no gather."""
    if run.device != "cuda":
        return
    n = 1 << 10
    (mesh, *_) = run.meshes()

    def wrong() -> str:
        for turn in range(10):
            plain = torch.arange(n * n, device=run.device, dtype=torch.float32) + turn
            view = distribute_tensor(plain.reshape(n, n), mesh, [Shard(1)]).view(n * n)
            torch.cuda.synchronize()
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda._sleep(200_000_000)
                first = view.cumsum(0)
            second = full(view.flip(0).cumsum(0))
            torch.cuda.current_stream().synchronize()
            if not torch.allclose(second, plain.flip(0).cumsum(0), rtol=1e-3):
                return f"turn {turn}: used before it was there"
            torch.cuda.synchronize()
            del first
        return ""

    run.compare("a gather on another stream", wrong)


# -- redistributions -------------------------------------------------------------------------------

KINDS = ("even", "uneven", "strided", "nested", "pending")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.complex64, torch.bool)


def redistributions(run: Run) -> None:
    """Drawn ones by plan, which stock is not asked about: where it is wrong, its ranks get out of
    step.
    """
    for mesh in run.meshes():
        rng = random.Random(f"redistributions {tuple(mesh.shape)}")
        for _ in range(100):
            wrong = _redistributed(run, mesh, rng)
            found = "wrong" if any(run.told(wrong)) else "right"
            run.counts[f"everything {found}"] += 1
            if wrong:
                run.counts["WORSE"] += 1
                print(f"WORSE: rank {dist.get_rank()}: {wrong}", flush=True)


def _redistributed(run: Run, mesh: DeviceMesh, rng: random.Random) -> str:
    sizes, rank = tuple(mesh.shape), dist.get_rank()
    shape = tuple(rng.choice((1, 2, 3, 4, 5, 8, 12, 17)) for _ in range(rng.randint(1, 3)))
    dtype = rng.choice(DTYPES)
    before = drawn(rng, shape, sizes, rng.choice(KINDS), dtype)
    after = drawn(rng, shape, sizes, rng.choice(KINDS[:4]))
    assert before is not None and after is not None
    plain = (torch.arange(torch.Size(shape).numel(), device=run.device) % 50).reshape(shape)
    plain = plain.to(dtype)
    local = local_of(contribution(plain, before, sizes, rank), before, sizes, rank)
    meta = TensorMeta(plain.shape, plain.stride(), dtype)
    spec = DTensorSpec(mesh, tuple(before), meta, use_strided_shard_as_shard_order=False)
    with switched("everything"):
        moved = DTensor(local, spec, requires_grad=False).redistribute(placements=after).to_local()
    wanted = local_of(plain, after, sizes, rank)
    same = moved.shape == wanted.shape and torch.equal(moved, wanted)
    return "" if same else f"{shape} {dtype} {before} -> {after}"


# -- draws -----------------------------------------------------------------------------------------

DRAWS: dict[str, Callable[[Any], Any]] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "rand_like": torch.rand_like,
    "normal_": lambda x: x.clone().normal_(),
    "bernoulli": lambda x: torch.bernoulli(x * 0 + 0.5),
    "exponential_": lambda x: x.clone().exponential_(),
    "rrelu": lambda x: F.rrelu(-x, training=True),
}


def draws(run: Run) -> None:
    """Ranks agree on the whole, and go on alike; twice is not the same."""
    cases = [((64, 48), 1, (128, 24)), ((4, 6, 8), 1, (24, 8)), ((7, 3), 0, (21,))]
    (mesh, *_) = run.meshes()
    for (shape, dim, target), (name, draw) in [(c, d) for c in cases for d in DRAWS.items()]:

        def wrong(
            shape: Any = shape, dim: int = dim, target: Any = target, draw: Any = draw
        ) -> str:
            torch.manual_seed(5)
            plain = torch.ones(shape, device=run.device)
            x = distribute_tensor(plain, mesh, [Shard(dim)]).view(target)
            one, other = (full(draw(x)) for _ in range(2))
            after = torch.rand(1, device=run.device).item()
            if len({*map(str, run.told((one.tolist(), after)))}) > 1:
                return "ranks differ"
            return "the same twice" if torch.equal(one, other) else ""

        run.compare(f"{name} of {shape} as {target}", wrong)


SECTIONS: dict[str, Callable[[Run], None]] = {
    "attention": attention,
    "streams": streams,
    "redistributions": redistributions,
    "draws": draws,
}


def start(rank: int, options: argparse.Namespace, rendezvous: str) -> None:
    torch.set_num_threads(1)
    if options.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        "nccl" if options.device == "cuda" else "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=options.ranks,
        timeout=PATIENCE,
    )
    side = dist.new_group(backend="gloo", timeout=PATIENCE)
    worse = 0
    for name in options.only or SECTIONS:
        run = Run(options.device, side)
        SECTIONS[name](run)
        worse += run.counts["WORSE"]
        if rank == 0:
            print(f"{name}: {dict(sorted(run.counts.items()))}", flush=True)
    dist.barrier(group=side)
    dist.destroy_process_group()
    sys.exit(bool(worse))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--only", nargs="*", choices=SECTIONS)
    options = parser.parse_args()
    os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(start, (options, f"{folder}/rendezvous"), nprocs=options.ranks)


if __name__ == "__main__":
    main()
