"""A dry run of a program's step, in a process of its own. What it found is a file of JSON, which
:mod:`cute_sharding.estimates` reads.

The process ends with the run. So torch may be told here that there are devices, and ranks, which
there are not (:mod:`.stand_ins`).

- :mod:`.layers`: which layer of a model runs, forward or backward
- :mod:`.memory`: what this rank holds, by layer, and when it holds the most
- :mod:`.run`: the step, run; what it sent and held
- :mod:`.programs`: the program's function, and the line of an error
"""
