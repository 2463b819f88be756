"""The only room with torch's private names: a new release of torch changes only these files.

Each file reaches into one part of torch, and says into which and what may be touched there. Nothing
outside this room takes a name of torch that begins with an underscore from a module (a test checks
this). Rules, plans and answers are passed in. This room decides only what torch's own rules amount
to (does one keep any cut, is an op pointwise), and the order of a compiler's collectives.

:mod:`.patches` is the table of what is replaced in torch. If a torch lacks a row without which
results would be wrong, nothing is replaced; other rows that it lacks are left out. All of it can be
put back. :mod:`.used` is the table of what is called and not replaced. The releases that were
checked are in :mod:`..bookkeeping.versions`.

- :mod:`.patches`, :mod:`.used`, :mod:`.patch`: what is replaced and why; what is called; replacing
  it and putting it back
- :mod:`.tensor_specs`, :mod:`.symints`, :mod:`.local_tensors`: placements and specs; symbolic
  sizes; local tensors, and reads of them (:mod:`.read_hook`)
- :mod:`.dispatch_modes`, :mod:`.communication`, :mod:`.scatters`: modes; meshes, their groups and
  collectives. :mod:`.observing`: the ops and collectives that run for a program's lines, and who is
  told of them
- :mod:`.op_schemas`: an op's arguments, which of them tell its calls apart, the propagator's
  registries and caches, and functions in place of its steps
- :mod:`.dispatch`, :mod:`.redistribution_hook`: the dispatcher; :mod:`.composites`: what comes
  before it; :mod:`.indices`, :mod:`.mixed_lists`: plain tensors beside DTensors;
  :mod:`.forward_mode`: their tangents
- :mod:`.compiler`, :mod:`.expansion`: DTensors in compiled programs, and views that leave these;
  :mod:`.collective_order`: the order of their collectives; :mod:`.joined`: fewer of them;
  :mod:`.timeline`: what a graph computes and holds
- :mod:`.state_dicts`, :mod:`.given_placements`: checkpoints, state dicts, pictures; functions with
  fixed placements for their inputs; :mod:`.fully_sharded`: parameters that FSDP keeps
"""
