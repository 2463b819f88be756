"""The door: converts a DTensor's spec to the terms of the layout algebra, and back.

It decides nothing and moves nothing.

- :mod:`.cuts`: what each mesh dim does to a tensor, and whether that is known; if it is not, torch
  answers
- :mod:`.held`: which elements a rank holds, as boxes
- :mod:`.composed`: a parameter that ``fully_shard`` shards once more
"""
