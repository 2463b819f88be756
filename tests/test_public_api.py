"""The public face. What may be imported is in the ``__all__`` of the package and of its folders,
and nothing else is promised; each name is documented, with an example. All examples of the code run
here.
"""

import doctest
import importlib
import inspect
import os
import re
import subprocess
import sys
from functools import cached_property
from types import ModuleType

import pytest
from processes import search_path
from public_examples import (
    PACKAGES,
    REPOSITORY,
    docstring_of,
    examples_in,
    public_names,
    run,
)

ROOT = REPOSITORY / "cute_sharding"
# Of packages that may not be installed.
OTHERS = tuple(
    f"cute_sharding.integrations.{package}"
    for package in ("transformers", "verl", "vllm.trainer", "vllm.worker")
)
MODULES = sorted(
    name
    for path in ROOT.rglob("*.py")
    if path.name != "__main__.py"
    for name in [
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")
    ]
    if not name.startswith(OTHERS)
)
NAMES = list(public_names())
# Their examples start process groups, and switch things on.
ADAPTER = (
    "cute_sharding.dtensor",
    "cute_sharding.tools.profile.refusing",
    "cute_sharding.tools.stats",
)


@pytest.mark.parametrize("name", [name for name in MODULES if not name.startswith(ADAPTER)])
def test_examples_run(name, capsys):
    assert run(name) == 0, capsys.readouterr().out


@pytest.mark.costly
def test_examples_of_the_adapter_run():
    """In a process of their own."""
    with_examples = [
        name
        for name in MODULES
        if name.startswith(ADAPTER) and ">>>" in inspect.getsource(importlib.import_module(name))
    ]
    assert len(with_examples) >= 4
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "tests/public_examples.py"), *with_examples],
        env={**os.environ, "PYTHONPATH": search_path(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_example_that_fails_is_noticed(monkeypatch, capsys):
    module = ModuleType("cute_sharding_with_a_wrong_example", ">>> 1 + 1\n3\n")
    module.__file__ = str(REPOSITORY / "tests/conftest.py")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert run(module.__name__) == 1
    assert "Expected:\n    3\nGot:\n    2" in capsys.readouterr().out


@pytest.mark.parametrize("package, name", NAMES)
def test_each_name_has_an_example_that_uses_it(package, name):
    text = docstring_of(importlib.import_module(package), name)
    assert text, f"{package}.{name} has no docstring"
    sources = [example.source for example in doctest.DocTestParser().get_examples(text)]
    assert any(re.search(rf"\b{name}\b", source) for source in sources), (
        f"no example of {package}.{name} uses it"
    )


def test_the_examples_of_names_are_among_those_that_run():
    """Else the test above would hold for text that nobody runs."""
    tested = {test.name.rpartition(".")[2] for name in MODULES for test in examples_in(name)}
    assert {name for _, name in NAMES} <= tested


def methods_of(cls):
    """(name, whether it or what it overrides has a docstring) of each public method."""
    for name, value in vars(cls).items():
        method = isinstance(value, (property, cached_property, classmethod, staticmethod))
        if not name.startswith("_") and (method or inspect.isfunction(value)):
            yield name, any(getattr(vars(base).get(name), "__doc__", None) for base in cls.__mro__)


@pytest.mark.parametrize("package", PACKAGES)
def test_each_public_method_is_documented(package):
    module = importlib.import_module(package)
    classes = [
        value
        for name in module.__all__
        if inspect.isclass(value := getattr(module, name))
        and value.__module__.startswith("cute_sharding")
    ]
    without = [
        f"{cls.__name__}.{name}" for cls in classes for name, has in methods_of(cls) if not has
    ]
    assert not without


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_exports_what_it_says(package):
    """But for modules: a package has its submodules as attributes, whether it wants or not."""
    module = importlib.import_module(package)
    assert sorted(set(module.__all__)) == sorted(module.__all__)
    assert set(module.__all__) <= set(dir(module))
    exported = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert exported <= set(module.__all__)


def test_a_name_that_is_none():
    with pytest.raises(AttributeError, match="no attribute 'enabel'"):
        importlib.import_module("cute_sharding").enabel
