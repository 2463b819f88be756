"""``cute_sharding.reshard``: a model, an optimizer, a state dict, from any meshes to any others."""

from __future__ import annotations

import importlib
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from cute_sharding.dtensor.models.nests import State
from cute_sharding.dtensor.models.plan import planned
from cute_sharding.dtensor.models.targets import Targets, WantedOfAll
from cute_sharding.dtensor.replaced import communication, compiler

T = TypeVar("T")


@compiler.outside_graphs
def reshard(
    state: T,
    placements: WantedOfAll,
    mesh: DeviceMesh | None = None,
    *,
    memory_limit: int | None = None,
    progress: bool = False,
    dtype: torch.dtype | None = None,
) -> T:
    """Move the DTensors of ``state`` to other placements, on any mesh: many tensors in few
    exchanges.

    Every rank receives exactly once each element that it needs and does not hold, in one message
    from each peer for all tensors that move together. Each ``Partial`` is reduced first. If
    ``state`` has a tensor in several places, the tensor moves once, and stays one tensor. Call it
    on all ranks of all meshes with the same names and arguments. A rank outside of all meshes gets
    DTensors without data.

    Args:
        state: a module, an optimizer, or nested dicts, lists and tuples of modules, optimizers and
            tensors. It is changed in place. A parameter stays the same object, so an optimizer of
            the parameter remains valid, and the optimizer's state of the parameter moves too. Other
            DTensors are replaced. Plain tensors and other objects stay.
        placements: a function of name and DTensor; a dict from names, or patterns of names (as in
            fnmatch; the first that fits), to placements; a nested structure of the same form as
            ``state``; or placements for all tensors. A tensor without placements, or with None,
            stays. If you give a DTensor instead of placements, its mesh and dtype apply too.
        mesh: the target mesh, of the same device type; by default the mesh of each tensor.
        memory_limit: the most bytes of sources, targets and buffers that a device may hold. With a
            limit, the tensors move in more exchanges, and each source is freed when its target is
            complete. By default, the tensors of one exchange have an eighth of the bytes that a
            device sends and receives, at least 64 MiB and at most 1 GiB.
        progress: show a bar of tensors, on the first rank, by tqdm.
        dtype: the new dtype of floating point tensors (except an optimizer's state). A tensor is
            sent in the smaller of the two dtypes.

    Returns:
        ``state``; if it is a tensor or a tuple, a new one.

    Raises:
        ValueError, TypeError: the arguments do not fit together or the state, a tensor has a
            gradient, or no plan keeps within ``memory_limit``. No tensor has moved.
        RuntimeError: a local tensor does not have the shape that its placements give, and no tensor
            has moved; or the move failed. The attributes ``moved`` and ``left`` of the error name
            the tensors that have moved completely, and those that are unchanged.
        ImportError: ``progress`` is True, and tqdm is not installed.

    The method is in docs/models.md.

    >>> import torch
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from torch.distributed.tensor import Shard, distribute_tensor
    >>> from torch.testing._internal.distributed.fake_pg import FakeStore
    >>> store = FakeStore()  # this process is rank 0 of four, of which the others are made up
    >>> torch.distributed.init_process_group("fake", rank=0, world_size=4, store=store)
    >>> line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    >>> weights = {
    ...     f"layers.{i}.{name}": distribute_tensor(torch.ones(8, 12), line, [Shard(0)])
    ...     for i in range(3)
    ...     for name in ("wq", "wo")
    ... }
    >>> moved = reshard(weights, {"*.wq": "S(0), R", "*.wo": "R, S(1)"}, square)
    >>> [tuple(moved[f"layers.0.{name}"].to_local().shape) for name in ("wq", "wo")]
    [(4, 12), (8, 6)]
    >>> torch.distributed.destroy_process_group()
    """
    bar_of: Any = tqdm_of("reshard") if progress else None
    whole = State(state)
    plan = planned(whole, Targets(placements, mesh, dtype), memory_limit)
    is_first = bar_of is not None and plan.ranks[:1] == (communication.this_rank(),)
    if not is_first:
        result: T = plan.run_with(whole)
        return result
    moving = sum(not tensor.stays for tensor in plan.tensors)
    with bar_of(total=moving, unit="tensor", desc="reshard") as bar:
        result = plan.run_with(whole, bar.update)
    return result


def tqdm_of(function: str) -> Any:
    """The class of bars.

    Raises:
        ImportError: tqdm is not installed.
    """
    try:
        return importlib.import_module("tqdm.auto").tqdm
    except ImportError as error:
        raise ImportError(
            f"{function}(progress=True) needs tqdm, which cannot be imported ({error}): run pip "
            "install tqdm, or leave out progress=True",
            name="tqdm",
        ) from error
