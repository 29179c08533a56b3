"""Contestants, in a file per package. Each is made from `data.Data` and has

    prepare(number)     untimed: take the gradient of that step, batches being taken in turn
    run()               timed: the step, or the whole loop
    state(table, rows)  "weights" of these rows, and "first" and "second" moments where they compare

Files are named after what they import, which their workers' environments have and ours may not.
"""
