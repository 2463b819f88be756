"""Views and slices in sharded training: a plain DTensor program, on four CPU processes.

    torchrun --standalone --nproc-per-node=4 examples/transformer_block.py [--out records.json]

Part one is a list of views, slices and cats that models take of sharded tensors. Part two is three
training steps, forward, backward and update: a transformer block with a dense MLP, one with a
mixture of experts, and the patch embedding of a vision model. Everything is also computed on full
tensors in one process, and compared with what each rank really holds. Part three is the language
model of train.py: its losses, and what a step costs.

Nothing here knows how DTensor propagates placements through ops: examples/demo.py runs this file
twice, once with each set of rules.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import time
from collections.abc import Callable
from datetime import timedelta
from linecache import getline
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
import train
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import cute_sharding

R = Replicate()
S = Shard


def S_(dim: int, split_factor: int) -> Placement:
    return _StridedShard(dim, split_factor=split_factor)


# What a rank holds, from the definition of the placements alone. Not by full_tensor() or
# distribute_tensor(): what is being checked should not depend on redistribution, which can be wrong
# for strided shards, or be wrong in the same way twice.


def held(full: Tensor, placements: tuple[Placement, ...], mesh: DeviceMesh) -> Tensor:
    """The part of ``full`` that this rank holds. Placements apply to the mesh dims in order, each
    to what the one before has left.
    """
    local = full
    for placement, size, coordinate in zip(placements, mesh.shape, mesh.get_coordinate()):
        if isinstance(placement, Replicate):
            continue
        if isinstance(placement, _StridedShard):
            pieces = local.chunk(placement.split_factor, placement.dim)
        elif isinstance(placement, Shard):
            pieces = (local,)
        else:
            raise TypeError(f"{placement} does not hold a part of the tensor")
        local = torch.cat(
            [chunk(piece, size, placement.dim, coordinate) for piece in pieces], placement.dim
        )
    return local


def chunk(t: Tensor, chunks: int, dim: int, index: int) -> Tensor:
    """``t.chunk(chunks, dim)[index]``, or an empty tensor: chunks are rounded up, so that there may
    be fewer than asked for.
    """
    found = t.chunk(chunks, dim)
    return found[index] if index < len(found) else t.narrow(dim, 0, 0)


def same(local: Tensor, expected: Tensor) -> bool:
    if local.shape != expected.shape:
        return False
    if not local.is_floating_point():
        return torch.equal(local, expected)
    # Of float64, summed in another order.
    return torch.allclose(local, expected, rtol=1e-9, atol=1e-12)


def holds(x: DTensor, full: Tensor) -> bool:
    """Whether this rank holds its part of ``full``, as the placements of ``x`` say."""
    return same(x.to_local(), held(full, x.placements, x.device_mesh))


class Collectives(TorchDispatchMode):
    """Counts the collectives inside a ``with`` block, as torch's CommDebugMode does; that one needs
    numpy. And the elements that they give this rank.
    """

    count = elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does on local tensors comes by here as well
        result = func(*args, **(kwargs or {}))
        if (
            func.namespace in ("_c10d_functional", "_dtensor")
            and "wait_tensor" not in func.name()
            and "_wrap_" not in func.name()
        ):
            self.count += 1
            self.elements += sum(x.numel() for x in tree_leaves(result))
        return result


# Part one: the views.


class Pattern(NamedTuple):
    name: str
    mesh: str
    shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    view: Callable[[Tensor], Tensor]
    free: bool = True  # whether the result has placements that say what each rank holds already


def view(*shape: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x.view(shape)


def patchify(x: Tensor, p: int = 2) -> Tensor:
    b, c, height, width = x.shape
    x = x.view(b, c, height // p, p, width // p, p).permute(0, 2, 4, 1, 3, 5)
    return x.reshape(b, (height // p) * (width // p), c * p * p)


def repeat_heads(x: Tensor, times: int) -> Tensor:
    b, s, heads, d = x.shape
    return x.unsqueeze(3).expand(b, s, heads, times, d).reshape(b, s, heads * times, d)


def grown(x: Tensor) -> Tensor:
    """A cache of keys, and one token more."""
    return torch.cat([x, x.new_zeros(x.shape[0], 1, x.shape[2])], 1)


def last_windows(x: Tensor) -> Tensor:
    """Of each row, itself and the three before it."""
    return F.pad(x, (0, 0, 3, 0)).unfold(1, 4, 1)


# "grid" is the mesh (dp=2, tp=2), "tp" is its second dim, "line" has all four ranks in one dim.
PATTERNS = [
    Pattern("flatten (b,s,d), sequence sharded", "line", (4, 8, 6), (S(1),), view(32, 6)),
    Pattern("flatten (b,s,d), batch x sequence", "grid", (4, 8, 6), (S(0), S(1)), view(32, 6)),
    Pattern("unflatten back to (b,s,d)", "grid", (32, 6), (S(0), S_(0, 2)), view(4, 8, 6)),
    Pattern("hidden to heads", "line", (2, 6, 16), (S(2),), view(2, 6, 8, 2)),
    Pattern(
        "merge heads", "line", (2, 8, 6, 2), (S(1),), lambda x: x.transpose(1, 2).reshape(2, 6, 16)
    ),
    Pattern(
        "fold heads into batch", "grid", (4, 8, 6, 2), (S(0), S(1)), lambda x: x.reshape(32, 6, 2)
    ),
    Pattern("patchify, images sharded", "line", (4, 3, 8, 8), (S(0),), patchify),
    Pattern("patchify, rows sharded", "line", (2, 3, 8, 8), (S(2),), patchify),
    Pattern("patchify, rows x columns", "grid", (2, 3, 8, 8), (S(2), S(3)), patchify),
    Pattern(
        "patchify, rows x columns, to tokens",
        "grid",
        (2, 3, 8, 8),
        (S(2), S(3)),
        lambda x: patchify(x).view(32, 12),
    ),
    Pattern(
        "patchify, images x columns, to tokens",
        "grid",
        (2, 3, 8, 8),
        (S(0), S(3)),
        lambda x: patchify(x).view(32, 12),
    ),
    Pattern("patchify, 7 columns of patches on 4", "line", (2, 3, 8, 14), (S(3),), patchify),
    Pattern("MoE: tokens to experts", "line", (32, 6), (S(0),), view(8, 4, 6)),
    Pattern("MoE: (b,s,d) to 8 experts", "grid", (4, 8, 6), (S(0), S(1)), view(8, 4, 6)),
    Pattern("MoE: (b,s,d) to 2 experts", "grid", (4, 8, 6), (S(0), S(1)), view(2, 16, 6)),
    Pattern("MoE: (groups, 3 experts on 2)", "tp", (2, 3, 4, 6), (S(1),), view(6, 4, 6)),
    # Six tokens each is one expert and a half each: no shard of the experts, nor of the capacity.
    Pattern("MoE: 12 tokens to 3 experts on 2", "tp", (12, 6), (S(0),), view(3, 4, 6), free=False),
    Pattern("GQA: repeat 4 kv heads", "line", (2, 6, 4, 2), (S(2),), lambda x: repeat_heads(x, 3)),
    Pattern(
        "GQA: repeat 7 kv heads on 4", "line", (2, 6, 7, 2), (S(2),), lambda x: repeat_heads(x, 2)
    ),
    Pattern("last batch of 7 on 4: to heads", "line", (7, 8, 6), (S(0),), view(7, 8, 3, 2)),
    Pattern("last batch of 7 on 4: pairs of crops", "line", (7, 2, 6), (S(0),), view(14, 6)),
    # The ranks hold 16, 16, 16 and 8 of 56 tokens; a shard would give each of them 14.
    Pattern(
        "last batch of 7 on 4: flatten (b,s,d)", "line", (7, 8, 6), (S(0),), view(56, 6), free=False
    ),
    # Rank 0 holds 0..3, 8..11, 16..19: eight elements of the first row of 12, and four of the
    # second.
    Pattern(
        "arange(24), _StridedShard(0, sf=3)", "tp", (24,), (S_(0, 3),), view(2, 12), free=False
    ),
    # No rule of its own: DTensor infers one by tracing what the op is made of, which is views.
    Pattern(
        "channel shuffle, channels sharded",
        "line",
        (2, 16, 2, 2),
        (S(1),),
        lambda x: F.channel_shuffle(x, 4),
        free=False,
    ),
    # Ops that need a few rows of other ranks.
    Pattern("next tokens, x[:, 1:]", "line", (2, 16, 4), (S(1),), lambda x: x[:, 1:], free=False),
    Pattern("last token, x[:, -1]", "line", (2, 16, 4), (S(1),), lambda x: x[:, -1], free=False),
    Pattern("KV cache, cat of a token", "line", (2, 15, 4), (S(1),), grown, free=False),
    Pattern(
        "causal windows, pad and unfold", "line", (2, 16, 4), (S(1),), last_windows, free=False
    ),
    Pattern("chunk of fused weights", "line", (48, 4), (S_(0, 3),), lambda x: x.chunk(3)[1]),
]


def run_pattern(pattern: Pattern, meshes: dict[str, DeviceMesh]) -> dict[str, Any]:
    mesh = meshes[pattern.mesh]
    # Each element is its own index.
    full = torch.arange(math.prod(pattern.shape)).view(pattern.shape)
    x = DTensor.from_local(
        held(full, pattern.placements, mesh).contiguous(),
        mesh,
        pattern.placements,
        shape=full.shape,
        stride=full.stride(),
    )

    def attempt() -> dict[str, Any]:
        with Collectives() as comm:
            y = pattern.view(x)
        right = holds(y, pattern.view(full))
        return {
            "collectives": comm.count,
            "elements": comm.elements,
            "placements": text(y.placements),
            "right": right,
        }

    return {"name": pattern.name, "kind": "view", "free_exists": pattern.free, **agreed(attempt)}


# Part two: the training steps. The same functions run on DTensors and on full tensors.

B, SEQ, D, HEADS, EXPERTS = 4, 8, 16, 4, 2


def to(x: Tensor, *placements: Placement) -> Tensor:
    return x.redistribute(placements=placements) if isinstance(x, DTensor) else x


def attention(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    """Tensor parallel over the heads, between sequence parallel activations."""
    x = to(x, S(0), R)
    q, k, v = (
        F.linear(x, w[name]).view(B, SEQ, HEADS, D // HEADS).transpose(1, 2)
        for name in ("q", "k", "v")
    )
    scores = q @ k.transpose(-1, -2) / math.sqrt(D // HEADS)
    mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, SEQ, D)
    return to(F.linear(mixed, w["o"]), S(0), S(1))


def mlp(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    return F.linear(F.gelu(F.linear(x, w["up"])), w["down"])


def dense(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    return mlp(x.view(B * SEQ, D), w).view(B, SEQ, D)


def experts(x: Tensor, w: dict[str, Tensor], capacity: int = 4) -> Tensor:
    """A soft mixture of experts: in each group of tokens, every expert works on an average
    of them.
    """
    tokens = x.view(B * SEQ // capacity, capacity, D)
    logits = tokens @ w["router"]
    slots = mlp(logits.softmax(1).transpose(1, 2) @ tokens, w)
    return (logits.softmax(2) @ slots).view(B, SEQ, D)


def block(x: Tensor, w: dict[str, Tensor], feed_forward: Callable[..., Tensor]) -> Tensor:
    x = x + attention(F.rms_norm(x, (D,), w["norm1"]), w)
    return x + feed_forward(F.rms_norm(x, (D,), w["norm2"]), w)


def embed(image: Tensor, w: dict[str, Tensor]) -> Tensor:
    patches = patchify(image)
    return F.linear(patches.view(-1, patches.shape[-1]), w["patch"])


class Step(NamedTuple):
    name: str
    forward: Callable[[Tensor, dict[str, Tensor]], Tensor]
    shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    target: tuple[int, ...]
    weights: dict[str, tuple[tuple[int, ...], tuple[Placement, ...]]]


ATTENTION = {
    "q": ((D, D), (R, S(0))),
    "k": ((D, D), (R, S(0))),
    "v": ((D, D), (R, S(0))),
    "o": ((D, D), (R, S(1))),
    "norm1": ((D,), (R, R)),
    "norm2": ((D,), (R, R)),
}
# Where tokens are sharded over every rank, the feed-forward weights are whole everywhere.
MLP = {"up": ((4 * D, D), (R, R)), "down": ((D, 4 * D), (R, R))}
ROUTER = {"router": ((D, EXPERTS), (R, R))}
TOKENS = (B, SEQ, D)

STEPS = [
    Step(
        "transformer block",
        lambda x, w: block(x, w, dense),
        TOKENS,
        (S(0), S(1)),
        TOKENS,
        {**ATTENTION, **MLP},
    ),
    Step(
        "transformer block, MoE",
        lambda x, w: block(x, w, experts),
        TOKENS,
        (S(0), S(1)),
        TOKENS,
        {**ATTENTION, **MLP, **ROUTER},
    ),
    Step(
        "patch embedding, rows x columns",
        embed,
        (2, 3, 8, 8),
        (S(2), S(3)),
        (32, D),
        {"patch": ((D, 12), (R, R))},
    ),
]


def loss_of(step: Step, x: Tensor, target: Tensor, w: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    y = step.forward(x, w)
    return y, (y - target).square().mean()


def update(w: dict[str, Tensor], rate: float = 0.1) -> None:
    with torch.no_grad():
        for weight in w.values():
            weight -= (
                rate * to(weight.grad, *weight.placements)
                if isinstance(weight, DTensor)
                else rate * weight.grad
            )


def run_step(step: Step, mesh: DeviceMesh) -> dict[str, Any]:
    torch.manual_seed(0)
    x, target = (
        torch.randn(step.shape, dtype=torch.float64),
        torch.randn(step.target, dtype=torch.float64),
    )
    w = {
        name: 0.2 * torch.randn(shape, dtype=torch.float64)
        for name, (shape, _) in step.weights.items()
    }
    # A replicated weight may share its memory with the tensor it was made from: distribute a copy,
    # or one update would be made to both.
    dw = {
        name: distribute_tensor(w[name].clone(), mesh, placements).requires_grad_()
        for name, (_, placements) in step.weights.items()
    }
    for weight in w.values():
        weight.requires_grad_()
    y, loss = loss_of(step, x, target, w)
    loss.backward()
    update(w)

    def attempt() -> dict[str, Any]:
        dx, dtarget = (
            distribute_tensor(x, mesh, step.placements),
            distribute_tensor(target, mesh, (R, R)),
        )
        with Collectives() as comm:
            dy, dloss = loss_of(step, dx, dtarget, dw)
            dloss.backward()
        collectives, elements = comm.count, comm.elements
        update(dw)
        right = {
            "output": holds(dy, y),
            "loss": same(dloss.full_tensor(), loss),
            "gradients": all(holds(to(dw[n].grad, *dw[n].placements), w[n].grad) for n in w),
            "updated weights": all(holds(dw[n], w[n]) for n in w),
        }
        wrong = [what for what, fine in right.items() if not fine]
        return {
            "collectives": collectives,
            "elements": elements,
            "placements": text(dy.placements),
            "right": not wrong,
            "wrong": wrong,
        }

    return {"name": step.name, "kind": "step", **agreed(attempt)}


# Part three: a language model.

TRAINED = 4  # steps


def run_model(mesh: DeviceMesh) -> dict[str, Any]:
    """The step of train.py, with the parts of fused weights divided one by one: losses as on one
    device; bytes of the busiest rank, also for each line of the program, and collectives; seconds
    of the fastest step; bytes of memory that this process has taken for all of it, at most.
    """

    def attempt() -> dict[str, Any]:
        before = taken()
        step, losses, seconds = train.training_step(mesh), [], []
        for _ in range(TRAINED - 1):
            dist.barrier()
            start = time.perf_counter()
            losses.append(step())
            seconds.append(time.perf_counter() - start)
        memory = taken() - before
        with cute_sharding.profile() as sent:
            losses.append(step())
        lines: dict[str, int] = {}
        for line in sent.lines:
            place = line.cause.place
            text = getline(place.file, place.line).strip() if place else "unknown line"
            lines[text] = lines.get(text, 0) + line.received
        found = torch.stack([loss.full_tensor() for loss in losses])
        on_one = train.training_step()
        expected = torch.stack([on_one() for _ in losses])
        return {
            "received": sum(lines.values()),
            "lines": lines,
            "collectives": len(sent.collectives),
            "seconds": min(seconds),
            "memory": memory,
            "right": torch.allclose(found, expected, rtol=1e-5),
        }

    train.PLACES |= {"qkv": S_(0, 3), "gate_up": S_(0, 2)}
    return {"name": "language model", "kind": "model", **agreed(attempt)}


def taken() -> int:
    """The most bytes of memory that this process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# The records.


def text(placements: tuple[Placement, ...]) -> str:
    return ", ".join(map(str, placements))


WRONG, RAISES, RIGHT = range(3)


def agreed(attempt: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What all ranks agree on: wrong on one is wrong, and raised on one is raised."""
    try:
        record = attempt()
        code = RIGHT if record["right"] else WRONG
    except Exception as error:
        record = {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
        code = RAISES
    verdict = torch.tensor(code)
    dist.all_reduce(verdict, dist.ReduceOp.MIN)
    if verdict.item() == RAISES:
        return {
            "outcome": "raises",
            "error": record.get("error", "raised on another rank"),
            "right": None,
        }
    outcome = "communicates" if record.get("collectives") else "free"
    return {"outcome": outcome, **record, "right": verdict.item() == RIGHT}


@record
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", help="write the records to this JSON file instead of printing them"
    )
    out = parser.parse_args().out

    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    meshes = {"grid": grid, "tp": grid["tp"], "line": init_device_mesh("cpu", (4,))}
    records = [run_pattern(pattern, meshes) for pattern in PATTERNS] + [
        run_step(step, grid) for step in STEPS
    ]
    records.append(run_model(grid))
    if dist.get_rank() == 0:
        if out:
            with open(out, "w") as file:
                json.dump(records, file, indent=1)
        else:
            for record in records:
                verdict = {True: "right", False: "WRONG DATA", None: record.get("error")}[
                    record["right"]
                ]
                print(
                    f"{record['name']:38} {record['outcome']:13} {record.get('placements', ''):28} "
                    f"{verdict}"
                )
    dist.barrier()
    dist.barrier()
    dist.destroy_process_group()
    # gloo's threads may still be letting go of the last tensors, and abort the process if the
    # interpreter shuts down meanwhile.
    time.sleep(0.5)


if __name__ == "__main__":
    main()
