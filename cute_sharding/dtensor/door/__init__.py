"""The door: converts a DTensor's spec to the terms of the layout algebra, and back.

It decides nothing and moves nothing.

- :mod:`.understood`: whether the conversion is known; if it is not, torch answers
- :mod:`.cuts`: what each mesh dim does to a tensor
- :mod:`.held`: which elements a rank holds, as boxes
"""
