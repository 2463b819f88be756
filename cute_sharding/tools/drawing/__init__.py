"""Pictures: who holds what, before and after a view, and who sends how much to whom. Imports no
torch, and no library that renders until a picture is rendered.

- :mod:`.pictures`: ``draw``, with a function for each kind of picture
- :mod:`.picture`: the value, what it is made of, and how it is rendered; :mod:`.palette`: colours
- :mod:`.holding`: whose a row is, in closed form; panels and the legend
"""

from cute_sharding.tools.drawing.picture import Cell, Key, Panel, Picture, Section
from cute_sharding.tools.drawing.pictures import draw

__all__ = ["Cell", "Key", "Panel", "Picture", "Section", "draw"]
