"""Refits: weights of one program's names and shapes from those of another's, on any meshes.

A generator is a program's own code, on tensors without data: it is run here once, and nothing of it
is kept but the relation that it says. Tensors of the program are read, and only those that it hands
over are written to.

- :mod:`.ops`, :mod:`.trace`: what each op says; the whole of a generator
- :mod:`.plan`: ``plan_refit``; one rank's part, from local tensors to local tensors
"""
