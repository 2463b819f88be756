"""Checkpoints into the tensors of a program, whatever meshes they were saved from.

Storage is read through torch's public interface of it; tensors of the program are written to in
place, and its objects put where others stood.

- :mod:`.leaves`: the tensors and objects of a state, by name
- :mod:`.ranks`: what ranks tell one another
- :mod:`.wanted`: what all of them want, and what a checkpoint gives
- :mod:`.sources`: what a checkpoint has, and reading it
- :mod:`.load`: ``load_checkpoint``
"""
