"""The conclusions from an estimate: whether the package is worth it, and the lines to look at."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from cute_sharding.estimates.traffic import Traffic
from cute_sharding.estimates.values import ALIKE, ALL, SETTINGS, STOCK, Cause, Comparison, Run
from cute_sharding.profiling import Place

LEFT, REASONS = 3, 2  # the most lines to name, and the most ops of each


def in_bytes(size: int) -> str:
    """Bytes, as people read them.

    >>> in_bytes(1_234_000), in_bytes(12)
    ('1.23 MB', '12 B')
    """
    number, unit = float(size), "B"
    for larger in ("kB", "MB", "GB", "TB", "PB", "EB"):
        if number < 999.5:
            break
        number, unit = number / 1000, larger
    return f"{number:.3g} {unit}"


def in_seconds(seconds: float) -> str:
    """Seconds, as people read them.

    >>> in_seconds(0.0123), in_seconds(2.5)
    ('12.3 ms', '2.5 s')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:,.3g} {unit}"
    return f"{seconds:.3g} s"


def verdict(estimate: Comparison) -> str:
    """Whether the package is worth it for this step, in one line: by seconds of the network model,
    and for equal seconds, by bytes. A warning follows if all flags together cost more than the best
    setting.
    """
    return " ".join([_conclusion(estimate), *_all_is_worse(estimate)])


def _all_is_worse(estimate: Comparison) -> list[str]:
    """The sentence for a step that costs more with all flags than with the best setting."""
    best = estimate.best
    every = next((run for run in estimate.runs if run.setting == ALL), None)
    if best is None or every is None or every.failure is not None:
        return []
    if every in (best, estimate.fewest):
        return []
    few, many = best.step.busiest_bytes, every.step.busiest_bytes
    took, takes = estimate.seconds(best), estimate.seconds(every)
    worse = []
    if _is_less(few, many):
        worse.append(_times(many, few, "bytes", in_bytes(many), in_bytes(few)))
    if _is_less(took, takes):
        worse.append(_times(takes, took, "time", in_seconds(takes), in_seconds(took)))
    if not worse:
        return []
    known = "PyTorch alone" if best.setting == STOCK else flags_of(best)
    instead = "set no flag" if best.setting == STOCK else f"set {flags_of(best)} alone"
    return [
        f"Do not set {flags_of(every)} for this step: it costs {' and '.join(worse)} of {known}. "
        f"Instead, {instead}. The option --details all names the lines that cost more."
    ]


def _times(more: float, less: float, what: str, *shown: str) -> str:
    """How much larger a figure is."""
    figures = " in place of ".join(shown)
    return f"{more / less:.2g} times the {what} ({figures})" if less else figures


def _conclusion(estimate: Comparison) -> str:
    """Whether a flag is worth it."""
    stock, best = estimate.stock, estimate.best
    if best is None:
        return "No setting runs this step."
    if stock is None:
        return f"By the network model, the step takes the least time with {flags_of(best)}."
    if stock.failure is not None:
        return f"Worth it: PyTorch alone does not run this step, and with {flags_of(best)} it runs."
    more = _fewer_bytes_for_longer(estimate, stock)
    if _is_less(estimate.seconds(best), estimate.seconds(stock)) or (
        best.setting != STOCK and _is_less(best.step.busiest_bytes, stock.step.busiest_bytes)
    ):
        return " ".join([f"Worth it: with {flags_of(best)} {_costs(estimate, best, stock)}", *more])
    if more:
        return more[0]
    before = in_bytes(stock.step.busiest_bytes)
    return (
        f"Not worth it here: PyTorch alone receives {before} in a step, in "
        f"{in_seconds(estimate.seconds(stock))} by the network, and no flag reduces the bytes or "
        f"the time by {ALIKE:.0%}."
    )


def _is_less(after: float, before: float) -> bool:
    return after < before * (1 - ALIKE)


def _costs(estimate: Comparison, run: Run, stock: Run) -> str:
    """The cost of a step with a setting, compared with PyTorch alone."""
    before, after = stock.step.busiest_bytes, run.step.busiest_bytes
    took, takes = estimate.seconds(stock), estimate.seconds(run)
    held, holds = stock.memory.peak, run.memory.peak
    share = f" ({after / before:.0%})" if before else ""
    more = ": more memory" if holds > held else ""
    return (
        f"a step receives {in_bytes(after)} in place of {in_bytes(before)}{share}, takes "
        f"{in_seconds(takes)} by the network in place of {in_seconds(took)}, and holds "
        f"{in_bytes(holds)} in place of {in_bytes(held)}{more}."
    )


def _fewer_bytes_for_longer(estimate: Comparison, stock: Run) -> list[str]:
    """The sentence for a setting that receives the fewest bytes, but takes longer than PyTorch
    alone.
    """
    run = estimate.fewest
    if run is None or not _is_less(run.step.busiest_bytes, stock.step.busiest_bytes):
        return []
    if not _is_less(estimate.seconds(stock), estimate.seconds(run)):
        return []
    many = "more" if run.step.collectives > stock.step.collectives else "slower"
    return [
        f"Fewer bytes, but {many} collectives: with {flags_of(run)} "
        f"{_costs(estimate, run, stock)} By the network model, the step takes longer, so it is "
        "not worth it on this network."
    ]


def flags_of(run: Run) -> str:
    """The flags of a setting, as they are set."""
    return " ".join(f"{name}={value}" for name, value in SETTINGS[run.setting].items()) or "no flag"


def ops_left(estimate: Comparison, runs: Sequence[Run]) -> list[list[str]]:
    """For each setting, the lines whose ops send the most, with the reasons and the changes that
    avoid the communication. Settings with the same lines share a section.
    """
    alike: dict[tuple[str, ...], list[str]] = {}
    for run in runs:
        if run.step.rows:
            with_flags = "PyTorch alone" if run.setting == STOCK else flags_of(run)
            alike.setdefault(_lines_of(estimate, run), []).append(with_flags)
    parts = []
    for lines, flags in alike.items():
        those = " or ".join(flags)
        if lines:
            head = wrap(f"ops that still send with {those}, with reasons and changes:", 96)
            parts.append([*head, *lines])
        else:
            nothing = (
                f"with {those}, no op sends much: the rest is communication that the program asks "
                "for (redistribute(), parallel styles, FSDP)"
            )
            parts.append(wrap(nothing, 96))
    return parts


def _lines_of(estimate: Comparison, run: Run) -> tuple[str, ...]:
    """The lines whose ops send the most with a setting, with reasons and changes."""
    least = ALIKE * run.step.busiest_bytes
    by_line = {place: of for place, of in run.step.by_line().items() if of.busiest_bytes >= least}
    causes: dict[Place, list[Cause]] = {}
    for cause in run.causes:
        if cause.place in by_line:
            causes.setdefault(cause.place, []).append(cause)
    lines = []
    for place in sorted(causes, key=lambda place: -by_line[place].busiest_bytes)[:LEFT]:
        of = by_line[place]
        took = in_seconds(of.seconds(estimate.mesh, estimate.network))
        lines.append(
            f"  {place}: {in_bytes(of.busiest_bytes)} in all, {took} ({_what(of, estimate)})"
        )
        for sentence in _said(causes[place])[:REASONS]:
            lines += wrap(sentence, 96, initial_indent="    ", subsequent_indent="    ")
    return tuple(lines)


def _said(causes: Sequence[Cause]) -> list[str]:
    """For each op of a line, the reason for its communication and the first way to avoid it. The
    gradient of an op is left out if the op itself communicates.
    """
    chosen = [cause for cause in causes if not cause.backward] or causes
    return list(
        dict.fromkeys("; ".join([cause.why, *cause.todo[:1]]) for cause in chosen if cause.why)
    )


def _what(traffic: Traffic, estimate: Comparison) -> str:
    """The kinds of collectives and the mesh dims, those with the most bytes first."""
    found: dict[str, int] = {}
    for alike, amount in traffic.rows.items():
        over = " and ".join(estimate.mesh_dim(m) for m, _ in alike.group) or "one rank"
        key = f"{alike.op} over {over}"
        found[key] = found.get(key, 0) + amount.busiest * alike.itemsize
    return ", ".join(sorted(found, key=lambda key: -found[key]))
