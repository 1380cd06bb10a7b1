"""`baton doctor`: finds what is wrong with the machines of a cluster before a run starts on them.

facts       properties of one machine, measured on it `facts.py`
findings    what is wrong, and what to do             `findings.py`
"""
