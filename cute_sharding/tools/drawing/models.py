"""Plans for many tensors: what goes together, and which rank sends how many bytes to which."""

from __future__ import annotations

from collections.abc import Sequence

from cute_sharding.exchange import Bundle
from cute_sharding.models import ReshardPlan
from cute_sharding.models.refit import Refit
from cute_sharding.tools.drawing.exchanges import section_of_ranks
from cute_sharding.tools.drawing.parts import GAP, Section, Table
from cute_sharding.tools.drawing.picture import Picture

# The most lines of a table.
LINES = 16


def reshard_picture(plan: ReshardPlan) -> Picture:
    """The kinds of tensors, the buckets in which they go, and the bytes from rank to rank in all.

    What finishes pending sums, tensor by tensor before all else, is in a caption.
    """
    title, *_ = str(plan).splitlines()
    kinds = [
        (str(len(names)), names[0], str(way.source), str(way.target), way.plan.kind)
        for way, names in plan.ways.items()
    ]
    buckets = [
        (
            str(number),
            str(len(each.members)),
            f"{each.bundle.received_bytes:,}",
            "while the one before is unpacked" if each.follows_at_once else "by itself",
        )
        for number, each in enumerate(plan.packed)
    ]
    bundle = Bundle(tuple([way.item for _, way, stays in plan.tensors if not stays]))
    limit = "" if plan.memory_limit is None else f", of {plan.memory_limit:,} that it may"
    said = [f"a rank holds at most {plan.peak_bytes:,} bytes{limit}"]
    if any(way.plan.steps for way in plan.ways):
        said.append("Partial sums are reduced before; the matrix leaves that out")
    tables = (
        _section("tensors", ("how many", "the first", "from", "to", "by"), kinds),
        _section("buckets", ("number", "tensors", "bytes received", "sent"), buckets),
    )
    return Picture(title, (*tables, _matrix(bundle)), captions=tuple(said))


def refit_picture(refit: Refit) -> Picture:
    """What each result is made of, and the bytes from rank to rank."""
    title, *_ = str(refit).splitlines()
    results = [
        (
            each.text,
            each.placed.placements_text(),
            str(each.placed.mesh),
            ", ".join(refit.sources_of(k)) or "constants",
        )
        for k, each in enumerate(refit.results)
    ]
    table = _section("results", ("result", "placements", "on", "of"), results)
    return Picture(title, (table, _matrix(refit.bundle)))


def _section(title: str, header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Section:
    """A table; of many lines the first ones and the last."""
    if len(rows) > LINES:
        rows = [*rows[: LINES - 1], (GAP,) * len(header), rows[-1]]
    return Section(title, (), Table(header, tuple(rows)))


def _matrix(bundle: Bundle) -> Section:
    """Who sends how many bytes to whom."""
    said = ["every rank has what it needs: nothing is sent"]
    if not bundle.is_free:
        busiest = bundle.received_bytes
        peers = bundle.most_peers
        said = [
            f"the busiest rank receives {busiest:,} bytes; a rank has at most {peers} "
            f"peer{'s' * (peers != 1)}"
        ]
    return section_of_ranks("bytes in all", bundle.exchanges, bundle.amount, said)
