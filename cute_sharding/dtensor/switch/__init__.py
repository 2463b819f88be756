"""The switch: what is on, and the installation of it all.

Whatever is installed is installed from here, and undone: the rows of
:mod:`..replaced.patches`, with what the other rooms hand over (two of the rows' installers
wait in replaced/ until a program meets the compiler or imports what they are about). What is
decided here is who redistributes: a plan or torch (``_redistribution``).

- :mod:`.adapter`: enable, disable, and what they install
"""
