"""Plans a run before it costs anything: memory, time, money, several GPUs, and the fastest
settings."""
