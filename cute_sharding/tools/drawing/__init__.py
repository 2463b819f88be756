"""Pictures: who holds what, before and after a view, and who sends how much to whom. Imports no
torch, and no library that renders until a picture is rendered.

- :mod:`.dispatch`: ``draw``, from what it is given to a picture; :mod:`.inputs`: DTensors and
  placements of torch, read; :mod:`.plans`: redistributions, planned.
- :mod:`.picture`: the value; :mod:`.parts`: what it is made of; :mod:`.palette`: its colours.
- :mod:`.owners`, :mod:`.devices`, :mod:`.holding`: whose a row is, in closed form, and in words.
- :mod:`.grids`, :mod:`.layouts`, :mod:`.views`, :mod:`.moves`: panels of a tensor, a layout, a
  view, a redistribution. :mod:`.exchanges`, :mod:`.models`: of a tensor's way from mesh to mesh,
  and of many tensors'.
- :mod:`.terminal`, :mod:`.figure`: the renderers, by rich and by matplotlib (:mod:`.libraries`).
"""

from cute_sharding.tools.drawing.dispatch import draw
from cute_sharding.tools.drawing.parts import Cell, Key, Panel, Section, Table
from cute_sharding.tools.drawing.picture import Picture

__all__ = ["Cell", "Key", "Panel", "Picture", "Section", "Table", "draw"]
