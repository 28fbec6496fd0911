"""Each figure that the README states: a command that prints it beside its peer."""
