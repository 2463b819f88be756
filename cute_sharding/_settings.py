"""The settings: one table, the fields of :class:`Settings`, from which all else about them is read.

A new setting is a field here, an argument of ``cute_sharding.enable`` and ``enabled`` of the same
name and default, and the place where it acts, which asks :func:`in_force`. The environment
variables, ``status``, the key that keeps compiled graphs apart, the tests of imports and the check
of docs/flags.md go by the table.

A house of its own, below all others: `import torch` reads it, in a program that has a flag set, and
that must cost next to nothing. So it imports neither torch nor anything of this package.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

PREFIX = "USE_CUTE_"  # of all flags
# Stands for the flags of all settings that are `in_everything`, where these are not set themselves.
EVERYTHING = "USE_CUTE_SHARDING"
# The plan of a step by which the program runs: a file. It stands for :data:`EVERYTHING` too.
PLAN = "USE_CUTE_PLAN"
_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")

# Settings of earlier versions and their flags: they are accepted, warn, and change nothing.
RETIRED = {"implicit_redistribution": "USE_CUTE_IMPLICIT_REDISTRIBUTION"}
NO_EFFECT = (
    "has no effect, and version 0.4 will no longer accept it. The input of a view that needs "
    "communication is redistributed to the cheapest placements. To get an error instead, put the "
    "code inside: with cute_sharding.no_communication(): ..."
)


class Setting(NamedTuple):
    """One setting: a row of the table.

    Attributes:
        flag: its environment variable.
        default: what it is where nobody says: in ``enable()``, and in the environment, unless it is
            ``in_everything`` and so off there.
        by_default: the same for people, in docs/flags.md.
        shown: what ``status`` says where it is on; ``{}`` is its value.
        form: what it may be, where that is not on and off alone, as a pattern of text; off is None.
            (An argument may be an object instead, which the switch checks.)
        forms: the same, for people.
        examples: some of it.
        in_everything: whether :data:`EVERYTHING` stands for its flag. Where none of those is on,
            nothing is.
        of_views: whether it does nothing without ``views``.
        needs: settings without which it cannot be on; its flag stands for theirs, too.
        because: why it cannot.
    """

    flag: str
    default: Any
    by_default: str
    shown: str
    form: str = ""
    forms: str = ""
    examples: tuple[str, ...] = ()
    in_everything: bool = False
    of_views: bool = False
    needs: tuple[str, ...] = ()
    because: str = ""

    @property
    def values(self) -> tuple[Any, ...]:
        """All that it may be, or off and some of it."""
        return (None, *self.examples) if self.form else (False, True)

    def read(self, text: str) -> Any:
        """What the environment variable says; None where it says nothing.

        Raises:
            ValueError: a value that it does not know.
        """
        word = text.strip().lower()
        if not word:
            return None
        if word in _OFF:
            return None if self.form else False
        if self.form:
            return self._of_form(self.flag, text)
        if word in _ON:
            return True
        raise ValueError(f"{self.flag}={text!r} is neither on nor off: set {self.flag} to 1 or 0")

    def taken(self, name: str, value: Any) -> Any:
        """What the argument ``name`` of ``enable`` says.

        Raises:
            ValueError: it is text of no such ``form``.
        """
        if not self.form:
            return bool(value)
        return self._of_form(name, value) if isinstance(value, str) else value

    def _of_form(self, name: str, text: str) -> str:
        word = re.sub(r"\s", "", text).lower()
        if not re.fullmatch(self.form, word):
            raise ValueError(f"{name}={text!r} is not understood: write {self.forms}")
        return word


_NUMBER = r"\d+(\.\d*)?(e[+-]?\d+)?"
_LINK = "(nvlink|infiniband)"


@dataclass(frozen=True)
class Settings:
    """Attributes as the arguments of :func:`cute_sharding.enable`."""

    views: bool = field(
        default=True,
        metadata={
            "flag": "USE_CUTE_VIEW_PROPAGATION",
            "by_default": "off; on in `enable()`",
            "shown": "views",
            "in_everything": True,
        },
    )
    redistribution: bool = field(
        default=False,
        metadata={
            "flag": "USE_CUTE_REDISTRIBUTION",
            "by_default": "off",
            "shown": "redistribution",
            "in_everything": True,
        },
    )
    ops: bool = field(
        default=True,
        metadata={
            "flag": "USE_CUTE_OPS",
            "by_default": "on, with views",
            "shown": "ops by their signatures",
            "of_views": True,
        },
    )
    movement: bool = field(
        default=False,
        metadata={
            "flag": "USE_CUTE_MOVEMENT",
            "by_default": "off",
            "shown": "movement ops",
            "in_everything": True,
            "needs": ("views", "ops"),
            "because": "the result of a movement op may have a _StridedShard, for which PyTorch's "
            "rules can be wrong",
        },
    )

    network: Any = field(
        default=None,
        metadata={
            "flag": "USE_CUTE_NETWORK",
            "by_default": "NVLink within hosts of eight devices, InfiniBand between hosts",
            "shown": "network: {}",
            "form": f"flat:{_NUMBER},{_NUMBER}|{_LINK}(,{_LINK})*",
            "forms": "flat:ALPHA,BETA with the latency and the seconds per element, such as "
            "flat:1e-6,3.2e-10; or nvlink or infiniband, one for all mesh dims or one for each, "
            "such as infiniband,nvlink",
            "examples": ("infiniband,nvlink",),
        },
    )

    @classmethod
    def of(cls, **arguments: Any) -> Settings:
        """The settings that arguments of ``enable`` ask for. Of :data:`RETIRED` ones None is taken
        for not given.

        Raises:
            ValueError: one has a value that it does not know, or is on without what it needs.
        """
        for name in RETIRED:
            if arguments.pop(name, None) is not None:
                message = f"the argument {name} {NO_EFFECT}"
                warnings.warn(message, FutureWarning, stacklevel=3)
        found = cls(**{name: TABLE[name].taken(name, value) for name, value in arguments.items()})
        for name, setting in TABLE.items():
            off = [need for need in setting.needs if not getattr(found, need)]
            if getattr(found, name) and off:
                given, needed = [
                    " and ".join(f"{need}={on}" for need in off) for on in (False, True)
                ]
                raise ValueError(
                    f"{name}=True does not work with {given}, because {setting.because}. Pass "
                    f"{needed}"
                )
        return found

    @property
    def key(self) -> str:
        """Short, without blanks, and another for other settings."""
        return "-".join(str(getattr(self, name)) for name in TABLE).replace(" ", "")


TABLE: dict[str, Setting] = {
    each.name: Setting(default=each.default, **each.metadata) for each in fields(Settings)
}
FLAGS = (EVERYTHING, PLAN, *(setting.flag for setting in TABLE.values()))


def unknown_flags(environment: Mapping[str, str]) -> dict[str, str | None]:
    """Environment variables that are named as flags are, and are none; and the flag that each is
    most like, by its name or that of the setting; None for those of :data:`RETIRED` settings.

    >>> [*unknown_flags({f"{PREFIX}VIEWS": "1", "USE_CUTE_OPS": "1"}).values()]
    ['USE_CUTE_VIEW_PROPAGATION']
    """
    names = [name for name in environment if name.startswith(PREFIX) and name not in FLAGS]
    if not names:
        return {}
    from difflib import get_close_matches

    known = {flag.removeprefix(PREFIX): flag for flag in FLAGS}
    known |= {name.upper(): setting.flag for name, setting in TABLE.items()}
    return {
        name: None
        if name in RETIRED.values()
        else known[get_close_matches(name.removeprefix(PREFIX), known, n=1, cutoff=0)[0]]
        for name in sorted(names)
    }


def from_environment(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """What the flags ask for, as keyword arguments of ``cute_sharding.enable``; None where they ask
    for nothing.

    Raises:
        ValueError: a flag has a value that it does not know, or needs others that are off.
    """

    found = {
        name: setting.read(environment.get(setting.flag, "")) for name, setting in TABLE.items()
    }
    everything = Setting(EVERYTHING, False, "", "").read(environment.get(EVERYTHING, ""))
    if everything is None:
        everything = plan_asked(environment) is not None
    needed = {need for name, setting in TABLE.items() if found[name] for need in setting.needs}

    def asked_of(name: str, setting: Setting) -> Any:
        if found[name] is not None:
            return found[name]
        if name in needed or (everything and setting.in_everything):
            return True
        return False if setting.in_everything else setting.default

    asked = {name: asked_of(name, setting) for name, setting in TABLE.items()}
    for name, setting in TABLE.items():
        off = [TABLE[need].flag for need in setting.needs if not asked[need]]
        if asked[name] and off:
            if found[name]:
                given = " and ".join(f"{flag}={environment[flag]!r}" for flag in off)
                raise ValueError(
                    f"{setting.flag}={environment[setting.flag]!r} does not work with {given}: "
                    f"unset {' and '.join(off)}"
                )
            asked[name] = False
    switched_on = any(asked[name] for name, setting in TABLE.items() if setting.in_everything)
    return asked if switched_on else None


def plan_asked(environment: Mapping[str, str]) -> str | None:
    """The file of the plan by which the program is to run; None where none is."""
    path = environment.get(PLAN, "").strip()
    return None if path.lower() in ("", *_OFF) else path


_current: Settings | None = None


def in_force() -> Settings | None:
    """What is switched on in this process; None where nothing is."""
    return _current


def put_in_force(settings: Settings | None) -> None:
    """For the switch alone, which installs what they say."""
    global _current
    _current = settings


def network_in_force() -> Any:
    """What plans are chosen and shown by: a network, or its text; None: the default. Where nothing
    is switched on, what the environment says: it is what would be.

    Raises:
        ValueError: the environment says what is no network.
    """
    if _current is not None:
        return _current.network
    setting = TABLE["network"]
    return setting.read(os.environ.get(setting.flag, ""))
