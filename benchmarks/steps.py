"""What whole training steps receive: PyTorch alone, this package, and JAX's compiler.

    python -m benchmarks.steps [--only NAME ...] [--mesh 2 4] [--jax PYTHON] [--check]
        [--settings PyTorch views redistribution movement all] [--adamw] [--errors]

A step is a forward pass, a backward pass and SGD, in float32, and gives the loss on each device.
Weights and inputs have the same shardings on each side (benchmarks/training_steps.py). Printed is
what the busiest rank receives, in bytes, and in how many collectives; last, what each setting
receives over what JAX does. Without ``--mesh``, the meshes are (8,), (2, 4) and (4, 4).

PyTorch and this package run as ``cute_sharding estimate`` runs them, each setting of each step in a
process of its own. PyTorch alone is the package without flags: tests/test_training_steps.py
counts the same without the package. What JAX receives is read off the program that it compiles for
CPUs, and again with the reduce-scatters that XLA makes on other devices: the second is compared.
``--check`` compares the losses and the new weights of torch and JAX on one device.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from statistics import geometric_mean
from typing import Any, NamedTuple, TypeAlias

from benchmarks.beside_jax import answer, mesh_of, placed
from benchmarks.hlo import received_of
from benchmarks.training_steps import STEPS, Step, names_of, numbers

MESHES = ((8,), (2, 4), (4, 4))
ALIKE = 1e-4  # of a loss
BESIDE = ("PyTorch", "JAX on CPUs", "JAX")


class Received(NamedTuple):
    """What the busiest rank receives in one step."""

    bytes: int
    collectives: int


# What a side says of a step: what is received, or why it does not run.
Answer: TypeAlias = "Received | str"
# A side says so of all steps, on a mesh.
Side: TypeAlias = "Callable[[Sequence[Step], tuple[int, ...]], Mapping[str, Answer]]"


# -- sides -----------------------------------------------------------------------------------------


def setting(name: str, optimizer: str = "sgd") -> Side:
    """The steps with a setting of ``estimate``, and with one of the optimizers that they have."""

    def side(steps: Sequence[Step], mesh: tuple[int, ...]) -> dict[str, Answer]:
        from cute_sharding import estimate

        def of(step: Step) -> Answer:
            program = f"benchmarks.steps_of_torch:{step.name}.{optimizer}"
            try:
                (run,) = estimate(program, dict(zip(names_of(mesh), mesh)), settings=[name]).runs
            except RuntimeError as error:  # PyTorch alone may search for rules for minutes
                return str(error)
            return run.failure or Received(run.step.busiest_bytes, run.step.collectives)

        with ThreadPoolExecutor(os.cpu_count()) as pool:  # each waits for a process
            return dict(zip([step.name for step in steps], pool.map(of, steps)))

    return side


def planned(optimizer: str) -> Side:
    """The steps as planned: what they receive when they run by the plan."""

    def side(steps: Sequence[Step], mesh: tuple[int, ...]) -> dict[str, Answer]:
        from cute_sharding import plan_step

        sizes, found = dict(zip(names_of(mesh), mesh)), dict[str, Answer]()
        for step in steps:
            program = f"benchmarks.steps_of_torch:{step.name}.{optimizer}"
            try:
                plan = plan_step(program, sizes, beside_pytorch=False)
                total = plan.totals["planned"]
                found[step.name] = Received(total.received, total.collectives)
            except RuntimeError as error:
                found[step.name] = str(error)
        return found

    return side


def jax_by(python: str, scatters: bool) -> Side:
    """The steps as JAX compiles them, in a process of a Python that has JAX. ``scatters``: as in
    :func:`benchmarks.hlo.received_of`.
    """

    def side(steps: Sequence[Step], mesh: tuple[int, ...]) -> dict[str, Answer]:
        found = _compiled(python, *_arguments(steps, mesh))
        return {name: Received(*both[scatters]) for name, both in found.items()}

    return side


@cache
def _compiled(python: str, *arguments: str) -> dict[str, Any]:
    return answer("steps", "jax", arguments, python)


def _arguments(steps: Sequence[Step], mesh: tuple[int, ...]) -> list[str]:
    return ["--only", *[step.name for step in steps], "--mesh", *map(str, mesh)]


def compiled_by_jax(
    steps: Sequence[Step], mesh: tuple[int, ...]
) -> dict[str, list[tuple[int, int]]]:
    """What the compiled steps receive, without and with reduce-scatters. The new weights are
    sharded as the weights are.
    """
    device_mesh = mesh_of(mesh, names_of(mesh))
    import jax

    from benchmarks.steps_of_jax import once

    whole = jax.sharding.NamedSharding(device_mesh, jax.sharding.PartitionSpec())
    found = {}
    for step in steps:
        operands = {}
        for name, (shape, over, below) in step.operands.items():
            spec = [tuple(each for each in dims if each in names_of(mesh)) for dims in over]
            dtype = "float32" if below is None else "int32"
            operands[name] = placed(shape, dtype, device_mesh, spec)
        inputs, weights = ({n: operands[n] for n in some} for some in (step.inputs, step.weights))
        shardings = whole, {name: weight.sharding for name, weight in weights.items()}
        program = jax.jit(once(step), out_shardings=shardings).lower(weights, inputs).compile()
        found[step.name] = [received_of(program.as_text(), some) for some in (False, True)]
    return found


# -- values on one device --------------------------------------------------------------------------

# Of a step: the loss, and of each new weight the norm.
Values: TypeAlias = "tuple[float, dict[str, float]]"


def values_of_jax(steps: Sequence[Step]) -> dict[str, Values]:
    import jax
    import jax.numpy as jnp

    from benchmarks.steps_of_jax import once

    found = {}
    for step in steps:
        given = {name: jnp.asarray(x) for name, x in numbers(step).items()}
        inputs, weights = ({n: given[n] for n in some} for some in (step.inputs, step.weights))
        loss, updated = jax.jit(once(step))(weights, inputs)
        change = {name: float(jnp.linalg.norm(updated[name] - weights[name])) for name in weights}
        found[step.name] = float(loss), change
    return found


def values_of_torch(steps: Sequence[Step]) -> dict[str, Values]:
    import torch

    import benchmarks.steps_of_torch as programs

    found = {}
    for step in steps:
        given = {name: torch.from_numpy(x) for name, x in numbers(step).items()}
        before = {name: given[name].clone() for name in step.weights}
        for name in step.weights:
            given[name].requires_grad_()
        loss = getattr(programs, step.name).once(given)()
        change = {name: float((given[name].detach() - x).norm()) for name, x in before.items()}
        found[step.name] = float(loss), change
    return found


def check(steps: Sequence[Step], python: str) -> None:
    """Print the losses of PyTorch and of JAX on one device, and where they or the changes of a
    weight differ.
    """
    torchs = values_of_torch(steps)
    jaxs = answer("steps", "values", _arguments(steps, (1,)), python)
    for step in steps:
        (loss, changes), (other, others) = torchs[step.name], jaxs[step.name]
        differ = [n for n in changes if abs(changes[n] - others[n]) > 10 * ALIKE * others[n]]
        if abs(loss - other) > ALIKE * abs(other):
            differ.insert(0, "loss")
        verdict = f"WRONG: {', '.join(differ)}" if differ else "alike"
        print(f"{step.name:20} loss {loss:10.6f} {other:10.6f} {verdict}", flush=True)


# -- the table -------------------------------------------------------------------------------------


def cell(found: Answer) -> str:
    if isinstance(found, str):
        return "takes long" if "took more than" in found else "raises"
    return f"{found.bytes:,} in {found.collectives}" if found.collectives else "0"


def ratio(found: Answer, beside: Answer) -> float | None:
    if isinstance(found, str) or isinstance(beside, str) or not beside.bytes:
        return None
    return max(found.bytes, 1) / beside.bytes


def show(steps: Sequence[Step], meshes: Sequence[tuple[int, ...]], sides: dict[str, Side]) -> Any:
    """Print the table, and return why what raises does."""
    compared = [name for name in sides if name not in BESIDE] if "JAX" in sides else []
    heads = ["step", "mesh", *sides, *[f"{name} / JAX" for name in compared]]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    ratios: dict[str, list[float]] = {name: [] for name in compared}
    errors = []
    for mesh in meshes:
        said = {name: side(steps, mesh) for name, side in sides.items()}
        for step in steps:
            cells = [cell(said[name][step.name]) for name in sides]
            for name in compared:
                each = ratio(said[name][step.name], said["JAX"][step.name])
                ratios[name] += [each] if each is not None else []
                cells.append("" if each is None else f"{each:.2f}")
            print(f"| {' | '.join([step.about, str(mesh), *cells])} |", flush=True)
            for name, found in said.items():
                if isinstance(found[step.name], str):
                    errors.append((step.name, mesh, name, found[step.name]))
    for name, some in ratios.items():
        if some:
            print(f"\n{name} / JAX, geometric mean of {len(some)}: {geometric_mean(some):.2f}")
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--mesh", nargs="*", type=int)
    parser.add_argument("--jax", default="", help="a Python that has JAX")
    parser.add_argument("--settings", nargs="*", default=["PyTorch", "all"])
    parser.add_argument("--adamw", action="store_true", help="AdamW, not SGD; without JAX")
    parser.add_argument("--check", action="store_true", help="compare values on one device")
    parser.add_argument("--errors", action="store_true", help="print why something raises")
    parser.add_argument("--side", choices=("jax", "values"))
    given = parser.parse_args()
    steps = [s for s in STEPS if not given.only or any(o in s.name for o in given.only)]
    meshes = [tuple(given.mesh)] if given.mesh else MESHES
    if given.side:
        found = compiled_by_jax(steps, *meshes) if given.side == "jax" else values_of_jax(steps)
        print(json.dumps(found))
        return
    if given.check:
        check(steps, given.jax or sys.executable)
        return
    optimizer = "adamw" if given.adamw else "sgd"
    sides = {name: setting(name, optimizer) for name in given.settings}
    sides["planned"] = planned(optimizer)
    if given.jax and not given.adamw:
        sides["JAX on CPUs"], sides["JAX"] = (jax_by(given.jax, some) for some in (False, True))
    for error in show(steps, meshes, sides):
        if given.errors:
            print(*error, sep=": ")


if __name__ == "__main__":
    main()
