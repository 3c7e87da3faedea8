"""Run files of Trinity-RFT, translated into a RunConfig key by key.

`schema` and its parts list every key. `translate` translates a whole file, with a module for each part of it. No other
package knows Trinity's vocabulary.
"""
