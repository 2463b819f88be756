"""What the propagator answers for an op: placements in torch's form, and one frozen value with all
that the run needs beside.

Only that value is put on an object of torch's, the schema that an answer redistributes to; the
local arguments of the call at hand may be exchanged.

- :mod:`.answers`: answers, made and remade
- :mod:`.running`: ops that run as their answers say
"""
