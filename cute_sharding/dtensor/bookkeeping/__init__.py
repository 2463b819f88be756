"""What is kept of this process: the settings, what was answered and moved, which meshes have gone
their own way, which torch runs.

Plain values behind locks. Nothing here knows a rule, and nothing of torch is touched but to ask its
version and its process group.

- :mod:`.versions`: the releases that were checked
- :mod:`.settings`: what is switched on, as a value
- :mod:`.stats`: counts, and the log
- :mod:`.ledger`: which meshes hold tensors that torch would have laid out otherwise
- :mod:`.locks`: locks that a fork does not leave held
"""
