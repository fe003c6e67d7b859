"""One module per command: `add(commands)` states its arguments, `run(args)` is one API call and prints. See planner/cli.py."""
