"""What devices hold: writes to views that are copies, and what is saved, loaded and shown.

Local tensors are read and written here, each rank its own.

- :mod:`.copies`: views that are copies, and brings them up to date when they are read
- :mod:`.memory`: the memory of local tensors
- :mod:`.writes`: takes writes to a copy back to its source
- :mod:`.mapped`: inputs of ``distribute_tensor`` and ``local_map``, and the global shape of
  ``local_map``'s results on uneven shards
- :mod:`.state`: checkpoints, state dicts and pictures
"""
