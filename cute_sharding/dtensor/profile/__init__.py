"""What a program sends, as it runs: every collective, and the line of the program that it runs for.

Ops are watched; none is changed, and nothing is kept once the ``with`` block has ended.

- :mod:`.amounts`: the collectives of torch's libraries, a row each: what ranks receive
- :mod:`.places`: which line of the program what runs is for
- :mod:`.recorder`: all collectives inside a ``with`` block
"""
