"""The benchmark suite behind `mha-ext bench`: attention, its steps and modules against PyTorch and the machine's peak.

The parts, in the order in which a run meets them:

- `cases`     what a benchmark case is: our function, its baselines and a float64 reference
- `problem`   sizes and options of attention, in our words, in SDPA's and in plain torch
- `suite_*`   list the cases; `suites` lists the suites
- `oracle`    no contestant is measured before its result agrees with the reference
- `timing`    interleaved samples, medians and spread
- `memory`    the extra memory of a call, in a process of its own
- `machine`   the measured peaks, and what a reader needs to know about the machine
- `run`       judges, measures, keeps the figures
- `records`   the figures, and their JSON file
- `report`    tables of a run, and of two runs side by side
- `plot`      a chart of a run (needs matplotlib: the `bench` extra)
"""
