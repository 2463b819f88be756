"""Compiled programs: symbolic sizes, and ops that a compiler does not look into.

Functions in place of the compiler's own are in :mod:`..replaced.compiler`. Where to
look:

- Guards: for a fact that the algebra cannot prove, :mod:`.symbols` asks the trace
  (``Symbols.assume``); that two sizes are equal: :func:`.symbols.equate`; that a size has its
  value: ``int(unknown(n))`` or :func:`..replaced.symints.number_of`; that a condition holds or not:
  :func:`..replaced.symints.is_truly`. :mod:`..replaced.compiler` turns torch's own guards to global
  sizes.
- The size of a local tensor, also of uneven blocks: :mod:`.symbols`, by the rule of
  :mod:`cute_sharding.sharding.rows`.
- Waits for collectives: in a graph, torch's functional collectives add the op that waits
  themselves, and :mod:`..run.executor` adds no other; :mod:`..run.in_graphs` waits for the op of an
  exchange. If a program asks for it (``reorder_for_compute_comm_overlap``), Inductor moves waits
  down to where results are needed.
- Views that are returned: made again by their view ops, :mod:`..replaced.compiler`.
- The order of collectives, and their passes: :mod:`..replaced.collective_order`; which of them are
  left out or joined: :mod:`..replaced.joined`; what a graph holds: :mod:`..replaced.timeline`.

- :mod:`.symbols`: torch's SymInts as sizes of the algebra, and back; the sizes of local tensors
- :mod:`.library`: the library of our own ops
"""
