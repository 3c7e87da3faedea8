"""The parts of `make bench`, a file each: `measure(setting)` gives the lines of one part.

Each runs in a process of its own, so that neither memory nor settings of one reach another.
"""
