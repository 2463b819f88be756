"""The examples in the package's docstrings, and how they are run.

A public name's examples see what ``from package import *`` gives, so that they run for a user as
they stand; those of other functions see their module. ``python tests/public_examples.py MODULE``
runs the examples of modules in a process of their own.
"""

import ast
import doctest
import importlib
import inspect
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PACKAGES = [
    "cute_sharding",
    *(
        f"cute_sharding.{layer}"
        for layer in (
            "layout",
            "sharding",
            "relations",
            "relations.table",
            "exchange",
            "propagation",
            "dtensor",
        )
    ),
]


@cache
def source_of(module):
    return ast.parse(Path(module.__file__).read_text())


def attribute_docstrings(module):
    """The strings that follow assignments to a module's names: constants and type aliases have no
    docstring of their own.
    """
    body, found = source_of(module).body, {}
    for statement, following in pairwise(body):
        if not isinstance(following, ast.Expr) or not isinstance(following.value, ast.Constant):
            continue
        if isinstance(statement, ast.Assign):
            target = statement.targets[0]
        elif isinstance(statement, ast.AnnAssign):
            target = statement.target
        else:
            continue
        if isinstance(target, ast.Name) and isinstance(following.value.value, str):
            found[target.id] = following.value.value
    return found


@cache
def home_of(module, name):
    """The module in which the name is defined, or given its value."""
    for node in ast.walk(source_of(module)):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return home_of(importlib.import_module(node.module), alias.name)
    return module


def docstring_of(package, name):
    """Of a class or function its own; of anything else the string that follows its assignment."""
    value = getattr(package, name)
    if getattr(value, "__name__", None) == name and value.__module__.startswith("cute_sharding"):
        return inspect.getdoc(value)
    return attribute_docstrings(home_of(package, name)).get(name)


def public_names():
    """(package, name) of all there are."""
    for package in PACKAGES:
        for name in importlib.import_module(package).__all__:
            yield package, name


@cache
def homes_of_public_names():
    """(module, name) -> the package that exports it."""
    found = {}
    for package, name in public_names():
        home = home_of(importlib.import_module(package), name)
        found.setdefault((home.__name__, name), package)
    return found


def examples_in(name):
    """The examples of a module: those of its docstrings, and of its constants'."""
    module = importlib.import_module(name)
    found = doctest.DocTestFinder(exclude_empty=True).find(module)
    found += [
        doctest.DocTestParser().get_doctest(text, vars(module), f"{name}.{constant}", None, None)
        for constant, text in attribute_docstrings(module).items()
    ]
    public = homes_of_public_names()
    for test in found:
        owner = test.name.removeprefix(f"{name}.").partition(".")[0]
        if (name, owner) in public:
            package = importlib.import_module(public[name, owner])
            test.globs = {exported: getattr(package, exported) for exported in package.__all__}
    return [test for test in found if test.examples]


def run(name):
    """Run a module's examples; the number that failed, after saying how."""
    runner = doctest.DocTestRunner()
    for test in examples_in(name):
        runner.run(test)
    return runner.summarize().failed


if __name__ == "__main__":
    sys.exit(sum(map(run, sys.argv[1:])) > 0)
