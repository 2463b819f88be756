"""Waiting for modules of torch to be imported, and whole. Imports nothing at once: it runs in every program that sets a flag, as it starts."""


def when_imported(name, action):  # type: ignore[no-untyped-def]
    """Run ``action`` once module ``name`` has been imported, and whatever of torch and of us imports it on its way: now, if so it is. Returns a function that gives up waiting for the import."""
    import sys

    if name in sys.modules:
        when_nothing_is_half_imported(action)
        return lambda: None

    class Finder:
        """Finds ``name`` as the other finders do, with a loader that looks further at the end. (A program may also just ask for the spec, and import later or never.)"""

        @staticmethod
        def find_spec(fullname, path=None, target=None):  # type: ignore[no-untyped-def]
            if fullname != name:
                return None
            others = [finder for finder in sys.meta_path if finder is not Finder and hasattr(finder, "find_spec")]
            spec = next((found for finder in others if (found := finder.find_spec(fullname, path, target)) is not None), None)
            if spec is None or spec.loader is None:
                return spec
            loader, execute = spec.loader, spec.loader.exec_module

            def exec_module(module):  # type: ignore[no-untyped-def]
                loader.exec_module = execute  # type: ignore[method-assign]
                execute(module)
                if Finder in sys.meta_path:
                    sys.meta_path.remove(Finder)
                    when_nothing_is_half_imported(action)

            loader.exec_module = exec_module  # type: ignore[method-assign]
            return spec

    def give_up() -> None:
        if Finder in sys.meta_path:
            sys.meta_path.remove(Finder)

    sys.meta_path.insert(0, Finder)
    return give_up


def when_nothing_is_half_imported(action):  # type: ignore[no-untyped-def]
    """Run ``action`` once this thread is not in the middle of importing a module of torch or of this package: now, if it is not."""
    importing = _importing()
    if importing:
        when_whole(importing[0], lambda: when_nothing_is_half_imported(action))
    else:
        action()


def _importing():  # type: ignore[no-untyped-def]
    """The specs of our and torch's modules that this thread is in the middle of importing, innermost first. (Other threads' are no hindrance: an import waits for them.)"""
    import sys

    specs = []
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_load_unlocked" and frame.f_globals.get("__name__") in ("importlib._bootstrap", "_frozen_importlib"):
            spec = frame.f_locals.get("spec")
            if _is_half_imported(spec):
                specs.append(spec)
        frame = frame.f_back  # type: ignore[assignment]
    return specs


def half_imported():  # type: ignore[no-untyped-def]
    """The specs of our and torch's modules that some thread is in the middle of importing."""
    import sys

    return [spec for module in list(sys.modules.values()) if _is_half_imported(spec := getattr(module, "__spec__", None))]


def _is_half_imported(spec):  # type: ignore[no-untyped-def]
    return getattr(spec, "_initializing", False) is True and spec.name.partition(".")[0] in ("torch", "cute_sharding")


def when_whole(spec, action):  # type: ignore[no-untyped-def]
    """Run ``action`` when the module of ``spec``, which is being imported, has been: the import system then says so in ``spec._initializing``, whether it succeeded or not."""
    kind = type(spec)

    class Waiting(kind):  # type: ignore[misc, valid-type]
        def __setattr__(self, name, value):  # type: ignore[no-untyped-def]
            super().__setattr__(name, value)
            if name == "_initializing" and not value:
                self.__class__ = kind
                action()

    spec.__class__ = Waiting
