"""``cute_sharding.reshard``: a model, an optimizer, a state dict, from any meshes to any others."""

from __future__ import annotations

import importlib
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from cute_sharding.dtensor.models.nests import State
from cute_sharding.dtensor.models.plan import planned
from cute_sharding.dtensor.models.targets import Targets, WantedOfAll
from cute_sharding.dtensor.replaced import compiler, process_groups

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
    """The DTensors of ``state`` in other placements, on any mesh: many tensors in few exchanges.

    Every rank receives what it needs and does not hold, each element once, and of all tensors that
    go together one message from each peer. What is pending is finished first, tensor by tensor. A
    tensor that stands in several places moves once, and is one tensor after it. To be called by all
    ranks of all the meshes with the same names and arguments; a rank of none sends and receives
    nothing, and has DTensors without data.

    Args:
        state: a module, an optimizer, or a nest of dicts, lists and tuples of those and of tensors.
            It is changed in place: parameters stay the objects that they are, so that optimizers
            and programs that have them go on; other DTensors are replaced where they stand. Plain
            tensors, and all else, are left alone. What an optimizer has beside a parameter goes
            where that goes.
        placements: a function of name and DTensor; or a dict from names, or patterns of names (as
            in fnmatch; the first that fits), to placements, or a nest of the same form as
            ``state``; or placements for all. A tensor of which nothing is said, or None, stays. A
            DTensor in the place of placements says mesh and dtype as well.
        mesh: of the same kind of device; by default that of each tensor.
        memory_limit: the most bytes that a device may hold of it: sources, targets and buffers. So
            the tensors go in more exchanges, what shrinks first, and old memory is freed as new
            arrives. By default what goes together is 64 MiB, or an eighth of what a device sends
            and receives.
        progress: show a bar of tensors, on the first rank, by tqdm.
        dtype: what floating point tensors become (but what goes with a parameter). They travel in
            the smaller of the two.

    Returns:
        ``state``; of a tensor or a tuple, another one.

    Raises:
        ValueError, TypeError: the arguments do not fit together or the state, a tensor has a
            gradient, or no plan keeps within ``memory_limit``. Nothing has moved.
        RuntimeError: a local tensor is not of the shape that its placements give: nothing has
            moved. Or something has failed meanwhile: the error's ``moved`` and ``left`` name the
            tensors that have moved wholly, and those that are as they were.
        ImportError: ``progress``, and tqdm is not installed.

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
    is_first = bar_of is not None and plan.ranks[:1] == (process_groups.this_rank(),)
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
            f"{function}(progress=True) needs tqdm, which cannot be imported ({error}): pip "
            "install tqdm, or leave progress out",
            name="tqdm",
        ) from error
