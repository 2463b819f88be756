"""Whole programs of DTensors: recorded, planned, and run as planned.

- :mod:`.numbers`: which value of a program a DTensor is, and which op a call is
- :mod:`.parts`: what a call does to one weight of a list, apart from the others
- :mod:`.recording`: the ops of a program that runs, and what it fixes
- :mod:`.ways`: the ways in which a recorded op can run, by asking and by running it
- :mod:`.planned`: brings values to where a plan wants them, while a program runs
- :mod:`.traced`: and while it is compiled
"""
