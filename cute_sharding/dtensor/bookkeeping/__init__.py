"""What this process keeps: the settings, counts of what was answered and moved, which torch runs.

Plain values behind locks. Nothing here knows a rule, and nothing of torch is touched but to ask its
version.

- :mod:`.versions`: the releases that were checked
- :mod:`.settings`: what is switched on, as a value
- :mod:`.stats`: counts, and the log; :mod:`.telling`: what it has told of; :mod:`.names`: names in
  errors
- :mod:`.kept`: the list of all that is kept from one op to the next, and how it is emptied
- :mod:`.watching`: who is told of what is sent
- :mod:`.locks`: locks that a fork does not leave held
"""
