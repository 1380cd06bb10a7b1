"""`baton doctor`: what is wrong with the machines of a cluster before a run starts on them.

facts       what one machine is: measured on it       `facts.py`
findings    what is wrong, and what to do             `findings.py`
"""
