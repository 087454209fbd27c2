"""What a run tells about itself: metrics, loggers, and lines for the terminal."""
