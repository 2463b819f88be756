"""The door: from a DTensor's spec to how it lies, in the terms of the algebra, and back.

Nothing is decided here, and nothing is moved.

- :mod:`.understood`: whether that is known; where it is not, torch answers
- :mod:`.cuts`: what each mesh dim does to a tensor
- :mod:`.held`: which elements a rank holds, as boxes
"""
