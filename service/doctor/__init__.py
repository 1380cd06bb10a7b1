"""`baton doctor`: finds what is wrong with the machines of a cluster before a run starts on them.

`facts.py`       measures the properties of one machine, on the machine itself
`findings.py`    lists the faults of the measured machines, with remedies
"""
