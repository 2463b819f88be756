"""What this process keeps: the settings, counts of answers and redistributions, releases of torch.

Plain values behind locks. Nothing here knows a rule, and of torch only its version is read.

- :mod:`.versions`: the releases that were checked
- :mod:`.settings`: the settings in force, as a value
- :mod:`.stats`: counts, and the log, which says each thing once; names in errors
- :mod:`.kept`: the list of all that is kept from one op to the next, and how to empty it
- :mod:`.locks`: locks that a fork does not leave held
"""
