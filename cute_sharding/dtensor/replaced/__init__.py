"""The only room with torch's private names: a new torch release is these files to mend.

Each file reaches into one part of torch, and says into which and what may be touched there. Nothing
outside this room takes a name of torch that begins with an underscore from a module (a test holds
it). Rules, plans and answers are handed in; what is decided here is only what torch's own rules
come to (does one keep any cut, is an op pointwise), and in what order a compiler's collectives run.

What of torch is replaced is one table, :mod:`.patches`. A row without which nothing would be right
is there, or nothing is replaced; the others are left out where torch lacks them. All of it can be
put back. What is called and not replaced is another table, :mod:`.used`. The releases that were
checked are in :mod:`..bookkeeping.versions`.

- :mod:`.patches`, :mod:`.used`, :mod:`.patch`: what is replaced and why; what is called; replacing
  it and putting it back
- :mod:`.tensor_specs`, :mod:`.symints`, :mod:`.local_tensors`: placements and specs; sizes that are
  symbols; what a rank holds
- :mod:`.dispatch_modes`, :mod:`.process_groups`, :mod:`.collective_ops`, :mod:`.scatters`: modes;
  meshes and their groups; collectives. :mod:`.observing`, :mod:`.watching`: what runs below a
  program's lines, and who is told of it
- :mod:`.registry`, :mod:`.op_schemas`: the propagator's registries and caches; what an op is given
- :mod:`.dispatch`, :mod:`.op_hooks`, :mod:`.redistribution_hook`: the dispatcher, and what stands
  in for its steps; :mod:`.composites`: what comes before it; :mod:`.read_hook`: reads of a local
  tensor
- :mod:`.tracing`, :mod:`.compiler`, :mod:`.compiler_guards`, :mod:`.expansion`: DTensors in
  compiled programs; :mod:`.view_replay`: views that leave these; :mod:`.collective_order`: the
  order of their collectives
- :mod:`.state_dicts`, :mod:`.given_placements`: checkpoints, state dicts, pictures; functions that
  are told which placements they are given; :mod:`.fully_sharded`: parameters that FSDP keeps
"""
