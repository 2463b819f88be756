"""How the search for the cheapest free placements grows with tensor dims and mesh dims.

python -m benchmarks.search
"""

from __future__ import annotations

import time

from cute_sharding.exchange import received_elements
from cute_sharding.propagation.views import carry, cheapest, unblocked
from cute_sharding.relations.table import BY_OP


def case(tensor_dims: int, mesh_dims: int):  # type: ignore[no-untyped-def]
    """A view that splits the last dim so that the first mesh dim's blocks fit no output dim, the
    other mesh dims sharding in turn.
    """
    shape = (48,) * tensor_dims
    view = BY_OP["Tensor.view"].view(shape, (*shape[:-1], 2, 24))
    cuts = tuple((tensor_dims - 1, 1) if m == 0 else (m % tensor_dims, 1) for m in range(mesh_dims))
    mesh = (4,) + (2,) * (mesh_dims - 1)
    return view, cuts, mesh


def main() -> None:
    print(
        "milliseconds of one search, by tensor dims (down) and mesh dims (across); the received "
        "elements of the answer over those of replicating what is in the way"
    )
    print("     " + "".join(f"{m:>16}" for m in range(1, 7)))
    for tensor_dims in range(1, 7):
        cells = []
        for mesh_dims in range(1, 7):
            view, cuts, mesh = case(tensor_dims, mesh_dims)
            assert carry(view, cuts, mesh).blocked is not None
            start = time.perf_counter()
            best = cheapest(view, cuts, mesh)
            elapsed = time.perf_counter() - start
            without, _ = unblocked(view, cuts, mesh)
            replicated = received_elements(view.input_shape, cuts, without, mesh)
            cells.append(f"{1e3 * elapsed:9.1f} {best.received / max(replicated, 1):6.3f}")
        print(f"{tensor_dims:>5}" + "".join(cells))


if __name__ == "__main__":
    main()
