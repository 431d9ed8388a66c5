"""The command line; commands are imported when they run."""
