"""What `import torch` runs, in every program, once the package is installed: a look at two environment variables.

torch loads this module through the entry-point group ``torch.backends``. It must cost nothing when the flags are unset, so it imports nothing but
``os``, and when one is set it must not import DTensor while torch itself is still being imported: it waits for the program to.
"""

import os

FLAG = "USE_CUTE_VIEW_PROPAGATION"
REDISTRIBUTION_FLAG = "USE_CUTE_REDISTRIBUTION"
_ON, _OFF = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


def autoload() -> None:
    """Switch view propagation, redistribution or both on if the environment says so."""
    views, redistribution = _is_on(FLAG), _is_on(REDISTRIBUTION_FLAG)
    if views or redistribution:

        def enable() -> None:
            import cute_sharding

            cute_sharding.enable(views=views, redistribution=redistribution)

        _when_imported("torch.distributed.tensor", enable)


def _is_on(flag: str) -> bool:
    value = os.environ.get(flag, "").strip().lower()
    if value not in _ON + _OFF:
        raise ValueError(f"{flag}={os.environ[flag]!r} is neither on nor off: set it to 1 or 0")
    return value in _ON


def _when_imported(name, action):  # type: ignore[no-untyped-def]
    """Run ``action`` as soon as module ``name`` has been imported; now, if it has."""
    import importlib.util
    import sys

    if name in sys.modules:
        action()
        return

    class Finder:
        """Finds ``name`` as the other finders do, with a loader that runs ``action`` at the end."""

        @staticmethod
        def find_spec(fullname, path=None, target=None):  # type: ignore[no-untyped-def]
            if fullname != name:
                return None
            sys.meta_path.remove(Finder)
            spec = importlib.util.find_spec(fullname)
            if spec is not None and spec.loader is not None:
                execute = spec.loader.exec_module

                def exec_module(module):  # type: ignore[no-untyped-def]
                    execute(module)
                    action()

                spec.loader.exec_module = exec_module  # type: ignore[method-assign]
            return spec

    sys.meta_path.insert(0, Finder)
