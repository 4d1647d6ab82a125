"""The commands of cli.py that are no more than a door to another room."""
