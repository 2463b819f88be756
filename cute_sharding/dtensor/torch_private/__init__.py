"""The only room with torch's private names: a new torch release is these files to mend.

Each file reaches into one part of torch, and says into which and what may be touched there. Nothing
outside this room takes a name of torch that begins with an underscore from a module (a test holds
it), and nothing in it decides anything: the rules, plans and answers are handed in. What of torch
is replaced is one table, :mod:`.patches`: all of it or nothing, and all of it can be put back.

Supported: torch 2.13 to 2.15.

- :mod:`.patches`, :mod:`.patch`: what is replaced and why; replacing it and putting it back
- :mod:`.tensor_specs`, :mod:`.symints`, :mod:`.local_tensors`: placements and specs; sizes that are
  symbols; what a rank holds
- :mod:`.dispatch_modes`, :mod:`.process_groups`, :mod:`.collective_ops`: modes; meshes and their
  groups; collectives
- :mod:`.registry`, :mod:`.op_schemas`, :mod:`.answers`: the propagator's registries and
  caches; what an op is given; the propagator's answers
- :mod:`.dispatch`, :mod:`.op_hooks`, :mod:`.redistribution_hook`, :mod:`.views_in_place`: the
  dispatcher, and what stands in for its steps
- :mod:`.tracing`, :mod:`.compiler`, :mod:`.expansion`: DTensors in compiled programs
- :mod:`.state_dicts`: checkpoints, state dicts, pictures
"""
