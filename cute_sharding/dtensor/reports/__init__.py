"""Reports: what redistributions move or would move, and whether all of it works here.

They ask the other rooms and leave them as they were.

- :mod:`.plan`: plans without data
- :mod:`.stock`: what torch's own redistribution would do
- :mod:`.stats`: what was counted
- :mod:`.check`: two programs run on both rules
"""
