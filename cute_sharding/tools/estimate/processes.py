"""A process for each setting. A process shares nothing with other processes, and sets its flags
before it imports torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from inspect import getsourcefile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from cute_sharding._settings import FLAGS

# The environment variable that marks a process of a dry run.
_DRY_RUN = "_CUTE_SHARDING_DRY_RUN"
SECONDS = 600


class Function(NamedTuple):
    """A function of a program, in a form that another process can find.

    Attributes:
        module: the name of the module.
        file: the file of the module; None if the module can be imported by name.
        name: the dotted name of the function in the module.
    """

    module: str
    file: str | None
    name: str

    @classmethod
    def of(cls, step: Callable[..., Any] | str) -> Function:
        """From a function, or from ``module:function`` or ``file.py:function``.

        Raises:
            ValueError: another process could not find the function.

        >>> Function.of("train.py:step")
        Function(module='train', file='train.py', name='step')
        """
        if isinstance(step, str):
            where, _, name = step.rpartition(":")
            if not where or not name:
                raise ValueError(
                    f"{step!r} is not the name of a function: write module:function or "
                    "file.py:function"
                )
            if where.endswith(".py"):
                return cls(Path(where).stem, where, name)
            return cls(where, None, name)
        module, name = getattr(step, "__module__", None), getattr(step, "__qualname__", "<")
        if not callable(step) or "<" in name or not isinstance(module, str):
            raise ValueError(
                f"estimate cannot import {step!r} in a new process: pass a function that is "
                "defined at the top level of a module, or 'module:function'"
            )
        if module != "__main__":
            return cls(module, None, name)
        file = getsourcefile(step)
        if file is None or not Path(file).exists():
            raise ValueError(
                f"estimate cannot import {name} in a new process, because the function is not in a "
                "file: write the function into a file, and pass 'file.py:function'"
            )
        return cls(Path(file).stem, file, name)


def results(
    request: Mapping[str, Any], flags: Sequence[Mapping[str, str]], workers: int
) -> list[dict[str, Any]]:
    """The results of the dry run with each of the given flags.

    Raises:
        RuntimeError: a process ended without a result, or this process is itself part of a dry run.
    """
    if not flags:
        return []
    if os.environ.get(_DRY_RUN):
        raise RuntimeError(
            "estimate was called inside a dry run of estimate, which imports the file of the step. "
            'In the file of the step, call estimate only behind if __name__ == "__main__":'
        )
    with TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
        asked = Path(folder, "request.json")
        asked.write_text(json.dumps(request))
        return list(
            pool.map(
                lambda i: _result(asked, Path(folder, f"{i}.json"), flags[i]), range(len(flags))
            )
        )


def environment(flags: Mapping[str, str]) -> dict[str, str]:
    """The environment of a dry run: only the given flags, the search path of this process, one
    thread, and no compiler, because a compiled program sends the same as an eager program.
    """
    kept = {name: value for name, value in os.environ.items() if name not in FLAGS}
    ours = str(Path(__file__).parents[2])
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join([ours, *filter(None, sys.path)]),
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",
        _DRY_RUN: "1",
        **flags,
    }


def _result(asked: Path, answer: Path, flags: Mapping[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "cute_sharding.tools.estimate", str(asked), str(answer)]
    try:
        done = subprocess.run(
            command, env=environment(flags), capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(
            f"the dry run took more than {SECONDS} s: run fewer layers with layers=, or use a "
            "smaller step"
        ) from None
    if not answer.exists():
        last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise RuntimeError(
            f"the process of a dry run exited with {done.returncode}, and its last output was: "
            f"{last}"
        )
    result: dict[str, Any] = json.loads(answer.read_text())
    return result
