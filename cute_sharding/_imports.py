"""The import system: what is to be done once a module has been imported, and is whole.

Below all else, as :mod:`cute_sharding._settings`: `import torch` comes here in a program that has a
flag set. So it imports neither torch nor anything of this package.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeAlias

Action: TypeAlias = Callable[[], None]


def when_imported(name: str, action: Action) -> Action:
    """Run ``action`` once module ``name`` has been imported, and whatever of torch and of us
    imports it on its way: now, if so it is. Returns a function that gives up waiting for the
    import.
    """
    if name in sys.modules:
        when_nothing_is_half_imported(action)
        return lambda: None

    class Finder:
        """Finds ``name`` as the other finders do, with a loader that looks further at the end. (A
        program may also just ask for the spec, and import later or never.)
        """

        is_asking = False  # the others, among which may be one like this for the same module

        @staticmethod
        def find_spec(fullname: str, path: Any = None, target: Any = None) -> Any:
            if fullname != name or Finder.is_asking:
                return None
            others = [
                finder
                for finder in sys.meta_path
                if finder is not Finder and hasattr(finder, "find_spec")
            ]
            Finder.is_asking = True
            try:
                spec = next(
                    (
                        found
                        for finder in others
                        if (found := finder.find_spec(fullname, path, target)) is not None
                    ),
                    None,
                )
            finally:
                Finder.is_asking = False
            if spec is None or spec.loader is None:
                return spec
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: Any) -> None:
                loader.exec_module = execute
                execute(module)
                if Finder in sys.meta_path:
                    sys.meta_path.remove(Finder)
                    when_nothing_is_half_imported(action)

            loader.exec_module = exec_module
            return spec

    def give_up() -> None:
        if Finder in sys.meta_path:
            sys.meta_path.remove(Finder)

    sys.meta_path.insert(0, Finder)
    return give_up


def when_nothing_is_half_imported(action: Action) -> None:
    """Run ``action`` once this thread is not in the middle of importing a module of torch or of
    this package: now, if it is not.
    """
    importing = _importing()
    if importing:
        when_whole(importing[0], lambda: when_nothing_is_half_imported(action))
    else:
        action()


def _importing() -> list[Any]:
    """The specs of our and torch's modules that this thread is in the middle of importing,
    innermost first. (Other threads' are no hindrance: an import waits for them.)
    """
    specs: list[Any] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_load_unlocked" and frame.f_globals.get("__name__") in (
            "importlib._bootstrap",
            "_frozen_importlib",
        ):
            spec = frame.f_locals.get("spec")
            if _is_half_imported(spec):
                specs.append(spec)
        frame = frame.f_back
    return specs


def half_imported() -> list[Any]:
    """The specs of our and torch's modules that some thread is in the middle of importing."""
    return [
        spec
        for module in list(sys.modules.values())
        if _is_half_imported(spec := getattr(module, "__spec__", None))
    ]


def _is_half_imported(spec: Any) -> bool:
    return getattr(spec, "_initializing", False) is True and spec.name.partition(".")[0] in (
        "torch",
        "cute_sharding",
    )


def when_whole(spec: Any, action: Action) -> None:
    """Run ``action`` when the module of ``spec``, which is being imported, has been: the import
    system then says so in ``spec._initializing``, whether it succeeded or not.
    """
    kind: Any = type(spec)

    class Waiting(kind):  # type: ignore[misc]
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "_initializing" and not value:
                self.__class__ = kind
                action()

    spec.__class__ = Waiting
