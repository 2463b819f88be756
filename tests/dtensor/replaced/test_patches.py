"""What is replaced in torch is what the table says, all of it or nothing, and is put back."""

import ast
import importlib
import importlib.util
import inspect
import re
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from processes import REPOSITORY
from torch.distributed.tensor import DTensor

import cute_sharding
from cute_sharding.dtensor.replaced import compiler_patches, op_schemas, patches, used
from cute_sharding.dtensor.replaced.compiler import Tracing
from cute_sharding.dtensor.replaced.patch import Installed, calling
from cute_sharding.dtensor.replaced.read_hook import WatchedReads
from cute_sharding.dtensor.switch import adapter
from cute_sharding.relations.table import SIGNATURES

TORCH = Path(torch.__file__).parent


def generate_patches():
    """The module that writes docs/lists/patches.md."""
    path = REPOSITORY / "docs" / "generate_patches.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ROWS = patches.TABLE


def names(rows):
    return [row.name for row in rows]


def enable_everything():
    """Also what waits for an import, or for a copy."""
    for row in ROWS:
        importlib.import_module(row.module)
    cute_sharding.enable(redistribution=True, movement=True)
    WatchedReads.watch()


# -- the rows --------------------------------------------------------------------------------------


def test_each_place_has_one_row():
    assert len(patches.TABLE) > 30
    assert len(set(names(patches.TABLE))) == len(patches.TABLE)


def test_the_rows_are_about_this_torch():
    for row in ROWS:
        assert row.found() is not None, row.name
        parts = row.attribute.removesuffix(".__code__")
        assert parts.split(".")[-1] in (TORCH.parent / row.file).read_text(), row.name


def test_the_page_says_which_files_replace_a_row():
    page = generate_patches()
    for row in patches.TABLE:
        files = page.installers(row)
        assert files and {Path(file).parts[0] for file in files} <= {"replaced", "extras"}, row


# -- private names that are used and not replaced --------------------------------------------------

# Private attributes that no row has, and why.
OPTIONAL = {
    "_C": "a module",
    **dict.fromkeys(("_c10d_functional", "_dtensor"), "a namespace of ops"),
    "_ops": "a module",
    "_fused_rms_norm": "a kernel of GPUs, in a dry run alone",
    "_fused_rms_norm_backward": "its gradient, in a dry run alone",
    "_scaled_dot_product_efficient_attention": "a kernel of GPUs, in a dry run alone",
    "_scaled_dot_product_flash_attention": "a kernel of GPUs, in a dry run alone",
    "_has_same_storage_numel": "an op",
    "_new_zeros_with_same_feature_meta": "an op",
    "_check": "public, by torch's own account",
    "_timeout": "of the backend's options; where they have none, torch's default is taken",
    "_PreparedSingleDimStrategy": "of the row about expansion, which may be left out",
    "_sym_register": "of the rows about the compiler, which may be left out",
    **dict.fromkeys(("_replace", "_asdict"), "of named tuples"),
    "_at_fork_reinit": "of Python's locks",
    "_getframe": "of Python's sys",
    "_installed": "our own",
    "_watched": "our own",
    "_watches": "our own",
    "_write": "our own",
}


def private_attributes():
    """{attribute: where} of all that what imports torch takes of an object that is not its own."""
    found = {}
    package = REPOSITORY / "cute_sharding"
    for path in sorted([*(package / "dtensor").rglob("*.py"), *(package / "tools").rglob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Attribute)
                and re.match(r"_(?!_|cute_sharding)", node.attr)
                and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
            ):
                found[node.attr] = f"{path.name}:{node.lineno}"
    return found


def test_private_names_that_are_used_are_rows():
    rows = {part for row in (*patches.TABLE, *used.TABLE) for part in row.attribute.split(".")}
    found = private_attributes()
    assert len(found) > 40
    assert {name: at for name, at in found.items() if name not in rows | {*OPTIONAL}} == {}
    assert set(OPTIONAL) <= set(found), "no longer used"
    last = {row.attribute.rpartition(".")[2] for row in used.TABLE}
    assert last - set(found) - {"_base"} == set(), "no longer used"  # _base: looked up by getattr


def test_this_torch_has_them():
    assert [row.name for row in used.TABLE if row.is_lacking()] == []
    for row in used.TABLE:
        absent = replace(row, attribute=f"{row.attribute}_of_no_torch")
        assert absent.is_lacking(), row.name


def test_the_tests_of_the_rows_exist():
    for row in patches.TABLE:
        file, _, test = row.test.partition("::")
        tests = [
            node.name
            for node in ast.parse((REPOSITORY / file).read_text()).body
            if isinstance(node, ast.FunctionDef)
        ]
        assert test.startswith("test_") and test in tests, row.test


@pytest.mark.parametrize("is_traced", [False, True])
def test_code_that_calls_another_function_has_what_each_was_given(is_traced):
    """Also where it is made again of the same code; and it is hashed, as compilers do."""
    row = patches.TAIL
    code, owner = row.found(), row.owner()
    for found in ([1], [2]):
        new = calling(lambda _, found=found: lambda *_: found, row, is_traced=is_traced)(code)
        function = types.FunctionType(new, vars(sys.modules[row.module]))
        assert function(*[None] * new.co_argcount) == found
        assert hash(new) != hash(code) and owner.__code__ is code


# -- all of torch, before, while and after ---------------------------------------------------------


def entries_of(row):
    """What stands in a dict; or in a set, whose members are all there is to an entry."""
    entries = row.found()
    return [*(entries.items() if isinstance(entries, dict) else zip(entries, entries))]


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
    for row in (patches.LOSSES, patches.COMPOSITES):
        found |= {f"{row.name}[{key}]": entry for key, entry in entries_of(row)}
    # One that no module's dict has: it is an option, which torch keeps elsewhere.
    found[compiler_patches.CACHE_KEYS.name] = compiler_patches.CACHE_KEYS.found()
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
    for row in ROWS:
        if row.attribute.endswith(".__code__") and name.endswith(f".{row.attribute}"):
            return row  # wherever it was taken by name
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
    assert set(names(on.values())) == set(names(ROWS))
    assert adapter._installed.missing == [] and Tracing.settles
    assert {row.name for row in ROWS if not row.entries} - set(adapter.objects_replaced()) == {
        compiler_patches.CACHE_KEYS.name
    }
    cute_sharding.disable()
    assert changed(before, all_of_torch()) == set()


def test_what_is_replaced_takes_arguments_by_torchs_names(monkeypatch):
    """Programs call some of these themselves: redistribute_local_tensor, and what computes local
    shapes.
    """
    replaced, replace = [], Installed.replace

    def noted(installed, row, wrap):
        def made(stock):
            replaced.append((row.name, stock, wrap(stock)))
            return replaced[-1][-1]

        replace(installed, row, made)

    monkeypatch.setattr(Installed, "replace", noted)
    enable_everything()
    cute_sharding.disable()
    compared, others = set(), []
    for name, stock, ours in replaced:
        if isinstance(stock, types.CodeType):
            stock, ours = (types.FunctionType(code, {}) for code in (stock, ours))
        if not isinstance(stock, types.FunctionType):
            continue  # properties and options; a staticmethod is unwrapped before
        given = [
            parameter
            for parameter in inspect.signature(stock).parameters.values()
            if parameter.name != "self"
        ]
        takes = inspect.signature(ours, follow_wrapped=False)
        before = [None] * ("self" in inspect.signature(stock).parameters)
        first = [p for p in given if p.kind is p.POSITIONAL_OR_KEYWORD]
        rest = {p.name: None for p in given if p.kind is p.KEYWORD_ONLY}
        try:
            takes.bind(*before, **{p.name: None for p in first}, **rest)
            takes.bind(*before, *first, **rest)
        except TypeError as error:
            others.append(f"{name}{takes}: {error}")
        compared.add(name.removesuffix(".__code__").rpartition(".")[2])
    assert others == [], "\n".join(others)
    assert {"redistribute_local_tensor", "compute_local_shape_and_global_offset"} <= compared
    assert len(compared) > 15


def test_both_tables_name_the_same_arguments():
    """torch's cache goes by what the two tables of schema infos name: all keywords but values."""
    tables = patches.SCHEMA_INFOS.found(), patches.SCHEMA_INFOS_OF_ONE_DIM.found()
    ops = [op for op in map(op_schemas.overload, SIGNATURES) if op in tables[1]]
    assert ops
    cute_sharding.enable()
    for op in ops:
        keywords = {
            argument.name
            for argument in op._schema.arguments
            if argument.kwarg_only and "number" not in str(argument.type)
        }
        assert tables[0][op] is tables[1][op]
        assert keywords <= set(tables[0][op].static_kwargkey or ()), op


@pytest.mark.parametrize(
    "failing", ["install_redistribution", "install_propagation", "install_state"]
)
def test_what_fails_half_way_is_undone(failing, monkeypatch):
    enable_everything()
    cute_sharding.disable()
    before = all_of_torch()
    owner = next(
        module
        for module in (adapter.redistribution_hook, adapter.op_schemas, adapter.state_dicts)
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
    """But for what torch itself does not run without: its registries, its options, the methods of
    each tensor; and methods that a base class has too.
    """
    of_tensors = {patches.OFFSETS, patches.DEEP_COPIES, patches.DATA}
    of_tensors |= {patches.READ_BY_INDEX, patches.WRITTEN_BY_INDEX}
    return [
        row
        for row in ROWS
        if bool(row.lacking) is lacking
        and row not in of_tensors
        and row not in (patches.LEVEL_ENTERED, patches.LEVEL_LEFT)
        and not row.entries
        and not row.attribute.endswith(".__code__")
        and row is not compiler_patches.CACHE_KEYS
    ]


def in_place():
    """What each row finds now; of a dict, its entries."""
    found = {}
    for row in ROWS:
        value = row.found()
        if row.entries:
            found |= {f"{row.name}[{key}]": entry for key, entry in entries_of(row)}
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
            with pytest.raises(RuntimeError, match=f"has no {row.name}, .* {row.lacking}"):
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
            assert sum(f"has no {row.name}, or" in line for line in said) == 1, said
            cute_sharding.disable()
            assert changed(before, in_place()) == set(), row.name
