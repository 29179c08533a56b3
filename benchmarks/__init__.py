"""What a step costs, next to torch's optimizers and to the bare movement of its bytes.

    python -m benchmarks [sparse|deferred|rows|distributed|host|memory|peers|quality|lazy] [options]

Run it from the root of the repository, on an idle machine. Contenders of one case take turns in one process, on the
same gradients, after a check that they compute the same. The results go to a JSON file, with the machine they were
measured on; those in `results` are what README and docs say.

A suite is a subclass of `suite.Suite`, which `command.SUITES` knows by its name: its parts take cases (`cases`), check
that contenders agree (`contenders`), time them (`timing`) and keep what was measured, which becomes tables (`report`),
bars and JSON. `figures` makes of the JSON files what `pages` puts into the docs.
"""
