"""What a device receives in a program that XLA has compiled, read off its text (HLO)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s64": 8, "u64": 8, "f64": 8}
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.-]+)")
_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.-]+) = (.*?) ([\w-]+)\((.*)$")
_CALLED = re.compile(r"(?:calls|to_apply)=%?([\w.-]+)")
_COLLECTIVE = re.compile(
    r"%?([\w.-]+) = (.*?) (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)"
    r"(?:-start)?\((.*)$",
    re.M,
)
# Ops that give the same elements.
_SAME = ("bitcast", "copy", "reshape", "transpose")


def received_of(program: str, scatters: bool = False) -> tuple[int, int]:
    """The bytes that a device receives in a compiled program of XLA, and its collectives.

    XLA for CPUs has no pass that makes a reduce-scatter of an all-reduce of which each device keeps
    a slice, as XLA for GPUs and TPUs has. With ``scatters``, such a one counts as if it had.
    """
    total, count = 0.0, 0
    graph = Graph(program) if scatters else None
    for name, made, op, rest in _COLLECTIVE.findall(program):
        parts = _group_size(rest)
        count += 1
        for i, shape in enumerate(_SHAPE.findall(made)):
            n = elements(shape) * _BYTES.get(shape[0], 4)
            if op == "all-reduce" and graph and graph.is_sliced(name, i, elements(shape) // parts):
                total += n * (parts - 1) / parts
                continue
            total += {
                "all-reduce": 2 * n * (parts - 1) / parts,
                "all-gather": n * (parts - 1) / parts,
                "all-to-all": n * (parts - 1) / parts,
                "reduce-scatter": n * (parts - 1),
                "collective-permute": n,
            }[op]
    return round(total), count


def elements(shape: Sequence[str]) -> int:
    """The elements of an array of XLA: of its dtype and its sizes."""
    return prod(int(size) for size in shape[1].split(",") if size)


class Instruction(NamedTuple):
    name: str
    made: str
    op: str
    operands: tuple[str, ...]
    rest: str  # of its line
    is_root: bool


class Graph:
    """The instructions of a compiled program by their computations."""

    def __init__(self, program: str) -> None:
        self._of: dict[str, list[Instruction]] = {}
        within: list[Instruction] = []
        for line in program.splitlines():
            if found := _COMPUTATION.match(line):
                within = self._of.setdefault(found[1], [])
            elif found := _INSTRUCTION.match(line):
                root, name, made, op, rest = found.groups()
                operands = tuple(_NAME.findall(rest.partition(")")[0]))
                within.append(Instruction(name, made, op, operands, rest, bool(root)))

    def is_sliced(self, name: str, part: int, size: int) -> bool:
        """Whether all that reads a result, or a part of a tuple, slices so many elements of it."""
        within = next(some for some in self._of.values() if any(i.name == name for i in some))
        readers = [i for i in within if name in i.operands]
        if readers and all(i.op == "get-tuple-element" for i in readers):
            index = re.compile(rf"index={part}\b")
            readers = [i for i in readers if index.search(i.rest)]
            return all(self._is_sliced(i.name, within, size) for i in readers)
        return self._is_sliced(name, within, size)

    def _is_sliced(self, name: str, within: list[Instruction], size: int) -> bool:
        readers = [i for i in within if name in i.operands]
        return bool(readers) and all(self._slices(i, name, within, size) for i in readers)

    def _slices(self, reader: Instruction, name: str, within: list[Instruction], size: int) -> bool:
        if reader.op == "dynamic-slice":
            return elements(_SHAPE.findall(reader.made)[0]) == size
        if reader.op in _SAME and not reader.is_root:
            return self._is_sliced(reader.name, within, size)
        if called := _CALLED.search(reader.rest):
            inner = self._of[called[1]]
            numbers = [f"{k})" for k, each in enumerate(reader.operands) if each == name]
            same = [i for i in inner if i.op == "parameter" and i.rest.startswith(tuple(numbers))]
            return all(self._is_sliced(i.name, inner, size) for i in same)
        return False


def _group_size(text: str) -> int:
    """The devices of one group, in any of XLA's three ways to write the groups."""
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", text):
        axes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        return prod(int(axes[name]) for name in re.findall(r"'(\w+)'", found[2]))
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]", text):
        return int(found[2])
    found = re.search(r"replica_groups=\{\{([\d,]+)\}", text)
    return len(found[1].split(",")) if found else 1
