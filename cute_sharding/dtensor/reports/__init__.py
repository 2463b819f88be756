"""Reports: what a redistribution would move, and whether all of it works here.

They ask the other rooms and leave them as they were.

- :mod:`.plan`: plans without data
- :mod:`.check`: two programs run on both rules
"""
