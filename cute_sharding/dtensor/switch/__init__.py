"""The switch: what is on, and the installation of it all.

Whatever is installed is installed from here, and undone: the rows of
:mod:`..replaced.patches`, with what the other rooms hand over (what is about
the compiler and other modules waits in replaced/ until a program imports them). What is
decided here is who redistributes: a plan or torch (``_redistribution``).

- :mod:`.adapter`: enable, disable, and what they install
"""
