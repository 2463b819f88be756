"""Checkpoints into the tensors of a program, whatever meshes they were saved from.

Storage is read through torch's public interface of it; tensors of the program are written to in
place, and its objects put where others stood.

- :mod:`.leaves`: the tensors and objects of a state, by name
- :mod:`.wanted`: how tensors lie, on all ranks together
- :mod:`.sources`: what a checkpoint has, and reading it
- :mod:`.ranks`: what ranks tell one another
- :mod:`.load`: ``load_checkpoint``
"""
