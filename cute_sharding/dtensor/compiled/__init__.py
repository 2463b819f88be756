"""Compiled programs: sizes that are symbols, and the ops that a compiler does not look into.

What stands in for the compiler's own functions is in :mod:`..replaced` (:mod:`.tracing`,
:mod:`.compiler`). Where to look:

- A guard: a fact that the algebra could not prove is asked of the trace in :mod:`.symbols`
  (``Symbols.assume``); that two sizes are equal, in :func:`.symbols.equate`; that a size has its
  value, by ``int(unknown(n))``, or in :func:`..replaced.symints.number_of`; that a condition
  holds or not, in :func:`..replaced.symints.is_truly`. What torch guards itself is turned to
  global sizes in :mod:`..replaced.compiler`.
- The size of a local tensor, also of uneven blocks: :mod:`.local_sizes`, by the rule of
  :mod:`cute_sharding.sharding.deal`.
- Where a collective is waited for: torch's functional collectives put the op that waits behind
  themselves in a graph, and :mod:`..run.executor` asks for no other; the op of any sizes is waited
  for in :mod:`..run.dynamic`. Inductor moves the waits down to where results are needed where a
  program asks for that (``reorder_for_compute_comm_overlap``).
- A view that is returned: by the view ops that have made it, :mod:`..replaced.view_replay`.
- In what order collectives run, and in which pass: by
  :mod:`..replaced.collective_order`. That a collective depends on the same things on every
  rank is what ``after`` of :mod:`.library` is for.

- :mod:`.symbols`: torch's SymInts as sizes of the algebra, and back
- :mod:`.local_sizes`: the sizes of local tensors
- :mod:`.library`: the library of ops of our own
"""
