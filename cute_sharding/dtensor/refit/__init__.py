"""Refits and loads: one program's weights from those of another one, on any meshes.

A conversion or a loader is a program's own code, on tensors without data: it is run here once, and
nothing of it is kept but what it makes of which elements. Tensors of the program are read, and only
those that it hands over are written to.

- :mod:`.ops`, :mod:`.operands`: what each op says, and what elements are
- :mod:`.record`, :mod:`.calls`: what code leaves in each memory, and what it calls that is no op
- :mod:`.trace`, :mod:`.plan`: a conversion as one relation; ``plan_refit``
- :mod:`.weights`, :mod:`.steps`, :mod:`.transfer`: what ranks have, what a loader computes;
  ``plan_load``
"""
