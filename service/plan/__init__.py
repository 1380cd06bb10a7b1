"""Estimates the memory, the speed, the waiting times and the bottleneck of a run from its configuration.

    configuration, model's config.json -> memory and operations (service.learn.estimate) --+
    lengths and times, of a run or assumed -> `work` --------------------------------------+-> `forecast` -> `page`
    a GPU's rates, or this machine's -> `machine` -----------------------------------------+

`binding` decides from the predicted or measured seconds of each part which side of a run waits for the other side.
"""
