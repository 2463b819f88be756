"""The house rules: who imports whom, and torch; its private names."""

import ast
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from torch._ops import OpOverload

from cute_sharding.dtensor.replaced.op_schemas import overload

PACKAGE = Path(__file__).parent.parent / "cute_sharding"
FILES = sorted(PACKAGE.rglob("*.py"))

# Downward, as the files of a folder may import: itself and what stands below it.
LAYERS = [
    "_settings",
    "_imports",
    "_html",
    "_words",
    "_memory",
    "layout",
    "sharding",
    "relations",
    "exchange",
    "propagation",
    "models",
    "programs",
    "dtensor",
    "integrations",
    "tools",
]
ADAPTER, TOOLS = "dtensor", "tools"
# Of interfaces that others define: imported by those who ask for one, and by nothing else here.
INTEGRATIONS = "integrations"
# Optional, so imported when a picture is rendered, and by one function alone.
RENDERERS = ("rich", "matplotlib")


def module_name(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = [module_name(path) for path in FILES]


@cache
def imports(path):
    """(imported module, line, whether the import runs when the module is imported) for every import
    of the file.
    """
    tree = ast.parse(path.read_text())

    def walk(node, runs):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for name in child.names:
                    yield name.name, child.lineno, runs
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}:{child.lineno}: imports are absolute here"
                for name in child.names:
                    yield f"{child.module}.{name.name}", child.lineno, runs
            else:
                inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                type_checking = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(
                    child.test
                )
                yield from walk(child, runs and not inside and not type_checking)

    return list(walk(tree, True))


def of_torch(name):
    return name.split(".")[0] in ("torch", "torchgen", "functorch")


def layer_of(name):
    parts = name.split(".")
    return (
        parts[1] if len(parts) > 1 and parts[0] == "cute_sharding" and parts[1] in LAYERS else None
    )


def test_there_is_something_to_check():
    assert {layer_of(name) for name in MODULES} >= set(LAYERS)
    assert any(of_torch(name) for path in FILES for name, _, _ in imports(path))


@pytest.mark.parametrize("layer", LAYERS[:-1])
def test_imports_run_downward(layer):
    """The package's face stands above them, and what people look at imports all."""
    below = LAYERS[: LAYERS.index(layer) + 1]
    for path in FILES:
        for name, line, _ in imports(path) if layer_of(module_name(path)) == layer else ():
            if name.split(".")[0] == "cute_sharding":
                assert layer_of(name) in below, f"{path}:{line}: {layer} must not import {name}"


def test_integrations_are_imported_by_themselves_alone():
    found = [
        f"{path}:{line}"
        for path in FILES
        for name, line, _ in imports(path)
        if layer_of(name) == INTEGRATIONS and layer_of(module_name(path)) != INTEGRATIONS
    ]
    assert not found


def test_no_modules_import_one_another():
    """Also not in a function, nor for types alone: what is in a circle cannot be read by itself."""
    known = set(MODULES)

    def module_of(name):
        while name and name not in known:
            name = name.rpartition(".")[0]
        return name

    imported = {
        module_name(path): {module_of(name) for name, _, _ in imports(path)} - {""}
        for path in FILES
    }
    while True:  # take away what imports nothing that is left
        lowest = {
            name for name, others in imported.items() if not others & imported.keys() - {name}
        }
        if not lowest:
            break
        imported = {name: others for name, others in imported.items() if name not in lowest}
    assert not imported, f"in a circle, or above one: {sorted(imported)}"


# Downward within the algebra, as its files may import: what stands before them. A package's name is
# its face, which is above its files.
LAYOUT = [
    "cute_sharding.layout.errors",
    *(
        f"cute_sharding.layout.symbolic.{name}"
        for name in (
            "expressions",
            "facts",
            "assumptions",
            "coefficients",
            "normal",
            "proofs",
            "questions",
        )
    ),
    "cute_sharding.layout.symbolic",
    "cute_sharding.layout.layout",
    *(
        f"cute_sharding.layout.algebra.{name}"
        for name in (
            "tiler",
            "modes",
            "jumps",
            "compose",
            "divide",
            "product",
            "inverse",
        )
    ),
    "cute_sharding.layout.algebra",
    "cute_sharding.layout.size",
    "cute_sharding.layout",
]


def test_imports_within_the_algebra_run_downward():
    paths = {module_name(path): path for path in FILES if layer_of(module_name(path)) == "layout"}
    assert sorted(paths) == sorted(LAYOUT)
    for position, importer in enumerate(LAYOUT):
        for name, line, _ in imports(paths[importer]):
            of = [module for module in LAYOUT if f"{name}.".startswith(f"{module}.")]
            if of:
                imported = max(of, key=len)
                assert imported in LAYOUT[:position], (
                    f"{paths[importer]}:{line}: {importer} must not import {imported}"
                )


@pytest.mark.parametrize(
    "layer", [None, *(layer for layer in LAYERS if layer not in (ADAPTER, TOOLS, INTEGRATIONS))]
)
def test_torch_is_imported_by_the_adapter_and_tools_alone(layer):
    for path in FILES:
        for name, line, runs in imports(path) if layer_of(module_name(path)) == layer else ():
            assert not of_torch(name), f"{path}:{line} imports {name}"
            if layer is None:
                # The package's face and the autoload hook run in every program: the adapter waits
                # until it is needed.
                at_once = runs and layer_of(name) == ADAPTER
                assert not at_once, f"{path}:{line} imports {name} at once"


def test_libraries_that_render_are_not_imported_by_name():
    found = [
        f"{path}:{line} {name}"
        for path in FILES
        for name, line, _ in imports(path)
        if name.split(".")[0] in RENDERERS
    ]
    assert not found, f"use tools.drawing.picture.library: {found}"


def test_modules_of_the_package_are_not_imported_by_name():
    """But by statements, which the other tests see."""
    found = [
        f"{path}:{node.lineno}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__")
        and any("cute_sharding" in ast.unparse(argument) for argument in node.args)
    ]
    assert not found, "import it by a statement, or move what is wanted to where it is below"


def private_torch_names(path):
    """Dotted names rooted in torch that have a private component, and names imported from torch
    that have one.
    """
    tree = ast.parse(path.read_text())
    bound = {}  # local name -> what it is in torch
    found = []

    def is_private(name):
        return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))

    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                if of_torch(name.name):
                    bound[name.asname or name.name.split(".")[0]] = (
                        name.name if name.asname else name.name.split(".")[0]
                    )
                    if is_private(name.name):
                        found.append((name.name, node.lineno))
        elif isinstance(node, ast.ImportFrom) and node.module and of_torch(node.module):
            for name in node.names:
                full = f"{node.module}.{name.name}"
                bound[name.asname or name.name] = full
                if is_private(full):
                    found.append((full, node.lineno))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            parts, value = [], node
            while isinstance(value, ast.Attribute):
                parts.append(value.attr)
                value = value.value
            if isinstance(value, ast.Name) and value.id in bound:
                full = ".".join([bound[value.id], *reversed(parts)])
                if is_private(full):
                    found.append((full, node.lineno))
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and re.fullmatch(r"torch(\.\w+)*\._\w+(\.\w+)*", node.value)
        ):
            found.append((node.value, node.lineno))
    return found


# Where an op may be named: its row, a bug of torch's, and what stands for one op that is run.
OF_OPS = ("fixes", "refit")


def test_ops_are_named_in_rows_and_fixes():
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno} {node.value}"
        for path in FILES
        if room_of(module_name(path)) not in (None, *OF_OPS)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.fullmatch(r"\w+\.\w+", node.value) and isinstance(overload(node.value), OpOverload)
    ]
    assert not found, f"what is known of an op stands in its row (relations/table): {found}"


ROOM = PACKAGE / ADAPTER / "replaced"


def test_private_names_of_torch_stand_in_one_room():
    assert any(private_torch_names(path) for path in ROOM.glob("*.py")), (
        "the check finds none where there are many"
    )
    elsewhere = [
        f"{path}:{line} {name}"
        for path in FILES
        if path.parent != ROOM
        for name, line in private_torch_names(path)
    ]
    assert not elsewhere, f"move to {ROOM.name}: {elsewhere}"


# The rooms of the adapter, downward: each imports from those before it.
ROOMS = [
    "bookkeeping",
    "replaced",
    "compiled",
    "run",
    "models",
    "door",
    "refit",
    "checkpoints",
    "fixes",
    "extras",
    "decide",
    "programs",
    "switch",
]


def room_of(name):
    parts = name.split(".")
    return parts[2] if parts[:2] == ["cute_sharding", ADAPTER] and len(parts) > 2 else None


def test_the_adapter_is_its_rooms():
    folder = PACKAGE / ADAPTER
    assert [path.name for path in folder.glob("*.py")] == ["__init__.py"]
    assert sorted(ROOMS) == sorted(path.parent.name for path in folder.glob("*/__init__.py"))
    for room in ROOMS:
        assert "\n\n" in ast.get_docstring(
            ast.parse((folder / room / "__init__.py").read_text())
        ), f"{room} does not say what may be touched there"


@pytest.mark.parametrize("room", ROOMS)
def test_imports_between_rooms_run_downward(room):
    below = ROOMS[: ROOMS.index(room) + 1]
    for path in FILES:
        for name, line, _ in imports(path) if room_of(module_name(path)) == room else ():
            if name.startswith(f"cute_sharding.{ADAPTER}"):
                assert room_of(name) in below, f"{path}:{line}: {room} must not import {name}"


# Downward within the room, as its files may import: what stands before them. Of the rest of the
# adapter they know the log and the releases alone: rules, plans and answers are handed in.
TORCH_PRIVATE = [
    "patch",
    "used",
    "compiler_patches",
    "patches",
    "dispatch_modes",
    "communication",
    "observing",
    "local_tensors",
    "scatters",
    "symints",
    "tensor_specs",
    "op_schemas",
    "dispatch",
    "asked",
    "given_placements",
    "indices",
    "mixed_lists",
    "forward_mode",
    "composites",
    "read_hook",
    "redistribution_hook",
    "timeline",
    "joined",
    "collective_order",
    "expansion",
    "compiler",
    "state_dicts",
    "fully_sharded",
    "worlds",
]


@pytest.mark.parametrize("position, name", list(enumerate(TORCH_PRIVATE)))
def test_imports_within_the_room_run_downward(position, name):
    room = f"cute_sharding.{ADAPTER}.{ROOM.name}"
    allowed = [f"{room}.{below}" for below in TORCH_PRIVATE[:position]]
    allowed += [f"cute_sharding.{layer}" for layer in LAYERS if layer not in (ADAPTER, "_settings")]
    allowed += [
        f"cute_sharding.{ADAPTER}.bookkeeping.{name}"
        for name in ("stats.logger", "versions", "locks")
    ]
    for imported, line, _ in imports(ROOM / f"{name}.py"):
        if imported.split(".")[0] == "cute_sharding":
            assert any(f"{imported}.".startswith(f"{module}.") for module in allowed), (
                f"{name}.py:{line} must not import {imported}"
            )


def test_the_room_has_no_other_files():
    assert sorted(TORCH_PRIVATE) == sorted(
        path.stem for path in ROOM.glob("*.py") if path.stem != "__init__"
    )
    for path in ROOM.glob("*.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path} says nothing of itself"


@pytest.mark.parametrize(
    "name",
    [
        "cute_sharding",
        *(f"cute_sharding.{layer}" for layer in LAYERS if layer != ADAPTER),
        *(f"cute_sharding.tools.{tool}" for tool in ("cli", "drawing", "estimate", "profile")),
        "cute_sharding._autoload",
    ],
)
def test_imports_without_torch(name):
    code = (
        f"import sys, {name}; assert 'torch' not in sys.modules, [m for m in sys.modules if "
        "m.startswith('torch')][:3]"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
