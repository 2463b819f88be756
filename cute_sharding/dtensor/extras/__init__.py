"""What devices hold: writes to views that are copies, and what is saved, loaded and shown.

Local tensors are read and written here, each rank its own.

- :mod:`.copies`: copies of what they are views of, up to date when they are read
- :mod:`.memory`: what they lie in
- :mod:`.writes`: what is written to a copy reaches what it is a copy of
- :mod:`.mapped`: what ``distribute_tensor`` and ``local_map`` are given, and the global shape of
  what the latter makes of uneven shards
- :mod:`.state`: checkpoints, state dicts and pictures
"""
