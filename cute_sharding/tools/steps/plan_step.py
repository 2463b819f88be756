"""``plan_step``: how a step runs at the least price."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from cute_sharding._settings import EVERYTHING
from cute_sharding.programs.plan import StepPlan, Totals
from cute_sharding.tools.estimate import estimate
from cute_sharding.tools.estimate.estimates import (
    SECONDS,
    Estimate,
    check,
    environment,
    located,
    sizes_and_names,
)
from cute_sharding.tools.estimate.values import STOCK


def plan_step(
    step: Callable[..., Any] | str,
    mesh: Sequence[int] | Mapping[str, int],
    *,
    memory_limit: int | None = None,
    free: Literal["parameters"] | None = None,
    fixed: Sequence[str] = (),
    each_line: bool = False,
    network: str | None = None,
    rank: int = 0,
    device: Literal["cuda", "cpu"] = "cuda",
    beside_pytorch: bool = True,
) -> StepPlan:
    """The plan by which a step receives the fewest bytes: which values are redistributed where, in
    the forward and the backward pass. No op could choose that alone: a value that several ops need
    is gathered once, a pending sum is reduced once, and a small sharded tensor does not make a
    large one sharded. ``with cute_sharding.planned(plan):`` runs a program by it (docs/steps.md).

    Args:
        step: as for ``estimate``: a function at the top of a module, or its name. ``step(mesh)``
            makes a model, its batch and an optimizer, and returns one step.
        mesh, network, rank, device: as for ``estimate``. A plan by a network takes the fewest
            seconds.
        memory_limit: the bytes that the values of the step may hold on a device at once.
        free: "parameters": also choose the placements of the weights, the ``torch.nn.Parameter``s
            that ``step(mesh)`` makes.
        fixed: lines whose ops and results stay as they are: ``file:number``, or the end of it.
        each_line: for each line that changes, also run the step with that line alone as planned,
            and count what it saves.
        beside_pytorch: also run the step with PyTorch alone, for the totals.

    Raises:
        ValueError: an argument has an unknown value, the function cannot be imported by name, or
            no op is on a line of ``fixed``.
        RuntimeError: the step raises an error, or its process ended without a result.
        MemoryLimitError: no plan keeps within ``memory_limit``.
        ImportError: scipy is missing: ``pip install "cute-sharding[plan]"``.

    >>> plan_step("training_step", mesh={"dp": 64, "tp": 8})
    Traceback (most recent call last):
    ValueError: 'training_step' is not the name of a function: write module:function or \
file.py:function
    """
    if free not in (None, "parameters"):
        raise ValueError(f'free={free!r}: write free="parameters", or leave it out')
    sizes, names = sizes_and_names(mesh)
    check(sizes, network, None, rank, device, [STOCK])
    request = dict[str, Any](function=located(step), sizes=sizes, names=names, rank=rank)
    request |= {"device": device, "memory_limit": memory_limit, "free": free, "network": network}
    request |= {"fixed": (fixed,) if isinstance(fixed, str) else tuple(fixed)}
    request |= {"each_line": each_line}
    if not beside_pytorch:
        return _planned(request)
    alone = partial(estimate, step, mesh, network=network, rank=rank, device=device)
    return _beside(alone, request)


def _beside(alone: Callable[..., Estimate], request: Mapping[str, Any]) -> StepPlan:
    """The plan, and what the step receives with PyTorch alone."""
    with ThreadPoolExecutor(1) as pool:
        stock = pool.submit(alone, settings=[STOCK])
        plan = _planned(request)
        estimated = stock.result()
    (run,) = estimated.runs
    if run.failure is not None:
        return plan
    seconds = None if request["network"] is None else estimated.seconds(run)
    total = Totals(run.step.busiest_bytes, run.step.collectives, seconds)
    return replace(plan, totals={STOCK: total, **plan.totals})


def _planned(request: Mapping[str, Any]) -> StepPlan:
    """The plan, from a process of its own."""
    network, (module, file, name) = request["network"], request["function"]
    program = f"{module if file is None else os.path.relpath(file)}:{name}"
    flags = {EVERYTHING: "1"} | ({"USE_CUTE_NETWORK": network} if network else {})
    with TemporaryDirectory() as folder:
        asked, answer = Path(folder, "request"), Path(folder, "answer")
        asked.write_bytes(pickle.dumps({**request, "program": program}))
        command = [sys.executable, "-m", "cute_sharding.tools.steps", str(asked), str(answer)]
        try:
            done = subprocess.run(
                command, env=environment(flags), capture_output=True, text=True, timeout=SECONDS
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"the step was not planned within {SECONDS} s: plan a model with fewer layers"
            ) from None
        if not answer.exists():
            last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
            raise RuntimeError(
                f"the process that plans the step exited with {done.returncode}, and its last "
                f"output was: {last}"
            )
        found: StepPlan | Exception | str = pickle.loads(answer.read_bytes())
    if isinstance(found, Exception):
        raise found
    if isinstance(found, str):
        raise RuntimeError(f"the step cannot be planned, because its dry run fails: {found}")
    return found
