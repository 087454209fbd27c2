"""Records a run: measures metrics, passes them to loggers, and formats lines for the terminal."""
