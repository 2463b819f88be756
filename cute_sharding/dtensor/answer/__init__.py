"""The answers that the propagator gives for ops: placements in torch's form, and one frozen value
(:class:`.answers.Answer`) with everything else that running the op needs.

The value is stored as an attribute of the OpSchema that an answer redistributes to. Nothing else
is put on torch's objects; but the local arguments of a running call may be replaced.
- :mod:`.answers`: answers, made and remade
- :mod:`.running`: runs ops as their answers say
"""
