"""The switch: what is on, and the installation of it all.

The one place that installs and undoes the rows of :mod:`..torch_private.patches`; it decides
nothing about an op.

- :mod:`.adapter`: enable, disable, and what they install
"""
