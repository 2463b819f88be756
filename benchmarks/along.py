"""What ops receive along a sharded dim: PyTorch alone, this package, and JAX's compiler.

    python -m benchmarks.along [--only NAME ...] [--mesh 8] [--jax PYTHON] [--errors]

For each op, all mesh dims shard the dim that is marked in the table below. Printed is what the
busiest rank receives, in bytes, and in how many collectives: of the forward, and of the gradient
with it. Where JAX shards a result otherwise, ours and PyTorch's are brought there, and that counts.

PyTorch runs in a process that never imports this package, and JAX, if ``--jax`` names a Python that
has it, in one of its own: its collectives are read off the compiled program, so a ring all-reduce
of n bytes on p devices counts 2 n (p - 1) / p there as here. Sizes that do not divide are
PyTorch's and ours alone. PyTorch derives some ops' rules by trying every placement of every step,
attention's for minutes: an op that gives no answer within ``--limit`` seconds "takes long".
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

from benchmarks.beside_jax import answer, mesh_of, placed
from benchmarks.hlo import received_of


class Case(NamedTuple):
    """An op: expressions for torch and for JAX, and operands by name, written as their sizes; a
    star marks the sharded dim, and ``<n`` integers below n instead of numbers.
    """

    name: str
    torch: str
    jax: str
    operands: dict[str, str]


ROWS = "64 512*"
IMAGE = "2 4 64* 64"

CASES = tuple(
    Case(name, torch, jax, operands)
    for name, torch, jax, operands in (
        ("softmax", "x.softmax(1)", "nn.softmax(x, 1)", {"x": ROWS}),
        ("log_softmax", "F.log_softmax(x, 1)", "nn.log_softmax(x, 1)", {"x": ROWS}),
        ("logsumexp", "x.logsumexp(1)", "nn.logsumexp(x, 1)", {"x": ROWS}),
        ("sum", "x.sum(1)", "x.sum(1)", {"x": ROWS}),
        ("amax", "x.amax(1)", "x.max(1)", {"x": ROWS}),
        ("var", "x.var(1)", "x.var(1, ddof=1)", {"x": ROWS}),
        ("norm", "torch.linalg.vector_norm(x, 2, 1)", "jnp.linalg.norm(x, axis=1)", {"x": ROWS}),
        (
            "normalize",
            "F.normalize(x, dim=1)",
            "x / jnp.maximum(jnp.linalg.norm(x, axis=1, keepdims=True), 1e-12)",
            {"x": ROWS},
        ),
        (
            "layer_norm",
            "F.layer_norm(x, (512,), w, b)",
            "(x - x.mean(1, keepdims=True)) * lax.rsqrt(x.var(1, keepdims=True) + 1e-5) * w + b",
            {"x": ROWS, "w": "512*", "b": "512*"},
        ),
        (
            "rms_norm",
            "F.rms_norm(x, (512,), w)",
            "x * lax.rsqrt((x * x).mean(1, keepdims=True) + 1e-6) * w",
            {"x": ROWS, "w": "512*"},
        ),
        (
            "group_norm",
            "F.group_norm(x, 4, w, b)",
            "grouped(x, 4) * w[:, None, None] + b[:, None, None]",
            {"x": "4 64* 8 8", "w": "64*", "b": "64*"},
        ),
        (
            "group_norm, height",
            "F.group_norm(x, 4, w, b)",
            "grouped(x, 4) * w[:, None, None] + b[:, None, None]",
            {"x": "4 16 64* 8", "w": "16", "b": "16"},
        ),
        (
            "batch_norm",
            "F.batch_norm(x, None, None, w, b, True)",
            "batched(x) * w[:, None, None] + b[:, None, None]",
            {"x": "64* 16 8 8", "w": "16", "b": "16"},
        ),
        (
            "instance_norm",
            "F.instance_norm(x)",
            "grouped(x, 16)",
            {"x": "4 16 64* 8"},
        ),
        (
            "cross_entropy",
            "F.cross_entropy(x, t)",
            "-jnp.take_along_axis(nn.log_softmax(x, 1), t[:, None], 1).mean()",
            {"x": ROWS, "t": "64<512"},
        ),
        (
            "kl_div",
            "F.kl_div(F.log_softmax(x, 1), y.softmax(1), reduction='batchmean')",
            "(nn.softmax(y, 1) * (nn.log_softmax(y, 1) - nn.log_softmax(x, 1))).sum() / 64",
            {"x": ROWS, "y": ROWS},
        ),
        (
            "cosine_similarity",
            "F.cosine_similarity(x, y)",
            "(x * y).sum(1) / (jnp.linalg.norm(x, axis=1) * jnp.linalg.norm(y, axis=1))",
            {"x": ROWS, "y": ROWS},
        ),
        ("max with indices", "x.max(1)", "(x.max(1), x.argmax(1))", {"x": ROWS}),
        ("argmax", "x.argmax(1)", "x.argmax(1)", {"x": ROWS}),
        ("argmin", "x.argmin(1)", "x.argmin(1)", {"x": ROWS}),
        ("aminmax", "torch.aminmax(x, dim=1)", "(x.min(1), x.max(1))", {"x": ROWS}),
        ("any", "(x > 2).any(1)", "(x > 2).any(1)", {"x": ROWS}),
        ("count_nonzero", "x.count_nonzero(1)", "jnp.count_nonzero(x, 1)", {"x": ROWS}),
        ("topk", "x.topk(3, 1)", "lax.top_k(x, 3)", {"x": ROWS}),
        ("kthvalue", "x.kthvalue(3, 1)[0]", "jnp.sort(x, 1)[:, 2]", {"x": ROWS}),
        ("sort", "x.sort(1)[0]", "jnp.sort(x, 1)", {"x": ROWS}),
        ("cumsum", "x.cumsum(1)", "jnp.cumsum(x, 1)", {"x": ROWS}),
        ("cumprod", "x.cumprod(1)", "jnp.cumprod(x, 1)", {"x": ROWS}),
        ("cummax", "x.cummax(1)[0]", "lax.cummax(x, 1)", {"x": ROWS}),
        ("logcumsumexp", "x.logcumsumexp(1)", "lax.cumlogsumexp(x, 1)", {"x": ROWS}),
        ("x[indices]", "x[t]", "x[t]", {"x": "512* 64", "t": "3<512"}),
        ("index_select", "x.index_select(0, t)", "x[t]", {"x": "512* 64", "t": "3<512"}),
        ("embedding", "F.embedding(t, x)", "x[t]", {"x": "512* 64", "t": "5 7<512"}),
        (
            "gather",
            "x.gather(1, t)",
            "jnp.take_along_axis(x, t, 1)",
            {"x": ROWS, "t": "64 2<512"},
        ),
        (
            "scatter_add",
            "x.scatter_add(0, t, y)",
            "x.at[t, jnp.arange(64)[None]].add(y)",
            {"x": "512* 64", "t": "8 64<512", "y": "8 64"},
        ),
        (
            "index_add",
            "x.index_add(0, t, y)",
            "x.at[t].add(y)",
            {"x": "512* 64", "t": "8<512", "y": "8 64"},
        ),
        (
            "index_put",
            "x.index_put((t,), y)",
            "x.at[t].set(y)",
            {"x": "512* 64", "t": "8<512", "y": "8 64"},
        ),
        (
            "searchsorted",
            "torch.searchsorted(x, y)",
            "(x[None] < y[:, None]).sum(1)",
            {"x": "512*", "y": "64"},
        ),
        (
            "renorm",
            "x.renorm(2, 0, 1.0)",
            "x * jnp.minimum(1, 1 / jnp.linalg.norm(x, axis=1, keepdims=True))",
            {"x": ROWS},
        ),
        (
            "cdist",
            "torch.cdist(x, y)",
            "jnp.sqrt(((x[:, None] - y[None]) ** 2).sum(2))",
            {"x": "16 64*", "y": "24 64*"},
        ),
        ("median", "x.median(1)[0]", "jnp.sort(x, 1)[:, 255]", {"x": ROWS}),
        ("cumsum, one dim", "x.cumsum(0)", "jnp.cumsum(x)", {"x": "4096*"}),
        (
            "embedding_bag",
            "F.embedding_bag(t, x, o)",
            "x[t].mean(0, keepdims=True)",
            {"x": "512* 64", "t": "35<512", "o": "1<1"},
        ),
        (
            "masked_scatter",
            "x.masked_scatter(y.detach() > 0, z)",
            "jnp.where(y > 0, z.reshape(-1)[jnp.clip(jnp.cumsum((y > 0).reshape(-1)) - 1, 0)]"
            ".reshape(x.shape), x)",
            {"x": ROWS, "y": ROWS, "z": "64 512"},
        ),
        ("bincount", "t.bincount(minlength=16)", "jnp.bincount(t, length=16)", {"t": "512*<16"}),
        ("flip", "x.flip(1)", "jnp.flip(x, 1)", {"x": ROWS}),
        ("roll", "x.roll(1, 1)", "jnp.roll(x, 1, 1)", {"x": ROWS}),
        ("diff", "x.diff(dim=1)", "jnp.diff(x, axis=1)", {"x": ROWS}),
        ("pad", "F.pad(x, (1, 1))", "jnp.pad(x, ((0, 0), (1, 1)))", {"x": ROWS}),
        ("cat", "torch.cat([x, y], 1)", "jnp.concatenate([x, y], 1)", {"x": ROWS, "y": ROWS}),
        ("tril", "x.tril()", "jnp.tril(x)", {"x": ROWS}),
        (
            "conv1d",
            "F.conv1d(x, w, padding=1)",
            "conv(x, w, 1)",
            {"x": "2 4 512*", "w": "4 4 3"},
        ),
        ("conv2d", "F.conv2d(x, w, padding=1)", "conv(x, w, 1)", {"x": IMAGE, "w": "4 4 3 3"}),
        (
            "conv2d, stride 2",
            "F.conv2d(x, w, stride=2, padding=1)",
            "conv(x, w, 1, 2)",
            {"x": IMAGE, "w": "4 4 3 3"},
        ),
        (
            "conv1d, dilated",
            "F.conv1d(x, w, dilation=2, padding=2)",
            "lax.conv_general_dilated(x, w, (1,), [(2, 2)], rhs_dilation=(2,))",
            {"x": "2 4 512*", "w": "4 4 3"},
        ),
        (
            "conv3d",
            "F.conv3d(x, w, padding=1)",
            "conv(x, w, 1)",
            {"x": "1 2 16* 8 8", "w": "2 2 3 3 3"},
        ),
        (
            "conv_transpose2d",
            "F.conv_transpose2d(x, w, stride=2)",
            "lax.conv_transpose(x, w, (2, 2), 'VALID', dimension_numbers=('NCHW', 'OIHW', 'NCHW'))",
            {"x": IMAGE, "w": "4 4 2 2"},
        ),
        ("max_pool2d", "F.max_pool2d(x, 2)", "pool(x, 2, 2)", {"x": IMAGE}),
        ("max_pool2d, overlapping", "F.max_pool2d(x, 3, 1)", "pool(x, 3, 1)", {"x": IMAGE}),
        ("avg_pool2d", "F.avg_pool2d(x, 2)", "pool(x, 2, 2, 0.0, lax.add) / 4", {"x": IMAGE}),
        (
            "adaptive_avg_pool2d",
            "F.adaptive_avg_pool2d(x, 16)",
            "pool(x, 4, 4, 0.0, lax.add) / 16",
            {"x": IMAGE},
        ),
        (
            "interpolate, nearest",
            "F.interpolate(x, scale_factor=2)",
            "jax.image.resize(x, (2, 4, 128, 128), 'nearest')",
            {"x": IMAGE},
        ),
        (
            "interpolate, bilinear",
            "F.interpolate(x, scale_factor=2, mode='bilinear')",
            "jax.image.resize(x, (2, 4, 128, 128), 'linear')",
            {"x": IMAGE},
        ),
        (
            "attention, sequence",
            "F.scaled_dot_product_attention(x, y, z)",
            "attention(x, y, z, False)",
            dict.fromkeys("xyz", "2 4 128* 16"),
        ),
        (
            "attention, causal",
            "F.scaled_dot_product_attention(x, y, z, is_causal=True)",
            "attention(x, y, z, True)",
            dict.fromkeys("xyz", "2 4 128* 16"),
        ),
        (
            "attention, keys",
            "F.scaled_dot_product_attention(x, y, z)",
            "attention(x, y, z, False)",
            {"x": "2 4 1 16", "y": "2 4 512* 16", "z": "2 4 512* 16"},
        ),
    )
)


class Cost(NamedTuple):
    """Of a program: the bytes that the busiest rank receives, the number of collectives, and the
    mesh dims that shard the results' dims: for each result, for each dim.
    """

    received: int
    collectives: int
    results: tuple[tuple[tuple[int, ...], ...], ...] = ()


def sizes(text: str) -> tuple[tuple[int, ...], int | None, int | None]:
    """The shape, the sharded dim, and the bound of integers of an operand."""
    dims, _, bound = text.partition("<")
    found = dims.split()
    at = next((d for d, n in enumerate(found) if n.endswith("*")), None)
    return tuple(int(n.rstrip("*")) for n in found), at, int(bound) if bound else None


# -- torch, with the package or without ------------------------------------------------------------


def torchs(
    cases: Sequence[Case], mesh: tuple[int, ...], to: dict[str, Any], ours: bool, limit: float
) -> Iterator[tuple[str, list[Cost | str]]]:
    """What each case costs, without and with its gradient, each within ``limit`` seconds."""
    import contextlib
    import warnings

    import torch.distributed as dist
    from torch.distributed._local_tensor import LocalTensorMode
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    warnings.simplefilter("ignore")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=prod(mesh))
    device_mesh = init_device_mesh("cpu", mesh)
    switched: Any = contextlib.nullcontext
    if ours:
        import cute_sharding

        cute_sharding.prepare_groups(device_mesh)
        switched = partial(cute_sharding.enabled, redistribution=True, movement=True)
    with LocalTensorMode(prod(mesh)), switched():
        for case in cases:
            dims = to.get(case.name, [None, None])
            yield (
                case.name,
                [
                    _tried(_of_torch, case, device_mesh, gradient, where, dims[0], limit=limit)
                    for gradient, where in zip((False, True), dims)
                ],
            )


class TakesLong(BaseException):
    """No answer within the limit. Not an ``Exception``, which PyTorch's derivation would catch."""


def _tried(measure: Callable[..., Cost | str], *given: Any, limit: float = 0.0) -> Cost | str:
    """What is measured, or what is raised; within ``limit`` seconds, if one is given."""

    def stop(*_: Any) -> None:
        raise TakesLong(f"no answer in {limit:.0f} s")

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        return measure(*given)
    except (Exception, TakesLong) as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:60]}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def _of_torch(case: Case, mesh: Any, gradient: bool, dims: Any, made_at: Any) -> Cost | str:
    """``dims``: where JAX has the results; ``made_at``: where it has those of the forward."""
    import torch
    import torch.nn.functional as F
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from benchmarks.received import Received

    def operand(text: str) -> Any:
        shape, at, bound = sizes(text)
        x = torch.randn(shape) if bound is None else torch.randint(0, bound, shape)
        placements = [Replicate() if at is None else Shard(at)] * mesh.ndim
        return distribute_tensor(x.requires_grad_(bound is None), mesh, placements)

    def brought(x: Any, dims: Sequence[Sequence[int]]) -> Any:
        where: list[Any] = [Replicate()] * mesh.ndim
        for d, over in enumerate(dims):
            for m in over:
                where[m] = Shard(d)
        return x.redistribute(placements=where)

    torch.manual_seed(0)
    given = {name: operand(text) for name, text in case.operands.items()}
    with Received() as counted:
        made = eval(case.torch, {"torch": torch, "F": F, **given})
        if gradient:
            y = made[0] if isinstance(made, tuple) else made
            if not y.requires_grad:
                return "no gradient"
            ones = distribute_tensor(torch.ones(y.shape), mesh, [Replicate()] * mesh.ndim)
            ones = brought(ones, made_at[0] if made_at else [()] * y.ndim)
            leaves = [x for x in given.values() if x.requires_grad]
            made = torch.autograd.grad(y, leaves, ones, materialize_grads=True)
        results = list(made) if isinstance(made, (tuple, list)) else [made]
        for x, where in zip(results, dims or [[()] * x.ndim for x in results]):
            brought(x, where)
    return Cost(counted.most, sum(counted.collectives.values()))


# -- JAX -------------------------------------------------------------------------------------------


def jaxs(cases: Sequence[Case], mesh: tuple[int, ...]) -> Iterator[tuple[str, list[Any]]]:
    """What JAX's compiler makes of each case, without and with its gradient."""
    axes = tuple(f"m{m}" for m in range(len(mesh)))
    device_mesh = mesh_of(mesh, axes)
    import jax

    scope = _scope()
    for case in cases:
        shapes = _shapes(case, device_mesh)
        function = eval(f"lambda {', '.join(case.operands)}: {case.jax}", scope)
        forward = _tried(_of_jax, function, shapes, axes)
        floats = [i for i, x in enumerate(shapes) if x.dtype.kind == "f"]
        made = jax.tree.leaves(jax.eval_shape(function, *shapes))[0]
        if isinstance(forward, str) or made.dtype.kind != "f":
            yield case.name, [forward, "no gradient"]
            continue
        spec = [tuple(axes[m] for m in over) for over in forward.results[0]]
        weights = placed(made.shape, made.dtype, device_mesh, spec)
        gradient = _tried(_of_jax, _gradient(function, floats), [weights, *shapes], axes)
        yield case.name, [forward, gradient]


def _shapes(case: Case, device_mesh: Any) -> list[Any]:
    """The operands, with their shardings."""
    found = []
    for shape, at, bound in map(sizes, case.operands.values()):
        dtype = "float32" if bound is None else "int32"
        spec = [device_mesh.axis_names if d == at else None for d in range(len(shape))]
        found.append(placed(shape, dtype, device_mesh, spec))
    return found


def _gradient(function: Callable[..., Any], floats: Sequence[int]) -> Callable[..., Any]:
    """The gradient of the first result for given ``weights``, and the results: an eager program
    computes both.
    """
    import jax

    def gradient(weights: Any, *operands: Any) -> Any:
        def of(*given: Any) -> Any:
            places = dict(zip(floats, given))
            made = function(*[places.get(i, x) for i, x in enumerate(operands)])
            return made[0] if isinstance(made, (tuple, list)) else made

        made, pullback = jax.vjp(of, *[operands[i] for i in floats])
        return pullback(weights), made

    return gradient


def _of_jax(program: Callable[..., Any], given: Sequence[Any], axes: Sequence[str]) -> Cost:
    import jax

    compiled = jax.jit(program).lower(*given).compile()
    shardings = jax.tree.leaves(compiled.output_shardings)
    results = jax.tree.leaves(jax.eval_shape(program, *given))
    where = [
        tuple(_mesh_dims(some, axes) for some in (*sharding.spec, *[None] * 9)[: x.ndim])
        for sharding, x in zip(shardings, results)
    ]
    return Cost(*received_of(compiled.as_text()), tuple(where))


def _scope() -> dict[str, Any]:
    """What expressions for JAX are made of."""
    import jax
    import jax.numpy as jnp
    from jax import lax, nn

    names = {"jax": jax, "jnp": jnp, "lax": lax, "nn": nn}

    def grouped(x: Any, groups: int) -> Any:
        y = x.reshape(x.shape[0], groups, -1)
        y = (y - y.mean(2, keepdims=True)) * lax.rsqrt(y.var(2, keepdims=True) + 1e-5)
        return y.reshape(x.shape)

    def batched(x: Any) -> Any:
        over = (0, 2, 3)
        found = x - x.mean(over, keepdims=True)
        return found * lax.rsqrt(x.var(over, keepdims=True) + 1e-5)

    def conv(x: Any, w: Any, padding: int, stride: int = 1) -> Any:
        spatial = x.ndim - 2
        return lax.conv_general_dilated(x, w, (stride,) * spatial, [(padding, padding)] * spatial)

    def pool(x: Any, size: int, step: int, start: float = -jnp.inf, op: Any = lax.max) -> Any:
        return lax.reduce_window(x, start, op, (1, 1, size, size), (1, 1, step, step), "VALID")

    def attention(q: Any, k: Any, v: Any, causal: bool) -> Any:
        scores = jnp.einsum("bhsd,bhtd->bhst", q, k) / q.shape[-1] ** 0.5
        if causal:
            scores = jnp.where(jnp.tril(jnp.ones(scores.shape[2:], bool)), scores, -jnp.inf)
        return jnp.einsum("bhst,bhtd->bhsd", nn.softmax(scores, -1), v)

    own = (grouped, batched, conv, pool, attention)
    return {**names, **{function.__name__: function for function in own}}


def _mesh_dims(some: Any, axes: Sequence[str]) -> tuple[int, ...]:
    names = () if some is None else (some,) if isinstance(some, str) else some
    return tuple(axes.index(name) for name in names)


# -- the table -------------------------------------------------------------------------------------


def cell(found: Any) -> str:
    if found is None:
        return ""
    if isinstance(found, str):
        return {"no gradient": "", "TakesLong": "takes long"}.get(found.split(":")[0], "raises")
    received, collectives, *_ = found
    return f"{received:,} B in {collectives}" if collectives else "0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--mesh", nargs="*", type=int, default=[8])
    parser.add_argument("--jax", default="")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds for an op")
    parser.add_argument("--side", choices=("torch", "ours", "jax"))
    parser.add_argument("--errors", action="store_true", help="print why something raises")
    given = parser.parse_args()
    mesh = tuple(given.mesh)
    cases = [case for case in CASES if not given.only or any(o in case.name for o in given.only)]
    if given.side:
        to = json.load(sys.stdin)
        if given.side == "jax":
            print(json.dumps(dict(jaxs(cases, mesh))))
        else:
            print(json.dumps(dict(torchs(cases, mesh, to, given.side == "ours", given.limit))))
        return
    arguments = ["--mesh", *map(str, mesh), "--limit", str(given.limit)]
    arguments += ["--only", *given.only] if given.only else []
    told = partial(answer, "along", arguments=arguments)
    jax = told(side="jax", python=given.jax) if given.jax else {}
    to = {
        name: [None if isinstance(each, str) else each[2] for each in both]
        for name, both in jax.items()
    }
    sides = {
        "PyTorch": told(side="torch", given=to),
        "here": told(side="ours", given=to),
        **({"JAX": jax} if jax else {}),
    }
    heads = [f"{name}{more}" for more in ("", ", gradient") for name in sides]
    print(f"| op | {' | '.join(heads)} |\n|{'---|' * (len(heads) + 1)}")
    for case in cases:
        cells = [cell(sides[side][case.name][i]) for i in (0, 1) for side in sides]
        more = any(
            not isinstance(one, str) and not isinstance(other, str) and one[0] > other[0]
            for one, other in zip(sides["here"][case.name], jax.get(case.name, []))
        )
        print(f"| {case.name} | {' | '.join(cells)} |{' more' if more else ''}")
        if given.errors:
            for side, found in sides.items():
                print("   ", side, [each for each in found[case.name] if isinstance(each, str)])


if __name__ == "__main__":
    main()
