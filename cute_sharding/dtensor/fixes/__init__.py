"""Bugs of torch on placements that its own rules know, one row each: the op, when it goes wrong,
and what is done instead.

A row says with which releases it was seen, and a test shows it on stock (``tests/dtensor/
decide/test_fixes.py``): on a release where torch is right the test fails, and the row can go.

- :mod:`.table`: the rows
- :mod:`.when`: conditions that take more than a line
- :mod:`.in_place`, :mod:`.operators`, :mod:`.filled`: functions in the place of ops that no rule
  mends: views in place, operators on bits, what nodes of autograd make beside DTensors
"""
