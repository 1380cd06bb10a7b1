"""What a configuration needs of its machines, estimated before it runs: memory, speed, waiting, and the bottleneck.

    configuration, model's config.json -> memory and operations (service.learn.estimate) --+
    lengths and times, of a run or assumed -> `work` --------------------------------------+-> `forecast` -> `page`
    a GPU's rates, or this machine's -> `machine` -----------------------------------------+

`binding` decides from seconds per part which side of a run waits for the other; it is used for measured figures too.
"""
