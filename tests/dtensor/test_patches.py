"""What is replaced in torch is what the table says, all of it or nothing, and is put back."""

import ast
import importlib
import sys
import types
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY
from torch.distributed.tensor import DTensor

import cute_sharding
from cute_sharding.dtensor.switch import adapter
from cute_sharding.dtensor.torch_private import patches, registry
from cute_sharding.dtensor.torch_private.tracing import Tracing
from cute_sharding.ops.table import BY_OVERLOAD as SIGNATURES

TORCH = Path(torch.__file__).parent


def names(rows):
    return [row.name for row in rows]


def enable_everything():
    """Also what waits for the compiler, for a symbolic split factor, or for an import."""
    for row in patches.TABLE:
        importlib.import_module(row.module)
    importlib.import_module("torch._dynamo")
    cute_sharding.enable(redistribution=True)
    Tracing.in_force.meet_compiler()
    Tracing.read_numbers()


# -- the rows --------------------------------------------------------------------------------------


def test_each_place_has_one_row():
    assert len(patches.TABLE) > 30
    assert len(set(names(patches.TABLE))) == len(patches.TABLE)


def test_the_rows_are_about_this_torch():
    for row in patches.TABLE:
        assert row.found() is not None, row.name
        parts = row.attribute.removesuffix(".__code__").removesuffix(".__globals__").split(".")
        assert parts[-1] in (TORCH.parent / row.file).read_text(), row.name


def test_the_tests_of_the_rows_exist():
    for row in patches.TABLE:
        file, _, test = row.test.partition("::")
        tests = [
            node.name
            for node in ast.parse((REPOSITORY / file).read_text()).body
            if isinstance(node, ast.FunctionDef)
        ]
        assert test.startswith("test_") and test in tests, row.test


# -- all of torch, before, while and after ---------------------------------------------------------


def all_of_torch():
    """Every attribute of torch's modules and classes, the code of every function there, and what
    stands in the registries: by dotted name.
    """
    found = {}

    def note(owner, name):
        for attribute, value in list(vars(owner).items()):
            found[f"{name}.{attribute}"] = value
            function = getattr(value, "__func__", value) if type(value) is staticmethod else value
            if type(function) is types.FunctionType:
                found[f"{name}.{attribute}.__code__"] = function.__code__

    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "torch" and isinstance(module, types.ModuleType):
            note(module, name)
            for kind in list(vars(module).values()):
                if issubclass(type(kind), type) and kind.__module__ == name:
                    note(kind, f"{name}.{kind.__qualname__}")
    dispatcher = DTensor._op_dispatcher
    note(DTensor, "torch.distributed.tensor.DTensor")
    for owner, name in (
        (dispatcher, "torch.distributed.tensor.DTensor._op_dispatcher"),
        (
            dispatcher.sharding_propagator,
            "torch.distributed.tensor.DTensor._op_dispatcher.sharding_propagator",
        ),
    ):
        note(owner, name)
        for attribute, value in list(vars(owner).items()):
            if isinstance(value, dict):
                found |= {f"{name}.{attribute}[{key}]": entry for key, entry in value.items()}
    # Two that no module's dict has: they are options, which torch keeps elsewhere.
    for option in (patches.WAITS, patches.CACHE_KEYS):
        found[option.name] = option.found()
    return found


CACHE = "torch.distributed.tensor.DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding"


def changed(before, after):
    """The names that are no longer the very objects; but for the cache, of which each switch makes
    a fresh one.
    """
    missing = object()
    return {
        name
        for name in before.keys() | after.keys()
        if before.get(name, missing) is not after.get(name, missing) and name != CACHE
    }


def row_of(name):
    """The row that a changed name belongs to; None for one that is in no row."""
    name = name.replace("torch.distributed.tensor._api.DTensor", "torch.distributed.tensor.DTensor")
    if name.startswith("torch.distributed.tensor._dispatch._cute_sharding_"):
        return patches.TAIL_NAMES
    for row in patches.TABLE:
        if name in (row.name, f"{row.name}.__code__") or (
            row.entries and name.startswith(f"{row.name}[")
        ):
            return row
    return None


def test_what_is_replaced_is_in_the_table_and_is_put_back():
    enable_everything()  # imports what there is
    cute_sharding.disable()
    before = all_of_torch()
    enable_everything()
    on = {name: row_of(name) for name in changed(before, all_of_torch())}
    assert [name for name, row in on.items() if row is None] == []
    assert set(names(on.values())) == set(names(patches.TABLE))
    assert adapter._installed.missing == [] and Tracing.settles
    assert {row.name for row in patches.TABLE if not row.entries} - set(
        adapter.parts_replaced()
    ) == {patches.CACHE_KEYS.name}
    cute_sharding.disable()
    assert changed(before, all_of_torch()) == set()


def test_ops_are_told_apart_by_all_their_keywords():
    """In both tables of schema infos: torch's cache goes by what they name."""
    tables = patches.SCHEMA_INFOS.found(), patches.SCHEMA_INFOS_OF_ONE_DIM.found()
    ops = [op for op in map(registry.overload, SIGNATURES) if op in tables[1]]
    assert ops
    cute_sharding.enable()
    for op in ops:
        keywords = {argument.name for argument in op._schema.arguments if argument.kwarg_only}
        for table in tables:
            assert keywords | {"cute_sharding"} <= set(table[op].static_kwargkey or ()), op


@pytest.mark.parametrize(
    "failing", ["install_redistribution", "install_propagation", "install_state"]
)
def test_what_fails_half_way_is_undone(failing, monkeypatch):
    enable_everything()
    cute_sharding.disable()
    before = all_of_torch()
    owner = next(
        module
        for module in (adapter.redistribution_hook, adapter.op_hooks, adapter.state_dicts)
        if hasattr(module, failing)
    )
    install = getattr(owner, failing)

    def fails(installed, *args):
        install(installed, *args)
        raise MemoryError("at the end of it")

    monkeypatch.setattr(owner, failing, fails)
    with pytest.raises(MemoryError):
        cute_sharding.enable()
    assert changed(before, all_of_torch()) == set()


# -- a torch that lacks a name ---------------------------------------------------------------------


def lacks(row, monkeypatch):
    """Take the name away, as from a torch that never had it."""
    owner, name = row.owner(), row.attribute.rpartition(".")[2]
    if name not in vars(owner) and hasattr(type(owner), name):
        owner = type(owner)  # a method, which the object has of its class
    monkeypatch.delattr(owner, name)


def removable(lacking):
    """But for what torch itself does not run without: its registries, its options."""
    return [
        row
        for row in patches.TABLE
        if bool(row.lacking) is lacking
        and not row.entries
        and row not in (patches.TAIL, patches.CACHE_KEYS)
    ]


def in_place():
    """What each row finds now; of a dict, its entries."""
    found = {}
    for row in patches.TABLE:
        value = row.found()
        if row.entries:
            found |= {f"{row.name}[{key}]": entry for key, entry in value.items()}
        else:
            found[row.name] = value.__func__ if isinstance(value, types.MethodType) else value
    return found


def test_a_torch_that_lacks_what_is_needed_is_refused(monkeypatch):
    enable_everything()
    cute_sharding.disable()
    for row in removable(True):
        with monkeypatch.context() as patch:
            lacks(row, patch)
            before = in_place()
            with pytest.raises(RuntimeError, match=f"has no {row.name}: {row.lacking}"):
                cute_sharding.enable()
            assert not cute_sharding.is_enabled()
            assert changed(before, in_place()) == set(), row.name


def test_what_a_torch_lacks_otherwise_is_left_out_with_one_warning(monkeypatch, caplog):
    enable_everything()
    cute_sharding.disable()
    for row in removable(False):
        caplog.clear()
        with monkeypatch.context() as patch:
            lacks(row, patch)
            before = in_place()
            enable_everything()
            assert adapter._installed.missing == [row]
            said = [record.getMessage() for record in caplog.records]
            assert sum(f"has no {row.name}:" in line for line in said) == 1, said
            cute_sharding.disable()
            assert changed(before, in_place()) == set(), row.name
