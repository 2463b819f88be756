"""What `import torch` runs, in every program, once the package is installed: a look at the
environment variables of :mod:`cute_sharding._settings`.

torch loads this module through the entry-point group ``torch.backends``, at the end of its own
import. Three rules hold here:

- It costs nothing where no flag is set: it then imports nothing but ``os``.
- It waits for the program to import DTensor, and then until no module of torch is half imported:
  ``import torch._dynamo`` imports DTensor on its way, and what we replace must be whole.
- It never stops a program. Whatever fails becomes one warning that says what, and torch's own rules
  stay in force, all of them.
"""

import os

PREFIX = "USE_CUTE_"  # of all flags

# What became of the flags in this process, for `python -m cute_sharding status`.
report = (
    "torch has not asked for this package (it does when it is imported, where the package is "
    "installed and TORCH_DEVICE_BACKEND_AUTOLOAD is not 0)"
)


def autoload() -> None:
    """Switch on what the environment says, once the program has imported DTensor."""
    global report
    try:
        report = "no flag is set"
        if not any(name.startswith(PREFIX) for name in os.environ):
            return
        from cute_sharding._settings import from_environment

        settings = from_environment(os.environ)
        if settings is not None:
            report = "waiting for torch.distributed.tensor to be imported"
            when_imported("torch.distributed.tensor", lambda: _enable(settings))
    except Exception as error:
        _give_up(error)


def _enable(settings):  # type: ignore[no-untyped-def]
    """Switch on; again once what another thread is importing is whole, if that is why it failed."""
    global report
    try:
        import cute_sharding

        cute_sharding.enable(**settings)
        report = "switched on by the environment"
    except Exception as error:
        half = half_imported()
        if half:
            when_whole(half[0], lambda: _enable(settings))
        else:
            _give_up(error)


def _give_up(error):  # type: ignore[no-untyped-def]
    """One warning; as a line where warnings are errors."""
    global report
    import warnings

    report = f"not switched on: {type(error).__name__}: {error}"
    message = (
        f"cute_sharding is {report}. The program goes on with torch's own rules; `python -m "
        "cute_sharding status` tells more."
    )
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    except RuntimeWarning:
        import sys

        print(message, file=sys.stderr)


# -- the import system -----------------------------------------------------------------------------


def when_imported(name, action):  # type: ignore[no-untyped-def]
    """Run ``action`` once module ``name`` has been imported, and whatever of torch and of us
    imports it on its way: now, if so it is. Returns a function that gives up waiting for the
    import.
    """
    import sys

    if name in sys.modules:
        when_nothing_is_half_imported(action)
        return lambda: None

    class Finder:
        """Finds ``name`` as the other finders do, with a loader that looks further at the end. (A
        program may also just ask for the spec, and import later or never.)
        """

        is_asking = False  # the others, among which may be one like this for the same module

        @staticmethod
        def find_spec(fullname, path=None, target=None):  # type: ignore[no-untyped-def]
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
    """Run ``action`` once this thread is not in the middle of importing a module of torch or of
    this package: now, if it is not.
    """
    importing = _importing()
    if importing:
        when_whole(importing[0], lambda: when_nothing_is_half_imported(action))
    else:
        action()


def _importing():  # type: ignore[no-untyped-def]
    """The specs of our and torch's modules that this thread is in the middle of importing,
    innermost first. (Other threads' are no hindrance: an import waits for them.)
    """
    import sys

    specs = []
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_load_unlocked" and frame.f_globals.get("__name__") in (
            "importlib._bootstrap",
            "_frozen_importlib",
        ):
            spec = frame.f_locals.get("spec")
            if _is_half_imported(spec):
                specs.append(spec)
        frame = frame.f_back  # type: ignore[assignment]
    return specs


def half_imported():  # type: ignore[no-untyped-def]
    """The specs of our and torch's modules that some thread is in the middle of importing."""
    import sys

    return [
        spec
        for module in list(sys.modules.values())
        if _is_half_imported(spec := getattr(module, "__spec__", None))
    ]


def _is_half_imported(spec):  # type: ignore[no-untyped-def]
    return getattr(spec, "_initializing", False) is True and spec.name.partition(".")[0] in (
        "torch",
        "cute_sharding",
    )


def when_whole(spec, action):  # type: ignore[no-untyped-def]
    """Run ``action`` when the module of ``spec``, which is being imported, has been: the import
    system then says so in ``spec._initializing``, whether it succeeded or not.
    """
    kind = type(spec)

    class Waiting(kind):  # type: ignore[misc, valid-type]
        def __setattr__(self, name, value):  # type: ignore[no-untyped-def]
            super().__setattr__(name, value)
            if name == "_initializing" and not value:
                self.__class__ = kind
                action()

    spec.__class__ = Waiting
