"""Trinity-RFT's files: recognised by their sections, and turned into a RunConfig key by key.

`keys.py` and its parts are the table of every key with its fate; `translate.py` does what a key's fate leaves to code,
each part of a file in a module of its own. Nothing else knows Trinity's words.
"""
