"""The door: from a DTensor's spec to how it lies, in the terms of the algebra, and back.

Nothing is decided here, and nothing is moved.

- :mod:`.cuts`: what each mesh dim does to a tensor
"""
