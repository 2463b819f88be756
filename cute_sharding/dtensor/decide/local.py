"""What runs on local tensors beside an op's kernel: sizes among its arguments, averages over blocks
of different sizes, rows that an index picks, and what is done with the results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import inf, prod
from typing import Any

import torch
import torch.nn.functional as F

from cute_sharding.dtensor.bookkeeping.stats import Received, count_received
from cute_sharding.dtensor.door.cuts import is_sharded
from cute_sharding.dtensor.replaced import op_schemas, symints
from cute_sharding.dtensor.replaced.dispatch_modes import is_tracing
from cute_sharding.dtensor.replaced.op_schemas import OpSchema
from cute_sharding.dtensor.replaced.redistribution_hook import reduce_value
from cute_sharding.dtensor.replaced.tensor_specs import (
    DTensorSpec,
    Partial,
    Placement,
    TensorMeta,
    cut_of,
    picked_rows,
)
from cute_sharding.dtensor.run.folds import FOLDS
from cute_sharding.dtensor.run.folds.states import States
from cute_sharding.dtensor.run.groups import dims_of_group
from cute_sharding.dtensor.run.halos import HALOS, Asked, Windows, WindowsAlong
from cute_sharding.dtensor.run.numbered import ByNumber, Chain, Pick, as_number, chain_of_dim
from cute_sharding.dtensor.run.op_plan import OpPlan, Prepare, pending_of
from cute_sharding.dtensor.run.packing import lies_row_by_row
from cute_sharding.dtensor.run.placements import without
from cute_sharding.dtensor.run.redistribute import received_to
from cute_sharding.exchange import Exchange
from cute_sharding.layout.layout import row_major
from cute_sharding.propagation.signatures import Assignment, Part, halos_of, state_of
from cute_sharding.relations.signature import Folding, Signature
from cute_sharding.relations.table import ROWS, Row
from cute_sharding.relations.table.kernels import (
    AlignedMask,
    Bits,
    Images,
    Kernel,
    Matrices,
    MeanGradient,
    Sizes,
    SizesBeside,
)
from cute_sharding.relations.table.products import MADE_BY_ROWS
from cute_sharding.relations.table.row import Windowing

# -- shares ----------------------------------------------------------------------------------------
# Averages over devices with blocks of different sizes: each device counts by its share.
#
# If a device has w of W elements, its own mean counts w / W times in the mean of all, and a sum is
# left pending. The numbers of elements follow from the sizes.
#
# In a loss of classes, sizes do not say how many rows count: some may be ignored. The op returns
# their total weight beside the loss; it is summed over the devices with the loss (on stock with its
# gradient): one number. Each of N devices counts N w / W times in an average, as on stock. That is
# exactly 1 if all have rows of equal weight: a loss that is right on stock has the same bits here.


def _left_pending(found: Assignment, op: str) -> list[int]:
    """The mesh dims whose cuts leave this reduction pending in the first result."""
    return [
        m
        for m, part in enumerate(found.results[0])
        if part == op and not any(parts[m] == op for parts in found.operands)
    ]


def of_results(shares: str | None, found: Assignment) -> list[tuple[Part, ...]]:
    """The parts of the results by mesh dim. The total weight of all rows is on every device with a
    mean of them; and nothing reads it beside losses of each row.
    """
    if shares != "rows":
        return list(found.results)
    pending = _left_pending(found, "sum")
    first, *others = found.results
    return [
        first,
        *(
            tuple([part if m in pending else None for m, part in enumerate(parts)])
            for parts in others
        ),
    ]


def by_shares(
    plan: OpPlan,
    shares: str,
    specs: Sequence[DTensorSpec],
    signature: Signature,
    found: Assignment,
) -> OpPlan:
    """The plan for a mean. If it is left pending, each device counts by its share: an average of
    rows is pending; or a sum, where equal blocks would leave an average.
    """
    schema, op = plan.schema, plan.kernel or plan.schema.op
    mesh_dims = _left_pending(found, "avg" if shares == "rows" else "sum")
    mesh = specs[0].mesh
    if not mesh_dims:
        return plan
    if shares == "rows":
        total = partial(_add_up, mesh=mesh, mesh_dims=mesh_dims)
        devices = prod(mesh.size(m) for m in mesh_dims)
        return replace(plan, kernel=partial(_by_weights, op, total, devices))
    dims = _dims_of_elements(signature)
    places = [at for at, arg in enumerate(schema.args_schema) if isinstance(arg, DTensorSpec)]
    n = prod([specs[i].shape[d] for i, d in dims])
    counted = [(places[i], d) for i, d in dims]
    return replace(plan, kernel=partial(_by_elements, op, counted, n))


def _dims_of_elements(signature: Signature) -> list[tuple[int, int]]:
    """For each reduced name, an operand that has all its rows, and the dim: (operand, dim). (A dim
    that is broadcast has another name.)
    """
    dims: dict[str, tuple[int, int]] = {}
    for i, names in enumerate(signature.operands):
        for d, name in enumerate(names):
            if name not in signature.results[0]:
                dims.setdefault(name, (i, d))
    return list(dims.values())


def _by_elements(
    op: Callable[..., torch.Tensor],
    dims: Sequence[tuple[int, int]],
    n: Any,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """The part of a device in a mean of ``n`` elements; ``dims`` count its own elements."""
    mean = op(*args, **kwargs)
    counted = share(prod([args[at].shape[d] for at, d in dims]), n, mean)
    return (mean * counted).to(mean.dtype).masked_fill(counted == 0, 0)


def share(own: Any, n: Any, x: torch.Tensor) -> torch.Tensor:
    """A device's share, ``own`` of ``n`` elements, as a factor of ``x``."""
    return x.new_full((), own, dtype=_real(x.dtype)) / n


def _by_weights(
    op: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    total_of: Callable[[torch.Tensor], torch.Tensor],
    devices: int,
    scores: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The part of a device in an average over ``devices``, and the total weight of all rows."""
    mean, weight_of_own = op(scores, target, weight, reduction, ignore_index)
    own = weight_of_own.to(_real(weight_of_own.dtype))
    total = total_of(own)
    counted = (mean * (own * devices / total)).to(mean.dtype)
    if weight is None:
        counted = counted.masked_fill((own == 0) & (total != 0), 0)
    else:  # weights that add up to 0 need not all be 0
        added = op(scores, target, weight, 2, ignore_index)[0]
        counted = torch.where(own == 0, (added * (devices / total)).to(mean.dtype), counted)
    return counted, total.to(weight_of_own.dtype)


def _add_up(x: torch.Tensor, mesh: Any, mesh_dims: Sequence[int]) -> torch.Tensor:
    for m in mesh_dims:
        x = reduce_value(Partial("sum"), x, mesh, m)
    return x


def _real(dtype: torch.dtype) -> torch.dtype:
    """A real dtype that holds counts as exactly as a kernel sums them up."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


# -- rows by number --------------------------------------------------------------------------------
# Rows of a sharded dim that an index names: each device gives those that it has and zeros for
# others, and a sum is left pending; or it writes those that it has (run/numbered.py).
#
# torch does the same for an embedding and ``gather``, but applies the mask only when it reduces the
# result, and most later ops raise. Here the mask ends with the op. The placement is torch's own
# (``_MaskPartial``): the next op that computes reduces it, as on torch alone.


def by_numbers_of_rows(
    plan: OpPlan,
    row: Row,
    specs: Sequence[DTensorSpec],
    signature: Signature,
    wanted: Sequence[tuple[Placement, ...]],
) -> OpPlan:
    """The plan for an op that takes or writes rows by number, if a mesh dim shards such rows.
    ``wanted``: the placements to which the operands are redistributed.
    """
    if not signature.picked:
        return plan
    i, names = next(
        (i, some)
        for i, some in enumerate(signature.operands)
        if not signature.picked.isdisjoint(some)
    )
    results = signature.results[0]
    picks: list[Pick] = []
    for d, name in enumerate(names):
        if name in signature.picked:
            index = i + 1 + len(picks)
            aligned = tuple(
                [
                    signature.operands[index].index(of) if of in signature.operands[index] else None
                    for of in results
                ]
            )
            chain = chain_of_dim(d, wanted[i], specs[i].mesh)
            picks.append(
                Pick(d, index, chain, as_number(specs[i].shape[d]) if chain else 0, aligned)
            )
    sharded = tuple([pick for pick in picks if pick.chain])
    if not sharded:
        return plan
    shape = tuple(map(as_number, specs[i].shape))
    if not signature.picked & set(results):
        for pick in sharded:
            plan = plan.placed(partial(_placed, pick.chain, (shape, pick.dim)))
    writes = bool(signature.picked & set(results))
    kernel = ByNumber(plan.schema.op, specs[i].mesh, i, sharded, writes, row.counts_back)
    return replace(plan, kernel=kernel)


def _placed(
    chain: Chain, rows_of: tuple[tuple[int, ...], int], spec: DTensorSpec
) -> list[Placement]:
    """The result's placements: what is pending since mesh dims shard the rows is of picked rows."""
    dims = [m for *_, m in chain]
    return [
        picked_rows(p.reduce_op, *rows_of) if m in dims and isinstance(p, Partial) else p
        for m, p in enumerate(spec.placements)
    ]


# -- folds -----------------------------------------------------------------------------------------
# Ops along sharded dims that exchange states, and others whose functions know which rows a device
# has (``run/folds/``).


def by_folds(
    plan: OpPlan,
    name: str,
    folding: Folding,
    specs: Sequence[DTensorSpec],
    signature: Signature,
    needed: Sequence[tuple[Placement, ...]],
) -> OpPlan:
    """The plan for an op with folded dims, if mesh dims shard one: devices combine their states. Or
    one whose functions know which rows a device has, if mesh dims shard these.
    """
    names = signature.folded | folding.rows
    if not names:
        return plan
    mesh = specs[0].mesh
    cut = [
        of[d]
        for of, placements in zip(signature.operands, needed)
        for d in _dims_of_several(mesh, placements)
    ]
    if names.isdisjoint(cut):
        return plan
    i = signature.of_fold if signature.folded else 0
    spec, shape = specs[i], tuple(specs[i].shape)
    dims = tuple([d for d, of in enumerate(signature.operands[i]) if of in signature.folded])
    of_state, folds = shape, [False] * mesh.ndim
    if signature.folded:
        cuts = tuple(map(cut_of, needed[i]))
        of_state, folds = state_of(signature, shape, cuts, tuple(mesh.shape))
    over = tuple([m for m, fold in enumerate(folds) if fold])
    operands = tuple(op_schemas.specs_of(plan.wanted))
    op = plan.schema.op
    fold = States(mesh, shape, dims, needed[i], over, of_state, op, operands, plan.specs)
    itemsize = 4 if spec.tensor_meta is None else spec.tensor_meta.dtype.itemsize
    if not symints.is_symbolic(*shape):
        count_received(name, partial(_received_of_states, fold, folding, itemsize))
    return replace(plan, kernel=partial(FOLDS[folding.name], fold))


def _dims_of_several(mesh: Any, placements: Sequence[Placement]) -> list[int]:
    """The dims that mesh dims of more than one device cut."""
    cuts = enumerate(map(cut_of, placements))
    return [cut[0] for m, cut in cuts if cut is not None and mesh.size(m) > 1]


# -- windows ---------------------------------------------------------------------------------------
# Ops of which a result row reads some rows of a sharded dim (``run/halos.py``).


def by_halos(
    plan: OpPlan,
    name: str,
    windowing: Windowing,
    specs: Sequence[DTensorSpec],
    signature: Signature,
    found: Assignment,
) -> OpPlan | None:
    """The plan for an op on windows, if mesh dims shard them: devices exchange halos. None if the
    ranks that exchange have no common group, or if nothing is known to run on their rows.
    """
    if not signature.halos or symints.is_symbolic(*(tuple(spec.shape) for spec in specs)):
        return plan
    mesh = specs[0].mesh
    asked = Asked(
        signature,
        tuple([None if spec is None else tuple(spec.shape) for spec in (*specs, *plan.specs)]),
        (*found.operands, *found.results),
        tuple(mesh.shape),
        _of_dtype(windowing.fill, specs[0].tensor_meta),
    )
    halos = halos_of(*asked)
    if not halos:
        return plan
    moving = {
        i: halo for i, halo in halos.items() if i not in signature.sized and not _is_in_place(halo)
    }
    if windowing.tiles and not moving:
        return plan
    if not windowing.name:
        return None
    dims = {i: dims_of_group(mesh, halo.mesh_dims) for i, halo in moving.items()}
    known = {i: of for i, of in dims.items() if of is not None}
    if len(known) < len(dims):
        return None
    arguments = enumerate(plan.schema.args_schema)
    places = tuple([at for at, arg in arguments if isinstance(arg, DTensorSpec)])
    along = _windows_along(asked, halos, mesh)
    spatial = (
        len(specs[0].shape) - windowing.leading if windowing.leading else len(signature.in_halos)
    )
    windows = Windows(mesh, asked, places, known, along, spatial)
    count_received(name, partial(_received_of_halos, asked))
    return replace(plan, kernel=partial(HALOS[windowing.name], windows, plan.schema.op))


def _is_in_place(halo: Exchange) -> bool:
    """Whether each device has the rows that its windows read, one behind the other."""
    rows = halo.turned() if halo.adds else halo
    ends = map(rows.shapes_on, rows.ranks)
    return rows.is_in_place and all(before == after for before, after in ends)


def _of_dtype(fill: float, meta: Any) -> float:
    """The value of padding; for the least of all numbers, that of the dtype."""
    if meta is None or meta.dtype.is_floating_point or fill != -inf:
        return fill
    return torch.iinfo(meta.dtype).min


def _windows_along(asked: Asked, halos: dict[int, Exchange], mesh: Any) -> tuple[WindowsAlong, ...]:
    """The dims whose windows mesh dims shard."""
    signature = asked.signature
    i, halo = next(iter(halos.items()))
    ends = (halo.sources[0], halo.targets[0])
    rows, windows = ends if i < len(signature.operands) else ends[::-1]
    return tuple(
        [
            WindowsAlong(
                d - len(rows.shape),
                reads,
                rows.shape[d],
                windows.shape[d],
                tuple([(factor, mesh.size(m), m) for m, factor in windows.chains[d]]),
            )
            for d, reads in sorted(signature.read_by(i).items())
            if windows.chains[d]
        ]
    )


def _received_of_halos(asked: Asked) -> Received:
    total = Received()
    for i, halo in halos_of(*asked).items():
        if i not in asked.signature.sized:
            total = total.plus(Received(halo.received_elements, halo.received_by_all))
    return total


def _received_of_states(fold: States, folding: Folding, itemsize: int) -> Received:
    dtype = torch.int64 if folding.itemsize(itemsize) > 4 else torch.float32
    total = Received()
    for state in folding.states:
        op, of = (state, fold) if isinstance(state, str) else (state[0], fold.of_result(state[1]))
        before, after = of.ends(op, dtype)
        total = total.plus(received_to(before, tuple(after.placements))())
    return total


# -- local arguments -------------------------------------------------------------------------------
# Local arguments in the form that kernels expect.
#
# After a redistribution, masks need aligned rows (torch's own preparation is for one device), and
# images and matrices need the memory format that autograd has found for the whole tensor. A tensor
# that is read as another dtype needs rows of whole elements. Sizes are those of the local tensors.
# An operand of which only the sizes are read is an empty tensor. In the gradient of a mean, each
# device counts by its share of the elements.

# The kernel loads this many bytes at a time, and torch checks every stride but the last
# (aten/src/ATen/native/transformers/cuda/attention.cu).
_BYTES = 16


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """The mask, with rows at addresses from which the memory-efficient kernel can load: rows are
    padded in memory, as ``F.scaled_dot_product_attention`` does on one device.
    """
    step = max(_BYTES // mask.element_size(), 1)
    if mask.stride(-1) == 1 and all(stride % step == 0 for stride in mask.stride()[:-1]):
        return mask
    n = mask.shape[-1]
    return F.pad(mask, (0, -n % step))[..., :n]


def _with_mask_at(place: int) -> Prepare:
    return lambda args: [*args[:place], _aligned(args[place]), *args[place + 1 :]]


_FORMATS = (torch.channels_last, torch.channels_last_3d)


def _format(x: torch.Tensor) -> torch.memory_format:
    """The memory format that a kernel uses for the tensor and for those beside it."""
    if x.ndim in (4, 5) and not x.is_contiguous():
        found = _FORMATS[x.ndim - 4]
        if x.is_contiguous(memory_format=found):
            return found
    return torch.contiguous_format


def _of_images(tensors: int, number: int) -> Prepare:
    """Set the number of images to that of the local tensors, not of all devices together.

    And give the first ``tensors`` one memory format. Kernels rely on autograd for this; it looks at
    the strides of the whole, and after a redistribution the local tensor may have others.
    """

    def prepare(args: Sequence[Any]) -> Sequence[Any]:
        x = args[tensors - 1]
        lie = _format(x) if x.device.type in ("cpu", "xpu") else torch.contiguous_format
        first = [y.contiguous(memory_format=lie) for y in args[:tensors]]
        return [*first, *args[tensors:number], x.shape[0], *args[number + 1 :]]

    return prepare


def _with_sizes_of(tensor: int, sizes: int, dims: Sequence[int]) -> Prepare:
    """Set the first of the sizes, if there are any, to those of the local tensor in these dims. (A
    kernel may not read them, but the function that replaces it for empty tensors does.)
    """

    def prepare(args: Sequence[Any]) -> Sequence[Any]:
        own = [args[tensor].shape[d] for d in dims]
        told = args[sizes] and [*own, *args[sizes][len(dims) :]]
        return [*args[:sizes], told, *args[sizes + 1 :]]

    return prepare


def _with_sizes_beside(tensor: int, sizes: int, dim: int) -> Prepare:
    """Set the sizes to those of the local tensor, but for the dim that argument ``dim`` names."""

    def prepare(args: Sequence[Any]) -> Sequence[Any]:
        whole = args[sizes]
        own = list(args[tensor].shape[: len(whole)])
        own[args[dim]] = whole[args[dim]]
        return [*args[:sizes], own, *args[sizes + 1 :]]

    return prepare


def _as_said(schema: OpSchema) -> Prepare | None:
    """Lay out local matrices by rows if and only if the whole is contiguous. The kernel factorizes
    the matrix or its transpose, whichever is row-major in memory, and the gradient finds out from
    the strides of the whole which of the two it was.
    """
    spec: Any = schema.args_schema[0]
    if not isinstance(spec, DTensorSpec) or spec.tensor_meta is None:
        return None
    rows = _is_contiguous(spec.shape, spec.tensor_meta.stride)

    def prepare(args: Sequence[Any]) -> Sequence[Any]:
        matrices, *others = args
        if rows:
            return [matrices.contiguous(), *others]
        if matrices.is_contiguous():
            return [matrices.mT.contiguous().mT, *others]
        return args

    return prepare


def _is_contiguous(shape: Sequence[Any], strides: Sequence[Any]) -> bool:
    expected: Any = 1
    for n, stride in zip(reversed(shape), reversed(strides)):
        if not symints.is_truly(n == 1):
            if symints.is_truly(stride != expected):
                return False
            expected = expected * n
    return True


def _in_whole_elements(args: Sequence[Any]) -> Sequence[Any]:
    """Lay out the local tensor so that it can be read as a dtype of another size, as the whole can.
    torch checks every stride, also of dims of one row, which an exchange leaves as its buffer has
    them, and of empty tensors; the memory then stays the same.
    """
    x, dtype = args
    k = max(dtype.itemsize // x.dtype.itemsize, 1)
    *others, last = x.stride() or (1,)
    if last == 1 and all(step % k == 0 for step in (*others, x.storage_offset())):
        return args
    x = x.contiguous()
    x = x.clone() if x.storage_offset() % k else x
    *rows, n = x.shape
    return x.as_strided(x.shape, row_major((*rows, n or k))), dtype


def _of_mean(schema: OpSchema, at: int) -> Prepare | None:
    """For the gradient of a mean loss (argument ``at`` is its reduction): scale the gradient by the
    device's share. The kernel divides by the number of elements of its second argument, even if the
    first is broadcast; locally these are the device's elements, not all.
    """
    given, specs = schema.args_schema, op_schemas.specs_of(schema)
    if not op_schemas.is_mean(schema, at) or not any(map(is_sharded, specs)):
        return None
    x: Any = given[1]
    n = prod(x.shape)

    def prepare(args: Sequence[Any]) -> Sequence[Any]:
        gradient, own, *others = args
        counted = (gradient * share(own.numel(), n, own)).to(gradient.dtype)
        prepared = [counted, own, *others]
        if any(type(size) is int and size == 0 for size in own.shape):
            # A sum gives the same, and neither op nor trace divides by 0.
            return op_schemas.args_of_sum(schema.op, prepared, at)
        return prepared

    return prepare


def _prepare(kernel: Kernel, schema: OpSchema) -> Prepare | None:
    match kernel:
        case AlignedMask(at):
            is_given = isinstance(schema.args_schema[at], DTensorSpec)
            return _with_mask_at(at) if is_given else None
        case Images(tensors, number):
            return _of_images(tensors, number)
        case Sizes(of, sizes, dims):
            return _with_sizes_of(of, sizes, dims)
        case SizesBeside(of, sizes, dim):
            return _with_sizes_beside(of, sizes, dim)
        case Matrices():
            return _as_said(schema)
        case Bits():
            given: Any = schema.args_schema
            before, after = given[0].tensor_meta.dtype, given[1]
            return None if before.itemsize == after.itemsize else _in_whole_elements
        case MeanGradient(reduction):
            return _of_mean(schema, reduction)


def for_kernel(name: str, wanted: OpSchema) -> Prepare | None:
    """Brings the local arguments of the op, on the specs that it runs on, to the form that its
    kernel expects; None if they have it.
    """
    row = ROWS.get(name)
    return None if row is None or row.kernel is None else _prepare(row.kernel, wanted)


def in_their_place(
    schema: OpSchema, signature: Signature, operands: Sequence[int]
) -> Prepare | None:
    """If these ``operands`` are not moved because the op reads only their sizes: puts empty tensors
    of the local sizes that it needs in their place.
    """
    if not operands:
        return None
    specs = [(at, arg) for at, arg in enumerate(schema.args_schema) if isinstance(arg, DTensorSpec)]
    places = [at for at, _ in specs]
    read = [i for i in range(len(specs)) if i not in signature.sized | signature.unread]

    def size(args: Sequence[Any], i: int, d: int) -> Any:
        name = signature.operands[i][d]
        if d in signature.read_by(i):  # the rows that windows read are set as the op runs
            return specs[i][1].shape[d]
        local = [
            args[places[k]].shape[signature.operands[k].index(name)]
            for k in read
            if name in signature.operands[k] and not signature.read_by(k)
        ]
        return local[0] if local else specs[i][1].shape[d]

    def prepare(args: Sequence[Any]) -> Sequence[Any]:
        given = list(args)
        for i in operands:
            sizes = [size(args, i, d) for d in range(len(signature.operands[i]))]
            old = args[places[i]]
            given[places[i]] = old.new_empty(sizes).contiguous(memory_format=_format(old))
        return given

    return prepare


# -- local results ---------------------------------------------------------------------------------
# What is done with an op's local results: pending numbers are reduced, and all lie in the order of
# their strides, on every rank.
#
# A kernel lays out its result like its operands. If all local operands have the memory order of the
# global strides, so has the result, with two exceptions. A redistributed operand was expanded: now
# it has memory for every row on each device, and the kernel may follow its order instead of another
# operand's. Or operands are not row-major, and the kernel makes other strides than torch predicts,
# since it predicts them with other code, on a device that computes nothing.


def with_numbers_finished(plan: OpPlan) -> OpPlan:
    """The plan, by which a result without dims is reduced together with the op if it is pending.

    Except tensors that are written to, and lists of results, such as the norms of all gradients,
    which programs reduce to one number.
    """
    op = plan.schema.op._schema
    if op.is_mutable or any(isinstance(result.type, torch.ListType) for result in op.returns):
        return plan
    pending = tuple(map(pending_of, plan.specs))
    if not any(pending):
        return plan
    finished = plan.placed(
        lambda spec: without((Partial,) if pending_of(spec) else (), spec.placements)
    )
    return replace(finished, pending=pending)


def in_order(plan: OpPlan) -> OpPlan:
    """The plan with local results laid out in the order of their global strides, if the op makes
    new results, and a kernel may lay them out otherwise.
    """
    schema, op = plan.schema, plan.schema.op
    if plan.takes_all or any(each.alias_info is not None for each in op._schema.returns):
        return plan
    metas = [spec.tensor_meta if isinstance(spec, DTensorSpec) else None for spec in plan.specs]
    if all(meta is None or len(meta.shape) < 2 for meta in metas):
        return plan
    is_as_asked = plan.needs is None and plan.function is op
    return (
        plan if is_as_asked and _lies_as_said(schema, metas) else replace(plan, lies=tuple(metas))
    )


def _lies_as_said(schema: OpSchema, results: Sequence[TensorMeta | None]) -> bool:
    """Whether every kernel lays out the results as torch predicts: in compiled programs, for
    row-major operands, and if the call gives a memory format; products of matrices, which are made
    row by row; and pointwise ops whose operands all lie as the results do.
    """
    op = schema.op
    metas = [spec.tensor_meta for spec in op_schemas.specs_of(schema)]
    if (
        is_tracing()
        or op_schemas.place_of(op, "memory_format") is not None
        or all(meta is None or lies_row_by_row(meta) for meta in metas)
    ):
        return True
    made = [meta for meta in results if meta is not None]
    if op_schemas.name_of(op) in MADE_BY_ROWS:
        return all(map(lies_row_by_row, made))
    lying = {
        (tuple(meta.shape), tuple(meta.stride)) for meta in (*metas, *made) if meta is not None
    }
    return torch.Tag.pointwise in op.tags and len(lying - {((), ())}) == 1
