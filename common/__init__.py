"""The ground floor of all commands: configuration, ranks, machine, clock, files, and helpers. It
imports no other package."""
