"""Redistribution: from a local tensor and two specs to the steps of a plan, run.

Data moves here; elsewhere only torch's own steps move any, the scatter with which state is
distributed (:mod:`..extras.state`), and the exchange of a movement op
(:mod:`..movement.running`). Whoever is asked answers alike on all ranks: what is sent, and
in which group, must not depend on what one rank alone knows.

- :mod:`.placements`: placements as cuts of the algebra, and back
- :mod:`.ranks`, :mod:`.groups`: ranks of a mesh; the process groups at hand
- :mod:`.reading`: how the _StridedShard placements of a tensor are to be read
- :mod:`.packing`, :mod:`.executor`: what each rank sends and receives; sending it
- :mod:`.together`: steps of several tensors' plans, run at once
- :mod:`.dynamic`: one op of a graph that plans and runs anew in each call
- :mod:`.on_symbols`: a plan where sizes are symbols: by steps that the compiler sees, or by that op
- :mod:`.stock`: where torch itself redistributes rightly
- :mod:`.foreign`: where reductions by placements' own methods stand among the steps of a plan
- :mod:`.places`: what ops receive where they are answered, beside torch's own rules
- :mod:`.words`: what the log says
- :mod:`.redistribute`: the whole of it
- :mod:`.lists`: of several tensors, together where they can be
"""
