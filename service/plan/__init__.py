"""Arithmetic about a configuration before it runs: whether it fits into memory, and how long a step may take.

`memory.py`        bytes of a rank's and of an engine's GPU and of a host, by part; refuses what does not fit
`engine.py`        whether an engine's GPUs can divide a model, and its KV cache can hold a request
`splits.py`        the seconds of a step for each split of the GPUs into engines and ranks, as a range
`plan_command.py`  `baton plan`
"""
