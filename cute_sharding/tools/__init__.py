"""What people look at: profiles, estimates, pictures, and the command line. This room imports all
others, and is imported by none.

- :mod:`.drawing`: pictures of shardings, views, redistributions and layouts
- :mod:`.stats`: how ops were decided, and the elements that ranks received
- :mod:`.profile`: what a program sends, line by line
- :mod:`.progress`: a line on the terminal while a command computes
- :mod:`.estimate`: what a step would receive and hold, with each flag
- :mod:`.overlap`: how communication and computation of a compiled program overlap
- :mod:`.explain`: what an op does to a sharding
- :mod:`.status`: what is on, and whether the package works on the torch at hand
- :mod:`.cli`: the command line; :mod:`.inputs`: what tools take
"""
