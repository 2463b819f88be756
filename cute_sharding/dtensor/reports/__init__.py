"""Reports: what redistributions move or would move, and whether all of it works here.

They ask the other rooms and leave them as they were.

- :mod:`.plan`: plans without data
- :mod:`.stock`: what torch's own redistribution would do
- :mod:`.rule`: what torch's own rule makes of an op
- :mod:`.stats`: what was counted; :mod:`.table`: as a dict and as a table
- :mod:`.check`: two programs run on both rules
"""
