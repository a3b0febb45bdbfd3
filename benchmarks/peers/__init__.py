"""mha_ext beside the attention of other libraries, on CPU, in one run: `python -m benchmarks.peers`.

The parts:

- `task`      what is computed: kinds of call, sizes, inputs, the formula in plain torch
- `peer`      the protocol that every library is put behind
- `peer_*`    one library each; `field` lists them
- `measure`   turns tasks and peers into cases of `mha_ext.bench`, which checks and times them
- `report`    the tables
- `plot`      the chart
"""
