"""Where replies state their answers, comparisons that may take long, and the worker processes that make them.

A comparison is a function named as module:function, whose arguments and result can be pickled. Modules here import
nothing from the rest of the harness, so that a worker starts quickly and stays small.
"""
