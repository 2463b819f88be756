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
        from cute_sharding._imports import when_imported
        from cute_sharding._settings import from_environment, unknown_flags

        _say_unknown(unknown_flags(os.environ))
        settings = from_environment(os.environ)
        if settings is not None:
            report = "waiting for torch.distributed.tensor to be imported"
            when_imported("torch.distributed.tensor", lambda: _enable(settings))
    except Exception as error:
        _give_up(error)


def _enable(settings):  # type: ignore[no-untyped-def]
    """Switch on; again once what another thread is importing is whole, if that is why it failed."""
    from cute_sharding._imports import half_imported, when_whole
    from cute_sharding._settings import plan_asked

    global report
    try:
        import cute_sharding

        cute_sharding.enable(**settings)
        report = "switched on by the environment"
        import atexit

        plan = plan_asked(os.environ)
        if plan is not None:
            context = cute_sharding.planned(plan)
            context.__enter__()
            # To the end of the program, but not longer than torch is whole.
            atexit.register(context.__exit__, None, None, None)
            report += f", and runs by the plan {plan}"
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

    said = f"{type(error).__name__}: {error}"
    report = f"not switched on: {said}"
    message = (
        f"cute_sharding is not switched on, because of {said}. The program runs with PyTorch's own "
        "rules. For details, run `python -m cute_sharding status`."
    )
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    except RuntimeWarning:
        _print(message)


def _say_unknown(flags):  # type: ignore[no-untyped-def]
    """A warning of each variable that is named as flags are and is none, or is none any more, by
    rank 0 of those that torchrun starts; as a line where warnings are errors.
    """
    if not flags or os.environ.get("RANK", "0") != "0":
        return
    import warnings

    from cute_sharding._settings import NO_EFFECT

    for name, near in flags.items():
        message = (
            f"cute_sharding ignores the environment variable {name}, which is not a flag. Did you "
            f"mean {near}?"
        )
        if near is None:
            message = f"the environment variable {name} {NO_EFFECT}"
        try:
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        except RuntimeWarning:
            _print(message)


def _print(message):  # type: ignore[no-untyped-def]
    import sys

    print(message, file=sys.stderr)
