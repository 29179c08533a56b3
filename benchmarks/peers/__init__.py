"""The suite `peers`: what a user would take instead of rowstep, each in an environment and a process of its own.

    python -m benchmarks peers [options]

One driver (`suite`) asks worker processes for a few timed steps each in turn. The workers run in
environments that know neither torch nor rowstep, so nothing is imported here.
"""
