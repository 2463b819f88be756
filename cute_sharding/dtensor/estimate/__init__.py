"""A dry run of a program's step, in a separate process. The process writes its result as JSON to a
file, which :mod:`cute_sharding.estimates` reads.

The process ends with the run. So the package may tell torch in this process that there are devices
and ranks that do not exist (:mod:`.stand_ins`).

- :mod:`.layers`: the layer of a model that runs, forward or backward
- :mod:`.memory`: the memory of this rank, by layer, at its peak
- :mod:`.run`: runs the step, and returns its communication and memory
- :mod:`.programs`: the program's function, and the line of an error
"""
