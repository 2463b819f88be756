"""What `import torch` runs, in every program, once the package is installed: a look at five environment variables.

torch loads this module through the entry-point group ``torch.backends``, at the end of its own import. Three rules hold here:

- It costs nothing where no flag is set, so it imports nothing but ``os``.
- It waits for the program to import DTensor, and then until no module of torch is half imported: ``import torch._dynamo`` imports DTensor on its way, and what we replace
  must be whole.
- It never stops a program. Whatever fails becomes one warning that says what, and torch's own rules stay in force, all of them.
"""

import os

FLAG = "USE_CUTE_VIEW_PROPAGATION"
REDISTRIBUTION_FLAG = "USE_CUTE_REDISTRIBUTION"
EVERYTHING_FLAG = "USE_CUTE_SHARDING"
IMPLICIT_FLAG = "USE_CUTE_IMPLICIT_REDISTRIBUTION"
OPS_FLAG = "USE_CUTE_OPS"
_ON, _OFF = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")
_TARGETS = ("cheapest", "replicate")

# What became of the flags in this process, for `python -m cute_sharding status`.
report = "torch has not asked for this package (it does when it is imported, where the package is installed and TORCH_DEVICE_BACKEND_AUTOLOAD is not 0)"


def autoload() -> None:
    """Switch on what the environment says, once the program has imported DTensor."""
    global report
    try:
        report = "no flag is set"
        settings = from_environment(os.environ)
        if settings is not None:
            report = "waiting for torch.distributed.tensor to be imported"
            from cute_sharding._imports import when_imported

            when_imported("torch.distributed.tensor", lambda: _enable(settings))
    except Exception as error:
        _give_up(error)


def from_environment(environment):  # type: ignore[no-untyped-def]
    """What the flags ask for, as keyword arguments of ``cute_sharding.enable``; None where they ask for nothing.

    ``USE_CUTE_SHARDING`` stands for the flags of views and of redistribution where these are not set themselves. Ops are on with views, unless ``USE_CUTE_OPS`` is off.

    Raises:
        ValueError: a flag has a value that it does not know.
    """

    def value_of(flag):  # type: ignore[no-untyped-def]
        return environment.get(flag, "").strip().lower()

    def is_on(flag, otherwise=False):  # type: ignore[no-untyped-def]
        value = value_of(flag)
        if value not in _ON + _OFF:
            raise ValueError(f"{flag}={environment[flag]!r} is neither on nor off: set it to 1 or 0")
        return value in _ON if value else otherwise

    everything = is_on(EVERYTHING_FLAG)
    views, redistribution = is_on(FLAG, everything), is_on(REDISTRIBUTION_FLAG, everything)
    implicit = value_of(IMPLICIT_FLAG)
    if implicit not in _TARGETS + _OFF:
        raise ValueError(f"{IMPLICIT_FLAG}={environment[IMPLICIT_FLAG]!r} is none of {', '.join(_TARGETS)} and 0")
    if implicit in _TARGETS and not views:
        raise ValueError(f"{IMPLICIT_FLAG}={environment[IMPLICIT_FLAG]!r} says what views may do, and none are switched on: set {FLAG}=1 or {EVERYTHING_FLAG}=1 as well")
    if not views and not redistribution:
        return None
    return {"views": views, "redistribution": redistribution, "implicit_redistribution": implicit if implicit in _TARGETS else False, "ops": is_on(OPS_FLAG, True)}


def _enable(settings):  # type: ignore[no-untyped-def]
    """Switch on; again once what another thread is importing is whole, if that is why it failed."""
    global report
    try:
        import cute_sharding

        cute_sharding.enable(**settings)
        report = "switched on by the environment"
    except Exception as error:
        from cute_sharding._imports import half_imported, when_whole

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
    message = f"cute_sharding is {report}. The program goes on with torch's own rules; `python -m cute_sharding status` tells more."
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    except RuntimeWarning:
        import sys

        print(message, file=sys.stderr)
