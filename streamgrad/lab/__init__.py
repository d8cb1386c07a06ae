"""The laboratory: tasks, training, experiments, the report, the command line. The library does not import it."""
