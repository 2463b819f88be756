"""``overlap``: how communication and computation of a graph, or of a compiled program, overlap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cute_sharding.exchange.network import Chosen, Network
from cute_sharding.tools.overlap.device import DEVICES, Device
from cute_sharding.tools.overlap.values import Graph, Overlap, Timeline


def overlap(
    program: Any,
    *args: Any,
    device: str | Device = "h100",
    network: Network | str | None = None,
    **kwargs: Any,
) -> Overlap:
    """Simulate how communication and computation overlap in a graph, or in each graph that
    ``torch.compile`` makes of a program.

    The simulation has two rows. Ops compute one after the other, in the order of the graph, and
    collectives communicate one after the other, beside them. A collective begins when the program
    starts it and the earlier ones have ended, and the program waits where the graph waits. What the
    program waits for a collective is the collective's exposed time.

    No device is needed. The time of an op is that of its floating point operations or of its bytes,
    whichever is longer; pointwise ops count as fused with what reads them. The time of a collective
    is that of the network model. So times are estimates, by which two graphs can be compared.

    Args:
        program: a graph of torch.fx, whose nodes have the metadata of AOTAutograd; or a compiled
            function, which is run once with the other arguments. Everything is compiled anew for
            that, and caches are not used.
        args, kwargs: for the compiled function.
        device: the device whose time is estimated: "a100", "h100", "h200", or a ``Device``.
        network: the links, as for :func:`cute_sharding.enable`. By default the network of the
            settings, or NVLink within hosts of eight devices and InfiniBand between them.

    Returns:
        The simulation: a value. ``print`` shows a table; ``save("overlap.html")`` writes a page,
        and ``save("overlap.json")`` a trace for https://ui.perfetto.dev.

    Raises:
        ValueError: the device is unknown, or the program compiled no graph.

    >>> import torch
    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> x = torch.ones(64, 64)
    >>> found = overlap(make_fx(lambda x: (x @ x).sin(), tracing_mode="fake")(x))
    >>> len(found.graphs[0].after.computations), found.collectives
    (2, ())
    """
    from cute_sharding.dtensor.bookkeeping.settings import network_in_force
    from cute_sharding.tools.overlap.simulation import timeline

    on = _device_of(device)
    links = network_in_force() if network is None else network
    graph = getattr(program, "graph", program)
    if hasattr(graph, "nodes"):
        found = timeline("graph", graph, on, links)
        graphs: tuple[Graph, ...] = (Graph(found, found),)
    else:
        graphs = _compiled(lambda: program(*args, **kwargs), on, links)
    return Overlap(graphs, on.name, "default" if links is None else str(links))


def _compiled(run: Callable[[], Any], device: Device, network: Chosen) -> tuple[Graph, ...]:
    from cute_sharding.dtensor.replaced.timeline import compiled_anew
    from cute_sharding.tools.overlap.simulation import timeline

    def look(graph: Any) -> Timeline:
        return timeline("before", graph, device, network)

    with compiled_anew(look) as seen:
        run()
    if not seen:
        raise ValueError(
            "overlap ran the program, but Inductor compiled no graph: pass a function that "
            "torch.compile has made, with its default backend"
        )
    return tuple(
        [
            Graph(before, timeline(f"graph {number}", after, device, network))
            for number, (before, after) in enumerate(seen, 1)
        ]
    )


def _device_of(device: str | Device) -> Device:
    if isinstance(device, Device):
        return device
    if device not in DEVICES:
        raise ValueError(f"unknown device {device!r}: use {', '.join(DEVICES)} or a Device")
    return DEVICES[device]
