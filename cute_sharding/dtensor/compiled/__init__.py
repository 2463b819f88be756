"""Compiled programs: sizes that are symbols, views by size and stride, and the ops that a compiler
does not look into.

Guards are added here, by asking a trace what the algebra could not prove; what stands in for the
compiler's own functions is in :mod:`..torch_private`.

- :mod:`.symbols`: torch's SymInts as sizes of the algebra, and back
- :mod:`.strided`: a view of a DTensor by size, stride and offset
- :mod:`.library`: the library of ops of our own
"""
