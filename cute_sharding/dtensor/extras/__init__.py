"""What devices hold: what is saved, loaded and shown.

Local tensors are read and written here, each rank its own.

- :mod:`.mapped`: inputs of ``distribute_tensor`` and ``local_map``, and the global shape of
  ``local_map``'s results on uneven shards
- :mod:`.state`: checkpoints, state dicts and pictures
"""
