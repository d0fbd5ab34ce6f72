"""What the command line can do: one file a command."""
