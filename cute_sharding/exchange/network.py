"""The time of a step on a network: latency, and time per element, for each mesh dim.

Times are the usual lower bounds of collectives in which a device sends and receives one message at
a time (Chan, Heimlich, Purkayastha and van de Geijn, "Collective communication: theory, practice,
and experience", 2007): ceil(log2 p) latencies, and the time of the elements that the busiest device
receives. Elements count on the slowest mesh dim that they cross.

Several devices of one mesh dim may share a host. In an all-to-all each receives its own elements
from other hosts. In a gather or a reduction that the backend has as one collective, a host receives
each element once, through all its devices' network cards, and passes it on inside: 1 / w of the
elements crosses each card, if w devices of the mesh dim share a host.

Only :meth:`Network.collective` says what a collective takes, for our plans and for torch's. The
plans of programs are chosen without latency (:meth:`Network.of_programs`), and with one more factor
for messages that is not part of shown times (MANY_MESSAGES of :mod:`.planner`). A setting says
which network it is (network_in_force of :mod:`cute_sharding._settings`); callers pass it on, as
part of the key of a plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite
from typing import TypeAlias

from cute_sharding._words import counted


@dataclass(frozen=True)
class Link:
    """One kind of link between devices.

    Attributes:
        alpha: seconds before the first element arrives.
        beta: seconds for each element.

    Raises:
        ValueError: one of them is negative.

    >>> Network((Link(1e-5, 4e-11), Link(3e-6, 4.4e-12))).link(1).alpha
    3e-06
    """

    alpha: float
    beta: float

    def __post_init__(self) -> None:
        if not (self.alpha >= 0 and self.beta >= 0):
            raise ValueError(f"{self}: alpha and beta must be 0 or more")


LINK_ITEMSIZE = 2
# Two-byte elements over NVLink 4 (450 GB/s in each direction of a device) and 400 Gb/s InfiniBand
# (50 GB/s).
LINKS = {"nvlink": Link(3e-6, 4.4e-12), "infiniband": Link(1e-5, 4e-11)}
DEVICES_PER_HOST = 8


@dataclass(frozen=True)
class Network:
    """The link of each mesh dim, or one for all; and for mesh dims that cross hosts, how many of
    their devices share a host.

    Attributes:
        links: one for each mesh dim, or a single one.
        within: for each mesh dim, how many neighbours share a host; 1 if all its messages use the
            mesh dim's link. None: 1 for all.
        inner: the link inside a host.

    Raises:
        ValueError: ``within`` has a number below 1.

    The model's source is in the module's docstring (Chan et al. 2007).

    >>> Network.flat(alpha=1e-6, beta=3.2e-10).link(0)
    Link(alpha=1e-06, beta=3.2e-10)
    >>> Network.named(["infiniband", "nvlink"]).is_flat
    False
    """

    links: tuple[Link, ...]
    within: tuple[int, ...] | None = None
    inner: Link = LINKS["nvlink"]

    def __post_init__(self) -> None:
        if self.within is not None and any(w < 1 for w in self.within):
            raise ValueError(
                f"within={self.within}: give for each mesh dim how many of its devices share a "
                "host, at least 1"
            )

    @classmethod
    def flat(cls, *, alpha: float, beta: float) -> Network:
        """One network between all devices."""
        return cls((Link(alpha, beta),))

    @classmethod
    def named(
        cls,
        names: Sequence[str | Link] | Mapping[str, str | Link],
        mesh_dim_names: Sequence[str] | None = None,
    ) -> Network:
        """A link for each mesh dim, by name (``nvlink``, ``infiniband``) or as a :class:`Link`; or
        by the name of the mesh dim, given ``mesh_dim_names``.

        Raises:
            ValueError: a name is unknown, or a mesh dim has no link.
        """
        if isinstance(names, Mapping):
            missing = [name for name in mesh_dim_names or () if name not in names]
            if mesh_dim_names is None:
                raise ValueError(
                    f"the network has links by mesh dim names, {list(names)}, but no "
                    "mesh_dim_names are given: give mesh_dim_names, or a list with one link for "
                    "each mesh dim"
                )
            if missing:
                raise ValueError(
                    f"the network has no link for the mesh dims {missing}: give one link for each "
                    f"of {list(mesh_dim_names)}"
                )
            names = [names[name] for name in mesh_dim_names]
        unknown = [name for name in names if not isinstance(name, Link) and name not in LINKS]
        if unknown:
            raise ValueError(
                f"unknown links {unknown}: use {', '.join(LINKS)} or Link(alpha, beta)"
            )
        return cls(tuple([name if isinstance(name, Link) else LINKS[name] for name in names]))

    @classmethod
    def default(cls, mesh: Sequence[int]) -> Network:
        """NVLink on the last mesh dims, as far as they fit a host of eight devices, and InfiniBand
        on the others.
        """
        inside, names, within = 1, [], []
        for n in reversed(mesh):
            together = (
                DEVICES_PER_HOST // inside
                if inside < DEVICES_PER_HOST and DEVICES_PER_HOST % inside == 0
                else 1
            )
            inside *= n
            names.append("nvlink" if inside <= DEVICES_PER_HOST else "infiniband")
            within.append(together if inside > DEVICES_PER_HOST and n % together == 0 else 1)
        return cls(cls.named(tuple(reversed(names))).links, tuple(reversed(within)))

    @classmethod
    def parse(cls, text: str) -> Network:
        """The network of a text: ``flat:ALPHA,BETA``, the latency and the seconds for each element;
        or the names of links, one for all mesh dims or one for each.

        Raises:
            ValueError: it is neither.

        >>> Network.parse("infiniband, nvlink") == Network.named(["infiniband", "nvlink"])
        True
        >>> Network.parse("flat:1e-6,3.2e-10").link(0)
        Link(alpha=1e-06, beta=3.2e-10)
        """
        if not text.startswith("flat:"):
            return cls.named([name.strip() for name in text.split(",")])
        try:
            alpha, beta = map(float, text.removeprefix("flat:").split(","))
        except ValueError:
            alpha = beta = float("nan")
        if not (isfinite(alpha) and isfinite(beta)):
            raise ValueError(
                f"network {text!r}: write flat:ALPHA,BETA, such as flat:1e-6,3.2e-10; ALPHA is the "
                "latency in seconds, BETA is the seconds per element"
            )
        return cls.flat(alpha=alpha, beta=beta)

    @classmethod
    def of(cls, mesh: Sequence[int], chosen: Chosen = None) -> Network:
        """The ``chosen`` network, a value or a text; :meth:`default` for None, and for a mesh that
        it does not fit, such as one with another number of dims.
        """
        return _network_of(tuple(mesh), chosen)

    def link(self, mesh_dim: int) -> Link:
        """The link of a mesh dim."""
        return self.links[mesh_dim if len(self.links) > 1 else 0]

    @classmethod
    def of_programs(cls, mesh: Sequence[int], chosen: Chosen = None) -> Network:
        """The network by which programs' plans are chosen, eager and compiled: :meth:`of` without
        latency, so that ranks with graphs for many sizes choose as the others do.
        """
        return _of_programs(tuple(mesh), chosen)

    @classmethod
    def of_elements(cls, mesh: Sequence[int], chosen: Chosen, itemsize: int) -> Network:
        """:meth:`of`, to show plans for elements of ``itemsize`` bytes: named links are timed for
        two bytes, so their times are scaled; other links are as given.
        """
        is_named = chosen is None or (isinstance(chosen, str) and not chosen.startswith("flat:"))
        network = cls.of(mesh, chosen)
        is_default = network == cls.default(mesh)
        return network.of_itemsize(itemsize) if is_named or is_default else network

    def fits(self, mesh: Sequence[int]) -> bool:
        """Whether it has a link for each mesh dim, or one for all, and hosts that divide them."""
        return len(self.links) in (1, len(mesh)) and self._hosts_divide(mesh)

    def _hosts_divide(self, mesh: Sequence[int]) -> bool:
        return self.within is None or (
            len(self.within) == len(mesh) and not any(n % w for n, w in zip(mesh, self.within))
        )

    def checked(self, mesh: Sequence[int]) -> Network:
        """The network itself, if it fits the mesh.

        Raises:
            ValueError: it does not.
        """
        if len(self.links) not in (1, len(mesh)):
            raise ValueError(
                f"the network has {counted(len(self.links), 'link')}, but the mesh {tuple(mesh)} "
                f"has {counted(len(mesh), 'dim')}: give one link for all mesh dims, or one link "
                "for each mesh dim"
            )
        if not self._hosts_divide(mesh):
            raise ValueError(
                f"within={self.within} does not fit the mesh {tuple(mesh)}: give one number for "
                "each mesh dim; each number must divide the size of the mesh dim"
            )
        return self

    @property
    def without_latency(self) -> Network:
        """The same links, compared by the elements that they carry. The fastest plan then does not
        depend on a tensor's sizes, as long as they divide.
        """
        return Network(
            tuple([Link(0.0, link.beta) for link in self.links]),
            self.within,
            Link(0.0, self.inner.beta),
        )

    def of_itemsize(self, itemsize: int) -> Network:
        """The network for elements of ``itemsize`` bytes, from named and default links, which are
        timed for elements of two bytes.
        """
        factor = itemsize / LINK_ITEMSIZE
        return Network(
            tuple([Link(link.alpha, link.beta * factor) for link in self.links]),
            self.within,
            Link(self.inner.alpha, self.inner.beta * factor),
        )

    def collective(
        self, mesh_dim: int, parts: int, elements: float, *, together: bool, times: int = 1
    ) -> float:
        """Seconds of one collective among the ``parts`` devices of a mesh dim: the only place that
        says what a collective takes, ours or torch's.

        Args:
            elements: the elements that a device receives, in all.
            together: whether it is a gather or a reduction, in which a host receives each element
                once; False: an all-to-all.
            times: how often it passes from the first to the last message: twice in an all-reduce,
                once for each round of an all-to-all.
        """
        latency = times * messages(parts, together=together) * self.link(mesh_dim).alpha
        return latency + self._carrying(mesh_dim, parts, elements, together=together)

    def _carrying(self, mesh_dim: int, parts: int, elements: float, *, together: bool) -> float:
        """Seconds for ``elements`` that a device receives in equal parts from the others of a mesh
        dim of ``parts``.
        """
        link, w = self.link(mesh_dim), self.within[mesh_dim] if self.within is not None else 1
        if w == 1 or parts == 1:
            return elements * link.beta
        far = elements * (parts - w) / (parts - 1)
        crossing = far / w if together else far
        return crossing * link.beta + (elements - crossing) * self.inner.beta

    @property
    def is_flat(self) -> bool:
        """Whether an element takes equal time whatever it crosses: plans are then chosen by
        elements alone. Hosts make a difference if their inner link is another one.
        """
        across_hosts = self.within is not None and max(self.within, default=1) > 1
        return len({*self.links, self.inner} if across_hosts else {*self.links}) <= 1

    @property
    def slowest(self) -> Link:
        """The slowest link, by which an exchange with another mesh is timed."""
        return max(self.links, key=lambda link: (link.beta, link.alpha))


Chosen: TypeAlias = "Network | str | None"


@lru_cache(maxsize=1 << 8)
def _network_of(mesh: tuple[int, ...], chosen: Chosen) -> Network:
    network = Network.parse(chosen) if isinstance(chosen, str) else chosen
    return Network.default(mesh) if network is None or not network.fits(mesh) else network


@lru_cache(maxsize=1 << 8)
def _of_programs(mesh: tuple[int, ...], chosen: Chosen) -> Network:
    return _network_of(mesh, chosen).without_latency


def messages(parts: int, *, together: bool) -> int:
    """The number of messages, one after the other, of a collective of ``parts`` devices: ceil(log2
    parts), the lower bound of Chan et al. both for an all-to-all and for those ``together``
    (gathers and reductions).
    """
    return (parts - 1).bit_length()
