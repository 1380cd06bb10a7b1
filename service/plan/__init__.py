"""What a configuration needs of its machines, estimated before it runs: memory, speed, waiting, and the bottleneck.

    configuration, model's config.json -> memory and operations (service.learn.estimate) --+
    lengths and times, of a run or assumed -> `work` --------------------------------------+-> `forecast` -> `page`
    a GPU's rates, or this machine's -> `machine` -----------------------------------------+

`binding` is the plain model of who waits for whom; it serves measured figures as well.
"""
