"""DTensors as the compiler sees them (torch/distributed/tensor/_api.py, _sharding_prop.py,
placement_types.py): :class:`Tracing`.

Functions and methods may be wrapped here. Each calls torch's own where it has nothing to add, and
all are put back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from cute_sharding.dtensor.replaced import (
    collective_order,
    compiler,
    compiler_guards,
    compiler_patches,
    patches,
)
from cute_sharding.dtensor.replaced.expansion import as_they_are
from cute_sharding.dtensor.replaced.local_tensors import is_imagined
from cute_sharding.dtensor.replaced.patch import Given, Installed
from cute_sharding.dtensor.replaced.symints import (
    SymbolicStride,
    has_shape_env,
    is_symbolic,
    shape_with_symbols,
)
from cute_sharding.dtensor.replaced.tensor_specs import (
    are_known,
    cut_of,
    decoded_order,
    may_be_uneven,
)

__all__ = [
    "Tracing",
    "strided_shard",
]


def strided_shard(dim: int, split_factor: Any) -> Placement:
    """A _StridedShard. If the split factor is a SymInt, no guard is added yet: :func:`settled` adds
    it when the number is needed.
    """
    if not isinstance(split_factor, torch.SymInt):
        return _StridedShard(dim, split_factor=split_factor)
    if not Tracing.settles:
        return _StridedShard(dim, split_factor=int(split_factor))
    return SymbolicStride(dim, split_factor)


class Tracing:
    """Installs the rows of :mod:`.patches` about compiled programs, where torch's support of
    DTensors is incomplete. In force from when it is made until ``installed`` is undone.

    ``local_size(rows, *cuts)``, each cut (split factor, devices, coordinate), computes sizes of
    local tensors (compiled/local_sizes.py). ``equate(size, size, others)`` makes two sizes known to
    be equal. ``writing(inputs)`` is called before a program that writes to these inputs, and its
    result afterwards, while there are ``live`` copies. ``of_one_rank()`` is called before a graph
    is compiled that may have other sizes on other ranks, and once Inductor is imported, which keeps
    graphs on disk.
    """

    settles = False  # whether split factors become numbers where they leave a compiled program

    def __init__(
        self,
        installed: Installed,
        local_size: Callable[..., Any],
        equate: Callable[..., None],
        writing: Callable[[Sequence[DTensor]], Callable[[], None]],
        live: set[Any],
        of_one_rank: Callable[[], None],
    ) -> None:
        self._installed = installed
        self._local_size, self._equate = local_size, equate
        self._writing, self._live, self._of_one_rank = writing, live, of_one_rank
        installed.before_undo(self._end)
        installed.replace(patches.UNFLATTEN, self._unflatten)
        installed.replace(patches.LOCAL_SHAPES, self._local)
        installed.replace(patches.EXPANSION, as_they_are)
        self._meet_compiler()

    def _end(self) -> None:
        Tracing.settles = False

    def _meet_compiler(self) -> None:
        """Replace parts of the compiler, each once the program has imported its module: importing
        all of it takes as long as the rest of torch, and most programs do without.
        """
        installed = self._installed
        for row, made in (
            (compiler_patches.FRAMES, compiler.none_of_ours),
            (compiler_patches.CONSTANTS, lambda types: {*types, Given}),
            (compiler_patches.CONTEXTS, compiler.with_rows_of_their_own),
            (compiler_patches.GUARDS, compiler_guards.on_global_sizes),
            (compiler_patches.METADATA, self._settled_metadata),
            (
                compiler_patches.TRACES,
                lambda stock: collective_order.numbered(compiler.traced_as_known(stock)),
            ),
            (compiler_patches.VIEW_OPS, _noting_view_ops),
            (compiler_patches.ALIASES, _by_view_ops),
            (
                compiler_patches.WRITES,
                partial(compiler.with_writes_told, self._writing, self._live),
            ),
            (compiler_patches.EXPRESSIONS, compiler.of_two_arguments),
            (compiler_patches.SLOTS, compiler.first_wins),
            (compiler_patches.EQUALS, collective_order.apart_on_each_rank),
            (compiler_patches.PASSES, collective_order.with_passes_settled),
            (compiler_patches.ORDER, collective_order.in_one_order),
        ):
            installed.once_imported(row, partial(installed.replace, row, made))
        installed.once_imported(compiler_patches.ORDER, self._of_one_rank)

    def _settled_metadata(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        Tracing.settles = True  # from now on symbolic split factors may leave a program
        return compiler.settled_metadata(stock)

    def _unflatten(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def __tensor_unflatten__(
            inner_tensors: dict[str, Any], flatten_spec: Any, outer_size: Any, outer_stride: Any
        ) -> Any:
            placements, meta, order, requires_grad = flatten_spec
            local, mesh = inner_tensors["_local_tensor"], inner_tensors["device_mesh"]
            size, stride = outer_size, outer_stride
            if is_imagined(local) and may_be_uneven(
                DTensorSpec(mesh, placements, TensorMeta(torch.Size(size), stride, meta.dtype))
            ):
                self._of_one_rank()
            if is_symbolic(tuple(size)) and has_shape_env(tuple(size)):
                expected = self._local_shape(size, mesh, placements)
                for actual, wanted in zip(local.shape, expected or ()):
                    self._equate(actual, wanted, size)
            elif has_shape_env(tuple(stride)):
                size = shape_with_symbols(size, stride)
            if order is None or not any(isinstance(p, _StridedShard) for p in placements):
                return stock(inner_tensors, flatten_spec, size, stride)
            spec = DTensorSpec(
                mesh,
                placements,
                TensorMeta(size, stride, meta.dtype),
                order,
                use_strided_shard_as_shard_order=False,
            )
            return DTensor(local, spec, requires_grad=requires_grad)

        return __tensor_unflatten__

    def _local_shape(
        self, shape: Sequence[Any], mesh: Any, placements: Sequence[Placement]
    ) -> tuple[Any, ...] | None:
        """The shape of this rank's local tensor, from symbolic global sizes; None if it cannot be
        computed.
        """
        device = mesh.get_coordinate()
        if device is None or not are_known(placements):
            return None
        cuts: list[list[Any]] = [[] for _ in shape]
        order = decoded_order(tuple(placements), mesh.shape)
        for m, placement in order or enumerate(placements):
            cut = cut_of(placement)
            if cut is not None:
                cuts[cut[0]].append((cut[1], mesh.shape[m], device[m]))
        local = tuple(
            [self._local_size(n, *chain) if chain else n for n, chain in zip(shape, cuts)]
        )
        return None if any(n is None for n in local) else local

    def _local(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def compute_local_shape_and_global_offset(
            global_shape: Any, mesh: Any, placements: Any, skip_offset: bool = False
        ) -> Any:
            shape = global_shape
            if skip_offset and is_symbolic(tuple(shape)) and has_shape_env(tuple(shape)):
                local = self._local_shape(shape, mesh, placements)
                if local is not None:
                    return local, ()
            return stock(shape, mesh, placements, skip_offset)

        return compute_local_shape_and_global_offset


# Programs that do not compile never call these, and do not import what these import.


def _noting_view_ops(stock: Callable[..., Any]) -> Callable[..., Any]:
    def run_functionalized_fw_and_collect_metadata(*args: Any, **options: Any) -> Any:
        from cute_sharding.dtensor.replaced.view_replay import with_view_ops

        return with_view_ops(stock)(*args, **options)

    return run_functionalized_fw_and_collect_metadata


def _by_view_ops(stock: Callable[..., Any]) -> Callable[..., Any]:
    def gen_alias_from_base(*args: Any, **options: Any) -> Any:
        from cute_sharding.dtensor.replaced.view_replay import by_view_ops

        return by_view_ops(stock)(*args, **options)

    return gen_alias_from_base
