"""The benchmark suite behind `mha-ext bench`: every step and module against PyTorch, and against the machine's peak.

The parts, in the order in which a run meets them:

- `cases`     what a benchmark case is: our function, its baselines and a float64 reference; `suite_*` list them
- `oracle`    no contestant is timed before its result agrees with the reference
- `timing`    interleaved samples, medians and spread
- `run`       judges, times, keeps the figures, writes and reads JSON
- `machine`   the measured peaks, and what a reader needs to know about the machine
- `report`    tables of a run, and of two runs side by side
- `plot`      a bar chart of a run (needs matplotlib: the `bench` extra)
"""
