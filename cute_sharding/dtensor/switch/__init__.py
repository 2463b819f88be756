"""The switch: the settings in force, and the installation of all replacements.

Everything is installed from here, and undone: the rows of :mod:`..replaced.patches`, with functions
of the other rooms (those about the compiler and other modules wait in replaced/ until a program
imports them). :mod:`..decide.redistributions` decides whether a plan or torch redistributes.

- :mod:`.adapter`: enable, disable, and what they install
"""
