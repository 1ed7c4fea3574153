"""What every benchmark measures with; it knows no operation, layer or model.

- `options.Parser`: the one parser. `Parser("kernels", __doc__, "dtype rounds out", rounds=24)` adds
  the options of `options.SHARED` that it names, with these defaults; `several` adds one that takes
  several values, `add_ways` adds `--ways` of a registry. `parse` checks the device, and sets dtype,
  folder and torch's threads.
- `case.Case`: what is measured, as a result file has it. `case.Subject`: what is made of it.
- `registry.Registry`: who is compared. `select` takes names and groups; `Provider.make` builds one.
  `Absent`, `WrongResultError`, and `refusal`, what a row says of whoever raised one.
- `contest`: a `Contest` of `Way`s; `admit` checks each against float64, `measure` times in turns
  those that are right. `Rig` is what is measured on; `ceilings`, how fast that is at most.
- `steps`: the same of training steps. `measure` is a layer's; `Steps.admit` builds, checks and
  weighs a way, `Steps.time` times all; `run` measures cases, but those that a file has.
  `checks.Checks` are a step's checks.
- `clock`: times of calls, in turns; percentiles and ratios.
- `results.ResultsFile`: rows in a file.
- `machine`: where, with what and of which code.
"""
