"""Views: what is answered to the propagator.

No data moves here: an answer names placements, and, where the view is not free, those that its
input is to have first.

- :mod:`.propagate`: placements carried through a DimMap
- :mod:`.ambiguity`: placements that can be read in two ways
- :mod:`.answer`: the answer in torch's form, on specs
"""
