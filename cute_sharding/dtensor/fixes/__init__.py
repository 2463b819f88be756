"""Bugs of torch on placements that its own rules accept, one row each: the op, when it is wrong,
and what is done instead.

A row names the releases with the bug, and a test shows it on stock
(``tests/dtensor/decide/test_fixes.py``): on a release where torch is right the test fails, and the
row can go.

- :mod:`.table`: the rows, and conditions that take more than a line
- :mod:`.in_place`, :mod:`.filled`: functions in place of ops that no rule can correct: in-place
  views, plain tensors that nodes of autograd make
"""
