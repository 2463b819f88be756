"""What devices hold: writes to views that are copies, and what is saved, loaded and shown.

Local tensors are read and written here, each rank its own.

- :mod:`.copies`: copies of what they are views of, up to date when they are read
- :mod:`.writes`: what is written to a copy reaches what it is a copy of
- :mod:`.mapped`: the global shape of what ``local_map`` makes of uneven shards
- :mod:`.state`: checkpoints, state dicts and pictures
"""
